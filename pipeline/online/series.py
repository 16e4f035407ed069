"""Inertial and other readings at the moment of each frame, or the raw window of them.

    file -> read_series -> clean_readings -> ClockSpec -> align_to_frames, or window_of

**The clock, in one sentence**: video time = reading time * (1 + drift_ppm / 1e6) + offset_s. So a pulse
in the readings at 1.0 s that is a flash in the video at 1.5 s means `offset_s=0.5`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pipeline.errors import SourceError
from pipeline.online.series_files import TimeUnit, read_series, since_origin
from pipeline.online.sources import (
    ClipSpan,
    Missing,
    Recent,
    SourceSample,
    check_pattern,
    mirror_axes,
    path_for,
)
from pipeline.online.sources import pad_ragged as pad_ragged

_EPOCH_S = 1e8
"""Three years: readings that far from their video count from another zero."""
_MAX_RATE_HZ = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSpec:
    """How the clock of the readings stands to that of the video.

    >>> ClockSpec(offset_s=0.5).to_video_s(np.array([1.0])).tolist()
    [1.5]
    """

    offset_s: float = 0.0
    """Seconds to add to a reading's time to get the video's."""
    drift_ppm: float = 0.0
    """Millionths by which the readings' seconds are too long: at 100 a reading at 1000 s is at 1000.1 s of
    the video. Counted from the zero of the readings (`SeriesSpec.zero`)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.offset_s) and -1e6 < self.drift_ppm < 1e6):
            raise ValueError(f"offset_s must be finite and drift_ppm within a million, got {self}")

    def to_video_s(self, reading_times_s: np.ndarray) -> np.ndarray:
        """float64: times of readings on the video's clock. Order is kept."""
        return np.asarray(reading_times_s * (1.0 + self.drift_ppm / 1e6) + self.offset_s)


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """Readings in order, with no time twice and no value missing."""

    times_s: np.ndarray
    """float64 (R,): seconds since `origin_ns`, strictly increasing."""
    values: np.ndarray
    """float32 (R, C)"""
    origin_ns: int = 0
    """What the times count from, in nanoseconds of the clock that they were given by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """What was found in a series of readings, and what was done."""

    found: int
    """Readings as they came."""
    kept: int
    nan_times: int
    """Readings without a time: dropped."""
    disordered: int
    """Readings that came after a later one: sorted in."""
    repeated: int
    """Readings at the time of the one before: merged with it, each channel to the mean."""
    nan_values: int
    """Readings with a channel missing, after merging."""
    filled: int
    """Those of them that were filled by interpolation; the others are dropped."""
    longest_gap_s: float
    """Between one reading and the next; 0 where there is only one."""
    rate_hz: float
    """By the median step; 0 where there is only one reading."""
    bad_rows: int = 0
    """Lines of a file that could not be split into its columns: dropped."""


def clean_readings(
    times: np.ndarray,
    values: np.ndarray,
    *,
    time_unit: TimeUnit | None = None,
    origin_ns: int = 0,
    fill_gap_s: float | None = None,
) -> tuple[Readings, CleanReport]:
    """Readings fit for use, and what had to be done.

    times       (R,): int64 nanoseconds or float64 seconds (or another `time_unit`), in any order
    values      (R, C): NaN, or more than a float32 can hold, where a channel is missing
    origin_ns   what has been taken off the times already
    fill_gap_s  how far apart a channel's values may be for one that is missing between them to be
                interpolated; None: never

    In this order: readings without a time are dropped; the rest are sorted, stably; those at the same time
    become one, each channel the mean of its values; a missing channel is filled if `fill_gap_s` allows it;
    readings that still lack one are dropped. SourceError where nothing is left.
    """
    if values.ndim != 2 or len(values) != len(times):
        raise ValueError(f"expected times (R,) and values (R, C), got {times.shape} and {values.shape}")
    if len(times) == 0:
        raise SourceError("no readings: the file has a header and nothing else")
    times_s, origin = since_origin(times, unit=time_unit)
    timed = np.isfinite(times_s)
    times_s, kept = times_s[timed], values[timed].astype(np.float64)
    kept[np.abs(kept) > np.finfo(np.float32).max] = np.nan
    disordered = np.count_nonzero(times_s < np.maximum.accumulate(times_s))
    if disordered:
        order = np.argsort(times_s, kind="stable")
        times_s, kept = times_s[order], kept[order]
    merged_s, merged = _merged(times_s, kept)
    lacking = ~np.isfinite(merged).all(axis=1)
    if fill_gap_s is not None and lacking.any():
        merged = _filled(merged_s, merged, fill_gap_s)
    whole = np.isfinite(merged).all(axis=1)
    readings = Readings(merged_s[whole], merged[whole].astype(np.float32), origin_ns + origin)
    if len(readings.times_s) == 0:
        raise SourceError(f"none of {len(times)} readings has both a time and all its values")
    steps_s = np.diff(readings.times_s)
    return readings, CleanReport(
        found=len(times),
        kept=len(readings.times_s),
        nan_times=int(np.count_nonzero(~timed)),
        disordered=int(disordered),
        repeated=len(times_s) - len(merged_s),
        nan_values=int(np.count_nonzero(lacking)),
        filled=int(np.count_nonzero(lacking & whole)),
        longest_gap_s=float(steps_s.max(initial=0.0)),
        rate_hz=1.0 / float(np.median(steps_s)) if len(steps_s) else 0.0,
    )


def _merged(times_s: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One reading for each time, of sorted ones: the mean of each channel's finite values, else NaN."""
    first = np.flatnonzero(np.diff(times_s, prepend=-np.inf) > 0)
    if len(first) == len(times_s):
        return times_s, values
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), first)
    counts = np.add.reduceat(known, first, dtype=np.int64)
    return times_s[first], np.where(counts > 0, sums, np.nan) / np.maximum(counts, 1)


def _filled(times_s: np.ndarray, values: np.ndarray, max_gap_s: float) -> np.ndarray:
    """Each channel's missing values between its own neighbours, where those are near enough."""
    values = np.array(values)
    for column in values.T:  # a view: what is written to it is written to the values
        known = np.isfinite(column)
        if known.all() or not known.any():
            continue
        between, is_near = align_to_frames(
            column[known, None], times_s[known], times_s[~known], max_gap_s=max_gap_s
        )
        column[np.flatnonzero(~known)[is_near]] = between[is_near, 0]
    return values


def align_to_frames(
    readings: np.ndarray,
    reading_times_s: np.ndarray,
    frame_times_s: np.ndarray,
    *,
    max_gap_s: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Readings at the time of each frame, by linear interpolation.

    readings         float32 (R, C)  m/s^2 for acceleration, rad/s for rotation
    reading_times_s  float64 (R,)    seconds on the video's clock, strictly increasing
    frame_times_s    float64 (T,)    seconds on the video's clock, in any order
    returns          float32 (T, C), and bool (T,): True where the frame lies on a reading, or
                     between two that are no more than `max_gap_s` apart

    Before the first reading and after the last the edge value is held, and the mask is False.
    The cost is that of finding the frames' places, O(T log R).
    """
    if not max_gap_s >= 0:
        raise ValueError(f"max_gap_s must be >= 0, got {max_gap_s}")
    if len(readings) == 0:
        raise SourceError("no readings: the file has a header and nothing else")
    if not (np.diff(reading_times_s) > 0).all() or not np.isfinite(frame_times_s).all():
        raise SourceError("readings must be in order and no frame time NaN: call clean_readings first")
    after = np.searchsorted(reading_times_s, frame_times_s)
    left = np.maximum(after - 1, 0)
    right = np.minimum(after, len(readings) - 1)
    left_s, right_s = reading_times_s[left], reading_times_s[right]
    gap_s = right_s - left_s  # 0 beyond the ends, where left and right are the same
    share = np.where(gap_s > 0, (frame_times_s - left_s) / np.where(gap_s > 0, gap_s, 1.0), 0.0)[:, None]
    # Not left + share * (right - left), which at share 1 need not be `right` to the last bit.
    aligned = readings[left].astype(np.float64) * (1.0 - share) + readings[right].astype(np.float64) * share
    is_inside = (frame_times_s >= reading_times_s[0]) & (frame_times_s <= reading_times_s[-1])
    is_on_one = right_s == frame_times_s
    return aligned.astype(np.float32), is_inside & (is_on_one | (gap_s <= max_gap_s))


def window_of(
    readings: np.ndarray, reading_times_s: np.ndarray, *, start_s: float, end_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """The readings from `start_s` to `end_s`, both counted, as they are: L of them, which may be 0.

    readings         float32 (R, C)
    reading_times_s  float64 (R,)    ascending
    """
    first = np.searchsorted(reading_times_s, start_s, side="left")
    end = max(first, np.searchsorted(reading_times_s, end_s, side="right"))
    return readings[first:end].copy(), reading_times_s[first:end].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSpec:
    """Where the readings of a video are, and what a clip gets of them."""

    pattern: str
    """File below the root, like `imu/{video}.csv`; `{video}` is the manifest's `frames`, `{name}` its end."""
    columns: tuple[str, ...] | None = None
    """The channels, in this order; None: all columns but the time."""
    time_column: str | int = 0
    time_unit: TimeUnit | None = None
    """None: whole numbers are nanoseconds, others are seconds."""
    delimiter: str | None = None
    """Of a CSV; None: a tab in `.tsv`, else a comma."""
    zero: Literal["video", "absolute", "first"] = "video"
    """What the times count from. `video`: the video's first frame. `absolute`: the clock by which the video's
    first frame is at `start_s`. `first`: the first reading was made at the video's first frame."""
    clock: ClockSpec = field(default_factory=ClockSpec)
    max_gap_s: float = 0.1
    """A frame between readings further apart than this is masked."""
    fill_gap_s: float | None = None
    """See `clean_readings`."""
    take: Literal["frames", "window"] = "frames"
    """`frames`: (T, C), interpolated. `window`: (L, C), all readings from first to last frame, untouched."""
    margin_s: float = 0.0
    """What a window has more than that, before and after."""
    mirror: tuple[str, ...] | None = None
    """Channels that change their sign when a clip is mirrored (see `mirror_axes`); () where none does. None:
    it is not known, and a mirrored clip raises SourceError."""
    missing: Missing = "error"
    num_channels: int | None = None
    """C; needed for `missing="mask"` without `columns`."""

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if self.zero not in ("video", "absolute", "first") or self.take not in ("frames", "window"):
            raise ValueError(f"zero is video, absolute or first; take is frames or window; got {self}")
        if self.missing not in ("error", "mask") or not (self.max_gap_s >= 0 and self.margin_s >= 0):
            raise ValueError(f"missing is error or mask; max_gap_s and margin_s are >= 0; got {self}")
        if self.missing == "mask" and self.columns is None and self.num_channels is None:
            raise ValueError('missing="mask" needs columns= or num_channels= to know what to put there')


class Series(NamedTuple):
    """The readings of one video on the video's clock."""

    readings: Readings
    """Its times are seconds since the video's first frame."""
    columns: tuple[str, ...]
    report: CleanReport


class SeriesSource:
    """Readings beside the videos of a dataset: a `Source`.

    root         folder that the pattern's files are below
    clocks       for videos whose clock is not `spec.clock`: their own
    cache_bytes  readings that each process keeps, those used last; a file of 200 Hz x 6 takes 23 MB an hour
    """

    def __init__(
        self,
        root: Path | str,
        spec: SeriesSpec,
        *,
        clocks: Mapping[str, ClockSpec] | None = None,
        cache_bytes: int = 64 << 20,
    ) -> None:
        self.root = Path(root)
        self.spec = spec
        self.clocks = dict(clocks or {})
        self._recent: Recent[Series] = Recent(cache_bytes)

    @property
    def ragged(self) -> bool:
        """Windows have as many readings as there are; at frames there are as many as frames."""
        return self.spec.take == "window"

    def has(self, video: str) -> bool:
        """Whether the video has a file."""
        return path_for(self.root, self.spec.pattern, video).is_file()

    def read(self, clip: ClipSpan) -> SourceSample:
        """float32 (T, C) at the frames and bool (T,); or of a window (L, C), (L,) and its times (L,).

        SourceError where the file is missing (unless `missing="mask"`) or cannot be used.
        """
        if self.spec.missing == "mask" and not self.has(clip.video):
            return self._absent(clip)
        series = self.load(clip.video, start_s=clip.start_s)
        sample = self._window(series, clip) if self.ragged else self._at_frames(series, clip)
        if not clip.flipped:
            return sample
        if self.spec.mirror is None:
            raise SourceError(
                f"a clip of {clip.video!r} is mirrored: name the channels of {self.spec.pattern} that change "
                f"their sign then, or none, by mirror=; there are {', '.join(series.columns)}"
            )
        return sample._replace(values=mirror_axes(sample.values, series.columns, self.spec.mirror))

    def load(self, video: str, *, start_s: float = 0.0) -> Series:
        """All readings of a video, on its clock, whose first frame is at `start_s`; not to be written to."""
        return self._recent.get(
            (video, start_s),
            lambda: self._loaded(video, start_s),
            lambda series: series.readings.times_s.nbytes + series.readings.values.nbytes,
        )

    def _loaded(self, video: str, start_s: float) -> Series:
        spec, path = self.spec, path_for(self.root, self.spec.pattern, video)
        raw = read_series(
            path,
            time_column=spec.time_column,
            columns=spec.columns,
            time_unit=spec.time_unit,
            delimiter=spec.delimiter,
        )
        try:
            readings, report = clean_readings(
                raw.times_s, raw.values, origin_ns=raw.origin_ns, fill_gap_s=spec.fill_gap_s
            )
            own_times_s = _since_zero(readings, spec.zero, start_s)
            _check_plausible(own_times_s, report)
        except SourceError as error:
            raise SourceError(f"{path}: {error}") from error
        if spec.num_channels not in (None, len(raw.columns)):
            raise SourceError(f"{path} has {len(raw.columns)} channels, expected {spec.num_channels}")
        times_s = self.clocks.get(video, spec.clock).to_video_s(own_times_s)
        report = replace(report, bad_rows=raw.bad_rows)
        return Series(Readings(times_s, readings.values), raw.columns, report)

    def _at_frames(self, series: Series, clip: ClipSpan) -> SourceSample:
        times_s, frames_s = series.readings.times_s, clip.times_s
        first = max(int(np.searchsorted(times_s, frames_s.min(), side="right")) - 1, 0)
        end = int(np.searchsorted(times_s, frames_s.max())) + 1  # the neighbours on either side with it
        values, mask = align_to_frames(
            series.readings.values[first:end], times_s[first:end], frames_s, max_gap_s=self.spec.max_gap_s
        )
        return SourceSample(values, mask)

    def _window(self, series: Series, clip: ClipSpan) -> SourceSample:
        values, times_s = window_of(
            series.readings.values,
            series.readings.times_s,
            start_s=float(clip.times_s.min()) - self.spec.margin_s,
            end_s=float(clip.times_s.max()) + self.spec.margin_s,
        )
        return SourceSample(values, np.ones(len(values), bool), times_s)

    def _absent(self, clip: ClipSpan) -> SourceSample:
        length = 0 if self.ragged else len(clip.times_s)
        channels = len(self.spec.columns) if self.spec.columns is not None else self.spec.num_channels
        values = np.zeros((length, channels or 0), np.float32)
        return SourceSample(values, np.zeros(length, bool), np.empty(0) if self.ragged else None)


def _since_zero(readings: Readings, zero: str, start_s: float) -> np.ndarray:
    """Times on the readings' own clock, counted from what it takes for the video's first frame."""
    times_s = readings.times_s
    if zero == "first":
        return np.asarray(times_s - times_s[0])
    # Exact until the two large numbers have been taken from each other.
    begin_s = Fraction(start_s) if zero == "absolute" else Fraction(0)
    return np.asarray(times_s + float(Fraction(readings.origin_ns, 10**9) - begin_s))


def _check_plausible(times_s: np.ndarray, report: CleanReport) -> None:
    """SourceError where the times are hardly what they were taken for."""
    if report.rate_hz > _MAX_RATE_HZ:
        step_ns = 1e9 / report.rate_hz
        raise SourceError(f"readings are {step_ns:.3g} ns apart, by whole nanoseconds: give time_unit=")
    if abs(times_s[0]) > _EPOCH_S:
        raise SourceError(
            f"readings begin {times_s[0]:.0f} s from the video's first frame, so they count from an epoch: "
            'give zero="absolute" where the video\'s start_s does as well, else "first"'
        )
