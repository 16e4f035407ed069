"""Which clips, in which order, for a seed, an epoch and a rank.

An epoch is a line of samples, numbered from 0: its *positions*. What stands at a position follows from
(manifest, window, seed, epoch, position) and from nothing else, and the ranks deal the line out
among themselves like cards. So the number of ranks changes who gets a clip, never which clips there are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.online.order import (
    InOrder,
    RowOrder,
    Shuffled,
    Tail,
    Weighted,
    clip_seeds,
    draws_below,
    share_length,
)
from pipeline.online.windows import (
    Floats,
    Integers,
    WindowSpec,
    count_starts,
    last_start,
    short_video_error,
    view_starts,
)

STATE_FORMAT = 1
"""Goes up when the same settings would give another stream."""

_CHUNK = 2048
"""Refs that are made at a time. One costs about 1 us; 1,000,000 at once would hold 170 MB."""


class SamplerError(PipelineError):
    """The rows, the ranks or the saved state do not fit the sampler that was asked for."""


class ClipRef(NamedTuple):
    """One clip, in full: whoever holds this and the specs can make the same clip again."""

    video: int
    """Row of the manifest that the sampler and the dataset were given."""
    start: int
    """First frame of the clip; 0 for segments. `resolve_start` says whether it fits by the timestamps."""
    seed: int
    """All further chance of this clip, in [0, 2**63). 0: none, which is what an evaluation has."""
    crop: int = -1
    """-1: by the augmentation's own rule. 0, 1, 2: the left or top, centre, right or bottom crop."""


class EpochSampler(Sampler[ClipRef]):
    """The clips of training: this rank's share of each epoch, resumable at any sample.

    manifest         its rows must have frames, as those of `manifest.select(...)` do
    shuffle          False keeps the manifest's order; starts are drawn all the same
    weights          float (N,), one for each row: rows are drawn with replacement in proportion to
                     them; `class_weights(manifest.column("label"))` puts classes in balance
    clips_per_video  clips of one video that follow each other, each with its own start and seed
                     (repeated augmentation, Hoffer et al. 2020)
    reuse            epochs that show the same clips, each in an order of its own: a clip's chance (start,
                     crop, flip) follows from its row, and is drawn anew every `reuse` epochs. It saves
                     time with a `ClipDataset` that keeps them (`reuse_cache`), and costs diversity: E
                     epochs have the clips of E / reuse. A row that an order has more than once in an
                     epoch (weights, quotas) is the same clip each time
    tail             the samples that do not fill a last round of all ranks: `drop` leaves them out, at
                     most world - 1 of them; `pad` fills the round with the order's first rows, under
                     other starts and seeds. Either way all ranks have equally many
    order            which row stands where, in place of `shuffle` and `weights`

    An epoch has rows x clips_per_video samples. Its line is the same for any `world`: dealt back
    together, one sample from each rank in turn, the shares are what a single rank gets.

    Where an epoch was delivered in part, as the loader says by `mark_delivered`, iteration begins at the
    next sample. That costs the same however many were delivered.
    """

    def __init__(
        self,
        manifest: Manifest,
        window: WindowSpec,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        weights: Floats | None = None,
        clips_per_video: int = 1,
        reuse: int = 1,
        tail: Tail = "drop",
        order: RowOrder | None = None,
    ) -> None:
        _check_rank(rank, world)
        _check_rows(manifest, window)
        if seed < 0 or clips_per_video < 1:
            raise ValueError(f"seed must be >= 0 and clips_per_video >= 1, got {seed} and {clips_per_video}")
        if reuse < 1:
            raise ValueError(f"reuse must be >= 1, got {reuse}")
        if tail not in ("drop", "pad"):
            raise ValueError(f"tail is drop or pad, got {tail!r}")
        if weights is not None and not shuffle:
            raise ValueError("weighted draws have no order to keep: leave out shuffle=False or the weights")
        self.manifest = manifest
        self.window = window
        self.seed = seed
        self.rank = rank
        self.world = world
        self.clips_per_video = clips_per_video
        self.reuse = reuse
        self.tail: Tail = tail
        self.order = _row_order(manifest, shuffle, weights) if order is None else order
        if getattr(order, "num_rows", len(manifest)) != len(manifest):
            raise SamplerError(f"{order!r:.60} is of other rows than this {manifest!r}: make it of the same")
        self._epoch = 0
        self._delivered = 0
        self._is_resumed = False
        if not len(self):
            raise SamplerError(
                f"{self.num_samples} samples are fewer than {world} ranks: the ranks without one would be "
                "waited for; use fewer ranks, more clips_per_video, or tail='pad'"
            )

    @property
    def epoch(self) -> int:
        """The epoch that iteration gives."""
        return self._epoch

    @property
    def num_samples(self) -> int:
        """Samples of the whole epoch, over all ranks, before the tail is dropped or padded."""
        return self.order.num_slots * self.clips_per_video

    @property
    def num_padded(self) -> int:
        """Samples that `pad` adds to an epoch, over all ranks; 0 with `drop`."""
        return max(len(self) * self.world - self.num_samples, 0)

    @property
    def delivered(self) -> int:
        """Samples of this epoch that were handed to users, over all ranks."""
        return self._delivered

    @property
    def remaining(self) -> int:
        """Samples of this epoch that this rank still has to give."""
        return share_length(max(self.num_samples - self._delivered, 0), self.world, self.tail)

    def __len__(self) -> int:
        """This rank's samples in a whole epoch, also in one that was resumed half way.

        So `epochs * len(loader)` steps stays true in a run that was interrupted; what is left of an
        epoch is `remaining`.
        """
        return share_length(self.num_samples, self.world, self.tail)

    def __iter__(self) -> Iterator[ClipRef]:
        """What this rank has left of the epoch.

        Position `delivered + k` goes to rank `k % world`. An epoch that was gone through is given
        again, as torch's samplers do, if no `set_epoch` came in between; one that was
        over when its state was loaded is not.
        """
        if not self.remaining and not self._is_resumed:
            self._delivered = 0
        self._is_resumed = False
        epoch, first, count = self._epoch, self._delivered + self.rank, self.remaining
        for begin in range(0, count, _CHUNK):
            steps = np.arange(begin, min(begin + _CHUNK, count))
            yield from self.refs_at(first + steps * self.world, epoch=epoch)

    def refs_at(self, positions: Integers, *, epoch: int) -> list[ClipRef]:
        """The clips at positions (N,) of an epoch's order, whatever the rank; of the arguments alone.

        A position past the end takes its row from the order's beginning, its chance from itself.
        """
        slots = positions % self.num_samples // self.clips_per_video
        rows = self.order.rows(slots, seed=self.seed, epoch=epoch)
        places = positions if self.reuse == 1 else self._repeats(positions) * len(self.manifest) + rows
        seeds = clip_seeds(places, seed=self.seed, epoch=epoch // self.reuse)
        starts = draws_below(seeds, _of_rows(count_starts, self.manifest, self.window, rows))
        return list(map(ClipRef, rows.tolist(), starts.tolist(), seeds.tolist()))

    def _repeats(self, positions: Integers) -> Integers:
        """Which clip of its video stands at each position; those that `pad` adds are clips of their own."""
        rounds = positions // self.num_samples
        return rounds * self.clips_per_video + positions % self.clips_per_video

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, at its first sample.

        Straight after `load_state_dict` the epoch of that state goes on where it was: a training loop
        need not know whether it was resumed.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        if not (self._is_resumed and epoch == self._epoch):
            self._epoch, self._delivered, self._is_resumed = epoch, 0, False

    def mark_delivered(self, samples: int) -> None:
        """Count samples of this rank that the user has been given, in order; every rank counts as many.

        For the loader, at each batch it hands over, not when it asks for one: what workers have
        prefetched is given again after a resume.
        """
        delivered = self._delivered + samples * self.world
        most = self.num_samples + (self.world - 1 if self.tail == "pad" else 0)
        if samples < 0 or delivered > most:
            raise ValueError(
                f"{samples} more samples on each of {self.world} ranks after {self._delivered} of "
                f"{self.num_samples}: each batch counts once, and `set_epoch` begins the next epoch"
            )
        self._delivered = delivered

    def finish_epoch(self) -> None:
        """Declare the epoch over: for a loader that drops its last batch, which nobody will be given."""
        self._delivered = max(self._delivered, self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples delivered over all ranks, and what decides the stream: numbers and strings."""
        return {
            "format": STATE_FORMAT,
            "epoch": self._epoch,
            "delivered": self._delivered,
            "stream": dict(self._settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the sample after the last one delivered; `world` and `tail` may be others.

        SamplerError that names what differs where the state is of another stream.
        """
        try:
            # A state that does not say how often clips are shown is older than that choice.
            theirs = {"format": state["format"], "reuse": 1, **state["stream"]}
            epoch, delivered = int(state["epoch"]), int(state["delivered"])
        except (KeyError, TypeError, ValueError) as error:
            raise SamplerError(f"not the state of an EpochSampler ({error!r}): {state!r:.200}") from error
        ours = {"format": STATE_FORMAT, **self._settings}
        differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if differing:
            found = ", ".join(f"{name} {theirs.get(name)!r}, now {ours.get(name)!r}" for name in differing)
            raise SamplerError(
                f"cannot resume another stream: the state has {found}; use the run's own settings"
            )
        self._epoch, self._delivered, self._is_resumed = epoch, delivered, True

    @cached_property
    def _settings(self) -> dict[str, str | int]:
        """All that decides the stream besides the epoch: made once, since it reads every row."""
        window = {f"window.{name}": value for name, value in asdict(self.window).items()}
        return {
            "manifest": self.manifest.fingerprint(),
            "seed": self.seed,
            "clips_per_video": self.clips_per_video,
            "reuse": self.reuse,
            **self.order.settings(),
            **window,
        }


class EvalSampler(Sampler[ClipRef]):
    """The clips of an evaluation: every video of the manifest, each view and crop of it once.

    Nothing is drawn, padded or dropped, so two passes are identical. A video's clips follow each other and
    belong to one rank, so that it is counted once however many ranks there are; rank r has the videos
    r, r + world, r + 2 * world ... A rank has none where there are more ranks than videos: such ranks must
    not wait for each other inside the loop, but gather after it.

    views  clips spread evenly over the video (`view_starts`); 1: the centre
    crops  1: the centre crop; 3: left, centre and right (top, centre and bottom of an upright video)
    """

    def __init__(
        self,
        manifest: Manifest,
        window: WindowSpec,
        *,
        views: int = 1,
        crops: Literal[1, 3] = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        _check_rank(rank, world)
        _check_rows(manifest, window)
        if crops not in (1, 3):
            raise ValueError(f"crops must be 1 or 3, got {crops}")
        view_starts(1, window, views, video_fps=1.0)  # raises for views that the window cannot have
        self.manifest = manifest
        self.window = window
        self.views = views
        self.crops = crops
        self.rank = rank
        self.world = world

    @property
    def clips_per_video(self) -> int:
        """Clips that make up the verdict on one video."""
        return self.views * self.crops

    def __len__(self) -> int:
        """Clips of this rank."""
        return len(range(self.rank, len(self.manifest), self.world)) * self.clips_per_video

    def __iter__(self) -> Iterator[ClipRef]:
        """This rank's clips: by video, then by view, then by crop."""
        crops = (1,) if self.crops == 1 else (0, 1, 2)
        step = self.world * _CHUNK
        for begin in range(self.rank, len(self.manifest), step):
            rows = np.arange(begin, min(begin + step, len(self.manifest)), self.world)
            starts = _of_rows(view_starts, self.manifest, self.window, rows, self.views)
            for row, views in zip(rows.tolist(), starts.tolist(), strict=True):
                yield from (ClipRef(row, start, 0, crop) for start in views for crop in crops)


def _row_order(manifest: Manifest, shuffle: bool, weights: Floats | None) -> RowOrder:
    if weights is not None:
        return Weighted(weights, manifest.column("label"))
    return Shuffled(len(manifest)) if shuffle else InOrder(len(manifest))


def _of_rows(
    function: Callable[..., Integers],
    manifest: Manifest,
    window: WindowSpec,
    rows: Integers | slice,
    *args: int,
) -> Integers:
    """A function of windows, for some rows at once; it gets the mean rates only where it needs them."""
    num_frames = manifest.column("num_frames")[rows]
    rates = None if window.fps is None else manifest.column("fps")[rows]
    return np.asarray(function(num_frames, window, *args, video_fps=rates))


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank {rank} of {world}")


def _check_rows(manifest: Manifest, window: WindowSpec) -> None:
    """Every row has frames, and enough of them where the window says that they must be."""
    if not len(manifest):
        raise SamplerError("the manifest has no rows: see which split and status they were selected by")
    num_frames = manifest.column("num_frames")
    empty = np.flatnonzero(num_frames < 1)
    if empty.size:
        raise SamplerError(
            f"{empty.size} of {len(manifest)} videos have no frames, first {manifest[int(empty[0])].video}: "
            "take manifest.select(), which leaves failed videos out"
        )
    if window.short == "error":
        short = np.flatnonzero(_of_rows(last_start, manifest, window, slice(None)) < 0)
        if short.size:
            first = int(short[0])
            video = f"{short.size} of {len(manifest)} videos are too short, first {manifest[first].video}: it"
            raise short_video_error(video, int(num_frames[first]), window)
