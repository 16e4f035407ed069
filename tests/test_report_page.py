"""The page of `make report`, in a real browser and without: it needs nothing else, and nothing sticks out."""

import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.manifest import write_manifest
from pipeline.measure.inventory import read_dataset
from pipeline.measure.report import ReportSpec, build_report
from pipeline.measure.report_page import count_nouns, headline, render_page, split_command
from pipeline.measure.shown_clips import StreamSpec
from pipeline.online import AugmentSpec, WindowSpec
from tests.folders import record_of, write_folder
from tests.test_report import write_mixed

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STREAM = StreamSpec(window=WindowSpec(frames=8), augment=AugmentSpec(size_px=56))
NASTY = "<script>document.title='broken'</script> \"quoted\" & 'single' {{ 7 * 7 }}"
LONG = "ALongNameOfAClassWithoutAnyBlankInItThatIsWiderThanASmallScreenOnceItIsWrittenOutInFull"

PROBE = """
<!doctype html><html><body style="margin:0">
<iframe id="page" style="border:0;display:block;width:%(width)dpx;height:%(height)dpx" srcdoc="%(page)s">
</iframe>
<script>
addEventListener("load", () => {
  const view = document.getElementById("page").contentWindow, root = view.document.documentElement;
  const boxed = (one) => one.parentElement.closest(".scroll") !== null;
  const out = [...root.querySelectorAll("body *")].filter((one) =>
    !boxed(one) && one.getBoundingClientRect().right > view.innerWidth + 0.5);
  const spilt = [...root.querySelectorAll("body *")].filter((one) => !boxed(one) && one.clientWidth > 0 &&
    one.scrollWidth > one.clientWidth + 1 && !one.matches(".scroll, .bar"));
  const found = document.createElement("pre");
  found.id = "found";
  found.textContent = JSON.stringify({
    width: view.innerWidth, scroll: root.scrollWidth, title: view.document.title,
    out: out.map((one) => one.outerHTML.slice(0, 120)),
    spilt: spilt.map((one) => one.outerHTML.slice(0, 120)),
    broken: [...root.querySelectorAll("img")].filter((one) => one.complete && !one.naturalWidth).length,
    images: root.querySelectorAll("img").length, tables: root.querySelectorAll(".scroll table").length,
  });
  document.body.append(found);
});
</script></body></html>
"""


def write_awkward(root):
    """A dataset whose names are long, wide, or HTML; it has failures, damage, leaks and many classes."""
    classes = [NASTY, LONG, *(f"Class{number:03d}" for number in range(60))]
    records = []
    for label, name in enumerate(classes):
        for clip in range(2 if label < 4 else 1):
            key = f"c{label:02d}/{LONG}_{clip}" if label == 1 else f"c{label:02d}/v{clip}"
            write_folder(root / "awkward" / "frames", key, frames=9 + label, first=label)
            status = "partial" if label == 2 else "ok"
            side = "test" if clip or label % 5 == 0 else "train"
            error = NASTY if status == "partial" else None
            records.append(
                record_of(
                    key,
                    9 + label,
                    label=label,
                    class_name=name,
                    group=f"{NASTY}{label}",
                    status=status,
                    error=error,
                    splits={f"split{number:02d}": side for number in (1, 2, 3)},
                )
            )
    failed = {"frames": "", "status": "failed", "error": LONG + NASTY, "time_source": ""}
    sides = dict.fromkeys(("split01", "split02", "split03"))
    records.append(record_of(f"{NASTY}/x", 0, label=0, class_name=NASTY, splits=sides, **failed))
    path = root / "manifests" / "awkward.parquet"
    write_manifest(path, records, dataset="awkward", classes=classes, spec={"quality": 90, "note": NASTY})


def page_of(root, name, stream=STREAM, **spec):
    dataset = read_dataset(name, data=root, manifests=root / "manifests")
    return render_page(build_report(dataset, stream, ReportSpec(**spec)))


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    root = tmp_path_factory.mktemp("awkward")
    write_awkward(root)
    return page_of(root, "awkward")


class Tags(HTMLParser):
    """Every tag with its attributes; and whether those that need one have an end."""

    VOID = frozenset({"meta", "img", "br", "line", "rect"})

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag == "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_every_tag_is_closed_and_there_is_no_script(awkward):
    tags = Tags(awkward)
    assert tags.open == []
    assert {tag for tag, _ in tags.found} & {"script", "link", "iframe", "object", "base"} == set()
    assert not [name for _, attrs in tags.found for name in attrs if name.startswith("on")]


def test_names_and_errors_are_shown_as_they_are_and_never_run(awkward):
    assert "<script" not in awkward
    assert "{{ 7 * 7 }}" in awkward
    text = "".join(Tags(awkward).text)
    assert text.count(NASTY) > 5
    assert LONG + NASTY in text


def test_the_page_needs_no_network(awkward):
    for tag, attrs in Tags(awkward).found:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            if name in attrs:
                assert attrs[name].startswith(("#", "data:")), (tag, name, attrs[name][:80])
    assert not re.search(r"https?://|@import|url\(", awkward)
    assert "default-src 'none'" in awkward


def test_every_picture_has_words_and_its_own_size(awkward):
    pictures = [attrs for tag, attrs in Tags(awkward).found if tag == "img"]
    assert len(pictures) > 60
    for attrs in pictures:
        kind, _, data = attrs["src"].partition(",")
        assert kind == "data:image/jpeg;base64"
        picture = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
        assert picture.shape[:2] == (int(attrs["height"]), int(attrs["width"]))
        assert attrs["alt"]


def test_a_page_without_a_manifest_says_so(tmp_path):
    write_mixed(tmp_path)
    (tmp_path / "manifests" / "mixed.parquet").unlink()
    page = page_of(tmp_path, "mixed", None)
    assert "none yet at" in page
    assert "Without a manifest nothing is counted" in page
    assert 'id="videos"' in page
    assert 'id="clips"' not in page


def test_a_page_of_nothing_is_a_page(tmp_path):
    (tmp_path / "empty").mkdir()
    page = page_of(tmp_path, "empty", None)
    assert Tags(page).open == []
    assert "This works, with 4 warnings" in page


def test_a_dataset_without_fault_says_so_and_what_comes_next(tmp_path):
    from tests.training_runs import write_shades

    write_shades(tmp_path)
    dataset = read_dataset("shades", data=tmp_path, manifests=tmp_path / "manifests")
    stream = StreamSpec(window=WindowSpec(frames=3), augment=AugmentSpec(size_px=16))
    report = build_report(dataset, stream, ReportSpec())
    # Of these folders all have one source's content by their frames.json.
    assert [check.name for check in report.checks if check.verdict != "ok"] == ["duplicates"]
    assert headline(report) == "This works, with 1 warning"


def test_tables_are_cut_at_the_limit_and_say_so(tmp_path):
    write_awkward(tmp_path)
    page = page_of(tmp_path, "awkward", max_classes=10, max_rows=1, max_strips=5, clips=0)
    assert "And 52 further classes." in page
    assert "57 classes left out." in page
    assert len(page) < len(page_of(tmp_path, "awkward"))


@given(st.text(alphabet="abc <>&=;,`-", max_size=40))
def test_an_advice_is_split_into_words_and_a_command_without_loss(words):
    assert split_command(words) == (words, "")
    found = split_command(f"{words} make frames DATASET=a 'ARGS=--fps 12.5'")
    assert found == (words.rstrip(), "make frames DATASET=a 'ARGS=--fps 12.5'")


def test_nouns_are_counted():
    assert [count_nouns(count, "set") for count in (0, 1, 1000)] == ["0 sets", "1 set", "1,000 sets"]


# In a browser.


def chromium(*args):
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-extensions")
    done = subprocess.run(
        [BROWSER, *options, "--no-first-run", "--virtual-time-budget=3000", *args],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout


def probe(tmp_path, page, width):
    """What the browser makes of a page in a view of this width; a window itself cannot be below 500 px."""
    wrapper = tmp_path / f"{width}.html"
    wrapper.write_text(PROBE % {"width": width, "height": 900, "page": html.escape(page)})
    home = f"--user-data-dir={tmp_path / 'home'}"
    dom = chromium("--dump-dom", f"--window-size={max(width, 520)},900", home, wrapper.as_uri())
    picture = tmp_path / f"{width}.png"
    chromium(f"--screenshot={picture}", f"--window-size={max(width, 520)},900", home, wrapper.as_uri())
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))
    return found, cv2.imread(str(picture))[:, :width]


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@needs_browser
def test_the_browser_sees_what_sticks_out(tmp_path, awkward):
    """So that the next test means something."""
    wide = (
        '<div style="width:500px">wide</div><p style="width:9em;white-space:nowrap">longer than its box</p>'
    )
    found, _ = probe(tmp_path, awkward.replace("</main>", f"{wide}</main>"), 400)
    assert found["scroll"] > 400
    assert [one[:20] for one in found["out"]] == ['<div style="width:50']
    assert any(one.startswith('<p style="width:9em') for one in found["spilt"])


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser_nothing_sticks_out_and_no_script_runs(tmp_path, awkward, width):
    found, picture = probe(tmp_path, awkward, width)
    assert found["width"] == width
    assert found["scroll"] == width
    assert found["out"] == found["spilt"] == []
    assert found["title"] == "awkward: report"
    assert found["broken"] == 0
    assert found["images"] > 60
    assert found["tables"] >= 5
    assert picture.shape[1] == width
    # Something is there down to the fold: text, and cards that are not of the page's own colour.
    assert all(len(np.unique(part)) > 20 for part in np.array_split(picture, 4))
