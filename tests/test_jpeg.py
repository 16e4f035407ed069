import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.jpeg import (
    JpegError,
    JpegRun,
    crop_jpegs,
    decode_crop,
    decode_jpeg,
    encode_jpeg,
    jpeg_size,
    restart_mcus,
)


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


def picture_of(draw, height, width):
    picture = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (height, width, 3), np.uint8)
    return cv2.GaussianBlur(picture, (0, 0), 3) if draw(st.booleans()) else picture


@st.composite
def clips(draw, frames=1):
    """JPEGs of one kind, their height and width."""
    height, width = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    options = [cv2.IMWRITE_JPEG_QUALITY, draw(st.integers(3, 100))]
    options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, draw(st.sampled_from(SUBSAMPLINGS))]
    options += [cv2.IMWRITE_JPEG_RST_INTERVAL, draw(st.integers(0, 9))]
    options += [cv2.IMWRITE_JPEG_OPTIMIZE, draw(st.integers(0, 1))]
    options += [cv2.IMWRITE_JPEG_PROGRESSIVE, draw(st.sampled_from([0, 0, 0, 1]))]
    made = [cv2.imencode(".jpg", picture_of(draw, height, width), options)[1] for _ in range(frames)]
    return [jpeg.tobytes() for jpeg in made], height, width


def box_in(data, height, width):
    """Top, left, height and width of a box."""
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    return top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))


@settings(max_examples=300, deadline=None)
@given(clip=clips(), data=st.data())
def test_a_crop_decodes_to_the_same_pixels_as_the_whole(clip, data):
    (jpeg,), height, width = clip
    top, left, tall, wide = box_in(data, height, width)
    for jpegs in ([memoryview(jpeg)], [jpeg, memoryview(jpeg), jpeg]):
        regions = crop_jpegs(jpegs, top, left, tall, wide)
        assert len(regions.jpegs) == len(jpegs)
        for region in regions.jpegs:
            part = decode_jpeg(region)
            assert part.shape == (regions.height, regions.width, 3)
            inside = part[top - regions.top :, left - regions.left :][:tall, :wide]
            np.testing.assert_array_equal(inside, decode_jpeg(jpeg)[top : top + tall, left : left + wide])


@settings(max_examples=300, deadline=None)
@given(clip=clips(frames=3), data=st.data())
def test_what_a_box_needs_of_a_clip_is_decoded_to_the_same_pixels(clip, data):
    jpegs, height, width = clip
    top, left, tall, wide = box_in(data, height, width)
    part = decode_crop(jpegs, top, left, tall, wide, memory=fresh_memory)
    inside = part.pixels[:, top - part.top :, left - part.left :][:, :tall, :wide]
    whole = np.stack([decode_jpeg(jpeg) for jpeg in jpegs])
    np.testing.assert_array_equal(inside, whole[:, top : top + tall, left : left + wide])


def fresh_memory(size):
    return np.full(size, 77, np.uint8)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("box", [(0, 0, 96, 144), (16, 32, 64, 64), (40, 48, 56, 96)])
def test_what_a_box_needs_is_decoded_to_a_fraction_of_its_size(factor, box):
    jpegs = [noise_jpeg(seed, 96, 144, 3) for seed in range(3)]
    part = decode_crop(jpegs, *box, memory=fresh_memory, reduce=factor)
    first, left = part.top // factor, part.left // factor
    top, _, tall, _ = (value // factor for value in box)
    whole = np.stack([decode_jpeg(jpeg, reduce=factor) for jpeg in jpegs])
    columns = slice(left, left + part.pixels.shape[2])
    np.testing.assert_array_equal(
        part.pixels[:, top - first :][:, :tall], whole[:, top : top + tall, columns]
    )


def test_frames_that_do_not_fit_below_each_other_are_decoded_one_by_one():
    jpegs = [noise_jpeg(seed, 400, 32, 2) for seed in range(2)] * 85
    part = decode_crop(jpegs, 8, 0, 384, 32, memory=fresh_memory)  # 170 x 400 rows are more than 65,500
    np.testing.assert_array_equal(part.pixels[7, 8:392], decode_jpeg(jpegs[1])[8:392])


def test_a_damaged_frame_of_a_clip_is_told_by_its_place():
    jpegs = [noise_jpeg(seed, 96, 96, 2) for seed in range(4)]
    header = jpegs[2].index(b"\xff\xda") + 14
    jpegs[2] = jpegs[2][:header] + bytes(8) + jpegs[2][header + 8 :]
    with pytest.raises(JpegError) as caught:
        decode_crop(jpegs, 8, 8, 80, 80, memory=fresh_memory)
    assert caught.value.place == 2


def noise_jpeg(seed, height, width, interval):
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encode_jpeg(picture, quality=90, restart_mcus=interval)


def test_frames_of_a_clip_are_cut_together_and_each_keeps_its_pixels():
    jpegs = [noise_jpeg(seed, 100, 130, 3) for seed in range(5)]
    regions = crop_jpegs(jpegs, 30, 50, 40, 60)
    for jpeg, region in zip(jpegs, regions.jpegs, strict=True):
        inside = decode_jpeg(region)[30 - regions.top :, 50 - regions.left :][:40, :60]
        np.testing.assert_array_equal(inside, decode_jpeg(jpeg)[30:70, 50:110])


def test_frames_that_lie_together_are_cut_as_those_that_do_not():
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(3)]
    jpegs = [encode_jpeg(picture, quality=90, restart_mcus=2) for picture in pictures]
    ends = np.cumsum([len(jpeg) for jpeg in jpegs]).tolist()
    run = JpegRun(memoryview(b"".join(jpegs)), ends)
    assert [bytes(jpeg) for jpeg in run] == jpegs
    apart, together = crop_jpegs(jpegs, 20, 3, 10, 20), crop_jpegs(run, 20, 3, 10, 20)
    assert [bytes(part) for part in together.jpegs] == [bytes(part) for part in apart.jpegs]


def test_a_crop_takes_only_the_tiles_it_needs():
    jpeg = noise_jpeg(0, 240, 320, 4)  # tiles of 64 x 16
    regions = crop_jpegs([jpeg], 34, 70, 60, 50)
    assert regions[1:] == (32, 64, 64, 64)
    assert len(regions.jpegs[0]) < len(jpeg) / 12
    # Any decoder takes it: a valid JPEG of its own.
    other = cv2.imdecode(np.frombuffer(regions.jpegs[0], np.uint8), cv2.IMREAD_COLOR_RGB)
    np.testing.assert_array_equal(other, decode_jpeg(regions.jpegs[0]))


@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_RST_INTERVAL, 2)])
def test_a_jpeg_that_cannot_be_taken_apart_comes_back_whole(options):
    jpeg = cv2.imencode(".jpg", np.zeros((64, 64, 3), np.uint8), options)[1].tobytes()
    assert crop_jpegs([jpeg], 20, 20, 8, 8) == ([jpeg], 0, 0, 64, 64)


def test_a_grey_jpeg_comes_back_whole_and_decodes_to_three_channels():
    options = (cv2.IMWRITE_JPEG_RST_INTERVAL, 1)
    jpeg = cv2.imencode(".jpg", np.full((32, 48), 77, np.uint8), options)[1].tobytes()
    assert crop_jpegs([jpeg], 20, 20, 8, 8).jpegs == [jpeg]
    assert (decode_jpeg(jpeg) == 77).all()
    assert jpeg_size(jpeg) == (32, 48)


def test_frames_with_other_tables_come_back_whole():
    jpegs = [noise_jpeg(0, 64, 64, 2), noise_jpeg(1, 64, 64, 4)]
    assert crop_jpegs(jpegs, 20, 20, 8, 8) == (jpegs, 0, 0, 64, 64)


def test_a_frame_of_another_size_is_told_by_its_place():
    jpegs = [noise_jpeg(0, 64, 64, 2), noise_jpeg(0, 64, 64, 2), noise_jpeg(1, 64, 96, 2)]
    with pytest.raises(JpegError, match="96x64, the clip's first frame 64x64") as caught:
        crop_jpegs(jpegs, 20, 20, 8, 8)
    assert caught.value.place == 2


@pytest.mark.parametrize("cut", [0, 1, 100, 0.6])
def test_a_jpeg_that_is_cut_short_is_damaged(cut):
    whole = noise_jpeg(0, 96, 128, 4)
    jpeg = whole[: int(len(whole) * cut) if cut < 1 else cut]
    with pytest.raises(JpegError, match="JPEG"):
        crop_jpegs([jpeg], 0, 0, 16, 16)
    with pytest.raises(JpegError, match="JPEG"):
        decode_jpeg(jpeg)
    with pytest.raises(JpegError, match="JPEG") as caught:
        crop_jpegs([whole, whole, jpeg, whole], 0, 0, 16, 16)
    assert caught.value.place == 2


def test_tables_that_look_like_markers_do_not_mislead():
    # At quality 1 every number of a quantisation table is 255: a marker's first byte.
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    jpeg = bytearray(encode_jpeg(picture, quality=1, restart_mcus=2))
    table = jpeg.index(b"\xff\xff\xff")
    jpeg[table + 1] = 0xD3
    regions = crop_jpegs([bytes(jpeg)] * 3, 20, 20, 8, 8)
    assert regions.height == 16
    for region in regions.jpegs:
        inside = decode_jpeg(region)[20 - regions.top :, 20 - regions.left :][:8, :8]
        np.testing.assert_array_equal(inside, decode_jpeg(bytes(jpeg))[20:28, 20:28])


def test_pixels_are_written_into_memory_that_is_given():
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    jpeg = encode_jpeg(picture, quality=90, restart_mcus=2)
    out = np.zeros(5000, np.uint8)
    pixels = decode_jpeg(jpeg, out)
    assert np.shares_memory(pixels, out)
    np.testing.assert_array_equal(pixels, decode_jpeg(jpeg))


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_reduced_picture_is_the_mean_of_its_pixels(factor):
    smooth = cv2.resize(np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8), (144, 96))
    jpeg = encode_jpeg(smooth, quality=95, restart_mcus=3)
    reduced = decode_jpeg(jpeg, reduce=factor).astype(float)
    blocks = decode_jpeg(jpeg).reshape(96 // factor, factor, 144 // factor, factor, 3).mean(axis=(1, 3))
    assert np.abs(reduced - blocks).mean() < 1


def test_a_reduced_picture_of_odd_size_is_rounded_up():
    assert decode_jpeg(noise_jpeg(0, 101, 143, 3), reduce=4).shape == (26, 36, 3)
