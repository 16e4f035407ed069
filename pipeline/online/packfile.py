"""The pack: all JPEGs of a dataset in one file, with an index that is mapped, not loaded.

A pack is a folder of four files that appears whole and never changes:

    frames.bin   the JPEGs in the order of the manifest, those of a video one after the other,
                 so that a window of frames is one contiguous read
    tiles.bin    how long each tile of each JPEG is: uint16, with its marker; so a crop is cut out without
                 a search for markers, 8 % of the time of a clip
    index.bin    little-endian arrays, one after the other: `PackIndex`
    pack.json    format, counts and the fingerprint of what it was built from: `PackInfo`
"""

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import StoreError
from pipeline.folder import FrameFolder

FORMAT_VERSION = 2
"""Goes up when a reader of the old format would misunderstand the new one."""

FRAMES_BIN = "frames.bin"
TILES_BIN = "tiles.bin"
INDEX_BIN = "index.bin"
PACK_JSON = "pack.json"
PACK_FILES = (FRAMES_BIN, TILES_BIN, INDEX_BIN, PACK_JSON)

TILE_DTYPE = np.dtype("<u2")
"""Of tiles.bin; all 0 for a frame that has a longer tile, whose markers are then searched for."""

_COPY_BYTES = 16 << 20


class PackIndex(NamedTuple):
    """What index.bin holds, in its order, for V videos and N frames."""

    frame_offsets: np.ndarray
    """int64 (N + 1,): where each JPEG begins in frames.bin; the last is the file's size."""
    times_us: np.ndarray
    """int64 (N,): whole microseconds since the first frame of the video."""
    first_frames: np.ndarray
    """int64 (V + 1,): number of each video's first frame in the two above; the last is N."""
    first_tiles: np.ndarray
    """int64 (V + 1,): number of each video's first tile in tiles.bin; its frames have equally many."""
    key_offsets: np.ndarray
    """int64 (V + 1,): where each video's key begins in `keys`."""
    sorted_hashes: np.ndarray
    """uint64 (V,): hash of each key, ascending."""
    sorted_rows: np.ndarray
    """int64 (V,): the video that each of the hashes belongs to."""
    prints: np.ndarray
    """uint64 (V,): fingerprint of each video's frames.json, as far as it bears on the pack."""
    keys: np.ndarray
    """uint8: the keys in UTF-8, one after the other."""

    def row(self, key: str) -> int | None:
        """The number of a video in the pack, found in O(log V); None where it is not there."""
        encoded = encode_key(key)
        wanted = np.uint64(key_hash(encoded))
        at = int(self.sorted_hashes.searchsorted(wanted))
        while at < len(self.sorted_hashes) and self.sorted_hashes[at] == wanted:
            row = int(self.sorted_rows[at])
            if self.encoded_key(row) == encoded:
                return row
            at += 1  # two keys of one hash: 1 in 10^7 at a million videos, but then it has to be right
        return None

    def encoded_key(self, row: int) -> bytes:
        """A video's key, in UTF-8."""
        return self.keys[self.key_offsets[row] : self.key_offsets[row + 1]].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackInfo:
    """What pack.json holds."""

    format: int = FORMAT_VERSION
    dataset: str | None
    """Name of the dataset; None where the pack was made from a list of keys."""
    num_videos: int
    num_frames: int
    frames_bytes: int
    """Size of frames.bin."""
    num_tiles: int
    """Of all frames together."""
    key_bytes: int
    """Bytes of all keys in UTF-8."""
    fingerprint: str
    """SHA-256 over the key, times, sizes, checksums and options of every video, in order."""
    manifest: str | None
    """Fingerprint of the rows of the manifest that it was made from."""
    spec: dict[str, Any] | None
    """The manifest's options of the frames."""

    def sections(self) -> dict[str, tuple[str, int, int]]:
        """Each array of index.bin by its name: dtype, offset in bytes, number of items."""
        frames, videos = self.num_frames, self.num_videos
        kinds = [("<i8", frames + 1), ("<i8", frames), *[("<i8", videos + 1)] * 3]
        kinds += [("<u8", videos), ("<i8", videos), ("<u8", videos), ("<u1", self.key_bytes)]
        found, offset = {}, 0
        for name, (dtype, count) in zip(PackIndex._fields, kinds, strict=True):
            found[name] = (dtype, offset, count)
            offset += count * np.dtype(dtype).itemsize
        return found

    @property
    def index_bytes(self) -> int:
        """Size of index.bin."""
        _, offset, count = self.sections()["keys"]
        return offset + count

    @property
    def total_bytes(self) -> int:
        """What the pack takes, on disk or in RAM; pack.json aside, which is a few hundred bytes."""
        return self.frames_bytes + self.tiles_bytes + self.index_bytes

    @property
    def tiles_bytes(self) -> int:
        """Size of tiles.bin."""
        return TILE_DTYPE.itemsize * self.num_tiles

    def to_json(self) -> str:
        """The text of pack.json."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class MappedPack:
    """An open pack. The maps live as long as anything looks into them, this or a view of a frame."""

    info: PackInfo
    index: PackIndex
    frames: mmap.mmap
    """frames.bin, not to be written to."""
    tiles: mmap.mmap | None
    """tiles.bin; None where it is empty."""
    is_own: bool
    """Whether this user owns frames.bin or may write it."""


def open_pack(folder: Path) -> MappedPack:
    """Map a pack; StoreError where it is missing, of another format, or a file is not whole.

    Costs the same for a million videos: nothing is read but pack.json.
    """
    for _ in range(3):  # a pack that is replaced between two of the opens below is simply opened again
        try:
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError(f"no pack at {folder}: {advice(folder)}") from error
        try:
            info = _parse_info(folder, _read_at(at, PACK_JSON))
            index = map_index(info, _map_at(folder, at, INDEX_BIN, info.index_bytes))
            frames = _map_at(folder, at, FRAMES_BIN, info.frames_bytes)
            tiles = _map_at(folder, at, TILES_BIN, info.tiles_bytes) if info.num_tiles else None
            owner = os.stat(FRAMES_BIN, dir_fd=at).st_uid
            is_own = owner == os.geteuid() or os.access(FRAMES_BIN, os.W_OK, dir_fd=at)
            return MappedPack(info, index, frames, tiles, is_own)
        except FileNotFoundError as error:
            missing = error
        finally:
            os.close(at)
    raise StoreError(
        f"pack {folder} is not whole ({missing.filename} is missing): {advice(folder)}"
    ) from missing


def copy_pack(folder: Path, target: Path) -> None:
    """Copy a pack's files to a new folder, for its owner alone; OSError where there is no room.

    All files are of one pack, even if it is replaced meanwhile. The space is taken before the
    first byte, and what the copy brought into the page cache is given back after the last.
    """
    target.mkdir(mode=0o700)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in PACK_FILES:
            with open(name, "rb", opener=_opener(at)) as source, (target / name).open("xb") as copy:
                (target / name).chmod(0o600)
                os.posix_fallocate(copy.fileno(), 0, os.fstat(source.fileno()).st_size)
                shutil.copyfileobj(source, copy, _COPY_BYTES)
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(at)


def read_info(folder: Path) -> PackInfo:
    """What pack.json says; StoreError where it is missing or cannot be read."""
    try:
        return _parse_info(folder, (folder / PACK_JSON).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"no pack at {folder}: {advice(folder)}") from error


def map_index(info: PackInfo, data: mmap.mmap) -> PackIndex:
    """The arrays of a mapped index.bin; views, nothing is read."""
    return PackIndex(
        *(
            np.frombuffer(data, dtype=dtype, count=count, offset=offset)
            for dtype, offset, count in info.sections().values()
        )
    )


def encode_key(key: str) -> bytes:
    """A key in UTF-8; also one from a file name that is no Unicode."""
    return key.encode("utf-8", "surrogateescape")


def key_hash(encoded: bytes) -> int:
    """64 bits of a key, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def frames_digest(key: str, frames: FrameFolder) -> bytes:
    """SHA-256 of what a pack takes from a folder of frames, and of the options it was made with.

    Neither the source's mtime nor a note counts: frames that were made anew, equal in every
    byte, do not make a pack stale.
    """
    digest = hashlib.sha256()
    text = json.dumps([key, frames.video, frames.num_frames, frames.spec], sort_keys=True)
    digest.update(text.encode())
    for values in (frames.times_us, frames.sizes, frames.crc32):
        digest.update(np.asarray(values, dtype="<i8").tobytes())
    return digest.digest()


def frames_print(digest: bytes) -> int:
    """The 64 bits of a digest that the index keeps for each video, to name the one that changed."""
    return int.from_bytes(digest[:8], "little")


def read_frame_file(path: str, size: int) -> bytes:
    """A JPEG's bytes; StoreError where it is missing or has not the size that frames.json says."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}): {REPAIR}") from error
    try:
        data = os.read(descriptor, size + 1)  # one more, to see that there is no more
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}): {REPAIR}") from error
    finally:
        os.close(descriptor)
    if len(data) != size:
        found = f"{len(data)} bytes" if len(data) < size else "more bytes"
        raise StoreError(f"{path} has {found}, frames.json says {size}: {REPAIR}")
    return data


def ask_for_file(path: str) -> None:
    """Let the system begin to fetch a file that will be read soon; whether it is there, the read will say."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    os.close(descriptor)


REPAIR = "run `make verify REPAIR=1` for this dataset"


def advice(folder: Path) -> str:
    """What to do about a pack that is missing or not to be used."""
    folder = folder.absolute()
    return f"run `make pack DATASET={folder.parent.name}`" if folder.name == "pack" else "run `make pack`"


def format_bytes(count: int) -> str:
    """Bytes for a person to read.

    >>> [format_bytes(count) for count in (999, 92_400_000, 11_800_000_000)]
    ['999 B', '92.4 MB', '11.8 GB']
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def _parse_info(folder: Path, text: bytes) -> PackInfo:
    try:
        values = json.loads(text)
        version = values["format"]
        if version != FORMAT_VERSION:
            raise StoreError(
                f"pack {folder} has format {version}, this version reads {FORMAT_VERSION}: {advice(folder)}"
            )
        return PackInfo(**{field.name: values[field.name] for field in fields(PackInfo)})
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder / PACK_JSON} cannot be read ({error!r}): {advice(folder)}") from error


def _read_at(folder: int, name: str) -> bytes:
    with open(name, "rb", opener=_opener(folder)) as file:
        return file.read()


def _map_at(folder: Path, at: int, name: str, size: int) -> mmap.mmap:
    with open(name, "rb", opener=_opener(at)) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise StoreError(
                f"{folder / name} has {found} bytes, pack.json says {size}: the pack is not whole, "
                f"{advice(folder)}"
            )
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _opener(folder: int) -> Callable[[str, int], int]:
    return lambda name, flags: os.open(name, flags, dir_fd=folder)
