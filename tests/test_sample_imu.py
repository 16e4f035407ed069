from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.offline.layouts import find_videos
from pipeline.offline.sample import FPS, Clip, SampleError, SampleSpec, held_out_groups
from pipeline.offline.sample_imu import (
    CHANNELS,
    CLASSES,
    EARLY_S,
    JOLT_S,
    LONGEST,
    Recording,
    as_csv,
    draw_recording,
    list_look_alikes,
    split_lists,
    write_look_alikes,
)
from pipeline.online.series import SeriesSource, SeriesSpec, align_to_frames
from pipeline.online.series_files import read_series
from pipeline.online.sources import ClipSpan
from scripts.demo_fusion import RIGHT, WINDOW, WRONG

SMALL = SampleSpec(groups=3, clips=1, min_frames=16, max_frames=18)
ACC_Z = CHANNELS.index("acc_z")
OTHER = {
    "MoveLeftBump": "MoveLeftDip",
    "MoveRightBump": "MoveRightDip",
    "MoveLeftDip": "MoveLeftBump",
    "MoveRightDip": "MoveRightBump",
}

clips = st.builds(Clip, st.sampled_from(list(CLASSES)), st.integers(1, 12), st.integers(1, 3))
specs = st.builds(SampleSpec, seed=st.integers(0, 2**32), min_frames=st.just(16), max_frames=st.just(LONGEST))
lengths = st.integers(WINDOW.frames, LONGEST)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small dataset of look-alikes that tests only look at."""
    root = tmp_path_factory.mktemp("fusion")
    write_look_alikes(root, SMALL)
    return root


# --- the recordings ------------------------------------------------------------------------------------


def seen_by(recording: Recording, clock, num_frames: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """What the clip from a frame gets of a recording, (T, C), and its mask, (T,)."""
    frame_s = np.arange(start, start + WINDOW.frames) / FPS
    times_s = clock.to_video_s(recording.times_ns / 1e9)
    return align_to_frames(recording.values.astype(np.float32), times_s, frame_s, max_gap_s=0.1)


@given(spec=specs, clip=clips, num_frames=lengths, data=st.data())
def test_by_the_right_clock_the_push_of_all_readings_of_any_clip_names_the_class(
    spec, clip, num_frames, data
):
    start = data.draw(st.integers(0, num_frames - WINDOW.frames))
    values, mask = seen_by(draw_recording(spec, clip, num_frames), RIGHT, num_frames, start)
    assert mask.all()
    assert np.sign((values[:, ACC_Z] - 9.81).sum()) == CLASSES[clip.class_name].sign


@given(spec=specs, clip=clips, num_frames=lengths, data=st.data())
def test_by_a_clock_half_a_second_off_look_alikes_have_the_very_same_readings(spec, clip, num_frames, data):
    start = data.draw(st.integers(0, num_frames - WINDOW.frames))
    twin = clip._replace(class_name=OTHER[clip.class_name])
    ours, theirs = (draw_recording(spec, each, num_frames) for each in (clip, twin))
    values, mask = seen_by(ours, WRONG, num_frames, start)
    assert mask.all()
    np.testing.assert_array_equal(values, seen_by(theirs, WRONG, num_frames, start)[0])
    assert (seen_by(ours, RIGHT, num_frames, start)[0] != seen_by(theirs, RIGHT, num_frames, start)[0]).any()


@given(spec=specs, clip=clips, num_frames=lengths)
def test_look_alikes_differ_in_the_jolt_halfway_through_the_video_alone(spec, clip, num_frames):
    twin = clip._replace(class_name=OTHER[clip.class_name])
    ours, theirs = (draw_recording(spec, each, num_frames) for each in (clip, twin))
    differ = (ours.values != theirs.values).any(axis=1)
    middle_s = (num_frames - 1) / FPS / 2
    near = np.abs(ours.times_ns / 1e9 - EARLY_S - middle_s) < JOLT_S / 2
    np.testing.assert_array_equal(ours.times_ns, theirs.times_ns)
    assert differ.sum() >= 10
    assert not (differ & ~near).any()


def test_by_the_wrong_clock_jolts_are_as_often_up_as_down_in_each_class():
    spec = SampleSpec(groups=99, clips=3, min_frames=16, max_frames=LONGEST)
    for name in CLASSES:
        pushes = [
            (seen_by(draw_recording(spec, clip, 18), WRONG, 18, 1)[0][:, ACC_Z] - 9.81).sum()
            for clip in list_look_alikes(spec)
            if clip.class_name == name
        ]
        assert 0.4 < np.mean(np.array(pushes) > 0) < 0.6  # of 297 coins: 3.4 standard deviations
        assert np.abs(pushes).min() > 6  # half a jolt: each is as clear as the right one


def test_a_recording_is_100_hz_from_before_the_video_to_after_it_on_the_recorders_clock():
    times_ns, values = draw_recording(SMALL, Clip("MoveLeftDip", 1, 1), 16)
    assert values.shape == (310, 3)
    assert times_ns.dtype == np.int64
    np.testing.assert_array_equal(np.diff(times_ns), 10_000_000)
    video_s = RIGHT.to_video_s(times_ns / 1e9)
    assert video_s[0] == -EARLY_S
    assert video_s[-1] == pytest.approx(0.6 + 1.25 - 0.01)


def test_a_csv_gives_back_the_times_to_the_nanosecond_and_the_values_to_the_fourth_digit(tmp_path):
    recording = draw_recording(SMALL, Clip("MoveRightBump", 2, 1), 20)
    (tmp_path / "a.csv").write_text(as_csv(recording))
    read = read_series(tmp_path / "a.csv")
    assert read.columns == CHANNELS
    np.testing.assert_array_equal(np.rint(read.times_s * 1e9) + read.origin_ns, recording.times_ns)
    np.testing.assert_allclose(read.values, recording.values, atol=5e-5)


# --- the dataset ---------------------------------------------------------------------------------------


def bytes_of(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def test_look_alikes_have_the_same_video_byte_for_byte_and_other_motions_have_not(small):
    for clip in list_look_alikes(SMALL):
        twin = clip._replace(class_name=OTHER[clip.class_name])
        ours = (small / "videos" / clip.video).read_bytes()
        assert ours == (small / "videos" / twin.video).read_bytes()
    assert len({path.read_bytes() for path in (small / "videos").rglob("*.avi")}) == 6


def test_every_video_has_its_recording_and_its_side_of_the_split(small):
    found = set(find_videos(small / "videos").videos)
    assert found == {clip.video for clip in list_look_alikes(SMALL)}
    source = SeriesSource(small / "imu", SeriesSpec(pattern="{video}.csv", clock=RIGHT))
    assert all(source.has(video.removesuffix(".avi")) for video in found)
    lists = split_lists(SMALL)
    tested = set(lists["testlist01.txt"].split())
    trained = {line.split()[0] for line in lists["trainlist01.txt"].splitlines()}
    assert tested | trained == found
    assert not tested & trained
    assert {clip.group for clip in list_look_alikes(SMALL) if clip.video in tested} == set(
        held_out_groups(SMALL, 1)
    )


def test_the_files_tell_the_look_alikes_apart_by_the_clock_of_the_demo(small):
    spec = SeriesSpec(pattern="{video}.csv", columns=CHANNELS, clock=RIGHT, mirror=())
    source = SeriesSource(small / "imu", spec)
    for clip in list_look_alikes(SMALL):
        span = ClipSpan(clip.video.removesuffix(".avi"), np.arange(16) / FPS)
        values, mask, _ = source.read(span)
        assert mask.all()
        assert np.sign((values[:, ACC_Z] - 9.81).sum()) == CLASSES[clip.class_name].sign


def test_the_same_options_draw_the_same_bytes_and_another_seed_others(small, tmp_path):
    write_look_alikes(tmp_path / "again", SMALL)
    assert bytes_of(tmp_path / "again") == bytes_of(small)
    other = SampleSpec(groups=3, clips=1, min_frames=16, max_frames=18, seed=1)
    write_look_alikes(tmp_path / "other", other)
    name = "imu/MoveLeftBump/v_MoveLeftBump_g01_c01.csv"
    assert bytes_of(tmp_path / "other")[name] != bytes_of(small)[name]


def test_a_second_run_keeps_what_is_there_and_makes_what_is_missing(tmp_path):
    assert write_look_alikes(tmp_path, SMALL) == 12
    before = bytes_of(tmp_path)
    (tmp_path / "imu/MoveLeftDip/v_MoveLeftDip_g02_c01.csv").unlink()
    (tmp_path / "videos/MoveRightDip/v_MoveRightDip_g01_c01.avi").unlink()
    (tmp_path / "splits/classInd.txt").unlink()
    assert write_look_alikes(tmp_path, SMALL) == 2
    assert bytes_of(tmp_path) == before
    assert write_look_alikes(tmp_path, SMALL) == 0


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(small, tmp_path):
    (tmp_path / "videos" / "YoYo").mkdir(parents=True)
    with pytest.raises(SampleError, match="holds another dataset: move it away"):
        write_look_alikes(tmp_path, SMALL)
    assert bytes_of(tmp_path) == {}
    with pytest.raises(SampleError, match="drawn with other options"):
        write_look_alikes(small, SampleSpec(groups=3, clips=2, min_frames=16, max_frames=18))


def test_videos_that_half_a_second_does_not_lead_out_of_are_refused(tmp_path):
    with pytest.raises(ValueError, match="max_frames must be 20 or less, got 52"):
        write_look_alikes(tmp_path, SampleSpec())
    assert bytes_of(tmp_path) == {}
