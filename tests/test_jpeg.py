import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.jpeg import encode_jpeg, restart_mcus


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
