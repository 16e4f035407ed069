"""Where a clip is cut, and whether it is mirrored: drawn once for a clip, applied to all its frames.

`draw_augment` is all the chance and `apply_augment` all the arithmetic, so frames of one clip cannot be
augmented apart. A draw says what part of the source it needs before anything is decoded.

    spec, seed, frame size -> draw_augment -> DrawnAugment -> apply_augment (into the batch)

Resizing agrees with torchvision's v2 `resized_crop(..., antialias=True)` on the same box. Planes have
`pipeline.online.planar` in place of `apply_augment`.
"""

import difflib
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
import torch

from pipeline.errors import PipelineError
from pipeline.online.crops import NUM_DRAWS, Axis, evaluation_crop, random_crop
from pipeline.online.crops import AugmentSpec as AugmentSpec
from pipeline.online.resample import Frames, Memory, resample
from pipeline.seeds import generator

_CROP_STREAM, _TRANSFORM_STREAM = 1, 2
"""Second number of the key of each generator, so that a clip's seed gives unrelated draws to each use."""


def labels_named(names: Collection[str], classes: Sequence[str]) -> frozenset[int]:
    """Labels of classes by name, for `no_flip_labels`; PipelineError for a name that is not a class.

    >>> sorted(labels_named({"MoveLeft", "MoveRight"}, ["Jump", "MoveLeft", "MoveRight"]))
    [1, 2]
    """
    labels = {name: label for label, name in enumerate(classes)}
    for name in sorted(names):
        if name not in labels:
            near = difflib.get_close_matches(name, classes, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise PipelineError(f"no class is named {name!r} among the {len(classes)} of this dataset{hint}")
    return frozenset(labels[name] for name in names)


class DrawnAugment(NamedTuple):
    """What was drawn for a clip: the same for each of its frames."""

    y: Axis
    x: Axis
    flip: bool
    antialias: bool

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Top, left, height, width (source pixels): all that must be decoded."""
        return self.y.start, self.x.start, self.y.length, self.x.length

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width (pixels) of what comes out."""
        return self.y.out, self.x.out

    def shifted(self, top: int, left: int) -> "DrawnAugment":
        """The same for frames that were decoded in part: their first pixel is (top, left) of the whole."""
        return DrawnAugment(self.y.shifted(top), self.x.shifted(left), self.flip, self.antialias)

    @property
    def reduction(self) -> int:
        """The most of 8, 4, 2, 1 at whose fraction the box still has a pixel for each that comes out."""
        if not (self.y.is_whole and self.x.is_whole):
            return 1  # an evaluation crop keeps the phase of the whole frame
        return next(
            factor for factor in (8, 4, 2, 1) if min(self.y.step, self.x.step) >= factor or factor == 1
        )

    def reduced(self, factor: int, height: int, width: int) -> "DrawnAugment":
        """The same for frames that were decoded at 1 / factor, to `height` x `width` pixels."""
        return self._replace(y=self.y.reduced(factor, height), x=self.x.reduced(factor, width))


def draw_augment(
    spec: AugmentSpec,
    rng: int | np.random.Generator,
    *,
    height: int,
    width: int,
    label: int | None = None,
    crop: int = -1,
) -> DrawnAugment:
    """Draw box and flip for one clip whose frames are `height` x `width` pixels.

    rng    the clip's 64-bit seed, or a generator, from which always equally many numbers are taken
    label  the clip's label; needed where the spec names labels that are not mirrored
    crop   0, 1, 2: left or top, centre, right or bottom, along the longer side, of an evaluation; -1: the
           centre there, and the only choice where a crop is random

    The box lies inside the frame, whatever its size; a small frame is enlarged.
    """
    if height < 1 or width < 1:
        raise ValueError(f"a frame must have height and width >= 1, got {height} and {width}")
    if crop not in (-1, 0, 1, 2):
        raise ValueError(f"crop must be -1, 0, 1 or 2, got {crop}")
    if spec.is_evaluation:
        y, x = evaluation_crop(spec, (height, width), 1 if crop == -1 else crop)
        return DrawnAugment(y, x, False, spec.antialias)
    if crop != -1:
        raise ValueError(f"crop {crop} is for evaluation and mode {spec.mode} is not: use mode 'three_crop'")
    rng = rng if isinstance(rng, np.random.Generator) else generator(int(rng), _CROP_STREAM)
    # Always all the numbers, whatever they are needed for: so no option shifts the draws of another.
    flip, *chance = rng.random(1 + NUM_DRAWS).tolist()
    y, x = random_crop(spec, (height, width), chance)
    return DrawnAugment(y, x, _may_flip(spec, label) and flip < spec.flip_p, spec.antialias)


def _may_flip(spec: AugmentSpec, label: int | None) -> bool:
    if spec.no_flip_labels and label is None:
        raise ValueError("no_flip_labels is given but the clip's label is not: pass label=")
    return label not in spec.no_flip_labels


def apply_augment(
    frames: Frames | Sequence[Frames], drawn: DrawnAugment, out: Frames | None = None
) -> Frames:
    """Cut, resize and mirror all frames of a clip alike, straight into `out`, which is returned.

    frames  uint8 (T, H, W, 3), in which the draw's box lies
    out     uint8 (T, out height, out width, 3), C-contiguous: a part of a batch; None makes one

    ValueError where the box leaves the frames or `out` does not fit.
    """
    frames = np.asarray(frames)
    top, left, height, width = drawn.box
    if top < 0 or left < 0 or top + height > frames.shape[1] or left + width > frames.shape[2]:
        raise ValueError(f"box (top, left, height, width) {drawn.box} leaves frames of shape {frames.shape}")
    shape = (len(frames), *drawn.size_hw, 3)
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous uint8 {shape}, got {out.dtype} {out.shape}")
    source = frames[:, top : top + height, left : left + width]
    resized = _resized(source, drawn, _SCRATCH.mirrored.take(shape) if drawn.flip else out)
    if drawn.flip:
        mirror(resized, out)
    elif resized is not out:
        np.copyto(out, resized)
    return out


def apply_to_frame(frame: Frames, drawn: DrawnAugment, out: Frames | None = None) -> Frames:
    """The same for one frame: uint8 (H, W, 3) -> uint8 (out height, out width, 3)."""
    frames = apply_augment(frame[None], drawn, None if out is None else out[None])
    return cast(Frames, frames[0])


def mirror(frames: Frames, out: Frames) -> None:
    """Left to right, (T, H, W, 3) to `out`; one call for all the rows of a clip where they lie together."""
    if frames.flags.c_contiguous:
        rows = (-1, *frames.shape[2:])
        cv2.flip(frames.reshape(rows), 1, dst=out.reshape(rows))
        return
    for picture, place in zip(frames, out, strict=True):
        cv2.flip(picture, 1, dst=place)


class _Scratch(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.boxes, self.mirrored = Memory(), Memory()


_SCRATCH = _Scratch()


def _resized(source: Frames, drawn: DrawnAugment, out: Frames) -> Frames:
    """The draw's box at its output size: in `out` where that can be, otherwise a view of something larger.

    On 18 frames of UCF101, Kinetics and others, to 112 px, one core: OpenCV's bilinear enlarges in 16
    to 26 us a frame within 0.2 levels of torchvision (torch: 50 to 66 us). Shrinking 1.1 to 2.4 times,
    torch's antialiased kernel is torchvision's own, in 33 to 91 us where it gets a clip at once and 52 to
    113 us frame by frame; OpenCV's INTER_AREA is 0.3 to 2.9 levels away in 120 to 280 us, and its
    bilinear up to 4 levels in 30 us.
    """
    y, x = drawn.y, drawn.x
    if y.is_whole and x.is_whole and not (drawn.antialias and (y.step > 1 or x.step > 1)):
        for picture, place in zip(source, out, strict=True):
            cv2.resize(picture, (x.out, y.out), dst=place, interpolation=cv2.INTER_LINEAR)
        return out
    fits = (y.grid, x.grid) == drawn.size_hw
    made = out if fits else np.empty((len(source), y.grid, x.grid, 3), np.uint8)
    if drawn.antialias and not source.flags.c_contiguous:
        # The kernel copies pixels that do not lie together by itself, in 1.3 times the time.
        boxes = _SCRATCH.boxes.take(source.shape)
        np.copyto(boxes, source)
        source = boxes
    kept = resample(source, y, x, made, antialias=drawn.antialias)
    return made if fits else kept


# A user's own transform, after the crop.


def apply_user_transform(transform: Callable[[Any], Any], frames: Frames, seed: int) -> Frames:
    """A torchvision v2 transform (or any callable like one) on a whole clip, seeded from the clip's seed.

    frames   uint8 (T, H, W, 3); handed over as one `tv_tensors.Video` (T, 3, H, W), so that what the
             transform draws is the same for all frames
    returns  uint8 (T, H', W', 3), contiguous

    Torch's generator of the CPU, `random` and `numpy.random` are seeded for the call and put back after it.
    PipelineError where what comes back is not as many uint8 frames.
    """
    from torchvision import tv_tensors  # costs a worker a second, and few clips have such a transform

    video = tv_tensors.Video(
        torch.from_numpy(np.require(frames, requirements=["C", "W"])).permute(0, 3, 1, 2)
    )
    with _seeded_globals(seed):
        result = transform(video)
    if not isinstance(result, torch.Tensor):
        raise PipelineError(
            f"transform {_name(transform)} returned {type(result).__name__}, expected a tensor"
        )
    if result.dtype != torch.uint8 or result.ndim != 4 or result.shape[:2] != video.shape[:2]:
        raise PipelineError(
            f"transform {_name(transform)} returned {result.dtype} {tuple(result.shape)}, expected "
            f"torch.uint8 ({video.shape[0]}, 3, H, W): leave float and normalisation to the device"
        )
    # (T, C, H, W) -> (T, H, W, C)
    return np.ascontiguousarray(result.as_subclass(torch.Tensor).permute(0, 2, 3, 1).numpy())


def _name(transform: Callable[[Any], Any]) -> str:
    return getattr(transform, "__name__", type(transform).__name__)


_GLOBALS = threading.Lock()
"""The global generators belong to the process: two threads must not seed them at once."""


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    """The process's global generators at a known state, and afterwards as they were."""
    for_torch, for_python, for_numpy = generator(seed, _TRANSFORM_STREAM).integers(2**32, size=3).tolist()
    with _GLOBALS, torch.random.fork_rng(devices=[]):
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would seed CUDA's for good
            random.seed(for_python)
            np.random.seed(for_numpy)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
