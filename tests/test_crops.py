"""Where a clip is cut: bounds, chance and specs, against torchvision's draws and MMAction2's boxes."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from pipeline.errors import PipelineError
from pipeline.online.augment import AugmentSpec, draw_augment, labels_named

RANDOM_MODES = ("random_resized_crop", "multi_scale_crop", "short_side_jitter")

frames_hw = st.tuples(st.integers(1, 400), st.integers(1, 400))


@given(
    mode=st.sampled_from([*RANDOM_MODES, "centre", "three_crop"]),
    frame_hw=frames_hw,
    size=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    seed=st.integers(0, 2**64 - 1),
    scale=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted).map(tuple),
    ratio=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)).map(sorted).map(tuple),
)
@settings(deadline=None)
def test_a_drawn_box_stays_inside_its_frame(mode, frame_hw, size, seed, scale, ratio):
    spec = AugmentSpec(mode=mode, size_px=size, scale=scale, ratio=ratio)
    drawn = draw_augment(spec, seed, height=frame_hw[0], width=frame_hw[1])
    for axis, size_px, out in zip((drawn.y, drawn.x), frame_hw, size, strict=True):
        assert axis.start >= 0
        assert axis.length >= 1
        assert axis.start + axis.length <= size_px
        assert axis.out == out


@given(seed=st.integers(0, 2**64 - 1), flip_p=st.sampled_from([0.0, 0.3, 1.0]), label=st.integers(0, 3))
@settings(deadline=None)
def test_no_option_shifts_the_draws_of_another(seed, flip_p, label):
    spec = AugmentSpec(flip_p=flip_p, no_flip_labels=frozenset({2}))
    plain = draw_augment(AugmentSpec(), seed, height=240, width=320)
    drawn = draw_augment(spec, seed, height=240, width=320, label=label)
    assert drawn.box == plain.box
    if label == 2 or flip_p == 0:
        assert not drawn.flip
    elif flip_p == 1:
        assert drawn.flip


@pytest.mark.parametrize("mode", RANDOM_MODES)
def test_a_draw_takes_equally_many_numbers_from_a_generator_whatever_the_mode(mode):
    rng = np.random.default_rng(5)
    draw_augment(AugmentSpec(mode=mode), rng, height=20, width=300)
    other = np.random.default_rng(5)
    draw_augment(AugmentSpec(), other, height=240, width=320)
    assert rng.random() == other.random()


def test_the_same_seed_draws_the_same_also_as_a_numpy_integer():
    draws = [
        draw_augment(AugmentSpec(), seed, height=240, width=320) for seed in (2**64 - 1, np.uint64(2**64 - 1))
    ]
    assert draws[0] == draws[1]


def test_flips_come_as_often_as_asked():
    spec = AugmentSpec(flip_p=0.25)
    flips = [draw_augment(spec, seed, height=240, width=320).flip for seed in range(2000)]
    assert 0.2 < np.mean(flips) < 0.3


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [
        (240, 320, (0.25, 1.0), (3 / 4, 4 / 3)),
        (240, 320, (0.08, 1.0), (3 / 4, 4 / 3)),
        (320, 180, (0.08, 1.0), (0.5, 2.0)),
        (30, 300, (0.9, 1.0), (3 / 4, 4 / 3)),
    ],
)
def test_random_resized_crops_are_distributed_as_torchvisions(height, width, scale, ratio):
    spec = AugmentSpec(scale=scale, ratio=ratio)
    num = 3000
    ours = np.array([draw_augment(spec, seed, height=height, width=width).box for seed in range(num)])
    image = torch.empty(3, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        theirs = np.array([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(num)])
    ours, theirs = boxes_features(ours), boxes_features(theirs)
    spread = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / num) + 1e-9
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * spread).all()
    for q in (0.1, 0.5, 0.9):
        gap = np.abs(np.quantile(ours, q, axis=0) - np.quantile(theirs, q, axis=0))
        assert (gap <= 0.15 * ours.std(axis=0) + 1e-9).all()


def boxes_features(boxes):
    """Top, left, height, width, area, shape and area squared, which have means that can be compared."""
    top, left, height, width = boxes.T.astype(float)
    return np.stack([top, left, height, width, height * width, width / height, (height * width) ** 2], axis=1)


@pytest.mark.parametrize(("height", "width"), [(30, 300), (300, 30), (1, 7), (40, 41)])
def test_a_crop_that_never_fits_falls_back_to_torchvisions_centre(height, width):
    scale = (1.0, 1.0)
    spec = AugmentSpec(scale=scale, ratio=(1.9, 2.0))
    ours = draw_augment(spec, 1, height=height, width=width).box
    assert ours == RandomResizedCrop.get_params(torch.empty(3, height, width), scale, (1.9, 2.0))


def multi_scale_boxes(height, width, size, scales, gap, num_fixed):
    """Every box that MMAction2's MultiScaleCrop can give, with how often it does in all."""
    base = min(height, width)
    sides = [int(base * scale) for scale in scales]
    boxes = Counter()
    for i, box_height in enumerate(sides):
        for j, box_width in enumerate(sides):
            if abs(i - j) > gap:
                continue
            h, w = (size if abs(side - size) < 3 else side for side in (box_height, box_width))
            step_y, step_x = (height - h) // 4, (width - w) // 4
            places = [(0, 0), (0, 4), (4, 0), (4, 4), (2, 2)]
            if num_fixed == 13:
                places += [(2, 0), (2, 4), (4, 2), (0, 2), (1, 1), (1, 3), (3, 1), (3, 3)]
            boxes.update((y * step_y, x * step_x, h, w) for y, x in places)
    return boxes


@pytest.mark.parametrize("num_fixed", [5, 13])
@pytest.mark.parametrize(("height", "width", "size"), [(256, 340, 224), (240, 320, 112), (170, 128, 112)])
def test_multi_scale_crops_are_those_of_its_paper_each_as_often_as_the_others(num_fixed, height, width, size):
    spec = AugmentSpec(mode="multi_scale_crop", size_px=size, num_fixed_crops=num_fixed)
    expected = multi_scale_boxes(height, width, size, spec.scales, 1, num_fixed)
    num = 4000
    drawn = Counter(draw_augment(spec, seed, height=height, width=width).box for seed in range(num))
    assert set(drawn) == set(expected)
    per_box = num / expected.total()
    for box, times in expected.items():
        mean = per_box * times
        assert abs(drawn[box] - mean) < 5 * np.sqrt(mean)


def test_short_side_jitter_crops_as_from_a_resized_frame():
    spec = AugmentSpec(mode="short_side_jitter", jitter_px=(128, 160))
    boxes = np.array([draw_augment(spec, seed, height=240, width=320).box for seed in range(500)])
    assert (boxes[:, 2] == boxes[:, 3]).all()
    assert boxes[:, 2].min() == 112 * 240 / 160
    assert boxes[:, 2].max() == 112 * 240 / 128
    assert boxes[:, 0].min() == 0
    assert (boxes[:, 1] + boxes[:, 3]).max() == 320


def test_a_spec_pickles_and_hashes():
    spec = AugmentSpec(size_px=(112, 200), no_flip_labels={3, 1})
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    assert spec.size_hw == (112, 200)
    drawn = draw_augment(spec, 1, height=240, width=320, label=0)
    assert pickle.loads(pickle.dumps(drawn)) == drawn


@pytest.mark.parametrize(
    "options",
    [
        {"size_px": 0},
        {"size_px": (112, 112, 3)},
        {"mode": "random"},
        {"scale": (0.0, 1.0)},
        {"scale": (0.5, 0.4)},
        {"scale": (0.5, 1.1)},
        {"ratio": (2.0, 1.0)},
        {"scales": ()},
        {"scales": (1.2,)},
        {"max_scale_gap": -1},
        {"num_fixed_crops": 9},
        {"jitter_px": (160, 128)},
        {"short_side_px": 0},
        {"flip_p": 1.5},
    ],
)
def test_a_mistaken_option_is_named(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must"):
        AugmentSpec(**options)


def test_a_draw_that_cannot_be_meant_is_refused():
    spec = AugmentSpec()
    with pytest.raises(ValueError, match="height and width >= 1"):
        draw_augment(spec, 0, height=0, width=10)
    with pytest.raises(ValueError, match="crop must be"):
        draw_augment(spec, 0, height=10, width=10, crop=3)
    with pytest.raises(ValueError, match="use mode 'three_crop'"):
        draw_augment(spec, 0, height=10, width=10, crop=0)
    with pytest.raises(ValueError, match="pass label="):
        draw_augment(AugmentSpec(no_flip_labels=frozenset({1})), 0, height=10, width=10)


def test_a_class_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(PipelineError, match="'MoveLft' among the 2 of this dataset; did you mean MoveLeft"):
        labels_named({"MoveLft"}, ["MoveLeft", "Jump"])


def test_the_short_side_defaults_to_256_for_224():
    assert AugmentSpec(mode="centre", size_px=224).short_side == 256
    assert AugmentSpec(mode="centre").short_side == 128
    assert AugmentSpec(mode="three_crop").short_side == 112
    assert AugmentSpec(mode="short_side_jitter").jitter == (128, 160)


@pytest.mark.parametrize("mode", ["random_resized_crop", "short_side_jitter"])
@pytest.mark.parametrize("frame_hw", [(240, 320), (239, 321), (97, 64), (21, 32)])
def test_what_is_drawn_leaves_no_pair_of_pixels_apart(mode, frame_hw):
    """They share their chroma."""
    height, width = frame_hw
    starts = set()
    for seed in range(300):
        drawn = draw_augment(AugmentSpec(mode=mode), seed, height=height, width=width)
        for axis, size in ((drawn.y, height), (drawn.x, width)):
            assert axis.start % 2 == 0
            assert axis.length % 2 == 0 or axis.start + axis.length == size
        starts.add(drawn.x.start + drawn.x.length)
    assert width - width % 2 in starts or width in starts  # the last column is reached, too
