"""The benches' arithmetic and shape; never a speed, which is the machine's and not the code's."""

import json
import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from scripts import bench, bench_common, bench_offline, run
from scripts.bench_common import (
    Case,
    Stopwatch,
    Target,
    Timing,
    format_rows,
    judge,
    make_row,
    rotated,
    run_rounds,
    run_rounds_of_parts,
    speed_ratios,
    sum_of,
)
from scripts.bench_quality import FFMPEG_QUALITIES, Quality, closest_quality
from tests.videos import write_video

ROWS = {
    *("ours", "ours_1_thread", "opencv_loop", "opencv_1_thread", "ffmpeg", "ffmpeg_threads", "ceiling"),
    *("decode_only", "encode_only", "write_only", "start_up", "one_process", "two_processes"),
}
TARGET = Target(peer="them", ours="us", theirs="them", at_least=1.5)
seconds = st.floats(1e-3, 1e3)


def timing(seconds: float, frames: int = 100) -> Timing:
    return Timing(seconds=seconds, cpu_s=2 * seconds, frames=frames)


@given(st.lists(seconds, min_size=1, max_size=9), st.integers(1, 10_000))
def test_a_row_holds_the_median_of_its_rounds(rounds, frames):
    row = make_row("x", "what", [timing(each, frames) for each in rounds])
    assert row.rounds_s == tuple(rounds)
    assert row.seconds == statistics.median(rounds)
    assert row.frames_per_s == frames / row.seconds
    assert row.cpu_us_per_frame == pytest.approx(2e6 * row.seconds / frames)


@given(seconds, seconds, st.integers(1, 9))
def test_a_ratio_is_ours_over_theirs_in_frames_per_second(ours, theirs, times):
    rows = [make_row("us", "", [timing(ours, 100 * times)]), make_row("them", "", [timing(theirs, 100)])]
    assert speed_ratios(rows, [TARGET]) == {"them": pytest.approx(times * theirs / ours)}


def test_a_ratio_is_the_median_of_each_rounds_own():
    # A machine that becomes ten times as slow in two of three rounds.
    rounds = {"us": [1.0, 10.0, 20.0], "them": [3.0, 20.0, 30.0]}
    rows = [make_row(name, "", [timing(each) for each in taken]) for name, taken in rounds.items()]
    assert speed_ratios(rows, [TARGET]) == {"them": pytest.approx(2.0)}


def test_what_was_not_measured_has_no_ratio():
    rows = [make_row("us", "", [timing(1.0)]), make_row("them", "", [], "not installed")]
    assert speed_ratios(rows, [TARGET]) == {"them": None}
    assert speed_ratios(rows[:1], [TARGET]) == {"them": None}


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.5, "met, 1.50"), (1.49, "NOT met, 1.49"), (None, "not measured")]
)
def test_a_target_is_met_or_not_or_not_measured(ratio, verdict):
    assert judge(TARGET, ratio) == f"us / them >= 1.50: {verdict}"


def test_a_ratio_just_short_of_its_target_is_not_shown_as_if_it_reached_it():
    assert judge(TARGET, 1.4999) == "us / them >= 1.50: NOT met, 1.49"


@given(st.integers(1, 8), st.integers(0, 30))
def test_turns_keep_the_order_and_begin_with_another_each_round(count, number):
    items = list(range(count))
    turned = rotated(items, number)
    assert sorted(turned) == items
    assert all((b - a) % count == 1 % count for a, b in pairwise(turned))
    assert {rotated(items, number + each)[0] for each in items} == set(items)


def test_rounds_take_turns_in_empty_folders_that_are_removed(tmp_path):
    ran: list[str] = []

    def case(name: str) -> Case:
        def measure(folder: Path) -> dict[str, Timing]:
            assert list(folder.iterdir()) == []
            assert folder.parent == tmp_path
            (folder / "output").touch()
            ran.append(name)
            return {name: timing(len(ran)), f"{name} again": timing(0.5)}

        return Case(name, measure)

    timings = run_rounds([case("a"), case("b")], rounds=3, work_dir=tmp_path)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert [each.seconds for each in timings["a"]] == [1, 4, 5]
    assert [each.seconds for each in timings["b"]] == [2, 3, 6]
    assert set(timings) == {"a", "a again", "b", "b again"}
    assert list(tmp_path.iterdir()) == []


def test_the_parts_of_a_round_are_added_up(tmp_path):
    ran: list[str] = []

    def case(name: str, seconds: float) -> Case:
        return Case(name, lambda folder: ran.append(name) or {name: timing(seconds, frames=10)})

    parts = [[case("a", 1.0), case("b", 2.0)], [case("a", 4.0), case("b", 8.0)]]
    timings = run_rounds_of_parts(parts, rounds=2, work_dir=tmp_path)
    assert ran == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert timings == {"a": [timing(5.0, frames=20)] * 2, "b": [timing(10.0, frames=20)] * 2}


def test_a_contender_that_fails_leaves_nothing_behind(tmp_path):
    def fail(folder: Path) -> dict[str, Timing]:
        (folder / "output").touch()
        raise PipelineError("broken")

    with pytest.raises(PipelineError, match="broken"):
        run_rounds([Case("a", fail)], rounds=1, work_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stopwatch_adds_up_what_is_inside(monkeypatch):
    times = iter([1.0, 1.5, 10.0, 12.0])
    monkeypatch.setattr(bench_common, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    watch = Stopwatch()
    for _ in range(2):
        with watch:
            pass
    assert watch.timing(7).seconds == 2.5
    assert watch.timing(7).frames == 7


def test_the_ceiling_is_a_sum():
    assert sum_of([timing(1.0), timing(2.0), timing(4.0)]) == timing(7.0)


@given(st.lists(st.floats(20, 60), min_size=4, max_size=4), st.floats(20, 60))
def test_ffmpeg_gets_the_quality_nearest_to_ours(theirs, ours):
    made = [
        Quality(name=f"ffmpeg -q:v {q}", psnr_db=psnr_db, bytes_per_frame=1)
        for q, psnr_db in zip(FFMPEG_QUALITIES, theirs, strict=True)
    ]
    chosen = closest_quality([Quality(name="ours", psnr_db=ours, bytes_per_frame=1), *made])
    distance = {q: abs(psnr_db - ours) for q, psnr_db in zip(FFMPEG_QUALITIES, theirs, strict=True)}
    assert distance[chosen] == min(distance.values())


def test_without_ffmpeg_there_is_no_quality_for_it():
    assert closest_quality([Quality(name="ours", psnr_db=40, bytes_per_frame=1)]) is None


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    write_video(folder / "A" / "v_A_g01_c01.avi", frames=12)
    write_video(folder / "B" / "v_B_g01_c01.avi", frames=7)
    return folder


def run_bench(folder: Path, clips: Path) -> dict:
    """`bench offline` on tiny clips; nothing but its JSON is left."""
    with pytest.raises(SystemExit, match="0"):
        run(
            bench.main,
            [
                *("offline", "--rounds", "1", "--repeat", "1", "--videos", str(clips)),
                *("--work-dir", str(folder / "work"), "--json", str(folder / "bench.json")),
            ],
        )
    assert list((folder / "work").iterdir()) == []
    return json.loads((folder / "bench.json").read_text())


def test_a_run_measures_every_contender_on_every_frame(tmp_path, clips, capsys):
    threads = cv2.getNumThreads()
    report = run_bench(tmp_path, clips)
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) == ROWS
    for name in ROWS - {"start_up", "ffmpeg", "ffmpeg_threads"}:
        assert rows[name]["frames"] == 19
        assert rows[name]["seconds"] == rows[name]["rounds_s"][0] > 0
        assert rows[name]["note"] == "" or name == "two_processes"
    if report["ffmpeg_quality"] is not None:
        assert rows["ffmpeg"]["frames"] == rows["ffmpeg_threads"]["frames"] == 19
    assert rows["start_up"]["frames"] in (7, 12)
    one_thread = rows["ours_1_thread"]["seconds"]
    assert report["ratios"]["ceiling"] == pytest.approx(rows["ceiling"]["seconds"] / one_thread)
    assert (
        set(report["ratios"]) == set(report["targets"]) == {"opencv_loop", "ffmpeg", "ceiling", "one_process"}
    )
    assert sum(report["stages_us"].values()) == pytest.approx(rows["ours_1_thread"]["seconds"] / 19 * 1e6)
    assert {"cpu", "cores", "memory", "system", "work_dir", "python", "av", "ffmpeg"} <= set(
        report["machine"]
    )
    assert cv2.getNumThreads() == threads
    printed = capsys.readouterr().out
    assert all(row["what"] in printed for row in report["rows"])
    assert "ours_1_thread / ceiling >= 0.75: " in printed


def test_where_ffmpeg_is_not_installed_its_row_says_so(tmp_path, clips, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    report = run_bench(tmp_path, clips)
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) == ROWS
    assert rows["ffmpeg"]["note"] == "not measured: ffmpeg is not installed"
    assert (rows["ffmpeg"]["frames"], rows["ffmpeg"]["rounds_s"]) == (0, [])
    assert report["ratios"]["ffmpeg"] is None
    assert report["ratios"]["opencv_loop"] > 0
    assert report["machine"]["ffmpeg"] == "not installed"
    printed = capsys.readouterr().out
    assert "not measured: ffmpeg is not installed" in printed
    assert "ours_1_thread / ffmpeg >= 2.50: not measured" in printed


def test_a_row_that_found_another_number_of_frames_says_so():
    row = bench_offline._row("opencv_loop", [timing(1.0, 99)], 100, None)
    assert row.note == "99 frames where ours finds 100"
    assert bench_offline._row("one_process", [timing(1.0, 400)], 100, None).note == ""


def test_a_table_has_a_line_of_figures_for_each_row():
    lines = format_rows([make_row("us", "this", [timing(2.0), timing(4.0)]), make_row("them", "that", [])])
    figures = [line.split() for line in lines.splitlines()]
    assert figures[1] == ["us", "100", "3.00", "33", "60,000", "2.00", "-", "4.00"]
    assert figures[3] == ["them", "-", "-", "-", "-"]


def test_without_any_clips_one_line_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_offline, "REAL_CLIPS", tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="2"):
        run(bench.main, ["offline", "--data", str(tmp_path)])
    assert capsys.readouterr().err.splitlines() == [
        f"error: no clips at {tmp_path}/sample/videos: run `make sample`, or name a folder with --videos"
    ]


def test_the_sample_is_used_where_there_are_no_real_clips(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_offline, "REAL_CLIPS", tmp_path / "nowhere")
    video = write_video(tmp_path / "sample" / "videos" / "A" / "v_A_g01_c01.avi", frames=2)
    write_video(tmp_path / "sample" / "videos" / "B" / "v_B_g01_c01.avi", frames=2)
    assert bench_offline.find_clips(None, data=tmp_path, limit=1) == [video]
    assert len(bench_offline.find_clips(None, data=tmp_path, limit=None)) == 2


def test_a_clip_that_does_not_decode_is_named(tmp_path, clips, capsys):
    bad = clips / "A" / "bad.avi"
    bad.write_bytes(b"no video")
    with pytest.raises(SystemExit, match="2"):
        run(bench.main, ["offline", "--videos", str(clips), "--rounds", "1"])
    error = capsys.readouterr().err
    assert error.startswith(f"error: {bad} cannot be measured with (open: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "options", [["--rounds", "0"], ["--clips", "0"], ["--repeat", "0"], ["--quality-clips", "0"]]
)
def test_numbers_that_make_no_sense_are_refused(clips, options, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(bench.main, ["offline", "--videos", str(clips), *options])
    assert "must be 1 or more" in capsys.readouterr().err
