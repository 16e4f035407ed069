"""Cut, resize and mirror a clip: against torchvision, on real pictures and on made ones."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from pipeline.errors import PipelineError
from pipeline.online.augment import (
    AugmentSpec,
    DrawnAugment,
    apply_augment,
    apply_to_frame,
    apply_user_transform,
    draw_augment,
)
from pipeline.online.crops import Axis

SHARED = Path(__file__).parents[2] / "shared" / "data" / "videos"
REAL = (
    "ucf101/Punch/v_Punch_g01_c03.avi",
    "ucf101/Biking/v_Biking_g05_c02.avi",
    "ucf101/YoYo/v_YoYo_g11_c04.avi",
)
RANDOM_MODES = ("random_resized_crop", "multi_scale_crop", "short_side_jitter")
LEVELS = 2.0


def picture(height, width, seed=0):
    """A picture as photographs are: blobs of all sizes, the smaller the fainter, and a hard edge."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for cells in (2, 4, 8, 16, 32, 64):
        noise = rng.standard_normal((cells, cells, 3)).astype(np.float32)
        total += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC) / cells**0.7
    total[:, width // 2 :] += 0.5
    return np.clip(128 + 50 * total, 0, 255).astype(np.uint8)


def frame_of(path):
    with av.open(str(path), metadata_errors="ignore") as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


@pytest.fixture(scope="module")
def pictures():
    """Pictures of 240 x 320: a made one, and first frames of real videos where they are at hand."""
    return [picture(240, 320), *(frame_of(SHARED / name) for name in REAL if (SHARED / name).exists())]


def to_torch(frame):
    return torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)


def to_numpy(tensor):
    return tensor.permute(1, 2, 0).numpy()


def drawn_box(top, left, height, width, out_hw=(112, 112), *, flip=False, antialias=True):
    y = Axis(top, height, 0, out_hw[0], height / out_hw[0])
    x = Axis(left, width, 0, out_hw[1], width / out_hw[1])
    return DrawnAugment(y, x, flip, antialias)


def difference(a, b):
    assert a.shape == b.shape
    return np.abs(a.astype(int) - b.astype(int)).mean()


# Resizing.

BOXES = [
    *((3, 5, side, side) for side in (1, 20, 56, 80, 100, 111, 112, 113, 120, 134, 151, 168, 190, 224, 237)),
    *((0, 0, 240, 320), (10, 20, 60, 300), (0, 40, 240, 80), (7, 9, 112, 224), (1, 2, 113, 112)),
]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("antialias", [True, False])
def test_resizing_agrees_with_torchvision_on_the_same_box(pictures, box, antialias):
    for frame in pictures:
        ours = apply_to_frame(frame, drawn_box(*box, antialias=antialias))
        theirs = tv.resized_crop(to_torch(frame), *box, [112, 112], antialias=antialias)
        assert difference(ours, to_numpy(theirs)) < 0.5 < LEVELS


@pytest.mark.parametrize("side", [60, 113, 130, 200, 224, 239])
def test_even_white_noise_agrees_with_torchvision(side):
    frame = np.random.default_rng(side).integers(0, 256, (240, 320, 3)).astype(np.uint8)
    ours = apply_to_frame(frame, drawn_box(1, 2, side, side))
    theirs = tv.resized_crop(to_torch(frame), 1, 2, side, side, [112, 112], antialias=True)
    assert difference(ours, to_numpy(theirs)) < 0.5 < LEVELS


@given(
    size=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    out_hw=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    antialias=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_any_size_to_any_size_agrees_with_torchvision(size, out_hw, antialias):
    frame = picture(*size)
    ours = apply_to_frame(frame, drawn_box(0, 0, *size, out_hw, antialias=antialias))
    theirs = to_numpy(tv.resize(to_torch(frame), list(out_hw), antialias=antialias))
    assert difference(ours, theirs) < LEVELS


def test_a_box_of_the_output_size_is_copied_unchanged(pictures):
    frame = pictures[0]
    out = apply_to_frame(frame, drawn_box(5, 7, 112, 112))
    np.testing.assert_array_equal(out, frame[5:117, 7:119])


@pytest.mark.parametrize("box", [(5, 7, 112, 112), (5, 7, 50, 60), (5, 7, 200, 210)])
def test_a_flip_mirrors_left_to_right_and_nothing_else(pictures, box):
    plain = apply_to_frame(pictures[0], drawn_box(*box))
    flipped = apply_to_frame(pictures[0], drawn_box(*box, flip=True))
    np.testing.assert_array_equal(flipped, plain[:, ::-1])


@pytest.mark.parametrize("side", [60, 112, 200])
@pytest.mark.parametrize("flip", [False, True])
def test_a_frame_goes_straight_into_its_place_in_a_batch(pictures, side, flip):
    batch = np.full((2, 3, 112, 112, 3), 77, np.uint8)
    drawn = drawn_box(3, 4, side, side, flip=flip)
    out = apply_to_frame(pictures[0], drawn, batch[1, 1])
    assert out.ctypes.data == batch[1, 1].ctypes.data
    np.testing.assert_array_equal(batch[1, 1], apply_to_frame(pictures[0], drawn))
    assert (np.delete(batch.reshape(6, -1), 4, axis=0) == 77).all()


def test_opencv_writes_into_the_place_it_is_given():
    place = np.zeros((2, 112, 112, 3), np.uint8)[1]
    written = cv2.resize(picture(240, 320)[3:63, 4:80], (112, 112), dst=place)
    assert written.ctypes.data == place.ctypes.data


def test_read_only_and_mirrored_frames_are_taken_too(pictures):
    frame = pictures[0]
    locked = frame.copy()
    locked.setflags(write=False)
    for drawn in (drawn_box(3, 4, 200, 200), drawn_box(3, 4, 60, 60, flip=True)):
        expected = apply_to_frame(frame, drawn)
        np.testing.assert_array_equal(apply_to_frame(locked, drawn), expected)
        mirrored = np.ascontiguousarray(frame[:, ::-1])[:, ::-1]
        np.testing.assert_array_equal(apply_to_frame(mirrored, drawn), expected)


@pytest.mark.parametrize("mode", [*RANDOM_MODES, "centre", "three_crop"])
def test_a_part_of_the_frame_that_holds_the_box_is_enough(pictures, mode):
    frame = pictures[0]
    for seed in range(10):
        drawn = draw_augment(AugmentSpec(mode=mode), seed, height=240, width=320)
        top, left, height, width = drawn.box
        above, before = top // 16 * 16, left // 16 * 16
        part = np.ascontiguousarray(frame[above : top + height, before : left + width])
        np.testing.assert_array_equal(
            apply_to_frame(part, drawn.shifted(above, before)), apply_to_frame(frame, drawn)
        )


@pytest.mark.parametrize(
    "box", [(-1, 0, 100, 100), (0, -1, 100, 100), (141, 0, 100, 100), (0, 221, 100, 100)]
)
def test_a_box_that_leaves_the_frame_is_refused(pictures, box):
    with pytest.raises(ValueError, match="leaves frames of shape"):
        apply_to_frame(pictures[0], drawn_box(*box))


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((112, 111, 3), np.uint8),
        np.zeros((112, 112, 3), np.float32),
        np.zeros((3, 112, 112), np.uint8).transpose(1, 2, 0),
    ],
)
def test_a_place_that_does_not_fit_is_refused(pictures, out):
    with pytest.raises(ValueError, match="out must be contiguous uint8"):
        apply_to_frame(pictures[0], drawn_box(0, 0, 100, 100), out)


# Evaluation.


def resize_and_crop(frame, spec, which="centre"):
    resized = tv.resize(to_torch(frame), [spec.short_side], antialias=True)
    height, width = resized.shape[-2:]
    if which == "centre":
        return to_numpy(tv.center_crop(resized, list(spec.size_hw)))
    out_height, out_width = spec.size_hw
    along_y = frame.shape[0] > frame.shape[1]  # of the frame: resized, 21x20 may be as high as wide
    top = {0: 0, 1: round((height - out_height) / 2), 2: height - out_height}[which if along_y else 1]
    left = {0: 0, 1: round((width - out_width) / 2), 2: width - out_width}[1 if along_y else which]
    return to_numpy(resized)[top : top + out_height, left : left + out_width]


@pytest.mark.parametrize("short", [112, 128, 146, 239, 240, 256, 300])
@pytest.mark.parametrize("cut", [0, 3, 40])
def test_the_centre_is_that_of_torchvisions_resize_and_centre_crop(pictures, short, cut):
    spec = AugmentSpec(mode="centre", short_side_px=short)
    for whole in pictures:
        for frame in (whole[: 240 - cut, : 320 - 2 * cut], whole.transpose(1, 0, 2)[: 320 - cut]):
            drawn = draw_augment(spec, 0, height=frame.shape[0], width=frame.shape[1])
            assert difference(apply_to_frame(frame, drawn), resize_and_crop(frame, spec)) < 0.5 < LEVELS


@given(
    height=st.integers(20, 130),
    width=st.integers(20, 130),
    size=st.integers(1, 100),
    more=st.integers(0, 60),
    crop=st.integers(0, 2),
)
@settings(max_examples=80, deadline=None)
def test_every_evaluation_crop_is_that_of_resizing_the_whole(height, width, size, more, crop):
    spec = AugmentSpec(mode="three_crop", size_px=size, short_side_px=size + more)
    frame = picture(height, width)
    drawn = draw_augment(spec, 0, height=height, width=width, crop=crop)
    top, left, box_height, box_width = drawn.box
    assert top >= 0
    assert left >= 0
    assert top + box_height <= height
    assert left + box_width <= width
    assert difference(apply_to_frame(frame, drawn), resize_and_crop(frame, spec, crop)) < LEVELS


def test_a_stored_frame_at_the_asked_short_side_is_cut_and_not_resized():
    frame = picture(128, 171)
    drawn = draw_augment(AugmentSpec(mode="centre"), 0, height=128, width=171)
    assert drawn.box == (8, 30, 112, 112)  # round(29.5) is 30, as torchvision has it
    np.testing.assert_array_equal(apply_to_frame(frame, drawn), frame[8:120, 30:142])


@pytest.mark.parametrize(
    ("height", "width", "boxes"),
    [
        (112, 200, [(0, 0), (0, 44), (0, 88)]),
        (200, 112, [(0, 0), (44, 0), (88, 0)]),
        (112, 112, [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_three_crops_lie_along_the_longer_side(height, width, boxes):
    spec = AugmentSpec(mode="three_crop")
    drawn = [draw_augment(spec, 0, height=height, width=width, crop=crop) for crop in (0, 1, 2)]
    assert [one.box for one in drawn] == [(*box, 112, 112) for box in boxes]
    assert draw_augment(spec, 0, height=height, width=width) == drawn[1]


def test_three_crops_of_a_square_frame_go_from_left_to_right_where_there_is_room():
    spec = AugmentSpec(mode="three_crop", size_px=100, short_side_px=120)
    lefts = [draw_augment(spec, 0, height=120, width=120, crop=crop).box[:2] for crop in (0, 1, 2)]
    assert lefts == [(10, 0), (10, 10), (10, 20)]


def test_evaluation_decodes_little_more_than_its_crop():
    _, _, height, width = draw_augment(AugmentSpec(mode="centre"), 0, height=240, width=320).box
    assert height * width < 0.73 * 240 * 320  # the crop alone is 0.58 of the frame


@pytest.mark.parametrize("mode", ["centre", "three_crop"])
def test_evaluation_leaves_nothing_to_chance(mode):
    spec = AugmentSpec(mode=mode, flip_p=1.0)
    drawn = {draw_augment(spec, seed, height=240, width=320) for seed in range(20)}
    assert len(drawn) == 1
    assert not drawn.pop().flip


# Whole clips.


@pytest.mark.parametrize("mode", RANDOM_MODES)
def test_equal_frames_stay_equal_and_clips_and_epochs_differ(mode):
    spec = AugmentSpec(mode=mode)
    frames = np.stack([picture(240, 320)] * 16)
    clips = []
    for seed in (2**63 + 1, 2**63 + 2, 17):
        drawn = draw_augment(spec, seed, height=240, width=320)
        clip = apply_augment(frames, drawn)
        assert clip.shape == (16, 112, 112, 3)
        assert clip.dtype == np.uint8
        assert (clip == clip[0]).all()
        clips.append(clip)
    for one, other in pairwise(clips):
        assert (one != other).any()
    assert len({draw_augment(spec, seed, height=240, width=320) for seed in range(50)}) > 30


@pytest.mark.parametrize("mode", [*RANDOM_MODES, "centre", "three_crop"])
@pytest.mark.parametrize("frame_hw", [(1, 1), (8, 8), (1, 300), (300, 2)])
def test_tiny_frames_are_enlarged(mode, frame_hw):
    frame = np.full((*frame_hw, 3), 90, np.uint8)
    drawn = draw_augment(AugmentSpec(mode=mode), 3, height=frame_hw[0], width=frame_hw[1])
    assert (apply_to_frame(frame, drawn) == 90).all()


# A user's own transform.


def jitter_and_crop():
    return v2.Compose([v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomCrop(24), v2.RandomHorizontalFlip()])


def global_states():
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


def test_a_users_transform_treats_all_frames_alike_by_the_clips_seed():
    frames = np.stack([picture(32, 40)] * 4)
    once, again = (apply_user_transform(jitter_and_crop(), frames, seed=2**64 - 1) for _ in range(2))
    other = apply_user_transform(jitter_and_crop(), frames, seed=6)
    assert once.shape == (4, 24, 24, 3)
    assert once.dtype == np.uint8
    assert once.flags.c_contiguous
    assert (once == once[0]).all()
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()


def test_a_users_transform_leaves_the_global_generators_alone():
    def noisy(video):
        random.random()
        np.random.random()
        torch.rand(1)
        return video

    def broken(video):
        noisy(video)
        raise RuntimeError("broken")

    before = global_states()
    apply_user_transform(noisy, np.zeros((2, 8, 8, 3), np.uint8), seed=3)
    assert global_states() == before
    with pytest.raises(RuntimeError, match="broken"):
        apply_user_transform(broken, np.zeros((2, 8, 8, 3), np.uint8), seed=3)
    assert global_states() == before


def test_a_users_transform_may_draw_from_any_global_generator():
    drawn = []

    def drawing(video):
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
        return video

    for seed in (3, 4, 3):
        apply_user_transform(drawing, np.zeros((1, 4, 4, 3), np.uint8), seed=seed)
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_threads_do_not_mix_the_draws_of_users_transforms():
    frames = np.stack([picture(32, 40)] * 2)
    alone = [apply_user_transform(jitter_and_crop(), frames, seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda seed: apply_user_transform(jitter_and_crop(), frames, seed), range(12))
        )
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_users_transform_sees_a_video_and_may_not_harm_read_only_frames():
    frames = np.zeros((2, 8, 6, 3), np.uint8)
    frames.setflags(write=False)
    shapes = []

    def filling(video):
        shapes.append((type(video).__name__, tuple(video.shape)))
        return video.fill_(9)

    assert (apply_user_transform(filling, frames, seed=1) == 9).all()
    assert shapes == [("Video", (2, 3, 8, 6))]
    assert (frames == 0).all()


@pytest.mark.parametrize(
    ("transform", "found"),
    [
        (v2.ToDtype(torch.float32, scale=True), r"ToDtype returned torch.float32 \(2, 3, 8, 8\)"),
        (lambda video: video[:, :1], r"<lambda> returned torch.uint8 \(2, 1, 8, 8\)"),
        (lambda video: video[:1], r"<lambda> returned torch.uint8 \(1, 3, 8, 8\)"),
        (lambda video: None, "returned NoneType"),
    ],
)
def test_a_users_transform_that_returns_no_such_clip_is_named(transform, found):
    with pytest.raises(PipelineError, match=found):
        apply_user_transform(transform, np.zeros((2, 8, 8, 3), np.uint8), seed=0)
