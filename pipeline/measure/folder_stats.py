"""What only frames.json tells of a dataset: uneven times, equal sources, bytes of a frame."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import FolderError
from pipeline.folder import FrameFolder, read_frames_json
from pipeline.manifest import Manifest

TOLERANCE_US = 2_100
"""Gaps between frames that differ by less are even: Matroska and FLV keep whole milliseconds, which moves
each end of a gap by up to 1 ms."""

VARIABLE_SHARE = 0.05
"""With more than this share of uneven gaps a rate is variable; with less, frames are missing."""

_MAX_ERRORS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenVideo:
    """A video whose frames are not all equally far apart in time."""

    row: int
    """Of the rows looked at."""
    video: str
    fps: float
    gaps: int
    uneven: int
    """Gaps that differ from the median one by more than `TOLERANCE_US`."""
    shortest_s: float
    longest_s: float

    @property
    def is_variable(self) -> bool:
        """Whether the rate itself varies, and not just a frame is missing."""
        return self.uneven > max(VARIABLE_SHARE * self.gaps, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderStats:
    """What frames.json says in some or all folders of a dataset."""

    total: int
    """Folders that there are by the manifest."""
    looked_at: int
    num_unreadable: int
    unreadable: tuple[str, ...]
    """What is wrong with the first of them."""
    frames: int
    """Frames of all that can be read."""
    frame_bytes: int
    """Bytes of their JPEGs."""
    uneven: tuple[UnevenVideo, ...]
    """Most uneven gaps first."""
    duplicates: tuple[tuple[int, ...], ...]
    """Rows whose sources have the same content, by SHA-256: two or more in each, in the manifest's order."""

    @property
    def is_all(self) -> bool:
        """Whether no folder was left out."""
        return self.looked_at == self.total


def read_folder_stats(
    root: Path,
    manifest: Manifest,
    *,
    max_folders: int,
    on_folder: Callable[[], object] = lambda: None,
) -> FolderStats:
    """Read frames.json of a manifest's rows, all of which have frames; evenly spaced ones beyond the limit.

    13,320 folders of UCF101's length take 4 s when they are in memory. `on_folder` is called after each.
    """
    rows = choose_evenly(len(manifest), max_folders)
    keys = manifest.column("frames").take(rows).to_pylist()
    errors: list[str] = []
    uneven: list[UnevenVideo] = []
    sources: dict[str, list[int]] = defaultdict(list)
    frames = frame_bytes = 0
    for row, key in zip(rows.tolist(), keys, strict=True):
        try:
            folder = read_frames_json(root / key)
        except FolderError as error:
            errors.append(str(error))
        else:
            frames, frame_bytes = frames + folder.num_frames, frame_bytes + sum(folder.sizes)
            sources[folder.source.sha256].append(row)
            if found := find_uneven(row, folder):
                uneven.append(found)
        on_folder()
    return FolderStats(
        total=len(manifest),
        looked_at=len(rows),
        num_unreadable=len(errors),
        unreadable=tuple(errors[:_MAX_ERRORS]),
        frames=frames,
        frame_bytes=frame_bytes,
        uneven=tuple(sorted(uneven, key=lambda one: (-one.uneven / one.gaps, one.row))),
        duplicates=tuple(tuple(same) for same in sources.values() if len(same) > 1),
    )


def choose_evenly(count: int, most: int) -> np.ndarray:
    """int64 (min(count, most),), rising: numbers from 0 to count - 1, evenly spaced, with both ends.

    >>> choose_evenly(9, 3).tolist(), choose_evenly(2, 5).tolist()
    ([0, 4, 8], [0, 1])
    """
    return np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(np.int64)


def find_uneven(row: int, folder: FrameFolder) -> UnevenVideo | None:
    """How uneven a video's times are; None where they are even."""
    gaps_us = np.diff(folder.times_us)
    uneven = count_uneven(gaps_us)
    if not uneven:
        return None
    return UnevenVideo(
        row=row,
        video=folder.video,
        fps=folder.fps,
        gaps=len(gaps_us),
        uneven=uneven,
        shortest_s=float(gaps_us.min()) / 1e6,
        longest_s=float(gaps_us.max()) / 1e6,
    )


def count_uneven(gaps_us: np.ndarray | Sequence[int]) -> int:
    """How many gaps (N,) differ from the median one by more than `TOLERANCE_US`.

    >>> count_uneven([40_000, 40_000, 41_000, 80_000]), count_uneven([])
    (1, 0)
    """
    gaps_us = np.asarray(gaps_us)
    if not len(gaps_us):
        return 0
    return int((np.abs(gaps_us - np.median(gaps_us)) > TOLERANCE_US).sum())
