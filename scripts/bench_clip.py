"""`bench clip`: where the time of one clip goes, and what else was tried for each part of it.

All variants make the same clips in one process and one thread, in turns clip by clip, so that a machine that
changes its pace does so for all of them. What counts is the processor's time.
"""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.io import ImageReadMode
from torchvision.io import decode_jpeg as torchvision_decode_jpeg

from pipeline.errors import PipelineError
from pipeline.jpeg import Regions, crop_jpegs, decode_jpeg, decode_jpegs, encode_jpeg, jpeg_size
from pipeline.online import AugmentSpec, ClipDataset, ClipRef, WindowSpec
from pipeline.online.augment import DrawnAugment, apply_augment, draw_augment
from pipeline.online.planar import apply_to_planes
from pipeline.online.resample import resample
from pipeline.planes import Planes, decode_planes
from scripts.bench_clips import Stored, store_clips
from scripts.bench_common import fresh_folder, rotated
from scripts.bench_online import draw_refs
from scripts.bench_online_report import OnlineBench

_SIZE_PX = 112
_FRAMES = 16
_SPEC = AugmentSpec(size_px=_SIZE_PX, flip_p=0.0)
_INTERVALS = (1, 2, 4, 5)
"""MCUs between two restart markers, besides a whole row of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipBench:
    """What `clip` measures."""

    different_clips: int = 96
    """Clips that every variant makes in a round."""
    stored_short_side_px: int | None = None
    """Short side at which frames are stored; None for the videos' own."""

    def __post_init__(self) -> None:
        if self.different_clips < 1:
            raise ValueError(f"different_clips must be 1 or more, got {self.different_clips}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRow:
    """One way to do a part of the work, or all of it."""

    part: str
    name: str
    us_per_clip: float
    """Processor's time (microseconds): median over clips and rounds."""
    ratio: float
    """This / the part's first variant: median over clips and rounds."""


@dataclass(frozen=True, slots=True)
class _Clip:
    """A clip as its bytes, how it is cut, and what each step of the work makes of it."""

    ref: ClipRef
    jpegs: Sequence[Any]
    drawn: DrawnAugment
    part: Regions
    pixels: np.ndarray
    """uint8 (T, H, W, 3): the part, decoded."""
    planes: Planes
    """The part once more, as planes of luma and chroma."""
    other_parts: Mapping[str, Regions]
    """The same part of frames that have a marker elsewhere, by the interval in words."""

    @property
    def inside(self) -> DrawnAugment:
        """The draw, for the part that was cut out."""
        return self.drawn.shifted(self.part.top, self.part.left)


Variant = Callable[[_Clip], object]


def measure_clip(
    clips: Sequence[Path],
    bench: ClipBench,
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> list[VariantRow]:
    """Extract and pack, then time every variant on every clip."""
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    try:
        with fresh_folder(work_dir) as folder:
            on_case("frames")
            stored = store_clips(clips, folder, short_side_px=bench.stored_short_side_px)
            refs = draw_refs(stored.manifest, OnlineBench(clips_per_round=bench.different_clips))
            made = [_prepare(stored, ref) for ref in refs]
            rows: list[VariantRow] = []
            for part, variants in _variants(stored, made).items():
                on_case(part)
                rows += _time_variants(part, variants, made, rounds)
            return rows
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])


def _prepare(stored: Stored, ref: ClipRef) -> _Clip:
    record = stored.manifest[ref.video]
    frames = np.minimum(ref.start + np.arange(_FRAMES), record.num_frames - 1)
    jpegs = stored.store.read(record.frames, frames)
    drawn = draw_augment(_SPEC, ref.seed, height=record.height, width=record.width)
    part = crop_jpegs(jpegs, *drawn.box)
    pixels = np.empty((len(jpegs), part.height, part.width, 3), np.uint8)
    decode_jpegs(part.jpegs, pixels)
    planes = decode_planes(jpegs, *drawn.box)
    if planes is None:
        raise PipelineError(f"{record.frames}: frames without tiles; leave it out of --videos")
    return _Clip(ref, jpegs, drawn, part, pixels, planes, _other_parts(jpegs, drawn))


def _other_parts(jpegs: Sequence[Any], drawn: DrawnAugment) -> dict[str, Regions]:
    """Frames encoded anew with other intervals; those that do not divide the row are left out."""
    pictures = [np.asarray(simplejpeg.decode_jpeg(jpeg, "BGR")) for jpeg in jpegs]
    row = -(-pictures[0].shape[1] // 16)
    names = {mcus: f"a marker after {mcus} MCU{'s' * (mcus > 1)}" for mcus in _INTERVALS if row % mcus == 0}
    return {
        name: crop_jpegs(
            [encode_jpeg(picture, quality=90, restart_mcus=mcus) for picture in pictures], *drawn.box
        )
        for mcus, name in {**names, row: "a marker after a row"}.items()
    }


# The variants, by the part of the work that they do: the first is what the others are held against.


def _variants(stored: Stored, made: Sequence[_Clip]) -> dict[str, dict[str, Variant]]:
    pixels = int((stored.manifest.column("width") * stored.manifest.column("height")).max())
    memory = np.empty(_FRAMES * pixels * 3, np.uint8)
    out = np.empty((_FRAMES, _SIZE_PX, _SIZE_PX, 3), np.uint8)
    intervals = {name: partial(_decode_part_of, memory, name) for name in made[0].other_parts}
    return {
        "whole frames, decoded": {
            "simplejpeg, into memory that is there": lambda clip: _decode_each(clip, memory),
            "simplejpeg, fast upsampling: other pixels": lambda clip: _decode_fast(clip, memory),
            "torchvision": _decode_with_torchvision,
            "OpenCV": _decode_with_opencv,
            "Pillow": _decode_with_pillow,
            "FFmpeg, to planes": _decode_to_planes,
        },
        "what the crop needs": {
            "whole frames, decoded": lambda clip: _decode_each(clip, memory),
            "cut out of the bytes": lambda clip: crop_jpegs(clip.jpegs, *clip.drawn.box),
            **{f"decoded, {name}": variant for name, variant in intervals.items()},
            "cut out and decoded to planes": lambda clip: decode_planes(clip.jpegs, *clip.drawn.box),
        },
        "to the clip's size": {
            "antialiased, a clip at once": lambda clip: apply_augment(clip.pixels, clip.inside, out),
            "antialiased, frame by frame": lambda clip: _resize_each(clip, out),
            "not antialiased (OpenCV)": lambda clip: _resize_plain(clip, out),
            "planes, four frames as channels": lambda clip: apply_to_planes(clip.planes, clip.drawn, out),
            "planes, each by itself, no colours": _resize_single_planes,
        },
        "decoded and resized": {
            "all frames, then all frames": lambda clip: _in_groups(clip, memory, out, _FRAMES),
            "4 frames at a time": lambda clip: _in_groups(clip, memory, out, 4),
            "frame by frame": lambda clip: _in_groups(clip, memory, out, 1),
        },
        "a clip of the dataset": {
            "whole frames, decoded, and no more": lambda clip: _decode_each(clip, memory),
            **{
                name: partial(_ask, ClipDataset(stored.manifest, stored.store, WindowSpec(), augment=spec))
                for name, spec in _SPECS.items()
            },
        },
    }


_SPECS = {
    "as it comes": _SPEC,
    'resize_in="rgb"': AugmentSpec(size_px=_SIZE_PX, flip_p=0.0, resize_in="rgb"),
    "reduce=True": AugmentSpec(size_px=_SIZE_PX, flip_p=0.0, reduce=True),
    "antialias=False": AugmentSpec(size_px=_SIZE_PX, flip_p=0.0, antialias=False),
}


def _decode_each(clip: _Clip, memory: np.ndarray) -> None:
    for jpeg in clip.jpegs:
        decode_jpeg(jpeg, memory)


def _decode_fast(clip: _Clip, memory: np.ndarray) -> None:
    for jpeg in clip.jpegs:
        simplejpeg.decode_jpeg(jpeg, colorspace="RGB", fastupsample=True, buffer=memory)


def _decode_with_torchvision(clip: _Clip) -> None:
    for jpeg in clip.jpegs:
        torchvision_decode_jpeg(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), ImageReadMode.RGB)


def _decode_with_opencv(clip: _Clip) -> None:
    for jpeg in clip.jpegs:
        cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)


def _decode_with_pillow(clip: _Clip) -> None:
    for jpeg in clip.jpegs:
        Image.open(io.BytesIO(jpeg)).convert("RGB")


def _decode_to_planes(clip: _Clip) -> None:
    height, width = jpeg_size(clip.jpegs[0])
    decode_planes(clip.jpegs, 0, 0, height, width)


def _decode_part_of(memory: np.ndarray, name: str, clip: _Clip) -> None:
    part = clip.other_parts[name]
    decode_jpegs(part.jpegs, _shaped(memory, len(part.jpegs), part))


def _shaped(memory: np.ndarray, frames: int, part: Regions) -> np.ndarray:
    """uint8 (T, H, W, 3) for some frames of a part."""
    return memory[: frames * part.height * part.width * 3].reshape(frames, part.height, part.width, 3)


def _resize_each(clip: _Clip, out: np.ndarray) -> None:
    for frame, place in zip(clip.pixels, out, strict=True):
        apply_augment(frame[None], clip.inside, place[None])


def _resize_plain(clip: _Clip, out: np.ndarray) -> None:
    apply_augment(clip.pixels, clip.inside._replace(antialias=False), out)


def _resize_single_planes(clip: _Clip) -> None:
    y, x = clip.drawn.shifted(clip.planes.top, clip.planes.left)[:2]
    for plane, (down, across) in zip(clip.planes[:3], ((y, x), *[(y.halved(), x.halved())] * 2), strict=True):
        rows, columns = slice(down.start, down.start + down.length), slice(across.start, None)
        source = np.ascontiguousarray(plane[:, rows, columns][:, :, : across.length, None])
        made = np.empty((len(source), down.grid, across.grid, 1), np.uint8)
        resample(source, down, across, made, antialias=True)


def _in_groups(clip: _Clip, memory: np.ndarray, out: np.ndarray, size: int) -> None:
    for at in range(0, _FRAMES, size):
        pixels = _shaped(memory, size, clip.part)
        decode_jpegs(clip.part.jpegs[at : at + size], pixels)
        apply_augment(pixels, clip.inside, out[at : at + size])


def _ask(dataset: ClipDataset, clip: _Clip) -> None:
    dataset.__getitems__([clip.ref])


# Time.


def _time_variants(
    part: str, variants: Mapping[str, Variant], clips: Sequence[_Clip], rounds: int
) -> list[VariantRow]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for at, clip in enumerate(clips):
            for name in rotated(list(variants), number + at):
                begin = time.thread_time()
                variants[name](clip)
                seconds[name].append(time.thread_time() - begin)
    first = np.array(next(iter(seconds.values())))
    return [
        VariantRow(
            part=part,
            name=name,
            us_per_clip=float(np.median(taken)) * 1e6,
            ratio=float(np.median(np.array(taken) / first)),
        )
        for name, taken in seconds.items()
    ]


def format_clip(rows: Sequence[VariantRow]) -> str:
    """All figures for a person."""
    lines = [f"\n{'':<48}{'us a clip':>10}{'ratio':>8}"]
    for part, some in groupby(rows, lambda row: row.part):
        lines.append(part)
        lines += [f"    {row.name:<44}{row.us_per_clip:>10,.0f}{row.ratio:>8.2f}" for row in some]
    return "\n".join(lines)


def clip_json(rows: Sequence[VariantRow]) -> dict[str, Any]:
    """All figures for programs; the ratio is that of a bare decode to a clip of the dataset."""
    bare, ours, *_ = [row.us_per_clip for row in rows if row.part == "a clip of the dataset"]
    return {"rows": [asdict(row) for row in rows], "ratios": {"ceiling": bare / ours}}
