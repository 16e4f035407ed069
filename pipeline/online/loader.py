"""A `LoaderSpec` to a `DataLoader`, with defaults from what this machine really grants."""

import atexit
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, cast, runtime_checkable

import cv2
import joblib
import torch
from torch.utils.data import DataLoader, Sampler

from pipeline.errors import PipelineError
from pipeline.files import free_bytes
from pipeline.online.collate import ClipBatch, collate_clips
from pipeline.online.dataset import ClipDataset
from pipeline.online.lending import BatchMemory, use_memory
from pipeline.online.packfile import format_bytes
from pipeline.online.ram import RAM_ROOT
from pipeline.online.samplers import ClipRef, EpochSampler, EvalSampler

StartMethod = Literal["fork", "forkserver", "spawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """How batches are made; nothing here changes what is in them."""

    batch_size: int = 32
    """Clips in a batch of one rank."""
    workers: int | None = None
    """Processes that decode; None: the cores that this process may use, shared among the machine's ranks.
    On 2 cores with nothing else to do 1 gave 0.51 of the clips/s of 2; 3 gave 1.08, 4 gave 1.04."""
    threads: int = 1
    """Threads that decode in each worker. Processes do more: 1 with 2 threads gave 0.97 of the clips/s of 2,
    since what Python does between two calls of the decoder holds the GIL."""
    readers: int = 0
    """Threads in each worker that fetch the bytes of a batch's next clips while others are decoded, for
    storage that keeps one waiting; 0: as many as the dataset was given, by default none."""
    prefetch: int = 2
    """Batches that each worker makes ahead. 1 gave 0.97 of the clips/s of 2, and 4 gave 0.99."""
    start_method: StartMethod = "forkserver"
    """How workers begin. `fork` copies locks that other threads hold, and OpenCV's threads, which do not
    exist in the copy; `forkserver` begins clean, and with torch loaded once for all."""
    persistent: bool = True
    """Whether workers live from epoch to epoch."""
    pin: bool | None = None
    """Whether batches are put into pinned memory; None: where there is CUDA."""
    drop_last: bool = False
    """Whether a last batch that is not full is left out."""
    ranks_on_machine: int = 1
    """Training processes that share this machine (torchrun's LOCAL_WORLD_SIZE)."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.prefetch < 1 or self.threads < 1 or self.ranks_on_machine < 1:
            raise ValueError(f"batch_size, prefetch, threads and ranks_on_machine must be >= 1, got {self}")
        if self.readers < 0 or (self.workers is not None and self.workers < 0):
            raise ValueError(f"workers and readers must be 0 or more, got {self.workers} and {self.readers}")

    @property
    def num_workers(self) -> int:
        """Worker processes that this machine gets."""
        if self.workers is not None:
            return self.workers
        # joblib knows of affinity and of cgroup quotas, which os.cpu_count does not.
        return max(int(joblib.cpu_count()) // self.ranks_on_machine // self.threads, 1)

    @property
    def pins(self) -> bool:
        """Whether batches are pinned."""
        return torch.cuda.is_available() if self.pin is None else self.pin

    def for_evaluation(self) -> "LoaderSpec":
        """Settings of a validation loader, which runs while the training workers wait with full hands.

        Half the workers, none kept alive between two validations, and nothing dropped.
        """
        workers = self.num_workers
        return replace(self, workers=-(-workers // 2), persistent=False, drop_last=False)


@runtime_checkable
class Counting(Protocol):
    """A sampler that wants to know what users were given."""

    @property
    def remaining(self) -> int:
        """Samples of the epoch that this rank still has to give."""

    def mark_delivered(self, samples: int) -> None:
        """Count samples of this rank."""

    def finish_epoch(self) -> None:
        """Declare the epoch over."""


class ClipLoader(DataLoader[ClipBatch]):
    """A `DataLoader` of `ClipBatch` that tells its sampler what was delivered, batch by batch.

    So `sampler.state_dict()`, asked between two batches, resumes at the next one, however many the
    workers have made ahead.
    """

    slot_bytes = 0
    """Bytes of the largest batch, where workers are to make batches in memory that is used again."""
    _memory: BatchMemory | None = None  # of the workers that run: the tensors that are received name it

    def _get_iterator(self) -> Any:
        """Start workers; torch's own way in, called once for each set of them."""
        if not (self.slot_bytes and self.num_workers):
            return super()._get_iterator()
        init, slots = self.worker_init_fn, (self.prefetch_factor or 0) + 1
        memory = BatchMemory(workers=self.num_workers, slots=slots, slot_bytes=self.slot_bytes)
        self.worker_init_fn = partial(init_lending_worker, init=init, memory=memory)
        try:
            return super()._get_iterator()
        finally:
            self.worker_init_fn, self._memory = init, memory

    def __iter__(self) -> Iterator[ClipBatch]:  # type: ignore[override]
        for batch in self.batches():
            self.mark_delivered(batch)
            yield batch

    def batches(self) -> Iterator[ClipBatch]:
        """Batches that are not counted: for who reads ahead, and calls `mark_delivered` for each."""
        with _opencv_fit_to_fork(self.multiprocessing_context):
            batches = cast(Iterator[ClipBatch], super().__iter__())
        yield from batches

    def mark_delivered(self, batch: ClipBatch) -> None:
        """Count a batch that the user now has; after the last full one a loader that drops ends the epoch."""
        if isinstance(self.sampler, Counting):
            self.sampler.mark_delivered(len(batch.labels))
            if self.drop_last and self.sampler.remaining < (self.batch_size or 1):
                self.sampler.finish_epoch()


def build_loader(
    dataset: ClipDataset, sampler: Sampler[ClipRef], spec: LoaderSpec = LoaderSpec()
) -> ClipLoader:
    """A loader of the sampler's clips, in the sampler's order whatever the number of workers.

    Raises PipelineError where the batches in flight do not fit into /dev/shm, or where the dataset keeps
    clips that the sampler will not ask for again.
    """
    workers = spec.num_workers
    if workers:
        check_shared_memory(spec, dataset.clip_bytes, free_bytes(RAM_ROOT) if RAM_ROOT.is_dir() else 0)
    _check_reuse(dataset, sampler)
    dataset.threads = spec.threads
    dataset.readers = spec.readers or dataset.readers
    loader = ClipLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=spec.batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate_clips,
        pin_memory=spec.pins,
        drop_last=spec.drop_last,
        worker_init_fn=init_worker,
        multiprocessing_context=_context(spec.start_method) if workers else None,
        prefetch_factor=spec.prefetch if workers else None,
        persistent_workers=spec.persistent and workers > 0,
        # One of its own, so that iterating draws nothing from torch's global generator.
        generator=torch.Generator(),
    )
    if spec.persistent and dataset.has_size:  # workers of a single epoch would hardly use any of it again
        loader.slot_bytes = spec.batch_size * dataset.clip_bytes
    return loader


def _check_reuse(dataset: ClipDataset, sampler: Sampler[ClipRef]) -> None:
    if dataset.cache is None or not isinstance(sampler, EpochSampler | EvalSampler):
        return
    if isinstance(sampler, EpochSampler) and sampler.reuse == 1:
        raise PipelineError("the dataset keeps clips and no epoch shows one again: give the sampler reuse=k")
    if dataset.cache.clips_per_video < sampler.clips_per_video:
        raise PipelineError(
            f"the dataset keeps {dataset.cache.clips_per_video} clips of a video and the sampler asks for "
            f"{sampler.clips_per_video}: give ReuseSpec(clips_per_video={sampler.clips_per_video})"
        )


def _context(start_method: StartMethod) -> Any:
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["pipeline.online.loader"])
    return context


def init_lending_worker(worker: int, init: Callable[[int], None] | None, memory: BatchMemory) -> None:
    """What `init` does, and have the worker's batches made in memory that is used again."""
    if init is not None:
        init(worker)
    use_memory(memory, worker)


def init_worker(worker: int) -> None:
    """Bound the threads of a worker, of which there is one for each core already, and let it end quietly.

    A spawned one whose last batch nobody waits for takes Python down under the thread that sends it, which
    then aborts in torch's code; so it ends as forked ones always do.
    """
    atexit.register(os._exit, 0)
    if cv2.getNumThreads() != 1:
        cv2.setNumThreads(1)
    torch.set_num_threads(1)


@contextmanager
def _opencv_fit_to_fork(context: Any) -> Iterator[None]:
    """Have OpenCV let go of its threads while workers are forked.

    They do not exist in a fork, and there `cv2.setNumThreads` waits for them for ever.
    """
    threads = cv2.getNumThreads()
    if context is None or context.get_start_method() != "fork" or threads == 1:
        yield
        return
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(threads)


def check_shared_memory(spec: LoaderSpec, clip_bytes: int, free: int) -> None:
    """Raise PipelineError, with the sum, where the batches that are in flight do not fit."""
    workers = spec.num_workers
    batch = spec.batch_size * clip_bytes
    # Each worker has `prefetch` of them made or in the making; the user holds one, and one is on its way.
    held = max(workers, 2) if spec.persistent else 2  # and then each worker has a place more
    batches = (workers * spec.prefetch + held) * spec.ranks_on_machine
    if batch * batches > free:
        fits = free // max(batch * spec.ranks_on_machine, 1) - held
        hint = f"prefetch={max(fits // max(workers, 1), 1)}" if fits >= workers else "fewer workers or clips"
        raise PipelineError(
            f"{RAM_ROOT} has {format_bytes(free)} free and {batches} batches in flight need "
            f"{format_bytes(batch * batches)}: {spec.ranks_on_machine} ranks x ({workers} workers x "
            f"{spec.prefetch} + {held}) x {spec.batch_size} clips of {format_bytes(clip_bytes)}; "
            f"take {hint}, or enlarge it (docker run --shm-size)"
        )
