"""Augmentation on the device: a clip's draws are its own, its frames are treated alike, off is off."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from pipeline.errors import PipelineError
from pipeline.online.collate import ClipBatch
from pipeline.online.device import Normalize, prefetch
from pipeline.online.device_augment import DeviceAugment, DeviceAugmentSpec
from pipeline.seeds import generator

LEVELS = Normalize(mean=(0.0,) * 3, std=(1 / 255,) * 3)
"""Leaves the numbers 0 to 255 as they are."""

JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
BY_CLIP = {
    "randaugment": {"randaugment_ops": 2},
    "brightness": {"brightness": 0.4},
    "jitter": JITTER,
    "erase": {"erase_p": 1.0},
    "noise": {"erase_p": 1.0, "erase_value": "random"},
    "all": {"randaugment_ops": 2, **JITTER, "erase_p": 0.5, "erase_value": "random"},
}
MIXES = {"mixup": {"mixup_alpha": 0.8}, "cutmix": {"cutmix_alpha": 1.0}}


@pytest.fixture
def gpu():
    """A CUDA device; a run that is meant to have one does not pass without it."""
    if not torch.cuda.is_available():
        missing = "needs a CUDA device"
        pytest.fail(missing) if os.environ.get("REQUIRE_GPU") == "1" else pytest.skip(missing)
    return torch.device("cuda", torch.cuda.current_device())


def make_batch(clips=4, frames=3, height=20, width=24, *, pixels=None, seeds=None):
    """Unrelated clips; or all of them with these pixels. Labels are 0, 1, 2 ..."""
    random = torch.Generator().manual_seed(clips)
    shape = (clips, frames, height, width, 3)
    if pixels is None:
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    seeds = [int(seed) for seed in generator(clips).integers(2**63, size=clips)] if seeds is None else seeds
    return ClipBatch(
        frames=torch.as_tensor(pixels, dtype=torch.uint8).expand(shape).clone(),
        labels=torch.arange(clips),
        videos=torch.arange(clips),
        starts=torch.zeros(clips, dtype=torch.int64),
        times_s=torch.zeros(clips, frames, dtype=torch.float64),
        extras={"seed": torch.tensor(seeds)},
    )


def rows_of(batch, rows):
    extras = {name: value[rows] for name, value in batch.extras.items()}
    return ClipBatch(*(part[rows] for part in batch[:5]), extras)


def augmented(batch, *, normalize=LEVELS, **options):
    options = {"num_classes": len(batch.labels), **options}
    return DeviceAugment(DeviceAugmentSpec(**options), normalize=normalize)(batch)


def copied(batch):
    return ClipBatch(*(part.clone() for part in batch[:5]), {k: v.clone() for k, v in batch.extras.items()})


# What holds for all of it.


def test_off_is_the_normalised_batch_itself():
    batch = make_batch()
    out = DeviceAugment(DeviceAugmentSpec())(batch)
    assert torch.equal(out.frames, Normalize()(batch).frames)
    assert out.labels is batch.labels
    assert out.extras is batch.extras
    normal = Normalize()(batch)
    assert DeviceAugment(DeviceAugmentSpec())(normal).frames is normal.frames


def test_off_needs_no_seeds():
    batch = make_batch()._replace(extras={})
    assert torch.equal(DeviceAugment(DeviceAugmentSpec())(batch).frames, Normalize()(batch).frames)


@pytest.fixture(scope="module")
def six():
    """Six clips, and what becomes of them in one batch."""
    batch = make_batch(clips=6, frames=2, height=8, width=8)
    return batch, augmented(batch, **BY_CLIP["all"]).frames


@settings(deadline=None, max_examples=10)
@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_clip_comes_out_the_same_in_any_batch(six, rows):
    batch, together = six
    assert torch.equal(augmented(rows_of(batch, rows), **BY_CLIP["all"]).frames, together[rows])


@pytest.mark.parametrize("kind", BY_CLIP)
def test_equal_frames_of_a_clip_stay_equal_and_equal_clips_come_to_differ(kind):
    clips, frames = 10, 4
    pixels = make_batch(clips=1, frames=1).frames
    out = augmented(make_batch(clips=clips, frames=frames, pixels=pixels), **BY_CLIP[kind]).frames
    assert all(torch.equal(out[:, :, 0], out[:, :, frame]) for frame in range(1, frames))
    differ = sum(not torch.equal(one, other) for one, other in pairwise(out))
    assert differ >= clips - 3  # two RandAugments may be the same


@pytest.mark.parametrize("kind", BY_CLIP)
def test_other_seeds_give_other_clips(kind):
    batch = make_batch(clips=8)
    other = batch._replace(extras={"seed": batch.extras["seed"] + 1})
    one, two = (augmented(b, **BY_CLIP[kind]).frames for b in (batch, other))
    assert sum(torch.equal(a, b) for a, b in zip(one, two, strict=True)) <= 2


@pytest.mark.parametrize("options", [*BY_CLIP.values(), *MIXES.values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_come_out_channels_last_and_the_batch_given_stays_as_it_is(options, dtype):
    batch = make_batch()
    before = copied(batch)
    out = augmented(batch, normalize=Normalize(dtype=dtype), **options)
    assert (out.frames.dtype, tuple(out.frames.shape)) == (dtype, (4, 3, 3, 20, 24))
    assert out.frames.permute(0, 2, 3, 4, 1).is_contiguous()
    assert out.extras is batch.extras
    assert out.times_s is batch.times_s
    for part, was in zip(batch[:5], before[:5], strict=True):
        assert torch.equal(part, was)


@pytest.mark.parametrize("options", [BY_CLIP["erase"], *MIXES.values()])
def test_frames_that_are_normalised_already_are_erased_and_mixed_alike(options):
    batch = make_batch()
    normal = Normalize()(batch)
    before = normal.frames.clone()
    out = augmented(normal, **options)
    assert torch.equal(out.frames, augmented(batch, normalize=Normalize(), **options).frames)
    assert out.frames.permute(0, 2, 3, 4, 1).is_contiguous()
    assert torch.equal(normal.frames, before)


@pytest.mark.parametrize("options", [JITTER, BY_CLIP["randaugment"]])
def test_colours_of_normalised_frames_are_refused(options):
    with pytest.raises(ValueError, match="need uint8 frames"):
        augmented(Normalize()(make_batch()), **options)


def test_one_option_does_not_shift_the_draws_of_another():
    batch = make_batch()
    jittered = augmented(batch, **JITTER).frames
    both = augmented(batch, **JITTER, erase_p=1.0, erase_value=-9.0).frames
    outside = both != -9
    assert 0 < outside.float().mean() < 1
    assert torch.equal(both[outside], jittered[outside])


def test_global_generators_are_left_alone_and_do_not_matter():
    batch, options = make_batch(), {**BY_CLIP["all"], "mixup_alpha": 0.5}
    torch.manual_seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = augmented(batch, **options).frames
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    torch.manual_seed(6)
    assert torch.equal(augmented(batch, **options).frames, first)


def test_seeds_are_64_bits_whatever_their_sign():
    seeds = [-1, -(2**63), 2**63 - 1, 0]
    augmented(make_batch(seeds=seeds), **BY_CLIP["all"])
    jittered = augmented(make_batch(clips=1, seeds=[-1]), **JITTER).frames
    clip = make_batch(clips=1).frames[0].permute(0, 3, 1, 2).contiguous()
    assert torch.equal(
        jittered[0].transpose(0, 1), by_torchvision(v2.ColorJitter(**JITTER), clip, 2**64 - 1, 4)
    )


def test_a_batch_without_seeds_is_refused_with_what_it_has():
    batch = make_batch()._replace(extras={"inertial": torch.zeros(4)})
    with pytest.raises(PipelineError, match=r"\['inertial'\] and no 'seed'"):
        augmented(batch, **JITTER)


def test_it_prepares_the_batches_of_prefetch():
    prepare = DeviceAugment(DeviceAugmentSpec(**BY_CLIP["all"], mixup_alpha=0.8, num_classes=4))
    batches = [make_batch(seeds=[k, 1, 2, 3]) for k in range(3)]
    for batch, out in zip(batches, prefetch(batches, "cpu", prepare=prepare), strict=True):
        assert torch.equal(out.frames, prepare(batch).frames)
        assert tuple(out.labels.shape) == (4, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"randaugment_ops": -1},
        {"randaugment_magnitude": 31},
        {"brightness": -0.1},
        {"hue": 0.6},
        {"erase_p": 1.5},
        {"erase_scale": (0.5, 0.1)},
        {"erase_ratio": (0.0, 1.0)},
        {"mixup_alpha": -1.0, "num_classes": 3},
        {"mixup_alpha": 1.0},
        {"cutmix_alpha": 1.0, "num_classes": 1},
        {"mix_p": 2.0},
    ],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=r"must|needs?"):
        DeviceAugmentSpec(**options)


# Colours: against torchvision, on a contiguous clip, with the draws of the clip's own stream.


def by_torchvision(transform, clip, seed, stream):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, stream).integers(2**63)))
        return transform(clip).float()


@pytest.mark.parametrize(
    ("options", "transform", "stream"),
    [
        ({"randaugment_ops": 2}, v2.RandAugment(2, 9), 3),
        ({"randaugment_ops": 3, "randaugment_magnitude": 20}, v2.RandAugment(3, 20), 3),
        (JITTER, v2.ColorJitter(**JITTER), 4),
        ({"hue": 0.5}, v2.ColorJitter(hue=0.5), 4),
        ({"erase_p": 1.0}, None, 5),
    ],
)
def test_clips_agree_with_torchvision_on_each(options, transform, stream):
    batch = make_batch(clips=12)
    out = augmented(batch, **options).frames
    transform = transform or v2.RandomErasing(p=0.0)
    same = 0
    for clip, seed, mine in zip(batch.frames, batch.extras["seed"].tolist(), out, strict=True):
        theirs = by_torchvision(transform, clip.permute(0, 3, 1, 2).contiguous(), seed, stream)
        same += torch.equal(mine.transpose(0, 1), theirs)
    assert same == (12 if stream != 5 else 0)


def test_brightness_is_one_factor_for_a_clip_uniform_between_its_bounds():
    batch = make_batch(clips=400, frames=2, height=2, width=2, pixels=torch.tensor(100))
    out = augmented(batch, brightness=0.4).frames
    factors = out[:, 0, 0, 0, 0]
    assert torch.equal(out, factors[:, None, None, None, None].expand_as(out))
    assert factors.min() >= 60
    assert factors.max() <= 140
    counts = torch.histc(factors, 4, 60, 140)
    assert (counts - 100).abs().max() < 40  # 4.6 standard deviations


def test_hue_alone_leaves_greys_and_turns_red():
    grey = augmented(make_batch(pixels=torch.tensor(128)), hue=0.5).frames
    assert (grey == 128).all()
    red = augmented(make_batch(clips=20, pixels=torch.tensor([255, 0, 0])), hue=0.5).frames
    assert (red.amax(1) == 255).all()  # as light and as vivid as before
    assert (red.amin(1) == 0).all()
    assert len({tuple(pixel.tolist()) for pixel in red[:, :, 0, 0, 0]}) > 17


# Erasing.


def erased_boxes(**options):
    """Top, left, height and width (px) for each clip of white frames, None where nothing was erased."""
    batch = make_batch(clips=120, frames=2, height=40, width=50, pixels=torch.tensor(255))
    out = augmented(batch, erase_value=-1.0, **options).frames
    boxes = []
    for clip in out:
        gone = clip == -1
        assert torch.equal(gone, gone[:1, :1].expand_as(gone))
        rows, columns = gone[0, 0].any(1).nonzero().flatten(), gone[0, 0].any(0).nonzero().flatten()
        if len(rows) == 0:
            boxes.append(None)
            continue
        box = (int(rows[0]), int(columns[0]), len(rows), len(columns))
        assert gone[0, 0].sum() == box[2] * box[3]
        assert (clip[~gone] == 255).all()
        boxes.append(box)
    return boxes


def test_each_clip_loses_one_box_of_the_size_and_shape_asked_for():
    boxes = erased_boxes(erase_p=1.0, erase_scale=(0.1, 0.2), erase_ratio=(0.5, 2.0))
    assert None not in boxes
    assert len(set(boxes)) > 110
    for _, _, height, width in boxes:
        assert 0.08 <= height * width / (40 * 50) <= 0.22  # sides are whole pixels
        assert 0.45 <= height / width <= 2.2
    assert len({box[0] < 20 for box in boxes}) == len({box[1] < 25 for box in boxes}) == 2


def test_as_many_clips_are_erased_as_were_asked_for():
    erased = 120 - erased_boxes(erase_p=0.3).count(None)
    assert abs(erased - 36) < 20  # 4 standard deviations


def test_zero_is_the_mean_colour_and_noise_is_still_in_time():
    batch = make_batch(clips=8, frames=4, height=40, width=40, pixels=torch.tensor(255))
    plain = Normalize()(batch).frames
    zero = augmented(batch, normalize=Normalize(), erase_p=1.0).frames
    assert set(zero[zero != plain].tolist()) == {0.0}
    noise = augmented(batch, normalize=Normalize(), erase_p=1.0, erase_value="random").frames
    assert torch.equal(noise, noise[:, :, :1].expand_as(noise))
    drawn = noise[:, :, 0][(noise != plain)[:, :, 0]]
    assert abs(drawn.mean()) < 0.2
    assert abs(drawn.std() - 1) < 0.2


# MixUp and CutMix. Labels are all different, so targets say who was mixed with whom, and by how much.


def mixed_pairs(targets):
    """For each clip its partner and its own share, out of targets (B, num_classes)."""
    torch.testing.assert_close(targets.sum(1), torch.ones(len(targets)))
    shares = targets.diagonal()
    others = targets.clone().fill_diagonal_(0)
    assert ((others > 0).sum(1) <= 1).all()
    return others.argmax(1).tolist(), shares.tolist()


def test_mixup_mixes_clips_as_their_targets_say():
    for offset in range(10):
        batch = make_batch(clips=5, seeds=[offset, 1, 2, 3, 4])
        out = augmented(batch, normalize=Normalize(), mixup_alpha=0.8, num_classes=9)
        assert (out.labels.dtype, tuple(out.labels.shape)) == (torch.float32, (5, 9))
        partners, shares = mixed_pairs(out.labels)
        assert len(set(shares)) == 1
        assert sorted(partners) == [0, 1, 2, 3, 4]
        assert all(clip != partner for clip, partner in enumerate(partners))
        plain = Normalize()(batch).frames
        for clip, (partner, share) in enumerate(zip(partners, shares, strict=True)):
            expected = share * plain[clip] + (1 - share) * plain[partner]
            torch.testing.assert_close(out.frames[clip], expected, rtol=0, atol=1e-5)


def test_cutmix_takes_a_box_of_the_area_that_its_targets_say():
    taken = 0
    for offset in range(10):
        batch = make_batch(clips=5, seeds=[offset, 1, 2, 3, 4])
        batch = batch._replace(
            frames=batch.labels.to(torch.uint8).view(5, 1, 1, 1, 1).expand(5, 3, 20, 24, 3)
        )
        out = augmented(batch, cutmix_alpha=1.0)
        partners, shares = mixed_pairs(out.labels)
        for clip, (partner, share) in enumerate(zip(partners, shares, strict=True)):
            foreign = out.frames[clip] != clip
            box = foreign[0, 0]
            assert torch.equal(foreign, box.expand_as(foreign))
            assert (out.frames[clip][foreign] == partner).all()
            assert box.sum() == box.any(0).sum() * box.any(1).sum()
            assert 1 - box.float().mean().item() == pytest.approx(share, abs=1e-6)
            taken += int(box.any())
    assert taken > 40


@pytest.mark.parametrize(
    ("options", "transform"),
    [(MIXES["mixup"], v2.MixUp(alpha=0.8, num_classes=2)), (MIXES["cutmix"], v2.CutMix(num_classes=2))],
)
def test_two_clips_are_mixed_as_torchvision_mixes_them(options, transform):
    for seed in range(8):
        batch = make_batch(clips=2, seeds=[seed, 7])
        out = augmented(batch, **options)
        rng = generator(seed, 7, 7)
        rng.random(), rng.integers(1), rng.integers(1, 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**63)))
            video = LEVELS(batch).frames.flatten(1, 2)  # (B, C * T, H, W), as torchvision wants pictures
            frames, labels = transform(video, batch.labels)
        torch.testing.assert_close(out.frames.flatten(1, 2), frames, rtol=0, atol=1e-4)
        torch.testing.assert_close(out.labels, labels, rtol=0, atol=1e-6)


def shares_and_steps(count, **options):
    shares, steps = [], set()
    for number in range(count):
        out = augmented(make_batch(clips=4, frames=1, height=4, width=4, seeds=[number, 1, 2, 3]), **options)
        partners, own = mixed_pairs(out.labels)
        shares.append(own[0])
        steps.add(partners[0] if own[0] < 1 else 0)
    return np.array(shares), steps


def test_shares_have_the_beta_distribution_and_partners_vary():
    shares, steps = shares_and_steps(300, mixup_alpha=0.5)
    # Beta(1/2, 1/2): mean 1/2, variance 1/8, a third below 1/4.
    assert abs(shares.mean() - 0.5) < 0.08
    assert abs(shares.var() - 0.125) < 0.03
    assert abs((shares < 0.25).mean() - 1 / 3) < 0.11
    assert steps >= {1, 2, 3}


def test_as_many_batches_are_mixed_as_were_asked_for_and_both_kinds_share_them():
    shares, _ = shares_and_steps(200, mixup_alpha=1.0, mix_p=0.4)
    assert abs((shares < 1).mean() - 0.4) < 0.14
    both, _ = shares_and_steps(200, mixup_alpha=1.0, cutmix_alpha=1.0)
    sixteenths = (both * 16 == np.round(both * 16)).mean()  # boxes are whole pixels of 4 x 4
    assert 0.35 < sixteenths < 0.65


def test_a_batch_that_is_not_mixed_has_one_hot_targets():
    for batch, options in ((make_batch(), {"mix_p": 0.0}), (make_batch(clips=1), {})):
        out = augmented(batch, mixup_alpha=1.0, num_classes=6, **options)
        assert torch.equal(out.frames, LEVELS(batch).frames)
        assert torch.equal(out.labels, torch.eye(6)[: len(batch.labels)])


def test_how_a_batch_is_mixed_depends_on_all_its_seeds_and_their_order():
    batch = make_batch()
    first = augmented(batch, mixup_alpha=1.0).labels
    assert torch.equal(augmented(batch, mixup_alpha=1.0).labels, first)
    for seeds in (batch.extras["seed"].flip(0), batch.extras["seed"] + torch.tensor([0, 0, 0, 1])):
        other = augmented(batch._replace(extras={"seed": seeds}), mixup_alpha=1.0).labels
        assert not torch.equal(other, first)


def test_a_label_beyond_the_classes_is_refused():
    with pytest.raises(PipelineError, match="label 3 is not below num_classes 3"):
        augmented(make_batch(), mixup_alpha=1.0, num_classes=3)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*BY_CLIP.values(), *MIXES.values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_gives_what_the_cpu_gives(gpu, options, dtype):
    spec = DeviceAugmentSpec(**options, num_classes=8)
    prepare = DeviceAugment(spec, normalize=Normalize(dtype=dtype))
    made = [make_batch(clips=8, height=56, width=56, seeds=range(k, k + 8)) for k in range(0, 80, 8)]
    for there, here in zip(
        prefetch(made, gpu, prepare=prepare), prefetch(made, "cpu", prepare=prepare), strict=True
    ):
        assert there.frames.device == there.labels.device == gpu
        assert there.frames.stride() == here.frames.stride()
        torch.testing.assert_close(there.labels.cpu(), here.labels, rtol=0, atol=1e-6)
        # A value on the edge between two levels may be rounded the other way; what was drawn may not differ.
        apart = (there.frames.float().cpu() - here.frames.float()).abs()
        assert apart.mean() < 0.02
        assert (apart > 0.1).float().mean() < 0.01


@pytest.mark.gpu
def test_a_gpu_draws_the_same_boxes_and_noise(gpu):
    batch = make_batch(clips=16, pixels=torch.tensor(255))
    prepare = DeviceAugment(DeviceAugmentSpec(erase_p=0.7, erase_value="random"))
    (there,) = prefetch([batch], gpu, prepare=prepare)
    torch.testing.assert_close(there.frames.cpu(), prepare(batch).frames, rtol=0, atol=2e-6)
