"""Clips to a batch: a NamedTuple, so that torch's pinning and its queues reach inside."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from pipeline.errors import PipelineError
from pipeline.online.lending import lent_memory, sent_by_value
from pipeline.online.sources import pad_ragged


class CollateError(PipelineError):
    """Samples that cannot be one batch."""


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
    extras: dict[str, Any]
    """`seed`: int64 (), the clip's own; and for each further source a tensor, or a dict of them."""


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
    extras: dict[str, Any]
    """`seed`: int64 (B,), each clip's own; and for each further source a tensor (B, ...), or a dict of them:
    see `collate_extras`."""


def empty_frames(clips: int, frames: int, height: int, width: int) -> Tensor:
    """uint8 (B, T, H, W, 3) to decode into, without a value yet; in a worker in its loader's memory."""
    shape = clips, frames, height, width, 3
    lent = lent_memory(shape)
    return _empty(shape, torch.uint8) if lent is None else lent


def collate_clips(clips: Sequence[Clip] | ClipBatch, *, ragged: Collection[str] = ()) -> ClipBatch:
    """Stack clips; a batch, which a `ClipDataset` makes itself, passes as it is.

    Their extras by `collate_extras`, which says what `ragged` means. CollateError where clips do not fit.
    """
    batch = clips if isinstance(clips, ClipBatch) else _stack_clips(clips, ragged)
    if get_worker_info() is None:
        return batch
    return batch._replace(
        labels=sent_by_value(batch.labels),
        videos=sent_by_value(batch.videos),
        starts=sent_by_value(batch.starts),
        times_s=sent_by_value(batch.times_s),
        extras=map_extras(sent_by_value, batch.extras),
    )


def _stack_clips(clips: Sequence[Clip], ragged: Collection[str]) -> ClipBatch:
    names = [f"row {clip.video} from frame {clip.start}" for clip in clips]
    shapes = {tuple(clip.frames.shape): name for clip, name in zip(clips, names, strict=True)}
    if len(shapes) > 1:
        found = ", ".join(f"{shape} ({name})" for shape, name in sorted(shapes.items())[:2])
        raise CollateError(f"clips of different shapes cannot be one batch: {found}; give augment=")
    return ClipBatch(
        frames=torch.stack([clip.frames for clip in clips]),
        labels=torch.tensor([clip.label for clip in clips]),
        videos=torch.tensor([clip.video for clip in clips]),
        starts=torch.tensor([clip.start for clip in clips]),
        times_s=torch.stack([clip.times_s for clip in clips]),
        extras=collate_extras([clip.extras for clip in clips], names=names, ragged=ragged),
    )


def collate_extras(
    samples: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, ragged: Collection[str] = ()
) -> dict[str, Any]:
    """What comes beside the frames of B clips, key by key: tensors (B, ...), or dicts of such tensors.

    samples  the same keys in each; a value is an array, a tensor on the CPU or a number, or a mapping or
             NamedTuple (`SourceSample`) of such values, in which None stands for a key that is not there
    names    what errors call the samples beside their position: the video, say
    ragged   keys (`imu`, `left.imu`) whose first axis is padded, also where all of this batch happen to be
             equally long: so what a batch holds never depends on chance

    A value is stacked: it keeps its dtype, and all must be of one shape. A ragged one becomes a dict:

    values   (B, L, ...): each sample's own (l, ...), then zeros; L is the longest l of the batch
    lengths  int64 (B,): each l
    mask     bool (B, L): True where there is a value, and where the sample's own mask, if it brings one as a
             `SourceSample` does, is True as well
    and what else the sample has, as `times_s` (l,), padded in the same way

    A mapping that has `values` and a single `lengths`, as one clip of such a batch has (`take_extras`), is
    ragged without being named. CollateError names the sample, the key and both shapes.

    >>> batch = collate_extras([{"imu": np.array([1.0, 2.0])}, {"imu": np.array([3.0])}], ragged=["imu"])
    >>> batch["imu"]["values"].tolist(), batch["imu"]["lengths"].tolist()
    ([[1.0, 2.0], [3.0, 0.0]], [2, 1])
    """
    if not samples:
        raise ValueError("no samples to collate")
    if names is not None and len(names) != len(samples):
        raise ValueError(f"{len(names)} names for {len(samples)} samples")
    collator = _Collator(names, ragged)
    batch = collator.mapping(samples, "")
    if missing := sorted(set(ragged) - collator.found):
        raise CollateError(
            f"ragged names {', '.join(missing)}, but the extras are {', '.join(batch) or 'none'}"
        )
    return batch


def take_extras(extras: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Those of one clip of a batch, without its padding: what `collate_extras` makes the batch of again."""
    return {name: _taken(part, place) for name, part in extras.items()}


def map_extras(function: Callable[[Tensor], Tensor], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The same dict, and dicts inside it, with what a function makes of each tensor."""
    return {
        name: map_extras(function, part) if isinstance(part, Mapping) else function(part)
        for name, part in extras.items()
    }


def _taken(part: Any, place: int) -> Any:
    if not isinstance(part, Mapping):
        return part[place]
    if not _has_lengths(part, ndim=1):
        return take_extras(part, place)
    length = int(part["lengths"][place])
    cut = {name: values[place, :length] for name, values in part.items() if name != "lengths"}
    return {**cut, "lengths": part["lengths"][place]}


def _has_lengths(members: Mapping[str, Any], *, ndim: int) -> bool:
    """Whether these are padded windows: of a batch (ndim 1), or of one clip (0)."""
    return {"values", "lengths"} <= members.keys() and np.ndim(members["lengths"]) == ndim


@dataclass(frozen=True, slots=True)
class _Collator:
    """What holds for every key of a batch. A `key` is dotted; that of the samples themselves is empty."""

    names: Sequence[str] | None
    ragged: Collection[str]
    found: set[str] = field(default_factory=set)
    """What of `ragged` the samples have."""

    def mapping(self, samples: Sequence[Any], key: str) -> dict[str, Any]:
        """Mappings or NamedTuples side by side."""
        members = [self._members(sample, key, place) for place, sample in enumerate(samples)]
        for place, ours in enumerate(members):
            if ours.keys() != members[0].keys():
                raise self._error(
                    key, place, f"holds {_listed(ours)}", f"{_listed(members[0])}, as the first"
                )
        if key and (key in self.ragged or _has_lengths(members[0], ndim=0)):
            return self._padded(members, key)
        return {
            name: self._value([each[name] for each in members], f"{key}.{name}" if key else name)
            for name in members[0]
        }

    def _value(self, values: Sequence[Any], key: str) -> Any:
        if key in self.ragged:
            self.found.add(key)
        if _is_group(values[0]):
            return self.mapping(values, key)
        if key in self.ragged:
            return self._padded([{"values": value} for value in values], key)
        arrays = self._alike(values, key, from_axis=0)
        out = _empty((len(arrays), *arrays[0].shape), torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype)
        np.stack(arrays, out=out.numpy())
        return out

    def _padded(self, members: Sequence[Mapping[str, Any]], key: str) -> dict[str, Tensor]:
        if "values" not in members[0]:
            raise CollateError(f"extras.{key} is ragged and has no values to pad, only {_listed(members[0])}")
        own = [name for name in members[0] if name not in ("mask", "lengths")]
        columns = {
            name: self._alike([each[name] for each in members], f"{key}.{name}", from_axis=1) for name in own
        }
        values = columns["values"]
        masks = [_mask_of(each, array) for each, array in zip(members, values, strict=True)]
        columns["mask"] = self._alike(masks, f"{key}.mask", from_axis=1)
        for name, arrays in columns.items():
            for place, (array, beside) in enumerate(zip(arrays, values, strict=True)):
                if len(array) != len(beside):
                    raise self._error(
                        f"{key}.{name}", place, f"is {_form(array)}", f"{len(beside)} as of values"
                    )
        padded = {name: torch.from_numpy(pad_ragged(arrays).values) for name, arrays in columns.items()}
        return {**padded, "lengths": torch.tensor([len(array) for array in values])}

    def _members(self, sample: Any, key: str, place: int) -> dict[str, Any]:
        """By name; what is None is not there."""
        if not _is_group(sample):
            raise self._error(key, place, f"is {_form(sample)}", "a mapping, as the first")
        named = sample if isinstance(sample, Mapping) else sample._asdict()
        return {name: value for name, value in named.items() if value is not None}

    def _alike(self, values: Sequence[Any], key: str, *, from_axis: int) -> list[np.ndarray]:
        """Arrays of one dtype and, from an axis on, of one shape."""
        arrays = [self._array(value, key, place) for place, value in enumerate(values)]
        first = arrays[0]
        for place, array in enumerate(arrays):
            if array.ndim < from_axis:
                raise self._error(key, place, f"is {_form(array)}", "an axis along which it is ragged")
            if array.dtype != first.dtype or array.shape[from_axis:] != first.shape[from_axis:]:
                wanted = f"{_form(first)}, as {self._sample(0)}"
                is_length = array.dtype == first.dtype and array.shape[1:] == first.shape[1:]
                advice = f"; pad by ragged=[{key.removesuffix('.values')!r}]" if is_length else ""
                raise self._error(key, place, f"is {_form(array)}", wanted + advice)
        return arrays

    def _array(self, value: Any, key: str, place: int) -> np.ndarray:
        """In this machine's byte order, of a dtype that torch has."""
        try:
            plain = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            array = plain.astype(plain.dtype.newbyteorder("="), copy=False)
            torch.from_numpy(np.empty(0, array.dtype))
        except (TypeError, ValueError) as error:
            found = f"is {_form(value)}"
            raise self._error(key, place, found, "numbers or an array of them that torch can hold") from error
        return array

    def _error(self, key: str, place: int, found: str, expected: str) -> CollateError:
        where = f"extras.{key}" if key else "extras"
        return CollateError(f"{self._sample(place)}: {where} {found}, expected {expected}")

    def _sample(self, place: int) -> str:
        return f"sample {place}" + (f" ({self.names[place]})" if self.names else "")


def _is_group(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "_asdict")


def _mask_of(members: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """A sample's own mask, bool (l,) or of more axes; a single one holds for all its values."""
    mask = np.asarray(members.get("mask", True))
    return mask if mask.ndim else np.full(len(values), mask)


def _form(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {tuple(shape)}"


def _listed(members: Mapping[str, Any]) -> str:
    return ", ".join(map(str, members)) or "nothing"


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a batch, without a value yet.

    In a worker it lies in shared memory from the start, as torch's own `default_collate` has it, so
    that handing it to the main process copies nothing.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None or not num_bytes:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
