"""The bytes of a video's frames: from its folder, or from the pack that all processes share."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np

from pipeline.errors import FolderError, StoreError
from pipeline.folder import frame_name, read_frames_json
from pipeline.jpeg import JpegRun
from pipeline.manifest import Manifest
from pipeline.online.counters import SharedCounters, StoreCounters
from pipeline.online.pack import find_difference
from pipeline.online.packfile import (
    TILE_DTYPE,
    MappedPack,
    PackInfo,
    advice,
    ask_for_file,
    format_bytes,
    open_pack,
    read_frame_file,
)
from pipeline.online.pages import Extent, MappedPages
from pipeline.online.ram import RAM_ROOT, hold_in_ram

Cache = Literal["auto", "ram", "disk", "off"]
Jpeg = bytes | memoryview
Indices = Sequence[int] | np.ndarray


class Store(Protocol):
    """Where the bytes of a clip come from. `video` is the manifest's `frames` value."""

    def read(self, video: str, indices: Indices) -> Sequence[Jpeg]:
        """The JPEG of each frame, in the order asked; an index may come more than once."""

    def times_us(self, video: str) -> np.ndarray:
        """int64 (num_frames,): whole microseconds since the first frame; not to be written to."""


class FolderStore:
    """Frames as they lie in their folders: one file opened, read and closed for each.

    Safe in threads and forked processes; pickles as its path. What frames.json says of the
    videos read last is kept, up to `index_bytes` in each process (2 MB: 900 clips of UCF101).
    """

    def __init__(self, root: str | Path, *, index_bytes: int = 2 << 20) -> None:
        self._root = Path(root).absolute()
        self._index_bytes = index_bytes
        self._counters = SharedCounters()
        self._recent: _Recent | None = None
        if not self._root.is_dir():
            raise StoreError(f"no folder of frames at {self._root}: run `make frames` first")

    def __repr__(self) -> str:
        return f"FolderStore({str(self._root)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recent": None}

    def read(self, video: str, indices: Indices) -> list[bytes]:
        """The JPEG of each frame; StoreError names what is missing, cut or out of range."""
        times, sizes = self._index(video)
        wanted = checked_indices(indices, len(times), f"folder store {self._root}: video {video!r}")
        folder = f"{self._root}/{video}"
        jpegs = [read_frame_file(f"{folder}/{frame_name(i, int(times[i]))}", int(sizes[i])) for i in wanted]
        self._counters.add(StoreCounters(1, len(jpegs), sum(map(len, jpegs))))
        return jpegs

    def read_ahead(self, video: str, indices: Indices) -> None:
        """Ask the system to fetch frames that `read` will want soon; does not wait for them."""
        times, _ = self._index(video)
        for i in checked_indices(indices, len(times), f"folder store {self._root}: video {video!r}"):
            ask_for_file(f"{self._root}/{video}/{frame_name(i, int(times[i]))}")

    def times_us(self, video: str) -> np.ndarray:
        """int64 (num_frames,): whole microseconds since the first frame."""
        return self._index(video)[0]

    def counters(self) -> StoreCounters:
        """What was read so far, by all processes together. Whether it was in memory is not watched."""
        return self._counters.read()

    def _index(self, video: str) -> tuple[np.ndarray, np.ndarray]:
        """Times and sizes of a video's frames, int64 (num_frames,) both."""
        recent = self._recent
        if recent is None or recent.process != os.getpid():  # a fork may have copied a lock that is held
            recent = self._recent = _Recent(self._index_bytes)
        found = recent.get(video)
        if found is None:
            try:
                frames = read_frames_json(self._root / video)
            except FolderError as error:
                raise StoreError(f"folder store {self._root}: no video {video!r}: {error}") from error
            found = np.asarray(frames.times_us, dtype=np.int64), np.asarray(frames.sizes, dtype=np.int64)
            found[0].flags.writeable = False
            recent.put(video, found)
        return found


class PackStore:
    """Frames as views into one mapped file that all processes of the machine share.

    Opening costs the same for a million videos as for ten, and so does pickling: the path, and
    the pack's fingerprint, so that a worker that opens the pack anew cannot get another one.
    Safe in threads and forked processes. Open files: two for each store and process.

    A view stays valid as long as somebody holds it, also after `close` and after the pack was
    replaced by a newer one. Who cuts the file short while it is mapped ends every process that
    reads it; `make pack` never does, it puts another file in its place.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        self._counters = SharedCounters()
        self._opened: _Opened | None = _Opened.at(self._path)
        self._fingerprint = self._opened.pack.info.fingerprint

    def __repr__(self) -> str:
        return f"PackStore({str(self._path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the maps; the next call opens them again."""
        self._opened = None

    @property
    def path(self) -> Path:
        """The pack's folder."""
        return self._path

    @property
    def info(self) -> PackInfo:
        """Counts, and what the pack was built from."""
        return self._open().pack.info

    def read(self, video: str, indices: Indices) -> list[memoryview]:
        """The JPEG of each frame, not copied; StoreError names a video or frame that is not there.

        A JpegRun where the frames follow each other, as those of a clip with stride 1 do. What is not in
        memory is asked for in one request a window; touching the bytes waits for it.
        """
        opened = self._open()
        row = self._row(opened, video)
        numbers, extents = self._extents(opened, row, video, indices)
        watched, resident = opened.pages.fetch(extents)
        self._counters.add(
            StoreCounters(1, len(extents), sum(end - start for start, end in extents), watched, resident)
        )
        if all(end == start for (_, end), (start, _) in pairwise(extents)) and extents:
            first, last = extents[0][0], extents[-1][1]
            tile_bytes = opened.tile_bytes(row, int(numbers[0]), len(numbers))
            ends = [end - first for _, end in extents]
            return JpegRun(opened.pages.bytes[first:last], ends, tile_bytes)
        return [opened.pages.bytes[start:end] for start, end in extents]

    def read_ahead(self, video: str, indices: Indices) -> None:
        """Ask the system to fetch frames that `read` will want soon; does not wait for them."""
        opened = self._open()
        _, extents = self._extents(opened, self._row(opened, video), video, indices)
        opened.pages.fetch(extents)

    def times_us(self, video: str) -> np.ndarray:
        """int64 (num_frames,): whole microseconds since the first frame; a view, not to be written to."""
        opened = self._open()
        index, row = opened.pack.index, self._row(opened, video)
        return index.times_us[index.first_frames[row] : index.first_frames[row + 1]]

    def counters(self) -> StoreCounters:
        """What was read so far, by all processes together, and how much of it was in memory before."""
        return self._counters.read()

    def resident_share(self) -> float | None:
        """Share of the JPEGs' bytes that are in memory now; None where the system does not tell."""
        return self._open().pages.resident_share()

    def check_against(self, manifest: Manifest, *, frames_root: Path | None = None) -> None:
        """StoreError where the pack is not of the frames that a manifest speaks of.

        Looks at the options, and at every row's folder and number of frames: 3 s for 1,000,000
        rows. With `frames_root` also at every frames.json, which costs a file for each video.
        """
        found = find_difference(self._open().pack, manifest, frames_root=frames_root)
        if found is not None:
            raise StoreError(
                f"pack {self._path} was built from other frames ({found}): "
                f"run `make pack DATASET={manifest.dataset}`"
            )

    def _open(self) -> "_Opened":
        opened = self._opened
        if opened is None:
            try:
                opened = _Opened.at(self._path)
            except StoreError as error:
                raise StoreError(f"{error} (it was there when this store was opened)") from error
            if opened.pack.info.fingerprint != self._fingerprint:
                raise StoreError(f"pack {self._path} was replaced since this store was opened: start again")
            self._opened = opened
        return opened

    def _row(self, opened: "_Opened", video: str) -> int:
        """The number of a video in the pack."""
        recent_video, recent_row = opened.recent
        if video == recent_video:  # who asks for its times asks for its frames next
            return recent_row
        index = opened.pack.index
        row = index.row(video)
        if row is None:
            raise StoreError(
                f"pack {self._path} has no video {video!r} (it has {len(index.prints)}): "
                f"{advice(self._path)} if it was added later"
            )
        opened.recent = video, row
        return row

    def _extents(
        self, opened: "_Opened", row: int, video: str, indices: Indices
    ) -> tuple[np.ndarray, list[Extent]]:
        """Frames as int64 (T,), and where their bytes are."""
        index = opened.pack.index
        first, end = int(index.first_frames[row]), int(index.first_frames[row + 1])
        checked = checked_indices(indices, end - first, f"pack {self._path}: video {video!r}")
        numbers = np.asarray(checked, dtype=np.int64)
        begins, ends = index.frame_offsets[numbers + first], index.frame_offsets[numbers + (first + 1)]
        return numbers, list(zip(begins.tolist(), ends.tolist(), strict=True))


@dataclass(slots=True)
class _Opened:
    """What a process holds of a pack while it reads from it."""

    pack: MappedPack
    pages: MappedPages
    tile_pages: MappedPages | None
    """Of tiles.bin."""
    recent: tuple[str | None, int] = None, 0
    """The video that was looked up last, and its row."""

    @classmethod
    def at(cls, path: Path) -> "_Opened":
        pack = open_pack(path)
        is_memory = path.resolve().is_relative_to(RAM_ROOT)
        pages = partial(MappedPages, is_own=pack.is_own, is_memory=is_memory)
        return cls(pack, pages(pack.frames), None if pack.tiles is None else pages(pack.tiles))

    def tile_bytes(self, row: int, first: int, count: int) -> np.ndarray | None:
        """uint16 (count, tiles): what tiles.bin says of frames of a video that follow each other."""
        if self.tile_pages is None:
            return None
        index = self.pack.index
        tiles_at, tiles_end = int(index.first_tiles[row]), int(index.first_tiles[row + 1])
        each = (tiles_end - tiles_at) // int(index.first_frames[row + 1] - index.first_frames[row])
        begin, size = tiles_at + first * each, TILE_DTYPE.itemsize
        self.tile_pages.fetch([(begin * size, (begin + count * each) * size)])
        found = np.frombuffer(self.tile_pages.bytes, TILE_DTYPE, count * each, begin * size)
        return found.reshape(count, each)


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, and why it is this one."""

    store: FolderStore | PackStore
    cache: Literal["ram", "disk", "off"]
    reason: str
    """One line for the user, with the sum that decided."""


def open_store(
    frames_root: str | Path,
    pack: str | Path,
    *,
    cache: Cache = "auto",
    manifest: Manifest | None = None,
    is_thorough: bool = False,
    ram_root: Path = RAM_ROOT,
) -> OpenedStore:
    """The store to read a dataset from.

    off    the folders of frames
    disk   the pack as it lies
    ram    a copy of the pack in /dev/shm, one for the machine, made now if there is none
    auto   ram where the pack is under half of what is free, else disk; off where there is no pack

    With a manifest, a pack of other frames is refused: `PackStore.check_against`, and
    `is_thorough` has it look at every frames.json.
    """
    frames_root, pack = Path(frames_root), Path(pack)
    if cache == "off" or (cache == "auto" and not pack.exists()):
        why = "cache=off" if cache == "off" else f"no pack at {pack} ({advice(pack)} for faster reads)"
        return OpenedStore(
            FolderStore(frames_root), "off", f"{why}: files opened one by one in {frames_root}"
        )
    on_disk = PackStore(pack)
    if manifest is not None:
        on_disk.check_against(manifest, frames_root=frames_root if is_thorough else None)
    if cache == "disk":
        size = format_bytes(on_disk.info.total_bytes)
        return OpenedStore(
            on_disk, "disk", f"cache=disk: pack {size} at {pack}, shared through the page cache"
        )
    copy, reason = hold_in_ram(pack, on_disk.info, only_if_small=cache == "auto", ram_root=ram_root)
    return (
        OpenedStore(on_disk, "disk", reason) if copy is None else OpenedStore(PackStore(copy), "ram", reason)
    )


def checked_indices(indices: Indices, num_frames: int, place: str) -> list[int]:
    """Frame numbers as plain integers; StoreError, beginning with `place`, for one that is not there."""
    wanted = np.asarray(indices)
    if wanted.size == 0:
        return []
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise StoreError(f"{place}: frame numbers must be a list of integers, got {indices!r}")
    numbers: list[int] = wanted.tolist()
    for number in numbers:
        if not 0 <= number < num_frames:
            raise StoreError(f"{place} has no frame {number}: they are 0 to {num_frames - 1}")
    return numbers


class _Recent:
    """The arrays of the videos that were used last, up to a number of bytes; for one process."""

    def __init__(self, limit_bytes: int) -> None:
        self.process = os.getpid()
        self._limit = limit_bytes
        self._held = 0
        self._entries: OrderedDict[str, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, video: str) -> tuple[np.ndarray, np.ndarray] | None:
        with self._lock:
            if video in self._entries:
                self._entries.move_to_end(video)
            return self._entries.get(video)

    def put(self, video: str, entry: tuple[np.ndarray, np.ndarray]) -> None:
        with self._lock:
            if video in self._entries:
                return  # another thread was faster
            self._entries[video] = entry
            self._held += entry[0].nbytes + entry[1].nbytes
            while self._held > self._limit:
                _, (times, sizes) = self._entries.popitem(last=False)
                self._held -= times.nbytes + sizes.nbytes
