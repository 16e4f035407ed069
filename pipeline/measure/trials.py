"""Settings of a real loader: which there are to try on this machine, what they cost, how fast they are."""

import copy
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
from torch.utils.data import Sampler

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.measure.endless import EndlessSampler
from pipeline.measure.tuned import HeldIn, Tuning
from pipeline.measure.tuner import Factor, TrialError
from pipeline.online.collate import ClipBatch
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Prepare, prefetch
from pipeline.online.loader import ClipLoader, LoaderSpec, build_loader, init_worker
from pipeline.online.packfile import format_bytes
from pipeline.online.ram import FreeMemory, copies_in_ram, free_memory, release_ram
from pipeline.online.samplers import ClipRef
from pipeline.online.store import Cache, OpenedStore, Store, open_store
from pipeline.timing import Timer, cuda_timer, wall_timer

# Workers share a fork server with torch in it; each takes 11 MB more, and memory to decode in.
_WORKER_BYTES = 64 << 20
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetting:
    """How a loader is set for a trial."""

    tuning: Tuning
    batch_size: int
    """The one thing here that a batch shows: no factor but `batch` changes it, and that is never taken."""


FACTORS = ("workers", "threads", "cache", "readers", "prefetch", "pin")
"""In the order in which they are tried. `batch` is tried on request alone, at the end."""


def loader_factors(names: Sequence[str], *, cores: int, has_cuda: bool) -> list[Factor[LoaderSetting]]:
    """The factors of these names; ValueError for another one.

    cores     that the loader may use
    has_cuda  whether batches go to a GPU: only then is pinning tried

    workers   as many as leave no core with two threads that decode: 1, a quarter, half and three quarters
              of the cores, all but one, all. Not 0, which is as fast where nothing else has work to do,
              and then keeps training waiting. Where it is begun with 0, what workers have is not tried
    threads   1, 2 and 4 in each worker, and so much fewer workers
    cache     files (`off`), the pack (`disk`), the pack in memory (`ram`)
    readers   0, 2 and 4 threads that fetch ahead in each worker
    prefetch  2, 4 and 8 batches that each worker makes ahead. Not 1: what it costs shows where steps take
              now more, now less time, and here they do not
    pin       with and without pinned memory
    batch     half and twice the clips in a batch, to be looked at: never taken
    """
    candidates: dict[str, Callable[[Tuning], Sequence[Tuning]]] = {
        "workers": partial(_other_workers, cores=cores),
        "threads": partial(_other_threads, cores=cores),
        "cache": _other_caches,
        "readers": _other_readers,
        "prefetch": _other_prefetch,
        "pin": lambda tuning: [replace(tuning, pin=pin) for pin in (False, True)[: 1 + has_cuda]],
    }
    if unknown := set(names) - {*candidates, "batch"}:
        known = ", ".join([*candidates, "batch"])
        raise ValueError(f"no factor is named {min(unknown)!r}: there are {known}")
    return [
        Factor(name=name, candidates=partial(_vary, vary=candidates[name]))
        for name in candidates
        if name in names
    ] + [
        Factor(name="batch", candidates=_other_batches, only_shown=True) for name in names if name == "batch"
    ]


def _vary(setting: LoaderSetting, vary: Callable[[Tuning], Sequence[Tuning]]) -> list[LoaderSetting]:
    return [replace(setting, tuning=tuning) for tuning in vary(setting.tuning) if tuning != setting.tuning]


def _other_workers(tuning: Tuning, cores: int) -> list[Tuning]:
    most = max(cores // tuning.threads, 1)
    numbers = {1, most // 4, most // 2, 3 * most // 4, most - 1, most}
    return [replace(tuning, workers=number) for number in sorted(numbers) if number >= 1]


def _other_threads(tuning: Tuning, cores: int) -> list[Tuning]:
    """The same cores, cut in another way."""
    in_all = tuning.workers * tuning.threads
    return [
        replace(tuning, threads=threads, workers=in_all // threads)
        for threads in (1, 2, 4)
        if threads <= min(in_all, cores)
    ]


def _other_readers(tuning: Tuning) -> list[Tuning]:
    return [replace(tuning, readers=readers) for readers in (0, 2, 4) if tuning.workers]


def _other_prefetch(tuning: Tuning) -> list[Tuning]:
    return [replace(tuning, prefetch=ahead) for ahead in (2, 4, 8) if tuning.workers]


def _other_caches(tuning: Tuning) -> list[Tuning]:
    caches: tuple[HeldIn, ...] = ("off", "disk", "ram")
    return [replace(tuning, cache=cache) for cache in caches]


def _other_batches(setting: LoaderSetting) -> list[LoaderSetting]:
    size = setting.batch_size
    return [replace(setting, batch_size=other) for other in (size // 2, 2 * size) if other >= 1]


def loader_fallbacks(start: LoaderSetting) -> list[LoaderSetting]:
    """What needs less and less memory, down to no worker at all."""
    small = replace(start.tuning, prefetch=1)
    smaller = [small, replace(small, workers=1, threads=1), replace(small, workers=0, threads=1)]
    return [replace(start, tuning=tuning) for tuning in smaller]


def loader_cost(setting: LoaderSetting) -> tuple[int, ...]:
    """What a setting takes: cores first, then memory; a process is dearer than a thread.

    Where frames are read from counts for nothing, so that it changes only for what is faster: what was read
    before is in memory whatever the store, and a trial cannot show how it would be after a restart.
    """
    tuning = setting.tuning
    in_flight = tuning.workers * tuning.prefetch * setting.batch_size
    cores = max(tuning.workers, 1) * tuning.threads
    return cores, tuning.workers, tuning.readers, in_flight, int(tuning.pin)


# Where frames are read from.


class TrialStores:
    """The stores of one dataset, each opened when it is first asked for.

    What is copied to memory for a trial alone goes again: `let_go` says so at the end, but for a copy that
    was there before.
    """

    def __init__(self, frames_root: Path, pack: Path, manifest: Manifest) -> None:
        self._frames_root, self._pack, self._manifest = frames_root, pack, manifest
        self._had_copy = bool(copies_in_ram(pack))
        self._opened: dict[str, OpenedStore] = {}

    def open(self, cache: Cache) -> OpenedStore:
        """The store that `open_store` gives; in memory only where that is free by half, as for `auto`.

        PipelineError where it cannot be had.
        """
        if cache not in self._opened:
            asked: Cache = "auto" if cache == "ram" else cache
            opened = open_store(self._frames_root, self._pack, cache=asked, manifest=self._manifest)
            if cache == "ram" and opened.cache != "ram":
                raise PipelineError(opened.reason)
            self._opened[cache] = self._opened[opened.cache] = opened
        return self._opened[cache]

    def let_go(self, *, keep: HeldIn | None) -> None:
        """Take the copy out of memory, but where it was there before or `keep` is `ram`."""
        if "ram" in self._opened and not self._had_copy and keep != "ram":
            release_ram(self._pack)


# Measuring.


class _Stretch(Sampler[ClipRef]):
    """The next clips of epoch after epoch, as many as are asked for."""

    def __init__(self, sampler: Any) -> None:
        self._refs = iter(EndlessSampler(sampler))
        self.clips = 0
        self.taken = 0

    def __iter__(self) -> Iterator[ClipRef]:
        for ref in islice(self._refs, self.clips):
            self.taken += 1
            yield ref


class LoaderTrials:
    """Measures settings of a loader by its own clips: `trials(setting)` gives clips per second.

    dataset, sampler  what the loader is of; both are as they were afterwards
    spec        what of a loader is not tried
    open_store  from `off`, `disk` or `ram` to the store; PipelineError where it cannot be had
    repeat_s    seconds that one repeat takes about; more, where that is not two batches of each worker
    device      where batches go, with `prepare` done to them there; on the CPU, batches are only taken
    step_s      seconds of a stand-in for the training step, which only waits; 0: as fast as possible

    The loaders of the two settings that were asked for last stay open, and their workers rest while the
    other one is measured: a repeat ends when all that was asked of them is done. Each repeat goes on in the
    stream of clips where the last one ended, so that none finds in memory what another has just read. A
    worker's first batch in a repeat is not counted: with it begins what the others wait for.

    Close it, or use it in a `with`.
    """

    def __init__(
        self,
        dataset: ClipDataset,
        sampler: Sampler[ClipRef],
        spec: LoaderSpec,
        *,
        open_store: Callable[[HeldIn], Store],
        repeat_s: float,
        device: torch.device = _CPU,
        prepare: Prepare | None = None,
        step_s: float = 0.0,
    ) -> None:
        self._dataset, self._spec, self._open_store = dataset, spec, open_store
        self._stretch = _Stretch(sampler)
        self._repeat_s, self._device, self._prepare, self._step_s = repeat_s, device, prepare, step_s
        self._timer: Timer = cuda_timer(device) if device.type == "cuda" else wall_timer()
        self._open: OrderedDict[LoaderSetting, ClipLoader] = OrderedDict()
        self._clips_wanted = 0
        self._seconds: dict[str, list[float]] = {"open": [0.0], "repeat": [0.0]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._open.clear()

    @property
    def clips_taken(self) -> int:
        """Clips that were asked for in all."""
        return self._stretch.taken

    def reserve_s(self, rounds: int) -> float:
        """Seconds that so many rounds may take, of a loader that is open and one that is not."""
        return max(self._seconds["open"]) + 2 * rounds * fmean(self._seconds["repeat"])

    def __call__(self, setting: LoaderSetting) -> float:
        """Clips per second in one repeat; TrialError where it cannot run here.

        What is wrong with the clips themselves, such as a damaged frame, raises as it does in training.
        """
        try:
            loader = self._loader(setting)
            with self._watched("repeat"):
                return self._measure(loader, self._batches_of(setting))
        except (RuntimeError, OSError, MemoryError) as error:  # a worker has died, or memory ended
            self._open.pop(setting, None)
            raise TrialError(_first_line(error)) from error

    @contextmanager
    def _watched(self, work: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._seconds[work].append(time.monotonic() - begin)

    def _batches_of(self, setting: LoaderSetting) -> int:
        each = setting.batch_size * max(setting.tuning.workers, 1)
        return max(-(-self._clips_wanted // each), 1) * max(setting.tuning.workers, 1)

    def _loader(self, setting: LoaderSetting) -> ClipLoader:
        """An open loader, warmed up."""
        if setting in self._open:
            self._open.move_to_end(setting)
            return self._open[setting]
        while len(self._open) > 1:
            self._open.popitem(last=False)
        loader = self._build(setting)
        self._open[setting] = loader
        with self._watched("open"):
            self._measure(loader, max(setting.tuning.workers, 1))  # starts workers, one after the other
        if not self._clips_wanted:
            self._clips_wanted = self._count_clips(loader)
        return loader

    def _count_clips(self, loader: ClipLoader) -> int:
        """Clips that take about as long as a repeat should: few, then twice as many, and so on."""
        batches = max(loader.num_workers, 1)
        while True:
            clips = batches * (loader.batch_size or 1)
            seconds = clips / self._measure(loader, batches)
            if seconds > self._repeat_s / 4:
                return max(int(clips * self._repeat_s / seconds), 1)
            batches *= 2

    def _build(self, setting: LoaderSetting) -> ClipLoader:
        spec = replace(
            setting.tuning.apply(self._spec),
            batch_size=setting.batch_size,
            persistent=True,
            drop_last=False,
        )
        dataset = copy.copy(self._dataset)
        dataset.readers = 0  # else the loader keeps the number that it finds
        try:
            check_memory(spec, dataset.clip_bytes, free_memory())
            dataset.store = self._open_store(setting.tuning.cache)
            loader = build_loader(dataset, self._stretch, spec)
        except PipelineError as error:
            raise TrialError(str(error)) from error
        loader.worker_init_fn = _init_worker
        return loader

    def _measure(self, loader: ClipLoader, batches: int) -> float:
        """Clips per second of so many batches, after one of each worker."""
        warm_up = max(loader.num_workers, 1)
        self._stretch.clips = (warm_up + batches) * (loader.batch_size or 1)
        begin = self._timer.mark()
        for number, batch in enumerate(self._delivered(loader), 1):
            if self._step_s:
                time.sleep(self._step_s)
            del batch
            if number == warm_up:
                begin = self._timer.mark()
        end = self._timer.mark()
        self._timer.finish()
        return batches * (loader.batch_size or 1) / max(self._timer.seconds(begin, end), 1e-9)

    def _delivered(self, loader: ClipLoader) -> Iterator[ClipBatch]:
        if self._device.type == "cpu":
            return loader.batches()
        return prefetch(loader.batches(), self._device, prepare=self._prepare)


def _init_worker(worker: int) -> None:
    """As any worker, but Ctrl-C is for the main process, which lets a repeat end: till then workers live."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    init_worker(worker)


def check_memory(spec: LoaderSpec, clip_bytes: int, free: FreeMemory) -> None:
    """Raise PipelineError, with the sum, where workers and their batches do not fit into what is free."""
    workers = spec.num_workers
    batches = workers * spec.prefetch + 2
    needed = workers * _WORKER_BYTES + batches * spec.batch_size * clip_bytes
    left = free.available if free.cgroup is None else min(free.available, free.cgroup)
    if needed > left:
        raise PipelineError(
            f"{format_bytes(left)} of memory are free and {workers} workers with {batches} batches in "
            f"flight need {format_bytes(needed)}; take fewer workers"
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
