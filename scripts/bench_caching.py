"""`bench caching`: four ways to have a clip again, and reading ahead from storage that keeps one waiting.

All run the same loader over the same epochs in turns. What a way saves in time stands beside what it holds,
and beside how many different clips a training gets to see.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EpochSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.loader import ClipLoader
from pipeline.online.packfile import copy_pack
from pipeline.online.ram import RAM_ROOT
from pipeline.online.reuse import ReuseSpec
from pipeline.online.store import Indices, Jpeg, Store
from scripts.bench_clips import Stored, store_clips
from scripts.bench_common import Case, Stopwatch, Timing, fresh_folder, make_row, run_rounds

_WINDOW = WindowSpec(frames=16)
_AUGMENT = AugmentSpec(size_px=112)
_WARM_EPOCH = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingBench:
    """What is measured."""

    caching_epochs: int = 4
    """Epochs of a round."""
    caching_clips: int = 64
    """Clips of an epoch, at least."""
    caching_reuse: tuple[int, ...] = (2, 4)
    """For how many epochs augmented clips are kept."""
    caching_workers: int = 2
    """Worker processes."""
    caching_latency_ms: float = 5.0
    """What the slow store waits for each frame: as a folder of JPEGs does on the other side of a network."""
    caching_readers: int = 8
    """Threads in each worker that read ahead."""

    def __post_init__(self) -> None:
        numbers = (self.caching_epochs, self.caching_clips, *self.caching_reuse, self.caching_readers)
        if min(numbers) < 1 or self.caching_workers < 0 or self.caching_latency_ms < 0:
            raise ValueError(f"all numbers must be 1 or more, workers and latency 0 or more, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingRow:
    """One way."""

    name: str
    what: str
    clips_per_s: float
    """Median over the rounds."""
    held_mb: float
    """Bytes that it keeps for the machine: of JPEGs or of clips."""
    distinct: float
    """Different clips / clips, over the epochs of a round."""


@dataclass(frozen=True, slots=True)
class SlowStore:
    """A store behind a wire: each frame is waited for."""

    store: Store
    latency_s: float

    def read(self, video: str, indices: Indices) -> Sequence[Jpeg]:
        """As the store behind it, later."""
        time.sleep(self.latency_s * len(indices))
        return self.store.read(video, indices)

    def times_us(self, video: str) -> np.ndarray:
        """As the store behind it."""
        return self.store.times_us(video)


@dataclass
class _Way:
    """A loader, and what is counted of it."""

    name: str
    what: str
    dataset: ClipDataset
    sampler: EpochSampler
    loader: ClipLoader
    held_bytes: int
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    """Row, start and seed of the clips of the last round."""
    rounds: int = 0

    def run(self, epochs: int, _: Path) -> dict[str, Timing]:
        """One round: epochs that were not before, so nothing is kept of them yet."""
        self.seen.clear()
        watch = Stopwatch()
        for epoch in range(self.rounds * epochs, (self.rounds + 1) * epochs):
            with watch:
                self.go_through(epoch)
        self.rounds += 1
        return {self.name: watch.timing(len(self.seen))}

    def go_through(self, epoch: int) -> None:
        """An epoch, noted clip by clip."""
        self.sampler.set_epoch(epoch)
        for batch in self.loader:
            columns = batch.videos, batch.starts, batch.extras["seed"]
            self.seen += zip(*(column.tolist() for column in columns), strict=True)


def measure_caching(
    clips: Sequence[Path],
    bench: CachingBench,
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> list[CachingRow]:
    """All ways on the frames of these clips, in turns; everything was read once before."""
    with ExitStack() as stack:
        on_case("frames")
        folder = stack.enter_context(fresh_folder(work_dir))
        in_ram = stack.enter_context(fresh_folder(RAM_ROOT if RAM_ROOT.is_dir() else None))
        stored = store_clips(clips, folder)
        copy_pack(stored.store.path, in_ram / "pack")
        ways = list(_ways(stored, PackStore(in_ram / "pack"), folder, bench))
        for way in ways:
            on_case(f"{way.name}, to begin with")
            way.go_through(_WARM_EPOCH)
        cases = [Case(way.name, partial(way.run, bench.caching_epochs)) for way in ways]
        timings = run_rounds(cases, rounds=rounds, work_dir=work_dir, on_case=on_case)
        rows = [_row(way, timings[way.name]) for way in ways]
        for way in ways:
            if way.dataset.cache is not None:
                way.dataset.cache.close()
    return rows


def _ways(stored: Stored, in_ram: PackStore, folder: Path, bench: CachingBench) -> Iterator[_Way]:
    jpegs, slow_s = stored.store.info.frames_bytes, bench.caching_latency_ms / 1000
    slow, readers = SlowStore(in_ram, slow_s), bench.caching_readers
    make = partial(_way, stored, bench)
    yield make("decode each time", "a file for each frame", FolderStore(stored.frames_root), 0)
    yield make("memory map", "the pack on disk, mapped", stored.store, jpegs)
    yield make("raw bytes", "the pack in RAM", in_ram, jpegs)
    for reuse in bench.caching_reuse:
        what = f"clips kept for {reuse} epochs, beside the pack in RAM"
        yield make(f"augmented, {reuse}", what, in_ram, jpegs, reuse=reuse, root=folder)
    yield make("slow, as it is", f"{bench.caching_latency_ms:g} ms a frame", slow, 0)
    yield make("slow, read ahead", f"{readers} readers in each worker", slow, 0, readers=readers)
    yield make("fast, read ahead", f"the pack in RAM, {readers} readers", in_ram, jpegs, readers=readers)


def _way(
    stored: Stored,
    bench: CachingBench,
    name: str,
    what: str,
    store: Store,
    held_bytes: int,
    *,
    reuse: int = 1,
    root: Path = RAM_ROOT,
    readers: int = 0,
) -> _Way:
    repeats = -(-bench.caching_clips // len(stored.manifest))
    place = RAM_ROOT if RAM_ROOT.is_dir() else root
    spec = ReuseSpec(root=place, clips_per_video=repeats) if reuse > 1 else None
    dataset = ClipDataset(stored.manifest, store, _WINDOW, augment=_AUGMENT, reuse_cache=spec)
    sampler = EpochSampler(stored.manifest, _WINDOW, clips_per_video=repeats, reuse=reuse)
    loader = build_loader(
        dataset, sampler, LoaderSpec(batch_size=16, workers=bench.caching_workers, readers=readers)
    )
    kept_bytes = 0 if dataset.cache is None else dataset.cache.num_bytes
    return _Way(name, what, dataset, sampler, loader, held_bytes + kept_bytes)


def _row(way: _Way, timings: Sequence[Timing]) -> CachingRow:
    return CachingRow(
        name=way.name,
        what=way.what,
        clips_per_s=make_row(way.name, way.what, timings).frames_per_s,
        held_mb=way.held_bytes / 1e6,
        distinct=len(set(way.seen)) / len(way.seen),
    )


# What came out.


def format_caching(rows: Sequence[CachingRow], bench: CachingBench) -> str:
    """All figures for a person."""
    lines = [f"\n{'':<18}{'clips/s':>9}{'/ decode':>10}{'held MB':>9}{'different':>11}"]
    for row in rows:
        ratio = row.clips_per_s / rows[0].clips_per_s
        figures = f"{row.clips_per_s:>9.1f}{ratio:>10.2f}{row.held_mb:>9.1f}{row.distinct:>11.0%}"
        lines.append(f"{row.name:<18}{figures}  {row.what}")
    lines.append(f"different: of the clips of {bench.caching_epochs} epochs, how many are not shown before")
    return "\n".join(lines)


def caching_json(rows: Sequence[CachingRow]) -> dict[str, Any]:
    """All figures for programs."""
    speeds = {row.name: row.clips_per_s for row in rows}
    ratios = {name: speed / speeds["decode each time"] for name, speed in speeds.items()}
    ratios["read_ahead_slow"] = speeds["slow, read ahead"] / speeds["slow, as it is"]
    ratios["read_ahead_fast"] = speeds["fast, read ahead"] / speeds["raw bytes"]
    return {"rows": [asdict(row) for row in rows], "ratios": ratios}
