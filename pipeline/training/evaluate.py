"""How well a model tells videos apart: scores averaged over a video's clips, each video once.

Ranks share the videos and meet only after their loops, since some may have none. What they found is put
back into the manifest's order before anything is added up, so that any number of ranks gives the same
numbers.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import PipelineError
from pipeline.online.collate import ClipBatch
from pipeline.online.device import Normalize, Prepare, prefetch
from pipeline.online.loader import ClipLoader
from pipeline.online.samplers import EvalSampler
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.reports import EvalReport


class EvaluationError(PipelineError):
    """A model cannot be evaluated, or not in a way that its numbers would mean something."""


class Verdict(NamedTuple):
    """What a model says about one video."""

    row: int
    """Of the manifest."""
    label: int
    predicted: int
    """The class with the highest score; the first of those that share it."""
    place: int
    """How many classes come before the right one: 0 where it is the predicted one."""
    loss: float
    """-ln of the score of the right class."""


def evaluate(
    model: nn.Module,
    loader: ClipLoader,
    *,
    device: str | torch.device = "cpu",
    ranks: Ranks = ALONE,
    prepare: Prepare | None = None,
    amp: torch.dtype | None = None,
    confusion: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvalReport | None:
    """Softmax scores of each clip, averaged over a video's clips; the same report on all ranks.

    loader       of an `EvalSampler` for this rank, that drops no batch; its clips are all of one shape
    prepare      from uint8 to what the model is given; None is `Normalize()`
    amp          what to compute in, by autocast
    confusion    whether the report has the table
    should_stop  asked after each batch; where a rank says yes, there is no report on any: None

    Every batch is given to the model in full size, the last one filled up with its last clip, because
    libraries choose other ways for other shapes, whose results differ in the last digits. With a model
    whose clips do not depend on each other any number of ranks then gives the very same numbers.
    """
    sampler = _checked_sampler(loader, ranks)
    verdicts = _Verdicts(sampler)
    was_training = model.training
    model.eval()
    try:
        with closing(_scored_batches(model, loader, torch.device(device), prepare, amp)) as scored:
            for batch, scores in scored:
                verdicts.add(batch, scores)
                if should_stop():
                    break
    except (RuntimeError, OSError, EOFError):
        # A signal to all processes, like Ctrl-C, ends the workers too, and the loader complains.
        if not should_stop():
            raise
    finally:
        model.train(was_training)
    if ranks.highest(should_stop()):
        return None
    num_classes = ranks.highest(verdicts.num_classes)
    found = _gathered(verdicts.found, len(sampler.manifest), ranks)
    return _report(found, num_classes, sampler.clips_per_video, confusion)


class _Verdicts:
    """Those on this rank's videos, made up from batches whose clips follow each other by video."""

    def __init__(self, sampler: EvalSampler) -> None:
        self.found: list[Verdict] = []
        self.num_classes = 0
        """Of the model; 0 on a rank that has no video."""
        self._sampler = sampler
        self._total = np.zeros(0)
        self._num_clips = 0

    def add(self, batch: ClipBatch, scores: np.ndarray) -> None:
        """Take in the scores of a batch's clips, float64 (B, classes)."""
        self.num_classes = scores.shape[1]
        for row, label, score in zip(batch.videos.tolist(), batch.labels.tolist(), scores, strict=True):
            self._total = score if self._num_clips == 0 else self._total + score
            self._num_clips += 1
            if self._num_clips == self._sampler.clips_per_video:
                average = self._total / self._num_clips
                self.found.append(_verdict(row, label, average, self._sampler))
                self._num_clips = 0


def _checked_sampler(loader: ClipLoader, ranks: Ranks) -> EvalSampler:
    sampler = loader.sampler
    if not isinstance(sampler, EvalSampler):
        raise ValueError(f"an evaluation needs an EvalSampler, got {type(sampler).__name__}")
    if (sampler.rank, sampler.world) != (ranks.rank, ranks.world):
        found = f"rank {sampler.rank} of {sampler.world}"
        raise ValueError(f"the sampler is for {found}, this is rank {ranks.rank} of {ranks.world}")
    if loader.drop_last:
        raise ValueError("an evaluation must not drop clips: use LoaderSpec.for_evaluation()")
    return sampler


def _scored_batches(
    model: nn.Module,
    loader: ClipLoader,
    device: torch.device,
    prepare: Prepare | None,
    amp: torch.dtype | None,
) -> Generator[tuple[ClipBatch, np.ndarray], None, None]:
    """Batches with the scores of their clips, float64 (B, classes)."""
    with closing(prefetch(loader, device, prepare=prepare or Normalize())) as batches:
        for batch in batches:
            with torch.no_grad(), torch.autocast(device.type, amp, enabled=amp is not None):
                outputs = model(_filled_up(batch.frames, loader.batch_size or 1)).detach()
            scores = torch.softmax(outputs[: len(batch.labels)].double(), dim=1)
            yield batch, scores.cpu().numpy()


def _filled_up(frames: Tensor, size: int) -> Tensor:
    """(B, ...) -> (size, ...), repeating the last clip; the order in memory is kept."""
    # `expand` would be shorter, and its strides would have `cat` give up the order in memory.
    return torch.cat([frames, *[frames[-1:]] * (size - len(frames))])


def _verdict(row: int, label: int, scores: np.ndarray, sampler: EvalSampler) -> Verdict:
    """From a video's averaged scores, float64 (classes,)."""
    if not np.isfinite(scores).all():
        raise EvaluationError(
            f"{sampler.manifest[row].video}: the model's scores are not numbers: its weights are spoilt, "
            "or it overflows in this precision; train with a lower lr, or evaluate with amp off"
        )
    if not 0 <= label < len(scores):
        raise EvaluationError(
            f"{sampler.manifest[row].video} has label {label}, and the model {len(scores)} classes: "
            "it was trained on fewer"
        )
    right = scores[label]
    # Of classes with equal scores the first comes first: a model that says nothing is not always right.
    place = int((scores > right).sum() + (scores[:label] == right).sum())
    loss = -float(np.log(max(right, np.finfo(np.float64).tiny)))
    return Verdict(row, label, int(scores.argmax()), place, loss)


def _gathered(found: list[Verdict], num_videos: int, ranks: Ranks) -> np.ndarray:
    """The verdicts of all ranks in the manifest's order: float64 (num_videos, 5), fields as columns."""
    most = -(-num_videos // ranks.world)
    part = torch.full((most, len(Verdict._fields)), -1.0, dtype=torch.float64)
    if found:
        part[: len(found)] = torch.tensor(found, dtype=torch.float64)
    everything = ranks.gathered(part).flatten(0, 1).numpy()
    everything = everything[everything[:, 0] >= 0]
    rows = everything[:, 0].astype(np.int64)
    if not np.array_equal(np.sort(rows), np.arange(num_videos)):
        raise EvaluationError(
            f"{len(set(rows.tolist()))} of {num_videos} videos were counted, {len(rows)} times in all: each "
            "must be once; the loader does not give what its sampler says"
        )
    return everything[np.argsort(rows)]


def _report(found: np.ndarray, num_classes: int, clips_per_video: int, confusion: bool) -> EvalReport:
    _, labels, predicted, places, losses = found.T
    cells = (labels * num_classes + predicted).astype(np.int64)
    table = np.bincount(cells, minlength=num_classes**2)
    table = table.reshape(num_classes, num_classes)
    counts = table.sum(axis=1)
    return EvalReport(
        top1=float(np.mean(places == 0)),
        top5=float(np.mean(places < 5)),
        loss=float(np.mean(losses)),
        num_videos=len(found),
        clips_per_video=clips_per_video,
        per_class=tuple(
            int(right) / int(count) if count else None
            for right, count in zip(table.diagonal(), counts, strict=True)
        ),
        confusion=tuple(map(tuple, table.tolist())) if confusion else None,
    )
