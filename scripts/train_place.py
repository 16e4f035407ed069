"""Where a training run runs: its processes, device and cores, and what it is stopped by."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import joblib
import torch
from torch import nn

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.manifest import Manifest, read_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EvalSampler,
    LoaderSpec,
    build_loader,
    open_store,
)
from pipeline.online.device import Normalize
from pipeline.online.store import Store
from pipeline.training.checkpoint import RunInfo
from pipeline.training.evaluate import evaluate
from pipeline.training.ranks import Ranks
from pipeline.training.recipe import TrainSpec, autocast_dtype
from pipeline.training.reports import EvalReport
from scripts.train_options import RunOptions


class Stop:
    """Whether a signal has asked this process to come to an end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_asked(self) -> bool:
        """Asked between two steps."""
        return self.signal is not None

    def ask(self, number: int, frame: object) -> None:
        """A handler of signals. The second Ctrl-C no longer waits for a step to end."""
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Workers may have got the signal, too. That they end is no error now, and must not break a step.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def stopping() -> Iterator[Stop]:
    """Have Ctrl-C and SIGTERM ask, instead of ending the process at once."""
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """The device by its word on the command line; on CUDA the one of this process's number."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ranks.local_rank >= count:
        raise PipelineError(
            f"process {ranks.local_rank} of this machine has no GPU, there are {count}: start fewer "
            "processes, or take --device cpu"
        )
    torch.cuda.set_device(ranks.local_rank)
    torch.backends.cudnn.benchmark = True  # all clips are of one shape
    return torch.device("cuda", ranks.local_rank)


def share_cores(loading: LoaderSpec, device: torch.device, ranks: Ranks) -> LoaderSpec:
    """What of this machine's cores goes to workers; on the CPU the model has the other half.

    With as many threads and workers as cores each, threads wait for each other in busy loops while a
    worker has their core: on two busy cores the small model took 5 times as long with two threads as with
    one. The threads do not depend on the workers, since with their number sums change in their last digits.
    """
    loading = replace(loading, ranks_on_machine=ranks.local_world)
    if device.type != "cpu":
        return loading
    cores = max(joblib.cpu_count() // ranks.local_world, 1)
    torch.set_num_threads(max(cores - cores // 2, 1))
    if loading.workers is not None:
        return loading
    return replace(loading, workers=max(cores // 2 // loading.threads, 1))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run runs, and where it takes what it needs."""

    options: RunOptions
    device: torch.device
    ranks: Ranks
    loading: LoaderSpec
    stop: Stop

    def describe(self) -> str:
        """What computes."""
        kind = "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        counts = {
            "processes": self.ranks.world,
            "threads": torch.get_num_threads(),
            "workers": self.loading.num_workers,
            "clips in a batch": self.loading.batch_size,
        }
        return f"{kind}, {', '.join(f'{name} {count}' for name, count in counts.items())}"

    def say(self, *lines: str) -> None:
        """Print, on one of the processes."""
        if self.ranks.is_first:
            print(*lines, sep="\n", flush=True)

    def write_json(self, outcome: dict[str, Any]) -> None:
        """Write the outcome where it was asked for, on one of the processes."""
        if self.options.json_file is not None and self.ranks.is_first:
            write_text(self.options.json_file, json.dumps(outcome, ensure_ascii=False, indent=1) + "\n")

    def read_manifest(self) -> Manifest:
        """The dataset's."""
        return read_manifest(self.options.manifests / f"{self.options.dataset}.parquet")

    def open_store(self, manifest: Manifest) -> Store:
        """Where the frames are read from, after a line that says why."""
        root = self.options.data / self.options.dataset
        opened = open_store(root / "frames", root / "pack", cache=self.options.cache, manifest=manifest)
        self.say(f"frames    {opened.reason}")
        return opened.store

    def judge(
        self,
        about: RunInfo,
        store: Store,
        rows: Manifest,
        spec: TrainSpec,
        *,
        views: int,
        crops: Literal[1, 3] = 1,
    ) -> Callable[[nn.Module], EvalReport | None]:
        """From a model to its report on these rows; None where a rank was told to stop."""
        mode: Literal["centre", "three_crop"] = "centre" if crops == 1 else "three_crop"
        augment = AugmentSpec(size_px=about.size_hw, mode=mode)
        dataset = ClipDataset(rows, store, about.window, augment=augment)
        sampler = EvalSampler(
            rows, about.window, views=views, crops=crops, rank=self.ranks.rank, world=self.ranks.world
        )
        return partial(
            evaluate,
            loader=build_loader(dataset, sampler, self.loading.for_evaluation()),
            device=self.device,
            ranks=self.ranks,
            prepare=self.normalize(spec),
            amp=autocast_dtype(spec.amp, self.device),
            confusion=self.options.confusion,
            should_stop=self.stop.is_asked,
        )

    def normalize(self, spec: TrainSpec) -> Normalize:
        """Frames in the precision that the model computes in."""
        return Normalize(dtype=autocast_dtype(spec.amp, self.device) or torch.float32)
