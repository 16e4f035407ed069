"""What `make report` counts and finds, by slow counts over the rows; and what it does where things miss."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.folder import frame_name, read_frames_json, write_frames_json
from pipeline.manifest import read_manifest, write_manifest
from pipeline.measure.charts import lay_out, round_up
from pipeline.measure.dataset_stats import count_values, describe_dataset, histogram
from pipeline.measure.findings import check_lengths, check_rates, describe_duplicates, find_reasons
from pipeline.measure.folder_stats import choose_evenly, count_uneven, read_folder_stats
from pipeline.measure.inventory import read_dataset
from pipeline.measure.report import ReportSpec, build_report, choose_rows
from pipeline.measure.shown_clips import StreamSpec
from pipeline.online import AugmentSpec, WindowSpec
from scripts import report as script
from scripts import run
from tests.folders import record_of, write_folder
from tests.manifests import manifest_of

SIDES = ("train", "test", None)
STREAM = StreamSpec(window=WindowSpec(frames=4), augment=AugmentSpec(size_px=16))


def write_times(folder, times_us, *, sha256):
    """Give a folder other times and another source, as if a video like that had been decoded."""
    before = read_frames_json(folder)
    for index, (old, new) in enumerate(zip(before.times_us, times_us, strict=True)):
        (folder / frame_name(index, old)).rename(folder / frame_name(index, new))
    source = replace(before.source, sha256=sha256)
    write_frames_json(folder, replace(before, times_us=list(times_us), source=source))


def write_mixed(root, dataset="mixed"):
    """Three classes: one with a direction of trouble each; the last one is empty.

    A/a0 ... a3 even; a0 and a3 are the same video, on both sides; B/b0 has a variable rate and is partial,
    B/b1 misses a frame; B/bad failed. Group `shared` is on both sides.
    """
    frames = root / dataset / "frames"
    even = [40_000 * i for i in range(8)]
    times = {
        "A/a0": even,
        "A/a1": even,
        "A/a2": even,
        "A/a3": even,
        "B/b0": [0, 40_000, 50_000, 130_000, 140_000, 240_000, 250_000, 260_000],
        "B/b1": [0, 40_000, 80_000, 160_000, 200_000, 240_000, 280_000, 320_000],
    }
    records = []
    for place, (key, times_us) in enumerate(times.items()):
        write_folder(frames, key, frames=len(times_us), first=3 * place)
        write_times(frames / key, times_us, sha256="same" if key in ("A/a0", "A/a3") else key)
        records.append(
            record_of(
                key,
                len(times_us),
                label=0 if key[0] == "A" else 1,
                class_name=key[0],
                group="shared" if key in ("A/a2", "A/a3") else key,
                status="partial" if key == "B/b0" else "ok",
                error="2 errors, the first: mush" if key == "B/b0" else None,
                splits={"split01": "test" if key in ("A/a3", "B/b1") else "train"},
            )
        )
    bad = {"frames": "", "status": "failed", "error": "open: no video", "time_source": ""}
    failed = record_of("B/bad", 0, label=1, class_name="B", splits={"split01": None}, **bad)
    path = root / "manifests" / f"{dataset}.parquet"
    classes = ["A", "B", "Empty"]
    write_manifest(path, [*records, failed], dataset=dataset, classes=classes, spec={"quality": 90})
    return read_manifest(path)


@pytest.fixture
def mixed(tmp_path):
    write_mixed(tmp_path)
    return tmp_path


def look(root, name="mixed"):
    return read_dataset(name, data=root, manifests=root / "manifests")


def verdicts(report):
    return {check.name: check.verdict for check in report.checks}


# Counts.


@given(st.lists(st.integers(0, 5_000), max_size=200), st.booleans())
def test_a_histogram_counts_each_value_once_in_round_bins(values, is_whole):
    found = histogram(np.array(values, np.int64), is_whole=is_whole)
    assert sum(found.counts) == len(values)
    assert len(found.counts) <= 24
    if values:
        assert len(found.edges) == len(found.counts) + 1
        steps = np.diff(found.edges)
        assert np.allclose(steps, steps[0])
        assert found.edges[0] <= min(values)
        assert found.is_open or max(values) < found.edges[-1]
        slow = [sum(low <= value < high for value in values) for low, high in itertools.pairwise(found.edges)]
        slow[-1] += sum(value >= found.edges[-1] for value in values)
        assert list(found.counts) == slow


def test_one_value_far_off_does_not_push_the_others_into_one_bin():
    found = histogram(np.array([*range(100, 200), 90_000]), is_whole=True)
    assert found.is_open
    assert sum(count > 0 for count in found.counts) >= 5
    assert lay_out(found, "frames").columns[-1].title.endswith("and more frames: 1 video")


@given(st.lists(st.sampled_from("abcdefghijklmnop"), max_size=60))
def test_the_most_frequent_values_come_first_and_none_is_lost(letters):
    values = np.array(letters, "<U1")
    bars = count_values(values, [str(name) for name in np.unique(values)])
    assert sum(bar.count for bar in bars) == len(letters)
    assert len(bars) <= 10
    named = [bar for bar in bars if "others" not in bar.name]
    assert all(bar.count == Counter(letters)[bar.name] for bar in named)
    assert [bar.count for bar in named] == sorted((bar.count for bar in named), reverse=True)


rows = st.tuples(
    st.integers(0, 2),
    st.integers(1, 400),
    st.sampled_from(SIDES),
    st.sampled_from(["ok", "partial", "failed"]),
)


@given(st.lists(rows, min_size=1, max_size=30))
def test_a_dataset_is_counted_as_a_loop_over_its_rows_counts_it(tmp_path_factory, drawn):
    path = tmp_path_factory.getbasetemp() / "counted.parquet"
    records = []
    for number, (label, frames, side, status) in enumerate(drawn):
        failed = {"frames": "", "error": "open: x", "time_source": ""} if status == "failed" else {}
        name = f"{'ABC'[label]}/v{number}"
        common = {"label": label, "class_name": "ABC"[label], "group": f"g{number % 4}", "status": status}
        count = 0 if failed else frames
        records.append(record_of(name, count, splits={"split01": side}, **common, **failed))
    write_manifest(path, records, dataset="counted", classes=["A", "B", "C"], spec={})
    stats = describe_dataset(read_manifest(path))
    usable = [one for one in records if one.status != "failed"]
    assert stats.videos == len(usable)
    assert stats.frames == sum(one.num_frames for one in usable)
    for found in stats.classes:
        mine = [one for one in usable if one.label == found.label]
        lengths = [one.num_frames for one in mine]
        assert found.videos == len(mine)
        assert found.failed == sum(one.label == found.label for one in records) - len(mine)
        assert found.seconds == pytest.approx(sum(one.duration_s for one in mine))
        assert (found.shortest, found.longest) == (min(lengths, default=0), max(lengths, default=0))
        expected = [sum(one.splits["split01"] == side for one in mine) for side in ("train", "test")]
        assert list(found.sides[0]) == expected
    for side in stats.sides:
        there = [one for one in usable if (one.splits["split01"] or "neither") == side.side]
        assert (side.videos, side.frames) == (len(there), sum(one.num_frames for one in there))
    groups = {
        name: [one.splits["split01"] for one in records if one.group == name]
        for name in ("g0", "g1", "g2", "g3")
    }
    leaking = {
        name: (on.count("train"), on.count("test"))
        for name, on in groups.items()
        if {"train", "test"} <= set(on)
    }
    assert {one.group: (one.train, one.test) for one in stats.leaks.get("split01", ())} == leaking


def test_the_columns_of_a_large_manifest_are_enough():
    num_frames = 29 + np.arange(200_000) % 90
    stats = describe_dataset(manifest_of(num_frames, labels=np.arange(200_000) % 3))
    assert stats.frames == num_frames.sum()
    assert [one.videos for one in stats.classes] == [66_667, 66_667, 66_666]


@given(st.integers(0, 10**6))
def test_the_axis_of_a_chart_ends_at_or_above_its_largest_count_and_divides_in_three(count):
    top = round_up(count)
    assert max(count, 3) <= top <= max(2.5 * count, 3)
    assert top % 3 == 0


# Folders.


def test_gaps_between_frames_are_uneven_from_two_milliseconds_on():
    assert count_uneven([40_000, 42_000, 38_000]) == 0
    assert count_uneven([40_000, 40_000, 42_200]) == 1
    assert count_uneven([]) == 0


def test_uneven_times_and_equal_sources_are_found_in_the_folders(mixed):
    usable = look(mixed).manifest.select()
    found = read_folder_stats(mixed / "mixed" / "frames", usable, max_folders=100)
    assert [(one.video, one.uneven, one.is_variable) for one in found.uneven] == [
        ("B/b0.avi", 3, True),
        ("B/b1.avi", 1, False),
    ]
    assert (found.uneven[0].shortest_s, found.uneven[0].longest_s) == (0.01, 0.1)
    (same,) = describe_duplicates(usable, found.duplicates, "split01")
    assert same.videos == ("A/a0.avi", "A/a3.avi")
    assert same.is_across_sides
    assert not same.is_across_classes
    (other,) = describe_duplicates(usable, ((0, 5),), "nosuch")
    assert (other.is_across_sides, other.is_across_classes) == (False, True)


def test_no_more_folders_are_read_than_allowed(mixed):
    seen = []
    usable = look(mixed).manifest.select()
    found = read_folder_stats(
        mixed / "mixed" / "frames", usable, max_folders=3, on_folder=lambda: seen.append(1)
    )
    assert (found.looked_at, found.total, len(seen), found.is_all) == (3, 6, 3, False)


@given(st.integers(0, 500), st.integers(0, 50))
def test_numbers_chosen_evenly_are_different_and_reach_both_ends(count, most):
    chosen = choose_evenly(count, most).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, most)
    if most > 1 and count:
        assert (chosen[0], chosen[-1]) == (0, count - 1)


@given(st.lists(st.integers(0, 20), max_size=80), st.integers(0, 4), st.integers(0, 30))
def test_videos_to_show_are_of_every_class_or_of_as_many_as_are_allowed(labels, each, most):
    chosen = choose_rows(np.array(labels, np.int64), ReportSpec(strips_per_class=each, max_strips=most))
    counts = Counter(labels[row] for row in chosen.tolist())
    assert len(set(chosen.tolist())) == len(chosen) <= most
    assert all(count <= max(each, 1) for count in counts.values())
    if each and most:
        assert len(counts) == min(len(set(labels)), most)


# Findings.


def test_what_went_wrong_is_counted_by_reason(tmp_path):
    failed = {"frames": "", "status": "failed", "time_source": ""}
    reasons = ["open: x", "open: y", "open: x", None]
    records = [
        record_of(f"A/{n}", 0, label=0, class_name="A", error=error, **failed)
        for n, error in enumerate(reasons)
    ]
    write_manifest(tmp_path / "m.parquet", records, dataset="m", classes=["A"], spec={})
    count, found = find_reasons(read_manifest(tmp_path / "m.parquet"), status="failed", most=2)
    assert count == 3
    assert [tuple(one) for one in found] == [("open: x", 2, "A/0.avi"), ("open: y", 1, "A/1.avi")]


@pytest.mark.parametrize(
    ("short", "frames", "verdict"),
    [("loop", 29, "ok"), ("loop", 60, "warning"), ("error", 60, "error"), ("hold", 30, "ok")],
)
def test_videos_that_are_too_short_are_said_with_what_becomes_of_them(short, frames, verdict):
    rows = manifest_of(29 + np.arange(90))
    assert check_lengths(rows, WindowSpec(frames=frames, short=short)).verdict == verdict


def test_mixed_rates_are_no_warning_for_clips_that_go_by_time():
    stats = describe_dataset(manifest_of([30, 30], fps=np.array([10.0, 60.0])))
    found = check_rates(stats, None, WindowSpec(), lambda *words: " ".join(words))
    assert (found.verdict, found.found) == ("warning", "10 to 60 fps")
    assert found.advice.startswith("have clips go by time: train ARGS=--fps ")
    assert check_rates(stats, None, WindowSpec(fps=10.0), lambda *words: "").verdict == "ok"


# The whole.


def test_a_report_finds_what_is_wrong_and_shows_the_rest(mixed):
    stages = []
    report = build_report(
        look(mixed), STREAM, ReportSpec(clips=3), on_progress=lambda *done: stages.append(done)
    )
    assert verdicts(report) == {
        "videos": "ok",
        "frames": "ok",
        "manifest": "warning",
        "split": "warning",
        "duplicates": "warning",
        "damage": "warning",
        "lengths": "ok",
        "rates": "warning",
        "classes": "warning",
        "pack": "warning",
    }
    assert [name for name, _ in report.strips] == ["A", "B"]
    assert [len(strips) for _, strips in report.strips] == [2, 2]
    assert [strip.video for strip in report.damaged_strips] == ["B/b0.avi"]
    assert [len(one.clip.pictures) for one in report.clips] == [4, 4, 4]
    assert report.failures[0].error == "open: no video"
    assert stages[-1] == ("strips", 4, 4)
    assert ("folders", 6, 6) in stages


def test_a_strip_carries_the_times_of_its_frames(mixed):
    report = build_report(look(mixed), STREAM, ReportSpec(strip_frames=3))
    strips = {strip.video: strip for _, of_class in report.strips for strip in of_class}
    assert strips["B/b0.avi"].times_s == (0.0, 0.14, 0.26)
    assert strips["B/b0.avi"].size_wh == (3 * 112 + 2 * 2, 84)


def test_a_damaged_frame_costs_its_strip_and_its_clip_and_nothing_else(mixed):
    folder = mixed / "mixed" / "frames" / "A" / "a0"
    for path in folder.glob("*.jpg"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    report = build_report(look(mixed), STREAM, ReportSpec(clips=4))
    strips = [strip for _, of_class in report.strips for strip in of_class]
    assert [strip.video for strip in strips if strip.error] == ["A/a0.avi"]
    assert "make verify REPAIR=1" in next(strip.error for strip in strips if strip.error)
    assert len(report.clips) == 3
    assert len(report.clip_errors) == 1
    assert verdicts(report)["clips"] == "error"


def test_a_missing_folder_costs_its_strip_and_is_named(mixed):
    (mixed / "mixed" / "frames" / "B" / "b1").rename(mixed / "away")
    report = build_report(look(mixed), STREAM, ReportSpec())
    assert report.folders.num_unreadable == 1
    assert "b1" in report.folders.unreadable[0]
    assert verdicts(report)["manifest"] == "error"
    assert len(report.clips) == 4


def test_without_frames_the_manifest_is_counted_all_the_same(mixed):
    (mixed / "mixed" / "frames").rename(mixed / "away")
    report = build_report(look(mixed), STREAM, ReportSpec())
    assert report.stats.videos == 6
    assert report.folders is None
    assert report.strips == report.clips == ()
    assert "make frames" in report.clip_errors[0]
    assert verdicts(report)["frames"] == "error"


def test_without_a_manifest_videos_are_shown_by_their_folders(mixed):
    (mixed / "manifests" / "mixed.parquet").unlink()
    report = build_report(look(mixed), None, ReportSpec())
    assert report.stats is None
    assert [name for name, _ in report.strips] == ["A", "B"]
    assert verdicts(report)["manifest"] == "warning"


def test_a_split_that_there_is_not_is_an_error_that_names_those_that_are(mixed):
    report = build_report(look(mixed), STREAM, ReportSpec(split="split07"))
    found = next(check for check in report.checks if check.name == "split")
    assert (found.verdict, found.found) == ("error", "no split 'split07', only split01")
    assert report.clips == ()
    assert report.strips


def test_without_shared_memory_only_the_clips_are_missing(mixed, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("unable to open shared memory object </torch_1>: No such file\nmore")

    monkeypatch.setattr("pipeline.measure.shown_clips.ClipDataset", refuse)
    report = build_report(look(mixed), STREAM, ReportSpec())
    assert "--shm-size" in report.clip_errors[0]
    assert verdicts(report)["clips"] == "error"
    assert report.strips


@pytest.mark.parametrize("field", ["strip_frames", "clip_frames", "max_rows"])
def test_a_report_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match="frames and rows"):
        ReportSpec(**{field: 0})


# The command.


def command(capsys, root, *args, name="mixed"):
    where = ["--dataset", name, "--data", str(root), "--manifests", str(root / "manifests")]
    with pytest.raises(SystemExit) as end:
        run(script.main, [*where, "--size-px", "16", "--frames", "4", *args])
    said = capsys.readouterr()
    return end.value.code, said.out.splitlines(), said.err


def test_the_command_writes_the_page_beside_the_manifest_and_ends_in_a_verdict(mixed, capsys):
    status, out, _ = command(capsys, mixed)
    page = mixed / "manifests" / "mixed.report.html"
    assert status == 0
    assert out[0] == "mixed: 6 videos, 48 frames, 0.0 min, 2 classes, 1 failed"
    assert f"page: {page}" in out[-2]
    assert out[-1].startswith("7 warnings; next for manifest: ")
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_two_reports_of_the_same_dataset_are_the_same_bytes(mixed, capsys):
    command(capsys, mixed, "--out", str(mixed / "one"))
    command(capsys, mixed, "--out", str(mixed / "two" / "page.html"))
    one, two = mixed / "one" / "mixed.report.html", mixed / "two" / "page.html"
    assert one.read_bytes() == two.read_bytes()


def test_an_error_in_the_dataset_is_exit_status_one_and_the_page_is_there(mixed, capsys):
    (mixed / "mixed" / "frames").rename(mixed / "away")
    status, out, _ = command(capsys, mixed)
    assert status == 1
    assert (mixed / "manifests" / "mixed.report.html").exists()
    assert "1 error" in out[-1]


def test_a_dataset_that_there_is_not_is_a_mistake_in_use(mixed, capsys):
    status, _, err = command(capsys, mixed, name="mxied")
    assert status == 2
    assert "there is manifests, mixed" in err
    assert command(capsys, mixed, name="../mixed")[0] == 2
