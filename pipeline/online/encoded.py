"""Clips as the JPEGs that their crops need: what workers send where the device decodes.

    refs -> EncodedClipDataset (in a worker: bytes are cut and moved) -> EncodedBatch -> device_decode

The same refs, draws and boxes as of a `ClipDataset`; only who turns bytes into pixels is another.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.jpeg import JpegError, Regions, crop_jpegs, decode_jpeg
from pipeline.manifest import Manifest
from pipeline.online.augment import AugmentSpec, DrawnAugment
from pipeline.online.collate import Clip, ClipBatch, empty_frames
from pipeline.online.crops import Axis
from pipeline.online.dataset import ClipDataset, _Ahead, _Read
from pipeline.online.samplers import ClipRef
from pipeline.online.sources import Source
from pipeline.online.store import Store
from pipeline.online.windows import WindowSpec

_JPEG_BYTES_PER_PIXEL = 0.5
"""What `clip_bytes` reckons with: frames of 30 real videos at the default quality have 0.02 to 0.35 on the
largest of their frames."""
_PREFIX = "jpeg_"
"""Of the extras that hold the numbers of an `EncodedBatch`."""


class EncodedBatch(ClipBatch):
    """A `ClipBatch` whose frames are still JPEGs: it passes loader, pinning and counting as any other.

    frames  uint8 (N,): the bytes of all JPEGs of the batch, one after the other, in one piece of memory
    extras  as of any batch, and where the JPEGs are and what is to be made of them, until they are decoded:

    jpeg_ends     int64 (J,): where each of them ends in `frames`
    jpeg_numbers  int64 (J,): its number in its video
    jpeg_counts   int64 (B,): JPEGs of each clip
    jpeg_shown    int64 (B, T): which JPEG of the batch each frame is
    jpeg_drawn    float64 (B, 14): see `pack_drawn`
    """

    @property
    def shown(self) -> Tensor:
        """int64 (B, T): which JPEG of the batch each frame is; a short video shows one more often."""
        return self._numbers("shown")

    def _numbers(self, name: str) -> Tensor:
        numbers: Tensor = self.extras[_PREFIX + name]
        return numbers

    def clips(self) -> list["EncodedClip"]:
        """The clips, their JPEGs views into `frames`."""
        views = [self.frames[start:end] for start, end in pairwise([0, *self._numbers("ends").tolist()])]
        numbers = self._numbers("numbers").tolist()
        bounds = pairwise(accumulate(self._numbers("counts").tolist(), initial=0))
        made = []
        for video, row, (first, stop) in zip(
            self.videos.tolist(), self._numbers("drawn").tolist(), bounds, strict=True
        ):
            part_hw, drawn = unpack_drawn(row)
            made.append(EncodedClip(video, views[first:stop], numbers[first:stop], part_hw, drawn))
        return made

    def with_pixels(self, frames: Tensor) -> ClipBatch:
        """The batch with decoded frames, uint8 (B, T, H, W, 3), in place of bytes."""
        extras = {name: part for name, part in self.extras.items() if not name.startswith(_PREFIX)}
        return ClipBatch(frames, self.labels, self.videos, self.starts, self.times_s, extras)


class EncodedClip(NamedTuple):
    """One clip of an `EncodedBatch`."""

    video: int
    """Row of the manifest that the dataset was given."""
    jpegs: list[Tensor]
    """uint8 (n,) each, on the CPU: its frames, each once."""
    numbers: list[int]
    """Number of each in its video."""
    part_hw: tuple[int, int]
    """Height and width (pixels) of what each decodes to."""
    drawn: DrawnAugment
    """What is made of those pixels."""


def pack_drawn(part_hw: tuple[int, int], drawn: DrawnAugment) -> list[float]:
    """Part and draw as 14 numbers: height and width, then the fields of y and of x, flip, antialias."""
    return [*part_hw, *drawn.y, *drawn.x, drawn.flip, drawn.antialias]


def unpack_drawn(row: Sequence[float]) -> tuple[tuple[int, int], DrawnAugment]:
    """What `pack_drawn` was given: float64 holds every size and step exactly.

    >>> drawn = DrawnAugment(Axis(3, 9, 0, 4, 2.25), Axis(0, 4, 0, 4, 1.0), True, False)
    >>> unpack_drawn(pack_drawn((16, 32), drawn)) == ((16, 32), drawn)
    True
    """
    height, width, *axes, flip, antialias = row
    y, x = (
        Axis(int(start), int(length), int(skip), int(out), step)
        for start, length, skip, out, step in (axes[:5], axes[5:])
    )
    return (int(height), int(width)), DrawnAugment(y, x, bool(flip), bool(antialias))


class _Cut(NamedTuple):
    """What a worker sends of a clip."""

    clip: _Read
    regions: Regions
    numbers: np.ndarray
    """int64 (n,): frames of the video, each once."""
    places: np.ndarray
    """int64 (T,): which of them each frame of the clip is."""
    drawn: DrawnAugment


class EncodedClipDataset(ClipDataset):
    """The clips of a `ClipDataset`, as JPEGs: of each frame the part that the crop needs.

    It pays where the cores that decode are the bottleneck and a fast GPU has room, since a worker only reads
    and cuts: for 16 clips of UCF101 (16 frames, to 112 px) that is an eighth of its work (23 and 188 ms, best
    of 7, one core, one run), and 2.6 MB leave it in place of 9.6. Where the cores keep up, `ClipDataset` is
    the better choice: its pixels are exact, and the GPU keeps to the model. How fast a GPU decodes
    `make bench ARGS=online` says where there is one (`ours_nvjpeg`); no figure from a GPU is quoted here.
    On the CPU this way is for tests: it takes twice the time of `ClipDataset`.

        dataset = EncodedClipDataset(train, store, window, augment=AugmentSpec(size_px=112))
        loader = build_loader(dataset, sampler, LoaderSpec(batch_size=32, pin=False))
        for batch in prefetch(DecodedBatches(loader, "cuda"), "cuda"):
            ...

    `pin=False` since the decoder reads from any memory of the host. `augment.reduce` is not followed: all
    pixels of a part are decoded. A dataset of this kind gives batches only (`EncodedBatch`), and takes what
    `ClipDataset` takes but for what needs pixels in a worker: `transform` and `reuse_cache`.

    on_bad  as for `ClipDataset`, for what a worker can see without decoding: a frame that is missing, cut
            short, of another size, or lacks markers. Damage that only the decoder sees is found on the
            device, where nothing can be put in its place any more: there it raises, whatever `on_bad` is
    """

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        window: WindowSpec,
        *,
        augment: AugmentSpec,
        on_bad: Literal["raise", "skip"] = "raise",
        max_skips: int = 100,
        threads: int = 1,
        readers: int = 0,
        sources: Mapping[str, Source] | None = None,
        row_extras: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        for name in (*(sources or {}), *(row_extras or {})):
            if name.startswith(_PREFIX):
                raise ValueError(f"extras named {_PREFIX}... are this dataset's own: rename {name!r}")
        super().__init__(
            manifest,
            store,
            window,
            augment=augment,
            on_bad=on_bad,
            max_skips=max_skips,
            threads=threads,
            readers=readers,
            sources=sources,
            row_extras=row_extras,
        )
        pixels = int((manifest.column("width").astype(np.int64) * manifest.column("height")).max(initial=0))
        self.clip_bytes = int(window.frames * pixels * _JPEG_BYTES_PER_PIXEL)
        """Bytes that the JPEGs of the largest clip have at most, by experience."""

    def __getitem__(self, ref: ClipRef | int) -> Clip:
        raise PipelineError(
            f"{type(self).__name__} gives batches of JPEGs and no single clip: use ClipDataset for {ref}"
        )

    @property
    def has_size(self) -> bool:
        """No: bytes differ from clip to clip."""
        return False

    def __getitems__(self, refs: Sequence[ClipRef | int]) -> EncodedBatch:
        """The JPEGs of a batch, in the memory that the main process will get."""
        asked = [ref if isinstance(ref, tuple) else self._ref_at(ref) for ref in refs]
        with self._fetched(asked) as fetched:
            cuts: list[_Cut] = self._map(self._cut_or_replaced, asked, fetched)
        with self.stage("batch"):
            frames, jpegs = _joined(cuts)
        beside = self._beside([cut.clip for cut in cuts])
        beside["extras"] |= jpegs
        return EncodedBatch(frames, **beside)

    def raise_bad(self, video: int, number: int, error: Exception) -> NoReturn:
        """StoreError for a frame whose damage was seen on the device; `video` is the manifest's row."""
        raise self._bad_frame(self.columns.frames(video), number, error) from error

    def _cut_or_replaced(self, ref: ClipRef, ahead: _Ahead) -> _Cut:
        return self._or_replaced(ref, self._cut, ahead)[1]

    def _cut(self, clip: _Read) -> _Cut:
        """Each frame once, though a short video may show it more often; of each what the crop needs."""
        numbers, first, places = np.unique(clip.indices, return_index=True, return_inverse=True)
        drawn = clip.drawn
        if drawn is None:
            raise AssertionError("an EncodedClipDataset has an augment")
        try:
            with self.stage("decode"):  # stands in its place
                regions = crop_jpegs([clip.jpegs[place] for place in first], *drawn.box)
                _check_ends(regions)
        except JpegError as error:
            raise self._bad_frame(clip.key, int(numbers[error.place]), error) from error
        return _Cut(clip, regions, numbers, places, drawn.shifted(regions.top, regions.left))


def _check_ends(regions: Regions) -> None:
    """JpegError where a JPEG is cut short, which not every decoder of a GPU tells.

    After the end of image bytes may follow that mean nothing; so what ends otherwise is decoded to know.
    """
    for place, jpeg in enumerate(regions.jpegs):
        if bytes(jpeg[-2:]) != b"\xff\xd9":
            try:
                decode_jpeg(jpeg)
            except JpegError as error:
                raise JpegError(str(error), place) from error


def _joined(cuts: Sequence[_Cut]) -> tuple[Tensor, dict[str, Tensor]]:
    """All bytes in one piece, uint8 (N,), in a worker in shared memory; and what extras say of them."""
    jpegs = [np.frombuffer(jpeg, np.uint8) for cut in cuts for jpeg in cut.regions.jpegs]
    ends = np.cumsum([len(jpeg) for jpeg in jpegs])
    total = int(ends[-1])
    buffer = empty_frames(1, 1, 1, -(-total // 3)).view(-1)[:total]
    np.concatenate(jpegs, out=buffer.numpy())
    counts = [len(cut.numbers) for cut in cuts]
    firsts = accumulate(counts[:-1], initial=0)
    shown = [first + cut.places for first, cut in zip(firsts, cuts, strict=True)]
    drawn = [pack_drawn((cut.regions.height, cut.regions.width), cut.drawn) for cut in cuts]
    return buffer, {
        _PREFIX + "ends": torch.from_numpy(ends),
        _PREFIX + "numbers": torch.from_numpy(np.concatenate([cut.numbers for cut in cuts])),
        _PREFIX + "counts": torch.tensor(counts),
        _PREFIX + "shown": torch.from_numpy(np.stack(shown)),
        _PREFIX + "drawn": torch.tensor(drawn, dtype=torch.float64),
    }
