"""A drawn crop applied to planes of luma and chroma, and colours made of what is left of them.

    Planes -> cut -> four frames side by side -> resample -> mirror -> apart again -> colours -> out

Against `apply_augment` on RGB a clip differs by 0.4 levels on the average: chroma is interpolated once, from
where the JPEG has it, and not first to the size of the frame.
"""

import threading
from collections.abc import Sequence

import cv2
import numpy as np

from pipeline.online.augment import DrawnAugment
from pipeline.online.crops import Axis
from pipeline.online.resample import Frames, Memory, kept, resample_tensor
from pipeline.planes import Planes

_FRAMES = 4
"""Frames that are resampled as channels of one picture: torch's kernels are quick for 3 or 4 channels, which
they treat alike. A plane by itself takes 7 times as long."""


def fits_planes(drawn: DrawnAugment, height: int, width: int) -> bool:
    """Whether planes do for a draw from a frame of that size.

    No pair of pixels that share their chroma may be cut apart, but where a filter only reaches for them; and
    what is not resized at all stays exact.
    """
    keeps_pairs = all(
        axis.start % 2 == 0
        and (axis.length % 2 == 0 or axis.start + axis.length == size or not axis.is_whole)
        for axis, size in ((drawn.y, height), (drawn.x, width))
    )
    return keeps_pairs and (drawn.y.step, drawn.x.step) != (1, 1)


def apply_to_planes(planes: Planes, drawn: DrawnAugment, out: Frames | None = None) -> Frames:
    """Cut, resize and mirror all frames of a clip alike, straight into `out`, which is returned.

    planes  in which the draw's box lies; the draw fits planes
    drawn   with its box in pixels of the whole frame
    out     uint8 (T, out height, out width, 3), red first, C-contiguous: a part of a batch; None makes one

    Colours as JFIF has them (ITU-R BT.601, full range).
    """
    y, x = drawn.y.shifted(planes.top), drawn.x.shifted(planes.left)
    count, size = len(planes.luma), (len(planes.luma), *drawn.size_hw)
    groups = -(-count // _FRAMES)
    made = _SCRATCH.made.take((3, groups * _FRAMES, *drawn.size_hw))
    (luma,) = _resampled([planes.luma], y, x, drawn.antialias)
    _take_apart(luma, made[0], drawn.flip)
    # OpenCV's order, in which red comes first.
    red, blue = _resampled([planes.red, planes.blue], y.halved(), x.halved(), drawn.antialias)
    _take_apart(red, made[1], drawn.flip)
    _take_apart(blue, made[2], drawn.flip)

    out = np.empty((*size, 3), np.uint8) if out is None else out
    # As one long row: OpenCV takes twice as long for as many pixels in rows of 112.
    mixed = _SCRATCH.mixed.take((1, out.size // 3, 3))
    cv2.merge([plane[:count].reshape(1, -1) for plane in made], dst=mixed)
    cv2.cvtColor(mixed, cv2.COLOR_YCrCb2RGB, dst=out.reshape(1, -1, 3))
    return out


def _resampled(planes: Sequence[np.ndarray], y: Axis, x: Axis, antialias: bool) -> Frames:
    """Planes (T, H, W) of one size, cut and resampled: (planes, groups, y.out, x.out, 4).

    Of G groups, group g has the frames g, G + g, 2 G + g and 3 G + g: so each channel of all of them is one
    stretch of frames.
    """
    groups = -(-len(planes[0]) // _FRAMES)
    # OpenCV puts planes together in a tenth of the time where their rows follow each other.
    cut = _SCRATCH.cut.take((_FRAMES * groups, y.length, x.length))
    channels = list(cut.reshape(_FRAMES, groups * y.length, x.length))
    pictures = len(planes) * groups
    source, source_tensor = _SCRATCH.source.take_pictures((pictures, y.length, x.length, _FRAMES))
    for plane, together in zip(planes, source.reshape(-1, *channels[0].shape, _FRAMES), strict=True):
        np.copyto(cut[: len(plane)], plane[:, y.start : y.start + y.length, x.start : x.start + x.length])
        cv2.merge(channels, dst=together)
    grid, grid_tensor = _SCRATCH.grid.take_pictures((pictures, y.grid, x.grid, _FRAMES))
    resample_tensor(source_tensor, y, x, grid_tensor, antialias=antialias)
    made = kept(grid, y, x)
    return made.reshape(len(planes), groups, *made.shape[1:])


def _take_apart(groups: Frames, planes: Frames, flip: bool) -> None:
    """(G, H, W, 4) to (4 G, H, W), in the order of the frames; mirrored, while four values move as one."""
    count, height, width, _ = groups.shape
    together = np.ascontiguousarray(groups).reshape(count * height, width, _FRAMES)
    if flip:
        mirrored = _SCRATCH.mirrored.take(together.shape)
        cv2.flip(together, 1, dst=mirrored)
        together = mirrored
    cv2.split(together, list(planes.reshape(_FRAMES, count * height, width)))


class _Scratch(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.cut, self.source, self.grid = Memory(), Memory(), Memory()
        self.made, self.mixed, self.mirrored = Memory(), Memory(), Memory()


_SCRATCH = _Scratch()
