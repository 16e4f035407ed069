"""Checkpoints: written whole or not at all, read as data alone, and honest about what was trained on."""

import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.files import replaced
from pipeline.manifest import Manifest
from pipeline.online.packfile import encode_key, key_hash
from pipeline.online.windows import WindowSpec
from pipeline.training.reports import EpochRow, EpochTotals

FORMAT_VERSION = 1
"""Goes up when a reader of the old format would misunderstand the new one."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be read, or is not of this run."""


class SeenError(PipelineError):
    """A model would be evaluated on videos that it was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is trained on what: all that an evaluation needs beside the weights."""

    model: str
    classes: tuple[str, ...]
    """Their names in the order of the labels, which is that of the model's outputs."""
    dataset: str
    split: str
    fingerprint: str
    """`Manifest.fingerprint()` of the rows that are trained on."""
    num_videos: int
    """How many those are."""
    window: WindowSpec
    size_hw: tuple[int, int]
    """Height and width (pixels) of the clips."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else decides the weights; only compared with."""

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "RunInfo":
        """From what `dataclasses.asdict` made of one."""
        window = WindowSpec(**values["window"])
        size_hw = (int(values["size_hw"][0]), int(values["size_hw"][1]))
        return cls(**{**values, "window": window, "classes": tuple(values["classes"]), "size_hw": size_hw})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a run needs to go on as if it had never stopped; numbers, strings and tensors alone."""

    spec: dict[str, Any]
    """The options that decide the weights."""
    step: int
    """Steps of the optimizer so far."""
    sampler: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    rng: dict[str, Tensor]
    """State of torch's generators, uint8 (ranks, bytes): `cpu`, and `cuda` where there was one."""
    totals: EpochTotals
    """Of the epoch so far."""
    history: tuple[EpochRow, ...]
    """The epochs that are over."""

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings and tensors under the fields' names; no tensor is copied."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "totals": asdict(self.totals), "history": [asdict(row) for row in self.history]}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "TrainingState":
        """From what `to_plain` made of one."""
        history = tuple(EpochRow.from_plain(row) for row in values["history"])
        return cls(**{**values, "totals": EpochTotals(**values["totals"]), "history": history})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model, where it comes from, and how to train on."""

    about: RunInfo
    model: dict[str, Tensor]
    """`model.state_dict()`"""
    seen: Tensor
    """int64 (N,), ascending: a hash of the name of each video that has been trained on."""
    training: TrainingState | None = None
    """None in a checkpoint that is for use alone."""


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, whole or not at all; OSError where the disk is full or not to be written to."""
    training = checkpoint.training
    values = {
        "format": FORMAT_VERSION,
        "about": asdict(checkpoint.about),
        "model": checkpoint.model,
        "seen": checkpoint.seen,
        "training": training and training.to_plain(),
    }
    with replaced(path) as beside, beside.open("wb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:
            # What torch raises of a full disk speaks of its own file positions.
            reason = error.__context__
            if isinstance(reason, OSError):
                raise OSError(reason.errno, reason.strerror, str(path)) from error
            raise


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint to the CPU; only data is loaded, never code (`weights_only`).

    CheckpointError where it is missing, damaged, foreign or too new.
    """
    values = _read(path)
    if "format" not in values or "about" not in values:
        raise CheckpointError(f"{path} is not a checkpoint of ClipFeed: as mere weights, give it as such")
    if values["format"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {values['format']}, this version reads up to {FORMAT_VERSION}: "
            "update ClipFeed"
        )
    training = values["training"]
    return Checkpoint(
        about=RunInfo.from_plain(values["about"]),
        model=values["model"],
        seen=values["seen"],
        training=TrainingState.from_plain(training) if training else None,
    )


def read_weights(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Weights to begin with, and what they have seen: int64 (N,) as in `Checkpoint.seen`.

    From a checkpoint, or from a file that holds a state dict, or one under `state_dict`; those do not tell
    what they have seen (N = 0). CheckpointError where it is none of these.
    """
    values = _read(path)
    seen = values["seen"] if "about" in values else torch.zeros(0, dtype=torch.int64)
    state = values.get("model", values.get("state_dict", values))
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} holds no state dict: expected names with tensors")
    return state, seen


def _read(path: Path) -> dict[str, Any]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint at {path}: train first, or give the path of one") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a checkpoint")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where a run keeps its checkpoints: `last.pt` to go on from, `best.pt` for use."""

    root: Path
    about: RunInfo
    seen: Tensor
    """int64 (N,), ascending: hashes of the videos trained on, here and by the weights it began with."""
    resumes: bool = True
    """Whether a run goes on that is there; otherwise one begins anew, in its place."""

    @property
    def last(self) -> Path:
        """The newest state, with which the run goes on."""
        return self.root / "last.pt"

    @property
    def best(self) -> Path:
        """The weights that did best on the held-out videos."""
        return self.root / "best.pt"

    def save_last(self, model: dict[str, Tensor], training: TrainingState) -> None:
        """Replace the newest state."""
        checkpoint = Checkpoint(about=self.about, model=model, seen=self.seen, training=training)
        write_checkpoint(self.last, checkpoint)

    def save_best(self, model: dict[str, Tensor]) -> None:
        """Replace the best weights."""
        write_checkpoint(self.best, Checkpoint(about=self.about, model=model, seen=self.seen))

    def find(self) -> Checkpoint | None:
        """The newest state, None where the run has not begun; CheckpointError where it is another run's."""
        if not self.resumes or not self.last.exists():
            return None
        found = read_checkpoint(self.last)
        if found.training is None:
            raise self._other_run("it holds weights for use, and not how to train on")
        self.check_same(asdict(found.about), asdict(self.about))
        if not torch.equal(found.seen, self.seen):
            raise self._other_run("it began with weights that had seen other videos")
        return found

    def check_same(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        """CheckpointError that names what differs between the run that is there and this one."""
        names = [name for name in {**theirs, **ours} if _plain(theirs.get(name)) != _plain(ours.get(name))]
        if names:
            each = (f"{name} {theirs.get(name)!r:.80}, now {ours.get(name)!r:.80}" for name in names)
            raise self._other_run(", ".join(each))

    def _other_run(self, difference: str) -> CheckpointError:
        return CheckpointError(
            f"{self.last} is of another run: {difference}; repeat its options to go on, or begin anew "
            "in another folder"
        )


def _plain(value: Any) -> Any:
    """What a value is after it was stored: a tuple may come back as a list."""
    return list(value) if isinstance(value, tuple) else value


def video_hashes(*manifests: Manifest) -> Tensor:
    """Which videos these are: int64 (N,), ascending, 64 bits of each name and of nothing else.

    So a video counts as the same in any split, selection or rebuilt manifest. Two different names are
    taken for one with probability 1 in 10^7 for a million of each.
    """
    names = [name for manifest in manifests for name in manifest.column("video").to_pylist()]
    hashes = np.array([key_hash(encode_key(name)) for name in names], dtype=np.uint64)
    return torch.from_numpy(np.unique(hashes.view(np.int64)))


def check_unseen(manifest: Manifest, seen: Tensor, *, place: str) -> None:
    """SeenError, beginning with `place`, where some of a manifest's videos have been trained on.

    seen  int64 (N,), ascending, as `video_hashes` gives it
    """
    known = seen.numpy()
    names = manifest.column("video").to_pylist()
    hashes = np.array([key_hash(encode_key(name)) for name in names], dtype=np.uint64).view(np.int64)
    rows = np.flatnonzero(np.isin(hashes, known))
    if rows.size:
        raise SeenError(
            f"{place} was trained on {rows.size} of the {len(names)} videos to evaluate on, first "
            f"{names[rows[0]]}: its score on them tells nothing; take videos that were held out, or allow it"
        )
