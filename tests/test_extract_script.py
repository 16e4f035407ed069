"""`make frames` as a user has it: one line for a mistake, a status that tells, always the same manifest."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.folder import find_folders
from pipeline.manifest import read_manifest
from pipeline.offline.frames import SCRATCH
from scripts import run
from tests.videos import write_video

ROOT = Path(__file__).parents[1]


def frames(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.extract_frames", "--dataset", "tiny"]
    command += ["--data", str(root / "data"), "--manifests", str(root / "manifests"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("A/v_A_g01_c01", "A/v_A_g02_c01", "B/v_B_g01_c01", "B/v_B_g02_c01"):
        write_video(tmp_path / "data" / "tiny" / "videos" / f"{name}.avi", frames=5)
    return tmp_path


def manifest_bytes(root: Path) -> bytes:
    return (root / "manifests" / "tiny.parquet").read_bytes()


def test_videos_become_folders_and_a_manifest(root):
    run = frames(root, "--json", str(root / "summary.json"))
    assert run.returncode == 0, run.stderr
    assert "4 videos decoded, 0 kept, 0 failed: 20 frames" in run.stdout
    assert run.stderr == ""  # no bar where there is no terminal
    manifest = read_manifest(root / "manifests" / "tiny.parquet")
    assert [record.frames for record in manifest] == [
        *("A/v_A_g01_c01", "A/v_A_g02_c01", "B/v_B_g01_c01", "B/v_B_g02_c01")
    ]
    assert manifest.classes == ("A", "B")
    assert manifest.spec["quality"] == 90
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["frames"], summary["failed"], len(summary["decoded"])) == (20, [], 4)


def test_a_second_run_does_nothing_and_writes_the_same_manifest(root):
    frames(root)
    before = manifest_bytes(root)
    run = frames(root)
    assert "0 videos decoded, 4 kept, 0 failed" in run.stdout
    assert manifest_bytes(root) == before


def test_a_failed_video_is_named_and_keeps_a_row(root):
    (root / "data" / "tiny" / "videos" / "A" / "broken.avi").write_bytes(b"no video")
    run = frames(root)
    assert run.returncode == 1
    assert "failed   A/broken.avi: open:" in run.stdout
    manifest = read_manifest(root / "manifests" / "tiny.parquet")
    assert [record.status for record in manifest] == ["failed", "ok", "ok", "ok", "ok"]
    assert len(manifest.select()) == 4
    assert frames(root).returncode == 1
    write_video(root / "data" / "tiny" / "videos" / "A" / "broken.avi", frames=3)
    assert frames(root).returncode == 0


@pytest.mark.parametrize("after", [1, 4])
def test_the_manifest_of_a_killed_run_is_that_of_an_unbroken_one(root, after):
    noise = [np.random.default_rng(k).integers(0, 256, (240, 320, 3), np.uint8) for k in range(20)]
    for number in range(4):
        write_video(
            root / "data" / "tiny" / "videos" / "C" / f"{number}.avi", size=(320, 240), pictures=noise
        )
    command = [sys.executable, "-m", "scripts.extract_frames", "--dataset", "tiny"]
    command += ["--data", str(root / "data"), "--manifests", str(root / "manifests")]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(find_folders(root / "data" / "tiny" / "frames")) < after:
        time.sleep(0.005)
    run.kill()
    run.wait()
    assert frames(root).returncode == 0
    killed = manifest_bytes(root)
    (root / "manifests" / "tiny.parquet").unlink()
    (root / "data" / "tiny" / "frames").rename(root / "old")
    assert frames(root).returncode == 0
    assert manifest_bytes(root) == killed


def test_a_moved_tree_still_works(root):
    frames(root)
    before = manifest_bytes(root)
    moved = root / "elsewhere"
    moved.mkdir()
    (root / "data").rename(moved / "data")
    run = frames(moved)
    assert "0 videos decoded, 4 kept" in run.stdout
    assert manifest_bytes(moved) == before


def one_line(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    return run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "nope"], "no dataset 'nope'"),
        (["--qality", "80"], "--qality"),
        (["--quality", "800"], "quality must be 1 to 100"),
        (["--quality", "high"], "--quality"),
        (["--jobs", "0"], "jobs must be"),
        (["--scheduler", "tcp://x:1"], "--scheduler needs --cluster"),
        (["--layout", "mine"], "mine"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_status_2(root, options, message):
    assert message in one_line(frames(root, *options))


def test_a_missing_or_empty_folder_says_where_videos_belong(tmp_path):
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    assert "tiny/videos/<Class>/<video>.avi" in one_line(frames(tmp_path))
    (tmp_path / "data" / "tiny" / "videos").mkdir()
    assert "tiny/videos/<Class>/<video>.avi" in one_line(frames(tmp_path))


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to mount a read-only file system")
def test_a_folder_that_may_not_be_written_is_named(root):
    place = root / "data" / "tiny" / "frames"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        assert "frames" in one_line(frames(root))
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_full_disk_names_the_folder_and_keeps_what_is_finished(root, small_disk):
    noise = [np.random.default_rng(k).integers(0, 256, (240, 320, 3), np.uint8) for k in range(20)]
    for number in range(3):
        write_video(
            root / "data" / "tiny" / "videos" / "Z" / f"{number}.avi", size=(320, 240), pictures=noise
        )
    (root / "data" / "tiny" / "frames").symlink_to(small_disk)
    line = one_line(frames(root, "--quality", "100", "--jobs", "1"))
    assert "disk full" in line
    assert "run the same command again" in line
    assert len(find_folders(small_disk)) >= 4


def test_progress_is_shown_on_a_terminal(root):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 100))
    command = [sys.executable, "-m", "scripts.extract_frames", "--dataset", "tiny"]
    command += ["--data", str(root / "data"), "--manifests", str(root / "manifests")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs) as run:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # how a terminal ends
            pass
    assert run.returncode == 0
    text = shown.decode()
    assert "4/4" in text
    assert "frames/s, 0 failed" in text


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_says_how_to_go_on_and_leaves_no_scratch(root, how):
    noise = [np.random.default_rng(k).integers(0, 256, (240, 320, 3), np.uint8) for k in range(31)]
    for number in range(20):
        write_video(
            root / "data" / "tiny" / "videos" / "Z" / f"{number}.avi", size=(320, 240), pictures=noise
        )
    command = [sys.executable, "-m", "scripts.extract_frames", "--dataset", "tiny"]
    command += ["--data", str(root / "data"), "--manifests", str(root / "manifests")]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while not find_folders(root / "data" / "tiny" / "frames"):
        time.sleep(0.005)
    run.send_signal(how)
    _, said = run.communicate()
    assert run.returncode == 128 + how
    assert said == "interrupted: what is finished is kept; run the same command again to go on\n"
    assert not (root / "data" / "tiny" / "frames" / SCRATCH).exists()
    assert frames(root).returncode == 0


def test_a_command_that_does_not_go_on_does_not_say_that_it_does(capsys):
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        run(main, [], resumes=False)
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing is kept of it\n"
