"""A crop of planes is that of RGB but for how chroma is interpolated, and exactly where it should be."""

import cv2
import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional

from pipeline.jpeg import decode_jpeg, encode_jpeg
from pipeline.online import AugmentSpec, ClipDataset, ClipRef
from pipeline.online.augment import DrawnAugment, draw_augment
from pipeline.online.crops import Axis
from pipeline.online.planar import apply_to_planes, fits_planes
from pipeline.planes import Planes, decode_planes
from tests.encoded_clips import WINDOW, Scenes
from tests.manifests import manifest_of

OUT = 56


def scene(seed, height=120, width=160):
    """Smooth colours with sharp edges, as a camera gives."""
    rng = np.random.default_rng(seed)
    picture = cv2.GaussianBlur(rng.integers(0, 256, (height, width, 3), np.uint8), (0, 0), 8)
    picture = cv2.normalize(picture, None, 0, 255, cv2.NORM_MINMAX)
    for _ in range(5):
        x, y, radius = (int(value) for value in rng.integers(8, 100, 3))
        cv2.circle(picture, (x, y), radius // 4, rng.integers(0, 256, 3).tolist(), -1, cv2.LINE_AA)
    return picture


def clip_of(frames, height=120, width=160):
    return [encode_jpeg(scene(seed, height, width), quality=95, restart_mcus=1) for seed in range(frames)]


def drawn_box(top, left, height, width, *, out=OUT, flip=False, antialias=True):
    y, x = Axis(top, height, 0, out, height / out), Axis(left, width, 0, out, width / out)
    return DrawnAugment(y, x, flip, antialias)


def planes_of(jpegs, drawn):
    return decode_planes(jpegs, *drawn.box)


BOXES = [(0, 0, 120, 160), (10, 22, 80, 90), (2, 4, 60, 60), (30, 40, 90, 120), (16, 32, 40, 30)]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("antialias", [True, False])
def test_it_agrees_with_torchvision_on_the_same_box(box, antialias):
    jpegs = clip_of(5)
    drawn = drawn_box(*box, antialias=antialias)
    ours = apply_to_planes(planes_of(jpegs, drawn), drawn)
    frames = torch.from_numpy(np.stack([decode_jpeg(jpeg) for jpeg in jpegs])).permute(0, 3, 1, 2)
    theirs = (
        functional.resized_crop(frames, *box, [OUT, OUT], antialias=antialias).permute(0, 2, 3, 1).numpy()
    )
    difference = ours.astype(int) - theirs
    assert np.abs(difference).mean() < 1
    assert np.abs(difference.mean((0, 1, 2))).max() < 0.3  # no colour is shifted


def slow_planes(planes, drawn):
    """In float64: each plane by itself, chroma on its own grid, then JFIF's formula."""
    y, x = drawn.shifted(planes.top, planes.left)[:2]
    resized = []
    for plane, half in zip(planes[:3], (1, 2, 2), strict=True):
        top, left = y.start // half, x.start // half
        rows, columns = -(-y.length // half), -(-x.length // half)
        part = torch.from_numpy(plane[:, top : top + rows, left : left + columns].astype(float))
        scale = [half / y.step, half / x.step]
        resized.append(
            torch.ops.aten._upsample_bilinear2d_aa(part[:, None], [y.grid, x.grid], False, *scale)[:, 0]
        )
    luma, blue, red = resized[0], resized[1] - 128, resized[2] - 128
    colours = [luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue]
    made = torch.stack(colours, -1).clamp(0, 255)[:, y.skip : y.skip + y.out, x.skip : x.skip + x.out]
    return (made.flip(2) if drawn.flip else made).numpy()


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("flip", [False, True])
def test_it_is_what_the_formula_gives(box, flip):
    drawn = drawn_box(*box, flip=flip)
    planes = planes_of(clip_of(3), drawn)
    difference = apply_to_planes(planes, drawn) - slow_planes(planes, drawn)
    assert np.abs(difference).max() < 3  # three planes are rounded twice, and colours once
    assert np.abs(difference).mean() < 0.6


def test_chroma_at_the_odd_end_of_a_frame_keeps_its_place():
    jpegs = clip_of(2, 119, 157)
    drawn = drawn_box(20, 30, 99, 127)
    planes = planes_of(jpegs, drawn)
    assert fits_planes(drawn, 119, 157)
    difference = apply_to_planes(planes, drawn) - slow_planes(planes, drawn)
    assert np.abs(difference).max() < 3


@pytest.mark.parametrize("mode", ["centre", "three_crop"])
@pytest.mark.parametrize("crop", [0, 1, 2])
def test_an_evaluation_crop_keeps_its_phase(mode, crop):
    jpegs, spec = clip_of(3), AugmentSpec(size_px=48, short_side_px=60, mode=mode)
    drawn = draw_augment(spec, 0, height=120, width=160, crop=crop)
    planes = planes_of(jpegs, drawn)
    assert fits_planes(drawn, 120, 160)
    difference = apply_to_planes(planes, drawn) - slow_planes(planes, drawn)
    assert np.abs(difference).max() < 3


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 8, 9])
def test_a_frame_does_not_depend_on_those_beside_it(frames):
    jpegs, drawn = clip_of(frames), drawn_box(10, 22, 80, 90)
    together = apply_to_planes(planes_of(jpegs, drawn), drawn)
    alone = [apply_to_planes(planes_of([jpeg], drawn), drawn)[0] for jpeg in jpegs]
    np.testing.assert_array_equal(together, np.stack(alone))


@pytest.mark.parametrize("flip", [False, True])
def test_it_goes_straight_into_its_place_in_a_batch(flip):
    jpegs, drawn = clip_of(3), drawn_box(10, 22, 80, 90, flip=flip)
    batch = np.full((2, 3, OUT, OUT, 3), 7, np.uint8)
    made = apply_to_planes(planes_of(jpegs, drawn), drawn, batch[1])
    assert np.shares_memory(made, batch)
    assert (batch[0] == 7).all()
    plain = apply_to_planes(planes_of(jpegs, drawn), drawn_box(10, 22, 80, 90))
    np.testing.assert_array_equal(batch[1], plain[:, :, ::-1] if flip else plain)


def test_one_size_after_another_leaves_nothing_behind():
    """Memory is used again."""
    jpegs = clip_of(5)
    draws = [drawn_box(*box, out=out) for box in BOXES for out in (20, 56, 33)]
    first = [apply_to_planes(planes_of(jpegs, drawn), drawn) for drawn in draws]
    for drawn, expected in reversed(list(zip(draws, first, strict=True))):
        np.testing.assert_array_equal(apply_to_planes(planes_of(jpegs, drawn), drawn), expected)


def test_grey_planes_give_grey():
    planes = Planes(*(np.full((2, 20, 20), value, np.uint8) for value in (90, 128, 128)), top=0, left=0)
    planes = planes._replace(blue=planes.blue[:, :10, :10], red=planes.red[:, :10, :10])
    assert (apply_to_planes(planes, drawn_box(0, 0, 20, 20, out=16)) == 90).all()


@pytest.mark.parametrize(
    ("box", "fits"),
    [
        ((0, 0, 20, 20), True),
        ((2, 4, 21, 20), False),
        ((2, 4, 20, 21), False),
        ((1, 0, 20, 20), False),
        ((0, 3, 20, 20), False),
        ((10, 4, 21, 20), True),  # to the end of a frame of 31 rows
        ((0, 0, 31, 41), True),
        ((0, 0, OUT, OUT), False),  # nothing to resize
    ],
)
def test_no_pair_of_pixels_is_cut_apart(box, fits):
    assert fits_planes(drawn_box(*box), 31, 41) is fits


def test_a_dataset_resizes_planes_unless_it_is_told_otherwise():
    refs = [ClipRef(video % 6, video, seed) for seed, video in enumerate(range(12), 1)]
    batches = {
        way: ClipDataset(
            manifest_of([40] * 6), Scenes(), WINDOW, augment=AugmentSpec(size_px=48, resize_in=way)
        ).__getitems__(refs)
        for way in ("planes", "rgb")
    }
    difference = (batches["planes"].frames.int() - batches["rgb"].frames.int()).abs().float()
    assert 0 < float(difference.mean()) < 1
    with pytest.raises(ValueError, match="resize_in is planes or rgb"):
        AugmentSpec(resize_in="yuv")
