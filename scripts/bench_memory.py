"""`bench memory`: private and shared memory of all processes, beside the pattern that keeps JPEGs in a list.

Each rank is a process of its own (this module, run with a request as JSON), since what a process has imported
or measured before would be counted, too. Ranks of one machine read the same pack.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import psutil
from torch.utils.data import DataLoader

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, read_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EpochSampler,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.loader import StartMethod
from pipeline.online.store import Indices, Store

Kind = Literal["ours", "ours_fork", "list_fork", "list_spawn"]
KINDS: dict[Kind, str] = {
    "ours": "this loader: PackStore, workers by forkserver",
    "ours_fork": "the same, workers by fork: they share what the rank has imported, too",
    "list_fork": "JPEGs in a list of the dataset, workers by fork, torch's default before Python 3.14",
    "list_spawn": "the same, workers by spawn",
}
_STARTS: dict[Kind, StartMethod] = {
    "ours": "forkserver",
    "ours_fork": "fork",
    "list_fork": "fork",
    "list_spawn": "spawn",
}
_WINDOW = WindowSpec(frames=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBench:
    """What is measured."""

    memory_workers: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of workers of each rank."""
    memory_ranks: tuple[int, ...] = (1, 2)
    """Numbers of training processes on the machine."""
    memory_epochs: int = 2
    """Epochs that are gone through before memory is looked at."""

    def __post_init__(self) -> None:
        numbers = (*self.memory_workers, *self.memory_ranks, self.memory_epochs)
        if not self.memory_workers or not self.memory_ranks or min(numbers) < 1:
            raise ValueError(f"all numbers must be 1 or more, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One loader with so many ranks and workers, after its epochs."""

    kind: Kind
    ranks: int
    workers: int
    """Of each rank."""
    worker_mb: float
    """Private memory of a worker that is no page of a file: median."""
    private_mb: float
    """The same of all processes: ranks, workers, and the server that forks workers."""
    shared_mb: float
    """Memory that is no page of a file and that several of them share, counted once: batches, and what a
    fork has not written to."""
    file_mb: float
    """Pages of files, counted once: libraries and the pack. The system can drop them."""


class Memory(NamedTuple):
    """Of one process, in bytes."""

    private: int
    shared: int
    """This process's part."""
    of_files: int
    """This process's part."""


class ListStore:
    """The pattern: all bytes as objects in the process."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._times = {key: store.times_us(key).copy() for key in keys}
        self._jpegs = {
            key: [bytes(jpeg) for jpeg in store.read(key, np.arange(len(times)))]
            for key, times in self._times.items()
        }

    def read(self, video: str, indices: Indices) -> list[bytes]:
        """The JPEG of each frame."""
        jpegs = self._jpegs[video]
        return [jpegs[int(index)] for index in indices]

    def times_us(self, video: str) -> np.ndarray:
        """int64 (num_frames,): whole microseconds since the first frame."""
        return self._times[video]


def measure_memory(
    manifest: Path,
    pack: Path,
    bench: MemoryBench,
    *,
    on_case: Callable[[str], None] = lambda name: None,
) -> list[MemoryRow]:
    """A row for each loader, number of ranks and number of workers, one after the other."""
    rows = []
    for ranks in bench.memory_ranks:
        for workers in bench.memory_workers:
            for kind in KINDS:
                on_case(f"{kind}, {ranks} ranks, {workers} workers")
                rows.append(_measure_one(manifest, pack, kind, ranks, workers, bench.memory_epochs))
    return rows


def _measure_one(manifest: Path, pack: Path, kind: Kind, ranks: int, workers: int, epochs: int) -> MemoryRow:
    with ExitStack() as stack:
        started = [
            stack.enter_context(_rank(manifest, pack, kind, rank, ranks, workers, epochs))
            for rank in range(ranks)
        ]
        for process in started:
            _await(process)
        own_workers = [pid for process in started for pid in _worker_ids(process)]
        found = {pid: process_memory(pid) for process in started for pid in _tree(process.pid)}
        return MemoryRow(
            kind=kind,
            ranks=ranks,
            workers=workers,
            worker_mb=median(found[pid].private for pid in own_workers) / 1e6,
            private_mb=sum(each.private for each in found.values()) / 1e6,
            shared_mb=sum(each.shared for each in found.values()) / 1e6,
            file_mb=sum(each.of_files for each in found.values()) / 1e6,
        )


def _tree(pid: int) -> list[int]:
    root = psutil.Process(pid)
    return [process.pid for process in (root, *root.children(recursive=True))]


def process_memory(pid: int) -> Memory:
    """From Linux's own sums, in which a page that n processes map counts 1/n for each (PSS).

    Not from USS: that counts a page of the pack as private where only one worker has touched it so far.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    # A private page is dirty, but for those of files that were only read.
    private = min(kib["Private_Dirty"], kib["Pss"] - kib["Pss_File"])
    shared = kib["Pss"] - kib["Pss_File"] - private
    return Memory(private * 1024, shared * 1024, kib["Pss_File"] * 1024)


@contextmanager
def _rank(
    manifest: Path, pack: Path, kind: Kind, rank: int, ranks: int, workers: int, epochs: int
) -> Iterator["subprocess.Popen[str]"]:
    """One training process that holds its loader until the block is over."""
    request = json.dumps([str(manifest), str(pack), kind, rank, ranks, workers, epochs])
    command = [sys.executable, "-m", "scripts.bench_memory", request]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.communicate("\n")


def _await(process: "subprocess.Popen[str]") -> None:
    if _line(process) != "ready":
        raise PipelineError("a rank ended before its memory could be looked at: see its error above")


def _worker_ids(process: "subprocess.Popen[str]") -> list[int]:
    return [int(word) for word in _line(process).split()]


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def hold_loader(
    manifest: str, pack: str, kind: Kind, rank: int, ranks: int, workers: int, epochs: int
) -> None:
    """In a process of its own: run epochs, say so, and keep everything until a line comes."""
    rows = read_manifest(manifest).select()
    store = open_store_of(kind, Path(pack), rows)
    dataset = ClipDataset(rows, store, _WINDOW, augment=AugmentSpec(size_px=112))
    # As many samples as give each worker some batches of every epoch.
    sampler = EpochSampler(rows, _WINDOW, rank=rank, world=ranks, clips_per_video=4)
    spec = LoaderSpec(batch_size=8, workers=workers, start_method=_STARTS[kind])
    loader = build_loader(dataset, sampler, spec)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _ in loader:
            pass
    print("ready")
    print(*_pids(loader), flush=True)
    sys.stdin.readline()


def open_store_of(kind: Kind, pack: Path, rows: Manifest) -> PackStore | ListStore:
    """The pack itself, or all of its bytes in a list."""
    store = PackStore(pack)
    if kind in ("ours", "ours_fork"):
        return store
    return ListStore(store, rows.column("frames").to_pylist())


def _pids(loader: DataLoader[Any]) -> list[int]:
    iterator = cast(Any, loader)._iterator
    return [worker.pid for worker in iterator._workers]


# What came out.


def format_memory(rows: Sequence[MemoryRow]) -> str:
    """All figures for a person."""
    lines = [
        f"\n{'':<12}{'ranks':>6}{'workers':>9}{'a worker':>10}{'private':>9}{'shared':>8}{'files':>7}   MB"
    ]
    lines += [
        f"{row.kind:<12}{row.ranks:>6}{row.workers:>9}{row.worker_mb:>10,.0f}{row.private_mb:>9,.0f}"
        f"{row.shared_mb:>8,.0f}{row.file_mb:>7,.0f}"
        for row in rows
    ]
    return "\n".join(lines + [f"{kind}: {what}" for kind, what in KINDS.items()])


def memory_json(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """All figures for programs; a ratio is ours / theirs in private memory, at the most ranks and workers."""
    last = {row.kind: row.private_mb for row in rows}
    ratios = {kind: last["ours"] / last[kind] for kind in KINDS if not kind.startswith("ours")}
    return {"rows": [asdict(row) for row in rows], "ratios": ratios}


if __name__ == "__main__":
    hold_loader(*json.loads(sys.argv[1]))
