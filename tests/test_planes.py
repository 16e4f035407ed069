"""Planes out of a part of a clip are those of its whole frames, and what cannot be had so is said."""

from concurrent.futures import ThreadPoolExecutor

import av
import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import planes as planes_module
from pipeline import tiles as tiles_module
from pipeline.jpeg import JpegError, JpegRun, encode_jpeg
from pipeline.planes import decode_planes
from pipeline.tiles import measure_tiles


def smooth(seed, height, width):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 4), None, 0, 255, cv2.NORM_MINMAX)


def clip_of(frames, height, width, *, quality=90, interval=1):
    return [
        encode_jpeg(smooth(seed, height, width), quality=quality, restart_mcus=interval)
        for seed in range(frames)
    ]


def whole_planes(jpeg):
    """Luma, blue and red of one frame, which FFmpeg gets as it is."""
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"idct": "xvid"}
    (frame,) = decoder.decode(av.Packet(jpeg))
    found = []
    for plane, half in zip(frame.planes, (1, 2, 2), strict=True):
        rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        found.append(rows[: -(-frame.height // half), : -(-frame.width // half)].astype(int))
    return found


def assert_planes_of(part, jpegs, top, left, tall, wide):
    """The box in the part is as in the whole frames."""
    assert part.top % 2 == part.left % 2 == 0
    for number, jpeg in enumerate(jpegs):
        for whole, mine, half in zip(whole_planes(jpeg), part[:3], (1, 2, 2), strict=True):
            rows = slice(top // half, -(-(top + tall) // half))
            columns = slice(left // half, -(-(left + wide) // half))
            inside = mine[number, rows.start - part.top // half :, columns.start - part.left // half :]
            asked = whole[rows, columns]
            np.testing.assert_array_equal(inside[: asked.shape[0], : asked.shape[1]], asked)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_part_has_the_planes_of_the_whole(data):
    columns = data.draw(st.integers(1, 8))
    height, width = data.draw(st.integers(1, 90)), 16 * columns - data.draw(st.integers(0, 15))
    interval = data.draw(st.sampled_from([k for k in range(1, columns + 1) if columns % k == 0]))
    quality, frames = data.draw(st.integers(30, 100)), data.draw(st.integers(1, 5))
    jpegs = clip_of(frames, height, width, quality=quality, interval=interval)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    tall, wide = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    part = decode_planes(jpegs, top, left, tall, wide)
    assert_planes_of(part, jpegs, top, left, tall, wide)


def test_luma_is_what_libjpeg_decodes():
    jpegs = clip_of(3, 64, 96, interval=2)
    part = decode_planes(jpegs, 0, 0, 64, 96)
    expected = np.stack([simplejpeg.decode_jpeg(jpeg, "GRAY")[..., 0] for jpeg in jpegs]).astype(int)
    assert np.abs(part.luma - expected).max() <= 1
    assert np.abs(part.luma - expected).mean() < 0.02


def test_colours_have_their_planes():
    picture = np.zeros((32, 32, 3), np.uint8)
    picture[..., 2] = 255  # red, in OpenCV's order
    part = decode_planes([encode_jpeg(picture, quality=95, restart_mcus=2)], 0, 0, 32, 32)
    # JFIF: Y 0.299, Cb 128 - 0.168736, Cr 128 + 0.5 (clipped), of 255
    assert [int(np.median(plane)) for plane in part[:3]] == [76, 85, 255]


def test_a_run_of_bytes_is_taken_where_it_lies():
    jpegs = clip_of(6, 48, 64, interval=2)
    run = JpegRun(memoryview(b"".join(jpegs)), np.cumsum([len(jpeg) for jpeg in jpegs]).tolist())
    for some, same in ((run, jpegs), (run[2:5], jpegs[2:5])):
        for mine, expected in zip(
            decode_planes(some, 8, 10, 30, 40), decode_planes(same, 8, 10, 30, 40), strict=True
        ):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("limit", ["MAX_PX", "_MAX_STACK_PX"])
def test_frames_that_are_too_many_for_one_picture_take_several(monkeypatch, limit):
    jpegs = clip_of(7, 48, 64, interval=2)
    expected = decode_planes(jpegs, 0, 0, 40, 64)
    monkeypatch.setattr(planes_module, limit, {"MAX_PX": 150, "_MAX_STACK_PX": 48 * 64 * 2}[limit])
    for mine, one in zip(decode_planes(jpegs, 0, 0, 40, 64), expected, strict=True):
        np.testing.assert_array_equal(mine, one)
    monkeypatch.setattr(planes_module, limit, 40)
    assert decode_planes(jpegs, 0, 0, 40, 64) is None


def encoded(*options, picture=None):
    picture = smooth(1, 48, 64) if picture is None else picture
    return cv2.imencode(".jpg", picture, list(options))[1].tobytes()


RESTARTS = (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)
NO_PLANES = {
    "no restart markers": encoded(),
    "an interval that does not divide the row": encoded(cv2.IMWRITE_JPEG_RST_INTERVAL, 3),
    "4:4:4": encoded(*RESTARTS, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
    "4:2:2": encoded(*RESTARTS, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422),
    "progressive": encoded(*RESTARTS, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "grey": encoded(*RESTARTS, picture=smooth(1, 48, 64)[..., 0]),
    "of Adobe": encoded(*RESTARTS)[:2] + b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\x02" + encoded(*RESTARTS)[2:],
}


@pytest.mark.parametrize("kind", NO_PLANES)
def test_other_jpegs_have_no_planes_here(kind):
    assert decode_planes([NO_PLANES[kind]] * 2, 0, 0, 20, 20) is None
    assert decode_planes([encoded(*RESTARTS)] * 2, 0, 0, 20, 20) is not None


def test_frames_of_different_tables_have_none():
    jpegs = [*clip_of(1, 48, 64, quality=90), *clip_of(1, 48, 64, quality=60)]
    assert decode_planes(jpegs, 0, 0, 20, 20) is None
    with pytest.raises(JpegError, match="another size") as caught:
        decode_planes([*clip_of(2, 48, 64), *clip_of(1, 64, 64)], 0, 0, 20, 20)
    assert caught.value.place == 2


def zeroed(jpeg):
    middle = len(jpeg) // 2
    return jpeg[:middle] + bytes(200) + jpeg[middle + 200 :]


def cut_short(jpeg):
    return jpeg[: len(jpeg) // 2]


@pytest.mark.parametrize("damage", [zeroed, cut_short])
def test_damage_is_an_error_and_leaves_nothing_behind(damage):
    jpegs = clip_of(4, 240, 320, interval=4)
    expected = decode_planes(jpegs, 0, 0, 240, 320)
    with pytest.raises(JpegError):
        decode_planes([*jpegs[:2], damage(jpegs[2]), jpegs[3]], 0, 0, 240, 320)
    for mine, one in zip(decode_planes(jpegs, 0, 0, 240, 320), expected, strict=True):
        np.testing.assert_array_equal(mine, one)


def test_threads_do_not_meet():
    clips = [(clip_of(3, 16 * k, 16 * k, interval=1), k) for k in range(1, 9)]
    expected = [decode_planes(jpegs, 0, 0, 16 * k, 16 * k).luma.copy() for jpegs, k in clips]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            found = pool.map(lambda clip: decode_planes(clip[0], 0, 0, 16 * clip[1], 16 * clip[1]), clips)
            assert all(np.array_equal(mine.luma, one) for mine, one in zip(found, expected, strict=True))


def run_of(jpegs, tile_bytes):
    return JpegRun(memoryview(b"".join(jpegs)), np.cumsum([len(jpeg) for jpeg in jpegs]).tolist(), tile_bytes)


@pytest.mark.parametrize("box", [(0, 0, 96, 128), (20, 30, 40, 50), (64, 96, 32, 32)])
def test_known_tiles_save_the_search_and_change_nothing(monkeypatch, box):
    jpegs = clip_of(4, 96, 128, interval=2)
    found = decode_planes(jpegs, *box)
    sizes = np.stack([measure_tiles(jpeg) for jpeg in jpegs]).astype(np.uint16)
    monkeypatch.setattr(tiles_module, "_find_bounds", None)
    known = decode_planes(run_of(jpegs, sizes), *box)
    for mine, one in zip(known, found, strict=True):
        np.testing.assert_array_equal(mine, one)


@pytest.mark.parametrize("wrong", ["zero", "moved", "of another grid"])
def test_what_is_known_wrongly_is_searched_for(wrong):
    jpegs = clip_of(4, 96, 128, interval=2)
    sizes = np.stack([measure_tiles(jpeg) for jpeg in jpegs]).astype(np.uint16)
    if wrong == "zero":
        sizes[2] = 0
    elif wrong == "moved":
        sizes[1, 9] += 1
        sizes[1, 15] -= 1
    else:
        sizes = sizes[:, ::2]
    for mine, one in zip(
        decode_planes(run_of(jpegs, sizes), 20, 30, 40, 50),
        decode_planes(jpegs, 20, 30, 40, 50),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, one)


def test_tiles_of_what_has_none():
    assert measure_tiles(encoded()) is None
    assert measure_tiles(cut_short(clip_of(1, 96, 128, interval=2)[0])) is None
    assert measure_tiles(b"") is None
