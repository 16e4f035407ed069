"""What came of training and evaluation, as records; how they are printed is the caller's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """How well a model did."""

    top1: float
    """Share of videos whose class has the highest score, in [0, 1]."""
    top5: float
    """Share of videos whose class is among the five highest; 1 where there are no more than five."""
    loss: float
    """Mean over the videos of -ln of their class's averaged score."""
    num_videos: int
    clips_per_video: int
    per_class: tuple[float | None, ...]
    """Share of each class's videos that are right, by label; None where it has none."""
    confusion: tuple[tuple[int, ...], ...] | None = None
    """Videos by their class (rows) and what they were taken for (columns), if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTotals:
    """Sums over an epoch, or what has been done of it, and over all ranks."""

    loss: float
    right: float
    clips: float
    waited_s: float
    seconds: float
    """By the clock: not a sum."""
    lr: float
    """At the last step: not a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One epoch, over all ranks."""

    epoch: int
    """From 0."""
    loss: float
    """Mean over the clips, as trained on."""
    top1: float
    """Share of the clips, as trained on and at that moment, that were right; in [0, 1]."""
    clips: int
    lr: float
    """At its last step."""
    seconds: float
    """By the clock, without evaluation and checkpoints."""
    waited_s: float
    """Seconds of those in which a rank waited for the loader (on a GPU: its host), the mean over ranks."""
    held_out: EvalReport | None = None
    """Evaluation after the epoch, where there was one."""

    @property
    def clips_per_s(self) -> float:
        """Clips trained on in a second, by all ranks together."""
        return self.clips / max(self.seconds, 1e-9)

    @property
    def waiting_share(self) -> float:
        """Share of the time in which nothing was done but wait for data; in [0, 1]."""
        return self.waited_s / max(self.seconds, 1e-9)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "EpochRow":
        """From what `dataclasses.asdict` made of one."""
        held_out = values["held_out"]
        return cls(**{**values, "held_out": held_out and EvalReport(**held_out)})


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What came of a run, with what was done before it was resumed."""

    history: tuple[EpochRow, ...]
    steps: int
    is_finished: bool
    """False where it was told to stop; what is done is saved."""

    @property
    def best(self) -> EpochRow | None:
        """The first epoch with the highest held-out top-1. Chosen by that, it is a little too good."""
        return best_row(self.history)


def best_row(history: Sequence[EpochRow]) -> EpochRow | None:
    """The first row with the highest held-out top-1; None where there was no evaluation."""
    rows = [(row.held_out.top1, row) for row in history if row.held_out]
    return max(rows, key=lambda pair: pair[0])[1] if rows else None
