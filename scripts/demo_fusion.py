"""Frames and inertial readings in one model, and what becomes of it where the clocks do not agree."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pipeline.errors import PipelineError
from pipeline.files import replaced, write_text
from pipeline.manifest import Manifest, read_manifest
from pipeline.offline.extract import RunSpec
from pipeline.offline.frames import FrameSpec
from pipeline.offline.sample import SampleSpec
from pipeline.offline.sample_imu import CHANNELS, CLASSES, EARLY_S, LONGEST, write_look_alikes
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
from pipeline.online.series import ClockSpec, SeriesSource, SeriesSpec
from pipeline.training.fusion import FusionNet, build_fusion, fit_fusion, judge_fusion
from pipeline.training.ranks import ALONE
from pipeline.training.recipe import TrainSpec
from scripts import extract_frames, pack_frames, run
from scripts.train_place import share_cores

DATASET = "fusion"
WINDOW = WindowSpec(frames=16)
SIZE_PX = 56
# In this process: 16 frames of 64 px are decoded in less time than a step takes, or a worker to begin.
LOADING = LoaderSpec(batch_size=12, workers=0)
# A video's first frame is at EARLY_S of its recorder's clock; video time = reading time + offset_s.
RIGHT = ClockSpec(offset_s=-EARLY_S)
WRONG = ClockSpec(offset_s=-EARLY_S + 0.5)
ENOUGH, CHANCE = 0.9, 0.6
"""Top-1 that the right clock must come to, and that nothing else may exceed: 0.5 is a coin for each pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a model is given: in training, and when it is judged."""

    title: str
    trained: ClockSpec | None
    """The clock of the readings; None: frames alone."""
    judged: ClockSpec | None


TRIALS = (
    Trial(title="frames alone", trained=None, judged=None),
    Trial(title="frames + imu", trained=RIGHT, judged=RIGHT),
    Trial(title="frames + imu, then the clock shifted by 0.5 s", trained=RIGHT, judged=WRONG),
    Trial(title="frames + imu, the clock shifted from the start", trained=WRONG, judged=WRONG),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a trial."""

    title: str
    top1: float
    """Share of the held-out videos, in [0, 1]."""
    seconds: float
    """Of training, where there was any, and of judging."""


def main(
    *,
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    runs: Path = Path("runs"),
    jobs: int = -1,
    groups: int = 12,
    clips: int = 3,
    epochs: int = 10,
) -> int:
    """Train a model with inertial readings beside the frames, without them, and by a clock that is wrong.

    Things move to the left or to the right, and on their way over a bump or through a dip that no picture
    shows: frames tell the ways apart and the readings bumps and dips. Exits with 1 where the readings do not
    help, or go on helping by a clock that is half a second off. What is drawn and decoded is kept.

    Args:
        data: Root of the datasets; this one goes to DATA/fusion.
        manifests: Where the manifest goes.
        runs: Where the trained model goes.
        jobs: Processes that decode; -1 is one on each core.
        groups: Groups of each class, about a quarter of which is held out.
        clips: Videos of each group of each class.
        epochs: Times that each training goes through its videos.
    """
    root, out = data / DATASET, runs / DATASET
    spec = SampleSpec(groups=groups, clips=clips, min_frames=WINDOW.frames, max_frames=LONGEST)
    say_stage(1, "draw videos in look-alike pairs, and a recording beside each")
    drawn = write_look_alikes(root, spec)
    print(f"{root}: {drawn} videos written, of the classes {', '.join(CLASSES)}")
    say_stage(2, "decode them to frames, write the manifest, and pack the frames into one file")
    manifest = prepare_frames(data, manifests, jobs)
    say_stage(3, "train, and judge on the held-out groups")
    share_cores(LOADING, torch.device("cpu"), ALONE)
    with PackStore(root / "pack") as store:
        demo = FusionDemo(manifest, store, root / "imu", TrainSpec(epochs=epochs))
        outcomes = [demo.measure(trial) for trial in TRIALS]
    write_text(out / "report.json", json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    with replaced(out / "fusion.pt") as beside, beside.open("wb") as file:
        torch.save(demo.model_of(RIGHT).state_dict(), file)
    is_as_promised, verdict = judge(outcomes)
    made = {"videos": root / "videos", "readings": root / "imu", "frames": root / "frames", "model": out}
    print("\n" + "\n".join([*format_outcomes(outcomes), verdict, ""]))
    print("\n".join(f"{what:<9} {place}" for what, place in made.items()))
    return 0 if is_as_promised else 1


def say_stage(number: int, title: str) -> None:
    """The line above what a stage says."""
    print(f"\n[{number}/3] {title}", flush=True)


def prepare_frames(data: Path, manifests: Path, jobs: int) -> Manifest:
    """What `make frames` and `make pack` do; PipelineError where a video failed."""
    spec = FrameSpec(short_side_px=64)  # a crop of 56 px then has most of a picture
    status = extract_frames.main(
        spec, RunSpec(jobs=jobs), dataset=DATASET, data=data, manifests=manifests
    ) or pack_frames.main(dataset=DATASET, data=data, manifests=manifests)
    if status:
        raise PipelineError(f"{data / DATASET}: not all videos became frames, see above")
    return read_manifest(manifests / f"{DATASET}.parquet")


class FusionDemo:
    """Trials on one dataset; a model that two of them have in common is trained once."""

    def __init__(self, manifest: Manifest, store: PackStore, readings: Path, spec: TrainSpec) -> None:
        self.manifest, self.store, self.readings, self.spec = manifest, store, readings, spec
        self._models: dict[ClockSpec | None, FusionNet] = {}

    def measure(self, trial: Trial) -> Outcome:
        """Train, where no earlier trial has, and judge; says so."""
        begin = time.monotonic()
        model = self.model_of(trial.trained)
        loader = self.held_out_loader(trial.judged)
        top1 = judge_fusion(model, loader, source=name_of(trial.judged))
        outcome = Outcome(title=trial.title, top1=top1, seconds=time.monotonic() - begin)
        print(f"{outcome.title}: top-1 {outcome.top1:.1%}, {outcome.seconds:.1f} s", flush=True)
        return outcome

    def model_of(self, clock: ClockSpec | None) -> FusionNet:
        """The model that is trained with readings by this clock, or without any: else all is the same."""
        if clock not in self._models:
            model = build_fusion(len(CLASSES), len(CHANNELS), seed=self.spec.seed)
            fit_fusion(model, self.training_loader(clock), self.spec, source=name_of(clock))
            self._models[clock] = model
        return self._models[clock]

    def training_loader(self, clock: ClockSpec | None) -> ClipLoader:
        """Random windows and crops of the train side. Nothing is mirrored: left would become right."""
        rows = self.manifest.select(split01="train")
        augment = AugmentSpec(size_px=SIZE_PX, flip_p=0.0)
        return build_loader(
            self.dataset(rows, clock, augment), EpochSampler(rows, WINDOW, seed=self.spec.seed), LOADING
        )

    def held_out_loader(self, clock: ClockSpec | None) -> ClipLoader:
        """The middle of each video of the test side."""
        rows = self.manifest.select(split01="test")
        augment = AugmentSpec(size_px=SIZE_PX, mode="centre")
        return build_loader(self.dataset(rows, clock, augment), EvalSampler(rows, WINDOW), LOADING)

    def dataset(self, rows: Manifest, clock: ClockSpec | None, augment: AugmentSpec) -> ClipDataset:
        """Clips with the readings at their frames' times, by a clock; None: without readings."""
        sources = {}
        if clock is not None:
            spec = SeriesSpec(pattern="{video}.csv", columns=CHANNELS, clock=clock, mirror=("acc_x",))
            sources["imu"] = SeriesSource(self.readings, spec)
        return ClipDataset(rows, self.store, WINDOW, augment=augment, sources=sources)


def name_of(clock: ClockSpec | None) -> str | None:
    """What the readings are called in a batch."""
    return None if clock is None else "imu"


def judge(outcomes: Sequence[Outcome]) -> tuple[bool, str]:
    """Whether the readings help by the right clock alone, and that in words; outcomes as `TRIALS`."""
    alone, fused, *shifted = [outcome.top1 for outcome in outcomes]
    if fused < ENOUGH:
        return False, f"verdict: frames and readings come to {fused:.1%}, expected {ENOUGH:.0%} or more"
    if max(alone, *shifted) > CHANCE:
        found = f"{alone:.1%} without readings and {max(shifted):.1%} by the wrong clock"
        return False, f"verdict: what should be left to chance is not: {found}, expected {CHANCE:.0%} or less"
    gain = f"the readings lift top-1 from {alone:.1%} to {fused:.1%}"
    return True, f"verdict: {gain}; a clock half a second off undoes it"


def format_outcomes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table with a row for each trial."""
    width = max(len(outcome.title) for outcome in outcomes)
    yield f"{'a model of':<{width}}  {'top-1':>6}  {'took':>7}"
    for outcome in outcomes:
        yield f"{outcome.title:<{width}}  {outcome.top1:>6.1%}  {outcome.seconds:>5.1f} s"


if __name__ == "__main__":
    run(main)
