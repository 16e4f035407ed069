from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.online.windows import (
    TOLERANCE_US,
    ShortVideoError,
    WindowSpec,
    centre_start,
    count_starts,
    draw_start,
    frame_indices,
    last_start,
    resolve_start,
    view_starts,
)

by_stride = st.builds(
    WindowSpec, frames=st.integers(1, 32), stride=st.integers(1, 8), short=st.sampled_from(["loop", "hold"])
)
by_fps = st.builds(
    WindowSpec,
    frames=st.integers(1, 32),
    fps=st.floats(0.5, 200),
    short=st.sampled_from(["loop", "hold"]),
)
by_segment = st.builds(WindowSpec, frames=st.integers(1, 32), mode=st.just("segments"))
seeds = st.integers(0, 2**63 - 1)
gaps_us = st.lists(st.integers(1, 2_000_000), max_size=120)

RATES = [
    Fraction(24000, 1001),
    Fraction(24),
    Fraction(25),
    Fraction(30000, 1001),
    Fraction(30),
    Fraction(50),
    Fraction(60000, 1001),
    Fraction(60),
    Fraction(120),
]


def times_of(gaps):
    return np.concatenate([[0], np.cumsum(np.array(gaps, dtype=np.int64))])


def steady_times(rate, num_frames, unit_us=1):
    """Times of a steady video, rounded to whole units as a container keeps them, in us."""
    return np.array([round(frame / rate * 1_000_000 / unit_us) * unit_us for frame in range(num_frames)])


def fits_slowly(start, num_frames, window):
    return all(start + window.stride * k < num_frames for k in range(window.frames))


def moments_slowly(start, times_us, window):
    """When each frame of a clip is looked for, in exact fractions of a microsecond."""
    step = Fraction(1_000_000) / Fraction(window.fps)
    gap = Fraction(int(times_us[-1] - times_us[0]), len(times_us) - 1) if len(times_us) > 1 else step
    tolerance = min(Fraction(TOLERANCE_US), step / 4, gap / 4)
    first = int(times_us[start])
    return [Fraction(first)] + [first + k * step + tolerance for k in range(1, window.frames)]


def end_slowly(times_us, window):
    gap = (times_us[-1] - times_us[0]) / (len(times_us) - 1) if len(times_us) > 1 else 1e6 / window.fps
    return int(times_us[-1]) + max(round(gap), 1)


@given(window=by_stride, num_frames=st.integers(1, 400), seed=seeds)
def test_a_drawn_clip_stays_inside_its_video(window, num_frames, seed):
    start = draw_start(num_frames, window, np.random.default_rng(seed))
    indices = frame_indices(start, num_frames, window)
    assert indices.shape == (window.frames,)
    assert indices.dtype == np.int64
    assert indices[0] == start
    assert indices.min() >= 0
    assert indices.max() < num_frames
    if num_frames >= window.span:
        assert (np.diff(indices) == window.stride).all()


@given(window=by_stride, num_frames=st.integers(1, 300))
def test_the_starts_are_all_that_fit_and_no_others(window, num_frames):
    fitting = [start for start in range(num_frames) if fits_slowly(start, num_frames, window)]
    assert last_start(num_frames, window) == (fitting[-1] if fitting else num_frames - window.span)
    assert count_starts(num_frames, window) == max(len(fitting), 1)


def test_every_start_that_fits_is_drawn_about_equally_often_and_the_last_is_reached():
    rng = np.random.default_rng(0)
    window = WindowSpec(frames=16, stride=2)
    counts = np.bincount([draw_start(35, window, rng) for _ in range(5000)])
    assert len(counts) == 5  # 35 frames hold a span of 31 five times
    assert abs(counts - 1000).max() < 120  # 4 standard deviations


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("short", ["loop", "hold", "error"])
@pytest.mark.parametrize("beyond", ["one frame", -1, 0, 1])
def test_videos_around_the_length_of_a_clip_follow_the_policy(stride, short, beyond):
    window = WindowSpec(frames=8, stride=stride, short=short)
    num_frames = 1 if beyond == "one frame" else window.span + beyond
    wanted = [k * stride for k in range(8)]
    if wanted[-1] < num_frames:
        assert count_starts(num_frames, window) == beyond + 1
        assert frame_indices(0, num_frames, window).tolist() == wanted
        last = num_frames - window.span
        assert frame_indices(last, num_frames, window)[-1] == num_frames - 1
        return
    assert count_starts(num_frames, window) == 1
    if short == "error":
        with pytest.raises(ShortVideoError):
            frame_indices(0, num_frames, window)
    elif short == "loop":
        assert frame_indices(0, num_frames, window).tolist() == [k % num_frames for k in wanted]
    else:
        assert frame_indices(0, num_frames, window).tolist() == [min(k, num_frames - 1) for k in wanted]


def test_ucf101s_shortest_clip_of_29_frames_fills_a_window_of_32():
    played_again = [*range(29), 0, 1, 2]
    assert frame_indices(0, 29, WindowSpec(frames=32)).tolist() == played_again
    assert frame_indices(0, 29, WindowSpec(frames=32, fps=25), times_us=40_000 * np.arange(29)).tolist() == (
        played_again
    )
    held = [*range(29), 28, 28, 28]
    assert frame_indices(0, 29, WindowSpec(frames=32, short="hold")).tolist() == held


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (WindowSpec(frames=16, stride=2, short="error"), "16 frames at stride 2, which span 31"),
        (WindowSpec(frames=16, fps=10, short="error"), "16 frames at 10 fps, which last 1.500 s"),
        (WindowSpec(frames=16, mode="segments", short="error"), "16 frames of as many segments"),
    ],
)
def test_an_error_for_a_short_video_names_it_its_frames_and_what_the_clip_needs(window, says):
    with pytest.raises(ShortVideoError) as caught:
        frame_indices(0, 15, window, times_us=40_000 * np.arange(15), video="Archery/v_1.avi")
    assert str(caught.value).startswith("Archery/v_1.avi has 15 frames")
    assert says in str(caught.value)


@given(window=by_stride, num_frames=st.integers(1, 200), data=st.data())
def test_a_start_that_is_too_late_is_moved_back_to_the_last_that_fits(window, num_frames, data):
    start = data.draw(st.integers(0, num_frames - 1))
    resolved = resolve_start(start, num_frames, window)
    fitting = [s for s in range(num_frames) if fits_slowly(s, num_frames, window)]
    assert resolved == min(start, fitting[-1] if fitting else 0)
    assert resolve_start(resolved, num_frames, window) == resolved
    moved = frame_indices(start, num_frames, window)
    assert moved.tolist() == frame_indices(resolved, num_frames, window).tolist()


@pytest.mark.parametrize("start", [-1, 10])
def test_a_start_outside_the_video_is_refused(start):
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        frame_indices(start, 10, WindowSpec(frames=2))


# By fps


def test_one_second_holds_exactly_as_many_frames_as_its_rate_says():
    at_25 = 40_000 * np.arange(25)
    assert frame_indices(0, 25, WindowSpec(frames=25, fps=25), times_us=at_25).tolist() == [*range(25)]
    twelve_and_a_half = WindowSpec(frames=13, fps=12.5)
    assert frame_indices(0, 25, twelve_and_a_half, times_us=at_25).tolist() == [*range(0, 25, 2)]
    # The last frame stays on screen until the second is over, so 30 fps find 30 frames in 25.
    thirty = WindowSpec(frames=30, fps=30, short="error")
    assert frame_indices(0, 25, thirty, times_us=at_25).tolist() == [int(k * 25 / 30) for k in range(30)]
    with pytest.raises(ShortVideoError):
        frame_indices(0, 25, WindowSpec(frames=26, fps=25, short="error"), times_us=at_25)


@pytest.mark.parametrize("fps", [29.97, 30000 / 1001])
def test_a_second_of_ntsc_video_holds_exactly_30_frames(fps):
    times_us = steady_times(Fraction(30000, 1001), 30)
    window = WindowSpec(frames=30, fps=fps, short="error")
    assert frame_indices(0, 30, window, times_us=times_us).tolist() == [*range(30)]
    with pytest.raises(ShortVideoError):
        frame_indices(0, 30, WindowSpec(frames=31, fps=fps, short="error"), times_us=times_us)


@pytest.mark.parametrize("unit_us", [1, 1000])  # Matroska and FLV keep whole milliseconds
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("short", ["loop", "hold"])
def test_at_its_own_rate_a_video_is_taken_frame_by_frame_also_when_it_is_short(rate, unit_us, short):
    fps = round(float(rate), 3)
    by_rate = WindowSpec(frames=16, fps=fps, short=short)
    by_one = WindowSpec(frames=16, short=short)
    # The length of a video in whole milliseconds is up to 0.5 ms off, for each time that it plays again.
    shortest = (1, 2, 3) if unit_us == 1 else ()
    for num_frames in (*shortest, 7, 15, 16, 17, 60):
        times_us = steady_times(rate, num_frames, unit_us)
        for start in range(num_frames):
            indices = frame_indices(start, num_frames, by_rate, times_us=times_us)
            assert indices.tolist() == frame_indices(start, num_frames, by_one).tolist()


def test_a_video_whose_rate_changes_is_followed_by_its_times():
    times_us = np.array([100_000 * k for k in range(10)] + [1_000_000 + 33_333 * k for k in range(10)])
    indices = frame_indices(5, 20, WindowSpec(frames=8, fps=10), times_us=times_us)
    assert indices.tolist() == [5, 6, 7, 8, 9, 10, 13, 16]
    twenty = frame_indices(7, 20, WindowSpec(frames=8, fps=20), times_us=times_us)
    assert twenty.tolist() == [7, 7, 8, 8, 9, 9, 10, 11]


@given(window=by_fps, gaps=gaps_us, data=st.data())
def test_a_clip_by_fps_shows_what_is_on_screen_at_each_of_its_moments(window, gaps, data):
    times_us = times_of(gaps)
    start = data.draw(st.integers(0, len(times_us) - 1))
    indices = frame_indices(start, len(times_us), window, times_us=times_us)
    first = resolve_start(start, len(times_us), window, times_us=times_us)
    end = end_slowly(times_us, window)
    for index, moment in zip(indices, moments_slowly(first, times_us, window), strict=True):
        if moment >= end and window.short == "loop":
            moment = moment - end * (moment // end)
        assert index == bisect_right(times_us.tolist(), moment) - 1
    assert indices[0] == first


@given(window=by_fps, gaps=gaps_us, data=st.data())
def test_by_fps_too_a_late_start_is_moved_back_to_the_last_that_fits(window, gaps, data):
    times_us = times_of(gaps)
    start = data.draw(st.integers(0, len(times_us) - 1))
    end = end_slowly(times_us, window)
    fitting = [s for s in range(len(times_us)) if moments_slowly(s, times_us, window)[-1] < end]
    resolved = resolve_start(start, len(times_us), window, times_us=times_us)
    assert resolved == min(start, fitting[-1] if fitting else 0)
    if fitting:
        indices = frame_indices(start, len(times_us), window, times_us=times_us)
        assert (np.diff(indices) >= 0).all()


def test_a_clip_whose_last_moment_is_the_end_of_the_video_does_not_fit():
    times_us = np.array([0, 1750, 2000])  # ends at 3000; a step of 1000 and its tolerance of 250 reach there
    window = WindowSpec(frames=2, fps=1000)
    assert resolve_start(1, 3, window, times_us=times_us) == 0
    times_us[1] -= 1
    assert resolve_start(1, 3, window, times_us=times_us) == 1


@given(
    frames=st.integers(1, 32),
    fps=st.sampled_from([5, 10, 12.5, 15, 24, 25, 29.97, 30, 50]),
    rate=st.sampled_from(RATES),
    num_frames=st.integers(2, 200),
)
def test_the_mean_rate_tells_the_starts_of_a_steady_video_within_one(frames, fps, rate, num_frames):
    window = WindowSpec(frames=frames, fps=fps)
    guess = int(last_start(num_frames, window, video_fps=float(rate)))
    true = resolve_start(num_frames - 1, num_frames, window, times_us=steady_times(rate, num_frames))
    assert abs(max(guess, 0) - true) <= 1
    if Fraction(fps) == rate:
        assert max(guess, 0) == true == max(num_frames - frames, 0)


def test_a_video_without_a_known_rate_is_taken_to_have_the_windows_own():
    assert last_start(50, WindowSpec(frames=16, fps=25), video_fps=0.0) == 34


@pytest.mark.parametrize("times_us", [None, np.arange(9)])
def test_a_window_by_fps_wants_the_time_of_every_frame(times_us):
    with pytest.raises(ValueError, match="times_us of all 10 frames"):
        frame_indices(0, 10, WindowSpec(fps=25), times_us=times_us)
    with pytest.raises(ValueError, match="video_fps"):
        last_start(10, WindowSpec(fps=25))


# Views


def mmaction2_test_offsets(num_frames, window, num_clips):
    """`SampleFrames._get_test_clips` of MMAction2 1.2, by its definition."""
    max_offset = max(num_frames - ((window.frames - 1) * window.stride + 1), 0)
    if num_clips == 1:
        return [max_offset // 2]
    return [round(k * (max_offset / (num_clips - 1))) for k in range(num_clips)]


@given(window=by_stride, num_frames=st.integers(1, 400), views=st.integers(1, 30))
def test_views_stand_where_mmaction2_puts_them(window, num_frames, views):
    starts = view_starts(num_frames, window, views)
    assert starts.tolist() == mmaction2_test_offsets(num_frames, window, views)
    assert starts.shape == (views,)
    if views > 1:
        assert (starts[0], starts[-1]) == (0, max(num_frames - window.span, 0))


@given(window=by_stride, views=st.integers(2, 30), step=st.integers(0, 9))
def test_views_stand_where_pyslowfast_puts_them_where_it_need_not_round(window, views, step):
    delta = step * (views - 1)
    starts = view_starts(window.span + delta, window, views)
    assert starts.tolist() == [k * (delta // (views - 1)) for k in range(views)]


def test_one_view_is_the_centre():
    assert centre_start(100, WindowSpec(frames=16)) == 42
    assert centre_start(101, WindowSpec(frames=16)) == 42
    assert centre_start(10, WindowSpec(frames=16)) == 0
    assert centre_start(50, WindowSpec(frames=10, fps=12.5), video_fps=25.0) == 15


@given(window=st.one_of(by_stride, by_fps), lengths=st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_many_videos_at_once_get_what_each_gets_alone(window, lengths):
    rates = np.linspace(10.0, 60.0, len(lengths))
    together = view_starts(np.array(lengths), window, 3, video_fps=rates)
    alone = [
        view_starts(n, window, 3, video_fps=rate).tolist() for n, rate in zip(lengths, rates, strict=True)
    ]
    assert together.tolist() == alone
    assert count_starts(np.array(lengths), window, video_fps=rates).shape == (len(lengths),)


# Segments


@given(window=by_segment, num_frames=st.integers(1, 400))
def test_the_centres_of_segments_are_tsns(window, num_frames):
    tick = Fraction(num_frames, window.frames)
    wanted = [int(tick / 2 + tick * k) for k in range(window.frames)]
    assert frame_indices(0, num_frames, window).tolist() == wanted
    assert frame_indices(0, num_frames, window, seed=0).tolist() == wanted


@given(window=by_segment, num_frames=st.integers(1, 400), seed=seeds)
def test_a_drawn_frame_lies_in_its_own_segment(window, num_frames, seed):
    indices = frame_indices(0, num_frames, window, seed=seed)
    tick = Fraction(num_frames, window.frames)
    for k, index in enumerate(indices.tolist()):
        assert index + 1 > k * tick  # the frame's time on screen, [index, index + 1),
        assert index < (k + 1) * tick  # and the segment, [k, k + 1) ticks, overlap
    assert indices.tolist() == frame_indices(0, num_frames, window, seed=seed).tolist()


@pytest.mark.parametrize("num_frames", [7, 8, 11, 20])
def test_segments_show_every_frame_of_the_video_equally_often(num_frames):
    window = WindowSpec(frames=8, mode="segments")
    drawn = [frame_indices(0, num_frames, window, seed=seed) for seed in range(1, 3001)]
    counts = np.bincount(np.concatenate(drawn), minlength=num_frames)
    expected = 3000 * 8 / num_frames
    assert abs(counts - expected).max() < 5 * expected**0.5


def test_segments_of_a_short_video_share_its_frames_in_order():
    assert frame_indices(0, 3, WindowSpec(frames=6, mode="segments")).tolist() == [0, 0, 1, 1, 2, 2]


def test_segments_have_one_start_and_one_view():
    window = WindowSpec(frames=8, mode="segments")
    assert count_starts(100, window) == 1
    assert resolve_start(50, 100, window) == 0
    assert view_starts(100, window, 1).tolist() == [0]
    with pytest.raises(ValueError, match="one view"):
        view_starts(100, window, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"frames": 0},
        {"stride": 0},
        {"fps": 0.0},
        {"fps": float("nan")},
        {"fps": float("inf")},
        {"fps": 25.0, "stride": 2},
        {"mode": "segments", "stride": 2},
        {"mode": "segments", "fps": 25.0},
        {"mode": "dense"},
        {"short": "pad"},
    ],
)
def test_a_window_that_contradicts_itself_is_refused(options):
    with pytest.raises(ValueError):
        WindowSpec(**options)
