"""Augmentation on the device: drawn once for a clip, applied to all its frames alike.

    uint8 -> RandAugment -> colour jitter -> Normalize -> erasing -> MixUp or CutMix -> float

RandAugment and colour jitter take uint8, as in torchvision's own recipes: their operations are defined on
it, and it is a quarter of float's memory. Erasing comes after normalisation, so that 0 is the mean colour.
Mixing comes last, because it is about the pictures as the model sees them.

Torchvision does the drawing and the operations. It draws from torch's generator of the CPU, which is seeded
for each clip; so a clip's draws are the same on every device, whatever batch it is in.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pipeline.errors import PipelineError
from pipeline.online.collate import ClipBatch
from pipeline.online.device import Normalize
from pipeline.seeds import generator

_RANDAUGMENT_STREAM, _JITTER_STREAM, _ERASE_STREAM, _MIX_STREAM = 3, 4, 5, 7
"""Last number of the key of each generator, so that a clip's seed gives unrelated draws to each use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAugmentSpec:
    """What is done to clips on the device. Everything is off until it is asked for."""

    randaugment_ops: int = 0
    """Operations of RandAugment (Cubuk 2019) that a clip goes through; 0 is off, 2 is usual."""
    randaugment_magnitude: int = 9
    """Their strength, 0 to 30."""
    brightness: float = 0.0
    """The factor is uniform in [1 - this, 1 + this], and not below 0."""
    contrast: float = 0.0
    """The same, about each frame's own mean."""
    saturation: float = 0.0
    """The same."""
    hue: float = 0.0
    """The turn is uniform in [-this, this]; 0.5, the most, is half of the colour circle."""
    erase_p: float = 0.0
    """Share of clips of which a box is erased (Zhong 2017), the same in all frames."""
    erase_scale: tuple[float, float] = (0.02, 0.33)
    """Least and most area of the box, as a share of the frame's."""
    erase_ratio: tuple[float, float] = (0.3, 3.3)
    """Least and most height of the box over its width."""
    erase_value: float | Literal["random"] = 0.0
    """What comes into the box, normalised: 0 is the mean colour; `random` is noise, still in time."""
    mixup_alpha: float = 0.0
    """MixUp (Zhang 2018): the share of the clip itself has distribution Beta(this, this); 0 is off."""
    cutmix_alpha: float = 0.0
    """CutMix (Yun 2019): the same for the area that is kept. With both on, each batch has one of the two."""
    mix_p: float = 1.0
    """Share of batches that are mixed."""
    num_classes: int = 0
    """Classes that there are; needed for mixing, which turns labels into targets (B, num_classes)."""

    def __post_init__(self) -> None:
        if self.randaugment_ops < 0 or not 0 <= self.randaugment_magnitude <= 30:
            raise ValueError(f"randaugment needs ops >= 0 and a magnitude in [0, 30], got {self}")
        if min(self.brightness, self.contrast, self.saturation) < 0 or not 0 <= self.hue <= 0.5:
            raise ValueError(f"jitter must be >= 0, and hue <= 0.5, got {self}")
        if not (0 <= self.erase_p <= 1 and 0 <= self.mix_p <= 1):
            raise ValueError(f"erase_p and mix_p must be in [0, 1], got {self}")
        if not (0 <= self.erase_scale[0] <= self.erase_scale[1] <= 1):
            raise ValueError(f"erase_scale must rise, in [0, 1], got {self.erase_scale}")
        if not (0 < self.erase_ratio[0] <= self.erase_ratio[1]):
            raise ValueError(f"erase_ratio must rise, above 0, got {self.erase_ratio}")
        if min(self.mixup_alpha, self.cutmix_alpha) < 0:
            raise ValueError(f"mixup_alpha and cutmix_alpha must be >= 0, got {self}")
        if self.mixes and self.num_classes < 2:
            raise ValueError(f"MixUp and CutMix need num_classes, at least 2, got {self.num_classes}")

    @property
    def jitters(self) -> bool:
        """Whether colours are jittered."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0

    @property
    def changes_pixels(self) -> bool:
        """Whether something is done that needs uint8 frames."""
        return self.randaugment_ops > 0 or self.jitters

    @property
    def mixes(self) -> bool:
        """Whether clips are mixed, and labels come out as targets."""
        return max(self.mixup_alpha, self.cutmix_alpha) > 0

    @property
    def is_off(self) -> bool:
        """Whether nothing is asked for."""
        return not (self.changes_pixels or self.erase_p > 0 or self.mixes)


class _Mix(NamedTuple):
    """How the clips of a batch are mixed: clip i with clip i - shift."""

    shift: int
    share: float
    """Of the clip itself, in what comes out; the partner has the rest."""
    box: tuple[int, int, int, int] | None
    """Left, top, right, bottom (px) of what CutMix takes from the partner; None is MixUp."""


class DeviceAugment:
    """Augments and normalises a batch on the device that it is on: a `prepare` for `prefetch`.

    frames  uint8 (B, T, H, W, C): all that the spec asks for, and `normalize` -> float (B, C, T, H, W),
            channels last in memory. Frames that are float (B, C, T, H, W), normalised already, are erased
            and mixed alone; ValueError where the spec asks for more
    labels  int64 (B,), as they were; with mixing always float32 (B, num_classes), each row's sum 1
    extras  as they were, so leave mixing off for a model that reads further sources

    Clips are treated one after the other. Beside the device's time that takes the host's: for each clip
    about 0.3 ms for RandAugment, 0.5 for colour jitter, 0.1 for erasing (clips of 4 x 4 px, one core).

    The batch that is given stays as it is. All chance is from each clip's own seed, `extras["seed"]`, so
    that a clip comes out the same in any batch; only mixing depends on the seeds of the whole batch of this
    device, in their order. PipelineError where there are no seeds.
    """

    def __init__(self, spec: DeviceAugmentSpec, *, normalize: Normalize | None = None) -> None:
        from torchvision.transforms import v2  # takes a second, and workers load this module, too

        self.spec = spec
        self.normalize = normalize or Normalize()
        self._pixels: list[tuple[int, Any]] = []
        if spec.randaugment_ops:
            transform = v2.RandAugment(spec.randaugment_ops, spec.randaugment_magnitude)
            self._pixels.append((_RANDAUGMENT_STREAM, transform))
        if spec.jitters:
            jitter = v2.ColorJitter(spec.brightness, spec.contrast, spec.saturation, spec.hue)
            self._pixels.append((_JITTER_STREAM, jitter))
        self._erase = v2.RandomErasing(1.0, spec.erase_scale, spec.erase_ratio, spec.erase_value)
        kinds = ((v2.MixUp, spec.mixup_alpha), (v2.CutMix, spec.cutmix_alpha))
        self._mixes = [kind(alpha=alpha, num_classes=spec.num_classes) for kind, alpha in kinds if alpha > 0]

    def __call__(self, batch: ClipBatch) -> ClipBatch:
        """The batch augmented; see the class."""
        seeds = [] if self.spec.is_off else _seeds_of(batch)
        batch = self._normalized(batch, seeds)
        if self.spec.erase_p > 0:
            self._erase_boxes(batch.frames, seeds)
        if self.spec.mixes:
            batch = self._mixed(batch, seeds)
        return batch

    def _normalized(self, batch: ClipBatch, seeds: Sequence[int]) -> ClipBatch:
        """Float frames (B, C, T, H, W) that nobody else holds."""
        if batch.frames.is_floating_point():
            if self.spec.changes_pixels:
                raise ValueError(
                    "RandAugment and colour jitter need uint8 frames (B, T, H, W, C), got "
                    f"{batch.frames.dtype} {tuple(batch.frames.shape)}: let DeviceAugment normalise them"
                )
            return batch if self.spec.is_off else batch._replace(frames=batch.frames.clone())
        if self.spec.changes_pixels:
            batch = batch._replace(frames=self._recoloured(batch.frames, seeds))
        return self.normalize(batch)

    def _recoloured(self, frames: Tensor, seeds: Sequence[int]) -> Tensor:
        """uint8 (B, T, H, W, C) -> the same, each clip by its own draws."""
        recoloured = torch.empty_like(frames)
        for clip, seed, out in zip(frames, seeds, recoloured, strict=True):
            changed = clip.permute(0, 3, 1, 2)  # (T, H, W, C) -> (T, C, H, W)
            for stream, transform in self._pixels:
                with _seeded(generator(seed, stream)):
                    changed = transform(changed)
            out.copy_(changed.permute(0, 2, 3, 1))
        return recoloured

    def _erase_boxes(self, frames: Tensor, seeds: Sequence[int]) -> None:
        """Erase in place: float (B, C, T, H, W)."""
        for clip, seed in zip(frames, seeds, strict=True):
            rng = generator(seed, _ERASE_STREAM)
            if rng.random() >= self.spec.erase_p:
                continue
            with _seeded(rng):
                drawn = self._erase.make_params([clip[:, 0]])
            if drawn["v"] is not None:  # None: ten boxes were drawn, and none was smaller than the frame
                top, left = drawn["i"], drawn["j"]
                box = clip[:, :, top : top + drawn["h"], left : left + drawn["w"]]
                # Moved before it is spread over the frames: to a GPU goes one value, or one picture of noise.
                value = drawn["v"].to(clip.device, non_blocking=True)
                box.copy_(value[:, None])  # (C or 1, h or 1, w or 1) -> (..., 1, ...)

    def _mixed(self, batch: ClipBatch, seeds: Sequence[int]) -> ClipBatch:
        targets = _targets(batch.labels, self.spec.num_classes)
        mix = self._draw_mix(seeds, batch.frames)
        if mix is None:
            return batch._replace(labels=targets)
        mixed = torch.lerp(targets.roll(mix.shift, 0), targets, mix.share)
        return batch._replace(frames=_mix_frames(batch.frames, mix), labels=mixed)

    def _draw_mix(self, seeds: Sequence[int], frames: Tensor) -> _Mix | None:
        """None where this batch is not mixed, or has but one clip.

        Partners lie a drawn number of places apart, and not always one as in torchvision: some samplers
        put clips of one video side by side.
        """
        rng = generator(*seeds, _MIX_STREAM)
        if len(seeds) < 2 or rng.random() >= self.spec.mix_p:
            return None
        transform = self._mixes[rng.integers(len(self._mixes))]
        shift = int(rng.integers(1, len(seeds)))
        with _seeded(rng):
            drawn = transform.make_params([frames])
        return _Mix(shift, drawn.get("lam_adjusted", drawn.get("lam")), drawn.get("box"))


def _mix_frames(frames: Tensor, mix: _Mix) -> Tensor:
    """float (B, C, T, H, W), which may be written to -> the same shape and order in memory."""
    if mix.box is not None:
        left, top, right, bottom = mix.box
        box = frames[..., top:bottom, left:right]
        box.copy_(box.roll(mix.shift, 0))
        return frames
    # `roll` makes C-contiguous tensors, so it is given the axes in memory's order.
    stored = frames.permute(0, 2, 3, 4, 1)  # (B, C, T, H, W) -> (B, T, H, W, C)
    return stored.roll(mix.shift, 0).lerp_(stored, mix.share).permute(0, 4, 1, 2, 3)


def _targets(labels: Tensor, num_classes: int) -> Tensor:
    """int64 (B,) -> float32 (B, num_classes), one-hot."""
    # Asking a GPU would wait for it; there, torch's own assertion stops the run.
    if labels.device.type == "cpu" and labels.numel() and int(labels.max()) >= num_classes:
        raise PipelineError(
            f"label {int(labels.max())} is not below num_classes {num_classes}: set num_classes"
        )
    return one_hot(labels, num_classes).to(torch.float32)


def _seeds_of(batch: ClipBatch) -> list[int]:
    """Each clip's seed in [0, 2^64): `extras["seed"]` has the same bits as int64."""
    if "seed" not in batch.extras:
        raise PipelineError(
            f"extras of the batch hold {sorted(batch.extras)} and no 'seed', which DeviceAugment draws from: "
            "add int64 (B,) to extras, or use batches of a ClipDataset"
        )
    return [seed % 2**64 for seed in batch.extras["seed"].tolist()]


_GLOBAL = threading.Lock()
"""Torch's generator belongs to the process: two threads must not seed it at once."""


@contextmanager
def _seeded(rng: np.random.Generator) -> Iterator[None]:
    """Torch's generator of the CPU, from which torchvision draws, seeded; and afterwards as it was."""
    with _GLOBAL, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        yield
