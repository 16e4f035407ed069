"""The next batch on the GPU while this one is used; float and normalised there.

    uint8 (B, T, H, W, C) -> the device -> prepare -> float (B, C, T, H, W), channels last in memory

Frames lie in memory as they left the decoder, from there to the model: only the order in which the axes
are named changes. On the CPU the same arithmetic is done, one batch after the other.
"""

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.online.collate import ClipBatch, map_extras

Prepare: TypeAlias = Callable[[ClipBatch], ClipBatch]
"""From a batch on its device, frames uint8 (B, T, H, W, C), to what the model is given."""


@runtime_checkable
class CountedBatches(Protocol):
    """A loader that keeps count of what its user has been given, so as to resume there."""

    def batches(self) -> Iterator[ClipBatch]:
        """The batches of an epoch, without counting them."""

    def mark_delivered(self, batch: ClipBatch) -> None:
        """Count a batch of `batches()`: the user has it."""


# Float and normalised.


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize:
    """Prepares a batch: (x / 255 - mean) / std for each channel, in `dtype`.

    Mean and standard deviation are of RGB in [0, 1], and as they stand those of Kinetics-400, with which
    torchvision's video models were trained (`R3D_18_Weights.KINETICS400_V1.transforms()`).
    """

    mean: tuple[float, ...] = (0.43216, 0.394666, 0.37645)
    """Of each channel, in [0, 1]."""
    std: tuple[float, ...] = (0.22803, 0.22145, 0.216989)
    """Of each channel, above 0."""
    dtype: torch.dtype = torch.float32
    """Of the frames that come out; bfloat16 and float16 are rounded once, at the end."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.std or min(self.std) <= 0:
            raise ValueError(f"mean and std must be as many, and std above 0, got {self.mean} and {self.std}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point one, got {self.dtype}")

    def __call__(self, batch: ClipBatch) -> ClipBatch:
        """The batch with its frames normalised; the rest, and the frames given, stay as they are."""
        return batch._replace(frames=normalize_frames(batch.frames, self))


def normalize_frames(frames: Tensor, spec: Normalize) -> Tensor:
    """Frames as a model wants them: uint8 (B, T, H, W, C) -> `spec.dtype` (B, C, T, H, W).

    What comes back is channels last in memory (`torch.channels_last_3d`). ValueError for other frames.
    """
    if frames.dtype != torch.uint8 or frames.ndim != 5 or frames.shape[-1] != len(spec.mean):
        expected = f"uint8 (B, T, H, W, {len(spec.mean)})"
        raise ValueError(f"frames must be {expected}, got {frames.dtype} {tuple(frames.shape)}")
    width = frames.shape[-2] * frames.shape[-1]
    scale, bias = _row_constants(spec.mean, spec.std, frames.shape[-2], frames.device)
    normal = frames.to(torch.float32, memory_format=torch.contiguous_format)
    rows = normal.view(-1, width)
    torch.addcmul(bias, rows, scale, out=rows)
    return normal.to(spec.dtype).permute(0, 4, 1, 2, 3)  # (B, T, H, W, C) -> (B, C, T, H, W)


@functools.cache
def _row_constants(
    mean: tuple[float, ...], std: tuple[float, ...], num_pixels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Factor and summand for each value of a row of pixels: float32 (W * C,) each.

    A whole row, and not the C numbers: torch's loop on the CPU then runs over W * C values at a time
    instead of 3, which makes 8 clips of 16 x 112 x 112 in 1.8 ms instead of 7.6 (one core, best of 40).
    Kept for good, because making them on a GPU waits for its stream, and because several streams read
    them: memory that is never freed is never reused too early.
    """
    with torch.inference_mode(False):
        scale = torch.tensor([1 / (255 * s) for s in std], dtype=torch.float64)
        bias = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float64)
        rows = [row.to(torch.float32).repeat(num_pixels).to(device) for row in (scale, bias)]
    return rows[0], rows[1]


# One batch ahead.


def prefetch(
    batches: Iterable[ClipBatch] | CountedBatches,
    device: str | torch.device,
    *,
    prepare: Prepare | None = None,
    depth: int = 1,
) -> Generator[ClipBatch, None, None]:
    """Batches on `device`, prepared, in order; on CUDA `depth` of them ahead of the one in use.

    batches  a loader, or anything that iterates over `ClipBatch`; a batch's memory must not be written to
             again by whoever gave it. A loader that counts (`CountedBatches`) is told of a batch just
             before it is yielded, so that what was only read ahead is not counted
    prepare  from uint8 to what the model is given, on the device; None is `Normalize()`
    depth    batches read, copied and prepared before they are asked for; each is held on the device

    frames, labels, extras  on the device
    videos, starts, times_s, extras["seed"]  where they were: they tell of clips and are not computed with,
             and reading them from a GPU would make the host wait for it

    On CUDA, copy and preparation run on a stream of their own beside the user's step, which is any work
    on the stream that is current where the generator is advanced; a batch that is used on a further
    stream needs `record_stream`, as any tensor does. Pinned batches (`pin_memory=True`) are copied while
    the host goes on; others are copied, too, but the host waits. Elsewhere batches are prepared when they
    are asked for, by the same arithmetic, without threads; nothing would overlap.

    Closing the generator, or leaving it half way, lets go of all it holds. PipelineError where the device
    is CUDA and there is none.
    """
    if depth < 0:
        raise ValueError(f"depth must be >= 0, got {depth}")
    device, prepare = torch.device(device), prepare or Normalize()
    if device.type != "cuda":
        return _in_turn(batches, device, prepare)
    if not torch.cuda.is_available():
        raise PipelineError(f"device {device}: torch sees no CUDA GPU; use 'cpu', or ask `make doctor` why")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _ahead(batches, device, prepare, depth)


def to_device(batch: ClipBatch, device: torch.device) -> ClipBatch:
    """The batch with what a model computes with on `device`: frames, labels and extras but for the seeds.

    From pinned memory to a GPU the host does not wait for the copy. What is there already is not copied.
    """

    def moved(part: Tensor) -> Tensor:
        # The other way the host must wait: it would read what is not there yet.
        return part.to(device, non_blocking=device.type == "cuda")

    extras = map_extras(moved, batch.extras)
    if "seed" in extras:
        extras["seed"] = batch.extras["seed"]  # the host draws from it
    return batch._replace(frames=moved(batch.frames), labels=moved(batch.labels), extras=extras)


def _opened(
    batches: Iterable[ClipBatch] | CountedBatches,
) -> tuple[Iterator[ClipBatch], Callable[[ClipBatch], None]]:
    """An epoch's batches, and whom to tell that one is in the user's hands."""
    if isinstance(batches, CountedBatches):
        return batches.batches(), batches.mark_delivered
    return iter(batches), lambda batch: None


class _Pending(NamedTuple):
    """A batch on its way."""

    source: ClipBatch
    """As it was read. Kept till delivery, which counts it."""
    prepared: ClipBatch
    ready: torch.cuda.Event
    """When the GPU has done with it."""


def _in_turn(
    batches: Iterable[ClipBatch] | CountedBatches, device: torch.device, prepare: Prepare
) -> Generator[ClipBatch, None, None]:
    source, mark = _opened(batches)

    def delivered(batch: ClipBatch) -> ClipBatch:
        prepared = prepare(to_device(batch, device))
        mark(batch)
        return prepared

    yield from map(delivered, source)  # no name here holds on to a batch while the user works


def _ahead(
    batches: Iterable[ClipBatch] | CountedBatches, device: torch.device, prepare: Prepare, depth: int
) -> Generator[ClipBatch, None, None]:
    source, mark = _opened(batches)
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # for what `prepare` was made with
    pending: deque[_Pending] = deque()
    for batch in source:
        pending.append(_started(batch, device, prepare, side))
        if len(pending) > depth:
            yield _delivered(pending.popleft(), device, mark)
    while pending:
        yield _delivered(pending.popleft(), device, mark)


def _started(batch: ClipBatch, device: torch.device, prepare: Prepare, side: torch.cuda.Stream) -> _Pending:
    """Queue copy and preparation on the side stream, and do not wait for them.

    The host's pinned memory may be let go of at once: torch's allocator of it waits for copies under way.
    """
    there = _parts_on(batch, device)
    if there:  # made on the device, by work that is queued on the current stream
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        prepared = prepare(to_device(batch, device))
        ready = side.record_event()
    for part in there:
        part.record_stream(side)
    return _Pending(batch, prepared, ready)


def _delivered(pending: _Pending, device: torch.device, mark: Callable[[ClipBatch], None]) -> ClipBatch:
    """The prepared batch, counted, and safe to use and to free on the stream that is current."""
    current = torch.cuda.current_stream(device)
    current.wait_event(pending.ready)
    for part in _parts_on(pending.prepared, device):
        # It was allocated for the side stream, which would else reuse its memory as soon as the user lets
        # go of it, while the step that reads it is still queued on the current one.
        part.record_stream(current)
    mark(pending.source)
    return pending.prepared


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: torch keeps freed memory apart by stream, so a new one would need new memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _parts_on(batch: ClipBatch, device: torch.device) -> list[Tensor]:
    tensors = [batch.frames, batch.labels, batch.videos, batch.starts, batch.times_s]

    def note(part: Tensor) -> Tensor:
        tensors.append(part)
        return part

    map_extras(note, batch.extras)
    return [tensor for tensor in tensors if tensor.device == device]
