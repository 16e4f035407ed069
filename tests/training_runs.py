"""Small videos, models and loaders to train with; and what one rank of several does."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.manifest import Manifest, read_manifest, write_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EpochSampler,
    EvalSampler,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.loader import ClipLoader
from pipeline.online.pack import write_pack
from pipeline.training.checkpoint import RunFolder, RunInfo, video_hashes
from pipeline.training.evaluate import evaluate
from pipeline.training.models import small_cnn
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.recipe import TrainSpec
from pipeline.training.reports import FitReport
from pipeline.training.trainer import Hooks, fit
from tests.folders import record_of, write_folder

WINDOW = WindowSpec(frames=4)
SIZE_PX = 16
CLASSES = ("Dark", "Grey", "Light")
GROUPS = 8


def write_shades(root: Path, dataset: str = "shades") -> Manifest:
    """A dataset whose three classes a brightness tells apart: frames, pack, and a manifest with two splits.

    split01 holds out groups 0 and 1 of each class, split02 groups 2 and 3; lengths are 3 to 10 frames.
    """
    records, keys = [], []
    for label, name in enumerate(CLASSES):
        for group in range(GROUPS):
            key = f"{name}/v_{name}_g{group:02d}_c01"
            write_folder(root / dataset / "frames", key, frames=3 + group, first=10 * label)
            sides = {f"split{number + 1:02d}": _side(group, number) for number in (0, 1)}
            record = record_of(
                key, 3 + group, label=label, class_name=name, group=f"{name}{group}", splits=sides
            )
            records.append(record)
            keys.append(key)
    path = root / "manifests" / f"{dataset}.parquet"
    write_manifest(path, records, dataset=dataset, classes=CLASSES, spec={"format": 1, "quality": 90})
    manifest = read_manifest(path)
    write_pack(root / dataset / "pack", root / dataset / "frames", manifest)
    return manifest


def _side(group: int, number: int) -> str:
    return "test" if group // 2 == number else "train"


def open_shades(root: Path, dataset: str = "shades") -> tuple[Manifest, PackStore]:
    """What `write_shades` wrote."""
    return read_manifest(root / "manifests" / f"{dataset}.parquet"), PackStore(root / dataset / "pack")


def training_loader(
    root: Path, *, ranks: Ranks = ALONE, batch_size: int = 5, workers: int = 0, **spec: Any
) -> ClipLoader:
    """Clips of the train side."""
    manifest, store = open_shades(root)
    rows = manifest.select(split01="train")
    dataset = ClipDataset(rows, store, WINDOW, augment=AugmentSpec(size_px=SIZE_PX, scale=(0.1, 1.0)))
    sampler = EpochSampler(rows, WINDOW, seed=3, rank=ranks.rank, world=ranks.world)
    return build_loader(dataset, sampler, LoaderSpec(batch_size=batch_size, workers=workers, **spec))


def held_out_loader(
    root: Path,
    *,
    ranks: Ranks = ALONE,
    batch_size: int = 4,
    views: int = 1,
    side: str = "test",
    rows: int | None = None,
) -> ClipLoader:
    """Clips of a side, of its first rows if so many are asked for."""
    manifest, store = open_shades(root)
    picked = manifest.select(split01=side)
    if rows is not None:
        picked = picked.select(video=[picked[row].video for row in range(rows)])
    dataset = ClipDataset(picked, store, WINDOW, augment=AugmentSpec(size_px=SIZE_PX, mode="centre"))
    sampler = EvalSampler(picked, WINDOW, views=views, rank=ranks.rank, world=ranks.world)
    return build_loader(dataset, sampler, LoaderSpec(batch_size=batch_size, workers=0))


def make_model(seed: int = 0, *, width: int = 2, dropout: float = 0.3) -> nn.Module:
    """A small network with dropout and running statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return small_cnn(len(CLASSES), width=width, dropout=dropout)


def run_folder(root: Path, out: Path, **about: Any) -> RunFolder:
    """Where a run over the train side keeps its checkpoints."""
    rows = open_shades(root)[0].select(split01="train")
    values = {
        "model": "small",
        "classes": CLASSES,
        "dataset": "shades",
        "split": "split01",
        "fingerprint": rows.fingerprint(),
        "num_videos": len(rows),
        "window": WINDOW,
        "size_hw": (SIZE_PX, SIZE_PX),
    }
    return RunFolder(root=out, about=RunInfo(**{**values, **about}), seen=video_hashes(rows))


SPEC = TrainSpec(epochs=3, lr=0.02, checkpoint_every=0)


def train(
    root: Path,
    *,
    out: Path | None = None,
    model: nn.Module | None = None,
    spec: TrainSpec = SPEC,
    ranks: Ranks = ALONE,
    hooks: Hooks | None = None,
    batch_size: int = 5,
    workers: int = 0,
    validates: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[nn.Module, FitReport]:
    """A run over the train side, and the model that came of it."""
    model = make_model() if model is None else model
    judge = partial(evaluate, loader=held_out_loader(root, ranks=ranks), ranks=ranks, should_stop=should_stop)
    report = fit(
        model,
        training_loader(root, ranks=ranks, batch_size=batch_size, workers=workers),
        spec,
        ranks=ranks,
        validate=judge if validates else None,
        folder=run_folder(root, out) if out else None,
        hooks=hooks or Hooks(),
    )
    return model, report


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: the tests of others may want the second core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# One rank of several: what it found is written to OUT/RANK.pt.


def in_ranks(work: Callable[[Ranks, Path, Path], Any], root: Path, out: Path, world: int) -> list[Any]:
    """What `work(ranks, root, out)` gives on each of so many processes, joined by gloo."""
    out.mkdir(parents=True, exist_ok=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.training_runs"])
    torch.multiprocessing.start_processes(
        _be_rank, (work, root, out, world), nprocs=world, start_method="forkserver"
    )
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _be_rank(rank: int, work: Callable[[Ranks, Path, Path], Any], root: Path, out: Path, world: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{out}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    result = work(Ranks(rank=rank, world=world, local_rank=rank, local_world=world), root, out)
    torch.save(result, out / f"{rank}.pt")
    dist.destroy_process_group()
