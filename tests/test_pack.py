import json
import multiprocessing
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import StoreError
from pipeline.folder import find_folders, frame_name, read_frames_json, write_frames_json
from pipeline.jpeg import encode_jpeg
from pipeline.online import pack as pack_module
from pipeline.online import packfile
from pipeline.online.pack import find_difference, write_pack
from pipeline.online.packfile import open_pack, read_info
from pipeline.tiles import measure_tiles
from scripts import run
from scripts.pack_frames import main
from tests.folders import LENGTHS, SPEC, write_folder, write_tiny_manifest

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

ODD_KEYS = [
    "A/two  blanks",
    "A/ü ñ 日本 🎬",
    "A/100%d 'quoted' \"twice\"",
    "-dash/--x",
    "A/line\nbreak",
    "A/" + "n" * 200,
    "A/v.1",
    "A/v",
    "a/V",
]


@pytest.fixture
def data(tmp_path):
    """A dataset's folder with frames of three videos."""
    for place, (key, count) in enumerate(LENGTHS.items()):
        write_folder(tmp_path / "tiny" / "frames", key, frames=count, first=5 * place)
    return tmp_path / "tiny"


@pytest.fixture
def manifest(data):
    return write_tiny_manifest(data.parent / "tiny.parquet", LENGTHS, failed=("B/broken",))


def files_of(data: Path, key: str) -> list[bytes]:
    """A video's JPEGs as they lie in the folder."""
    return [path.read_bytes() for path in sorted((data / "frames" / key).glob("*.jpg"))]


def hidden(data: Path) -> list[str]:
    """What a run left beside the pack, the lock's empty file aside."""
    return sorted(p.name for p in data.iterdir() if p.name.startswith(".") and p.name != ".pack.lock")


def test_a_pack_holds_the_bytes_of_the_files_in_the_order_of_the_manifest(data, manifest):
    report = write_pack(data / "pack", data / "frames", manifest)
    expected = b"".join(b"".join(files_of(data, key)) for key in sorted(LENGTHS))
    assert (data / "pack" / "frames.bin").read_bytes() == expected
    assert report.written
    assert (report.info.num_videos, report.info.num_frames) == (3, 36)
    assert report.info.frames_bytes == len(expected)
    files = sorted(path.name for path in (data / "pack").iterdir())
    assert files == ["frames.bin", "index.bin", "pack.json", "tiles.bin"]
    assert hidden(data) == []


def test_the_index_says_where_each_frame_lies_and_when_it_is(data):
    keys = ["B/three", "A/one", "A/two"]
    write_pack(data / "pack", data / "frames", keys)
    opened = open_pack(data / "pack")
    sizes = [len(jpeg) for key in keys for jpeg in files_of(data, key)]
    assert opened.index.frame_offsets.tolist() == [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    assert opened.index.times_us.tolist() == [40_000 * k for key in keys for k in range(LENGTHS[key])]
    assert opened.index.first_frames.tolist() == [0, 31, 35, 36]
    assert [opened.index.row(key) for key in keys] == [0, 1, 2]
    assert [opened.index.encoded_key(row).decode() for row in range(3)] == keys
    assert opened.info.total_bytes == sum(
        (data / "pack" / name).stat().st_size for name in ("frames.bin", "tiles.bin", "index.bin")
    )


def test_the_pack_says_how_long_each_tile_is(data):
    """Counted here by the markers themselves (ITU-T T.81, B.2.1)."""
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    opened = open_pack(data / "pack")
    found = np.frombuffer(opened.tiles, "<u2")
    expected = []
    for jpeg in (jpeg for key in LENGTHS for jpeg in files_of(data, key)):
        scan_at = jpeg.index(b"\xff\xda")
        begin = scan_at + 2 + int.from_bytes(jpeg[scan_at + 2 : scan_at + 4], "big")
        pieces = re.split(rb"(?<=\xff[\xd0-\xd7])", jpeg[begin:])
        expected += map(len, pieces)
    assert found.tolist() == expected
    counts = np.diff(opened.index.first_tiles)
    assert (counts % list(LENGTHS.values()) == 0).all()
    assert counts.sum() == opened.info.num_tiles == len(expected)


def test_tiles_that_cannot_be_said_are_none():
    noise = np.random.default_rng(1).integers(0, 256, (16, 16_000, 3), np.uint8)
    long_tiles = encode_jpeg(noise, quality=100, restart_mcus=500)
    assert measure_tiles(long_tiles).max() > 65_535
    for jpeg in (long_tiles, b"no JPEG"):
        assert pack_module._tile_row(jpeg, 2) == bytes(4)


@pytest.mark.parametrize("everything_collides", [False, True])
def test_names_that_are_not_plain_are_found_each_as_itself(tmp_path, monkeypatch, everything_collides):
    if everything_collides:
        monkeypatch.setattr(packfile, "key_hash", lambda encoded: 2**64 - 1)
        monkeypatch.setattr(pack_module, "key_hash", lambda encoded: 2**64 - 1)
    for place, key in enumerate(ODD_KEYS):
        write_folder(tmp_path / "frames", key, frames=place + 1)
    write_pack(tmp_path / "pack", tmp_path / "frames", ODD_KEYS)
    index = open_pack(tmp_path / "pack").index
    for place, key in enumerate(ODD_KEYS):
        row = index.row(key)
        assert index.first_frames[row + 1] - index.first_frames[row] == place + 1
    assert [index.row(key) for key in ("A/V", "A/v ", "A/ü", "", "A/v.1/")] == [None] * 5


def test_a_name_that_is_no_unicode_is_packed_too(tmp_path):
    key = os.fsdecode(b"A/caf\xe9")
    write_folder(tmp_path / "frames", "A/plain", frames=2)
    (tmp_path / "frames" / "A" / "plain").rename(tmp_path / "frames" / key)
    write_pack(tmp_path / "pack", tmp_path / "frames", [key])
    assert open_pack(tmp_path / "pack").index.row(key) == 0


def test_packing_again_does_nothing_while_the_frames_are_the_same(data, manifest):
    write_pack(data / "pack", data / "frames", manifest)
    before = (data / "pack").stat().st_ino
    frames = read_frames_json(data / "frames" / "A" / "one")
    touched = replace(frames, note="seen again", source=replace(frames.source, mtime_ns=99))
    write_frames_json(data / "frames" / "A" / "one", touched)
    report = write_pack(data / "pack", data / "frames", manifest)
    assert not report.written
    assert report.info == read_info(data / "pack")
    assert (data / "pack").stat().st_ino == before
    assert write_pack(data / "pack", data / "frames", manifest, force=True).written


@pytest.mark.parametrize("can_exchange", [True, False])
def test_changed_frames_make_a_new_pack_while_old_readers_keep_theirs(data, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(pack_module, "_exchange", lambda one, other: False)
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    old = open_pack(data / "pack")
    before = bytes(old.frames)
    write_folder(data / "frames", "A/two", frames=3, first=20)
    assert write_pack(data / "pack", data / "frames", list(LENGTHS)).written
    assert old.frames[:] == before
    assert open_pack(data / "pack").info.num_frames == 38
    assert b"".join(files_of(data, "A/two")) in bytes(open_pack(data / "pack").frames)
    assert hidden(data) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: replace(frames, crc32=[0, *frames.crc32[1:]]),
        lambda frames: replace(frames, sizes=[1, *frames.sizes[1:]]),
        lambda frames: replace(frames, times_us=[t + (t > 0) for t in frames.times_us]),
        lambda frames: replace(frames, spec={**frames.spec, "quality": 50}),
    ],
)
def test_what_a_pack_is_known_by_changes_with_it(data, change):
    frames = read_frames_json(data / "frames" / "A" / "one")
    assert packfile.frames_digest("A/one", frames) != packfile.frames_digest("A/one", change(frames))


def test_another_order_is_another_pack(data):
    assert write_pack(data / "pack", data / "frames", list(LENGTHS)).written
    assert write_pack(data / "pack", data / "frames", list(reversed(LENGTHS))).written


def test_progress_ends_at_the_totals(data):
    seen = []
    write_pack(data / "pack", data / "frames", list(LENGTHS), on_video=lambda *state: seen.append(state))
    size = (data / "pack" / "frames.bin").stat().st_size
    assert [state for state in seen if state[0] == "check"] == [("check", k, 3) for k in (1, 2, 3)]
    assert seen[-1] == ("copy", size, size)
    assert len(seen) == 6


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def spoil(path: Path) -> None:
    jpeg = path.read_bytes()
    path.write_bytes(jpeg[:-5] + bytes([jpeg[-5] ^ 1]) + jpeg[-4:])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"has \d+ bytes, frames.json says \d+"),
        (lengthen, "has more bytes, frames.json says"),
        (spoil, "is damaged"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_damage_is_named_and_leaves_the_old_pack_and_nothing_else(data, damage, said):
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    before = {path.name: path.read_bytes() for path in (data / "pack").iterdir()}
    name = frame_name(30, 30 * 40_000)
    damage(data / "frames" / "B" / "three" / name)
    with pytest.raises(StoreError, match=f"B/three/{name} {said}.*make verify REPAIR=1"):
        write_pack(data / "pack", data / "frames", list(LENGTHS), force=True)
    assert {path.name: path.read_bytes() for path in (data / "pack").iterdir()} == before
    assert hidden(data) == []


def test_what_cannot_be_packed_is_named(data, manifest):
    with pytest.raises(StoreError, match="nothing to pack"):
        write_pack(data / "pack", data / "frames", [])
    with pytest.raises(StoreError, match="two videos have one folder of frames, 'A/one'"):
        write_pack(data / "pack", data / "frames", ["A/one", "A/two", "A/one"])
    with pytest.raises(StoreError, match=r"'A/none' cannot be packed: .*frames.json is missing"):
        write_pack(data / "pack", data / "frames", ["A/one", "A/none"])
    write_folder(data / "frames", "A/two", frames=2)
    with pytest.raises(StoreError, match="A/two has 2 frames, the manifest says 1: run `make manifest`"):
        write_pack(data / "pack", data / "frames", manifest)
    assert not (data / "pack").exists()
    assert hidden(data) == []


def test_frames_that_change_while_they_are_packed_are_refused(data):
    def change(stage, done, total):
        if stage == "check" and done == total:
            write_folder(data / "frames", "B/three", frames=31, first=1)

    with pytest.raises(StoreError, match="B/three changed while it was packed"):
        write_pack(data / "pack", data / "frames", list(LENGTHS), on_video=change)
    assert not (data / "pack").exists()


def test_a_disk_without_room_is_said_with_the_sum_before_a_byte_is_written(data, monkeypatch):
    monkeypatch.setattr(pack_module, "free_bytes", lambda folder: 5_000)
    with pytest.raises(StoreError, match=r"pack .*pack needs \d+\.\d kB, 5\.0 kB are free"):
        write_pack(data / "pack", data / "frames", list(LENGTHS))
    assert not (data / "pack").exists()


def test_a_disk_that_fills_up_meanwhile_keeps_the_old_pack(data, small_disk, monkeypatch):
    write_pack(small_disk / "pack", data / "frames", ["A/one"])
    (small_disk / "other").write_bytes(bytes(1_000_000))
    monkeypatch.setattr(pack_module, "free_bytes", lambda folder: 10**9)
    with pytest.raises(StoreError, match=r"cannot write pack .*No space left"):
        write_pack(small_disk / "pack", data / "frames", list(LENGTHS))
    assert open_pack(small_disk / "pack").info.num_videos == 1
    assert hidden(small_disk) == []


def test_a_folder_that_is_no_pack_is_never_replaced(data):
    (data / "pack").mkdir()
    (data / "pack" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match="is no pack and will not be replaced"):
        write_pack(data / "pack", data / "frames", list(LENGTHS))
    assert (data / "pack" / "thesis.txt").read_text() == "mine"


def die_at(data: Path, stage: str, count: int) -> None:
    """Write a pack, and be killed after some videos."""
    seen = []

    def watch(now, done, total):
        seen.append(now)
        if seen.count(stage) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    write_pack(data / "pack", data / "frames", list(LENGTHS), force=True, on_video=watch)


@pytest.mark.parametrize(("stage", "count"), [("check", 2), ("copy", 1), ("copy", 3)])
def test_a_killed_run_leaves_the_old_pack_and_does_not_block_the_next(data, stage, count):
    write_pack(data / "pack", data / "frames", ["A/one"])
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(data, stage, count))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert open_pack(data / "pack").info.num_videos == 1
    assert write_pack(data / "pack", data / "frames", list(LENGTHS)).info.num_videos == 3
    assert open_pack(data / "pack").info.num_videos == 3
    assert hidden(data) == []


def test_a_run_that_died_between_two_renames_lost_nothing(data):
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    (data / "pack").rename(data / ".pack.old")
    assert not write_pack(data / "pack", data / "frames", list(LENGTHS)).written
    assert open_pack(data / "pack").info.num_videos == 3


def test_a_rename_that_fails_puts_the_old_pack_back(data, monkeypatch):
    write_pack(data / "pack", data / "frames", ["A/one"])
    rename = Path.rename

    def refuse(self, target):
        if self.name == ".pack.new":
            raise PermissionError(1, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(pack_module, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StoreError, match="cannot write pack"):
        write_pack(data / "pack", data / "frames", list(LENGTHS))
    assert open_pack(data / "pack").info.num_videos == 1
    assert hidden(data) == []


def pack_at_once(data: Path, written, barrier) -> None:
    barrier.wait(30)
    written.put(write_pack(data / "pack", data / "frames", list(LENGTHS)).written)


def test_of_two_that_pack_at_once_one_does(data):
    context = multiprocessing.get_context("fork")
    written, barrier = context.SimpleQueue(), context.Barrier(2)
    processes = [context.Process(target=pack_at_once, args=(data, written, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert sorted(written.get() for _ in processes) == [False, True]


@pytest.mark.parametrize("name", ["frames.bin", "index.bin", "tiles.bin"])
@pytest.mark.parametrize("damage", [cut, lengthen])
def test_a_pack_whose_files_have_other_sizes_is_refused_and_made_anew(data, name, damage):
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    damage(data / "pack" / name)
    with pytest.raises(StoreError, match=rf"pack/{name} has \d+ bytes.*not whole.*make pack DATASET=tiny"):
        open_pack(data / "pack")
    assert write_pack(data / "pack", data / "frames", list(LENGTHS)).written
    assert open_pack(data / "pack").info.num_videos == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 2}', "cannot be read"),
        ('{"format": 1}', "has format 1, this version reads 2"),
    ],
)
def test_a_pack_json_that_cannot_be_used_is_refused(data, text, said):
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    (data / "pack" / "pack.json").write_text(text)
    with pytest.raises(StoreError, match=f"{said}.*make pack DATASET=tiny"):
        open_pack(data / "pack")


def test_a_pack_that_is_missing_or_half_there_is_refused(data):
    with pytest.raises(StoreError, match=r"no pack at .*tiny/pack: run `make pack DATASET=tiny`"):
        open_pack(data / "pack")
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    (data / "pack" / "index.bin").unlink()
    with pytest.raises(StoreError, match=r"not whole \(index.bin is missing\)"):
        open_pack(data / "pack")


def test_a_pack_is_as_good_where_it_was_moved_to(data, tmp_path):
    write_pack(data / "pack", data / "frames", list(LENGTHS))
    (data / "pack").rename(tmp_path / "elsewhere")
    assert open_pack(tmp_path / "elsewhere").info.num_videos == 3


def test_a_pack_differs_from_a_manifest_in_options_videos_or_counts(data, manifest, tmp_path):
    write_pack(data / "pack", data / "frames", manifest)
    opened = open_pack(data / "pack")
    assert find_difference(opened, manifest) is None
    assert find_difference(opened, manifest.select(class_name="B")) is None
    more = write_tiny_manifest(tmp_path / "tiny.parquet", {**LENGTHS, "C/new": 4})
    assert find_difference(opened, more) == "video 'C/new' has 0 frames in the pack, 4 in the manifest"
    longer = write_tiny_manifest(tmp_path / "tiny.parquet", {**LENGTHS, "A/two": 2})
    assert find_difference(opened, longer) == "video 'A/two' has 1 frames in the pack, 2 in the manifest"
    other = write_tiny_manifest(tmp_path / "tiny.parquet", LENGTHS, spec={**SPEC, "quality": 50})
    assert find_difference(opened, other) == "option quality is 90 in the pack, 50 in the manifest"


def test_frames_of_the_same_count_are_told_apart_when_asked(data, manifest):
    write_pack(data / "pack", data / "frames", manifest)
    opened = open_pack(data / "pack")
    write_folder(data / "frames", "B/three", frames=31, first=9)
    assert find_difference(opened, manifest) is None
    found = find_difference(opened, manifest, frames_root=data / "frames")
    assert found is not None
    assert "video 'B/three' is not as" in found


def test_the_command_packs_says_where_and_writes_its_summary(data, manifest, tmp_path, capsys):
    options = {"dataset": "tiny", "data": tmp_path, "manifests": tmp_path}
    assert main(**options, json_file=tmp_path / "summary.json") == 0
    said = capsys.readouterr()
    assert "3 videos, 36 frames" in said.out
    assert "cache=auto  ram: pack" in said.out
    assert said.err == ""
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["written"]
    assert summary["pack"]["num_frames"] == 36
    assert summary["bytes"] == open_pack(data / "pack").info.total_bytes
    assert main(**options) == 0
    assert "unchanged" in capsys.readouterr().out


def test_the_command_without_a_manifest_says_what_to_run_first(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(main, ["--dataset", "none", "--data", str(tmp_path), "--manifests", str(tmp_path)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_frame_is_found_whatever_the_order_of_the_videos(data):
    keys = [path.relative_to(data / "frames").as_posix() for path in find_folders(data / "frames")]
    write_pack(data / "pack", data / "frames", np.random.default_rng(0).permutation(keys).tolist())
    opened = open_pack(data / "pack")
    for key in keys:
        row = opened.index.row(key)
        first, end = opened.index.first_frames[row : row + 2]
        begin, stop = opened.index.frame_offsets[first], opened.index.frame_offsets[end]
        assert opened.frames[begin:stop] == b"".join(files_of(data, key))
