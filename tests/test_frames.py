"""One video to one folder: every kind of trouble that a single file can make."""

import subprocess
import threading
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import VideoError
from pipeline.folder import FrameFolder, parse_frame_name, read_frames_json
from pipeline.offline import frames as frames_module
from pipeline.offline import jpeg_folder
from pipeline.offline.decode import Clock, TimesError, open_video
from pipeline.offline.frames import FrameSpec, _Wanted, extract_frames, stored_size
from tests.videos import read_k, set_display_matrix, write_video

PICTURE = np.zeros((48, 64, 3), np.uint8)
PICTURE[:24, :32], PICTURE[:24, 32:], PICTURE[24:, :32] = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def stored(folder: Path, frames: FrameFolder) -> list[int]:
    return [read_k(folder / name) for name in frames.frame_names()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain.avi", {}),
        ("b_frames.avi", {"b_frames": 2}),
        ("h264.mp4", {"codec": "libx264"}),
        ("h264_b_frames.mkv", {"codec": "libx264", "b_frames": 3}),
        ("motion_jpeg.avi", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
        ("ten_bit.mkv", {"codec": "ffv1", "pix_fmt": "yuv420p10le"}),
        ("grey.mkv", {"codec": "ffv1", "pix_fmt": "gray"}),
        ("odd.mkv", {"codec": "ffv1", "size": (161, 121)}),
        ("rgb.mkv", {"codec": "ffv1", "pix_fmt": "bgr0"}),
    ],
)
def test_every_frame_is_stored_once_in_order_with_its_time(tmp_path, name, options):
    video = write_video(tmp_path / name, **options)
    frames = extract_frames(video, tmp_path / "out")
    assert frames.status == "ok"
    assert stored(tmp_path / "out", frames) == list(range(30))
    assert frames.times_us == [40_000 * k for k in range(30)]
    files = sorted(path.name for path in (tmp_path / "out").glob("*.jpg"))
    assert [parse_frame_name(file) for file in files] == list(enumerate(frames.times_us))
    assert frames.sizes == [(tmp_path / "out" / file).stat().st_size for file in files]
    assert read_frames_json(tmp_path / "out") == frames
    assert (frames.fps, frames.duration_s) == (pytest.approx(25), pytest.approx(1.2))
    assert not (tmp_path / ".scratch").exists()


def test_b_frames_in_avi_take_their_times_from_dts(tmp_path):
    frames = extract_frames(write_video(tmp_path / "x.avi", b_frames=2), tmp_path / "out")
    assert frames.time_source == "dts"
    assert frames.start_us == 40_000  # as ffprobe's best-effort timestamps say


@pytest.mark.parametrize(("name", "options"), [("x.avi", {"b_frames": 2}), ("x.h264", {"codec": "libx264"})])
def test_what_has_no_pts_is_decoded_once_all_the_same(tmp_path, monkeypatch, name, options):
    opened = []
    monkeypatch.setattr(frames_module, "open_video", lambda path: opened.append(path) or open_video(path))
    extract_frames(write_video(tmp_path / name, **options), tmp_path / "out")
    assert len(opened) == 1


def test_a_variable_rate_keeps_its_times(tmp_path):
    times_s = [k / 10 for k in range(10)] + [1 + k / 30 for k in range(10)]
    video = write_video(tmp_path / "x.mp4", codec="libx264", frames=20, times_s=times_s)
    frames = extract_frames(video, tmp_path / "out")
    assert frames.times_us == [round(time_s * 1000) * 1000 for time_s in times_s]
    assert frames.fps == pytest.approx(19 / 1.3)


def test_a_first_time_that_is_not_zero_is_kept_apart(tmp_path):
    times_s = [2 + k / 25 for k in range(10)]
    video = write_video(tmp_path / "x.mp4", codec="libx264", frames=10, times_s=times_s)
    frames = extract_frames(video, tmp_path / "out")
    assert frames.start_us == 2_000_000
    assert frames.times_us == [40_000 * k for k in range(10)]


def test_a_raw_stream_without_timestamps_counts_by_its_rate(tmp_path):
    video = write_video(tmp_path / "x.h264", codec="libx264", frames=10)
    frames = extract_frames(video, tmp_path / "out")
    assert frames.time_source == "rate"
    assert frames.times_us == [40_000 * k for k in range(10)]
    assert stored(tmp_path / "out", frames) == list(range(10))


class FakeFrame:
    def __init__(self, pts, dts, duration=1):
        self.pts, self.dts, self.duration = pts, dts, duration


class FakeStream:
    time_base = Fraction(1, 25)
    average_rate = guessed_rate = base_rate = Fraction(25)
    codec_context = type("Context", (), {"framerate": None})


def test_times_start_below_zero_and_the_last_ones_without_dts_go_on():
    clock = Clock(FakeStream(), "dts")
    frames = [FakeFrame(None, dts) for dts in (-2, -1, 0, None, None)]
    assert [clock.time_us(frame) for frame in frames] == [0, 40_000, 80_000, 120_000, 160_000]
    assert clock.start_us == -80_000


@pytest.mark.parametrize("stamps", [[0, 1, 1], [0, 2, 1], [0, None], [None]])
def test_times_that_do_not_increase_are_not_taken(stamps):
    clock = Clock(FakeStream(), "pts")
    with pytest.raises(TimesError):
        for stamp in stamps:
            clock.time_us(FakeFrame(stamp, stamp))


@pytest.mark.parametrize(
    "matrix", [(0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0), (-1, 0, 0, 1), (0, 1, 1, 0)]
)
def test_a_turned_video_is_stored_upright(tmp_path, matrix):
    video = write_video(tmp_path / "x.mp4", codec="libx264", pictures=[PICTURE] * 2)
    set_display_matrix(video, matrix)
    frames = extract_frames(video, tmp_path / "out", FrameSpec(quality=100))
    picture = cv2.imread(str(tmp_path / "out" / frames.frame_names()[0]))
    a, b, c, d = matrix
    corners = {}  # each corner goes to (a x + c y, b x + d y), about the middle
    for x, y in ((-1, -1), (1, -1), (-1, 1), (1, 1)):
        corners[a * x + c * y, b * x + d * y] = PICTURE[12 if y < 0 else 36, 16 if x < 0 else 48]
    height, width = picture.shape[:2]
    assert (frames.width, frames.height) == (width, height) == ((48, 64) if b else (64, 48))
    for (x, y), colour in corners.items():
        seen = picture[height // 4 * (1 if y < 0 else 3), width // 4 * (1 if x < 0 else 3)]
        assert np.abs(seen[::-1].astype(int) - colour).max() < 6
    assert frames.mirrored == (a * d - b * c < 0)


def test_the_angle_is_kept_as_ffprobe_prints_it(tmp_path):
    video = write_video(tmp_path / "x.mp4", codec="libx264", frames=2)
    set_display_matrix(video, (0, 1, -1, 0))  # what a phone held upright writes
    assert extract_frames(video, tmp_path / "out").rotation == -90


@pytest.mark.parametrize("matrix", [1, 5, 6, 9], ids=["bt709", "bt470bg", "smpte170m", "bt2020"])
@pytest.mark.parametrize("colour_range", [1, 2], ids=["limited", "full"])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p"])
def test_pure_colours_come_out_pure(tmp_path, matrix, colour_range, pix_fmt):
    video = write_video(
        tmp_path / "x.mp4",
        codec="libx264",
        pix_fmt=pix_fmt,
        pictures=[PICTURE] * 2,
        colour=(matrix, colour_range),
        options={"qp": "0"},
    )
    frames = extract_frames(video, tmp_path / "out", FrameSpec(quality=100))
    picture = cv2.imread(str(tmp_path / "out" / frames.frame_names()[0]))[..., ::-1].astype(int)
    for y, x in ((12, 16), (12, 48), (36, 16), (36, 48)):
        assert np.abs(picture[y, x] - PICTURE[y, x]).max() <= 5


def test_a_video_cut_inside_its_last_packet_is_partial_and_keeps_the_rest(tmp_path):
    pictures = [np.random.default_rng(k).integers(0, 256, (48, 64, 3), np.uint8) for k in range(30)]
    video = write_video(tmp_path / "x.avi", pictures=pictures)
    data = video.read_bytes()
    video.write_bytes(data[: data.rindex(b"00dc", 0, data.index(b"idx1")) + 200])
    frames = extract_frames(video, tmp_path / "out")
    assert frames.status == "partial"
    assert frames.error
    assert frames.num_frames in (29, 30)


def test_damage_in_the_middle_is_partial_and_counted(tmp_path):
    pictures = [np.random.default_rng(k).integers(0, 256, (48, 64, 3), np.uint8) for k in range(30)]
    video = write_video(tmp_path / "x.avi", pictures=pictures)
    data = bytearray(video.read_bytes())
    packet = [at for at in range(len(data)) if data[at : at + 4] == b"00dc"][15]
    data[packet + 500 : packet + 540] = b"\xff" * 40
    video.write_bytes(data)
    frames = extract_frames(video, tmp_path / "out")
    assert frames.status == "partial"
    assert "error" in frames.error
    assert frames.num_frames >= 29


def test_a_good_header_with_empty_packets_fails_and_leaves_nothing(tmp_path):
    video = write_video(tmp_path / "x.mp4", codec="libx264", frames=5)
    data = bytearray(video.read_bytes())
    start = data.index(b"mdat") + 4
    end = data.find(b"moov", start)
    data[start : end if end > 0 else len(data)] = bytes((end if end > 0 else len(data)) - start)
    video.write_bytes(data)
    with pytest.raises(VideoError, match="no frame") as caught:
        extract_frames(video, tmp_path / "out")
    assert caught.value.stage == "decode"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.mp4"]


@pytest.mark.parametrize("content", [b"", b"just a text\n" * 50, b"RIFF" + bytes(200), bytes(4000)])
def test_what_is_no_video_fails_with_a_reason(tmp_path, content):
    (tmp_path / "x.avi").write_bytes(content)
    with pytest.raises(VideoError) as caught:
        extract_frames(tmp_path / "x.avi", tmp_path / "out")
    assert caught.value.stage in ("open", "stream")
    assert caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_missing_video_names_itself(tmp_path):
    with pytest.raises(VideoError, match=r"No such file.*gone\.avi"):
        extract_frames(tmp_path / "gone.avi", tmp_path / "out")


def test_an_extension_may_lie(tmp_path):
    video = write_video(tmp_path / "x.mkv", codec="libx264", frames=5)
    video.rename(tmp_path / "x.mp4")
    assert extract_frames(tmp_path / "x.mp4", tmp_path / "out").num_frames == 5


@pytest.mark.parametrize(
    "name",
    [
        "a b.avi",
        "ünïcödé 動画.avi",
        "100%d.avi",
        'it\'s "q".avi',
        "-dash.avi",
        "new\nline.avi",
        "a:b.avi",
        "x" * 200 + ".avi",
    ],
)
def test_a_name_may_hold_anything(tmp_path, name):
    frames = extract_frames(
        write_video(tmp_path / "v.avi", frames=3).rename(tmp_path / name), tmp_path / "out"
    )
    assert (frames.video, frames.num_frames) == (name, 3)


def test_tiny_pictures_are_stored_as_they_are(tmp_path):
    for size in ((1, 1), (8, 8), (3, 17)):
        video = write_video(tmp_path / "x.mkv", codec="ffv1", pix_fmt="yuv444p", size=size, frames=2)
        frames = extract_frames(video, tmp_path / "out")
        assert (frames.width, frames.height) == size
        assert cv2.imread(str(tmp_path / "out" / frames.frame_names()[1])).shape[:2] == size[::-1]


@pytest.mark.parametrize(
    ("size", "aspect", "spec", "expected"),
    [
        ((320, 240), 1, FrameSpec(), (320, 240)),
        ((320, 240), 1, FrameSpec(short_side_px=120), (160, 120)),
        ((240, 320), 1, FrameSpec(short_side_px=120), (120, 160)),
        ((320, 240), 1, FrameSpec(short_side_px=480), (320, 240)),
        ((320, 240), 1, FrameSpec(short_side_px=480, enlarge=True), (640, 480)),
        ((320, 240), Fraction(4096, 4083), FrameSpec(square_pixels=True), (320, 240)),
        ((720, 576), Fraction(64, 45), FrameSpec(square_pixels=True), (1024, 576)),
        ((160, 240), Fraction(1, 2), FrameSpec(square_pixels=True, short_side_px=40), (40, 120)),
        ((1000, 1), 1, FrameSpec(short_side_px=1), (1000, 1)),
    ],
)
def test_stored_sizes(size, aspect, spec, expected):
    assert stored_size(*size, Fraction(aspect), spec) == expected


def test_scaled_frames_have_the_asked_short_side(tmp_path):
    video = write_video(tmp_path / "x.avi", size=(96, 64), frames=3)
    frames = extract_frames(video, tmp_path / "out", FrameSpec(short_side_px=32))
    assert (frames.width, frames.height) == (48, 32)
    assert stored(tmp_path / "out", frames) == [0, 1, 2]


def test_every_kth_frame_keeps_true_times(tmp_path):
    frames = extract_frames(write_video(tmp_path / "x.avi"), tmp_path / "out", FrameSpec(every=4))
    assert stored(tmp_path / "out", frames) == list(range(0, 30, 4))
    assert frames.times_us == [160_000 * k for k in range(8)]


def test_a_limit_ends_the_video_early(tmp_path):
    frames = extract_frames(write_video(tmp_path / "x.avi"), tmp_path / "out", FrameSpec(max_frames=7))
    assert stored(tmp_path / "out", frames) == list(range(7))
    assert "limit of 7" in frames.note


def test_fps_by_time_is_honest_on_a_variable_rate(tmp_path):
    times_s = [k / 10 for k in range(10)] + [1 + k / 30 for k in range(20)]
    video = write_video(tmp_path / "x.mp4", codec="libx264", frames=30, times_s=times_s)
    frames = extract_frames(video, tmp_path / "out", FrameSpec(fps=5))
    # The first frame in each fifth of a second: 0 to 0.8 from the slow part, from 1.0 on from the quick one.
    assert stored(tmp_path / "out", frames) == [0, 2, 4, 6, 8, 10, 16, 22, 28]


@given(
    fps=st.sampled_from([1.0, 7.5, 12.0, 14.985, 23.976, 25.0, 29.97, 60.0]),
    gaps_ms=st.lists(st.integers(1, 300), min_size=1, max_size=80),
)
def test_fps_takes_the_first_frame_of_each_slot_and_makes_none_up(fps, gaps_ms):
    times_us = [0, *(int(sum(gaps_ms[: k + 1])) * 1000 for k in range(len(gaps_ms)))]
    wanted = _Wanted(FrameSpec(fps=fps))
    taken = [time_us for time_us in times_us if wanted.takes(time_us)]
    slots = [int((time_us + 1) * fps / 1e6) for time_us in times_us]
    assert taken == [time_us for k, time_us in enumerate(times_us) if k == 0 or slots[k] != slots[k - 1]]


def test_half_of_ntsc_is_every_second_frame_in_spite_of_rounded_times():
    wanted = _Wanted(FrameSpec(fps=30000 / 1001 / 2))
    times_us = [round(k * 1001 / 30000 * 1e6) for k in range(600)]
    assert [k for k, time_us in enumerate(times_us) if wanted.takes(time_us)] == list(range(0, 600, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality": 0}, "quality"),
        ({"every": 0}, "every"),
        ({"fps": 0.0}, "fps"),
        ({"short_side_px": -1}, "short_side_px"),
        ({"enlarge": True}, "short_side_px"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FrameSpec(**options)


def test_a_folder_is_replaced_whole(tmp_path):
    extract_frames(write_video(tmp_path / "x.avi", frames=30), tmp_path / "out")
    extract_frames(write_video(tmp_path / "x.avi", frames=4), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.jpg"))) == 4


def test_two_sizes_in_a_stream_are_scaled_to_the_first(tmp_path):
    # Raw streams can be put one after the other.
    first = write_video(tmp_path / "1.h264", codec="libx264", size=(64, 48), frames=3).read_bytes()
    second = write_video(tmp_path / "2.h264", codec="libx264", size=(96, 64), frames=3).read_bytes()
    (tmp_path / "x.h264").write_bytes(first + second)
    frames = extract_frames(tmp_path / "x.h264", tmp_path / "out")
    sizes = {cv2.imread(str(tmp_path / "out" / name)).shape for name in frames.frame_names()}
    assert sizes == {(48, 64, 3)}
    assert frames.num_frames == 6
    assert "size at frame 3" in frames.note


def test_memory_and_open_files_stay_flat_over_thousands_of_videos(tmp_path):
    from pipeline.offline.decode import best_stream, decoded_frames

    video = write_video(tmp_path / "x.avi", frames=5)
    process = psutil.Process()
    for count in range(2000):
        if count == 200:
            before = process.memory_info().rss, process.num_fds()
        with open_video(video) as (container, errors):
            for _ in decoded_frames(container, best_stream(container, errors), errors):
                if count % 2:
                    break  # abandoned
    assert process.num_fds() == before[1]
    assert process.memory_info().rss - before[0] < 10e6


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_full_disk_says_so_and_leaves_nothing(tmp_path, small_disk, threads):
    noise = (np.random.default_rng(k).integers(0, 256, (240, 320, 3), np.uint8) for k in range(60))
    video = write_video(tmp_path / "x.avi", size=(320, 240), pictures=noise)
    with pytest.raises(OSError, match="No space left"):
        extract_frames(video, small_disk / "out", FrameSpec(quality=95), threads=threads)
    assert [path.name for path in small_disk.iterdir()] == []


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_frame_that_cannot_be_encoded_fails_the_video_whichever_thread_has_it(
    tmp_path, monkeypatch, threads
):
    encode, calls = jpeg_folder.encode_jpeg, iter(range(100))

    def fails_later(*args, **options):
        if next(calls) == 12:
            raise ValueError("no such picture")
        return encode(*args, **options)

    monkeypatch.setattr(jpeg_folder, "encode_jpeg", fails_later)
    before = threading.active_count()
    with pytest.raises(VideoError, match="encode: no such picture"):
        extract_frames(write_video(tmp_path / "x.avi"), tmp_path / "out", threads=threads)
    assert threading.active_count() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.avi"]


def test_names_are_not_given_to_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert extract_frames(write_video(tmp_path / "$(x).avi", frames=2), tmp_path / "out").num_frames == 2


@pytest.mark.parametrize("waiting_bytes", [1, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_that_encode_change_nothing_on_disk(tmp_path, monkeypatch, threads, waiting_bytes):
    # Few frames may wait: some are encoded beside, some by the thread that decodes.
    monkeypatch.setattr(jpeg_folder, "_WAITING_BYTES", waiting_bytes)
    video = write_video(tmp_path / "x.avi", b_frames=2)
    alone, beside = (extract_frames(video, tmp_path / str(count), threads=count) for count in (0, threads))
    assert alone == beside
    for name in alone.frame_names():
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / str(threads) / name).read_bytes()
