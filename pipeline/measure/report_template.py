"""The page of `make report` as a Jinja template: sections that are left out where there is nothing to say."""

_MACROS = """
{%- macro strip(one, with_class) %}
<figure>
{% if one.error %}
  <p class="card error small"><span class="tag">cannot be shown</span> {{ one.error }}</p>
{% else %}
  <img src="{{ one.image }}" width="{{ one.size_wh[0] }}" height="{{ one.size_wh[1] }}" loading="lazy"
       alt="{{ one.times_s|length }} frames of {{ one.video }}, from the first to the last">
  <ol class="times" aria-label="seconds since the first frame">
    {% for time_s in one.times_s %}<li>{{ time_s|seconds }}</li>{% endfor %}
  </ol>
{% endif %}
  <figcaption>{{ one.video }}
    <span class="soft">{% if with_class %}{{ one.class_name }}, {% endif %}
    {% if one.num_frames %}{{ one.num_frames|counted("frame") }}{% endif %}</span>
    {% if one.status == "partial" %}<span class="tag warning">partial</span>{% endif %}
  </figcaption>
</figure>
{% endmacro %}
{%- macro chart(title, laid_out, unit) %}
<div class="card">
  <h3>{{ title }}</h3>
  <svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ title }}: a histogram of videos">
    {% for tick in laid_out.y_ticks %}
    <line class="grid" x1="{{ laid_out.left }}" x2="{{ laid_out.right }}"
      y1="{{ tick.at }}" y2="{{ tick.at }}"/>
    <text x="{{ laid_out.left - 6 }}" y="{{ tick.at + 4 }}" text-anchor="end">{{ tick.text }}</text>
    {% endfor %}
    {% for one in laid_out.columns %}
    <rect x="{{ one.x }}" y="{{ one.y }}" width="{{ one.width }}" height="{{ one.height }}"><title>
      {{- one.title }}</title></rect>
    {% endfor %}
    {% for tick in laid_out.x_ticks %}
    <text x="{{ tick.at }}" y="{{ laid_out.bottom + 16 }}" text-anchor="middle">{{ tick.text }}</text>
    {% endfor %}
  </svg>
  <p class="soft small">Videos by {{ unit }}{% if laid_out.is_open %}; the last column has all beyond, too
    {%- endif %}.</p>
</div>
{% endmacro %}
{%- macro bars(title, values, note) %}
<div class="card">
  <h3>{{ title }}</h3>
  <div class="rows">
    {% for bar, share in values %}
    <span>{{ bar.name }}</span>
    <span class="bar" aria-hidden="true"><span class="train" style="width:{{ share }}%"></span></span>
    <span class="number">{{ bar.count|number }}</span>
    {% endfor %}
  </div>
  <p class="soft small" style="margin-top:.75rem">{{ note }}</p>
</div>
{% endmacro %}
{%- macro reasons(rows, num_reasons, caption) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ caption }}">
<table>
  <thead><tr><th class="number">Videos</th><th>What went wrong</th><th>The first</th></tr></thead>
  <tbody>
  {% for row in rows %}
  <tr><td class="number">{{ row.videos|number }}</td><td class="wide">{{ row.error }}</td>
    <td class="text">{{ row.first }}</td></tr>
  {% endfor %}
  </tbody>
</table>
</div>
{{ rest(num_reasons - rows|length, "further reasons") }}
{% endmacro %}
{%- macro advice(text) %}
{% set words, command = text|command %}{{ words }} {% if command %}<code>{{ command }}</code>{% endif %}
{% endmacro %}
{%- macro rest(count, what) %}
{% if count > 0 %}<p class="soft small">And {{ count|number }} {{ what }}.</p>{% endif %}
{% endmacro %}
"""

_HEAD = """
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ name }}: report</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
  <h1>{{ name }}</h1>
  <p class="soft">What is in this dataset, what is wrong with it, and what training sees of it.</p>
  <div class="card verdict {{ tone }}">
    <h2>{{ headline }}</h2>
    {% if step %}<p><strong>{{ step.name|capitalize }}:</strong> {{ step.found }}.</p>{% endif %}
    <p><strong>Next:</strong> {{ advice(next) }}</p>
  </div>
  {% if facts %}
  <dl class="facts">
    {% for term, fact in facts %}<div><dt>{{ term }}</dt><dd>{{ fact }}</dd></div>{% endfor %}
  </dl>
  {% endif %}
  <nav class="small" aria-label="Sections">
    <a href="#checks">Checks</a>
    {% if stats %}<a href="#classes">Classes</a> <a href="#histograms">Lengths, sizes, rates</a>{% endif %}
    {% if has_trouble %}<a href="#trouble">Trouble</a>{% endif %}
    {% if report.strips %}<a href="#videos">Videos</a>{% endif %}
    {% if stats %}<a href="#clips">Clips</a>{% endif %}
  </nav>
</header>

<section id="checks">
  <h2>Checks</h2>
  <ul class="checks">
    {% for check in report.checks %}
    <li class="small"><strong>{{ check.name }}</strong>
      <span><span class="tag {{ check.verdict }}">{{ check.verdict }}</span></span>
      <span class="found">{{ check.found }}</span>
      {% if check.advice %}<span class="do soft">{{ advice(check.advice) }}</span>{% endif %}</li>
    {% endfor %}
  </ul>
</section>
"""

_COUNTS = """
{% if stats %}
<section id="classes">
  <h2>Classes and splits</h2>
  {% if stats.sides %}
  <div class="scroll" tabindex="0" role="region" aria-label="Splits">
  <table>
    <thead><tr><th>Split</th><th>Side</th><th class="number">Videos</th><th class="number">Frames</th>
      <th class="number">Time</th><th class="number">Classes</th>
      <th class="number">Leaking groups</th></tr></thead>
    <tbody>
    {% for side in stats.sides if side.videos or side.side != "neither" %}
    <tr><th scope="row">{{ side.split }}</th><td>{{ side.side }}</td>
      <td class="number">{{ side.videos|number }}</td>
      <td class="number">{{ side.frames|number }}</td><td class="number">{{ side.seconds|duration }}</td>
      <td class="number">{{ side.classes|number }}</td>
      <td class="number">{{ stats.leaks.get(side.split, ())|length|number if side.side == "train" }}</td></tr>
    {% endfor %}
    </tbody>
  </table>
  </div>
  {% endif %}
  <p class="legend soft small">
    {% if has_split %}<span><i class="train"></i>{{ split }} train</span>
    <span><i class="test"></i>{{ split }} test</span>
    <span><i class="none"></i>neither</span>{% else %}<span><i class="none"></i>videos</span>{% endif %}
  </p>
  <div class="scroll" tabindex="0" role="region" aria-label="Classes">
  <table>
    <thead><tr><th class="number">Label</th><th>Class</th><th class="number">Videos</th><th>By side</th>
      <th class="number">Frames</th><th class="number">Time</th><th class="number">Frames in a video</th>
      {% for name in stats.splits %}<th class="number">{{ name }}</th>{% endfor %}
      <th class="number">Partial</th><th class="number">Failed</th></tr></thead>
    <tbody>
    {% for one, parts in classes %}
    <tr><td class="number">{{ one.label }}</td><th scope="row" class="text">{{ one.name }}</th>
      <td class="number">{{ one.videos|number }}</td>
      <td><span class="bar" aria-hidden="true">{% for side, share in parts if share %}<span class="{{ side }}"
        style="width:{{ share }}%"></span>{% endfor %}</span></td>
      <td class="number">{{ one.frames|number if one.videos }}</td>
      <td class="number">{{ one.seconds|duration if one.videos }}</td>
      <td class="number">{% if one.shortest < one.longest %}{{ one.shortest|number }} to {% endif %}
        {{ one.longest|number if one.longest }}</td>
      {% for train, test in one.sides %}
      <td class="number">{% if train or test %}{{ train|number }} / {{ test|number }}{% endif %}</td>
      {% endfor %}
      <td class="number">{{ one.partial|number if one.partial }}</td>
      <td class="number">{{ one.failed|number if one.failed }}</td></tr>
    {% endfor %}
    </tbody>
  </table>
  </div>
  {{ rest(stats.classes|length - classes|length, "further classes") }}
</section>

<section id="histograms">
  <h2>Lengths, sizes, rates</h2>
  <div class="charts">
    {{ chart("Length in frames", lengths, "number of frames") }}
    {{ chart("Length in seconds", durations, "seconds from first to last frame") }}
    {% if rates %}{{ chart("Frames per second", rates, "frames per second") }}
    {% else %}{{ bars("Frames per second", common_rates, "Videos by rate, from their frames' times.") }}
    {% endif %}
    {{ bars("Size of the stored frames", sizes, "Videos by width and height in pixels.") }}
  </div>
</section>
{% endif %}
"""

_TROUBLE = """
{% if has_trouble %}
<section id="trouble">
  <h2>Trouble</h2>
  {% if report.failures %}
  <h3>{{ stats.failed|number }} failed, which have no frames</h3>
  {{ reasons(report.failures, report.num_reasons, "Failed videos") }}
  {% endif %}
  {% if report.damages %}
  <h3 class="part">{{ stats.partial|number }} partial: decoded with errors, all that decoded is kept</h3>
  {{ reasons(report.damages, report.num_damages, "Partial videos") }}
  <div class="strips">{% for one in report.damaged_strips %}{{ strip(one, true) }}{% endfor %}</div>
  {% endif %}
  {% for name, groups in stats.leaks.items() %}
  <h3 class="part">{{ groups|length|counted("leaking group") }}: on both sides of {{ name }}</h3>
  <div class="scroll" tabindex="0" role="region" aria-label="Groups on both sides of {{ name }}">
  <table>
    <thead><tr><th>Group</th><th class="number">Train</th><th class="number">Test</th></tr></thead>
    <tbody>
    {% for one in groups[:most] %}
    <tr><th scope="row">{{ one.group }}</th><td class="number">{{ one.train|number }}</td>
      <td class="number">{{ one.test|number }}</td></tr>
    {% endfor %}
    </tbody>
  </table>
  </div>
  {{ rest(groups|length - most, "further groups") }}
  {% endfor %}
  {% if report.duplicates %}
  <h3 class="part">{{ report.duplicates|length|counted("set") }} of videos with the same content</h3>
  <div class="scroll" tabindex="0" role="region" aria-label="Duplicates">
  <table>
    <thead><tr><th>Videos</th><th>Harm</th></tr></thead>
    <tbody>
    {% for one in report.duplicates[:most] %}
    <tr><td class="wide">{% for video in one.videos[:6] %}{{ video }}{% if one.sides[loop.index0] %}
      <span class="soft">({{ one.sides[loop.index0] }})</span>{% endif %}<br>{% endfor %}
      {{ rest(one.videos|length - 6, "more") }}</td>
      <td>{% if one.is_across_sides %}<span class="tag error">on both sides</span>{% endif %}
      {% if one.is_across_classes %}<span class="tag error">{{ "more than one class" }}</span>{% endif %}
      {% if not (one.is_across_sides or one.is_across_classes) %}counts twice{% endif %}</td></tr>
    {% endfor %}
    </tbody>
  </table>
  </div>
  {{ rest(report.duplicates|length - most, "further sets") }}
  {% endif %}
  {% if report.folders and report.folders.uneven %}
  <h3 class="part">{{ report.folders.uneven|length|counted("video") }} with uneven times</h3>
  <div class="scroll" tabindex="0" role="region" aria-label="Uneven times">
  <table>
    <thead><tr><th>Video</th><th>What it is</th><th class="number">Uneven gaps</th>
      <th class="number">Shortest</th><th class="number">Longest</th>
      <th class="number">Mean rate</th></tr></thead>
    <tbody>
    {% for one in report.folders.uneven[:most] %}
    <tr><th scope="row" class="text">{{ one.video }}</th>
      <td>{{ "variable rate" if one.is_variable else "missing frames" }}</td>
      <td class="number">{{ one.uneven|number }} of {{ one.gaps|number }}</td>
      <td class="number">{{ one.shortest_s|milliseconds }}</td>
      <td class="number">{{ one.longest_s|milliseconds }}</td>
      <td class="number">{{ "%.2f fps"|format(one.fps) }}</td></tr>
    {% endfor %}
    </tbody>
  </table>
  </div>
  {{ rest(report.folders.uneven|length - most, "further videos") }}
  {% endif %}
  {% if report.folders and report.folders.num_unreadable %}
  <h3 class="part">{{ report.folders.num_unreadable|counted("folder") }} of frames that cannot be read</h3>
  <ul class="small">{% for error in report.folders.unreadable[:most] %}<li>{{ error }}</li>{% endfor %}</ul>
  {% endif %}
</section>
{% endif %}
"""

_PICTURES = """
{% if report.strips %}
<section id="videos">
  <h2>Videos</h2>
  <p class="soft">A few of each class: frames from the first to the last, with seconds since the first.
  {% if unshown > 0 %}{{ unshown|counted("class", "classes") }} left out.{% endif %}</p>
  {% for name, strips in report.strips %}
  <div class="part"><h3>{{ name }}</h3>
  <div class="strips">{% for one in strips %}{{ strip(one, false) }}{% endfor %}</div></div>
  {% endfor %}
</section>
{% endif %}

{% if stats %}
<section id="clips">
  <h2>What training sees</h2>
  <p class="soft">The first clips of the first epoch, as the model is given them: cut, resized, perhaps
  mirrored, the same for all frames of a clip. {{ clip_words }}</p>
  {% for error in report.clip_errors %}
  <p class="card error small"><span class="tag">no clip</span> {{ error }}</p>
  {% endfor %}
  <div class="cards">
  {% for one in report.clips %}
  <figure>
    <img src="{{ one.image }}" width="{{ one.size_wh[0] }}" height="{{ one.size_wh[1] }}" loading="lazy"
         alt="{{ one.num_shown }} frames of a clip of {{ one.clip.label }}">
    <figcaption><strong>{{ one.clip.label }}</strong>
      <span class="soft">{{ one.num_shown }} of {{ one.clip.times_s|length }} frames,
      from frame {{ one.clip.start|number }},
      {{ one.clip.times_s[0]|seconds }} to {{ one.clip.times_s[-1]|seconds }}
      <br>{{ one.clip.video }}</span></figcaption>
  </figure>
  {% endfor %}
  </div>
</section>
{% endif %}
"""

_FOOT = """
<footer class="soft small">
  {% for line in footnotes %}<p>{{ line }}</p>{% endfor %}
</footer>
</main>
</body>
</html>
"""

TEMPLATE = (_MACROS.strip() + _HEAD.strip() + _COUNTS + _TROUBLE + _PICTURES + _FOOT).replace(
    "\n\n\n", "\n\n"
)
"""Every value in it is escaped by the environment that it is rendered in, but for the style sheet."""
