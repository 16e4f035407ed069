import math
import pickle
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.online.series import (
    ClockSpec,
    SeriesSource,
    SeriesSpec,
    align_to_frames,
    clean_readings,
    mirror_axes,
    window_of,
)
from pipeline.online.series_files import read_series, since_origin
from pipeline.online.sources import ClipSpan

EPOCH_NS = 1_700_000_000_123_456_789


def aligned_slowly(readings, times_s, frame_s, max_gap_s):
    """One frame, by going through the readings."""
    if frame_s < times_s[0]:
        return readings[0], False
    if frame_s > times_s[-1]:
        return readings[-1], False
    for place, time_s in enumerate(times_s):
        if time_s == frame_s:
            return readings[place], True
        if time_s > frame_s:
            gap = time_s - times_s[place - 1]
            share = (frame_s - times_s[place - 1]) / gap
            before, after = readings[place - 1].astype(float), readings[place].astype(float)
            return before * (1 - share) + after * share, gap <= max_gap_s
    raise AssertionError


eighths = st.integers(-80, 80).map(lambda number: number / 8)


@given(
    times=st.lists(eighths, min_size=1, max_size=12, unique=True).map(sorted),
    frames=st.lists(st.one_of(eighths, st.floats(-12, 12)), min_size=1, max_size=12),
    max_gap_s=st.sampled_from([0.0, 0.125, 1.0, 3.0, math.inf]),
    seed=st.integers(0, 1000),
)
def test_alignment_is_that_of_the_obvious_slow_loop(times, frames, max_gap_s, seed):
    readings = np.random.default_rng(seed).normal(size=(len(times), 3)).astype(np.float32)
    values, mask = align_to_frames(readings, np.array(times), np.array(frames), max_gap_s=max_gap_s)
    assert values.shape == (len(frames), 3)
    assert values.dtype == np.float32
    assert mask.dtype == bool
    for frame, value, is_known in zip(frames, values, mask, strict=True):
        expected, expected_known = aligned_slowly(readings, times, frame, max_gap_s)
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
        assert is_known == expected_known


def test_a_frame_on_a_reading_has_that_reading_to_the_last_bit():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.uniform(0.001, 0.01, 500))
    readings = (rng.normal(size=(500, 4)) * 10.0 ** rng.integers(-20, 20, (500, 4))).astype(np.float32)
    values, mask = align_to_frames(readings, times, times, max_gap_s=0.0)
    np.testing.assert_array_equal(values, readings)
    assert mask.all()


def test_beyond_the_ends_the_edge_is_held_and_masked():
    readings = np.array([[1.0], [3.0]], np.float32)
    values, mask = align_to_frames(
        readings, np.array([1.0, 2.0]), np.array([0.0, 1.0, 1.5, 2.0, 9.0]), max_gap_s=1.0
    )
    assert values[:, 0].tolist() == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert mask.tolist() == [False, True, True, True, False]


def test_inside_a_gap_longer_than_the_limit_the_mask_is_false():
    times = np.array([0.0, 1.0, 3.0, 4.0])
    readings = times[:, None].astype(np.float32)
    frames = np.array([0.5, 1.0, 1.5, 2.5, 3.0, 3.5])
    values, mask = align_to_frames(readings, times, frames, max_gap_s=1.0)
    np.testing.assert_array_equal(values[:, 0], frames)
    assert mask.tolist() == [True, True, False, False, True, True]


def test_an_hour_at_200_hz_meets_100000_frames_in_well_under_a_second():
    times = np.arange(720_000) / 200
    readings = np.zeros((720_000, 6), np.float32)
    frames = np.arange(100_000) / 27.8
    spent = []
    for _ in range(3):  # the machine may be busy with something else
        begun = time.perf_counter()
        align_to_frames(readings, times, frames, max_gap_s=0.1)
        spent.append(time.perf_counter() - begun)
    assert min(spent) < 0.3


@pytest.mark.parametrize("times", [[1.0, 0.0], [1.0, 1.0], [0.0, math.nan]])
def test_readings_that_were_not_cleaned_are_refused(times):
    with pytest.raises(SourceError, match="clean_readings"):
        align_to_frames(np.zeros((2, 1), np.float32), np.array(times), np.array([0.5]), max_gap_s=1.0)


def test_no_readings_are_an_error_that_says_so():
    with pytest.raises(SourceError, match="a header and nothing else"):
        align_to_frames(np.zeros((0, 1), np.float32), np.zeros(0), np.array([0.5]), max_gap_s=1.0)
    with pytest.raises(SourceError, match="a header and nothing else"):
        clean_readings(np.zeros(0), np.zeros((0, 1)))


def test_swapped_times_are_sorted_and_counted():
    readings, report = clean_readings(np.array([0.0, 2.0, 1.0, 3.0]), np.array([[0.0], [2.0], [1.0], [3.0]]))
    assert readings.times_s.tolist() == [0, 1, 2, 3]
    assert readings.values[:, 0].tolist() == [0, 1, 2, 3]
    assert (report.found, report.kept, report.disordered) == (4, 4, 1)


def test_repeated_times_become_one_reading_that_is_their_mean():
    times = np.array([0.0, 1.0, 1.0, 1.0, 2.0])
    values = np.array([[0.0, 0.0], [1.0, 4.0], [2.0, np.nan], [6.0, np.nan], [5.0, 5.0]])
    readings, report = clean_readings(times, values)
    assert readings.times_s.tolist() == [0, 1, 2]
    assert readings.values.tolist() == [[0, 0], [3, 4], [5, 5]]
    assert (report.repeated, report.nan_values) == (2, 0)


def test_readings_without_a_time_are_dropped_and_counted():
    times = np.array([0.0, np.nan, 1.0, np.inf])
    readings, report = clean_readings(times, np.arange(4.0)[:, None])
    assert readings.values[:, 0].tolist() == [0, 2]
    assert report.nan_times == 2


def test_a_reading_that_lacks_a_channel_is_dropped_unless_it_may_be_filled():
    times = np.array([0.0, 1.0, 2.0, 3.0, 9.0, 10.0])
    values = np.array([[0.0, 0], [1, 1], [np.nan, 2], [3, 3], [9, np.nan], [10, 10]])
    dropped, report = clean_readings(times, values)
    assert dropped.times_s.tolist() == [0, 1, 3, 10]
    assert (report.nan_values, report.filled, report.kept) == (2, 0, 4)
    filled, report = clean_readings(times, values, fill_gap_s=2.0)
    assert filled.times_s.tolist() == [0, 1, 2, 3, 10]
    assert filled.values[2].tolist() == [2, 2]
    assert (report.nan_values, report.filled, report.longest_gap_s) == (2, 1, 7.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e39])
def test_a_value_that_no_float32_can_hold_is_a_missing_one(value):
    readings, report = clean_readings(np.array([0.0, 1.0]), np.array([[1.0], [value]]))
    assert readings.values.tolist() == [[1]]
    assert report.nan_values == 1


def test_two_sensors_in_one_log_that_take_turns_are_filled_from_their_own_neighbours():
    times = np.arange(6) / 10
    values = np.full((6, 2), np.nan)
    values[::2, 0], values[1::2, 1] = times[::2], times[1::2]
    with pytest.raises(SourceError, match="none of 6 readings"):
        clean_readings(times, values)
    readings, report = clean_readings(times, values, fill_gap_s=0.25)
    np.testing.assert_allclose(readings.values, np.stack([times[1:5], times[1:5]], axis=1), rtol=1e-6)
    assert report.filled == 4


@given(
    ticks=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    seed=st.integers(0, 100),
)
def test_cleaned_readings_are_in_order_and_each_is_the_mean_at_its_time(ticks, seed):
    values = np.random.default_rng(seed).normal(size=(len(ticks), 2))
    readings, report = clean_readings(np.array(ticks, np.int64), values, time_unit="s")
    times = readings.times_s + readings.origin_ns / 1e9
    assert times.tolist() == sorted(set(ticks))
    assert report.repeated == len(ticks) - len(set(ticks))
    for tick, value in zip(times, readings.values, strict=True):
        mean = values[np.array(ticks) == tick].mean(axis=0)
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)


def test_times_of_epoch_size_are_exact_to_the_nanosecond():
    steps = np.array([0, 1, 5_000_000, 7_200_000_000_123])
    times_s, origin_ns = since_origin(EPOCH_NS + steps)
    assert origin_ns == EPOCH_NS
    assert np.rint(times_s * 1e9).astype(int).tolist() == steps.tolist()


def test_float_seconds_of_epoch_size_keep_all_that_they_hold():
    times = 1_700_000_000.0 + np.array([0.25, 0.5, 0.75 + 2**-22])
    times_s, origin_ns = since_origin(times)
    assert origin_ns == 1_700_000_000 * 10**9
    assert times_s.tolist() == [0.25, 0.5, 0.75 + 2**-22]


def test_float32_times_are_refused_where_they_cannot_tell_readings_apart():
    with pytest.raises(SourceError, match=r"float32.*128 s apart.*int64 nanoseconds"):
        clean_readings(np.array([1.7e9, 1.7e9], np.float32), np.zeros((2, 1)))
    readings, _ = clean_readings(np.array([0.0, 0.25], np.float32), np.zeros((2, 1)))
    assert readings.times_s.tolist() == [0.0, 0.25]


def test_a_pulse_at_1_s_is_on_the_flash_at_1_5_s_with_an_offset_of_half_a_second():
    times = np.arange(0, 3, 0.01)
    pulse = (np.abs(times - 1.0) < 1e-9).astype(np.float32)[:, None]
    on_video = ClockSpec(offset_s=0.5).to_video_s(times)
    values, _ = align_to_frames(pulse, on_video, np.array([0.5, 1.0, 1.5]), max_gap_s=1.0)
    np.testing.assert_allclose(values[:, 0], [0, 0, 1], atol=1e-5)


def test_drift_stretches_the_readings_seconds():
    clock = ClockSpec(offset_s=-2.0, drift_ppm=100.0)
    np.testing.assert_allclose(clock.to_video_s(np.array([0.0, 1000.0])), [-2.0, 998.1])


@pytest.mark.parametrize("wrong", [{"offset_s": math.nan}, {"drift_ppm": -1e6}])
def test_a_clock_that_stands_still_or_is_not_a_number_is_refused(wrong):
    with pytest.raises(ValueError, match="offset_s must be finite"):
        ClockSpec(**wrong)


def test_a_window_has_the_readings_from_start_to_end_both_counted():
    times = np.array([0.0, 1.0, 2.0, 3.0])
    readings = times[:, None].astype(np.float32)
    values, times_s = window_of(readings, times, start_s=1.0, end_s=2.0)
    assert times_s.tolist() == [1, 2]
    assert values[:, 0].tolist() == [1, 2]
    assert values.base is None
    assert len(window_of(readings, times, start_s=1.1, end_s=1.9)[0]) == 0
    assert len(window_of(readings, times, start_s=5.0, end_s=4.0)[0]) == 0


def test_mirrored_channels_change_their_sign_and_the_others_do_not():
    values = np.array([[1.0, 2.0, 3.0]], np.float32)
    mirrored = mirror_axes(values, ["a", "b", "c"], ["c", "a"])
    assert mirrored.tolist() == [[-1, 2, -3]]
    assert mirrored.dtype == np.float32
    assert values.tolist() == [[1, 2, 3]]
    with pytest.raises(SourceError, match="'d'"):
        mirror_axes(values, ["a", "b", "c"], ["d"])


# Files


ROWS = [(EPOCH_NS, 1.5, -2.0), (EPOCH_NS + 5_000_000, 2.5, math.nan), (EPOCH_NS + 10_000_001, 3.5, 4.0)]


def write(path, fmt):
    times, first, second = (np.array(column) for column in zip(*ROWS, strict=True))
    if fmt == "csv":
        lines = [f"{t},{a},{'' if math.isnan(b) else b}" for t, a, b in ROWS]
        path.write_text("\n".join(["t,a,b", *lines]))
    elif fmt == "parquet":
        pq.write_table(pa.table({"t": times, "a": first, "b": second}), path)
    elif fmt == "npy":
        records = np.array(ROWS, dtype=[("t", "<i8"), ("a", "<f4"), ("b", ">f8")])
        np.save(path, records)
    return path


@pytest.mark.parametrize("fmt", ["csv", "parquet", "npy"])
@pytest.mark.parametrize("time_column", ["t", 0])
def test_each_format_gives_the_same_readings_with_exact_times(tmp_path, fmt, time_column):
    raw = read_series(write(tmp_path / f"x.{fmt}", fmt), time_column=time_column)
    assert raw.origin_ns == EPOCH_NS
    assert np.rint(raw.times_s * 1e9).astype(int).tolist() == [0, 5_000_000, 10_000_001]
    np.testing.assert_array_equal(raw.values, [[1.5, -2], [2.5, np.nan], [3.5, 4]])
    assert raw.columns == ("a", "b")


@pytest.mark.parametrize("fmt", ["csv", "parquet", "npy"])
def test_channels_come_in_the_order_in_which_they_are_asked_for(tmp_path, fmt):
    raw = read_series(write(tmp_path / f"x.{fmt}", fmt), columns=["b", "a"])
    assert raw.columns == ("b", "a")
    assert raw.values[0].tolist() == [-2, 1.5]


@pytest.mark.parametrize("fmt", ["csv", "parquet", "npy"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path, fmt):
    path = write(tmp_path / f"x.{fmt}", fmt)
    with pytest.raises(SourceError, match=r"no column 'gyro', only t, a, b"):
        read_series(path, columns=["gyro"])
    with pytest.raises(SourceError, match=r"no column 7"):
        read_series(path, time_column=7)


def csv_of(tmp_path, text, **options):
    path = tmp_path / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_series(path, **options)


def test_a_whole_number_of_epoch_size_stays_exact_beside_missing_ones(tmp_path):
    raw = csv_of(tmp_path, f"t,a\n{EPOCH_NS},1\n,2\nnan,3\n{EPOCH_NS + 1},4\n")
    assert raw.origin_ns == EPOCH_NS
    np.testing.assert_array_equal(raw.times_s, [0, np.nan, np.nan, 1e-9])
    column = pa.array([EPOCH_NS, None, EPOCH_NS + 1])
    pq.write_table(pa.table({"t": column, "a": [1, 2, 3]}), tmp_path / "x.parquet")
    np.testing.assert_array_equal(read_series(tmp_path / "x.parquet").times_s, [0, np.nan, 1e-9])


def test_a_fraction_far_down_a_column_of_whole_numbers_is_read(tmp_path):
    rows = "".join(f"{i / 100},7\n" for i in range(200_000))
    raw = csv_of(tmp_path, f"t,a\n{rows}2000.01,7.25\n")
    assert raw.values[-1, 0] == 7.25
    assert len(raw.times_s) == 200_001


@pytest.mark.parametrize(
    ("text", "columns", "values"),
    [
        ("t,a\r\n0.0,1\r\n0.5,2\r\n\r\n", ("a",), [[1], [2]]),
        ("\ufefft , a\n0.0, 1\n0.5 ,2", ("a",), [[1], [2]]),
        ("# device 7\n\n# 2024\nt,a\n0.0,1\n0.5,2\n", ("a",), [[1], [2]]),
        ("# t,a\n0.0,1\n0.5,2\n", ("a",), [[1], [2]]),
        ("0.0,1\n0.5,2\n", ("1",), [[1], [2]]),
        (b"t,a [\xb0/s]\n0.0,1\n0.5,2\n", ("a [°/s]",), [[1], [2]]),
        ('"t","a"\n0.0,"1"\n0.5,2\n', ("a",), [[1], [2]]),
        ("t,a\n0.0,NaN\n0.5,NA\n", ("a",), [[np.nan], [np.nan]]),
    ],
)
def test_csv_in_the_wild(tmp_path, text, columns, values):
    raw = csv_of(tmp_path, text)
    assert raw.columns == columns
    np.testing.assert_array_equal(raw.values, values)
    assert raw.times_s.tolist() == [0.0, 0.5]


def test_other_delimiters(tmp_path):
    assert csv_of(tmp_path, "t;a\n0.5;2\n", delimiter=";").values.tolist() == [[2]]
    (tmp_path / "x.tsv").write_text("t\ta\n0.5\t2\n")
    assert read_series(tmp_path / "x.tsv").values.tolist() == [[2]]
    with pytest.raises(SourceError, match="is the delimiter right"):
        csv_of(tmp_path, "t;a\n0.5;2\n")


def test_a_log_cut_in_its_last_line_loses_that_line_and_counts_it(tmp_path):
    raw = csv_of(tmp_path, "t,a,b\n0.0,1,2\n0.5,3,4\n1.0,5")
    assert (len(raw.times_s), raw.bad_rows) == (2, 1)


@pytest.mark.parametrize("text", ["t,a\n", "t,a", "t,a\n\n \n"])
def test_a_file_with_a_header_and_nothing_else_is_an_error(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    source = SeriesSource(tmp_path, SeriesSpec(pattern="{video}.csv"))
    with pytest.raises(SourceError, match=r"x\.csv: no readings: the file has a header and nothing else"):
        source.read(ClipSpan("x", np.array([0.0])))


@pytest.mark.parametrize("fmt", ["csv", "parquet", "npy"])
def test_files_that_are_empty_missing_or_something_else_are_named(tmp_path, fmt):
    path = tmp_path / f"x.{fmt}"
    with pytest.raises(SourceError, match=rf"x\.{fmt} cannot be read: No such file"):
        read_series(path)
    path.write_bytes(b"")
    with pytest.raises(SourceError, match=rf"x\.{fmt}") as caught:
        read_series(path)
    assert "\n" not in str(caught.value)
    (tmp_path / "x.doc").write_bytes(b"")
    with pytest.raises(SourceError, match=r"not '\.doc'"):
        read_series(tmp_path / "x.doc")


def test_text_among_the_values_is_an_error_unless_its_column_is_not_asked_for(tmp_path):
    text = "t,a,label\n0.0,1,walk\n0.5,2,run\n"
    with pytest.raises(SourceError, match="choose columns="):
        csv_of(tmp_path, text)
    assert csv_of(tmp_path, text, columns=["a"]).values.tolist() == [[1], [2]]
    with pytest.raises(SourceError, match=r"times are numbers or dates, found 'walk'"):
        csv_of(tmp_path, text, time_column="label", columns=["a"])


@pytest.mark.parametrize(
    ("cell", "unit", "origin_ns"),
    [
        ("1700000000123", "ms", 1_700_000_000_123 * 10**6),
        ("1700000000123456", "us", 1_700_000_000_123_456 * 10**3),
        ("12", "s", 12 * 10**9),
        ("12.5", "ms", 12 * 10**6),
        ("2023-11-14T22:13:20.123456789", None, EPOCH_NS),
        ("2023-11-14 22:13:20.123456789Z", None, EPOCH_NS),
        ("2023-11-14T23:13:20.123456789+01:00", None, EPOCH_NS),
    ],
)
def test_units_and_dates(tmp_path, cell, unit, origin_ns):
    assert csv_of(tmp_path, f"t,a\n{cell},1\n", time_unit=unit).origin_ns == origin_ns


def test_timestamps_of_parquet_and_npy(tmp_path):
    times = np.array([EPOCH_NS, "NaT", EPOCH_NS + 3], "datetime64[ns]")
    pq.write_table(pa.table({"t": times, "a": [1, 2, 3]}), tmp_path / "x.parquet")
    records = np.array(list(zip(times, [1, 2, 3], strict=True)), dtype=[("t", "M8[ns]"), ("a", "i4")])
    np.save(tmp_path / "x.npy", records)
    for name in ("x.parquet", "x.npy"):
        raw = read_series(tmp_path / name)
        assert raw.origin_ns == EPOCH_NS
        np.testing.assert_array_equal(raw.times_s, [0, np.nan, 3e-9])


def test_a_plain_npy_has_columns_by_number(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1.0, 0.25], [2.0, 0.5]]))
    raw = read_series(tmp_path / "x.npy", time_column=1)
    assert raw.columns == ("0",)
    assert raw.times_s.tolist() == [0.25, 0.5]
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(SourceError, match=r"expected numbers \(R, C\)"):
        read_series(tmp_path / "x.npy")


# The source


def source_of(tmp_path, table, *, clocks=None, cache_bytes=1 << 20, **spec):
    np.save(tmp_path / "v.npy", np.asarray(table))
    return SeriesSource(
        tmp_path, SeriesSpec(pattern="{video}.npy", **spec), clocks=clocks, cache_bytes=cache_bytes
    )


SECONDS = np.arange(0, 10, 0.5)
RAMP = np.stack([SECONDS, SECONDS * 2, -SECONDS], axis=1)  # t, 2 t, -t


def test_a_clip_gets_readings_at_its_frames(tmp_path):
    source = source_of(tmp_path, RAMP, max_gap_s=0.5)
    sample = source.read(ClipSpan("v", np.array([1.25, 3.0, 20.0])))
    np.testing.assert_allclose(sample.values, [[2.5, -1.25], [6, -3], [19, -9.5]])
    assert sample.mask.tolist() == [True, True, False]
    assert sample.times_s is None
    assert not source.ragged


@given(frames=st.lists(st.floats(-3, 13), min_size=1, max_size=8), seed=st.integers(0, 50))
def test_a_clip_gets_what_all_readings_together_would_give(tmp_path_factory, frames, seed):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.uniform(0.05, 2.0, 12)) - 1
    values = rng.normal(size=(12, 2))
    source = source_of(tmp_path_factory.mktemp("s"), np.column_stack([times, values]), max_gap_s=1.0)
    sample = source.read(ClipSpan("v", np.array(frames)))
    whole, mask = align_to_frames(values.astype(np.float32), times, np.array(frames), max_gap_s=1.0)
    np.testing.assert_allclose(sample.values, whole, rtol=1e-5, atol=1e-6)
    assert sample.mask.tolist() == mask.tolist()


def test_the_offset_of_a_clock_is_applied_once(tmp_path):
    pulse = np.stack([SECONDS, SECONDS == 1.0], axis=1)
    source = source_of(tmp_path, pulse, clock=ClockSpec(offset_s=0.5), max_gap_s=1.0)
    for _ in range(2):  # the second time from the cache
        sample = source.read(ClipSpan("v", np.array([1.0, 1.5, 2.0])))
        assert sample.values[:, 0].tolist() == [0, 1, 0]


def test_a_video_may_have_a_clock_of_its_own(tmp_path):
    source = source_of(tmp_path, RAMP, clocks={"v": ClockSpec(offset_s=1.0)}, max_gap_s=1.0)
    assert source.read(ClipSpan("v", np.array([2.0]))).values[0, 0] == 2.0


def test_readings_of_an_absolute_clock_are_met_exactly(tmp_path):
    start_s = 1_700_000_000.25
    records = np.zeros(3, dtype=[("t", "i8"), ("a", "f4")])
    records["t"] = int(start_s) * 10**9 + 250_000_000 + np.array([-5, 0, 5]) * 10**6
    records["a"] = [1, 2, 3]
    source = source_of(tmp_path, records, zero="absolute")
    sample = source.read(ClipSpan("v", np.array([0.0, 0.005, 0.0025]), start_s=start_s))
    assert sample.values[:, 0].tolist() == [2, 3, 2.5]
    assert sample.mask.all()


def test_the_first_reading_may_be_at_the_first_frame(tmp_path):
    records = np.array([(EPOCH_NS, 1.0), (EPOCH_NS + 10**7, 2.0)], dtype=[("t", "i8"), ("a", "f4")])
    source = source_of(tmp_path, records, zero="first")
    assert source.read(ClipSpan("v", np.array([0.0, 0.01]))).values[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("zero", ["video", "absolute"])
def test_epoch_times_that_cannot_meet_the_video_are_an_error(tmp_path, zero):
    records = np.array([(EPOCH_NS, 1.0), (EPOCH_NS + 10**7, 2.0)], dtype=[("t", "i8"), ("a", "f4")])
    source = source_of(tmp_path, records, zero=zero)
    with pytest.raises(SourceError, match="count from an epoch"):
        source.read(ClipSpan("v", np.array([0.0])))


def test_whole_seconds_taken_for_nanoseconds_are_an_error(tmp_path):
    table = np.stack([np.arange(5), np.arange(5)], axis=1)
    with pytest.raises(SourceError, match=r"1 ns apart.*time_unit="):
        source_of(tmp_path, table).read(ClipSpan("v", np.array([0.0])))
    sample = source_of(tmp_path, table, time_unit="s", max_gap_s=1.0).read(ClipSpan("v", np.array([1.5])))
    assert sample.values.tolist() == [[1.5]]


def test_a_window_is_what_lies_between_first_and_last_frame_as_it_is(tmp_path):
    source = source_of(tmp_path, RAMP, take="window", margin_s=0.5)
    sample = source.read(ClipSpan("v", np.array([2.0, 1.0, 1.7])))  # a loop: times fall
    assert source.ragged
    assert sample.times_s.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert sample.values[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert sample.mask.tolist() == [True] * 5


def test_a_mirrored_clip_changes_the_named_channels_and_wants_them_named(tmp_path):
    clip = ClipSpan("v", np.array([1.0]), flipped=True)
    with pytest.raises(SourceError, match=r"'v' is mirrored.*mirror=.*there are 1, 2"):
        source_of(tmp_path, RAMP).read(clip)
    assert source_of(tmp_path, RAMP, mirror=("2",)).read(clip).values.tolist() == [[2, 1]]
    source = source_of(tmp_path, RAMP, mirror=())
    assert source.read(clip).values.tolist() == [[2, -1]]
    assert source.read(clip._replace(flipped=False)).values.tolist() == [[2, -1]]


def test_a_missing_file_raises_or_is_masked(tmp_path):
    clip = ClipSpan("gone", np.array([0.0, 1.0]))
    source = source_of(tmp_path, RAMP)
    assert not source.has("gone")
    assert source.has("v")
    with pytest.raises(SourceError, match=r"gone\.npy cannot be read"):
        source.read(clip)
    sample = source_of(tmp_path, RAMP, missing="mask", num_channels=2).read(clip)
    assert sample.values.tolist() == [[0, 0], [0, 0]]
    assert sample.mask.tolist() == [False, False]
    windows = source_of(tmp_path, RAMP, missing="mask", columns=("1",), take="window")
    sample = windows.read(clip)
    assert (sample.values.shape, sample.mask.shape, sample.times_s.shape) == ((0, 1), (0,), (0,))


def test_a_file_with_other_channels_than_promised_is_an_error(tmp_path):
    with pytest.raises(SourceError, match=r"has 2 channels, expected 6"):
        source_of(tmp_path, RAMP, num_channels=6).read(ClipSpan("v", np.array([0.0])))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pattern": "imu.csv"},
        {"pattern": "../{video}.csv"},
        {"pattern": "/{video}.csv"},
        {"pattern": "{video}", "zero": "epoch"},
        {"pattern": "{video}", "max_gap_s": math.nan},
        {"pattern": "{video}", "missing": "mask"},
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValueError):
        SeriesSpec(**wrong)


def test_reports_say_what_was_done(tmp_path):
    (tmp_path / "v.csv").write_text("t,a\n0.0,1\n0.2,2\n0.1,3\n0.2,4\nnan,5\n0.3,\n2.3,6\n2.4")
    series = SeriesSource(tmp_path, SeriesSpec(pattern="{video}.csv")).load("v")
    report = series.report
    assert (report.found, report.kept, report.bad_rows) == (7, 4, 1)
    assert (report.nan_times, report.disordered, report.repeated, report.nan_values) == (1, 1, 1, 1)
    assert report.longest_gap_s == pytest.approx(2.1)
    assert series.readings.values[:, 0].tolist() == [1, 3, 3, 6]


def test_a_source_pickles_and_reads_the_same(tmp_path):
    source = source_of(tmp_path, RAMP)
    clip = ClipSpan("v", np.array([1.25]))
    before = source.read(clip).values
    copied = pickle.dumps(source)
    assert len(copied) < 2000
    np.testing.assert_array_equal(pickle.loads(copied).read(clip).values, before)
