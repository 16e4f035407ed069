"""`make profile`: where the time of training goes, stage by stage, and what to change first."""

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import nn
from torch.nn.functional import cross_entropy

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.manifest import Manifest
from pipeline.measure.plots import draw_profile
from pipeline.measure.profiler import Profile, Step, profile_loader
from pipeline.measure.verdict import format_verdict
from pipeline.online import ClipBatch, DeviceAugment, LoaderSpec, WindowSpec
from pipeline.online.loader import ClipLoader
from pipeline.online.store import Cache, Store
from pipeline.training.checkpoint import RunInfo
from pipeline.training.ranks import ALONE
from pipeline.training.recipe import TrainSpec, autocast_dtype, build_optimizer
from scripts import run
from scripts.profile_output import format_profile, format_title, profile_json
from scripts.train import build, build_training_loader, describe_run
from scripts.train_options import ClipOptions, RunOptions
from scripts.train_output import format_model
from scripts.train_place import Place, Stop, choose_device, share_cores
from scripts.train_tuned import clip_shape, with_tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is profiled, and where the outcome goes."""

    dataset: str = "sample"
    """The folder below DATA that holds `frames/` and, if it was packed, `pack/`."""
    data: Path = Path("data")
    """Root of the datasets."""
    manifests: Path = Path("manifests")
    """Where the manifest is, as DATASET.parquet."""
    model: str = "small"
    """The model whose training step is taken, as `train` names them."""
    step_ms: float | None = None
    """Milliseconds of a stand-in for the step, which only waits; without it the real one."""
    steps: int = 50
    """Steps to measure, 2 or more."""
    split: str = "split01"
    """Column of the manifest that says which videos are trained on."""
    cache: Cache = "auto"
    """Where frames are read from: `ram`, `disk` (the pack), `off` (the folders); `auto` chooses by size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    tuned: Literal["auto", "off"] = "auto"
    """`auto`: with the settings that `tune` has saved, where `train` would take them; `off`: without."""
    out: Path | None = None
    """The picture, a PNG; without it MANIFESTS/DATASET.profile.png."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the outcome as JSON; without it MANIFESTS/DATASET.profile.json."""

    def __post_init__(self) -> None:
        if self.steps < 2 or (self.step_ms is not None and self.step_ms < 0):
            raise ValueError(f"steps must be >= 2 and step_ms >= 0, got {self.steps} and {self.step_ms}")

    def for_training(self) -> RunOptions:
        """The same as options of `train`."""
        names = ("dataset", "data", "manifests", "model", "split", "cache", "device", "tuned")
        return RunOptions(**{name: getattr(self, name) for name in names})

    def file(self, given: Path | None, suffix: str) -> Path:
        """Where something is written."""
        return given or self.manifests / f"{self.dataset}.profile.{suffix}"


OPTIONS, CLIPS, WINDOW = ProfileOptions(), ClipOptions(), WindowSpec()
LOADING, TRAINING = LoaderSpec(batch_size=8), TrainSpec()


def main(
    options: ProfileOptions = OPTIONS,
    clips: ClipOptions = CLIPS,
    window: WindowSpec = WINDOW,
    loading: LoaderSpec = LOADING,
    training: TrainSpec = TRAINING,
) -> int:
    """Run some steps of training on DATASET, measure each stage, and say what limits and what to change.

    A table of the stages, a picture beside it, and the verdict in the last two lines. Nothing is trained that
    is kept. Options are those of `train`, so that what it would do can be measured.

    Args:
        options: What is profiled, and where the outcome goes.
        clips: Which clips are drawn, and what is done to their pictures.
        window: Which frames make up a clip.
        loading: How batches are made.
        training: How the model is trained.
    """
    device = choose_device(options.device, ALONE)
    shape = clip_shape(options.for_training(), clips, window, loading)
    run, loading = with_tuned(options.for_training(), loading, shape, device=device, ranks=ALONE)
    place = Place(run, device, ALONE, share_cores(loading, device, ALONE), Stop())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(training.seed)
        profile = measure(place, options, clips, window, training)
    print(*format_profile(profile), sep="\n")
    write_text(
        options.file(options.json_file, "json"),
        json.dumps(profile_json(profile), ensure_ascii=False, indent=1) + "\n",
    )
    print(f"picture   {_draw(profile, options)}")
    print(*format_verdict(profile.verdict), sep="\n")
    return 0


def measure(
    place: Place, options: ProfileOptions, clips: ClipOptions, window: WindowSpec, training: TrainSpec
) -> Profile:
    """The profile, after lines that say of what."""
    manifest = place.read_manifest()
    rows = manifest.select(**{options.split: "train"})
    about = describe_run(place.options, clips, window, rows)
    store = place.open_store(manifest)
    if options.step_ms is None:
        model, _ = build(place, about, seed=training.seed)
        step = training_step(model.to(place.device), training, place.device)
        place.say(f"model     {format_model(model, about)}")
    else:
        step = partial(_rest, options.step_ms / 1e3)
        place.say(f"model     none: a stand-in that waits {options.step_ms:g} ms")
    place, loader = open_loader(place, clips, about, rows, store, seed=training.seed)
    place.say(f"device    {place.describe()}")
    return profile_loader(
        loader,
        step,
        steps=options.steps,
        device=place.device,
        prepare=DeviceAugment(clips.device_augment(len(about.classes)), normalize=place.normalize(training)),
    )


def open_loader(
    place: Place, clips: ClipOptions, about: RunInfo, rows: Manifest, store: Store, *, seed: int
) -> tuple[Place, ClipLoader]:
    """The loader that `train` has, and the place as it is then; without workers where they have no memory."""
    build_loader = partial(build_training_loader, clips=clips, about=about, rows=rows, store=store, seed=seed)
    if not place.loading.num_workers:
        return place, build_loader(place)
    try:
        return place, build_loader(place)
    except PipelineError as error:
        without = replace(place, loading=replace(place.loading, workers=0))
        loader = build_loader(without)  # raises where workers are not what it is about
        place.say(f"warning: {error}", "warning: measured without workers")
        return without, loader


def training_step(model: nn.Module, spec: TrainSpec, device: torch.device) -> Step:
    """What the trainer does with a batch: forward, backward, and one step of the optimizer."""
    optimizer, amp = build_optimizer(model, spec), autocast_dtype(spec.amp, device)
    scaler = torch.amp.GradScaler(device.type, enabled=amp == torch.float16)
    model.train()

    def step(batch: ClipBatch) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, amp, enabled=amp is not None):
            outputs = model(batch.frames)
        loss = cross_entropy(outputs.float(), batch.labels, label_smoothing=spec.label_smoothing)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if spec.clip_grad is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), spec.clip_grad)
        scaler.step(optimizer)
        scaler.update()

    return step


def _rest(seconds: float, batch: ClipBatch) -> None:
    time.sleep(seconds)


def _draw(profile: Profile, options: ProfileOptions) -> str:
    path = options.file(options.out, "png")
    step = "a stand-in" if options.step_ms is not None else options.model
    try:
        draw_profile(profile, path, title=f"{options.dataset}, {step}: {format_title(profile)}")
    except PipelineError as error:
        return str(error)
    return str(path)


if __name__ == "__main__":
    run(main, resumes=False)
