"""What a training run shows: a bar on a terminal, a line for each epoch, TensorBoard, a summary, JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Never

from torch import nn
from tqdm import tqdm

from pipeline.errors import PipelineError
from pipeline.training.checkpoint import RunInfo
from pipeline.training.reports import EpochRow, EvalReport, FitReport

_MOST_CLASSES = 20


class StepBar:
    """The steps of an epoch, on a terminal only; a line for each epoch is all that a log gets."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self._total = total
        self._is_hidden = None if is_shown else True  # None is tqdm's own way to ask for a terminal
        self._bar: tqdm[Never] | None = None

    def step(self, epoch: int, steps: int) -> None:
        """Move on, beginning a bar with the first step of an epoch."""
        if self._bar is None:
            title = f"epoch {epoch + 1}"
            self._bar = tqdm(
                total=self._total,
                desc=title,
                unit="step",
                disable=self._is_hidden,
                leave=False,
                dynamic_ncols=True,
            )
        self._bar.update(steps - self._bar.n)

    def close(self) -> None:
        """Make room for a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Events:
    """TensorBoard's events: a point for each epoch."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PipelineError(
                f"--tensorboard needs a package that is missing ({error}): pip install tensorboard"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def write(self, row: EpochRow) -> None:
        """Write an epoch; what an earlier run wrote of it and of later ones no longer counts."""
        number = row.epoch + 1
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=number)
        points = {
            "train/loss": row.loss,
            "train/top1": row.top1,
            "train/lr": row.lr,
            "speed/clips_per_s": row.clips_per_s,
            "speed/waiting_share": row.waiting_share,
        }
        if row.held_out is not None:
            held_out = {"top1": row.held_out.top1, "top5": row.held_out.top5, "loss": row.held_out.loss}
            points |= {f"held_out/{name}": value for name, value in held_out.items()}
        for name, value in points.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def format_epoch(row: EpochRow, epochs: int) -> str:
    """One line: how an epoch went, and whether it waited for data."""
    held_out = f"held-out top-1 {row.held_out.top1:6.1%}  " if row.held_out else ""
    return (
        f"epoch {row.epoch + 1:>{len(str(epochs))}}/{epochs}  loss {row.loss:.3f}  top-1 {row.top1:6.1%}  "
        f"{held_out}{row.clips_per_s:,.0f} clips/s  waiting {row.waiting_share:4.0%}"
    )


def format_model(model: nn.Module, about: RunInfo) -> str:
    """A model and its clips, in a few words."""
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    window = about.window
    step = f"{window.fps:g} fps" if window.fps else f"stride {window.stride}"
    step = "segments" if window.mode == "segments" else step
    height, width = about.size_hw
    return (
        f"{about.model}, {millions:.2f} M parameters, {window.frames} frames ({step}) of {width}x{height} px"
    )


def format_evaluation(report: EvalReport, classes: Sequence[str]) -> Iterator[str]:
    """The outcome: top-1 and top-5, and the classes, worst first where there are many."""
    yield (
        f"held out  top-1 {report.top1:.1%}, top-5 {report.top5:.1%}, loss {report.loss:.3f}: "
        f"{report.num_videos:,} videos, scores averaged over {report.clips_per_video} clips of each"
    )
    shares = [
        (share, name) for share, name in zip(report.per_class, classes, strict=False) if share is not None
    ]
    if len(shares) > _MOST_CLASSES:
        yield f"the {_MOST_CLASSES} classes that are told worst, of {len(shares)}:"
        shares = sorted(shares)[:_MOST_CLASSES]
    width = max((len(name) for _, name in shares), default=0)
    for share, name in shares:
        yield f"  {name:<{width}} {share:7.1%}"
    yield from _confusions(report, classes)


def _confusions(report: EvalReport, classes: Sequence[str]) -> Iterator[str]:
    """Which class was taken for which, the most frequent first."""
    if report.confusion is None:
        return
    cells = [
        (count, classes[true], classes[taken])
        for true, row in enumerate(report.confusion)
        for taken, count in enumerate(row)
        if count and taken != true
    ]
    yield f"{sum(count for count, *_ in cells)} videos were taken for another class"
    for count, true, taken in sorted(cells, key=lambda cell: (-cell[0], cell[1:]))[:_MOST_CLASSES]:
        yield f"  {count:>4} of {true} for {taken}"


def evaluation_json(report: EvalReport, classes: Sequence[str]) -> dict[str, Any]:
    """An evaluation for programs: shares in [0, 1], classes by name."""
    per_class = dict(zip(classes, report.per_class, strict=False))
    return {**asdict(report), "per_class": per_class}


def fit_json(report: FitReport) -> dict[str, Any]:
    """A run for programs: a record for each epoch, shares in [0, 1], times in seconds."""
    rows = [
        {**asdict(row), "clips_per_s": row.clips_per_s, "waiting_share": row.waiting_share}
        for row in report.history
    ]
    return {"is_finished": report.is_finished, "steps": report.steps, "epochs": rows}
