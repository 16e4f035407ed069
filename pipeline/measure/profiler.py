"""Where the time of training goes: some steps as they are, and the same on one batch kept in memory.

    worker: read, decode, augment, batch -> queue -> pin -> copy and prepare -> step

Each batch carries what its worker took for it and when it was made, so that the waits can be told apart:
for a batch that was not made yet, for one on its way, for its copy.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from pipeline.errors import PipelineError
from pipeline.measure.machine import read_cores
from pipeline.measure.parcels import Parcel, ParcelLoader
from pipeline.measure.sampling import Use, UseSampler, open_gpu
from pipeline.measure.verdict import Setting, StageTimes, Verdict, judge
from pipeline.online.collate import ClipBatch
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Normalize, Prepare, prefetch, to_device
from pipeline.online.loader import ClipLoader
from pipeline.online.ram import RAM_ROOT
from pipeline.online.store import FolderStore, PackStore
from pipeline.timing import StageSum, StepMarks, Timer, cuda_timer, stage_cost_s, wall_timer

Step = Callable[[ClipBatch], object]
"""What is done with a batch that is on the device; on CUDA on the current stream."""

_LEAST_MISSED = 0.01
_ALONE = 6
_MANY_OTHERS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured, and what to think of it."""

    times: StageTimes
    setting: Setting
    verdict: Verdict
    steps: int
    """Steps that were measured, after those to warm up."""
    use: Use
    """Cores, disk and GPU meanwhile."""
    store_bytes_per_s: float | None
    """JPEGs that the store handed out; None where it does not count."""
    own_cost_share: float
    """What measuring cost, in [0, 1]: of a worker's time its clock, or of a core the looks at the machine,
    whichever is more."""
    notes: tuple[str, ...]
    """What could not be measured and why, and what else to know."""

    @property
    def clips_per_s(self) -> float:
        """Clips trained on in a second."""
        return self.setting.batch_size / max(self.times.total_s, 1e-9)

    @property
    def ceiling_clips_per_s(self) -> float:
        """The same on a batch that is kept on the device."""
        return self.setting.batch_size / max(self.times.ceiling_s, 1e-9)


def profile_loader(
    loader: ClipLoader,
    step: Step,
    *,
    steps: int = 50,
    device: str | torch.device = "cpu",
    prepare: Prepare | None = None,
) -> Profile:
    """Run a step on batches of a loader like this one, and say what limits.

    loader   of a `ClipDataset`. It is as it was afterwards: what runs is a copy, with workers of its own
    step     the training step, or a stand-in such as `lambda batch: time.sleep(0.02)`
    steps    steps to measure, 2 or more. Before them go as many as workers may have batches ready for,
             after them the same number on one batch that is kept on the device: the ceiling
    prepare  as for `prefetch`; None is `Normalize()`

    Epochs follow each other without a break. PipelineError where the loader has no clips or is not of a
    `ClipDataset`, and where the device is CUDA and there is none; what a worker raises passes through.

    Measuring costs under 2 %, and each profile says how much (`own_cost_share`): 0.4 % on two cores,
    with the sample's clips of 16 frames and 56 px (`python -m scripts.profile_loader`). A clip enters three
    stages, at 3 us each and in some 5 ms or more; a look at two cores, five times a second, takes 0.3 ms.
    """
    if steps < 2:
        raise ValueError(f"steps must be >= 2, got {steps}")
    device, prepare = _numbered(torch.device(device)), prepare or Normalize()
    parcels = ParcelLoader(loader)
    read_gpu, gpu_note = open_gpu(device.index) if device.type == "cuda" else (None, _NO_GPU)
    run = _Run(parcels, _TimedPrepare(prepare), device, steps)
    raw, use = run.measure(step, UseSampler(read_gpu=read_gpu))
    ceiling_s = run.measure_ceiling(step)
    copy_s, prepare_s = run.measure_copy() if device.type == "cuda" else (0.0, float(np.mean(raw.prepare_s)))
    setting = _setting(loader, raw, use, is_cuda=device.type == "cuda")
    times = _times(raw, parcels.dataset.threads, ceiling_s=ceiling_s, copy_s=copy_s, prepare_s=prepare_s)
    return Profile(
        times=times,
        setting=setting,
        verdict=judge(times, setting),
        steps=steps,
        use=use,
        store_bytes_per_s=None if raw.store_bytes is None else raw.store_bytes / use.seconds,
        own_cost_share=_own_cost(raw, use),
        notes=tuple(filter(None, [gpu_note, *_notes(len(loader), steps, setting, use)])),
    )


_NO_GPU = "no GPU in use: nothing is pinned or copied, and the step has cores of this machine"


def _numbered(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise PipelineError(f"device {device}: torch sees no CUDA GPU; use 'cpu', or ask `make doctor` why")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


# The run.


class _TimedPrepare:
    """`prepare`, and the host's seconds of each call."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.seconds: list[float] = []

    def __call__(self, batch: ClipBatch) -> ClipBatch:
        begin = time.perf_counter()
        prepared = self.prepare(batch)
        self.seconds.append(time.perf_counter() - begin)
        return prepared


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a parcel told, and when the main process asked for it and had it."""

    made: Parcel
    asked_s: float
    taken_s: float

    def waits(self) -> tuple[float, float, float]:
        """Seconds waited until it was made, from then until it was here, and those of its pinning."""
        made_s = min(max(self.made.made_s, self.asked_s), self.taken_s)
        return made_s - self.asked_s, self.taken_s - made_s, self.made.pin_s


@dataclass(frozen=True, slots=True)
class _Raw:
    """What was measured, for each step."""

    taken: list[_Taken]
    prepare_s: list[float]
    steps: list[tuple[float, float]]
    """Seconds waited before it, and of it."""
    store_bytes: int | None
    missed_share: float | None


@dataclass(slots=True)
class _Run:
    """The steps of a profile."""

    loader: ParcelLoader
    prepare: _TimedPrepare
    device: torch.device
    steps: int
    taken: list[_Taken] = field(default_factory=list)
    kept: ClipBatch | None = None
    """The last batch, as the step gets it."""

    def measure(self, step: Step, sampler: UseSampler) -> tuple[_Raw, Use]:
        """Warm up, then measure; workers are gone afterwards."""
        store, warm_up, marks = self.loader.dataset.store, self.loader.backlog + 2, StepMarks(self.timer())
        with closing(prefetch(self.batches(), self.device, prepare=self.prepare)) as batches:
            self.go(islice(batches, warm_up), step, marks)
            marks.take()
            before = _counted(store)
            with sampler:
                self.go(islice(batches, self.steps), step, marks)
                steps = marks.take()
            store_bytes, missed_share = _compare(before, _counted(store))
        window = slice(warm_up, warm_up + self.steps)
        return (
            _Raw(self.taken[window], self.prepare.seconds[window], steps, store_bytes, missed_share),
            sampler.use(),
        )

    def batches(self) -> Iterator[ClipBatch]:
        """Those in the parcels."""
        with closing(self.loader.parcels()) as parcels:
            while True:
                asked_s = time.monotonic()
                parcel = next(parcels)
                self.taken.append(_Taken(parcel, asked_s, time.monotonic()))
                yield parcel.unpack()

    def measure_ceiling(self, step: Step) -> float:
        """Seconds of a step on the batch that was kept."""
        marks = StepMarks(self.timer())
        for count in (2, self.steps):
            marks.take()
            self.go(iter([self.kept] * count), step, marks)
        return float(np.mean([waited + used for waited, used in marks.take()]))

    def measure_copy(self) -> tuple[float, float]:
        """Seconds of the GPU for a batch's copy and for its preparation, with nothing beside them."""
        batch, timer, marks = self.loader.make_one().unpack(), self.timer(), []
        for _ in range(_ALONE):
            begin = timer.mark()
            there = to_device(batch, self.device)
            copied = timer.mark()
            self.prepare(there)
            marks.append((begin, copied, timer.mark()))
        timer.finish()
        seconds = [(timer.seconds(one, two), timer.seconds(two, three)) for one, two, three in marks[1:]]
        copy_s, prepare_s = np.median(seconds, axis=0).tolist()
        return copy_s, prepare_s

    def go(self, batches: Iterator[Any], step: Step, marks: StepMarks) -> None:
        """Take a step on each."""
        for batch in batches:
            marks.begin()
            step(batch)
            marks.end()
            self.kept = batch

    def timer(self) -> Timer:
        """The clock of what computes."""
        return cuda_timer(self.device) if self.device.type == "cuda" else wall_timer()


def _counted(store: Any) -> tuple[int, int, int] | None:
    """Bytes, frames looked up, and those of them that were in memory, so far; None where nobody counts."""
    if not hasattr(store, "counters"):
        return None
    counters = store.counters()
    return counters.bytes, counters.watched, counters.resident


def _compare(
    before: tuple[int, int, int] | None, after: tuple[int, int, int] | None
) -> tuple[int | None, float | None]:
    """Bytes read between two countings, and the share of frames that were not in memory."""
    if before is None or after is None:
        return None, None
    num_bytes, watched, resident = (now - then for now, then in zip(after, before, strict=True))
    return num_bytes, 1 - resident / watched if watched else None


# What it comes to.


def _times(raw: _Raw, threads: int, *, ceiling_s: float, copy_s: float, prepare_s: float) -> StageTimes:
    making, transport, pin = np.mean([taken.waits() for taken in raw.taken], axis=0).tolist()
    waited, used = np.mean(raw.steps, axis=0).tolist()
    # A GPU may still be at work while its host waits: then less was waited in truth.
    scale = min(1.0, waited / max(making + transport, 1e-9))
    return StageTimes(
        **worker_times([taken.made for taken in raw.taken], threads, raw.missed_share),
        pin_s=pin,
        copy_s=copy_s,
        prepare_s=prepare_s,
        making_s=scale * making,
        transport_s=scale * transport,
        handing_s=max(waited - scale * (making + transport), 0.0),
        step_s=used,
        ceiling_s=ceiling_s,
    )


_CLIP_STAGES = ("read", "decode", "augment", "sources")


def worker_times(parcels: Sequence[Parcel], threads: int, missed_share: float | None) -> dict[str, float]:
    """A worker's mean seconds for a batch by stage, which add up to its time by the clock.

    Threads that work at the same time share that time in proportion. Decoding is the first to touch the
    bytes of a pack: where some were not in memory, what it waited for is reading, but for its waits for a
    core, of which augmenting, which reads nothing, has its share.
    """
    wall_s = float(np.mean([parcel.made_s - parcel.begin_s for parcel in parcels]))
    sums = {name: _mean_stage(parcels, name) for name in (*_CLIP_STAGES, "batch")}
    staged_s = sum(sums[name].seconds for name in _CLIP_STAGES)
    scale = min(1.0, max(wall_s - sums["batch"].seconds, 0.0) / max(staged_s, 1e-9)) if threads > 1 else 1.0
    is_cold = missed_share is not None and missed_share > _LEAST_MISSED
    late_s = _late_s(sums["decode"], sums["augment"]) if is_cold else 0.0
    had_s, took_s = (sum(stage[field] for stage in sums.values()) for field in (1, 0))
    return {
        "read_s": scale * (sums["read"].seconds + late_s),
        "decode_s": scale * (sums["decode"].seconds - late_s),
        "augment_s": scale * sums["augment"].seconds,
        "sources_s": scale * sums["sources"].seconds,
        "batch_s": max(wall_s - scale * staged_s, 0.0),
        "cpu_share": min(had_s / took_s, 1.0) if took_s > 0 else 1.0,
    }


def _late_s(decode: StageSum, augment: StageSum) -> float:
    """Seconds that decoding waited for bytes."""
    for_cores = max(augment.seconds / augment.cpu_s, 1.0) if augment.cpu_s > 0 else 1.0
    return max(decode.seconds - decode.cpu_s * for_cores, 0.0)


def _mean_stage(parcels: Sequence[Parcel], name: str) -> StageSum:
    total = StageSum()
    for parcel in parcels:
        total = total.plus(parcel.stages.get(name, StageSum()))
    return StageSum(total.seconds / len(parcels), total.cpu_s / len(parcels), total.entries)


def _setting(loader: ClipLoader, raw: _Raw, use: Use, *, is_cuda: bool) -> Setting:
    dataset: Any = loader.dataset
    return Setting(
        batch_size=loader.batch_size or 1,
        workers=loader.num_workers,
        threads=dataset.threads,
        readers=dataset.readers,
        prefetch=loader.prefetch_factor or 2,
        is_cuda=is_cuda,
        pins=bool(loader.pin_memory),
        cache=cache_of(dataset.store),
        missed_share=raw.missed_share,
        has_transform=dataset.transform is not None,
        shrink=shrink_of(dataset),
        reduces=dataset.augment is not None and dataset.augment.reduce,
        spare_cores=spare_cores(use),
        other_cores=max(sum(use.cores) - use.own_cores, 0.0),
    )


def cache_of(store: object) -> str | None:
    """Where a store's bytes come from: `ram`, `disk` or `off`, as `open_store` calls it; None: elsewhere."""
    if isinstance(store, PackStore):
        return "ram" if store.path.resolve().is_relative_to(RAM_ROOT) else "disk"
    return "off" if isinstance(store, FolderStore) else None


def shrink_of(dataset: ClipDataset) -> float:
    """How many times longer the sides of a usual crop are than those of the clip; at least 1."""
    augment, manifest = dataset.augment, dataset.manifest
    if augment is None or manifest is None:
        return 1.0
    area = manifest.column("width").astype(np.int64) * manifest.column("height")
    cut = float(np.median(area)) * sum(augment.scale) / 2
    return float(max((cut / (augment.size_hw[0] * augment.size_hw[1])) ** 0.5, 1.0))


def spare_cores(use: Use) -> float:
    """Cores' worth of time that were left to this process, whoever had the others."""
    cores = read_cores()
    is_private = cores.quota is not None or not use.cores
    return max(cores.usable - (use.own_cores if is_private else sum(use.cores)), 0.0)


def _own_cost(raw: _Raw, use: Use) -> float:
    parcels = [taken.made for taken in raw.taken]
    entries = sum(stage.entries for parcel in parcels for stage in parcel.stages.values())
    worked_s = sum(parcel.made_s - parcel.begin_s for parcel in parcels)
    return max(entries * stage_cost_s() / max(worked_s, 1e-9), use.cost_s / max(use.seconds, 1e-9))


def _notes(epoch_steps: int, steps: int, setting: Setting, use: Use) -> Iterator[str]:
    if read_cores().usable < 2:
        yield "one core: workers, the step and all else take turns on it"
    if setting.other_cores > _MANY_OTHERS:
        yield f"other programs had {setting.other_cores:.1f} cores meanwhile, and all of this looks slower"
    if epoch_steps < steps:
        yield f"an epoch has {epoch_steps} steps: the next ones followed without a break"
    missed = setting.missed_share or 0.0
    if missed > _LEAST_MISSED:
        yield f"{100 * missed:.0f} % of the frames were not in memory: what decoding waited counts as reading"
    elif setting.cache in ("disk", "off"):
        yield "frames that were read before are still in memory: after a restart, an epoch reads slower"
    if use.samples and use.disk_bytes_per_s is None:
        yield "the system does not tell what is read from its disks"
