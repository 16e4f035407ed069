"""What `make tune` has found, taken up by `make train` where its options do not say otherwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.measure.tuned import (
    ClipShape,
    Tuned,
    TunedError,
    Tuning,
    find_misfit,
    read_machine,
    read_tuned,
    tuned_path,
)
from pipeline.online import LoaderSpec, WindowSpec
from pipeline.online.store import Cache
from pipeline.training.models import find_model
from pipeline.training.ranks import Ranks
from scripts.train_options import ClipOptions, RunOptions
from scripts.train_place import share_cores


def clip_shape(options: RunOptions, clips: ClipOptions, window: WindowSpec, loading: LoaderSpec) -> ClipShape:
    """What a batch will hold; ModelError where there is no such model."""
    size_px = clips.size_px or find_model(options.model).size_px
    return ClipShape(batch_size=loading.batch_size, frames=window.frames, height_px=size_px, width_px=size_px)


def with_tuned(
    options: RunOptions, loading: LoaderSpec, shape: ClipShape, *, device: torch.device, ranks: Ranks
) -> tuple[RunOptions, LoaderSpec]:
    """Both with the tuned settings in place of what is left as it comes, after a line that says so.

    Where the file is damaged, or of another machine, device or clips, they are as they were, after a warning.
    """
    path = tuned_path(options.manifests, options.dataset)
    tuned = None
    try:
        tuned = read_tuned(path) if options.tuned == "auto" else None
        misfit = find_misfit(tuned, read_machine(), shape, device.type) if tuned else None
    except TunedError as error:
        misfit = str(error)
    if misfit is not None:
        _say(ranks, f"warning: {_unused(path, tuned, misfit, options.dataset)}")
    if tuned is None or misfit is not None:
        return options, loading
    # It was tuned for one process: several share its workers as they share the cores.
    workers = max(tuned.tuning.workers // ranks.local_world, min(tuned.tuning.workers, 1))
    changes = _changes(loading, replace(tuned.tuning, workers=workers), share_cores(loading, device, ranks))
    cache = _cache(options, tuned.tuning)
    named = changes if cache == options.cache else {**changes, "cache": cache}
    if named:
        words = ", ".join(f"{name} {_word(value)}" for name, value in named.items())
        _say(ranks, f"loader    {words}, by {path}; delete it, or give --tuned off, to undo")
    return replace(options, cache=cache), replace(loading, **changes)


def _unused(path: Path, tuned: Tuned | None, misfit: str, dataset: str) -> str:
    if tuned is None:
        return f"{misfit}; trained without it"
    return f"{path} is not used: {misfit}; run `make tune DATASET={dataset}` with these options, or delete it"


def _changes(loading: LoaderSpec, tuning: Tuning, here: LoaderSpec) -> dict[str, Any]:
    """What the tuned settings change of what is left as it comes.

    here  what comes of it on this machine untuned
    """
    usual, changes = LoaderSpec(), {}
    is_left = (loading.workers, loading.threads) == (usual.workers, usual.threads)
    if is_left and (here.num_workers, here.threads) != (tuning.workers, tuning.threads):
        changes = {"workers": tuning.workers, "threads": tuning.threads}  # the cores were shared among both
    for name, now in (("prefetch", here.prefetch), ("readers", here.readers), ("pin", here.pins)):
        if getattr(loading, name) == getattr(usual, name) and now != getattr(tuning, name):
            changes[name] = getattr(tuning, name)
    return changes


def _cache(options: RunOptions, tuning: Tuning) -> Cache:
    """Where frames are read from: `auto` where the tuned place is gone, or is memory, which may be full."""
    if options.cache != "auto" or tuning.cache == "ram":
        return options.cache
    root = options.data / options.dataset
    is_there = (root / ("pack" if tuning.cache == "disk" else "frames")).is_dir()
    return tuning.cache if is_there else "auto"


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _say(ranks: Ranks, line: str) -> None:
    if ranks.is_first:
        print(line, flush=True)
