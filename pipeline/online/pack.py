"""Writing a pack: from the folders of a manifest to four files that appear at once."""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from pipeline.errors import FolderError, StoreError
from pipeline.files import free_bytes
from pipeline.folder import FrameFolder, read_frames_json
from pipeline.manifest import Manifest
from pipeline.online.packfile import (
    FRAMES_BIN,
    INDEX_BIN,
    PACK_FILES,
    PACK_JSON,
    REPAIR,
    TILE_DTYPE,
    TILES_BIN,
    MappedPack,
    PackIndex,
    PackInfo,
    ask_for_file,
    encode_key,
    format_bytes,
    frames_digest,
    frames_print,
    key_hash,
    open_pack,
    read_frame_file,
)
from pipeline.tiles import measure_tiles, num_tiles

Stage = Literal["check", "copy"]
Progress = Callable[[Stage, int, int], None]
"""Called after each video with (stage, done, total): videos in `check`, bytes of JPEGs in `copy`."""

_BUFFER_BYTES = 4 << 20
_ROWS_AT_ONCE = 100_000
_FILES_AHEAD = 64  # asked for at once: of files that are not in memory, 0.25 s instead of 0.73 s for 6,606
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What became of a request for a pack."""

    path: Path
    info: PackInfo
    written: bool
    """False where the pack that was there is of the same frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a pack will hold, known before a byte of it is written."""

    info: PackInfo
    keys: list[str]
    counts: np.ndarray
    """int64 (V,): frames of each video."""
    tiles: np.ndarray
    """int64 (V,): tiles of each frame of a video."""
    prints: np.ndarray
    """uint64 (V,): fingerprint of each video's frames.json."""


def write_pack(
    target: Path,
    frames_root: Path,
    videos: Manifest | Sequence[str],
    *,
    force: bool = False,
    on_video: Progress | None = None,
) -> PackReport:
    """Pack the frames of a manifest's videos (status ok and partial), or of a list of folders.

    Reads every frames.json first. Where the pack at `target` is of the same frames in the same
    order, nothing is written, unless forced. Otherwise the new pack takes its place in one step;
    who reads the old one goes on reading it. Every JPEG is held against the size and the CRC-32
    in frames.json. Memory: one JPEG, and what is true of a video, not of each frame. A run that
    is killed leaves the old pack as it was, and a hidden folder that the next run removes.

    StoreError names the folder or the file that is missing, damaged or not as the manifest says,
    the lack of space with its sum, or the place that cannot be written; nothing is left then.
    """
    tell = on_video or (lambda stage, done, total: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f".{target.name}.lock")):
            _settle_old(target)
            plan = _plan(frames_root, videos, tell)
            if not force and _holds(target, plan.info.fingerprint):
                return PackReport(path=target, info=plan.info, written=False)
            with _appearing(target) as folder:
                _check_space(target, plan.info)
                _write_files(folder, frames_root, plan, tell)
    except OSError as error:
        place = error.filename or target
        raise StoreError(f"cannot write pack {target}: {error.strerror or error} ({place})") from error
    return PackReport(path=target, info=plan.info, written=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time into the block; the others wait. The file stays, empty.

    The system gives the lock back when its holder dies, however it dies. On a file system
    without locks the block is entered without one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile may hold the descriptor
        os.close(descriptor)


def find_difference(pack: MappedPack, manifest: Manifest, *, frames_root: Path | None = None) -> str | None:
    """In what a pack is not of the frames that a manifest speaks of, in words; None where in nothing.

    Looks at the options and, for each video with frames, at its key and number of frames; with
    `frames_root` at every frames.json too. A pack may hold more videos than the manifest.
    """
    rows = manifest.select()
    found = _other_options(pack.info, rows) or _other_counts(pack.index, rows)
    if found is None and frames_root is not None:
        found = _other_frames(pack.index, rows, frames_root)
    return found


def _other_options(info: PackInfo, manifest: Manifest) -> str | None:
    if info.spec is None or info.spec == manifest.spec:
        return None
    ours, theirs = info.spec, manifest.spec
    name = next(name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))
    return f"option {name} is {ours.get(name)} in the pack, {theirs.get(name)} in the manifest"


def _other_counts(index: PackIndex, manifest: Manifest) -> str | None:
    """By the hashes alone, many rows at once: `PackStore.read` compares the whole key."""
    keys, counts = manifest.column("frames"), manifest.column("num_frames")
    for first in range(0, len(keys), _ROWS_AT_ONCE):
        some = keys.slice(first, _ROWS_AT_ONCE).to_pylist()
        hashes = np.array([key_hash(encode_key(key)) for key in some], dtype=np.uint64)
        at = np.minimum(np.searchsorted(index.sorted_hashes, hashes), len(index.sorted_hashes) - 1)
        rows = index.sorted_rows[at]
        packed = index.first_frames[rows + 1] - index.first_frames[rows]
        packed[index.sorted_hashes[at] != hashes] = 0
        wrong = np.flatnonzero(packed != counts[first : first + len(some)])
        if wrong.size:
            row = int(wrong[0])
            there = counts[first + row]
            return f"video {some[row]!r} has {packed[row]} frames in the pack, {there} in the manifest"
    return None


def _other_frames(index: PackIndex, manifest: Manifest, frames_root: Path) -> str | None:
    for key in manifest.column("frames").to_pylist():
        row = index.row(key)
        digest = frames_digest(key, _read_folder(frames_root, key))
        if row is None or frames_print(digest) != index.prints[row]:
            return f"video {key!r} is not as {frames_root / key} has it now"
    return None


def _plan(frames_root: Path, videos: Manifest | Sequence[str], tell: Progress) -> _Plan:
    keys, expected = _asked(videos)
    counts, tiles = np.zeros((2, len(keys)), np.int64)
    prints = np.zeros(len(keys), np.uint64)
    digest, frames_bytes = hashlib.sha256(), 0
    for row, key in enumerate(keys):
        frames = _read_folder(frames_root, key)
        if expected is not None and expected[row] != frames.num_frames:
            raise StoreError(
                f"{frames_root / key} has {frames.num_frames} frames, the manifest says {expected[row]}: "
                "run `make manifest` for this dataset"
            )
        one = frames_digest(key, frames)
        digest.update(one)
        counts[row], prints[row] = frames.num_frames, frames_print(one)
        tiles[row] = num_tiles(frames.height, frames.width, frames.restart_mcus)
        frames_bytes += sum(frames.sizes)
        tell("check", row + 1, len(keys))
    manifest = videos if isinstance(videos, Manifest) else None
    info = PackInfo(
        dataset=manifest.dataset if manifest else None,
        num_videos=len(keys),
        num_frames=int(counts.sum()),
        frames_bytes=frames_bytes,
        num_tiles=int((counts * tiles).sum()),
        key_bytes=sum(len(encode_key(key)) for key in keys),
        fingerprint=digest.hexdigest(),
        manifest=manifest.fingerprint() if manifest else None,
        spec=manifest.spec if manifest else None,
    )
    return _Plan(info=info, keys=keys, counts=counts, tiles=tiles, prints=prints)


def _asked(videos: Manifest | Sequence[str]) -> tuple[list[str], np.ndarray | None]:
    """Keys of the videos in order, and how many frames each is said to have."""
    if isinstance(videos, Manifest):
        rows = videos.select()
        keys, expected = rows.column("frames").to_pylist(), rows.column("num_frames")
    else:
        keys, expected = list(videos), None
    if not keys:
        raise StoreError("nothing to pack: no video with frames, run `make frames` first")
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise StoreError(f"two videos have one folder of frames, {key!r}: run `make manifest`")
        seen.add(key)
    return keys, expected


def _read_folder(frames_root: Path, key: str) -> FrameFolder:
    try:
        frames = read_frames_json(frames_root / key)
    except FolderError as error:
        raise StoreError(f"video {key!r} cannot be packed: {error}") from error
    if not frames.num_frames:
        raise StoreError(f"video {key!r} cannot be packed: {frames_root / key} has no frames")
    return frames


def _holds(target: Path, fingerprint: str) -> bool:
    """Whether there is a whole pack of these very frames."""
    try:
        return open_pack(target).info.fingerprint == fingerprint
    except StoreError:
        return False


def _check_space(target: Path, info: PackInfo) -> None:
    free = free_bytes(target)
    if info.total_bytes > free:
        raise StoreError(
            f"pack {target} needs {format_bytes(info.total_bytes)}, {format_bytes(free)} are free: make room"
            + (" (the old pack stays until the new one is whole)" if target.exists() else "")
        )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well."""
    if target.exists() and not {entry.name for entry in target.iterdir()} <= set(PACK_FILES):
        raise StoreError(f"{target} is no pack and will not be replaced: move it away")
    new = target.with_name(f".{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        yield new
        if not target.exists():
            new.rename(target)
        elif not _exchange(new, target):
            target.rename(_old_place(target))
            new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what a failure left, or the pack that was replaced
        _settle_old(target)


def _old_place(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _settle_old(target: Path) -> None:
    """Remove the pack that was replaced, or put it back if a run came no further than that."""
    old = _old_place(target)
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places at once; False where the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    status: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    return status == 0


def _write_files(folder: Path, frames_root: Path, plan: _Plan, tell: Progress) -> None:
    with (
        (folder / FRAMES_BIN).open("wb", buffering=_BUFFER_BYTES) as jpegs,
        (folder / TILES_BIN).open("wb") as tiles,
        (folder / INDEX_BIN).open("wb") as index,
    ):
        _put_videos(index, plan)
        first, offset = 0, 0
        for row, key in enumerate(plan.keys):
            frames = _read_folder(frames_root, key)
            if frames_print(frames_digest(key, frames)) != plan.prints[row]:
                raise StoreError(f"{frames_root / key} changed while it was packed: run `make pack` again")
            ends = offset + np.cumsum([0, *frames.sizes])
            _put(index, plan.info, "frame_offsets", first, ends)
            _put(index, plan.info, "times_us", first, np.asarray(frames.times_us))
            for jpeg in _read_frames(frames_root / key, frames):
                jpegs.write(jpeg)
                tiles.write(_tile_row(jpeg, int(plan.tiles[row])))
            first, offset = first + frames.num_frames, int(ends[-1])
            tell("copy", offset, plan.info.frames_bytes)
        for file in (jpegs, tiles, index):
            file.flush()
            os.fsync(file.fileno())
    (folder / PACK_JSON).write_text(plan.info.to_json(), encoding="utf-8")


def _put_videos(index: BinaryIO, plan: _Plan) -> None:
    """The parts of the index that have an item for each video."""
    keys = [encode_key(key) for key in plan.keys]
    hashes = np.array([key_hash(key) for key in keys], dtype=np.uint64)
    order = np.argsort(hashes, kind="stable")
    _put(index, plan.info, "first_frames", 0, np.cumsum([0, *plan.counts]))
    _put(index, plan.info, "first_tiles", 0, np.cumsum([0, *(plan.counts * plan.tiles)]))
    _put(index, plan.info, "key_offsets", 0, np.cumsum([0, *map(len, keys)]))
    _put(index, plan.info, "sorted_hashes", 0, hashes[order])
    _put(index, plan.info, "sorted_rows", 0, order)
    _put(index, plan.info, "prints", 0, plan.prints)
    _put(index, plan.info, "keys", 0, np.frombuffer(b"".join(keys), dtype=np.uint8))


def _put(index: BinaryIO, info: PackInfo, name: str, first: int, values: np.ndarray) -> None:
    """Write values to an array of the index, from item `first` on."""
    dtype, offset, _ = info.sections()[name]
    index.seek(offset + first * np.dtype(dtype).itemsize)
    index.write(values.astype(dtype).tobytes())


def _read_frames(folder: Path, frames: FrameFolder) -> Iterator[bytes]:
    paths = [f"{folder}/{name}" for name in frames.frame_names()]
    for at, (path, size, crc32) in enumerate(zip(paths, frames.sizes, frames.crc32, strict=True)):
        if at % _FILES_AHEAD == 0:
            for ahead in paths[at : at + _FILES_AHEAD]:
                ask_for_file(ahead)
        data = read_frame_file(path, size)
        if zlib.crc32(data) != crc32:
            raise StoreError(f"{path} is damaged (CRC-32 differs from frames.json): {REPAIR}")
        yield data


def _tile_row(jpeg: bytes, tiles: int) -> bytes:
    """What tiles.bin says of a frame."""
    found = measure_tiles(jpeg)
    if found is None or len(found) != tiles or found.max() > np.iinfo(TILE_DTYPE).max:
        found = np.zeros(tiles)
    return found.astype(TILE_DTYPE).tobytes()
