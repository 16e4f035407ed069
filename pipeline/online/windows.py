"""Which frames make up a clip: arithmetic alone, in frames and microseconds of one video.

A clip begins at a frame, `start`. A start fits where the whole clip lies inside the video; a start
that does not fit is moved back to the last one that does. So a clip is whole wherever the video is
long enough for one, and `WindowSpec.short` decides only about videos that are not.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PipelineError
from pipeline.seeds import generator

Mode = Literal["contiguous", "segments"]
Short = Literal["loop", "hold", "error"]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

TOLERANCE_US = 1_500
"""A frame counts as on screen this long before its own time, though never by more than a quarter of a
step or of a frame. Matroska and FLV keep whole milliseconds, which puts two frames of a steady video up
to 1 ms nearer or farther than they are: 29.97 fps at a target of 29.97 would show some frames twice.
A rate rounded like 23.98 for 24000/1001 adds 0.1 ms over 16 frames."""

_SEGMENTS = 0x5E67  # keeps these draws apart from others that are made from the same clip's seed


class ShortVideoError(PipelineError):
    """A video is too short for a clip, and the window says that this is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """The shape of a clip in time: by stride, by rate, or one frame of each segment."""

    frames: int = 16
    """Frames in a clip (T)."""
    stride: int = 1
    """Step from one frame of a clip to the next, in frames of the video."""
    fps: float | None = None
    """Instead of a stride: frames per second of the clip, chosen by the timestamps of the video."""
    mode: Mode = "contiguous"
    """`segments` cuts the video into T equal parts and takes one frame of each (Wang et al. 2016, TSN)."""
    short: Short = "loop"
    """What a video does that is shorter than a clip: play again from its first frame, hold its last
    one, or raise. The same in training and evaluation. The default is MMAction2's: a clip that loops keeps
    moving, while a held frame (PySlowFast) teaches that motion ends in whatever class has short videos.
    Segments of a short video share its frames evenly, so there `loop` and `hold` are the same."""

    def __post_init__(self) -> None:
        if self.frames < 1 or self.stride < 1:
            raise ValueError(f"frames and stride must be >= 1, got {self}")
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise ValueError(f"fps must be a positive number or None, got {self}")
        if self.mode not in ("contiguous", "segments") or self.short not in ("loop", "hold", "error"):
            raise ValueError(f"mode is contiguous or segments, short is loop, hold or error, got {self}")
        if self.fps is not None and self.stride > 1:
            raise ValueError(f"a clip goes by stride or by fps, not by both, got {self}")
        if self.mode == "segments" and (self.stride > 1 or self.fps is not None):
            raise ValueError(f"segments have neither stride nor fps: the video's length decides, got {self}")

    @property
    def span(self) -> int:
        """Frames of the video from a clip's first to its last, both counted.

        By fps, of a video of that rate; of segments, the fewest that fill each one.
        """
        return (self.frames - 1) * self.stride + 1


def last_start(
    num_frames: int | Integers, window: WindowSpec, *, video_fps: float | Floats | None = None
) -> Integers:
    """Last frame that a clip can begin with; negative where the video is too short for one.

    int64, of the shape of `num_frames`. Segments cover the whole video, so theirs is 0. A window by
    fps needs `video_fps` and takes the video for a steady one of that mean rate (0: taken to be the
    window's own): exact for a constant rate, and near enough for a draw, which `resolve_start` mends.

    >>> last_start(np.array([100, 16, 15]), WindowSpec(frames=16)).tolist()
    [84, 0, -1]
    >>> last_start(50, WindowSpec(frames=10, fps=12.5), video_fps=25.0).tolist()
    31
    """
    num_frames = np.asarray(num_frames, dtype=np.int64)
    if window.mode == "segments":
        return np.minimum(num_frames - window.frames, 0)
    if window.fps is None:
        return np.asarray(num_frames - window.span)
    if video_fps is None:
        raise ValueError(f"a window by fps needs the video's mean rate: give video_fps for {window}")
    rate = np.asarray(video_fps, dtype=np.float64)
    gap_us = 1e6 / np.where(rate > 0, rate, window.fps)
    reach_us = _offsets_us(np.int64(window.frames - 1), window.fps, gap_us)
    return np.asarray(np.ceil(num_frames - reach_us / gap_us).astype(np.int64) - 1)


def count_starts(
    num_frames: int | Integers, window: WindowSpec, *, video_fps: float | Floats | None = None
) -> Integers:
    """How many frames a clip can begin with, from frame 0 on: 1 where the video is too short.

    int64, of the shape of `num_frames`; `video_fps` as for `last_start`.
    """
    return np.asarray(np.maximum(last_start(num_frames, window, video_fps=video_fps), 0) + 1)


def draw_start(
    num_frames: int, window: WindowSpec, rng: np.random.Generator, *, video_fps: float | None = None
) -> int:
    """First frame of a clip, uniform over the starts that fit; 0 where none does."""
    return int(rng.integers(count_starts(num_frames, window, video_fps=video_fps)))


def centre_start(num_frames: int, window: WindowSpec, *, video_fps: float | None = None) -> int:
    """First frame of the clip in the middle of the video; the earlier one where two are as near.

    >>> centre_start(100, WindowSpec(frames=16))
    42
    """
    return int(view_starts(num_frames, window, 1, video_fps=video_fps)[0])


def view_starts(
    num_frames: int | Integers,
    window: WindowSpec,
    views: int,
    *,
    video_fps: float | Floats | None = None,
) -> Integers:
    """First frames of K clips spread evenly over the video, for an evaluation.

    int64 (..., K), not decreasing. The first view begins at frame 0 and the last one at the last start
    that fits, as MMAction2's `SampleFrames` and PySlowFast's `USE_OFFSET_SAMPLING` place them (rounded to
    the nearest start as in MMAction2; PySlowFast rounds the step down). One view is the
    centre. Views repeat where the video has fewer starts than views.

    >>> view_starts(100, WindowSpec(frames=16), 5).tolist()
    [0, 21, 42, 63, 84]
    """
    if views < 1:
        raise ValueError(f"views must be >= 1, got {views}")
    if views > 1 and window.mode == "segments":
        raise ValueError(f"segments cover the whole video, so there is one view and not {views}")
    last = np.maximum(last_start(num_frames, window, video_fps=video_fps), 0)[..., None]
    if views == 1:
        return np.asarray(last // 2)
    return np.asarray(np.round(np.arange(views) * (last / (views - 1))).astype(np.int64))


def resolve_start(
    start: int, num_frames: int, window: WindowSpec, *, times_us: Integers | None = None
) -> int:
    """The start that a clip really has: `start`, or the last that fits; 0 where none does.

    A sampler knows a video's mean rate only, so where the rate varies a start by fps can be too late
    by the timestamps; it is moved, not drawn again, so that the clip stays a function of its ref.

    >>> resolve_start(90, 100, WindowSpec(frames=16))
    84
    """
    if not 0 <= start < num_frames:
        raise IndexError(f"start must be in [0, {num_frames}), got {start}")
    if window.fps is None:
        last = int(last_start(num_frames, window))
    else:
        last = _last_start_by_time(_checked_times(times_us, num_frames), window.frames, window.fps)
    return min(start, max(last, 0))


def frame_indices(
    start: int,
    num_frames: int,
    window: WindowSpec,
    *,
    times_us: Integers | None = None,
    seed: int | None = None,
    video: str = "a video",
) -> Integers:
    """Frames of the clip that begins at `start`, or at the last start that fits.

    int64 (T,), each in [0, num_frames), not decreasing unless a short video loops.

    times_us  int64 (num_frames,), strictly increasing; needed for a window by fps, which takes for its
              frame k the one on screen k / fps seconds after the clip's first
    seed      draws inside the segments; None or 0 for their centres
    video     its name, for the error

    IndexError for a start outside the video; ShortVideoError where `short` is `error` and the video is
    too short.

    >>> frame_indices(3, 12, WindowSpec(frames=4, stride=2)).tolist()
    [3, 5, 7, 9]
    >>> frame_indices(0, 5, WindowSpec(frames=4, stride=2)).tolist()
    [0, 2, 4, 1]
    >>> frame_indices(0, 5, WindowSpec(frames=4, stride=2, short="hold")).tolist()
    [0, 2, 4, 4]
    """
    start = resolve_start(start, num_frames, window, times_us=times_us)
    if window.mode == "segments":
        if num_frames < window.frames and window.short == "error":
            raise short_video_error(video, num_frames, window)
        return _segment_indices(num_frames, window.frames, seed)
    if window.fps is not None:
        times_us = _checked_times(times_us, num_frames)
        return _indices_by_time(start, times_us, window, window.fps, video)
    indices = start + window.stride * np.arange(window.frames, dtype=np.int64)
    if indices[-1] < num_frames:
        return indices
    if window.short == "error":
        raise short_video_error(video, num_frames, window)
    return indices % num_frames if window.short == "loop" else np.minimum(indices, num_frames - 1)


def short_video_error(video: str, num_frames: int, window: WindowSpec) -> ShortVideoError:
    """The error that names a video too short for a window, and what to do."""
    if window.fps is not None:
        wanted = f"at {window.fps:g} fps, which last {(window.frames - 1) / window.fps:.3f} s"
    elif window.mode == "segments":
        wanted = "of as many segments"
    else:
        wanted = f"at stride {window.stride}, which span {window.span}"
    return ShortVideoError(
        f"{video} has {num_frames} frames, too few for a clip of {window.frames} frames {wanted}: "
        "set short to loop or hold, take fewer frames, or leave the video out"
    )


def _segment_indices(num_frames: int, frames: int, seed: int | None) -> Integers:
    """One frame of each of T equal parts: at the moment drawn in each, or at its middle.

    Parts are cut in real numbers, so every frame of the video is drawn equally often whatever is left
    over, and a video of fewer frames than parts shows each of its frames in turn. The middle is TSN's
    own `int(tick / 2 + tick * k)`.
    """
    parts = np.arange(frames, dtype=np.int64)
    if not seed:
        return (2 * parts + 1) * num_frames // (2 * frames)
    moments = generator(seed, _SEGMENTS).integers(num_frames, size=frames)  # in 1/T of a frame
    return np.asarray((parts * num_frames + moments) // frames)


def _indices_by_time(start: int, times_us: Integers, window: WindowSpec, fps: float, video: str) -> Integers:
    gap_us = _mean_gap_us(times_us, fps)
    end_us = _end_us(times_us, gap_us)
    moments_us = times_us[start] + _offsets_us(np.arange(window.frames), fps, gap_us)
    if moments_us[-1] >= end_us and window.short == "error":
        raise short_video_error(video, len(times_us), window)
    if window.short == "loop":
        moments_us = times_us[0] + (moments_us - times_us[0]) % (end_us - times_us[0])
    return np.asarray(np.searchsorted(times_us, moments_us, side="right") - 1)


def _last_start_by_time(times_us: Integers, frames: int, fps: float) -> int:
    """Last frame from which T frames by fps end before the video does; -1 where there is none."""
    gap_us = _mean_gap_us(times_us, fps)
    reach_us = _offsets_us(np.int64(frames - 1), fps, gap_us)
    return int(np.searchsorted(times_us, _end_us(times_us, gap_us) - reach_us, side="left")) - 1


def _offsets_us(steps: Any, fps: float, gap_us: Any) -> Integers:
    """From a clip's first frame to the moment that its frame `steps` is looked for; whole us, rounded down.

    Whole, so that "on screen" and "fits" can never disagree by a rounding. The tolerance is in it,
    except for the first frame, which is the start itself.
    """
    tolerance_us = np.minimum(TOLERANCE_US, np.minimum(1e6 / fps, gap_us) / 4)
    offsets_us = np.floor(steps * (1e6 / fps) + tolerance_us).astype(np.int64)
    return np.asarray(np.where(steps == 0, 0, offsets_us))


def _mean_gap_us(times_us: Integers, fps: float) -> float:
    """Mean time from frame to frame; of a single frame, one step of the clip."""
    if len(times_us) == 1:
        return 1e6 / fps
    return float(times_us[-1] - times_us[0]) / (len(times_us) - 1)


def _end_us(times_us: Integers, gap_us: float) -> int:
    """When the last frame leaves the screen: it is taken to last as long as the mean frame."""
    return int(times_us[-1]) + max(round(gap_us), 1)


def _checked_times(times_us: Integers | None, num_frames: int) -> Integers:
    if times_us is None or len(times_us) != num_frames:
        found = "none" if times_us is None else str(len(times_us))
        raise ValueError(f"a window by fps needs times_us of all {num_frames} frames, got {found}")
    return times_us
