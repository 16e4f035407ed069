"""Bilinear resampling of the frames of a clip, all in one call of torch's kernels, along two `Axis`."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeline.online.crops import Axis

Frames: TypeAlias = npt.NDArray[np.uint8]


class Memory:
    """Memory that is used again: new memory costs a page fault, about 0.5 us, for each 4 kB."""

    def __init__(self) -> None:
        self._grow(0)

    def take(self, shape: Sequence[int]) -> Frames:
        """uint8 of a shape, without a value, good until the next call."""
        size = math.prod(shape)
        if len(self._buffer) < size:
            self._grow(size)
        return self._buffer[:size].reshape(shape)

    def take_pictures(self, shape: tuple[int, int, int, int]) -> tuple[Frames, torch.Tensor]:
        """The same of (T, H, W, C), and as torch's kernels take it: (T, C, H, W), channels last."""
        frames = self.take(shape)
        count, height, width, channels = shape
        strides = height * width * channels, 1, width * channels, channels
        return frames, self._tensor.as_strided((count, channels, height, width), strides)

    def _grow(self, size: int) -> None:
        self._buffer = np.empty(size, np.uint8)
        self._tensor = torch.from_numpy(self._buffer)


def resample(source: Frames, y: Axis, x: Axis, made: Frames, *, antialias: bool) -> Frames:
    """What the axes keep of `made`, which is filled: a view of it.

    source  uint8 (T, y.length, x.length, C), contiguous or not; of 3 or 4 channels torch's kernels are quick
    made    uint8 (T, y.grid, x.grid, C), contiguous
    """
    resample_tensor(_as_tensor(source), y, x, _as_tensor(made), antialias=antialias)
    return kept(made, y, x)


def resample_tensor(source: torch.Tensor, y: Axis, x: Axis, made: torch.Tensor, *, antialias: bool) -> None:
    """The same for uint8 (T, C, H, W), channels last; `made` is filled."""
    kernel = _ANTIALIASED if antialias else _PLAIN
    kernel(source, [y.grid, x.grid], False, 1 / y.step, 1 / x.step, out=made)


def kept(made: Frames, y: Axis, x: Axis) -> Frames:
    """What the axes keep of the grid that was made: a view of (T, y.grid, x.grid, C)."""
    return made[:, y.skip : y.skip + y.out, x.skip : x.skip + x.out]


# What torch.nn.functional.interpolate calls, which can neither write into a given place nor be told the step.
_ANTIALIASED = torch.ops.aten._upsample_bilinear2d_aa.out
_PLAIN = torch.ops.aten.upsample_bilinear2d.out


def _as_tensor(frames: Frames) -> torch.Tensor:
    """(T, H, W, C) -> (T, C, H, W), channels last, on the same memory unless torch cannot share it."""
    if not frames.flags.writeable or min(frames.strides) < 0:
        frames = frames.copy(order="C")
    return torch.from_numpy(frames.transpose(0, 3, 1, 2))
