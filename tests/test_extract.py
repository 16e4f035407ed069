"""Many videos: nothing that one of them does stops the others, and nothing finished is done twice."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.errors import PipelineError
from pipeline.folder import find_folders
from pipeline.offline.extract import RunSpec, extract_all
from pipeline.offline.failures import read_failures
from pipeline.offline.frames import FrameSpec
from tests.videos import grey, read_k, write_video

ROOT = Path(__file__).parents[1]
GOOD = [f"A/{number}.avi" for number in range(5)]

TROUBLE = """
import av, os, signal, time
_open = av.open
def _troubled(path, *args, **kwargs):
    if "crash" in path: os.kill(os.getpid(), signal.SIGSEGV)
    if "raise" in path: raise RuntimeError("out of luck")
    while "hang" in path: time.sleep(1)
    return _open(path, *args, **kwargs)
av.open = _troubled
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(GOOD):
        write_video(tmp_path / "videos" / name, frames=10 + number)
    return tmp_path


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, and only they, whose PyAV does what the file's name says."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TROUBLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def extract(
    root: Path, videos: list[str], run: RunSpec = RunSpec(jobs=2), spec: FrameSpec = FrameSpec(), **options
):
    return extract_all(videos, root / "videos", root / "frames", spec, run, **options)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file of every finished folder."""
    files = [path for folder in find_folders(root) for path in folder.iterdir()]
    return {str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_all_videos_are_stored_and_a_second_run_does_nothing(root):
    report = extract(root, GOOD)
    assert [done.task.video for done in report.made] == GOOD
    assert report.num_frames == 10 + 11 + 12 + 13 + 14
    for number in range(5):
        files = sorted((root / "frames" / "A" / str(number)).glob("*.jpg"))
        assert [read_k(file) for file in files] == list(range(10 + number))
    before = tree(root / "frames")
    again = extract(root, GOOD)
    assert (again.made, again.kept, again.failures) == ([], 5, [])
    assert tree(root / "frames") == before


def test_only_what_is_new_is_done(root):
    extract(root, GOOD)
    before = tree(root / "frames")
    write_video(root / "videos" / "B" / "new.avi", frames=3)
    report = extract(root, [*GOOD, "B/new.avi"])
    assert [(done.task.video, done.task.reason) for done in report.made] == [("B/new.avi", "new")]
    assert before.items() <= tree(root / "frames").items()


def test_other_options_redo_all_and_leave_no_old_frame(root):
    extract(root, GOOD)
    report = extract(root, GOOD, spec=FrameSpec(every=5, quality=50))
    assert [done.task.reason for done in report.made] == ["other options"] * 5
    assert len(list((root / "frames" / "A" / "4").glob("*.jpg"))) == 3


def test_a_video_replaced_by_a_shorter_one_leaves_no_old_frame(root):
    extract(root, GOOD)
    write_video(root / "videos" / "A" / "4.avi", frames=2)
    report = extract(root, GOOD)
    assert [(done.task.video, done.task.reason) for done in report.made] == [("A/4.avi", "changed video")]
    assert len(list((root / "frames" / "A" / "4").glob("*.jpg"))) == 2


def test_a_replaced_video_that_does_not_decode_leaves_no_old_frame_either(root):
    extract(root, GOOD)
    (root / "videos" / "A" / "4.avi").write_bytes(b"not a video")
    report = extract(root, GOOD)
    assert [failed.video for failed in report.failures] == ["A/4.avi"]
    assert not (root / "frames" / "A" / "4").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A/crash.avi", "died of SIGSEGV"),
        ("A/raise.avi", "RuntimeError: out of luck"),
        ("A/hang.avi", "no new frame for 1.5 s"),
    ],
)
def test_a_decoder_that_dies_or_hangs_costs_its_own_video(root, trouble, name, message):
    write_video(root / "videos" / name, frames=3)
    report = extract(root, sorted([*GOOD, name]), RunSpec(jobs=2, stall_limit_s=1.5))
    assert [(failed.video, failed.stage) for failed in report.failures] == [(name, "worker")]
    assert message in report.failures[0].error
    assert [done.task.video for done in report.made] == GOOD
    assert [failed.video for failed in read_failures(root / "frames")] == [name]


def test_a_time_limit_ends_one_video_only(root):
    noise = (np.random.default_rng(k).integers(0, 256, (720, 1280, 3), np.uint8) for k in range(30))
    write_video(root / "videos" / "A" / "long.avi", size=(1280, 720), pictures=noise)
    report = extract(root, [*GOOD, "A/long.avi"], RunSpec(jobs=2, time_limit_s=0.2))
    assert [failed.video for failed in report.failures][-1:] == ["A/long.avi"]
    assert "time limit of 0.2 s" in report.failures[-1].error
    again = extract(root, [*GOOD, "A/long.avi"])
    assert again.failures == []
    assert read_failures(root / "frames") == []


def test_a_worker_that_the_system_kills_costs_its_own_video(root, trouble):
    write_video(root / "videos" / "A" / "hang.avi", frames=3)
    killed = []

    def kill_the_idle_one() -> None:
        deadline = time.monotonic() + 60
        while len(find_folders(root / "frames")) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in psutil.Process().children():
            if "pipeline.offline.worker" in child.cmdline():
                child.send_signal(signal.SIGKILL)
                killed.append(child.pid)

    killer = threading.Thread(target=kill_the_idle_one)
    killer.start()
    report = extract(root, sorted([*GOOD, "A/hang.avi"]))
    killer.join()
    assert killed
    assert [failed.error for failed in report.failures] == ["the decoder died of SIGKILL"]
    assert len(report.made) == 5


def test_no_child_and_no_scratch_is_left(root):
    fds = psutil.Process().num_fds()
    extract(root, GOOD)
    assert not [child for child in psutil.Process().children() if "worker" in " ".join(child.cmdline())]
    assert psutil.Process().num_fds() <= fds + 1
    assert not (root / "frames" / ".scratch").exists()


RUN = """
import sys
from pathlib import Path
from pipeline.offline.extract import RunSpec, extract_all
root = Path(sys.argv[1])
videos = sorted(path.relative_to(root / "videos").as_posix() for path in (root / "videos").rglob("*.avi"))
extract_all(videos, root / "videos", root / "frames", run=RunSpec(jobs=2))
"""


@pytest.mark.parametrize("after", [1, 6, 11])
def test_a_run_that_was_killed_goes_on_where_it_was(root, after):
    more = [f"C/{number:02d}.avi" for number in range(12)]
    for name in more:
        write_video(root / "videos" / name, size=(320, 240), frames=31)
    names = [*GOOD, *more]
    run = subprocess.Popen([sys.executable, "-c", RUN, str(root)], cwd=ROOT)
    while len(find_folders(root / "frames")) < after:
        time.sleep(0.005)
    run.kill()
    run.wait()
    finished = tree(root / "frames")
    report = extract(root, names)
    assert finished.items() <= tree(root / "frames").items()
    assert report.kept + len(report.made) == len(names)
    assert report.kept >= after
    assert {len(list(folder.glob("*.jpg"))) for folder in find_folders(root / "frames" / "C")} == {31}


def test_two_runs_at_once_are_refused(root, trouble):
    write_video(root / "videos" / "A" / "hang.avi", frames=3)
    run = subprocess.Popen([sys.executable, "-c", RUN, str(root)], cwd=ROOT)
    try:
        while len(find_folders(root / "frames")) < 5:
            time.sleep(0.02)
        with pytest.raises(PipelineError, match=f"another run is at work .*process {run.pid}"):
            extract(root, GOOD)
    finally:
        run.kill()
        run.wait()
    assert extract(root, GOOD).kept == 5


def test_a_full_disk_ends_the_run_and_keeps_what_is_finished(root, small_disk):
    noise = [np.random.default_rng(k).integers(0, 256, (240, 320, 3), np.uint8) for k in range(9)]
    for number in range(4):
        write_video(root / "videos" / "Z" / f"{number}.avi", size=(320, 240), pictures=noise)
    names = [*GOOD, *(f"Z/{number}.avi" for number in range(4))]
    with pytest.raises(PipelineError, match=r"disk full at .*more are needed.*run the same command again"):
        extract_all(names, root / "videos", small_disk, FrameSpec(quality=100), RunSpec(jobs=1))
    assert len(find_folders(small_disk)) >= 5
    assert not (small_disk / ".scratch").exists()


def test_a_folder_that_cannot_be_written_is_named(root):
    (root / "frames").write_text("a file where the folder should be")
    with pytest.raises((PipelineError, OSError), match="frames"):
        extract(root, GOOD)


def test_progress_is_told_within_a_video(root):
    noise = (np.random.default_rng(k).integers(0, 256, (720, 1280, 3), np.uint8) for k in range(31))
    write_video(root / "videos" / "A" / "long.avi", size=(1280, 720), pictures=noise)
    told: list[int] = []
    plans = []
    extract(root, ["A/long.avi"], on_frames=told.append, on_plan=plans.append)
    assert sum(told) == 31
    assert len(told) > 1
    assert [task.video for task in plans[0].tasks] == ["A/long.avi"]


def test_awkward_names_go_through_the_workers(root):
    names = [
        "A/-dash.avi",
        "A/100%d.avi",
        "A/a b.avi",
        "A/new\nline.avi",
        "A/动画.avi",
        "A/" + "x" * 200 + ".avi",
    ]
    for name in names:
        write_video(root / "videos" / "plain.avi", frames=2).rename(root / "videos" / name)
    report = extract(root, names)
    assert report.failures == []
    assert len(find_folders(root / "frames")) == len(names)


def test_memory_of_a_worker_is_that_of_a_frame_not_of_a_video(shared, tmp_path):
    name = "hard/timestamps/long_1080p_videoonly_lowbitrate.mp4"
    peak = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "pipeline.offline.worker" in child.cmdline():
                        peak.append(child.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    spec = FrameSpec(max_frames=400, short_side_px=64)
    try:
        report = extract_all([name], shared / "data" / "videos", tmp_path, spec, RunSpec(jobs=1))
    finally:
        stop.set()
        watcher.join()
    assert report.num_frames == 400  # 400 frames of 1080p would be 2.5 GB
    assert max(peak) < 500e6


def test_the_number_of_jobs_changes_nothing_on_disk(root, tmp_path):
    extract(root, GOOD, RunSpec(jobs=1))
    one = {name: size for name, (size, _) in tree(root / "frames").items()}
    (root / "frames").rename(root / "one")
    extract(root, GOOD, RunSpec(jobs=3))
    assert {name: size for name, (size, _) in tree(root / "frames").items()} == one


def test_videos_of_the_same_stem_keep_their_own_pixels_and_a_later_one_moves_nothing(tmp_path):
    def write(name: str, k: int) -> None:
        pictures = [np.full((48, 64, 3), grey(k), np.uint8)] * 2
        codec = "libx264" if name.endswith("mp4") else "mpeg4"
        write_video(tmp_path / "videos" / name, codec=codec, pictures=pictures)

    names = {"A/clip.mp4": 3, "A/v.1.avi": 7, "A/v.avi": 11, "B/clip.avi": 15}
    for name, k in names.items():
        write(name, k)
    first = extract(tmp_path, sorted(names))
    before = tree(tmp_path / "frames")
    names["A/clip.avi"] = 19  # sorts before A/clip.mp4, but comes later
    write("A/clip.avi", 19)
    second = extract(tmp_path, sorted(names))
    assert before.items() <= tree(tmp_path / "frames").items()
    placed = {done.task.video: done.task.frames for done in (*first.made, *second.made)}
    assert len(set(placed.values())) == 5
    for name, k in names.items():
        files = sorted((tmp_path / "frames" / placed[name]).glob("*.jpg"))
        assert [read_k(file) for file in files] == [k, k]


def test_failures_come_and_go_with_their_cause(root):
    bad = root / "videos" / "A" / "bad.avi"
    bad.write_bytes(b"no video")
    names = sorted([*GOOD, "A/bad.avi"])
    assert [failed.stage for failed in extract(root, names).failures] == ["open"]
    assert not (root / "frames" / "A" / "bad").exists()
    again = extract(root, names)
    assert (again.kept, [failed.video for failed in again.failures]) == (5, ["A/bad.avi"])
    write_video(bad, frames=3)
    mended = extract(root, names)
    assert [(done.task.video, done.task.reason) for done in mended.made] == [("A/bad.avi", "failed before")]
    assert read_failures(root / "frames") == []
