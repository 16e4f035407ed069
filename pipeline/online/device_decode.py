"""JPEGs to pixels on the device: nvJPEG on CUDA, libjpeg on the CPU, by the same code.

    EncodedBatch (bytes, on the CPU) -> decode -> cut, resize, mirror -> ClipBatch, uint8 (B, T, H, W, C)

All that follows (`prefetch`, normalisation, `DeviceAugment`) is as for pixels from the CPU.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.jpeg import JpegError, decode_jpeg, encode_jpeg
from pipeline.online.augment import DrawnAugment
from pipeline.online.collate import ClipBatch
from pipeline.online.encoded import EncodedBatch, EncodedClip, EncodedClipDataset
from pipeline.online.loader import ClipLoader

Decode: TypeAlias = Callable[[list[Tensor], torch.device], list[Tensor]]
"""JPEGs, uint8 (n,) each, on the CPU, to pixels on a device: uint8 (3, H, W) each, red first. RuntimeError
where one cannot be decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """What is decoded at the same time: it changes nothing in the pixels.

    It bounds the memory beyond the batch, to some seven times `pixel_bytes` and a clip as float32.
    """

    jpegs: int = 128
    """JPEGs in one call of the decoder. nvJPEG gains by batches of up to a hundred: pytorch/vision#8496 has
    600 us for one, 130 each for 100 and 128 each for 1,000 (A100)."""
    pixel_bytes: int = 128 << 20
    """Bytes of the pixels that they become; a single JPEG may have more."""

    def __post_init__(self) -> None:
        if self.jpegs < 1 or self.pixel_bytes < 1:
            raise ValueError(f"jpegs and pixel_bytes must be >= 1, got {self}")


class DecodeCounters(NamedTuple):
    """What a `DecodedBatches` has decoded so far."""

    batches: int
    jpegs: int
    jpeg_bytes: int
    """Bytes that workers moved in place of pixels."""
    on_host: int
    """JPEGs that the device's decoder could not take (CMYK, say) and the host decoded in its place."""


class DecodedBatches:
    """The batches of a loader of `EncodedClipDataset`, decoded on `device`: a loader for `prefetch`.

        for batch in prefetch(DecodedBatches(loader, device), device): ...

    Frames are uint8 (B, T, H, W, 3) on the device, cut and mirrored as `ClipDataset` has it for the same
    refs; all else is where the loader left it. Always resized in RGB: on the CPU pixels differ from those of
    `AugmentSpec(resize_in="rgb")` by rounding alone, 0.13 levels on the average, one at most (16 clips of
    UCF101, to 112 px). On CUDA nvJPEG repeats chroma (4:2:0) where libjpeg interpolates it, which shows where
    colours meet; the tests marked `gpu` allow 3 levels on the average.

    decode  `decode_by_torchvision` or `decode_by_torchcodec`; None: the first that is installed
    limits  how much is decoded at the same time

    Damage that the decoder reports raises StoreError with frame and video; which one it was is found by
    decoding them singly. Damage inside a JPEG's data that a decoder passes over in silence comes out as
    pixels; `make verify` finds it. What the device's decoder refuses and the host's can read (CMYK) is
    decoded on the host, and counted. PipelineError at once where the device cannot decode JPEGs at all.

    On CUDA it works on a stream of its own and waits for it, since nvJPEG writes without regard to the order
    of work on a stream (pytorch/torchcodec#1634, pytorch/vision#9606): before each call nothing may be queued
    there that still reads memory which the decoder can be given. No batch waits for the user's stream.
    nvJPEG's own memory is kept for the life of the process, for one device; before CUDA 11.6 it leaks.
    """

    def __init__(
        self,
        loader: ClipLoader,
        device: str | torch.device,
        *,
        decode: Decode | None = None,
        limits: DecodeLimits = DecodeLimits(),
    ) -> None:
        dataset: object = loader.dataset
        if not isinstance(dataset, EncodedClipDataset):
            raise ValueError(f"the loader's dataset must be an EncodedClipDataset, got {dataset!r}")
        self.device = _with_index(torch.device(device))
        self._loader = loader
        self._dataset = dataset
        self._decode = decode or find_decoder()
        self._limits = limits
        self._counts = [0] * len(DecodeCounters._fields)
        self._probe()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[ClipBatch]:
        yield from map(self._marked, self.batches())  # no name here holds on to a batch while the user works

    def batches(self) -> Iterator[ClipBatch]:
        """The batches of an epoch, decoded when they are asked for, without counting them as delivered."""
        yield from map(self.decoded, cast(Iterator[EncodedBatch], self._loader.batches()))

    def mark_delivered(self, batch: ClipBatch) -> None:
        """Count a batch of `batches()`: the user has it."""
        self._loader.mark_delivered(batch)

    def _marked(self, batch: ClipBatch) -> ClipBatch:
        self.mark_delivered(batch)
        return batch

    def counters(self) -> DecodeCounters:
        """What was decoded so far."""
        return DecodeCounters(*self._counts)

    def decoded(self, batch: EncodedBatch) -> ClipBatch:
        """One batch, safe to use on the stream that is current."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._decoded_beside(batch, _decode_stream(self.device))
        return batch.with_pixels(self._pixels(batch))

    def _decoded_beside(self, batch: EncodedBatch, stream: torch.cuda.Stream) -> ClipBatch:
        with torch.cuda.stream(stream):
            frames = self._pixels(batch)
            ready = stream.record_event()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        frames.record_stream(current)  # else its memory is given out again while it is still read there
        return batch.with_pixels(frames)

    def _pixels(self, batch: EncodedBatch) -> Tensor:
        """uint8 (B, T, H, W, 3)"""
        clips, shown = batch.clips(), batch.shown
        num_jpegs = sum(len(clip.jpegs) for clip in clips)
        size_hw = clips[0].drawn.size_hw
        made = torch.empty((num_jpegs, *size_hw, 3), dtype=torch.uint8, device=self.device)
        first = 0
        for group in split_groups(clips, self._limits):
            for run, pixels in zip(group, self._decode_group(clips, group), strict=True):
                count = run.stop - run.start
                made[first : first + count] = resize_frames(pixels, clips[run.clip].drawn)
                first += count
        self._count(batches=1, jpegs=num_jpegs, jpeg_bytes=batch.frames.numel())
        if torch.equal(shown.flatten(), torch.arange(num_jpegs)):
            return made.view(*shown.shape, *size_hw, 3)
        return made[shown.to(self.device)]

    def _decode_group(self, clips: Sequence[EncodedClip], group: Sequence["Run"]) -> Iterator[Tensor]:
        """Pixels of each run, uint8 (n, 3, H, W)."""
        jpegs = [jpeg for run in group for jpeg in clips[run.clip].jpegs[run.start : run.stop]]
        try:
            pixels = iter(self._call(jpegs))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            pixels = (
                self._decode_singly(clips[run.clip], place)
                for run in group
                for place in range(run.start, run.stop)
            )
        for run in group:
            clip = clips[run.clip]
            several = [next(pixels) for _ in range(run.start, run.stop)]
            for place, one in enumerate(several, run.start):
                self._check_size(clip, place, one)
            yield torch.stack(several)

    def _decode_singly(self, clip: EncodedClip, place: int) -> Tensor:
        """One JPEG of a group in which one could not be decoded; by the host where only the device cannot."""
        jpeg = clip.jpegs[place]
        try:
            return self._call([jpeg])[0]
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            try:
                pixels = decode_jpeg(jpeg.numpy().data)
            except JpegError as error:
                self._dataset.raise_bad(clip.video, clip.numbers[place], error)
        self._count(on_host=1)
        # (H, W, C) -> (C, H, W)
        return torch.from_numpy(pixels).to(self.device).permute(2, 0, 1)

    def _call(self, jpegs: list[Tensor]) -> list[Tensor]:
        self._drain()
        return self._decode(jpegs, self.device)

    def _drain(self) -> None:
        """Wait until nothing on this stream reads memory that was let go of: the decoder may be given it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _check_size(self, clip: EncodedClip, place: int, pixels: Tensor) -> None:
        if pixels.shape != (3, *clip.part_hw):
            found = f"decoded to {tuple(pixels.shape)}, expected {(3, *clip.part_hw)}"
            self._dataset.raise_bad(clip.video, clip.numbers[place], JpegError(found))

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self._counts[DecodeCounters._fields.index(name)] += number

    def _probe(self) -> None:
        """PipelineError unless a JPEG that is whole can be decoded: what fails later is then the JPEG's."""
        jpeg = encode_jpeg(np.full((32, 32, 3), 128, np.uint8), quality=90, restart_mcus=1)
        try:
            self._call([torch.frombuffer(bytearray(jpeg), dtype=torch.uint8)])
        except RuntimeError as error:
            name = getattr(self._decode, "__name__", repr(self._decode))
            reason = str(error).partition("\n")[0]
            raise PipelineError(
                f"device {self.device}: {name} cannot decode a JPEG there ({reason}); use ClipDataset, which "
                "decodes on the CPU"
            ) from error


def _with_index(device: torch.device) -> torch.device:
    """With CUDA's number: torchvision makes, and leaks, a decoder for each name that a device has."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise PipelineError(f"device {device}: torch sees no CUDA GPU; use 'cpu', or ask `make doctor` why")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@functools.cache
def _decode_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch keeps freed memory apart by stream, so a new one would need new memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# Decoders.


def decode_by_torchvision(jpegs: list[Tensor], device: torch.device) -> list[Tensor]:
    """`torchvision.io.decode_jpeg`: nvJPEG on CUDA. Deprecated since 0.29 in favour of torchcodec's."""
    from torchvision.io import decode_jpeg as decode  # costs a worker a second, and only the device needs it

    return cast(list[Tensor], decode(jpegs, mode="RGB", device=device))


def decode_by_torchcodec(jpegs: list[Tensor], device: torch.device) -> list[Tensor]:
    """`torchcodec.decoders.decode_jpeg`, from torchcodec 0.17 on. It turns pictures upright by their EXIF,
    which the frames of this project do not have and no other decoder here looks at."""
    from torchcodec.decoders import decode_jpeg as decode

    return cast(list[Tensor], decode(jpegs, mode="RGB", device=device))


def find_decoder() -> Decode:
    """torchvision's where it still has one, else torchcodec's; PipelineError where there is neither."""
    import torchvision.io

    if hasattr(torchvision.io, "decode_jpeg"):
        return decode_by_torchvision
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise PipelineError(
            f"torchvision {torchvision.__version__} has no decode_jpeg and torchcodec cannot be imported "
            f"({error}): pip install torchcodec"
        ) from error
    return decode_by_torchcodec


# What is decoded at the same time.


class Run(NamedTuple):
    """JPEGs of a clip that are decoded in one call: [start, stop) of its own."""

    clip: int
    start: int
    stop: int


def split_groups(clips: Sequence[EncodedClip], limits: DecodeLimits) -> Iterator[list[Run]]:
    """All JPEGs of a batch in their order, in groups within the limits; at least one JPEG in each."""
    group: list[Run] = []
    jpegs = size = 0
    for place, clip in enumerate(clips):
        each, start = 3 * clip.part_hw[0] * clip.part_hw[1], 0
        while start < len(clip.jpegs):
            room = min(limits.jpegs - jpegs, (limits.pixel_bytes - size) // each)
            if room < 1 and group:
                yield group
                group, jpegs, size = [], 0, 0
                continue
            stop = min(start + max(room, 1), len(clip.jpegs))
            group.append(Run(place, start, stop))
            jpegs, size, start = jpegs + stop - start, size + (stop - start) * each, stop
    if group:
        yield group


# Pixels.


def resize_frames(pixels: Tensor, drawn: DrawnAugment) -> Tensor:
    """`apply_augment` on any device: uint8 (T, 3, H, W) -> uint8 (T, out height, out width, 3).

    In float32, since torch's filter takes uint8 on the CPU alone. Within one level of `apply_augment`.
    """
    y, x = drawn.y, drawn.x
    top, left, height, width = drawn.box
    box = pixels[:, :, top : top + height, left : left + width].to(
        torch.float32, memory_format=torch.contiguous_format
    )
    resample = _ANTIALIASED if drawn.antialias else _PLAIN
    made = resample(box, [y.grid, x.grid], False, 1 / y.step, 1 / x.step)
    kept = made[:, :, y.skip : y.skip + y.out, x.skip : x.skip + x.out]
    levels = (kept.flip(-1) if drawn.flip else kept).round().to(torch.uint8)
    return cast(Tensor, levels.permute(0, 2, 3, 1))  # (T, C, H, W) -> (T, H, W, C)


# What torch.nn.functional.interpolate calls, which cannot be told the step.
_ANTIALIASED = torch.ops.aten._upsample_bilinear2d_aa.default
_PLAIN = torch.ops.aten.upsample_bilinear2d.default
