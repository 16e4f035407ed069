"""A report as one HTML page that needs nothing else: no script, no network, pictures inside."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from pipeline.measure.charts import HEIGHT, WIDTH, format_number, lay_out, shares
from pipeline.measure.checks import count_of, next_step
from pipeline.measure.dataset_stats import ClassStats, DatasetStats
from pipeline.measure.report import Report
from pipeline.measure.report_style import STYLE
from pipeline.measure.report_template import TEMPLATE
from pipeline.online.packfile import format_bytes


def render_page(report: Report) -> str:
    """The page, as text for one file. Names of classes and videos, and errors, may hold anything: escaped."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        number="{:,}".format,
        seconds="{:.2f} s".format,
        milliseconds=lambda seconds: f"{format_number(round(seconds * 1000, 1))} ms",
        duration=format_duration,
        command=split_command,
        counted=count_nouns,
    )
    return environment.from_string(TEMPLATE).render(**_values(report))


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units that they fill.

    >>> [format_duration(seconds) for seconds in (4.04, 59.96, 252, 96_480)]
    ['4.0 s', '1 min 0 s', '4 min 12 s', '26 h 48 min']
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def count_nouns(count: int, noun: str, nouns: str = "") -> str:
    """A count and what is counted.

    >>> count_nouns(1, "group"), count_nouns(2, "class", "classes")
    ('1 group', '2 classes')
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def split_command(advice: str) -> tuple[str, str]:
    """The words of an advice, and the command at its end; either may be empty.

    >>> split_command("keep one of each, then make frames DATASET=a")
    ('keep one of each, then', 'make frames DATASET=a')
    >>> split_command("take fewer --frames")
    ('take fewer --frames', '')
    """
    found = re.fullmatch(r"(.*?)\s*\b(make [a-z]+( \S+=.*)?)", advice)
    return (found[1], found[2]) if found else (advice, "")


def _values(report: Report) -> dict[str, Any]:
    """All that the template names."""
    step, stats = next_step(report.checks), report.stats
    values = {
        "report": report,
        "stats": stats,
        "name": report.dataset.name,
        "style": Markup(STYLE),  # our own text, no value of a user's
        "tone": "ok" if step is None else step.verdict,
        "headline": headline(report),
        "step": step,
        "next": (step.advice or "see the checks below") if step else report.dataset.command("train"),
        "facts": list(_facts(report)),
        "has_trouble": _has_trouble(report),
        "footnotes": list(_footnotes(report)),
        "most": report.spec.max_rows,
        "width": WIDTH,
        "height": HEIGHT,
        "unshown": 0,
    }
    return values if stats is None else values | _counted(report, stats)


def _counted(report: Report, stats: DatasetStats) -> dict[str, Any]:
    """What the template needs where there is a manifest."""
    split = report.spec.split
    shown = stats.classes[: report.spec.max_classes]
    return {
        "split": split,
        "has_split": split in stats.splits,
        "classes": _with_parts(shown, stats.splits.index(split) if split in stats.splits else None),
        "lengths": lay_out(stats.lengths, "frames"),
        "durations": lay_out(stats.durations, "s"),
        "rates": lay_out(stats.rates, "fps") if stats.rates else None,
        "common_rates": shares(stats.common_rates),
        "sizes": shares(stats.sizes),
        "unshown": sum(one.videos > 0 for one in stats.classes) - len(report.strips) if report.strips else 0,
        "clip_words": _clip_words(report),
    }


def headline(report: Report) -> str:
    """The verdict in a few words."""
    errors, warnings = (count_of(report.checks, verdict) for verdict in ("error", "warning"))
    counts = [count_nouns(count, word) for count, word in ((errors, "error"), (warnings, "warning")) if count]
    if errors:
        return f"This does not work yet: {' and '.join(counts)}"
    return f"This works, with {counts[0]}" if counts else "All is well"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    stats, folders = report.stats, report.folders
    if stats is None:
        return
    yield "Videos", f"{stats.videos:,}"
    if stats.failed:
        yield "Failed", f"{stats.failed:,}"
    yield "Frames", f"{stats.frames:,}"
    yield "Time", format_duration(stats.seconds)
    yield "Classes", f"{sum(one.videos > 0 for one in stats.classes):,}"
    if stats.sizes:
        yield ("Size" if len(stats.sizes) == 1 else "Size, mostly"), stats.sizes[0].name
    if stats.common_rates:
        yield ("Rate" if len(stats.common_rates) == 1 else "Rate, mostly"), stats.common_rates[0].name
    if folders and folders.frames:
        yield "Mean frame", format_bytes(folders.frame_bytes // folders.frames)


def _has_trouble(report: Report) -> bool:
    stats, folders = report.stats, report.folders
    if stats is None:
        return False
    in_folders = folders is not None and bool(folders.uneven or folders.num_unreadable)
    return bool(stats.failed or stats.partial or stats.leaks or report.duplicates or in_folders)


def _with_parts(
    classes: Sequence[ClassStats], place: int | None
) -> list[tuple[ClassStats, list[tuple[str, float]]]]:
    """Each class with the parts of its bar: (train, test or none; percentage of the largest class)."""
    most = max((one.videos for one in classes), default=0) or 1
    rows = []
    for one in classes:
        train, test = (0, 0) if place is None else one.sides[place]
        parts = (("train", train), ("test", test), ("none", one.videos - train - test))
        rows.append((one, [(side, round(100 * count / most, 2)) for side, count in parts]))
    return rows


def _clip_words(report: Report) -> str:
    if report.stream is None:
        return ""
    window, (height, width) = report.stream.window, report.stream.augment.size_hw
    step = f"at {window.fps:g} fps" if window.fps else f"at stride {window.stride}"
    if window.mode == "segments":
        step = "one of each segment"
    return f"{window.frames} frames {step}, {width}×{height} pixels, seed {report.stream.seed}."


def _footnotes(report: Report) -> Iterator[str]:
    folders, dataset = report.folders, report.dataset
    if report.stats is None:
        yield "Without a manifest nothing is counted; the videos shown are some of those that have frames."
    elif folders is None:
        yield "Without folders of frames, uneven times and duplicates were not looked for."
    else:
        left_out = "" if folders.is_all else "; --max-folders looks at more"
        yield (
            f"Uneven times and duplicates: frames.json of {folders.looked_at:,} of {folders.total:,} folders "
            f"was looked at{left_out}. Equal videos are those whose files have the same SHA-256."
        )
    if dataset.manifest is not None:
        spec = ", ".join(f"{name}={value}" for name, value in dataset.manifest.spec.items())
        yield f"Options of the frames: {spec or 'none'}."
        yield f"Manifest {dataset.manifest_path}, {dataset.manifest.fingerprint()[:12]}."
    yield f"Made by {dataset.command('report')}."
