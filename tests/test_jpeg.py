import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.jpeg import JpegError, crop_jpeg, decode_jpeg, encode_jpeg, jpeg_size, restart_mcus


def segments(jpeg: bytes) -> dict[int, bytes]:
    """Marker segments of a JPEG up to its scan, by marker (ITU-T T.81, B.1)."""
    found, at = {}, 2
    while jpeg[at + 1] != 0xDA:
        length = int.from_bytes(jpeg[at + 2 : at + 4])
        found[jpeg[at + 1]] = jpeg[at + 4 : at + 2 + length]
        at += 2 + length
    return found


@given(width=st.integers(1, 4000))
def test_the_interval_divides_the_row_of_mcus(width):
    row = (width + 15) // 16
    interval = restart_mcus(width)
    assert row % interval == 0
    assert interval in (2, 3, 4, 5) or all(row % k for k in (2, 3, 4, 5))


@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 60), quality=st.integers(1, 100))
def test_a_jpeg_is_baseline_420_with_the_asked_interval(width, height, quality):
    picture = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    jpeg = encode_jpeg(picture, quality=quality, restart_mcus=restart_mcus(width))
    found = segments(jpeg)
    assert int.from_bytes(found[0xDD]) == restart_mcus(width)  # DRI
    frame = found[0xC0]  # SOF0: baseline
    assert [frame[7 + 3 * component] for component in range(3)] == [0x22, 0x11, 0x11]
    assert cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR).shape == picture.shape
    tiles = -(-width // 16) * -(-height // 16) // restart_mcus(width)
    scan = jpeg[jpeg.index(b"\xff\xda") :]
    assert sum(scan.count(bytes((0xFF, 0xD0 + number))) for number in range(8)) == tiles - 1


def test_a_picture_beyond_what_a_jpeg_holds_is_refused():
    with pytest.raises(ValueError, match="more than a JPEG can hold"):
        encode_jpeg(np.zeros((1, 70_000, 3), np.uint8), quality=90, restart_mcus=1)


SUBSAMPLINGS = [
    getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}") for name in ("411", "420", "422", "440", "444")
]


@st.composite
def jpegs(draw):
    height, width = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    picture = rng.integers(0, 256, (height, width, 3), np.uint8)
    if draw(st.booleans()):
        picture = cv2.GaussianBlur(picture, (0, 0), 3)
    options = [cv2.IMWRITE_JPEG_QUALITY, draw(st.integers(3, 100))]
    options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, draw(st.sampled_from(SUBSAMPLINGS))]
    options += [cv2.IMWRITE_JPEG_RST_INTERVAL, draw(st.integers(0, 9))]
    options += [cv2.IMWRITE_JPEG_OPTIMIZE, draw(st.integers(0, 1))]
    options += [cv2.IMWRITE_JPEG_PROGRESSIVE, draw(st.sampled_from([0, 0, 0, 1]))]
    return cv2.imencode(".jpg", picture, options)[1].tobytes(), height, width


@settings(max_examples=300, deadline=None)
@given(jpeg=jpegs(), data=st.data())
def test_a_crop_decodes_to_the_same_pixels_as_the_whole(jpeg, data):
    jpeg, height, width = jpeg
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    tall, wide = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    region = crop_jpeg(memoryview(jpeg), top, left, tall, wide)
    part = decode_jpeg(region.data)
    assert part.shape == (region.height, region.width, 3)
    inside = part[top - region.top :, left - region.left :][:tall, :wide]
    np.testing.assert_array_equal(inside, decode_jpeg(jpeg)[top : top + tall, left : left + wide])


def test_a_crop_takes_only_the_tiles_it_needs():
    picture = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    jpeg = encode_jpeg(picture, quality=90, restart_mcus=restart_mcus(320))  # tiles of 64 x 16
    region = crop_jpeg(jpeg, 34, 70, 60, 50)
    assert region[1:] == (32, 64, 64, 64)
    assert len(region.data) < len(jpeg) / 12
    # Any decoder takes it: a valid JPEG of its own.
    other = cv2.imdecode(np.frombuffer(region.data, np.uint8), cv2.IMREAD_COLOR_RGB)
    np.testing.assert_array_equal(other, decode_jpeg(region.data))


@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_RST_INTERVAL, 2)])
def test_a_jpeg_that_cannot_be_taken_apart_comes_back_whole(options):
    jpeg = cv2.imencode(".jpg", np.zeros((64, 64, 3), np.uint8), options)[1].tobytes()
    assert crop_jpeg(jpeg, 20, 20, 8, 8) == (jpeg, 0, 0, 64, 64)


def test_a_grey_jpeg_comes_back_whole_and_decodes_to_three_channels():
    options = (cv2.IMWRITE_JPEG_RST_INTERVAL, 1)
    jpeg = cv2.imencode(".jpg", np.full((32, 48), 77, np.uint8), options)[1].tobytes()
    assert crop_jpeg(jpeg, 20, 20, 8, 8).data == jpeg
    assert (decode_jpeg(jpeg) == 77).all()
    assert jpeg_size(jpeg) == (32, 48)


@pytest.mark.parametrize("cut", [0, 1, 100, 0.6])
def test_a_jpeg_that_is_cut_short_is_damaged(cut):
    picture = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    jpeg = encode_jpeg(picture, quality=90, restart_mcus=4)
    jpeg = jpeg[: int(len(jpeg) * cut) if cut < 1 else cut]
    with pytest.raises(JpegError, match="JPEG"):
        crop_jpeg(jpeg, 0, 0, 16, 16)
    with pytest.raises(JpegError, match="JPEG"):
        decode_jpeg(jpeg)


def test_pixels_are_written_into_memory_that_is_given():
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    jpeg = encode_jpeg(picture, quality=90, restart_mcus=2)
    out = np.zeros(5000, np.uint8)
    pixels = decode_jpeg(jpeg, out)
    assert np.shares_memory(pixels, out)
    np.testing.assert_array_equal(pixels, decode_jpeg(jpeg))
