"""The first clips of a training stream, as a model is given them, to look at."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.measure.pictures import Picture
from pipeline.online.augment import AugmentSpec
from pipeline.online.collate import ClipBatch
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Normalize
from pipeline.online.device_augment import DeviceAugment, DeviceAugmentSpec
from pipeline.online.order import class_weights
from pipeline.online.samplers import ClipRef, EpochSampler
from pipeline.online.store import Store
from pipeline.online.windows import WindowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """All that decides which clips training is given."""

    window: WindowSpec = field(default_factory=WindowSpec)
    augment: AugmentSpec = field(default_factory=AugmentSpec)
    device: DeviceAugmentSpec = field(default_factory=DeviceAugmentSpec)
    """What is done where the model is."""
    seed: int = 0
    clips_per_video: int = 1
    is_balanced: bool = False
    on_bad: Literal["raise", "skip"] = "raise"
    batch_size: int = 8
    """Clips of a batch: MixUp and CutMix mix within one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownClip:
    """A clip and what is known of it."""

    pictures: Sequence[Picture]
    """T of them, of one size."""
    label: str
    """The class; where clips are mixed, each class with its share."""
    video: str
    start: int
    """First frame."""
    times_s: tuple[float, ...]
    """Of each frame, since the video's first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownClips:
    """Clips in the order of the stream."""

    clips: tuple[ShownClip, ...]
    errors: tuple[str, ...]
    """Of those that cannot be made; training would stop at the first."""


def draw_clips(
    rows: Manifest,
    store: Store,
    spec: StreamSpec,
    *,
    num_clips: int,
    on_clip: Callable[[], object] = lambda: None,
) -> ShownClips:
    """The first clips of epoch 0 of training on `rows`: the very ones, wherever they are decoded.

    PipelineError where there can be none, such as without rows or, for the columns that workers would share,
    without shared memory.
    """
    try:
        dataset = ClipDataset(rows, store, spec.window, augment=spec.augment, on_bad=spec.on_bad)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise PipelineError(
            f"torch has no memory to share ({why}): mount /dev/shm, in a container by --shm-size 1g"
        ) from error
    sampler = EpochSampler(
        rows,
        spec.window,
        seed=spec.seed,
        weights=class_weights(rows.column("label")) if spec.is_balanced else None,
        clips_per_video=spec.clips_per_video,
    )
    clips: list[ShownClip] = []
    errors: list[str] = []
    prepare = None if spec.device.is_off else DeviceAugment(spec.device)
    whole_batches = -(-num_clips // spec.batch_size) * spec.batch_size
    refs_of_all = islice(sampler, whole_batches if spec.device.mixes else num_clips)
    for refs in _batched(refs_of_all, spec.batch_size):
        made = [one for ref in refs if (one := _attempt(dataset, ref, errors, on_clip)) is not None]
        if made:
            batch = _joined(made)
            clips += _shown(batch if prepare is None else prepare(batch), rows)
    return ShownClips(clips=tuple(clips[:num_clips]), errors=tuple(errors))


def _batched(refs: Iterator[ClipRef], size: int) -> Iterator[list[ClipRef]]:
    while batch := list(islice(refs, size)):
        yield batch


def _attempt(
    dataset: ClipDataset, ref: ClipRef, errors: list[str], on_clip: Callable[[], object]
) -> ClipBatch | None:
    """A batch of one clip; None, and its error added, where it cannot be made."""
    try:
        return dataset.__getitems__([ref])
    except PipelineError as error:
        errors.append(str(error))
        return None
    finally:
        on_clip()


def _joined(batches: Sequence[ClipBatch]) -> ClipBatch:
    """Batches of one clip each as the batch that a loader would give."""
    frames, labels, videos, starts, times_s = (
        torch.cat(parts) for parts in list(zip(*batches, strict=True))[:5]
    )
    seeds = torch.cat([one.extras["seed"] for one in batches])
    return ClipBatch(frames, labels, videos, starts, times_s, {"seed": seeds})


def _shown(batch: ClipBatch, rows: Manifest) -> Iterator[ShownClip]:
    frames = batch.frames if batch.frames.dtype == torch.uint8 else _to_pixels(batch.frames)
    for clip, label, video, start, times_s in zip(
        frames,
        batch.labels,
        batch.videos.tolist(),
        batch.starts.tolist(),
        batch.times_s.tolist(),
        strict=True,
    ):
        yield ShownClip(
            pictures=list(clip.numpy()),
            label=_name_label(label, rows.classes),
            video=rows[video].video,
            start=start,
            times_s=tuple(times_s),
        )


def _to_pixels(frames: Tensor, normal: Normalize | None = None) -> Tensor:
    """Back from float (B, C, T, H, W) as a model is given it to uint8 (B, T, H, W, C)."""
    normal = normal or Normalize()
    stored = frames.permute(0, 2, 3, 4, 1)  # (B, C, T, H, W) -> (B, T, H, W, C)
    pixels = (stored * torch.tensor(normal.std) + torch.tensor(normal.mean)) * 255
    return pixels.round().clamp(0, 255).to(torch.uint8)


def _name_label(label: Tensor, classes: Sequence[str]) -> str:
    """The class of a label, int64 () or of a target, float32 (classes,)."""
    if not label.is_floating_point():
        return classes[int(label)]
    shares = [(share, classes[place]) for place, share in enumerate(label.tolist()) if share > 0.005]
    if len(shares) == 1:
        return shares[0][1]
    return " + ".join(f"{share:.2f} {name}" for share, name in sorted(shares, reverse=True))
