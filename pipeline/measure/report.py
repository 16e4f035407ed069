"""A dataset looked at as a whole: what was counted, what is wrong, what its videos and clips look like."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.measure.checks import Check, count_of, split_advice
from pipeline.measure.dataset_stats import DatasetStats, describe_dataset
from pipeline.measure.findings import (
    DuplicateSet,
    Reason,
    check_classes,
    check_duplicates,
    check_lengths,
    check_partial,
    check_rates,
    check_split,
    describe_duplicates,
    find_reasons,
)
from pipeline.measure.folder_stats import FolderStats, choose_evenly, read_folder_stats
from pipeline.measure.inventory import Dataset, check_dataset
from pipeline.measure.pictures import Strip, draw_strip, fit_cell, join_grid, jpeg_uri
from pipeline.measure.shown_clips import ShownClip, StreamSpec, draw_clips
from pipeline.online.store import FolderStore, PackStore, Store

Progress = Callable[[str, int, int], object]
"""Called with what is being done, how many are done, and of how many."""

_CLIP_CELL_PX = 112
_CLIP_COLUMNS = 4
_MAX_DAMAGED_STRIPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSpec:
    """How much of a dataset is looked at and shown."""

    split: str = "split01"
    """The split that training goes by."""
    strips_per_class: int = 2
    """Videos of each class that are shown; fewer where there are more classes than `max_strips` allows."""
    strip_frames: int = 6
    """Frames of each, from the first to the last."""
    max_strips: int = 240
    """Videos that are shown in all: about 12 kB of the page each."""
    clips: int = 12
    """Clips that are shown as training gets them."""
    clip_frames: int = 8
    """Frames of each, at most."""
    max_folders: int = 20_000
    """Folders whose frames.json is read, for uneven times and duplicates."""
    max_rows: int = 50
    """Rows of each table of what is wrong."""
    max_classes: int = 1_000
    """Rows of the table of classes."""

    def __post_init__(self) -> None:
        least = min(self.strips_per_class, self.max_strips, self.clips, self.max_folders)
        if least < 0 or min(self.strip_frames, self.clip_frames, self.max_rows, self.max_classes) < 1:
            raise ValueError(
                f"strips, clips and folders must be >= 0, frames and rows of a table >= 1, got {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPicture:
    """A clip as it is shown."""

    clip: ShownClip
    image: str
    """A `data:` URI: some of its frames in rows, read like text."""
    size_wh: tuple[int, int]
    num_shown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the page says."""

    dataset: Dataset
    spec: ReportSpec
    stream: StreamSpec | None
    checks: tuple[Check, ...]
    """What was found: first what all else stands on, then what harms most."""
    stats: DatasetStats | None = None
    """None where there is no manifest."""
    folders: FolderStats | None = None
    """None where there is no manifest, or no folder."""
    duplicates: tuple[DuplicateSet, ...] = ()
    num_reasons: int = 0
    failures: tuple[Reason, ...] = ()
    """The most frequent of the reasons for which videos failed."""
    num_damages: int = 0
    damages: tuple[Reason, ...] = ()
    strips: tuple[tuple[str, tuple[Strip, ...]], ...] = ()
    """By class."""
    damaged_strips: tuple[Strip, ...] = ()
    clips: tuple[ClipPicture, ...] = ()
    clip_errors: tuple[str, ...] = ()
    """Why clips, or all of them, cannot be shown."""


def build_report(
    dataset: Dataset,
    stream: StreamSpec | None,
    spec: ReportSpec,
    *,
    on_progress: Progress = lambda stage, done, total: None,
) -> Report:
    """Look at a dataset, of which anything may be missing; `stream` is None where there is no manifest.

    Whatever cannot be looked at becomes a check or an error in the report, and the rest is done.
    """
    *checks, pack = check_dataset(dataset, None)
    store = _open_store(dataset)
    if dataset.manifest is None or stream is None:
        strips = _strips_of_folders(dataset, store, spec)
        return Report(dataset=dataset, spec=spec, stream=None, checks=(*checks, pack), strips=strips)
    manifest, usable = dataset.manifest, dataset.manifest.select()
    stats = describe_dataset(manifest)
    folders = _look_into_folders(dataset, usable, spec, on_progress)
    duplicates = describe_duplicates(usable, folders.duplicates if folders else (), spec.split)
    clips, errors = _show_clips(manifest, store, stream, spec)
    checks.append(check_split(stats, spec.split, dataset.command))
    if folders is not None:
        checks.append(check_duplicates(folders, duplicates, dataset.command))
    checks += [
        check_partial(stats, dataset.command),
        check_lengths(usable, stream.window),
        check_rates(stats, folders, stream.window, dataset.command),
        check_classes(stats, dataset.command),
        pack,
    ]
    if not count_of(checks, "error"):  # else they are one of its consequences
        checks += _check_clips(errors)
    num_reasons, failures = find_reasons(manifest, status="failed", most=spec.max_rows)
    num_damages, damages = find_reasons(manifest, status="partial", most=spec.max_rows)
    return Report(
        dataset=dataset,
        spec=spec,
        stream=stream,
        checks=tuple(checks),
        stats=stats,
        folders=folders,
        duplicates=duplicates,
        num_reasons=num_reasons,
        failures=failures,
        num_damages=num_damages,
        damages=damages,
        strips=_strips_of_classes(usable, store, spec, on_progress),
        damaged_strips=_strips_of_damaged(manifest, store, spec),
        clips=clips,
        clip_errors=errors,
    )


def _open_store(dataset: Dataset) -> Store | None:
    """The pack where it can be used, else the folders; None where there is neither."""
    if dataset.pack is not None:
        return PackStore(dataset.root / "pack")
    return FolderStore(dataset.root / "frames") if dataset.frames.folders else None


def _look_into_folders(
    dataset: Dataset, usable: Manifest, spec: ReportSpec, on_progress: Progress
) -> FolderStats | None:
    if not dataset.frames.folders:
        return None
    total, done = min(len(usable), spec.max_folders), 0

    def count() -> None:
        nonlocal done
        done += 1
        on_progress("folders", done, total)

    return read_folder_stats(dataset.root / "frames", usable, max_folders=spec.max_folders, on_folder=count)


# Strips.


class _Chosen(NamedTuple):
    """A video to show."""

    key: str
    video: str
    class_name: str
    status: str


def choose_rows(labels: np.ndarray, spec: ReportSpec) -> np.ndarray:
    """Rows to show, rising by label (N,): evenly spaced within each class, and not more than `max_strips`.

    Where there are more classes than that, evenly spaced classes have one each.
    """
    order = np.argsort(labels, kind="stable")
    met, counts = np.unique(labels, return_counts=True)
    if not len(met) or not min(spec.strips_per_class, spec.max_strips):
        return np.zeros(0, np.int64)
    each = max(min(spec.strips_per_class, spec.max_strips // len(met)), 1)
    rows_of = np.split(order, np.cumsum(counts)[:-1])
    shown = choose_evenly(len(met), spec.max_strips)
    return np.concatenate([rows_of[k][choose_evenly(len(rows_of[k]), each)] for k in shown])


def _strips_of_classes(
    usable: Manifest, store: Store | None, spec: ReportSpec, on_progress: Progress
) -> tuple[tuple[str, tuple[Strip, ...]], ...]:
    if store is None:
        return ()
    rows = choose_rows(usable.column("label"), spec)
    chosen = [_chosen(usable, int(row)) for row in rows]
    return _by_class(_draw(store, chosen, spec, on_progress))


def _strips_of_damaged(manifest: Manifest, store: Store | None, spec: ReportSpec) -> tuple[Strip, ...]:
    if store is None or not spec.strips_per_class:
        return ()
    rows = manifest.select(status="partial")
    chosen = [_chosen(rows, row) for row in range(min(len(rows), _MAX_DAMAGED_STRIPS))]
    return tuple(_draw(store, chosen, spec, lambda stage, done, total: None))


def _strips_of_folders(
    dataset: Dataset, store: Store | None, spec: ReportSpec
) -> tuple[tuple[str, tuple[Strip, ...]], ...]:
    """Of the folders that were looked at where no manifest says which there are; the path names the class."""
    if store is None or not dataset.sample.folders:
        return ()
    found = list(dataset.sample.folders.items())
    classes = [PurePosixPath(key).parts[0] for key, _ in found]
    rows = choose_rows(np.unique(classes, return_inverse=True)[1], spec)
    chosen = [
        _Chosen(found[row][0], found[row][1].video, classes[row], found[row][1].status)
        for row in rows.tolist()
    ]
    return _by_class(_draw(store, chosen, spec, lambda stage, done, total: None))


def _chosen(rows: Manifest, row: int) -> _Chosen:
    record = rows[row]
    return _Chosen(record.frames, record.video, record.class_name, record.status)


def _draw(
    store: Store, chosen: Sequence[_Chosen], spec: ReportSpec, on_progress: Progress
) -> Iterator[Strip]:
    for done, one in enumerate(chosen, 1):
        yield draw_strip(
            store,
            one.key,
            video=one.video,
            class_name=one.class_name,
            status=one.status,
            frames=spec.strip_frames,
        )
        on_progress("strips", done, len(chosen))


def _by_class(strips: Iterator[Strip]) -> tuple[tuple[str, tuple[Strip, ...]], ...]:
    of_class: dict[str, list[Strip]] = {}
    for strip in strips:
        of_class.setdefault(strip.class_name, []).append(strip)
    return tuple((name, tuple(found)) for name, found in of_class.items())


# Clips.


def _show_clips(
    manifest: Manifest, store: Store | None, stream: StreamSpec, spec: ReportSpec
) -> tuple[tuple[ClipPicture, ...], tuple[str, ...]]:
    """The first clips of training, and why some or all of them are missing."""
    if not spec.clips:
        return (), ()
    if store is None:
        return (), (f"there are no frames to make clips of: run `make frames DATASET={manifest.dataset}`",)
    try:
        shown = draw_clips(manifest.select(**{spec.split: "train"}), store, stream, num_clips=spec.clips)
    except PipelineError as error:
        return (), (str(error),)
    return tuple(_picture(clip, spec.clip_frames) for clip in shown.clips), shown.errors


def _picture(clip: ShownClip, num_frames: int) -> ClipPicture:
    places = choose_evenly(len(clip.pictures), num_frames)
    height, width = clip.pictures[0].shape[:2]
    scale = min(_CLIP_CELL_PX / max(height, width), 1)
    cells = [fit_cell(clip.pictures[place], round(height * scale), round(width * scale)) for place in places]
    grid = join_grid(cells, min(_CLIP_COLUMNS, len(cells)))
    return ClipPicture(
        clip=clip, image=jpeg_uri(grid), size_wh=(grid.shape[1], grid.shape[0]), num_shown=len(cells)
    )


def _check_clips(errors: Sequence[str]) -> list[Check]:
    """An error where training would stop."""
    return [
        Check(area="dataset", name="clips", verdict="error", found=found, advice=advice)
        for found, advice in map(split_advice, errors[:1])
    ]
