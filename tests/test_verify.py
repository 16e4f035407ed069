"""Folders of frames against their frames.json: every kind of damage is found, and can be mended."""

import json
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import FolderError, PipelineError
from pipeline.folder import find_folders, frame_name, read_frames_json, write_frames_json
from pipeline.manifest import read_manifest
from pipeline.offline.extract import RunSpec, extract_all
from pipeline.offline.frames import FrameSpec
from pipeline.offline.verify import (
    FolderVerdict,
    VerifyReport,
    VerifySpec,
    find_frame_folders,
    read_spec,
    repair,
    verify_all,
    verify_folder,
)
from scripts import run
from scripts.verify_frames import main
from tests.folders import write_folder
from tests.videos import write_video

ALL = VerifySpec(decode="all", jobs=1)
NONE = VerifySpec(decode="none", jobs=1)
NAMES = [frame_name(index, 40_000 * index) for index in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path, "A/v", frames=6)
    return tmp_path / "A" / "v"


def edit(folder: Path, **changes: Any) -> None:
    """Other values in frames.json, of any kind."""
    path = folder / "frames.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def note_as_it_is(folder: Path) -> None:
    """Sizes and CRC-32 in frames.json of what the files hold now, as if they had been made so."""
    files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
    frames = read_frames_json(folder)
    write_frames_json(
        folder,
        replace(frames, sizes=[len(each) for each in files], crc32=[zlib.crc32(each) for each in files]),
    )


def problems(folder: Path, spec: VerifySpec = ALL) -> tuple[str, ...]:
    return verify_folder(folder, spec).problems


def test_a_good_folder_has_no_problems_and_is_counted(folder):
    verdict = verify_folder(folder, ALL)
    assert verdict == FolderVerdict(
        folder=folder, video="A/v.avi", spec=FrameSpec(), frames_checked=6, frames_decoded=6
    )


def test_only_a_sample_is_decoded_unless_asked(folder):
    assert verify_folder(folder).frames_decoded == 4
    assert verify_folder(folder, VerifySpec(sample_frames=100)).frames_decoded == 6
    assert verify_folder(folder, NONE).frames_decoded == 0


# What is missing, surplus or misnamed


def test_missing_frames_are_named(folder):
    for name in NAMES[2:4]:
        (folder / name).unlink()
    assert problems(folder) == (f"2 of 6 frames missing: {NAMES[2]}, {NAMES[3]}",)
    assert verify_folder(folder, ALL).frames_checked == 4


def test_of_many_missing_frames_the_first_are_named(folder):
    for name in NAMES:
        (folder / name).unlink()
    assert problems(folder) == (f"6 of 6 frames missing: {', '.join(NAMES[:3])} and 3 more",)


def test_a_folder_in_the_place_of_a_frame_is_a_missing_frame(folder):
    (folder / NAMES[1]).unlink()
    (folder / NAMES[1]).mkdir()
    assert problems(folder) == (f"1 of 6 frames missing: {NAMES[1]}",)


@pytest.mark.parametrize(
    "name", [frame_name(6, 240_000), frame_name(2, 90_000), "picture.JPG", "img_00001.jpeg"]
)
def test_a_surplus_jpeg_is_named(folder, name):
    shutil.copy(folder / NAMES[0], folder / name)
    assert problems(folder) == (f"1 too many, which frames.json does not name: {name}",)


def test_a_frame_with_another_time_in_its_name_is_misnamed(folder):
    wrong = frame_name(3, 120_001)
    (folder / NAMES[3]).rename(folder / wrong)
    assert problems(folder) == (f"1 of 6 frames misnamed: {wrong} instead of {NAMES[3]}",)


def test_two_frames_in_place_of_a_missing_one_are_a_misnamed_and_a_surplus_one(folder):
    first, second = frame_name(3, 120_001), frame_name(3, 120_002)
    (folder / NAMES[3]).rename(folder / first)
    shutil.copy(folder / first, folder / second)
    assert problems(folder) == (
        f"1 of 6 frames misnamed: {first} instead of {NAMES[3]}",
        f"1 too many, which frames.json does not name: {second}",
    )


def test_two_frames_that_changed_places_are_found(folder):
    first, second = (folder / name for name in NAMES[:2])
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert len(problems(folder, NONE)) >= 1


@pytest.mark.parametrize("name", [".DS_Store", "Thumbs.db", "._" + NAMES[0], "notes.txt"])
def test_what_is_no_frame_does_not_matter(folder, name):
    (folder / name).write_bytes(b"litter")
    assert problems(folder) == ()


# What is in the files


def test_a_jpeg_cut_at_60_percent_is_of_another_size(folder):
    path = folder / NAMES[4]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])
    found, size = len(data) * 6 // 10, len(data)
    assert problems(folder, NONE) == (
        f"1 of 6 frames of another size: {NAMES[4]} ({found} bytes instead of {size})",
    )


def test_an_empty_jpeg_is_of_another_size(folder):
    size = (folder / NAMES[0]).stat().st_size
    (folder / NAMES[0]).write_bytes(b"")
    assert problems(folder, NONE) == (
        f"1 of 6 frames of another size: {NAMES[0]} (0 bytes instead of {size})",
    )


def test_overwritten_scan_data_are_other_bytes(folder):
    path = folder / NAMES[5]
    data = path.read_bytes()
    path.write_bytes(data[:-42] + bytes(40) + data[-2:])
    assert problems(folder, NONE) == (f"1 of 6 frames with other bytes (CRC-32): {NAMES[5]}",)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_any_single_byte_that_changes_is_found(folder, draw):
    path = folder / draw.draw(st.sampled_from(NAMES))
    whole = path.read_bytes()
    at, by = draw.draw(st.integers(0, len(whole) - 1)), draw.draw(st.integers(1, 255))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ by]) + whole[at + 1 :])
    try:
        assert problems(folder, NONE) == (f"1 of 6 frames with other bytes (CRC-32): {path.name}",)
    finally:
        path.write_bytes(whole)


# What decodes: files that are as they were noted, and are no good all the same


def cut(data: bytes) -> bytes:
    return data[: len(data) * 6 // 10]


def overwrite(data: bytes) -> bytes:
    start = data.index(b"\xff\xda") + 14
    return data[:start] + random.Random(3).randbytes(40) + data[start + 40 :]


def zero_tail(data: bytes) -> bytes:
    start = data.index(b"\xff\xda") + 20
    return data[:start] + bytes(len(data) - start)


@pytest.fixture(scope="module")
def picture() -> bytes:
    """A JPEG with restart markers, as they are stored, of a picture with much in it."""
    import numpy as np

    from pipeline.jpeg import encode_jpeg

    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    return encode_jpeg(noise, quality=90, restart_mcus=4)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "Premature end of JPEG file"),
        (overwrite, "Corrupt JPEG data"),
        (zero_tail, "Premature end of JPEG file"),
        (lambda data: b"", "Could not determine subsampling level"),
        (lambda data: b"no picture at all" * 20, "Could not determine subsampling level"),
    ],
)
def test_what_libjpeg_only_warns_of_counts_as_damage(folder, picture, damage: Callable[[bytes], bytes], why):
    data = damage(picture)
    (folder / NAMES[2]).write_bytes(data)
    note_as_it_is(folder)
    assert problems(folder, NONE) == ()
    (problem,) = problems(folder)
    assert problem.startswith(f"1 of 6 frames not to be decoded: {NAMES[2]} (")
    assert why in problem
    if data:  # a decoder that does not mind makes a picture of some of these
        with pytest.raises(ValueError):
            simplejpeg.decode_jpeg(data)


def test_a_picture_of_another_size_is_found(folder):
    edit(folder, width=48, height=64)
    (problem,) = problems(folder)
    assert problem == (
        f"6 of 6 frames of another picture size: {NAMES[0]} (64x48 instead of 48x64), "
        f"{NAMES[1]} (64x48 instead of 48x64), {NAMES[2]} (64x48 instead of 48x64) and 3 more"
    )


def test_each_kind_of_damage_has_its_line(folder):
    (folder / NAMES[0]).unlink()
    (folder / NAMES[1]).write_bytes(b"x")
    (folder / NAMES[2]).write_bytes(bytes((folder / NAMES[2]).stat().st_size))
    (folder / "x.jpg").write_bytes(b"x")
    kinds = [problem.split(":")[0] for problem in problems(folder)]
    assert kinds == [
        "1 of 6 frames missing",
        "1 too many, which frames.json does not name",
        "1 of 6 frames of another size",
        "1 of 6 frames with other bytes (CRC-32)",
    ]


# The sample


def test_a_sample_is_the_same_for_the_same_seed_wherever_the_folder_is(tmp_path):
    """Of 30 frames 10 are no JPEGs, though noted so: which of them are met tells which were drawn."""
    write_folder(tmp_path, "A/v", frames=30)
    for index in range(0, 30, 3):
        (tmp_path / "A" / "v" / frame_name(index, 40_000 * index)).write_bytes(b"none")
    note_as_it_is(tmp_path / "A" / "v")
    shutil.copytree(tmp_path / "A", tmp_path / "moved" / "B")
    here, there = tmp_path / "A" / "v", tmp_path / "moved" / "B" / "v"
    met = [problems(here, VerifySpec(seed=seed)) for seed in range(10)]
    assert met == [problems(there, VerifySpec(seed=seed)) for seed in range(10)]
    assert len(set(met)) > 5


def test_another_video_with_the_same_seed_gives_another_sample(tmp_path):
    met = set()
    for number in range(8):
        folder = tmp_path / f"{number}"
        write_folder(tmp_path, folder.name, frames=30)
        for path in sorted(folder.glob("*.jpg"))[::2]:
            path.write_bytes(b"none")
        note_as_it_is(folder)
        met.add(problems(folder, VerifySpec()))
    assert len(met) > 4


# frames.json itself


def test_a_folder_without_frames_json_is_damaged(folder):
    (folder / "frames.json").unlink()
    (problem,) = problems(folder)
    assert problem == f"{folder}/frames.json is missing: not a finished folder of frames"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"video": "v.avi"}', "\udcff"])
def test_a_frames_json_that_cannot_be_read_is_a_problem(folder, text):
    (folder / "frames.json").write_bytes(text.encode(errors="surrogateescape"))
    verdict = verify_folder(folder, ALL)
    assert (verdict.video, verdict.frames_checked) == (None, 0)
    (problem,) = verdict.problems
    assert problem.startswith(f"{folder}/frames.json cannot be read")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"times_us": [], "sizes": [], "crc32": []}, "frames.json names no frame"),
        ({"crc32": [1, 2]}, "frames.json is not whole: crc32 is no list of 6 counts"),
        ({"crc32": None}, "frames.json is not whole: crc32 is no list of 6 counts"),
        ({"sizes": [1, 2, 3, 4, 5, "6"]}, "frames.json is not whole: sizes is no list of 6 counts"),
        ({"times_us": [0, 1, 2, 3, 4, 5.5]}, "frames.json is not whole: times_us is no list of 6 counts"),
        ({"times_us": [-1, 1, 2, 3, 4, 5]}, "frames.json is not whole: times_us is no list of 6 counts"),
        ({"times_us": [7, 8, 9, 10, 11, 12]}, "frames.json: the first frame is at 7 us, and should be at 0"),
        (
            {"times_us": [0, 40000, 30000, 120000, 120000, 200000]},
            "frames.json: 2 of 6 times do not rise, first at frame 2: 30,000 us after 40,000 us",
        ),
    ],
)
def test_a_frames_json_that_cannot_be_true_is_a_problem(folder, changes, problem):
    edit(folder, **changes)
    assert problems(folder) == (problem,)


def test_other_times_in_frames_json_than_in_the_names_are_a_problem(folder):
    edit(folder, times_us=[0, 40_000, 80_000, 120_000, 160_000, 200_001])
    assert problems(folder) == (f"1 of 6 frames misnamed: {NAMES[5]} instead of {frame_name(5, 200_001)}",)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_no_byte_of_frames_json_makes_verification_raise(folder, draw):
    path = folder / "frames.json"
    whole = path.read_bytes()
    at, by = draw.draw(st.integers(0, len(whole) - 1)), draw.draw(st.integers(1, 255))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ by]) + whole[at + 1 :])
    try:
        assert verify_folder(folder, NONE).folder == folder
    finally:
        path.write_bytes(whole)


# Options out of frames.json


@given(
    spec=st.builds(
        FrameSpec,
        short_side_px=st.none() | st.integers(1, 500),
        square_pixels=st.booleans(),
        fps=st.none() | st.floats(0.1, 100),
        every=st.integers(1, 9),
        max_frames=st.none() | st.integers(1, 99),
        quality=st.integers(1, 100),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_options_come_back_out_of_frames_json(folder, spec):
    frames = replace(read_frames_json(folder), spec=json.loads(json.dumps(spec.as_json())))
    assert read_spec(frames) == spec


@pytest.mark.parametrize(
    "values", [None, [], {"quality": "high"}, {"quality": 0}, {"enlarge": [], "quality": 9}]
)
def test_options_that_are_none_are_not_made_up(folder, values):
    assert read_spec(replace(read_frames_json(folder), spec=values)) is None


# Whole roots


def test_folders_are_verified_in_order_whatever_the_jobs(tmp_path):
    for number in range(7):
        write_folder(tmp_path, f"{'BA'[number % 2]}/v{number}", frames=3)
    (tmp_path / "A" / "v3" / NAMES[1]).unlink()
    (tmp_path / "B" / "v0" / NAMES[0]).write_bytes(b"x")
    seen: dict[int, list[FolderVerdict]] = {1: [], 2: []}
    totals: list[int] = []
    reports = [
        verify_all(tmp_path, replace(ALL, jobs=jobs), on_plan=totals.append, on_folder=seen[jobs].append)
        for jobs in (1, 2)
    ]
    assert seen[1] == seen[2]
    assert [verdict.folder for verdict in seen[1]] == find_folders(tmp_path)
    assert totals == [7, 7]
    for report in reports:
        assert (report.num_folders, report.num_frames, report.num_decoded) == (7, 20, 20)
        assert [verdict.folder.name for verdict in report.damaged] == ["v3", "v0"]


def test_frames_without_a_frames_json_are_found_and_litter_is_not(tmp_path):
    write_folder(tmp_path, "A/good")
    for name in (
        "A/bare/000000_000000000000us.jpg",
        "A/other/img_1.jpg",
        ".scratch/x/000000_000000000000us.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x")
    assert find_frame_folders(tmp_path) == [tmp_path / "A" / "bare", tmp_path / "A" / "good"]
    assert [verdict.folder.name for verdict in verify_all(tmp_path, NONE).damaged] == ["bare"]


def test_a_missing_root_is_a_mistake(tmp_path):
    with pytest.raises(FolderError, match=r"none is missing: .*make frames"):
        verify_all(tmp_path / "none")


@pytest.mark.parametrize("options", [{"jobs": 0}, {"jobs": -2}, {"sample_frames": 0}, {"seed": -1}])
def test_specs_without_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        VerifySpec(**options)


# Repair


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos and their frames; the second was extracted with other options."""
    root = tmp_path_factory.mktemp("extracted")
    for number, name in enumerate(("A/v0.avi", "A/v1.avi", "B/v2.avi")):
        write_video(root / "videos" / name, frames=4 + number)
    extract(root, ["A/v0.avi", "B/v2.avi"], FrameSpec(quality=60))
    extract(root, ["A/v1.avi"], FrameSpec(short_side_px=32))
    return root


@pytest.fixture
def root(extracted: Path, tmp_path: Path) -> Path:
    shutil.copytree(extracted, tmp_path / "set")
    return tmp_path / "set"


def extract(root: Path, videos: list[str], spec: FrameSpec) -> None:
    report = extract_all(videos, root / "videos", root / "frames", spec, RunSpec(jobs=1))
    assert not report.failures


def verify_and_repair(root: Path, **hooks: Any):
    report = verify_all(root / "frames", ALL)
    return repair(report, root / "videos", root / "frames", RunSpec(jobs=1), **hooks)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


def damage_by_cut(folder: Path) -> None:
    path = sorted(folder.glob("*.jpg"))[1]
    path.write_bytes(cut(path.read_bytes()))


def damage_by_loss(folder: Path) -> None:
    next(folder.glob("*.jpg")).unlink()


def damage_by_surplus(folder: Path) -> None:
    (folder / frame_name(99, 99)).write_bytes(b"x")


def damage_times(folder: Path) -> None:
    edit(folder, times_us=[0] * len(read_frames_json(folder).times_us))


@pytest.mark.parametrize("damage", [damage_by_cut, damage_by_loss, damage_by_surplus, damage_times])
@pytest.mark.parametrize("name", ["A/v1", "B/v2"])
def test_repair_makes_the_same_bytes_again_and_touches_nothing_else(
    root, damage: Callable[[Path], None], name
):
    folder = root / "frames" / name
    others = [other for other in find_folders(root / "frames") if other != folder]
    before = contents(folder), [stamps(other) for other in others]
    damage(folder)
    planned: list[int] = []
    report = verify_and_repair(root, on_plan=planned.append)
    assert [verdict.folder for verdict in report.repaired] == [folder]
    assert (report.left, report.num_tried, planned) == ([], 1, [1])
    assert (contents(folder), [stamps(other) for other in others]) == before
    assert verify_all(root / "frames", ALL).damaged == []


def test_several_folders_are_repaired_each_with_its_own_options(root):
    folders = find_folders(root / "frames")
    before = [contents(folder) for folder in folders]
    for folder in folders:
        damage_by_cut(folder)
    counted: list[int] = []
    report = verify_and_repair(root, on_frames=counted.append)
    assert [verdict.folder for verdict in report.repaired] == folders
    assert sum(counted) == 4 + 5 + 6
    assert [contents(folder) for folder in folders] == before


@pytest.mark.parametrize("text", [None, "", "{"])
def test_without_a_frames_json_the_video_is_found_by_its_place_and_the_usual_options_count(root, text):
    folder = root / "frames" / "A" / "v0"
    before = contents(folder)
    (folder / "frames.json").unlink()
    if text is not None:
        (folder / "frames.json").write_text(text)
    edit(root / "frames" / "A" / "v1", spec=FrameSpec(quality=60).as_json())
    report = verify_and_repair(root)
    assert [verdict.folder for verdict in report.repaired] == [folder]
    assert contents(folder) == before


def test_with_no_other_folder_the_default_options_count(root):
    folder = root / "frames" / "A" / "v0"
    for other in ("A/v1", "B"):
        shutil.rmtree(root / "frames" / other)
    (folder / "frames.json").write_text("{")
    assert not verify_and_repair(root).left
    assert read_frames_json(folder).spec == FrameSpec().as_json()


@pytest.mark.parametrize("has_record", [True, False])
def test_where_the_video_is_gone_the_folder_stays_as_it_is(root, has_record):
    folder = root / "frames" / "A" / "v1"
    damage_by_cut(folder)
    if not has_record:
        (folder / "frames.json").unlink()
    (root / "videos" / "A" / "v1.avi").unlink()
    before = stamps(folder)
    report = verify_and_repair(root)
    assert (report.repaired, report.num_tried) == ([], 0)
    missing = root / "videos" / "A" / ("v1.avi" if has_record else "v1.*")
    assert report.left[0].problems[-1] == f"cannot be repaired: video missing at {missing}"
    assert len(report.left[0].problems) == 2
    assert stamps(folder) == before


def test_a_video_that_cannot_be_read_does_not_cost_the_folder(root):
    folder = root / "frames" / "A" / "v1"
    damage_by_cut(folder)
    (root / "videos" / "A" / "v1.avi").unlink()
    (root / "videos" / "A" / "v1.avi").mkdir()
    before = stamps(folder)
    (verdict,) = verify_and_repair(root).left
    assert "cannot be repaired: video cannot be read at" in verdict.problems[-1]
    assert stamps(folder) == before


def test_a_video_that_does_not_decode_any_more_is_said_to_have_lost_its_frames(root):
    folder = root / "frames" / "A" / "v1"
    damage_by_cut(folder)
    (root / "videos" / "A" / "v1.avi").write_text("no video")
    (verdict,) = verify_and_repair(root).left
    assert verdict.problems[-1].startswith("cannot be repaired: its video does not decode (open: ")
    assert not folder.exists()


def test_where_two_videos_may_be_meant_none_is_taken(root):
    folder = root / "frames" / "A" / "v1"
    (folder / "frames.json").unlink()
    shutil.copy(root / "videos" / "A" / "v1.avi", root / "videos" / "A" / "v1.mp4")
    (root / "videos" / "A" / "v1.txt").write_text("no video, and in nobody's way")
    before = stamps(folder)
    (verdict,) = verify_and_repair(root).left
    assert verdict.problems[-1] == (
        "cannot be repaired: it may be of v1.avi or v1.mp4, delete the folder and run `make frames`"
    )
    assert stamps(folder) == before


def test_a_damaged_copy_does_not_cost_the_folder_that_it_was_copied_from(root):
    good, copy = root / "frames" / "B" / "v2", root / "frames" / "A" / "copy"
    shutil.copytree(good, copy)
    damage_by_cut(copy)
    before = stamps(good), stamps(copy)
    (verdict,) = verify_and_repair(root).left
    assert (
        verdict.problems[-1]
        == f"cannot be repaired: {good} is for the frames of B/v2.avi, delete this folder"
    )
    assert (stamps(good), stamps(copy)) == before


# The command


def command(root: Path, *args: str) -> int:
    """Exit status of the command for the dataset in `root`."""
    where = [
        "--dataset",
        root.name,
        "--data",
        str(root.parent),
        "--manifests",
        str(root.parent / "manifests"),
    ]
    with pytest.raises(SystemExit) as exit_info:
        run(main, [*where, "--jobs", "1", *args])
    return int(exit_info.value.code or 0)


def test_the_command_says_that_all_is_well(root, capsys):
    assert command(root, "--decode", "all") == 0
    out, err = capsys.readouterr()
    assert out == "3 folders, 15 frames (15 of them decoded): all as frames.json says\n"
    assert err == ""
    assert command(root, "--decode", "none") == 0
    assert capsys.readouterr().out == "3 folders, 15 frames: all as frames.json says\n"


def test_the_command_names_what_is_damaged(root, capsys):
    name = min(path.name for path in (root / "frames" / "B" / "v2").glob("*.jpg"))
    (root / "frames" / "B" / "v2" / name).unlink()
    assert command(root, "--json", str(root / "verdict.json")) == 1
    assert capsys.readouterr().out.splitlines() == [
        "B/v2",
        f"  1 of 6 frames missing: {name}",
        "1 of 3 folders is damaged: run make verify DATASET=set REPAIR=1",
    ]
    assert json.loads((root / "verdict.json").read_text()) == {
        "folders": 3,
        "frames": 14,
        "decoded": 12,
        "damaged": [{"folder": "B/v2", "video": "B/v2.avi", "problems": [f"1 of 6 frames missing: {name}"]}],
        "left": None,
    }


def test_the_command_repairs_and_writes_the_manifest(root, capsys):
    damage_by_loss(root / "frames" / "B" / "v2")
    (root / "frames" / "A" / "v1" / "frames.json").write_text("{")
    assert command(root, "--repair", "--json", str(root / "verdict.json")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "2 of 3 folders had damage and are repaired: all as frames.json says"
    )
    assert json.loads((root / "verdict.json").read_text())["left"] == []
    manifest = read_manifest(root.parent / "manifests" / "set.parquet")
    assert [(row.video, row.num_frames) for row in manifest] == [
        ("A/v0.avi", 4),
        ("A/v1.avi", 5),
        ("B/v2.avi", 6),
    ]
    assert command(root) == 0


def test_the_command_says_what_it_could_not_repair(root, capsys):
    for name in ("A/v0", "A/v1"):
        damage_by_loss(root / "frames" / name)
    (root / "videos" / "A" / "v0.avi").unlink()
    assert command(root, "--repair") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A/v0"
    assert lines[2] == f"  cannot be repaired: video missing at {root}/videos/A/v0.avi"
    assert lines[-1] == (
        "1 of 3 folders is damaged still, 1 is repaired: "
        "see to what is named above, then run make verify DATASET=set REPAIR=1"
    )


@pytest.mark.parametrize("emptied", [True, False])
def test_without_frames_the_command_says_what_to_run_first(root, capsys, emptied):
    shutil.rmtree(root / "frames")
    if emptied:
        (root / "frames").mkdir()
    assert command(root) == 2
    assert "run `make frames DATASET=set` first" in capsys.readouterr().err


def test_an_unknown_dataset_is_a_mistake(root, capsys):
    assert command(root.parent / "nothing") == 2
    assert "no dataset 'nothing'" in capsys.readouterr().err


def test_a_report_keeps_nothing_of_good_folders():
    report = VerifyReport(spec=NONE)
    for number in range(1000):
        report.add(FolderVerdict(folder=Path(str(number)), spec=FrameSpec(), frames_checked=2))
    assert (report.num_folders, report.num_frames, report.damaged) == (1000, 2000, [])
    assert report.options == {FrameSpec(): 1000}


def test_another_run_at_work_is_not_disturbed(root):
    import fcntl

    damage_by_loss(root / "frames" / "A" / "v0")
    with (root / "frames" / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PipelineError, match="another run is at work"):
            verify_and_repair(root)
