"""The disk below a folder: what it is by planted mounts, what it gives, and what is made of both."""

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.measure import disk
from pipeline.measure.disk import (
    FileSystem,
    Need,
    ReadRates,
    Space,
    check_file_system,
    check_read_rates,
    check_space,
    measure_reads,
    nearest_folder,
    read_file_system,
    read_space,
)
from pipeline.measure.machine import JpegSpeed

GB = 1_000_000_000
NOTHING = Need(0, 0, "")


def mounts(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "self").mkdir(exist_ok=True)
    (tmp_path / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def space(**other) -> Space:
    usual = {"free_bytes": 500 * GB, "total_bytes": 1000 * GB, "free_files": 10**7, "block_bytes": 4096}
    return Space(**{**usual, "is_writable": True, **other})


def test_the_innermost_and_last_mount_of_a_folder_counts(tmp_path):
    (tmp_path / "my data" / "a").mkdir(parents=True)
    escaped = str(tmp_path / "my data").replace(" ", r"\040")
    proc = mounts(
        tmp_path,
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
        f"30 27 0:30 / {escaped} rw shared:1 master:2 - tmpfs below rw",
        f"31 27 0:31 / {escaped} rw shared:3 - nfs4 host:/export rw",
        f"32 27 0:32 / {escaped}/a/b rw - xfs /dev/sdb rw",
    )
    found = read_file_system(tmp_path / "my data" / "a" / "not yet there", proc=proc)
    assert found == FileSystem(kind="nfs4", device="host:/export", mount=str(tmp_path / "my data"))
    assert read_file_system(tmp_path, proc=proc).kind == "ext4"


def test_a_mount_with_a_similar_name_is_another(tmp_path):
    (tmp_path / "data2").mkdir()
    proc = mounts(tmp_path, "1 1 1:1 / / rw - ext4 d rw", f"2 1 1:2 / {tmp_path}/data rw - xfs e rw")
    assert read_file_system(tmp_path / "data2", proc=proc).kind == "ext4"


def test_this_machines_file_system_is_that_of_another_tool(tmp_path):
    found = read_file_system(tmp_path)
    same = [part for part in psutil.disk_partitions(all=True) if part.mountpoint == found.mount]
    assert found.kind in {part.fstype for part in same}


def test_space_is_that_of_the_nearest_folder(tmp_path):
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert read_space(tmp_path / "a" / "b").total_bytes == psutil.disk_usage(str(tmp_path)).total


def test_rates_are_measured_and_nothing_is_left_behind(tmp_path):
    rates = measure_reads(tmp_path / "not yet there")
    assert rates.sequential_bytes_per_s > 0
    assert rates.random_reads_per_s > 0
    assert "written just now" in rates.what
    assert list(tmp_path.iterdir()) == []


def test_a_large_pack_is_measured_itself(tmp_path):
    pack = tmp_path / "frames.bin"
    with pack.open("wb") as file:
        file.truncate(80 << 20)
    if measure_reads(tmp_path, pack).what != "frames.bin, past the page cache":
        pytest.skip("needs a file system that reads past the page cache")
    small = tmp_path / "small.bin"
    small.write_bytes(b"x")
    assert "written just now" in measure_reads(tmp_path, small).what


def test_without_direct_reads_the_page_cache_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_read_directly", lambda descriptor: False)
    rates = measure_reads(tmp_path)
    assert rates.what.endswith("dropped from the page cache")
    assert rates.random_reads_per_s > 0


def test_a_disk_that_is_too_full_is_not_measured(small_disk):
    with pytest.raises(PipelineError, match="too full"):
        measure_reads(small_disk)


@pytest.mark.parametrize(
    ("kind", "verdict", "says"),
    [
        ("ext4", "ok", "ext4 on /dev/x"),
        ("nfs4", "warning", "small files"),
        ("fuse.sshfs", "warning", "small files"),
        ("9p", "warning", "small files"),
        ("tmpfs", "warning", "gone at a restart"),
        ("overlay", "warning", "gone with this container"),
    ],
)
def test_a_file_system_that_will_hurt_is_named(kind, verdict, says):
    check = check_file_system(FileSystem(kind=kind, device="/dev/x", mount="/data"))
    assert (check.name, check.verdict) == ("file system", verdict)
    assert says in check.found
    assert bool(check.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("there", "need", "verdict", "says"),
    [
        (space(), NOTHING, "ok", "no need of more"),
        (
            space(),
            Need(40 * GB, 2_500_000, "the pack"),
            "ok",
            "the pack will take about 40.0 GB and 2,500,000",
        ),
        (space(free_bytes=30 * GB), Need(40 * GB, 0, "the pack"), "error", "30.0 GB"),
        (space(free_bytes=45 * GB), Need(40 * GB, 0, "the pack"), "warning", "nearly full"),
        (space(free_files=2000), Need(GB, 2_500_000, "frames"), "error", "2,000 files free"),
        (space(free_files=None), Need(GB, 2_500_000, "frames"), "ok", "500.0 GB free"),
        (space(free_bytes=GB // 2), NOTHING, "warning", "nearly full"),
        (space(is_writable=False), Need(GB, 9, "frames"), "error", "not writable"),
        (space(is_writable=False), NOTHING, "ok", "no need of more"),
        (space(free_bytes=0, free_files=0), Need(1, 1, "frames"), "error", "0 B"),
    ],
)
def test_space_is_held_against_what_the_dataset_needs(there, need, verdict, says):
    check = check_space(there, need)
    assert check.verdict == verdict
    assert says in check.found


@given(st.floats(1e5, 1e10), st.floats(1, 1e6), st.floats(1e3, 1e6), st.floats(1e-5, 1e-2))
def test_reading_is_slow_where_a_clip_takes_longer_to_read_than_to_decode(rate, reads, frame_bytes, decode_s):
    rates = ReadRates(sequential_bytes_per_s=rate, random_reads_per_s=reads, what="x")
    speed = JpegSpeed(seconds=decode_s, plain_seconds=decode_s)
    is_slow = 1 / reads + 16 * frame_bytes / rate > 16 * decode_s
    assert check_read_rates(rates, frame_bytes, speed).verdict == ("warning" if is_slow else "ok")


def test_a_hard_disk_will_hurt_and_an_ssd_will_not():
    speed = JpegSpeed(seconds=400e-6, plain_seconds=800e-6)
    hard = ReadRates(sequential_bytes_per_s=150e6, random_reads_per_s=90, what="x")
    solid = ReadRates(sequential_bytes_per_s=500e6, random_reads_per_s=9000, what="x")
    assert "make pack" in check_read_rates(hard, 15_600, speed).advice
    assert check_read_rates(solid, 15_600, speed).verdict == "ok"


def test_without_a_decoding_time_the_rates_are_told_all_the_same():
    rates = ReadRates(sequential_bytes_per_s=2e9, random_reads_per_s=9000, what="x")
    check = check_read_rates(rates, 15_600, None)
    assert (check.verdict, check.found) == ("ok", "2.0 GB/s, 9,000 random reads/s of 16 KiB (x)")


def test_files_that_are_open_do_not_pile_up(tmp_path):
    before = psutil.Process().num_fds()
    for _ in range(3):
        measure_reads(tmp_path)
    assert psutil.Process().num_fds() == before
