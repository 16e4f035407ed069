"""A loader like another one, whose batches carry what their worker took for them and when they were made."""

import copy
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.errors import PipelineError
from pipeline.measure.endless import EndlessSampler
from pipeline.online.collate import ClipBatch, map_extras
from pipeline.online.dataset import ClipDataset
from pipeline.online.loader import ClipLoader
from pipeline.online.samplers import ClipRef
from pipeline.timing import StageClock, StageSum


@dataclass(slots=True)
class Parcel:
    """A batch, and what there is to tell of it."""

    batch: ClipBatch | None
    begin_s: float
    """When its worker began with it; on the clock of `time.monotonic`, as all moments here."""
    made_s: float
    """When it was done."""
    stages: dict[str, StageSum]
    pin_s: float = 0.0
    """Seconds that pinning took."""

    def unpack(self) -> ClipBatch:
        """The batch, which is held no longer; the rest stays."""
        batch, self.batch = self.batch, None
        assert batch is not None, "it was taken out before"
        return batch

    def pin_memory(self) -> "Parcel":
        """What torch's thread calls in place of pinning the parts itself."""
        begin = time.monotonic()
        batch = self.unpack()
        pinned = batch._replace(
            frames=batch.frames.pin_memory(),
            labels=batch.labels.pin_memory(),
            videos=batch.videos.pin_memory(),
            starts=batch.starts.pin_memory(),
            times_s=batch.times_s.pin_memory(),
            extras=map_extras(Tensor.pin_memory, batch.extras),
        )
        return replace(self, batch=pinned, pin_s=time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a dataset gave, before it is collated."""

    clips: Any
    begin_s: float
    clock: StageClock


class _TimedDataset(Dataset[Any]):
    """A dataset with a clock at its stages; the one given is left without."""

    def __init__(self, dataset: ClipDataset) -> None:
        self._clock = StageClock()
        self._dataset = copy.copy(dataset)
        self._dataset.stage = self._clock

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, refs: Sequence[ClipRef]) -> _Begun:
        self._clock.take()  # what a batch that failed has left
        begin_s = time.monotonic()
        return _Begun(self._dataset.__getitems__(refs), begin_s, self._clock)


class _TimedCollate:
    """The last that a worker does."""

    def __init__(self, collate: Callable[[Any], ClipBatch]) -> None:
        self._collate = collate

    def __call__(self, begun: _Begun) -> Parcel:
        batch = self._collate(begun.clips)
        return Parcel(batch, begun.begin_s, time.monotonic(), begun.clock.take())


class ParcelLoader:
    """A loader of the same clips, with the same settings, without an end, in parcels.

    The loader given is as it was afterwards, its dataset and its sampler, too. PipelineError where its
    dataset is no `ClipDataset`.
    """

    def __init__(self, loader: ClipLoader) -> None:
        dataset: Any = loader.dataset
        if not isinstance(dataset, ClipDataset):
            raise PipelineError(
                f"cannot profile a loader of {type(dataset).__name__}: expected a ClipDataset"
            )
        self.dataset = dataset
        self.batch_size = loader.batch_size or 1
        self.backlog = loader.num_workers * (loader.prefetch_factor or 0)
        """Batches that workers may have ready before they are asked for."""
        self.pins = bool(loader.pin_memory)
        self._timed, self._sampler = _TimedDataset(dataset), EndlessSampler(loader.sampler)
        self._collate = _TimedCollate(loader.collate_fn)
        self._loader = ClipLoader(
            self._timed,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=cast(Any, self._collate),
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            generator=torch.Generator(),
        )
        self._loader.slot_bytes = loader.slot_bytes

    def parcels(self) -> Generator[Parcel, None, None]:
        """From the first on; workers end when this is closed."""
        yield from cast(Iterator[Parcel], self._loader.batches())

    def make_one(self) -> Parcel:
        """The first, made here and now; pinned if the loader's are."""
        refs = list(islice(self._sampler, self.batch_size))
        parcel = self._collate(self._timed.__getitems__(refs))
        return parcel.pin_memory() if self.pins else parcel
