"""Clips kept as they were made, decoded and augmented, for the epochs that show the same ones again.

`EpochSampler(..., reuse=k)` gives the same refs in k epochs, each in an order of its own; here the clip of a
ref is looked up before it is made. What a clip is does not depend on this: the stream with the cache is
the stream without it, bit by bit.

One file, mapped by all workers (and by the ranks that give the same `run`), has a slot for each clip of an
epoch. The clips of the next k epochs take the slots over, row by row. The file goes when its last user does;
what a killed run leaves, the next cache in the same place removes.
"""

import fcntl
import hashlib
import mmap
import os
import pickle
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.errors import PipelineError
from pipeline.files import free_bytes
from pipeline.manifest import Manifest
from pipeline.online.augment import AugmentSpec
from pipeline.online.counters import SharedCounters, StoreCounters
from pipeline.online.pack import locked
from pipeline.online.packfile import format_bytes
from pipeline.online.ram import RAM_ROOT, free_memory
from pipeline.online.samplers import ClipRef
from pipeline.online.store import Store
from pipeline.online.windows import WindowSpec

_PREFIX = f"clipfeed-{os.getuid()}-clips-"
_ALIGN_BYTES = 64


class ReuseError(PipelineError):
    """Clips cannot be kept: no room, or they do not fit what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseSpec:
    """Where clips are kept from epoch to epoch. Only of use beside `EpochSampler(..., reuse=k)`, k > 1."""

    root: Path = RAM_ROOT
    """A folder in memory or on a local disk."""
    clips_per_video: int = 1
    """The sampler's: clips of each row that are kept."""
    run: str | None = None
    """A name by which the ranks of one run on one machine share their clips; None: for this process and its
    workers alone. Runs of different seeds need different names, or each throws out what the other keeps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))
        if self.clips_per_video < 1:
            raise ValueError(f"clips_per_video must be >= 1, got {self.clips_per_video}")


class Kept(NamedTuple):
    """What is known of a clip beside its pictures."""

    indices: np.ndarray
    """int64 (T,): its frames."""
    times_s: np.ndarray
    """float64 (T,)"""
    height: int
    width: int
    """Pixels of the stored frames, before they were cut."""


class ClipCache:
    """Clips by their ref, in one file that processes share: a slot for each row and clip of a row.

    rows        rows of the manifest
    frames      T, frames of a clip
    clip_bytes  of the largest clip
    content     what decides the pixels of a ref, in words: only equal ones are ever shared

    Each of `get` and `put` holds a lock on its slot and on no other, and never waits for one: a slot that
    somebody else has in hand counts as a miss, and the clip is made. A process that is killed while it writes
    leaves an empty slot. ReuseError, with the sum, where the clips cannot fit.
    """

    def __init__(
        self, spec: ReuseSpec, *, rows: int, frames: int, clip_bytes: int, content: tuple[str, ...]
    ) -> None:
        name = uuid.uuid4().hex if spec.run is None else spec.run
        self.clips_per_video = spec.clips_per_video
        self._layout = _Layout(max(rows, 1) * spec.clips_per_video, frames, clip_bytes)
        text = "\0".join([name, *content, repr(self._layout), str(spec.clips_per_video)])
        self.path = spec.root / (_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16])
        self._counters = SharedCounters()
        self._opened: _Opened | None = None
        descriptor = _hold(self.path, self._layout)
        self._close = weakref.finalize(self, _let_go, descriptor, self.path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_close": None}

    def close(self) -> None:
        """Let go of the file, which is removed with its last user; also done when this object goes."""
        self._opened = None
        if self._close is not None:
            self._close()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, all of them set aside from the beginning."""
        return self._layout.num_bytes

    def counters(self) -> StoreCounters:
        """What was asked for, by this process and its workers: `reads` is clips, `hit_rate` is of clips."""
        return self._counters.read()

    def has(self, ref: ClipRef) -> bool:
        """Whether a clip is there now."""
        opened = self._open()
        return any(opened.is_of(slot, ref) for slot in self._slots(ref))

    def get(self, ref: ClipRef, out: np.ndarray | None = None) -> tuple[Kept, np.ndarray] | None:
        """A clip and its pictures, uint8 (T, H, W, 3), in `out` where there is one; None: it is not there."""
        opened = self._open()
        found = next((slot for slot in self._slots(ref) if opened.is_of(slot, ref)), None)
        clip = None if found is None else opened.read(found, ref, out)
        frames, num_bytes = (0, 0) if clip is None else (len(clip[1]), clip[1].nbytes)
        self._counters.add(StoreCounters(1, frames, num_bytes, 1, int(clip is not None)))
        return clip

    def put(self, ref: ClipRef, kept: Kept, pixels: np.ndarray) -> None:
        """Keep a clip, uint8 (T, H, W, 3), in place of its row's oldest; ReuseError for one too large."""
        if pixels.nbytes > self._layout.clip_bytes:
            raise ReuseError(
                f"a clip {pixels.shape} takes {format_bytes(pixels.nbytes)}, the cache has room for "
                f"{format_bytes(self._layout.clip_bytes)} each: a transform must not enlarge clips"
            )
        opened = self._open()
        slots = self._slots(ref)
        if not any(opened.is_of(slot, ref) for slot in slots):
            oldest, stamp = min(slots, key=opened.age), 1 + max(map(opened.age, slots))
            opened.write(oldest, stamp, ref, kept, pixels)

    def _slots(self, ref: ClipRef) -> range:
        first = ref.video * self.clips_per_video
        return range(first, first + self.clips_per_video)

    def _open(self) -> "_Opened":
        opened = self._opened
        if opened is None or opened.process != os.getpid():  # a fork may have copied a lock that is held
            opened = self._opened = _Opened(self.path, self._layout)
        return opened


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where what lies in the file."""

    slots: int
    frames: int
    clip_bytes: int

    @property
    def head(self) -> np.dtype:
        """Of a slot: before its pixels. `stamp` counts the clips of a row up; 0: nothing whole is here."""
        each = ("<i8", (self.frames,)), ("<f8", (self.frames,))
        fields = [("stamp", "<i8"), ("ref", "<i8", (4,)), ("shape", "<i8", (4,)), ("size", "<i8", (2,))]
        return np.dtype([*fields, ("indices", *each[0]), ("times_s", *each[1])])

    @property
    def head_bytes(self) -> int:
        return -(-self.head.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.head_bytes + -(-self.clip_bytes // _ALIGN_BYTES) * _ALIGN_BYTES

    @property
    def num_bytes(self) -> int:
        return self.slots * self.slot_bytes


class _Opened:
    """The file as one process has it."""

    def __init__(self, path: Path, layout: _Layout) -> None:
        self.process = os.getpid()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ReuseError(f"{path} cannot be opened ({error.strerror}): its dataset was closed") from error
        weakref.finalize(self, os.close, self._descriptor)
        mapping = mmap.mmap(self._descriptor, layout.num_bytes)
        stride, head = layout.slot_bytes, layout.head
        self._heads = np.ndarray((layout.slots,), head, mapping, 0, (stride,))
        shape = layout.slots, layout.clip_bytes
        self._pixels = np.ndarray(shape, np.uint8, mapping, layout.head_bytes, (stride, 1))
        self._refs, self._stamps = self._heads["ref"], self._heads["stamp"]
        self._guard, self._in_hand = threading.Lock(), set[int]()

    def is_of(self, slot: int, ref: ClipRef) -> bool:
        return bool(self._stamps[slot]) and self._refs[slot].tolist() == [*ref]

    def age(self, slot: int) -> int:
        return int(self._stamps[slot])

    def read(self, slot: int, ref: ClipRef, out: np.ndarray | None) -> tuple[Kept, np.ndarray] | None:
        with self._claimed(slot, fcntl.LOCK_SH) as is_ours:
            if not is_ours or not self.is_of(slot, ref):
                return None
            head, stamp = self._heads[slot], self.age(slot)
            shape = tuple(head["shape"].tolist())
            pixels = np.empty(shape, np.uint8) if out is None else out
            np.copyto(pixels, self._pixels[slot, : pixels.size].reshape(shape))
            kept = Kept(head["indices"].copy(), head["times_s"].copy(), *head["size"].tolist())
            # A second cache of this file in this process would, when it is closed, end our lock.
            return (kept, pixels) if self.age(slot) == stamp else None

    def write(self, slot: int, stamp: int, ref: ClipRef, kept: Kept, pixels: np.ndarray) -> None:
        with self._claimed(slot, fcntl.LOCK_EX) as is_ours:
            if not is_ours:
                return
            self._stamps[slot] = 0
            head = self._heads[slot]
            head["ref"], head["shape"], head["size"] = ref, pixels.shape, (kept.height, kept.width)
            head["indices"], head["times_s"] = kept.indices, kept.times_s
            self._pixels[slot, : pixels.size] = pixels.reshape(-1)
            self._stamps[slot] = stamp

    @contextmanager
    def _claimed(self, slot: int, kind: int) -> Iterator[bool]:
        """Whether nobody else has the slot in hand who would mind, for as long as the block lasts.

        The file's lock keeps processes apart, and goes with a process that dies; it does not know of threads.
        """
        with self._guard:
            is_free = slot not in self._in_hand
            self._in_hand.add(slot)
        try:
            yield is_free and self._lock(slot, kind)
        finally:
            if is_free:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, slot)
                self._in_hand.discard(slot)

    def _lock(self, slot: int, kind: int) -> bool:
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, slot)
            return True
        return False


class Clips(Protocol):
    """What a cache is told of the dataset that it is for."""

    store: Store
    window: WindowSpec
    augment: AugmentSpec | None
    transform: Callable[[Any], Any] | None
    clip_bytes: int


def open_cache(spec: ReuseSpec, clips: Clips, manifest: Manifest) -> ClipCache:
    """A cache of a dataset's clips.

    What cannot be compared with another process's transform is taken for different, and then not shared.
    """
    try:
        transform = hashlib.sha256(pickle.dumps(clips.transform)).hexdigest()
    except Exception:
        transform = uuid.uuid4().hex  # a lambda, say
    content = manifest.fingerprint(), manifest.spec, clips.store, clips.window, clips.augment, transform
    return ClipCache(
        spec,
        rows=len(manifest),
        frames=clips.window.frames,
        clip_bytes=clips.clip_bytes,
        content=tuple(map(str, content)),
    )


def _lock_path(root: Path) -> Path:
    return root / f".{_PREFIX.rstrip('-')}.lock"


def _hold(path: Path, layout: _Layout) -> int:
    """A descriptor that stands for one user of the file, which is made where there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock_path(path.parent)):
            _remove_abandoned(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size != layout.num_bytes:
                    _set_aside(descriptor, path, layout)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
    except OSError as error:
        raise ReuseError(f"{path} cannot hold augmented clips: {error.strerror or error}") from error


def _set_aside(descriptor: int, path: Path, layout: _Layout) -> None:
    """Take all the room now: memory that is not there would end a worker in the middle of a run."""
    try:
        _check_room(path.parent, layout)
        os.posix_fallocate(descriptor, 0, layout.num_bytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _check_room(root: Path, layout: _Layout) -> None:
    memory = free_memory(root) if root.is_relative_to(RAM_ROOT) else None
    free = free_bytes(root) if memory is None else memory.bytes
    if layout.num_bytes > free:
        raise ReuseError(
            f"a cache of augmented clips needs {format_bytes(layout.num_bytes)}: {layout.slots} clips x "
            f"{format_bytes(layout.slot_bytes)}; {root} has {memory or format_bytes(free) + ' free'}: take "
            "fewer videos, frames or pixels, another ReuseSpec(root=...), or do without it"
        )


def _let_go(descriptor: int, path: Path, process: int) -> None:
    """One user less; the last one removes the file. Not for the children, who have copies of all this."""
    if os.getpid() != process:
        return
    with suppress(OSError), locked(_lock_path(path.parent)):
        _remove_unused(descriptor, path)
    os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    """Files whose users were killed."""
    for path in root.glob(f"{_PREFIX}*"):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _remove_unused(descriptor, path)
        finally:
            os.close(descriptor)


def _remove_unused(descriptor: int, path: Path) -> None:
    """Remove a file that nobody else has in use."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
