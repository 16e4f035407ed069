import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.manifest import read_manifest, write_manifest
from pipeline.offline.layouts import LAYOUTS
from scripts import run
from scripts.build_manifest import describe, main, summarise
from tests.folders import record_of
from tests.test_catalog import fail, make_folder

ROOT = Path(__file__).parents[1]


@pytest.fixture
def places(tmp_path):
    """The options that name the two roots, with a dataset of three videos below them."""
    for video in ("Run/v_Run_g01_c01.avi", "Run/v_Run_g02_c01.avi", "Walk/v_Walk_g01_c01.avi"):
        make_folder(tmp_path / "data" / "tiny" / "frames", video)
    return {"data": tmp_path / "data", "manifests": tmp_path / "manifests"}


def call(places, *args: str, dataset: str = "tiny") -> int:
    options = [f"--{name}={path}" for name, path in places.items()]
    with pytest.raises(SystemExit) as left:
        run(main, [f"--dataset={dataset}", *options, *args])
    return left.value.code


def test_a_build_writes_the_manifest_and_says_what_is_in_it(places, capsys):
    assert call(places) == 0
    assert len(read_manifest(places["manifests"] / "tiny.parquet")) == 3
    out = capsys.readouterr().out
    assert "tiny.parquet: 3 videos (3 ok, 0 partial, 0 failed), 9 frames" in out
    assert "2 of 2 classes, layout folders" in out
    assert "split01: 2 train, 1 test" in out


def test_failed_videos_are_named_and_the_status_is_1(places, capsys):
    fail(places["data"] / "tiny" / "frames", "Run/bad.avi")
    assert call(places) == 1
    assert "failed: 1, first: Run/bad.avi: open: no video stream" in capsys.readouterr().out
    assert len(read_manifest(places["manifests"] / "tiny.parquet")) == 4


def test_the_summary_comes_as_json_too(places, tmp_path, capsys):
    assert call(places, f"--json={tmp_path / 'report.json'}", "--seed=3", "--test-fraction=0.4") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["by_status"] == {"ok": 3, "partial": 0, "failed": 0}
    assert report["by_split"] == {"split01": {"train": 2, "test": 1}}
    assert report["classes"] == ["Run", "Walk"]
    memory = json.loads((places["data"] / "tiny" / "frames" / "dataset.json").read_text())
    assert (memory["seed"], memory["test_fraction"]) == (3, 0.4)


@pytest.mark.parametrize(
    ("args", "dataset", "said"),
    [
        ([], "tny", "no dataset 'tny'"),
        ([], "../tiny", "below"),
        (["--layout=ucf"], "tiny", "no layout 'ucf': expected auto, ucf101"),
        (["--layout=hmdb51"], "tiny", "no list of layout hmdb51"),
        (["--test-fraction=25"], "tiny", "test_fraction must lie between 0 and 1"),
    ],
)
def test_a_mistake_in_use_is_one_line_and_status_2(places, capsys, args, dataset, said):
    assert call(places, *args, dataset=dataset) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert not places["manifests"].exists()


def test_an_unknown_dataset_names_those_that_exist(places, capsys):
    call(places, dataset="tny")
    assert "there is tiny" in capsys.readouterr().err


def test_lists_with_a_leak_need_an_option(places, capsys):
    splits = places["data"] / "tiny" / "splits"
    splits.mkdir()
    rows = "Run/v_Run_g01_c01.avi,Run,train,ann\nRun/v_Run_g02_c01.avi,Run,test,ann\n"
    (splits / "list.csv").write_text("video,class,split,group\n" + rows)
    assert call(places) == 2
    assert "split01: 1 of 1 groups stand on both sides, first 'ann'" in capsys.readouterr().err
    assert call(places, "--allow-leaks") == 0


def test_a_manifest_is_shown_and_not_built(places, capsys):
    assert call(places, "--show") == 2
    assert "run `make frames DATASET=tiny`" in capsys.readouterr().err
    assert call(places) == 0
    before = (places["manifests"] / "tiny.parquet").stat().st_ino
    capsys.readouterr()
    assert call(places, "--show") == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "tiny: 3 videos, 9 frames, 0.0 min, 2 of 2 classes\nstatus: 3 ok, 0 partial, 0 failed\n"
    )
    assert (places["manifests"] / "tiny.parquet").stat().st_ino == before


def rows():
    yield record_of("A/one", 30, label=0, class_name="A", splits={"split01": "train"}, group="g1")
    yield record_of("A/two", 20, label=0, class_name="A", splits={"split01": "test"}, group="g1", width=640)
    yield record_of("C/one", 60, label=2, class_name="C", splits={"split01": None}, time_source="rate")
    failed = {"frames": "", "status": "failed", "error": "open: not a video", "time_source": ""}
    for k in range(12):
        split = {"split01": "train"}
        yield record_of(f"C/bad{k:02d}", 0, label=2, class_name="C", splits=split, **failed)


@pytest.fixture
def summary(tmp_path):
    path = tmp_path / "m.parquet"
    write_manifest(path, rows(), dataset="m", classes=["A", "B", "C"], spec={"quality": 90})
    return summarise(read_manifest(path))


def test_a_summary_counts_status_sources_splits_and_leaks(summary):
    assert summary.statuses == {"ok": 3, "partial": 0, "failed": 12}
    assert summary.time_sources == {"pts": 2, "rate": 1}
    assert summary.splits == {"split01": {"train": 1, "test": 1, "none": 1}}
    assert summary.leaks == {"split01": ["g1"]}
    assert len(summary.failures) == 12


def test_a_summary_has_a_row_for_each_class(summary):
    by_name = {row.name: row for row in summary.classes}
    assert [row.label for row in summary.classes] == [0, 1, 2]
    first = by_name["A"]
    assert (first.videos, first.failed, first.frames, first.shortest, first.longest) == (2, 0, 50, 20, 30)
    assert (first.sizes, first.minutes) == ("64x48 to 640x48", round(2 / 60, 3))
    assert (by_name["B"].videos, by_name["B"].shortest, by_name["B"].sizes) == (0, 0, "")
    assert (by_name["C"].videos, by_name["C"].failed, by_name["C"].frames) == (13, 12, 60)


def test_a_description_is_short_and_names_ten_failures(summary):
    lines = list(describe(summary))
    assert lines[0] == "m: 15 videos, 110 frames, 0.1 min, 2 of 3 classes"
    assert "  LEAK: 1 groups stand on both sides, first 'g1'" in lines
    assert "1 classes have no video, first: B" in lines
    assert "failed: 12" in lines
    assert sum(line.startswith("  C/bad") for line in lines) == 10
    assert any(line.split() == ["2", "C", "13", "12", "60", "60", "60", "0.0", "64x48"] for line in lines)


def test_help_names_every_option_and_layout():
    help_text = subprocess.run(
        [sys.executable, "-m", "scripts.build_manifest", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in (
        "dataset",
        "data",
        "manifests",
        "layout",
        "seed",
        "test-fraction",
        "allow-leaks",
        "show",
        "json",
    ):
        assert f"--{name}" in help_text
    for layout in LAYOUTS:
        assert layout in help_text
