"""Where a clip is cut: the spec, and the arithmetic from numbers in [0, 1) to a box in the source.

Nothing here draws or touches a pixel. A box is two `Axis`, in whole source pixels, so that what must be
decoded is known before anything is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

Pixels: TypeAlias = tuple[int, int]
"""A height and a width."""
Mode = Literal["random_resized_crop", "multi_scale_crop", "short_side_jitter", "centre", "three_crop"]

NUM_DRAWS = 2 + 2 * 10
"""Numbers that a crop may use: top, left, then two for each of ten attempts."""
_PHASE_TOLERANCE_PX = 1 / 64
"""How far, in source pixels, an evaluation crop may lie from where resizing the whole frame would put it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentSpec:
    """What is done to the picture of a clip on the CPU: cut, resized, mirrored."""

    size_px: int | tuple[int, int] = 112
    """Height and width of the clip that comes out; one number for a square."""
    mode: Mode = "random_resized_crop"
    """`random_resized_crop`: torchvision's. `multi_scale_crop`: of TSN (Wang et al. 2016, and MMAction2).
    `short_side_jitter`: of SlowFast, a random short side, then a random crop. For evaluation, without any
    chance and never mirrored: `centre`, and `three_crop` along the longer side."""
    scale: tuple[float, float] = (0.25, 1.0)
    """Share of the frame's area that a random resized crop takes. torchvision's default, made for single
    pictures, is (0.08, 1); from 0.25 on a crop of a 320x240 frame is at least 120 px, so 112 px are never
    made by enlarging, and what moves mostly stays in view."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width to height of a random resized crop in source pixels, log-uniform."""
    scales: tuple[float, ...] = (1.0, 0.875, 0.75, 0.66)
    """Sides of a multi-scale crop, as shares of the frame's short side."""
    max_scale_gap: int = 1
    """How many places in `scales` the height and the width of one crop may lie apart."""
    num_fixed_crops: Literal[5, 13] = 13
    """Places of a multi-scale crop: corners and centre as in the paper, or with 8 more as in its code."""
    jitter_px: tuple[int, int] | None = None
    """Least and greatest short side of `short_side_jitter`; None: as SlowFast, 256 to 320 for 224."""
    short_side_px: int | None = None
    """Short side of the whole frame in evaluation; None: the size for `three_crop`, so that the three cover
    all of it, and 256 for 224 in proportion for `centre` (128 for 112)."""
    flip_p: float = 0.5
    """How probable it is that a clip for training is mirrored, left to right."""
    no_flip_labels: frozenset[int] = frozenset()
    """Labels of the classes that have a direction (`MoveLeft`) and are never mirrored; see `labels_named`."""
    antialias: bool = True
    """Filter when shrinking, as torchvision does. Off, fine detail flickers, and a clip takes 0.96 of the
    time."""
    resize_in: Literal["planes", "rgb"] = "planes"
    """What is resized. `planes`: luma and chroma as the JPEG holds them, colours are made afterwards, where
    frames are 4:2:0 with restart markers and no pair of pixels is cut apart, as by random resized
    crops; `rgb`: always as torchvision does. A clip differs by 0.4 levels on the average."""
    reduce: bool = False
    """Decode a random crop at 1/2, 1/4 or 1/8 where it is at least that much larger than what comes out on
    both sides. Pixels then differ from the exact ones by 1 to 2.6 levels on the average, and a clip of
    1920x1080 takes 0.6 of the time (52 and 32 ms)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "no_flip_labels", frozenset(self.no_flip_labels))
        _check_pixels(self)
        if self.mode not in _RANDOM_CROPS and not self.is_evaluation:
            raise ValueError(
                f"mode must be one of {', '.join((*_RANDOM_CROPS, *_EVALUATION))}, got {self.mode!r}"
            )
        if self.resize_in not in ("planes", "rgb"):
            raise ValueError(f"resize_in is planes or rgb, got {self.resize_in!r}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be two shares of the area, 0 < low <= high <= 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must be two widths to heights, 0 < low <= high, got {self.ratio}")
        if not self.scales or not all(0 < scale <= 1 for scale in self.scales):
            raise ValueError(f"scales must be shares of the short side in (0, 1], got {self.scales}")
        if self.max_scale_gap < 0:
            raise ValueError(f"max_scale_gap must be >= 0, got {self.max_scale_gap}")
        if self.num_fixed_crops not in (5, 13):
            raise ValueError(f"num_fixed_crops must be 5 or 13, got {self.num_fixed_crops}")
        if not 0 <= self.flip_p <= 1:
            raise ValueError(f"flip_p must be in [0, 1], got {self.flip_p}")

    @property
    def size_hw(self) -> Pixels:
        """Height and width (pixels) of every frame that comes out."""
        return self.size_px if isinstance(self.size_px, tuple) else (self.size_px, self.size_px)

    @property
    def is_evaluation(self) -> bool:
        """Whether the mode leaves nothing to chance."""
        return self.mode in _EVALUATION

    @property
    def short_side(self) -> int:
        """Short side (pixels) that an evaluation gives to the whole frame."""
        if self.short_side_px is not None:
            return self.short_side_px
        longest = max(self.size_hw)
        return longest if self.mode == "three_crop" else round(longest * 256 / 224)

    @property
    def jitter(self) -> tuple[int, int]:
        """Least and greatest short side (pixels) of `short_side_jitter`."""
        longest = max(self.size_hw)
        return self.jitter_px or (round(longest * 256 / 224), round(longest * 320 / 224))


def _check_pixels(spec: AugmentSpec) -> None:
    if len(spec.size_hw) != 2 or min(spec.size_hw) < 1:
        raise ValueError(f"size_px must be one or two numbers >= 1, got {spec.size_px}")
    if spec.short_side_px is not None and spec.short_side_px < 1:
        raise ValueError(f"short_side_px must be >= 1, got {spec.short_side_px}")
    if spec.jitter_px is not None and not 1 <= spec.jitter_px[0] <= spec.jitter_px[1]:
        raise ValueError(f"jitter_px must be 1 <= least <= greatest, got {spec.jitter_px}")


class Axis(NamedTuple):
    """How one side of the picture is cut and resampled."""

    start: int
    """First source pixel that is needed."""
    length: int
    """Source pixels that are needed, from `start` on."""
    skip: int
    """Output pixels that are made before the first one kept: a crop of a resized whole seldom begins
    between two source pixels, some pixels before it does."""
    out: int
    """Output pixels that are kept."""
    step: float
    """Source pixels from one output pixel to the next."""

    @property
    def grid(self) -> int:
        """Output pixels to make, kept or not."""
        made = self.skip + self.out
        # torch takes equal sizes for a copy whatever the step is (2.14): one more pixel stops that.
        return made + 1 if made == self.length and self.step != 1 else made

    @property
    def is_whole(self) -> bool:
        """Whether the source pixels become the output pixels with nothing cut away."""
        return self.skip == 0 and self.step == self.length / self.out

    def shifted(self, first: int) -> "Axis":
        """The same on pixels of which the first is that one."""
        return Axis(self.start - first, self.length, self.skip, self.out, self.step)

    def halved(self) -> "Axis":
        """The same on chroma of half as many samples, each in the middle of two pixels."""
        return Axis(self.start // 2, -(-self.length // 2), self.skip, self.out, self.step / 2)

    def reduced(self, factor: int, size: int) -> "Axis":
        """The same on pixels decoded at 1 / factor, of which there are `size`; to the nearest of them."""
        start = min(round(self.start / factor), size - 1)
        length = min(max(round(self.length / factor), 1), size - start)
        return Axis(start, length, 0, self.out, length / self.out)


Axes: TypeAlias = tuple[Axis, Axis]
"""Down and across."""


def random_crop(spec: AugmentSpec, frame_hw: Pixels, chance: Sequence[float]) -> Axes:
    """The box of a mode for training, inside a frame of that height and width.

    chance  NUM_DRAWS numbers in [0, 1): where the box lies down and across, then what its size needs
    """
    return _RANDOM_CROPS[spec.mode](spec, frame_hw, chance)


def _random_resized_crop(spec: AugmentSpec, frame_hw: Pixels, chance: Sequence[float]) -> Axes:
    """Area and shape at random, as `torchvision.transforms.RandomResizedCrop.get_params`."""
    height, width = frame_hw
    least, most = spec.scale
    low, high = math.log(spec.ratio[0]), math.log(spec.ratio[1])
    for share, shape in zip(chance[2::2], chance[3::2], strict=True):
        area = height * width * (least + (most - least) * share)
        aspect = math.exp(low + (high - low) * shape)
        box_hw = math.sqrt(area / aspect), math.sqrt(area * aspect)
        if 0 < round(box_hw[0]) <= height and 0 < round(box_hw[1]) <= width:
            return _placed(frame_hw, box_hw, spec.size_hw, chance[:2])
    return _placed(frame_hw, (width / spec.ratio[0], height * spec.ratio[1]), spec.size_hw, None)


def _multi_scale_crop(spec: AugmentSpec, frame_hw: Pixels, chance: Sequence[float]) -> Axes:
    """One of few sizes at one of few places: Wang et al. 2016, and MMAction2's `MultiScaleCrop`.

    A side within 2 px of the output's becomes it, so that nothing is resized for so little.
    """
    sides = [int(min(frame_hw) * scale) for scale in spec.scales]
    pairs = [
        (height, width)
        for (i, height), (j, width) in product(enumerate(sides), repeat=2)
        if abs(i - j) <= spec.max_scale_gap
    ]
    pair = pairs[int(chance[2] * len(pairs))]
    place = _FIXED_PLACES[int(chance[3] * spec.num_fixed_crops)]
    axes = []
    for size, side, out, quarter in zip(frame_hw, pair, spec.size_hw, place, strict=True):
        length = _within(size, out if abs(side - out) < 3 else side)
        axes.append(_axis((size - length) // 4 * quarter, length, out))
    return axes[0], axes[1]


_FIXED_PLACES = (
    *((0, 0), (0, 4), (4, 0), (4, 4), (2, 2)),  # corners and centre
    *((2, 0), (2, 4), (4, 2), (0, 2)),  # middles of the edges
    *((1, 1), (1, 3), (3, 1), (3, 3)),  # middles of the quarters
)
"""Top and left of a fixed crop, in quarters of the room that there is."""


def _short_side_jitter(spec: AugmentSpec, frame_hw: Pixels, chance: Sequence[float]) -> Axes:
    """A random crop of the frame at a random short side, as PySlowFast's `random_short_side_scale_jitter`."""
    least, most = spec.jitter
    step = min(frame_hw) / round(least + (most - least) * chance[2])
    out_height, out_width = spec.size_hw
    return _placed(frame_hw, (out_height * step, out_width * step), spec.size_hw, chance[:2])


def _placed(
    frame_hw: Pixels, box_hw: tuple[float, float], out_hw: Pixels, where: Sequence[float] | None
) -> Axes:
    """A box at a place drawn in [0, 1) down and across, or in the centre; never larger than the frame.

    What is drawn begins at an even pixel and is, as far as the frame goes, of even length: pixels share their
    chroma in pairs, and a crop that leaves none apart can be cut out of planes.
    """
    axes = []
    for size, box, out, share in zip(frame_hw, box_hw, out_hw, where or (None, None), strict=True):
        if share is None:
            length = _within(size, round(box))
            axes.append(_axis((size - length) // 2, length, out))
        else:
            length = _within(size, max(2 * round(box / 2), 2))
            axes.append(_axis(2 * int(share * ((size - length) // 2 + 1)), length, out))
    return axes[0], axes[1]


def _within(size: int, length: int) -> int:
    return max(1, min(size, length))


def _axis(start: int, length: int, out: int) -> Axis:
    return Axis(start, length, 0, out, length / out)


@lru_cache(maxsize=1024)  # a dataset has few sizes of frames, and each search would cost as much as a draw
def evaluation_crop(spec: AugmentSpec, frame_hw: Pixels, crop: int) -> Axes:
    """A crop of the frame resized to the spec's short side, as torchvision's `Resize` and `CenterCrop`.

    crop  0, 1, 2: first, centre, last along the longer side (the width, where they are equal)

    Where the resized frame is smaller than the crop, all of it is enlarged to fit; torchvision pads it.
    """
    height, width = frame_hw
    shortest, short = min(frame_hw), spec.short_side
    crops = (crop, 1) if height > width else (1, crop)
    y, x = (
        _crop_of_resized(size, short if size == shortest else int(short * size / shortest), out, which)
        for size, out, which in zip(frame_hw, spec.size_hw, crops, strict=True)
    )
    return y, x


def _crop_of_resized(size: int, grid: int, out: int, crop: int) -> Axis:
    """One axis of `size` pixels resized to `grid`, of which only `out` are kept: first, centre or last ones.

    The filter reaches past the crop, and its first pixel falls between two of the source; so resampling
    begins a little before, at the last output pixel whose edge is a source pixel's too.
    """
    if grid <= out:
        return _axis(0, size, out)
    first = (0, round((grid - out) / 2), grid - out)[crop]
    step = size / grid
    if step == 1:
        return _axis(first, out, out)
    reach = max(step, 1.0)
    begin = max(0, math.floor(first + 0.5 - reach / step))
    while abs(begin * step - round(begin * step)) > _PHASE_TOLERANCE_PX:
        begin -= 1
    start = round(begin * step)
    end = min(size, math.ceil((first + out - 0.5) * step + reach))
    return Axis(start, end - start, first - begin, out, step)


_RANDOM_CROPS: dict[str, Callable[[AugmentSpec, Pixels, Sequence[float]], Axes]] = {
    "random_resized_crop": _random_resized_crop,
    "multi_scale_crop": _multi_scale_crop,
    "short_side_jitter": _short_side_jitter,
}
_EVALUATION = ("centre", "three_crop")
