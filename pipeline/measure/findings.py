"""What is wrong with a dataset as a whole, and what to do about it: verdicts on what was counted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.manifest import Manifest
from pipeline.measure.checks import Check, Verdict
from pipeline.measure.dataset_stats import DatasetStats
from pipeline.measure.folder_stats import FolderStats
from pipeline.online.windows import WindowSpec, last_start

Make = Callable[..., str]
"""From a target, and more words, to the command that makes it of this dataset."""

_SHORT_SHARE = 0.05
_RATE_RATIO = 1.5
_IMBALANCE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateSet:
    """Videos with the same content."""

    videos: tuple[str, ...]
    classes: tuple[str, ...]
    """Of each."""
    sides: tuple[str, ...]
    """Of each, in the split that was asked for; empty where it is on neither."""

    @property
    def is_across_sides(self) -> bool:
        """Whether a model would be tested on what it was trained on."""
        return {"train", "test"} <= set(self.sides)

    @property
    def is_across_classes(self) -> bool:
        """Whether one of them has the wrong label."""
        return len(set(self.classes)) > 1


def describe_duplicates(
    rows: Manifest, duplicates: tuple[tuple[int, ...], ...], split: str
) -> tuple[DuplicateSet, ...]:
    """Sets of equal rows by name; those across sides first, then those across classes."""
    columns = [_words(rows, name) for name in ("video", "class_name", split)]
    found = [
        DuplicateSet(videos=videos, classes=classes, sides=sides)
        for videos, classes, sides in ([words(same) for words in columns] for same in duplicates)
    ]
    return tuple(sorted(found, key=lambda one: (not one.is_across_sides, not one.is_across_classes)))


def _words(rows: Manifest, name: str) -> Callable[[tuple[int, ...]], tuple[str, ...]]:
    """From rows to what a column of text says of them; all empty for a split that there is not."""
    if name not in rows.split_names and name not in ("video", "class_name"):
        return lambda same: ("",) * len(same)
    column = rows.column(name)
    return lambda same: tuple(word or "" for word in column.take(pa.array(same)).to_pylist())


def check_split(stats: DatasetStats, split: str, make: Make) -> Check:
    """Whether the split that training goes by has videos on both sides, and no group on both."""
    if split not in stats.splits:
        found = f"no split {split!r}, only {', '.join(stats.splits) or 'none'}"
        return _say("split", "error", found, "say one of these with --split, or " + make("manifest"))
    sides = {side.side: side for side in stats.sides if side.split == split}
    found = f"{split}: {sides['train'].videos:,} to train on, {sides['test'].videos:,} to test on"
    if sides["neither"].videos:
        found += f", {sides['neither'].videos:,} on neither side"
    if not sides["train"].videos:
        return _say("split", "error", found, "see which videos its list names, then " + make("manifest"))
    leaks = stats.leaks.get(split, ())
    if leaks:
        found += f"; {_count(len(leaks), 'group')} on both sides, first {leaks[0].group}"
        return _say("split", "warning", found, "move each to one side in the list, then " + make("manifest"))
    place = stats.splits.index(split)
    untrained = [one.name for one in stats.classes if one.sides[place][1] and not one.sides[place][0]]
    if untrained:
        found += f"; {_classes(untrained)} tested on and never trained on"
        return _say("split", "warning", found, "see which videos its list names, then " + make("manifest"))
    return _say("split", "ok", found)


def check_classes(stats: DatasetStats, make: Make) -> Check:
    """Whether every class has videos, and not ten times as many as another."""
    met = [one for one in stats.classes if one.videos]
    empty = [one.name for one in stats.classes if not one.videos]
    if not met:
        return _say(
            "classes", "error", f"none of {len(stats.classes)} classes has a video", "see the failures"
        )
    least, most = (choose(met, key=lambda one: one.videos) for choose in (min, max))
    found = f"{len(met)} with videos, from {least.videos:,} ({least.name}) to {most.videos:,} ({most.name})"
    if empty:
        advice = f"leave it so, or add their videos, then {make('frames')}"
        return _say("classes", "warning", f"{found}; {_classes(empty)} without a video", advice)
    if most.videos > _IMBALANCE * least.videos:
        return _say("classes", "warning", f"{found}: out of balance", make("train", "ARGS=--balance"))
    return _say("classes", "ok", found)


def check_lengths(rows: Manifest, window: WindowSpec) -> Check:
    """Whether videos are long enough for a clip."""
    rates = None if window.fps is None else rows.column("fps")
    num_short = int((last_start(rows.column("num_frames"), window, video_fps=rates) < 0).sum())
    clip = f"a clip of {window.frames} frames" + (f" at stride {window.stride}" if window.stride > 1 else "")
    if not num_short:
        return _say("lengths", "ok", f"no video is shorter than {clip}")
    does = {"loop": "begin again", "hold": "hold their last frame", "error": "stop the run"}[window.short]
    found = f"{num_short:,} of {len(rows):,} videos are shorter than {clip} and {does}"
    if window.short == "error":
        return _say("lengths", "error", found, "take fewer --frames, a smaller --stride, or --short loop")
    if num_short <= _SHORT_SHARE * len(rows):
        return _say("lengths", "ok", found)
    return _say("lengths", "warning", found, "take fewer --frames, or a smaller --stride")


def check_rates(stats: DatasetStats, folders: FolderStats | None, window: WindowSpec, make: Make) -> Check:
    """Whether a stride means the same time in all videos, and all through each."""
    if not stats.slowest_fps:
        return _say("rates", "ok", "not known of any video")
    is_mixed = stats.fastest_fps > _RATE_RATIO * stats.slowest_fps
    found = f"{stats.slowest_fps:g} to {stats.fastest_fps:g} fps" if is_mixed else "alike"
    num_variable = sum(one.is_variable for one in folders.uneven) if folders else 0
    if folders and folders.looked_at:
        found += f"; variable in {num_variable:,} of {_videos(folders)}"
        num_holes = len(folders.uneven) - num_variable
        found += f", with missing frames in {num_holes:,}" if num_holes else ""
    if (is_mixed or num_variable) and window.fps is None and window.mode == "contiguous":
        rate = next((float(bar.name.split()[0]) for bar in stats.common_rates), 25.0)
        advice = f"have clips go by time: {make('train', f'ARGS=--fps {rate / 2:g}')}"
        return _say("rates", "warning", found, advice)
    return _say("rates", "ok", found)


def check_partial(stats: DatasetStats, make: Make) -> Check:
    """Whether the decoder met damage in videos that it could decode."""
    if not stats.partial:
        return _say("damage", "ok", "none in what was decoded")
    found = f"{_count(stats.partial, 'video')} of {stats.videos:,} decoded with errors"
    advice = f"look at them; take away what is of no use, then {make('frames')}"
    return _say("damage", "warning", found, advice)


def check_duplicates(folders: FolderStats, sets: tuple[DuplicateSet, ...], make: Make) -> Check:
    """Whether there are videos twice, and where that does harm."""
    if not sets:
        return _say("duplicates", "ok", f"none among {_videos(folders)}")
    sides, classes = sum(one.is_across_sides for one in sets), sum(one.is_across_classes for one in sets)
    found = f"{_count(len(sets), 'set')} of equal videos among {_videos(folders)}"
    found += f"; {sides} on both sides of the split" if sides else ""
    found += f"; {classes} under more than one class" if classes else ""
    return _say("duplicates", "warning", found, f"keep one of each, then {make('frames')}")


class Reason(NamedTuple):
    """What went wrong, and with how many videos."""

    error: str
    videos: int
    first: str
    """One of them."""


def find_reasons(manifest: Manifest, *, status: str, most: int) -> tuple[int, tuple[Reason, ...]]:
    """How many different errors the videos of a status have, and the `most` frequent ones."""
    rows = manifest.select(status=status)
    errors = rows.column("error").fill_null("").dictionary_encode()
    codes, first, counts = np.unique(errors.indices.to_numpy(), return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))[:most]
    words = errors.dictionary.take(pa.array(codes[order])).to_pylist()
    videos = rows.column("video").take(pa.array(first[order])).to_pylist()
    return len(codes), tuple(map(Reason, words, counts[order].tolist(), videos))


def _videos(folders: FolderStats) -> str:
    some = "" if folders.is_all else f" of {folders.total:,}"
    return f"the {folders.looked_at:,}{some} videos looked at"


def _classes(names: list[str]) -> str:
    return f"{len(names)} {'class' if len(names) == 1 else 'classes'} (first {names[0]})"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _say(name: str, verdict: Verdict, found: str, advice: str = "") -> Check:
    return Check(area="dataset", name=name, verdict=verdict, found=found, advice=advice)
