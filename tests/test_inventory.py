"""What there is of a dataset, and the next command for each thing that is missing or stale."""

import os
import shutil
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.folder import FRAMES_JSON, find_folders, read_frames_json, write_frames_json
from pipeline.measure.inventory import (
    check_dataset,
    estimate_need,
    list_folders,
    list_videos,
    read_dataset,
    sample_folders,
)
from pipeline.online.pack import write_pack
from pipeline.online.ram import FreeMemory
from tests.folders import LENGTHS, SPEC, write_dataset, write_folder, write_tiny_manifest

FREE = FreeMemory(available=10**10, cgroup=None, shm=10**10)


@pytest.fixture
def project(tmp_path):
    """A dataset `tiny` where all is well: videos, frames, manifest and pack."""
    root = write_dataset(tmp_path / "data")
    for key in LENGTHS:
        video = root / "videos" / f"{key}.avi"
        video.parent.mkdir(parents=True, exist_ok=True)
        video.write_bytes(b"v")  # one byte, as `write_folder` has it
    write_tiny_manifest(tmp_path / "manifests" / "tiny.parquet", LENGTHS)
    return tmp_path


def look(project, name="tiny"):
    return read_dataset(name, data=project / "data", manifests=project / "manifests")


def checks_of(project, name="tiny"):
    return {check.name: check for check in check_dataset(look(project, name), FREE)}


def not_ok(project):
    return {name: check.verdict for name, check in checks_of(project).items() if check.verdict != "ok"}


def test_a_dataset_that_is_ready_is_ok_in_all(project):
    checks = checks_of(project)
    assert {check.verdict for check in checks.values()} == {"ok"}
    assert checks["videos"].found == "3 files, 3 B"
    assert checks["manifest"].found.startswith("3 videos, 36 frames, 2 classes")
    assert "in RAM: pack" in checks["pack"].found


def test_where_nothing_is_the_first_step_is_said(tmp_path):
    checks = checks_of(tmp_path, "mine")
    assert {check.verdict for check in checks.values()} == {"warning"}
    assert checks["videos"].advice.endswith("or draw some with `make sample`")
    assert [name for name, check in checks.items() if check.advice] == ["videos"]


def test_a_misspelt_dataset_is_told_of_the_others(project):
    check = checks_of(project, "tini")["videos"]
    assert "beside it there is tiny" in check.found
    assert "DATASET=" in check.advice


def test_videos_without_frames_want_make_frames(project):
    shutil.rmtree(project / "data" / "tiny" / "frames")
    shutil.rmtree(project / "data" / "tiny" / "pack")
    (project / "manifests" / "tiny.parquet").unlink()
    checks = checks_of(project)
    assert checks["frames"].verdict == "warning"
    places = f"DATA={project}/data MANIFESTS={project}/manifests"
    assert checks["frames"].advice == f"make frames DATASET=tiny {places}"
    assert checks["manifest"].advice == ""


def test_a_new_video_wants_make_frames(project):
    (project / "data" / "tiny" / "videos" / "A" / "new.MP4").write_bytes(b"v")
    (project / "data" / "tiny" / "videos" / "A" / "._new.mp4").write_bytes(b"v")
    (project / "data" / "tiny" / "videos" / "notes.txt").write_bytes(b"v")
    assert not_ok(project) == {"frames": "warning"}
    assert "1 videos have none yet" in checks_of(project)["frames"].found


def test_a_video_that_was_replaced_wants_make_frames(project):
    (project / "data" / "tiny" / "videos" / "A" / "two.avi").write_bytes(b"another")
    assert not_ok(project) == {"frames": "warning"}
    assert "A/two.avi" in checks_of(project)["frames"].found


def test_videos_that_are_gone_are_not_missed(project):
    shutil.rmtree(project / "data" / "tiny" / "videos")
    assert not_ok(project) == {}


def test_frames_that_are_gone_are_not_missed_where_the_pack_has_them(project):
    shutil.rmtree(project / "data" / "tiny" / "frames")
    assert not_ok(project) == {}
    shutil.rmtree(project / "data" / "tiny" / "pack")
    assert not_ok(project) == {"frames": "error", "pack": "warning"}


def test_a_damaged_frames_json_wants_a_repair(project):
    (project / "data" / "tiny" / "frames" / "A" / "one" / FRAMES_JSON).write_text("{")
    check = checks_of(project)["frames"]
    assert check.verdict == "error"
    assert check.advice.startswith("make verify DATASET=tiny")
    assert check.advice.endswith("REPAIR=1")


def test_frames_without_a_manifest_want_one(project):
    (project / "manifests" / "tiny.parquet").unlink()
    assert not_ok(project) == {"manifest": "warning"}
    assert checks_of(project)["manifest"].advice.startswith("make manifest DATASET=tiny")


def test_a_file_that_is_no_manifest_is_an_error(project):
    (project / "manifests" / "tiny.parquet").write_text("hello")
    check = checks_of(project)["manifest"]
    assert check.verdict == "error"
    assert check.advice.startswith("move it away, then make manifest")


def test_a_manifest_older_than_the_frames_is_stale(project):
    path = project / "data" / "tiny" / "frames" / "B" / "three" / FRAMES_JSON
    later = time.time() + 60
    os.utime(path, (later, later))
    check = checks_of(project)["manifest"]
    assert (check.verdict, check.found) == (
        "warning",
        "stale: 1 folders of frames are newer than it, first B/three",
    )


def test_a_manifest_that_lacks_a_folder_is_stale(project):
    write_folder(project / "data" / "tiny" / "frames", "C/new")
    check = checks_of(project)["manifest"]
    assert check.verdict == "warning"
    assert "not in it, first C/new" in check.found


def test_a_manifest_of_frames_that_are_gone_is_an_error(project):
    shutil.rmtree(project / "data" / "tiny" / "frames" / "A" / "two")
    check = checks_of(project)["manifest"]
    assert check.verdict == "error"
    assert "first A/two" in check.found


def test_failed_videos_are_counted_and_the_first_is_named(project):
    write_tiny_manifest(project / "manifests" / "tiny.parquet", LENGTHS, failed=("B/bad",))
    check = checks_of(project)["manifest"]
    assert check.verdict == "warning"
    assert "1 failed, first B/bad.avi (open: not a video)" in check.found


def test_no_pack_wants_one(project):
    shutil.rmtree(project / "data" / "tiny" / "pack")
    assert not_ok(project) == {"pack": "warning"}
    assert checks_of(project)["pack"].advice.startswith("make pack DATASET=tiny")


def test_a_pack_of_other_counts_is_stale(project):
    write_tiny_manifest(project / "manifests" / "tiny.parquet", {**LENGTHS, "A/one": 3})
    check = checks_of(project)["pack"]
    assert check.verdict == "error"
    assert "'A/one' has 4 frames in the pack, 3 in the manifest" in check.found
    assert check.advice.startswith("make pack DATASET=tiny")


def test_a_pack_of_frames_that_were_made_anew_is_stale(project):
    frames = project / "data" / "tiny" / "frames"
    old = read_frames_json(frames / "A" / "two")
    write_frames_json(frames / "A" / "two", replace(old, crc32=[crc ^ 1 for crc in old.crc32]))
    write_tiny_manifest(project / "manifests" / "tiny.parquet", LENGTHS)
    assert not_ok(project) == {"pack": "error"}


def test_a_pack_that_is_not_whole_is_an_error(project):
    (project / "data" / "tiny" / "pack" / "index.bin").unlink()
    assert not_ok(project) == {"pack": "error"}


def test_a_large_pack_stays_on_disk(project):
    little = FreeMemory(available=1000, cgroup=None, shm=1000)
    pack = {check.name: check for check in check_dataset(look(project), little)}["pack"]
    assert "on disk: pack" in pack.found


def test_finished_folders_are_found_as_the_offline_half_finds_them(project):
    frames = project / "data" / "tiny" / "frames"
    (frames / ".tmp-1" / "A").mkdir(parents=True)
    (frames / ".tmp-1" / "A" / FRAMES_JSON).write_text("{}")
    (frames / "A" / "not finished").mkdir()
    (frames / "link").symlink_to(frames)
    found = list_folders(frames)
    assert found.is_all
    assert sorted(found.folders) == [path.relative_to(frames).as_posix() for path in find_folders(frames)]


def test_looking_ends_when_the_time_is_up(project):
    assert not list_folders(project / "data" / "tiny" / "frames", limit_s=-1).is_all
    videos = list_videos(project / "data" / "tiny" / "videos", limit_s=-1)
    assert (len(videos.names), videos.is_all) == (1, False)


@given(count=st.integers(0, 300), most=st.integers(1, 80))
def test_a_sample_is_spread_evenly_and_never_too_large(tmp_path_factory, count, most):
    keys = [f"{k:03d}" for k in range(count)]
    sample = sample_folders(tmp_path_factory.getbasetemp() / "none", keys, num_folders=most)
    chosen = [int(message.split("/")[-2]) for message in sample.unreadable]
    assert len(chosen) == min(count, most)
    assert chosen == sorted(set(chosen))
    if most > 1 and count:
        assert (chosen[0], chosen[-1]) == (0, count - 1) if count > 1 else chosen == [0]


def test_nothing_is_needed_where_all_is_made(project):
    assert estimate_need(look(project), block_bytes=4096) == (0, 0, "")


def test_a_missing_pack_needs_what_its_frames_take(project):
    size = sum(sum(read_frames_json(folder).sizes) for folder in find_folders(project / "data"))
    shutil.rmtree(project / "data" / "tiny" / "pack")
    need = estimate_need(look(project), block_bytes=4096)
    assert need == (pytest.approx(size), 0, "the pack")


def test_videos_without_frames_need_about_what_those_of_ucf101_took(tmp_path):
    videos = tmp_path / "data" / "tiny" / "videos" / "A"
    videos.mkdir(parents=True)
    for k in range(10):
        (videos / f"{k}.avi").write_bytes(bytes(100_000))
    need = estimate_need(look(tmp_path), block_bytes=0)
    assert need == (pytest.approx(2 * 6e6), pytest.approx(385 + 20), "the frames of 10 videos and the pack")


def test_options_count_in_what_makes_a_pack_stale(project):
    root = project / "data" / "tiny"
    manifest = write_tiny_manifest(project / "manifests" / "tiny.parquet", LENGTHS)
    write_pack(root / "pack", root / "frames", manifest, force=True)
    write_tiny_manifest(project / "manifests" / "tiny.parquet", LENGTHS, spec={**SPEC, "quality": 50})
    assert "option quality is 90 in the pack, 50 in the manifest" in checks_of(project)["pack"].found


def test_videos_are_found_as_the_offline_half_finds_them(project):
    from pipeline.offline.layouts import find_videos

    root = project / "data" / "tiny" / "videos"
    (root / "A" / "deep" / "er").mkdir(parents=True)
    for name in ("top.webm", "A/deep/er/ü %.AVI", "A/.hidden.avi", "A/list.csv", "A/no suffix"):
        (root / name).write_bytes(b"v")
    (root / "linked").symlink_to(root / "B")
    (root / "nowhere.mp4").symlink_to(root / "gone")
    found = list_videos(root)
    assert sorted(found.names) == find_videos(root).videos
    assert found.num_bytes == len(found.names) - 1
