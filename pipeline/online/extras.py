"""What a batch carries beside its pictures: further sources at the frames' times, and numbers of rows.

ClipDataset(..., sources={"imu": SeriesSource(...)}, row_extras={"source_id": ids})

extras["imu"]          values: (B, T, C) at the frames' times, (B, L, C) for windows of readings, or (B, ...)
extras["imu_mask"]     bool, a shape that the values begin with: False where they are made up or padded
extras["imu_lengths"]  int64 (B,): readings of each clip, of a ragged source alone
extras["imu_times_s"]  float64 (B, L): seconds since the video's first frame, likewise
extras["source_id"]    (B,): the number of each clip's row; whole ones are int64
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import SourceError
from pipeline.manifest import Manifest
from pipeline.online.collate import collate_extras
from pipeline.online.columns import shared
from pipeline.online.sources import ClipSpan, Source, SourceSample, rows_without

_SUFFIXES = {"values": "", "mask": "_mask", "lengths": "_lengths", "times_s": "_times_s"}
"""What follows a source's name, by the part that its batch has."""


class Extras:
    """Further sources of a dataset, and numbers of its rows.

    sources  one more modality each, by the name that its values get
    numbers  (N,) for N rows, by name: shared memory, of which workers are sent file descriptors

    ValueError for a name that would stand for two things, or numbers that are not one for each row.
    """

    def __init__(
        self, manifest: Manifest, sources: Mapping[str, Source], numbers: Mapping[str, np.ndarray]
    ) -> None:
        check_names([*(key for name in sources for key in keys_of(name)), *numbers])
        self.sources = dict(sources)
        self._start_s = _shared(manifest.column("start_s")) if sources else None
        self._numbers = {name: _checked(name, values, len(manifest)) for name, values in numbers.items()}

    def __bool__(self) -> bool:
        return bool(self.sources or self._numbers)

    def draw_row_like(self, row: int, num_rows: int, rng: np.random.Generator) -> int:
        """Another row of the same source, by `source_id` of the numbers; any row where there is none."""
        ids = self._numbers.get("source_id")
        if ids is None:
            return int(rng.integers(num_rows))
        alike = np.flatnonzero(ids.numpy() == ids[row].item())
        others = alike[alike != row]
        return int(rng.choice(others)) if others.size else int(rng.integers(num_rows))

    def read(self, row: int, video: str, times_s: np.ndarray, *, flipped: bool) -> dict[str, SourceSample]:
        """What each source has for a clip, by its name; SourceError where one cannot be read."""
        start_s = 0.0 if self._start_s is None else float(self._start_s[row])
        clip = ClipSpan(video, times_s, start_s, flipped)
        return {name: source.read(clip) for name, source in self.sources.items()}

    def collate(
        self, samples: Sequence[Mapping[str, SourceSample]], rows: Sequence[int], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Those of a batch, flat, as the head of this module has it; CollateError names what does not fit.

        names  what an error calls each clip
        """
        ragged = [name for name, source in self.sources.items() if source.ragged]
        parts = collate_extras(samples, names=names, ragged=ragged) if self.sources else {}
        flat = {
            name + _SUFFIXES[part]: tensor
            for name, source in parts.items()
            for part, tensor in source.items()
        }
        return flat | {name: values[torch.tensor(rows)] for name, values in self._numbers.items()}


class LeftOut(NamedTuple):
    """A manifest without the videos for which a source has nothing."""

    manifest: Manifest
    missing: dict[str, int]
    """Videos that each source has nothing for, by its name; one video may count for several."""


def leave_out_missing(manifest: Manifest, sources: Mapping[str, Source]) -> LeftOut:
    """The rows of which every source has something, and how many videos each one lacks.

    For sources without which a clip is of no use; `missing="mask"` of their specs keeps such videos instead.
    Looks for each file once. SourceError where no row is left.
    """
    videos = manifest.column("frames").to_pylist()
    without = rows_without(sources, videos)
    lacking = {row for rows in without.values() for row in rows}
    missing = {name: len(rows) for name, rows in without.items()}
    if len(lacking) == len(videos):
        counts = ", ".join(f"{name} lacks {count}" for name, count in missing.items())
        raise SourceError(
            f"none of {len(videos)} videos has all sources ({counts}): see their root and pattern"
        )
    if not lacking:
        return LeftOut(manifest, missing)
    kept = [video for row, video in enumerate(videos) if row not in lacking]
    return LeftOut(manifest.select(status=None, frames=kept), missing)


def keys_of(source: str) -> list[str]:
    """All keys that a source of this name may have in a batch's extras.

    >>> keys_of("imu")
    ['imu', 'imu_mask', 'imu_lengths', 'imu_times_s']
    """
    return [source + suffix for suffix in _SUFFIXES.values()]


def check_names(names: Iterable[str]) -> None:
    """ValueError for a key that a batch's extras would have twice; `seed` is each clip's own already."""
    taken = {"seed"}
    for name in names:
        if not name or "." in name:
            raise ValueError(f"a source's name is a word without a dot, got {name!r}")
        if name in taken:
            raise ValueError(f"extras would have {name!r} twice, as a name or one with a suffix: rename one")
        taken.add(name)


def _checked(name: str, values: np.ndarray, num_rows: int) -> Tensor:
    array = np.asarray(values)
    if array.shape != (num_rows,) or array.dtype.kind not in "biuf":
        found = f"{array.dtype} {array.shape}"
        raise ValueError(f"row_extras {name!r} must have a number for each of {num_rows} rows, got {found}")
    return _shared(array.astype(np.int64) if array.dtype.kind in "iu" else array)


def _shared(values: Any) -> Tensor:
    return shared(torch.from_numpy(np.array(values)))
