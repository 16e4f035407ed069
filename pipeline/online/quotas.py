"""Several sources in balance: by weights, or by a quota in every batch."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.manifest import Manifest
from pipeline.online.concat import source_ids, source_names
from pipeline.online.order import Weighted, dealt_again, draws_at
from pipeline.online.samplers import SamplerError
from pipeline.online.windows import Floats, Integers


@dataclass(frozen=True, slots=True, eq=False)
class QuotaOrder:
    """The same number of rows of each source in every batch, however few the source has.

    A source's places in the batches are filled by a stream that goes through all of its rows again and
    again, each time in a new order; a row that comes again is another clip, with its own start and seed. So
    in an epoch each row of a source comes equally often, within 1: `passes` says beforehand how often,
    `report_distribution` afterwards.

    In a batch a source's rows follow each other, and where the first one's do begin is drawn. Dealt to ranks,
    one in turn to each, every rank's part of the batch has its share of each source to within one row, for
    any number of ranks that divides the batch, and no rank has the odd one always.

    Batches hold their quotas as long as a batch of all ranks together, the loader's batch_size x world /
    clips_per_video videos, is `batch_size`. The rest is as with any order: what stands in a slot follows from
    (seed, epoch, slot), so that `EpochSampler` resumes anywhere.
    """

    source_ids: Integers = field(repr=False)
    """int64 (N,): source of each row, from 0."""
    quotas: tuple[int, ...]
    """Rows of each source in every batch; 0 leaves a source out."""
    num_batches: int | None = None
    """Batches in an epoch. None: as many as it takes until every row of these sources came once."""
    _rows: tuple[Integers, ...] = field(init=False, repr=False)
    """Of each source, ascending."""

    def __post_init__(self) -> None:
        if min(self.quotas, default=0) < 0 or not any(self.quotas):
            raise ValueError(f"quotas must not be negative, nor all 0, got {self.quotas}")
        if self.num_batches is not None and self.num_batches < 1:
            raise ValueError(f"num_batches must be >= 1, got {self.num_batches}")
        counts = np.bincount(self.source_ids, minlength=len(self.quotas))
        if len(counts) != len(self.quotas):
            raise ValueError(f"expected a quota for each of {len(counts)} sources, got {len(self.quotas)}")
        for source, (count, quota) in enumerate(zip(counts.tolist(), self.quotas, strict=True)):
            if quota and not count:
                raise SamplerError(
                    f"source {source} has no rows and is to fill {quota} places of every batch"
                )
        by_source = np.argsort(self.source_ids, kind="stable")
        object.__setattr__(self, "_rows", tuple(np.split(by_source, np.cumsum(counts)[:-1])))
        if self.num_batches is None:
            needed = [-(-len(rows) // q) for rows, q in zip(self._rows, self.quotas, strict=True) if q]
            object.__setattr__(self, "num_batches", max(needed))

    @property
    def batch_size(self) -> int:
        """Rows of a batch, over all ranks."""
        return sum(self.quotas)

    @property
    def num_rows(self) -> int:
        """Rows of the manifest that this order is for."""
        return len(self.source_ids)

    @property
    def num_slots(self) -> int:
        """Whole batches alone."""
        return (self.num_batches or 0) * self.batch_size

    @property
    def passes(self) -> tuple[float, ...]:
        """How often a row of each source comes in an epoch, in the mean; 0 for a source without rows."""
        batches = self.num_batches or 0
        return tuple(q * batches / max(len(rows), 1) for q, rows in zip(self.quotas, self._rows, strict=True))

    def row_shares(self) -> Floats:
        """The share of an epoch that each row is meant to have: float64 (N,), of sum 1."""
        counts = np.array([max(len(rows), 1) for rows in self._rows])
        return np.asarray((np.asarray(self.quotas) / self.batch_size / counts)[self.source_ids])

    def rows(self, slots: Integers, *, seed: int, epoch: int) -> Integers:
        """The next row, at each slot, of the source whose place it is."""
        batches, places = np.divmod(slots, self.batch_size)
        places = (places + draws_at(batches, self.batch_size, seed=seed, epoch=epoch)) % self.batch_size
        ends = np.cumsum(self.quotas)
        sources = np.searchsorted(ends, places, side="right")
        quotas = np.asarray(self.quotas)[sources]
        draws = batches * quotas + places - (ends[sources] - quotas)
        rows = np.empty(len(slots), dtype=np.int64)
        for source in np.unique(sources).tolist():
            is_here, theirs = sources == source, self._rows[source]
            rows[is_here] = theirs[
                dealt_again(draws[is_here], len(theirs), seed=seed, epoch=epoch, stream=source)
            ]
        return rows

    def settings(self) -> dict[str, str | int]:
        """Its name, quotas and length, and a digest of the sources."""
        digest = hashlib.sha256(np.asarray(self.source_ids).astype("<i8").tobytes()).hexdigest()
        quotas = ", ".join(map(str, self.quotas))
        return {"order": "quotas", "quotas": quotas, "batches": self.num_batches or 0, "sources": digest}


def quota_order(
    manifest: Manifest,
    batch_size: int,
    *,
    shares: Mapping[str, float] | None = None,
    num_batches: int | None = None,
) -> QuotaOrder:
    """An order for `EpochSampler(manifest, ..., order=...)` in which every batch has these shares.

    manifest     of several sources, by `concat_manifests`; the very rows that the sampler is given
    batch_size   videos in a batch of all ranks: the loader's batch_size x world / clips_per_video
    shares       of each source by name, of sum 1; None: equal ones. They become whole rows of a batch by
                 largest remainders: `order.quotas`
    num_batches  of an epoch; None: until every row came once

    SamplerError where a source with a share has no rows, or no place in a batch this small.
    """
    names = source_names(manifest)
    parts = _shares_of(names, shares)
    quotas = share_counts(parts, batch_size)
    ids = source_ids(manifest)
    for number, (name, share, quota) in enumerate(zip(names, parts, quotas, strict=True)):
        if share and not quota:
            raise SamplerError(
                f"a share of {share:g} has no place in a batch of {batch_size}: give {name} more, or batches "
                f"of {int(np.ceil(1 / share))} and more; where it need not be in every batch, take weights"
            )
        if share and not (ids == number).any():
            raise SamplerError(f"{name} is to have a share of {share:g} and has no rows: see the selection")
    return QuotaOrder(ids, quotas, num_batches)


def share_counts(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers of this total in proportion to shares of sum 1: largest remainders (Hamilton).

    Each share is rounded down; what is missing goes one by one to the largest fractions, of equal ones to
    the first. So each number is within 1 of its share.

    >>> share_counts([0.5, 0.3, 0.2], 16)
    (8, 5, 3)
    """
    exact = np.asarray(shares, dtype=np.float64) * total
    counts = np.floor(exact + 1e-9).astype(np.int64)  # 0.29 x 100 is 28.999999999999996
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: total - int(counts.sum())]] += 1
    return tuple(counts.tolist())


def balanced_weights(manifest: Manifest, *, shares: Mapping[str, float] | None = None) -> Floats:
    """Weights for `EpochSampler(weights=...)` by inverse frequency, float64 (N,), of sum 1.

    Each source is as likely as its share, by name and of sum 1 (None: all equally); in a source, each class
    that it has rows of, equally; in a class of a source, each row, equally.
    """
    names = source_names(manifest)
    ids = source_ids(manifest)
    _, first, cell, rows = np.unique(
        cells(manifest), return_index=True, return_inverse=True, return_counts=True
    )
    classes = np.bincount(ids[first], minlength=len(names))
    parts = np.asarray(_shares_of(names, shares))
    if (absent := np.flatnonzero((classes == 0) & (parts > 0))).size:
        raise SamplerError(f"{names[absent[0]]} is to have a share and has no rows: see the selection")
    return np.asarray(parts[ids] / classes[ids] / rows[cell])


def balanced_order(manifest: Manifest, *, shares: Mapping[str, float] | None = None) -> Weighted:
    """An order that draws by `balanced_weights`, as many as there are rows.

    Each source, and each class in a source, comes within 2 of its expected count; by `weights=` only each
    class over all sources does.
    """
    return Weighted(balanced_weights(manifest, shares=shares), cells(manifest))


def cells(manifest: Manifest) -> Integers:
    """One number for each source and class, int64 (N,): source x classes + label, so sources are runs."""
    labels = np.asarray(manifest.column("label"), dtype=np.int64)
    return source_ids(manifest) * len(manifest.classes) + labels


def _shares_of(names: Sequence[str], shares: Mapping[str, float] | None) -> list[float]:
    """In the order of the sources; ValueError where they are not shares of a whole."""
    if shares is None:
        return [1 / len(names)] * len(names)
    if set(shares) != set(names):
        raise ValueError(f"shares are of {', '.join(names)}, got {', '.join(shares) or 'none'}")
    parts = [float(shares[name]) for name in names]
    if not all(part >= 0 for part in parts) or abs(sum(parts) - 1) > 1e-6:
        raise ValueError(f"shares must not be negative and be 1 together, got {dict(shares)}: {sum(parts):g}")
    return parts
