"""Clips to a batch: a NamedTuple, so that torch's pinning and its queues reach inside."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from pipeline.errors import PipelineError


class Clip(NamedTuple):
    """One clip."""

    frames: Tensor
    """uint8 (T, H, W, C), red first."""
    label: int
    video: int
    """Row of the manifest that the dataset was given."""
    start: int
    """First frame."""
    times_s: Tensor
    """float64 (T,): seconds since the video's first frame."""
    extras: dict[str, Tensor]
    """`seed`: int64 (), the clip's own; and one tensor for each further source."""


class ClipBatch(NamedTuple):
    """Clips side by side."""

    frames: Tensor
    """uint8 (B, T, H, W, C), red first; after `prefetch` float (B, C, T, H, W), channels last in memory."""
    labels: Tensor
    """int64 (B,)"""
    videos: Tensor
    """int64 (B,): row of the manifest that the dataset was given."""
    starts: Tensor
    """int64 (B,): first frame of each clip."""
    times_s: Tensor
    """float64 (B, T): seconds since the video's first frame."""
    extras: dict[str, Tensor]
    """`seed`: int64 (B,), each clip's own; and one tensor for each further source."""


def empty_frames(clips: int, frames: int, height: int, width: int) -> Tensor:
    """uint8 (B, T, H, W, 3) to decode into, without a value yet.

    In a worker it lies in shared memory from the start, as torch's own `default_collate` has it, so
    that handing it to the main process copies nothing.
    """
    shape = (clips, frames, height, width, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def collate_clips(clips: Sequence[Clip] | ClipBatch) -> ClipBatch:
    """Stack clips; a batch, which a `ClipDataset` makes itself, passes as it is.

    PipelineError where they are not of one shape.
    """
    if isinstance(clips, ClipBatch):
        return clips
    shapes = {tuple(clip.frames.shape) for clip in clips}
    if len(shapes) > 1:
        raise PipelineError(f"clips of different shapes cannot be one batch: {sorted(shapes)}; give augment=")
    return ClipBatch(
        frames=torch.stack([clip.frames for clip in clips]),
        labels=torch.tensor([clip.label for clip in clips]),
        videos=torch.tensor([clip.video for clip in clips]),
        starts=torch.tensor([clip.start for clip in clips]),
        times_s=torch.stack([clip.times_s for clip in clips]),
        extras={name: torch.stack([clip.extras[name] for clip in clips]) for name in clips[0].extras},
    )
