"""Train and evaluate a clip classifier; a run that was stopped goes on where it was."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.manifest import Manifest, leaking_groups
from pipeline.online import (
    ClipDataset,
    EpochSampler,
    LoaderSpec,
    WindowSpec,
    build_loader,
)
from pipeline.online.device_augment import DeviceAugment
from pipeline.online.loader import ClipLoader
from pipeline.online.order import class_weights
from pipeline.online.store import Store
from pipeline.training.checkpoint import (
    CheckpointError,
    RunFolder,
    RunInfo,
    check_unseen,
    read_checkpoint,
    read_weights,
    video_hashes,
)
from pipeline.training.models import build_model, check_clip, check_labels, find_model, load_weights
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.recipe import TrainSpec
from pipeline.training.reports import EpochRow, EvalReport, FitReport
from pipeline.training.trainer import Hooks, fit
from scripts import run
from scripts.train_options import ClipOptions, RunOptions
from scripts.train_output import (
    Events,
    StepBar,
    evaluation_json,
    fit_json,
    format_epoch,
    format_evaluation,
    format_model,
)
from scripts.train_place import Place, choose_device, share_cores, stopping
from scripts.train_tuned import clip_shape, with_tuned

OPTIONS, CLIPS, WINDOW = RunOptions(), ClipOptions(), WindowSpec()
LOADING, TRAINING = LoaderSpec(batch_size=8), TrainSpec()


def main(
    options: RunOptions = OPTIONS,
    clips: ClipOptions = CLIPS,
    window: WindowSpec = WINDOW,
    loading: LoaderSpec = LOADING,
    training: TrainSpec = TRAINING,
) -> int:
    """Train a model to tell the classes of DATASET apart, and evaluate it on the videos held out.

    A run that was stopped, also by Ctrl-C, goes on when the same command is given again, and ends as if it
    had never stopped. `torchrun --nproc-per-node N -m scripts.train ...` trains with N processes.

    Args:
        options: What is trained on what, and where it goes.
        clips: Which clips are drawn, and what is done to their pictures.
        window: Which frames make up a clip.
        loading: How batches are made.
        training: How the model is trained.
    """
    with joined_ranks(options.device) as ranks, stopping() as stop:
        device = choose_device(options.device, ranks)
        if not options.evaluate_only:
            shape = clip_shape(options, clips, window, loading)
            options, loading = with_tuned(options, loading, shape, device=device, ranks=ranks)
        place = Place(options, device, ranks, share_cores(loading, device, ranks), stop)
        if options.evaluate_only:
            return evaluate_checkpoint(place, training)
        return train(place, clips, window, training)


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """The processes that torchrun started, joined; without it this one alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    is_cpu = device == "cpu" or not torch.cuda.is_available()
    dist.init_process_group("gloo" if is_cpu else "cpu:gloo,cuda:nccl")
    yield Ranks(
        rank=int(os.environ["RANK"]),
        world=world,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    dist.destroy_process_group()  # not where a rank fails: the others may still wait for it


# Train.


def train(place: Place, clips: ClipOptions, window: WindowSpec, spec: TrainSpec) -> int:
    """Train, evaluate what came of it, and say so."""
    options, manifest = place.options, place.read_manifest()
    rows = manifest.select(**{options.split: "train"})
    held_out = manifest.select(**{options.split: options.side})
    if leaks := leaking_groups(manifest, options.split):
        place.say(f"warning: {len(leaks)} groups are on both sides of {options.split}, first {leaks[0]!r}")
    about = describe_run(options, clips, window, rows)
    model, seen_before = build(place, about, seed=spec.seed)
    seen = torch.from_numpy(np.union1d(video_hashes(rows), seen_before))
    if not options.allow_seen:
        check_unseen(held_out, seen, place="this model")
    store = place.open_store(manifest)
    loader = build_training_loader(place, clips, about, rows, store, seed=spec.seed)
    place.say(
        f"videos    {len(rows):,} to train on, {len(held_out):,} held out, by {options.split}",
        f"model     {format_model(model, about)}",
        f"device    {place.describe()}",
    )
    begin = time.monotonic()
    folder = RunFolder(root=options.folder, about=about, seen=seen, resumes=options.resume == "auto")
    report = fit_shown(
        place,
        model,
        loader,
        spec,
        prepare=DeviceAugment(clips.device_augment(len(about.classes)), normalize=place.normalize(spec)),
        validate=place.judge(about, store, held_out, spec, views=1),
        folder=folder,
    )
    last = judge_finally(place, about, store, held_out, spec)(model) if report.is_finished else None
    outcome = {
        **describe_json(about, model, folder.last),
        **fit_json(report),
        "held_out": last and evaluation_json(last, about.classes),
        "seconds": time.monotonic() - begin,
    }
    place.write_json(outcome)
    if last is None:
        return say_stopped(place, report, folder)
    place.say(*format_evaluation(last, about.classes), f"weights   {folder.last}")
    if report.best and folder.best.exists():
        place.say(
            f"          {folder.best}: those of epoch {report.best.epoch + 1}, which did best on the way"
        )
    return 0


def describe_run(options: RunOptions, clips: ClipOptions, window: WindowSpec, rows: Manifest) -> RunInfo:
    """What is trained on what; ModelError where the model cannot take such clips."""
    size_px = clips.size_px or find_model(options.model).size_px
    check_clip(options.model, frames=window.frames, size_hw=(size_px, size_px))
    return RunInfo(
        model=options.model,
        classes=rows.classes,
        dataset=rows.dataset,
        split=options.split,
        fingerprint=rows.fingerprint(),
        num_videos=len(rows),
        window=window,
        size_hw=(size_px, size_px),
        options=clips.deciding(),
    )


def build(place: Place, about: RunInfo, *, seed: int) -> tuple[nn.Module, Tensor]:
    """The model to begin with, and which videos its weights have seen, int64 (N,)."""
    model = build_model(about.model, len(about.classes), seed=seed)
    weights = place.options.weights
    if weights is None:
        return model, torch.zeros(0, dtype=torch.int64)
    state, seen = read_weights(weights)
    fresh = load_weights(model, state, head=find_model(about.model).head, place=str(weights))
    place.say(f"weights   {weights}" + (f", but for {', '.join(fresh)}" if fresh else ""))
    return model, seen


def build_training_loader(
    place: Place, clips: ClipOptions, about: RunInfo, rows: Manifest, store: Store, *, seed: int
) -> ClipLoader:
    """This process's share of the clips to train on."""
    augment = clips.augment(about.size_hw[0], about.classes)
    dataset = ClipDataset(rows, store, about.window, augment=augment, on_bad=clips.on_bad)
    sampler = EpochSampler(
        rows,
        about.window,
        seed=seed,
        rank=place.ranks.rank,
        world=place.ranks.world,
        weights=class_weights(rows.column("label")) if clips.balance else None,
        clips_per_video=clips.clips_per_video,
    )
    return build_loader(dataset, sampler, place.loading)


def fit_shown(
    place: Place,
    model: nn.Module,
    loader: ClipLoader,
    spec: TrainSpec,
    *,
    prepare: DeviceAugment,
    validate: Callable[[nn.Module], EvalReport | None],
    folder: RunFolder,
) -> FitReport:
    """`fit`, with a bar on a terminal, a line for each epoch, and TensorBoard where it is asked for."""
    is_first, options = place.ranks.is_first, place.options
    events = Events(options.tensorboard) if options.tensorboard and is_first else None
    bar = StepBar(len(loader), is_shown=is_first)

    def show(row: EpochRow) -> None:
        bar.close()
        place.say(format_epoch(row, spec.epochs))
        if events is not None:
            events.write(row)

    hooks = Hooks(on_step=bar.step, on_epoch=show, should_stop=place.stop.is_asked)
    with closing(bar), closing(events) if events else nullcontext():
        return fit(
            model,
            loader,
            spec,
            device=place.device,
            ranks=place.ranks,
            prepare=prepare,
            validate=validate,
            folder=folder,
            hooks=hooks,
        )


def say_stopped(place: Place, report: FitReport, folder: RunFolder) -> int:
    """Where the run stands; the exit status of who was ended by this signal."""
    done = f"{len(report.history)} epochs and {report.steps} steps are"
    place.say(f"stopped: {done} in {folder.last}; run the same command again to go on")
    return 128 + (place.stop.signal or signal.SIGTERM)


# Evaluate.


def judge_finally(
    place: Place, about: RunInfo, store: Store, rows: Manifest, spec: TrainSpec
) -> Callable[[nn.Module], EvalReport | None]:
    """The evaluation at the end, of several clips of each video."""
    views = place.options.views or (1 if about.window.mode == "segments" else 3)
    return place.judge(about, store, rows, spec, views=views, crops=place.options.crops)


def evaluate_checkpoint(place: Place, spec: TrainSpec) -> int:
    """Evaluate a checkpoint, with the model and the clips that it was trained with."""
    options, manifest = place.options, place.read_manifest()
    path = options.checkpoint or options.folder / "last.pt"
    checkpoint = read_checkpoint(path)
    about = checkpoint.about
    rows = manifest.select(**{options.split: options.side})
    if not options.allow_seen:
        check_unseen(rows, checkpoint.seen, place=str(path))
    check_classes(about, manifest, path)
    check_labels(rows.column("label"), about.classes, len(about.classes))
    model = build_model(about.model, len(about.classes))
    model.load_state_dict(checkpoint.model)
    model.to(place.device)
    store = place.open_store(manifest)
    place.say(f"model     {format_model(model, about)}, {path}", f"device    {place.describe()}")
    report = judge_finally(place, about, store, rows, spec)(model)
    if report is None:
        place.say("stopped: nothing was evaluated")
        return 128 + (place.stop.signal or signal.SIGTERM)
    place.say(*format_evaluation(report, about.classes))
    place.write_json(
        {**describe_json(about, model, path), "held_out": evaluation_json(report, about.classes)}
    )
    return 0


def check_classes(about: RunInfo, manifest: Manifest, path: Path) -> None:
    """CheckpointError where labels mean something else now; classes may have been added at the end."""
    theirs, ours = about.classes, manifest.classes
    for label, (trained, now) in enumerate(zip(theirs, [*ours, *[None] * len(theirs)], strict=False)):
        if trained != now:
            raise CheckpointError(
                f"{path} was trained with {trained!r} as class {label}, and {manifest.dataset} has "
                f"{now!r} there: evaluate on the dataset that it was trained on"
            )


# Say.


def describe_json(about: RunInfo, model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """What was trained on what, for programs."""
    return {
        "dataset": about.dataset,
        "split": about.split,
        "model": about.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "checkpoint": str(checkpoint),
    }


if __name__ == "__main__":
    run(main)
