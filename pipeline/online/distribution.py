"""Where the samples of an epoch came from: by source and class, expected and delivered."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeline.online.concat import source_ids, source_names
from pipeline.online.order import RowOrder, Weighted
from pipeline.online.quotas import QuotaOrder, cells
from pipeline.online.samplers import EpochSampler
from pipeline.online.windows import Floats, Integers

_CHUNK = 1 << 16


class Part(NamedTuple):
    """What came of one source, or of one class in it."""

    source: str
    class_name: str | None
    """None: all classes of the source."""
    rows: int
    """Rows of the manifest."""
    expected: float
    """Samples that the order's rule means it to have."""
    delivered: int
    """Samples that it had."""
    fewest: int
    """Samples of the row that came least."""
    most: int
    """Samples of the row that came most."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Where an epoch's samples came from; as text, a table."""

    samples: int
    """Samples counted, over all ranks."""
    parts: tuple[Part, ...]
    """Each source followed by its classes; what has no rows is left out."""

    @property
    def sources(self) -> tuple[Part, ...]:
        """The sources alone."""
        return tuple(part for part in self.parts if part.class_name is None)

    def __str__(self) -> str:
        width = max(len(self._name(part)) for part in self.parts) + 2
        head = (
            f"{'source':<{width}}{'rows':>9}{'expected':>11}{'delivered':>11}{'share':>9}{'times a row':>13}"
        )
        return "\n".join([head, *(self._line(part, width) for part in self.parts)])

    def _name(self, part: Part) -> str:
        return f"{part.source:<6}" if part.class_name is None else f"  {part.class_name}"

    def _line(self, part: Part, width: int) -> str:
        counts = f"{part.rows:>9}{part.expected:>11.1f}{part.delivered:>11}"
        share = part.delivered / max(self.samples, 1)
        return f"{self._name(part):<{width}}{counts}{share:>9.1%}{f'{part.fewest} to {part.most}':>13}"


def report_distribution(sampler: EpochSampler, *, samples: int | None = None) -> Distribution:
    """The samples of the sampler's epoch by source and class, over all ranks.

    samples  counted from the epoch's first one; None: those that were delivered so far; `num_samples`: the
             whole epoch, also before it begins

    Counted from the order itself, row by row. The manifest must be of `concat_manifests`.
    """
    manifest = sampler.manifest
    total = sampler.delivered if samples is None else samples
    counts = _row_counts(sampler, total)
    expected = _row_shares(sampler.order, len(manifest)) * total
    names, classes = source_names(manifest), manifest.classes
    by_cell = _summed(cells(manifest), expected, counts)
    parts = []
    for number, sums in _summed(source_ids(manifest), expected, counts):
        parts.append(Part(names[number], None, *sums))
        for cell, cell_sums in by_cell:
            if cell // len(classes) == number:
                parts.append(Part(names[number], classes[cell % len(classes)], *cell_sums))
    return Distribution(total, tuple(parts))


def _row_counts(sampler: EpochSampler, samples: int) -> Integers:
    """How often each row came among an epoch's first samples: int64 (N,)."""
    counts = np.zeros(len(sampler.manifest), dtype=np.int64)
    for begin in range(0, samples, _CHUNK):
        positions = np.arange(begin, min(begin + _CHUNK, samples))
        slots = positions % sampler.num_samples // sampler.clips_per_video
        rows = sampler.order.rows(slots, seed=sampler.seed, epoch=sampler.epoch)
        counts += np.bincount(rows, minlength=len(counts))
    return counts


def _row_shares(order: RowOrder, num_rows: int) -> Floats:
    """The share of an epoch that the order's rule means each row to have: float64 (N,), of sum 1."""
    if isinstance(order, QuotaOrder):
        return order.row_shares()
    if isinstance(order, Weighted):
        return np.asarray(order.weights / order.weights.sum())
    return np.full(num_rows, 1 / num_rows)


def _summed(
    groups: Integers, expected: Floats, counts: Integers
) -> list[tuple[int, tuple[int, float, int, int, int]]]:
    """For each group that has rows: its number, and rows, expected, delivered, fewest and most."""
    by_group = np.argsort(groups, kind="stable")
    numbers, first, rows = np.unique(groups[by_group], return_index=True, return_counts=True)
    expected, counts = expected[by_group], counts[by_group]
    sums = (
        rows,
        np.add.reduceat(expected, first),
        np.add.reduceat(counts, first),
        np.minimum.reduceat(counts, first),
        np.maximum.reduceat(counts, first),
    )
    return list(zip(numbers.tolist(), zip(*(each.tolist() for each in sums), strict=True), strict=True))
