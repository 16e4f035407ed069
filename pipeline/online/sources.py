"""What one more modality has to offer: values and a mask for the moment of a clip.

A source is told of a clip what its frames' times are, and gives back arrays. It knows nothing of
frames, stores or batches, so that a new one is a class with two methods.
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from pipeline.errors import SourceError

Missing = Literal["error", "mask"]
"""A video for which a source has nothing: `error` raises SourceError when a clip of it is read; `mask`
gives values of zero whose mask is False throughout. `rows_without` finds such videos beforehand, so that
they can be left out with a count instead."""


class ClipSpan(NamedTuple):
    """What a source is told of a clip."""

    video: str
    """The manifest's `frames` of its video."""
    times_s: np.ndarray
    """float64 (T,): seconds of each frame since the video's first. They fall where a short video loops."""
    start_s: float = 0.0
    """The video's first frame by its own timestamp (seconds): absolute time = start_s + times_s."""
    flipped: bool = False
    """Whether the clip was mirrored, left to right."""


class SourceSample(NamedTuple):
    """What a source gives for a clip."""

    values: np.ndarray
    """(T, C) at the frames' times, (L, C) for a window of L readings, or a shape of the source's own."""
    mask: np.ndarray
    """bool, a shape that `values` begins with: False where values are made up: held, or of a file missing."""
    times_s: np.ndarray | None = None
    """float64 (L,): seconds since the video's first frame, where values are not at the frames' times."""


class Source(Protocol):
    """One more modality beside the frames. Sent to worker processes, so it holds no open file."""

    @property
    def ragged(self) -> bool:
        """Whether the first axis of `values` differs from clip to clip, so that a batch must pad it."""

    def has(self, video: str) -> bool:
        """Whether there is anything for this video."""

    def read(self, clip: ClipSpan) -> SourceSample:
        """A pure function of the clip; SourceError where it cannot be read."""


def rows_without(sources: Mapping[str, Source], videos: Sequence[str]) -> dict[str, list[int]]:
    """For each source, the positions of the videos that it has nothing for, ascending.

    To leave such videos out with a count, or to say before the first batch how many will be masked.
    """
    return {
        name: [row for row, video in enumerate(videos) if not source.has(video)]
        for name, source in sources.items()
    }


def check_pattern(pattern: str) -> None:
    """ValueError where a pattern would give the same file for every video, or one outside of the root."""
    parts = PurePosixPath(pattern)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"a pattern is a path below the root, got {pattern!r}")
    if "{video}" not in pattern and "{name}" not in pattern:
        raise ValueError(f"a pattern names the video by {{video}} or {{name}}, got {pattern!r}")


def path_for(root: Path, pattern: str, video: str) -> Path:
    """The file of a video: `{video}` stands for its key and `{name}` for the last part of that.

    >>> path_for(Path("data"), "imu/{video}.csv", "Jump/v_01").as_posix()
    'data/imu/Jump/v_01.csv'
    >>> path_for(Path("data"), "imu/{name}.csv", "Jump/v_01").as_posix()
    'data/imu/v_01.csv'
    """
    meant = {"{video}": video, "{name}": PurePosixPath(video).name}
    return root / re.sub(r"\{video\}|\{name\}", lambda found: meant[found[0]], pattern)


class Padded(NamedTuple):
    """Windows of different lengths side by side."""

    values: np.ndarray
    """(B, L, ...), of the windows' own dtype; L is the longest of them."""
    lengths: np.ndarray
    """int64 (B,)"""
    mask: np.ndarray
    """bool (B, L): True where there is a reading."""


def pad_ragged(windows: Sequence[np.ndarray], *, fill: float = 0.0) -> Padded:
    """Windows (L, ...) that are of one shape but for L, filled up at their ends to the longest.

    SourceError, with the position, for one that does not fit the first.
    """
    if not windows:
        raise ValueError("no windows to pad")
    for position, window in enumerate(windows):
        if not window.ndim or window.shape[1:] != windows[0].shape[1:]:
            expected = ", ".join(["L", *map(str, windows[0].shape[1:])])
            raise SourceError(f"window {position} is {window.shape}, expected ({expected}) as the first")
    lengths = np.array([len(window) for window in windows], dtype=np.int64)
    mask = np.arange(lengths.max()) < lengths[:, None]  # (B, L)
    values = np.full((*mask.shape, *windows[0].shape[1:]), fill, dtype=windows[0].dtype)
    values[mask] = np.concatenate(windows)
    return Padded(values, lengths, mask)


def mirror_axes(values: np.ndarray, columns: Sequence[str], axes: Collection[str]) -> np.ndarray:
    """A copy in which the channels named in `axes` have the other sign: what a mirrored world reads.

    values (..., C), with C names in `columns`. SourceError for an axis that is no column.

    Mirrored left to right, an acceleration changes its sign along the lateral axis. A rotation does so about
    the two other axes: seen in a mirror, a nod is still a nod, but a turn to the left is one to the right.

    >>> mirror_axes(np.array([[1.0, 2.0]]), ["acc_x", "gyro_x"], ["acc_x"]).tolist()
    [[-1.0, 2.0]]
    """
    for axis in axes:
        if axis not in columns:
            raise SourceError(f"no column is named {axis!r} to be mirrored, only {', '.join(columns)}")
    signs = np.array([-1 if name in axes else 1 for name in columns], dtype=values.dtype)
    return np.asarray(values * signs)


V = TypeVar("V")


class Recent(Generic[V]):
    """The values that were asked for last, up to a number of bytes.

    Each process has its own: a copy that was pickled or forked starts empty. Safe for threads; two that
    miss at once both make the value.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self._start_empty()

    def __reduce__(self) -> tuple[type["Recent[V]"], tuple[int]]:
        return type(self), (self.max_bytes,)

    def __len__(self) -> int:
        return len(self._values) if self._pid == os.getpid() else 0

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._bytes if self._pid == os.getpid() else 0

    def get(self, key: Hashable, make: Callable[[], V], size_of: Callable[[V], int]) -> V:
        """The value of a key, made if it is not there. One that is larger than the limit is not kept."""
        if self._pid != os.getpid():
            self._start_empty()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        with self._lock:
            self._keep(key, value, size_of(value))
        return value

    def _keep(self, key: Hashable, value: V, size: int) -> None:
        if key in self._values or size > self.max_bytes:
            return
        self._values[key] = (value, size)
        self._bytes += size
        while self._bytes > self.max_bytes:
            self._bytes -= self._values.popitem(last=False)[1][1]

    def _start_empty(self) -> None:
        """The lock too is made anew: a thread that held it does not exist in a forked child."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._bytes = 0
