"""Training a clip classifier: steps, evaluation, checkpoints, and going on after a stop as if there was none.

    loader -> prefetch -> step -> ... -> evaluate -> checkpoint       (and again, for each epoch)

All chance is in the clips' own seeds and in torch's generators, whose state is part of a checkpoint. On
the CPU a run that was stopped and resumed ends with the very same weights as one that was not.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from pipeline.online.collate import ClipBatch
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Normalize, Prepare, prefetch
from pipeline.online.loader import ClipLoader
from pipeline.training.checkpoint import Checkpoint, RunFolder, TrainingState
from pipeline.training.models import check_labels, count_outputs
from pipeline.training.ranks import (
    ALONE,
    Ranks,
    generator_states,
    restore_generators,
    seed_generators,
    share_buffers,
)
from pipeline.training.recipe import TrainingError, TrainSpec, autocast_dtype, build_optimizer, learning_rate
from pipeline.training.reports import EpochRow, EpochTotals, EvalReport, FitReport, best_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Whom a run tells how it goes, and whom it asks; each on every rank."""

    on_step: Callable[[int, int], None] = lambda epoch, steps: None
    """After each step: the epoch, and steps of it since it began or was resumed."""
    on_epoch: Callable[[EpochRow], None] = lambda row: None
    should_stop: Callable[[], bool] = lambda: False
    """Asked before each step: where one rank says yes, all save and stop."""


@runtime_checkable
class Resumable(Protocol):
    """A sampler that training can be resumed with, as `EpochSampler`."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch over all ranks."""

    @property
    def epoch(self) -> int:
        """The epoch that iteration gives."""

    @property
    def delivered(self) -> int:
        """Samples of this epoch handed to users, over all ranks."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; one whose state was just loaded goes on."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""


def fit(
    model: nn.Module,
    loader: ClipLoader,
    spec: TrainSpec,
    *,
    device: str | torch.device = "cpu",
    ranks: Ranks = ALONE,
    prepare: Prepare | None = None,
    validate: Callable[[nn.Module], EvalReport | None] | None = None,
    folder: RunFolder | None = None,
    hooks: Hooks = Hooks(),
) -> FitReport:
    """Train a model in place: float (B, C, T, H, W) -> float (B, classes).

    loader    of a sampler that can be resumed, for this rank; on all ranks as many batches
    prepare   from uint8 to what the model is given, as `DeviceAugment`; labels may come out as targets
              float (B, classes). None is `Normalize()`
    validate  gives the held-out report on all ranks, or None where it was told to stop; `evaluate` with
              its options
    folder    where checkpoints are. A run that is there goes on where it was; without a folder nothing
              is kept

    TrainingError, ModelError, CheckpointError or SamplerError where something does not fit together,
    before the first step; TrainingError where the loss is no longer a number, before a sound checkpoint is
    replaced. Torch's global generators are left as they were.
    """
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        run = _Run(model, loader, spec, device=device, ranks=ranks, folder=folder)
        run.begin()
        return run.go(prepare or Normalize(), validate, hooks)


def check_model(model: nn.Module, dataset: ClipDataset, device: torch.device) -> None:
    """ModelError where a model cannot take the dataset's clips, or does not have its classes as outputs."""
    manifest = dataset.manifest
    assert manifest is not None, "this is not a worker"
    frames = dataset[0].frames.permute(3, 0, 1, 2)  # (T, H, W, C) -> (C, T, H, W)
    outputs = count_outputs(model, tuple(frames.shape), device=device)
    check_labels(manifest.column("label"), manifest.classes, outputs)


class _Run:
    """What a run remembers from step to step."""

    def __init__(
        self,
        model: nn.Module,
        loader: ClipLoader,
        spec: TrainSpec,
        *,
        device: torch.device,
        ranks: Ranks,
        folder: RunFolder | None,
    ) -> None:
        self.loader, self.spec, self.device, self.ranks, self.folder = loader, spec, device, ranks, folder
        self.sampler = _checked_sampler(loader, ranks)
        self.model = self.parallel = model.to(device)
        if isinstance(loader.dataset, ClipDataset):
            check_model(model, loader.dataset, device)
        self.amp = autocast_dtype(spec.amp, device)
        self.optimizer = build_optimizer(model, spec)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp == torch.float16)
        self.step = 0
        self.history: list[EpochRow] = []
        self.count_anew()

    def count_anew(self) -> None:
        """Of this rank's epoch so far: loss, clips that were right, clips; and seconds."""
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.seconds = self.waited_s = self.lr = 0.0

    # Begin, and begin again.

    def begin(self) -> None:
        """From the folder's newest state if there is one, and then with the other ranks."""
        found = self.folder.find() if self.folder else None
        if found and found.training:
            self.resume(found, found.training)
        else:
            seed_generators(self.spec.seed, 0, rank=self.ranks.rank, device=self.device)
        if self.ranks.world > 1:
            places = [self.device] if self.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(self.model, device_ids=places)

    def resume(self, found: Checkpoint, state: TrainingState) -> None:
        """Be as the run was when the state was saved."""
        assert self.folder is not None
        self.folder.check_same(state.spec, self.deciding())
        self.sampler.load_state_dict(state.sampler)
        self.model.load_state_dict(found.model)
        self.optimizer.load_state_dict(state.optimizer)
        self.scaler.load_state_dict(state.scaler)
        self.step = state.step
        self.history = list(state.history)
        totals = state.totals
        self.seconds, self.lr = totals.seconds, totals.lr
        if self.ranks.is_first:  # all others begin at 0: what was added up would be added up again
            counted = [totals.loss, totals.right, totals.clips]
            self.sums += torch.tensor(counted, dtype=torch.float64, device=self.device)
            self.waited_s = totals.waited_s
        if not restore_generators(state.rng, self.ranks, self.device):
            seed_generators(self.spec.seed, self.step, rank=self.ranks.rank, device=self.device)

    def deciding(self) -> dict[str, Any]:
        """The options that decide the weights: a run goes on where these are the same."""
        options = asdict(self.spec)
        del options["eval_every"], options["checkpoint_every"]
        clips = (self.loader.batch_size or 1) * self.ranks.world
        return {**options, "amp": str(self.amp), "clips in a batch of all ranks": clips}

    # Go.

    def go(
        self, prepare: Prepare, validate: Callable[[nn.Module], EvalReport | None] | None, hooks: Hooks
    ) -> FitReport:
        """All epochs that are left."""
        for epoch in range(self.sampler.epoch if self.step else 0, self.spec.epochs):
            self.sampler.set_epoch(epoch)
            if not self.train_epoch(epoch, prepare, hooks):
                return self.report(is_finished=False)
            row = self.row(epoch)
            share_buffers(self.model, self.ranks)
            if validate and ((epoch + 1) % self.spec.eval_every == 0 or epoch + 1 == self.spec.epochs):
                self.save(self.sampler.state_dict())  # a stop while it evaluates loses nothing
                held_out = validate(self.model)
                if held_out is None:
                    return self.report(is_finished=False)
                row = replace(row, held_out=held_out)
            self.end_epoch(row)
            hooks.on_epoch(row)
        return self.report(is_finished=True)

    def report(self, *, is_finished: bool) -> FitReport:
        """What there is so far."""
        return FitReport(history=tuple(self.history), steps=self.step, is_finished=is_finished)

    def train_epoch(self, epoch: int, prepare: Prepare, hooks: Hooks) -> bool:
        """What is left of an epoch; False where a rank was told to stop, and all have saved."""
        self.model.train()
        sampler, source = self.sampler, _Waiting(self.loader, waited_s=self.waited_s)
        begin, steps, verdict = time.perf_counter() - self.seconds, 0, _GO
        with closing(prefetch(source, self.device, prepare=prepare)) as batches:
            while True:
                before = sampler.state_dict()
                batch, is_stopped = _next(batches, hooks.should_stop)
                # Agreed upon before the step, in which the ranks wait for each other.
                verdict = self.ranks.highest(_STOP if is_stopped else _END if batch is None else _GO)
                if verdict != _GO or batch is None:
                    break
                middle = (before["delivered"] + sampler.delivered) / 2 / sampler.num_samples
                self.take_step(batch, learning_rate((epoch + middle) / self.spec.epochs, self.spec))
                steps += 1
                hooks.on_step(epoch, steps)
                if self.spec.checkpoint_every and self.step % self.spec.checkpoint_every == 0:
                    self.seconds, self.waited_s = time.perf_counter() - begin, source.waited_s
                    self.save(sampler.state_dict())
                    begin = time.perf_counter() - self.seconds
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds, self.waited_s = time.perf_counter() - begin, source.waited_s
        if verdict == _STOP:
            self.save(before)  # a batch that was fetched is given again
        return verdict != _STOP

    def take_step(self, batch: ClipBatch, lr: float) -> None:
        """Forward, backward, and one step of the optimizer."""
        self.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            outputs = self.parallel(batch.frames)
        loss = cross_entropy(outputs.float(), batch.labels, label_smoothing=self.spec.label_smoothing)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.spec.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.count(batch, outputs.detach(), loss.detach())

    def count(self, batch: ClipBatch, outputs: Tensor, loss: Tensor) -> None:
        """Add a batch to the sums, without waiting for the GPU."""
        labels = batch.labels if batch.labels.ndim == 1 else batch.labels.argmax(dim=1)
        self.sums[0] += loss.double() * len(labels)
        self.sums[1] += (outputs.argmax(dim=1) == labels).sum()
        self.sums[2] += len(labels)

    def totals(self) -> EpochTotals:
        """Of all ranks; TrainingError where the loss is no longer a number."""
        parts = self.ranks.gathered(torch.tensor([*self.sums.tolist(), self.waited_s], dtype=torch.float64))
        loss, right, clips, waited_s = parts.sum(dim=0).tolist()
        if not math.isfinite(loss):
            last = f"; {self.folder.last} is the last that was sound" if self.folder else ""
            raise TrainingError(
                f"the loss is {loss} by step {self.step} (lr {self.lr:g}): take a lower lr, a longer warmup "
                f"or clip_grad{last}"
            )
        return EpochTotals(
            loss=loss, right=right, clips=clips, waited_s=waited_s, seconds=self.seconds, lr=self.lr
        )

    def row(self, epoch: int) -> EpochRow:
        """What the epoch came to."""
        totals = self.totals()
        clips = max(totals.clips, 1.0)
        return EpochRow(
            epoch=epoch,
            loss=totals.loss / clips,
            top1=totals.right / clips,
            clips=int(totals.clips),
            lr=totals.lr,
            seconds=totals.seconds,
            waited_s=totals.waited_s / self.ranks.world,
        )

    def end_epoch(self, row: EpochRow) -> None:
        """Keep its row, and the weights: where they are the best yet, a second time."""
        self.history.append(row)
        if self.folder and self.ranks.is_first and best_row(self.history) is row:
            self.folder.save_best(self.model.state_dict())
        self.count_anew()
        self.sampler.set_epoch(row.epoch + 1)
        self.save(self.sampler.state_dict())

    def save(self, sampler: dict[str, Any]) -> None:
        """Write all that the run needs to go on from this state of its sampler; all ranks must come."""
        if self.folder is None:
            return
        totals, states = self.totals(), generator_states(self.ranks, self.device)
        if self.ranks.is_first:
            state = TrainingState(
                spec=self.deciding(),
                step=self.step,
                sampler=sampler,
                optimizer=self.optimizer.state_dict(),
                scaler=self.scaler.state_dict(),
                rng=states,
                totals=totals,
                history=tuple(self.history),
            )
            self.folder.save_last(self.model.state_dict(), state)


_GO, _END, _STOP = range(3)  # what a rank is about to do; the highest decides for all


class _Waiting:
    """A loader's batches, and how long they were waited for."""

    def __init__(self, loader: ClipLoader, *, waited_s: float) -> None:
        self.waited_s = waited_s
        """Seconds so far, those given included."""
        self._loader = loader

    def batches(self) -> Iterator[ClipBatch]:
        """Batches that are not counted yet."""
        source = self._loader.batches()
        while True:
            begin = time.perf_counter()
            batch = next(source, None)
            self.waited_s += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def mark_delivered(self, batch: ClipBatch) -> None:
        """Count a batch."""
        self._loader.mark_delivered(batch)


def _next(batches: Iterator[ClipBatch], should_stop: Callable[[], bool]) -> tuple[ClipBatch | None, bool]:
    """The next batch, None at the end; and whether to stop before it is used."""
    try:
        batch = next(batches, None)
    except (RuntimeError, OSError, EOFError):
        # A signal to all processes, like Ctrl-C, ends the workers too, and the loader complains.
        if not should_stop():
            raise
        return None, True
    return batch, should_stop()


def _checked_sampler(loader: ClipLoader, ranks: Ranks) -> Resumable:
    sampler = loader.sampler
    if not isinstance(sampler, Resumable):
        raise TrainingError(f"a {type(sampler).__name__} cannot be resumed: train with an EpochSampler")
    steps = ranks.gathered(torch.tensor(len(loader))).tolist()
    if len(set(steps)) > 1 or not steps[0]:
        raise TrainingError(
            f"the {ranks.world} ranks have {steps} batches in an epoch, expected the same number from 1 on: "
            "give each rank the same batch_size and its own share of the same videos, "
            "and leave out drop_last where there are fewer clips than one batch"
        )
    return sampler
