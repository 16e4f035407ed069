"""A manifest out of frame folders and split lists alone: the videos may be gone."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import FolderError, ManifestError, PipelineError
from pipeline.folder import FrameFolder, find_folders, read_frames_json
from pipeline.manifest import SIDES, STATUSES, Side, Status, VideoRecord, write_manifest
from pipeline.offline.annotate import Annotation, annotate
from pipeline.offline.failures import FailedVideo, read_failures
from pipeline.offline.lists import fold, stem_path
from pipeline.offline.memory import (
    DatasetMemory,
    draw_sides,
    order_classes,
    read_memory,
    remembered_classes,
    write_memory,
)

Splits = Mapping[str, Mapping[str, Side]]
"""For each column of a split, the side of each video that is on one."""

RANDOM_SPLIT = "split01"
DEFAULT_SEED = 0
DEFAULT_TEST_FRACTION = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogReport:
    """What a manifest holds, and what on the way to it was not as it should be."""

    dataset: str
    path: str
    """The manifest."""
    layout: str
    classes: tuple[str, ...]
    """Names in the order of the labels."""
    num_classes_met: int
    """Classes that have a video."""
    by_status: Mapping[Status, int]
    by_split: Mapping[str, Mapping[Side, int]]
    """Videos that have frames, on each side of each split."""
    num_frames: int
    duration_s: float
    failures: Mapping[str, str]
    """For each video that failed, why."""
    unreadable: tuple[str, ...]
    """Frame folders, below the frames root, that cannot be read: their videos are unknown, without a row."""
    missing: tuple[str, ...]
    """Listed, but not there: as the lists name them."""
    unlisted: tuple[str, ...]
    """There, but in no list."""
    unclassed: tuple[str, ...]
    """Videos without a class, and so without a row."""
    warnings: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every video has its frames: a command exits with 1 where not."""
        return not self.failures and not self.unreadable

    def __str__(self) -> str:
        statuses = ", ".join(f"{self.by_status[status]} {status}" for status in STATUSES)
        failures = [f"{video}: {error}" for video, error in self.failures.items()]
        lines = [
            f"{self.path}: {sum(self.by_status.values())} videos ({statuses}), {self.num_frames:,} frames, "
            f"{self.duration_s / 60:.1f} min, {self.num_classes_met} of {len(self.classes)} classes, "
            f"layout {self.layout}",
            *(f"{name}: {side['train']} train, {side['test']} test" for name, side in self.by_split.items()),
            *_name_first("listed, but not there", self.missing),
            *_name_first("there, but not listed", self.unlisted),
            *_name_first("without a class, so without a row", self.unclassed),
            *(f"warning: {warning}" for warning in self.warnings),
            *_name_first("cannot be read; `make verify REPAIR=1` makes anew", self.unreadable),
            *_name_first("failed", failures, num=10),
        ]
        return "\n".join(lines)


def _name_first(what: str, names: Sequence[str], *, num: int = 3) -> list[str]:
    shown = [name if name.isprintable() else repr(name) for name in names[:num]]
    return [f"{what}: {len(names)}, first: {'; '.join(shown)}"] if names else []


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFrames:
    """What a frames root holds."""

    rows: Mapping[str, VideoRecord]
    """By video, sorted; class, label, group and splits are still open."""
    spec: Mapping[str, Any]
    """The options that most folders were made with."""
    unreadable: tuple[str, ...]
    """Folders whose frames.json cannot be read."""
    warnings: tuple[str, ...]


def build_manifest(
    frames_root: Path,
    splits_root: Path,
    target_path: Path,
    *,
    dataset: str,
    layout: str = "auto",
    seed: int | None = None,
    test_fraction: float | None = None,
    allow_leaks: bool = False,
) -> CatalogReport:
    """Write a dataset's manifest from its frame folders and lists; the same folders give the same bytes.

    `seed` and `test_fraction` (0 to 1, of each class's groups) are for the random split of a
    dataset without lists; None is what was drawn with before, or 0 and 0.25. Others than before
    draw anew.

    PipelineError where there are no frames, where lists cannot be read, or where a split of the
    user's own has a group on both sides and `allow_leaks` is not set; then nothing is written.
    """
    found = read_frames(frames_root, dataset=dataset)
    annotation = annotate(tuple(found.rows), splits_root, layout=layout)
    if not annotation.class_of:
        raise ManifestError(
            f"none of {len(found.rows)} videos has a class, first {annotation.unclassed[0]!r}: put them into "
            "videos/<Class>/, or name their classes in a CSV list `video,class` in splits/"
        )
    memory = read_memory(frames_root)
    remembered = remembered_classes(memory, target_path, dataset=dataset)
    classes = order_classes(annotation, remembered)
    splits, memory, split_warnings = _choose_splits(found, annotation, memory, seed, test_fraction)
    records = build_records(found, annotation, classes, splits)
    leaks = _check_leaks(records, tuple(splits), may_stand=allow_leaks or annotation.leaks_stand)
    write_memory(frames_root, replace(memory, classes=classes))
    write_manifest(target_path, records, dataset=dataset, classes=classes, spec=found.spec)
    return _report(
        found,
        annotation,
        records,
        dataset=dataset,
        path=str(target_path),
        classes=classes,
        warnings=(
            *found.warnings,
            *annotation.warnings,
            *_class_warnings(classes, remembered),
            *split_warnings,
            *leaks,
        ),
    )


def read_frames(frames_root: Path, *, dataset: str) -> FoundFrames:
    """Rows from the folders and failures below a frames root; PipelineError where it holds none.

    A folder whose frames.json cannot be read gets no row, as only that file knows which video it
    was and how many frames it has; it is named instead, and the other folders go on.
    """
    failures = {failed.video: failed for failed in read_failures(frames_root)}
    rows: dict[str, VideoRecord] = {}
    specs: Counter[str] = Counter()
    unreadable, warnings = [], []
    for path in find_folders(frames_root):
        name = path.relative_to(frames_root).as_posix()
        try:
            folder = read_frames_json(path)
        except FolderError:
            unreadable.append(name)
            continue
        specs[json.dumps(folder.spec, sort_keys=True)] += 1
        failures.pop(folder.video, None)  # a run was killed before it could forget a mended failure
        row = _row(name, folder)
        if folder.video in rows:
            row, left = _own_folder_first(rows[folder.video], row)
            warnings.append(f"{row.frames!r} and {left.frames!r} both hold {row.video!r}: delete the second")
        rows[folder.video] = row
    rows |= {video: _failed_row(failed) for video, failed in failures.items()}
    if not rows:
        raise PipelineError(
            f"no frames below {frames_root} ({len(unreadable)} folders cannot be read): "
            f"run `make frames DATASET={dataset}`"
        )
    spec, spec_warnings = _common_spec(specs)
    return FoundFrames(
        rows=dict(sorted(rows.items())),
        spec=spec,
        unreadable=tuple(unreadable),
        warnings=(*warnings, *spec_warnings),
    )


def _own_folder_first(one: VideoRecord, other: VideoRecord) -> tuple[VideoRecord, VideoRecord]:
    """Two folders of one video, of which one is a copy: the one that has the video's own path first."""
    return (other, one) if other.frames == stem_path(other.video) else (one, other)


def _row(name: str, folder: FrameFolder) -> VideoRecord:
    return VideoRecord(
        video=folder.video,
        frames=name,
        class_name="",
        label=-1,
        group="",
        num_frames=folder.num_frames,
        width=folder.width,
        height=folder.height,
        fps=folder.fps,
        duration_s=folder.duration_s,
        start_s=folder.start_us / 1e6,
        time_source=folder.time_source,
        status=folder.status,
        error=folder.error,
        note=folder.note,
        splits={},
    )


def _failed_row(failed: FailedVideo) -> VideoRecord:
    return VideoRecord(
        video=failed.video,
        frames="",
        class_name="",
        label=-1,
        group="",
        num_frames=0,
        width=0,
        height=0,
        fps=0.0,
        duration_s=0.0,
        start_s=0.0,
        time_source="",
        status="failed",
        error=f"{failed.stage}: {failed.error}",
        note=None,
        splits={},
    )


def _common_spec(specs: Counter[str]) -> tuple[dict[str, Any], list[str]]:
    if not specs:
        return {}, []
    # Of two that are equally common the first in the order of text, so that builds agree.
    common = min(specs, key=lambda text: (-specs[text], text))
    others = specs.total() - specs[common]
    warning = (
        f"{others} of {specs.total()} folders were made with other options than most: "
        "run `make frames` with the options that all shall have"
    )
    return dict(json.loads(common)), [warning] if others else []


def _class_warnings(classes: Sequence[str], remembered: Sequence[str]) -> list[str]:
    warnings = []
    if tuple(classes[: len(remembered)]) != tuple(remembered):
        warnings.append(
            "labels change their meaning: the official list of classes goes before the one so far"
        )
    alike = Counter(map(fold, classes))
    twice = [name for name in classes if alike[fold(name)] > 1]
    if twice:
        warnings.append(f"classes that differ in case alone: {', '.join(twice)}")
    return warnings


def _choose_splits(
    found: FoundFrames,
    annotation: Annotation,
    memory: DatasetMemory,
    seed: int | None,
    test_fraction: float | None,
) -> tuple[Splits, DatasetMemory, list[str]]:
    """The lists' splits, else a random one; with what is to be remembered, and warnings."""
    if annotation.splits:
        is_asked = seed is not None or test_fraction is not None
        return (
            annotation.splits,
            memory,
            ["seed and test fraction are idle: lists decide"] if is_asked else [],
        )
    seed = next(value for value in (seed, memory.seed, DEFAULT_SEED) if value is not None)
    fractions = (test_fraction, memory.test_fraction, DEFAULT_TEST_FRACTION)
    fraction = next(value for value in fractions if value is not None)
    # A group of failed videos alone is not drawn: it would be a test side with nothing in it.
    usable = [video for video in annotation.class_of if found.rows[video].status != "failed"]
    pairs = {(annotation.class_of[video], annotation.group_of[video]) for video in usable}
    keep = memory.sides if (seed, fraction) == (memory.seed, memory.test_fraction) else {}
    sides = draw_sides(pairs, seed=seed, test_fraction=fraction, keep=keep)
    split = {video: sides[group] for video, group in annotation.group_of.items() if group in sides}
    memory = replace(memory, seed=seed, test_fraction=fraction, sides=sides)
    return {RANDOM_SPLIT: split}, memory, _random_warnings(annotation, pairs, sides)


def _random_warnings(
    annotation: Annotation, pairs: Collection[tuple[str, str]], sides: Mapping[str, Side]
) -> list[str]:
    warnings = []
    tested = {class_name for class_name, group in pairs if sides[group] == "test"}
    untested = sorted({class_name for class_name, _ in pairs} - tested)
    if untested:
        warnings.append(f"{len(untested)} classes have too few groups to be tested, first {untested[0]!r}")
    if all(group == stem_path(video) for video, group in annotation.group_of.items()):
        warnings.append(
            "no groups are known, so each video was drawn by itself: where several are cut from one "
            "recording, say so in a CSV list `video,class,group` in splits/"
        )
    return warnings


def build_records(
    found: FoundFrames, annotation: Annotation, classes: Sequence[str], splits: Splits
) -> list[VideoRecord]:
    """A whole row for each video that has a class, sorted by video."""
    labels = {name: label for label, name in enumerate(classes)}
    return [
        replace(
            row,
            class_name=annotation.class_of[video],
            label=labels[annotation.class_of[video]],
            group=annotation.group_of[video],
            splits={name: sides.get(video) for name, sides in splits.items()},
        )
        for video, row in found.rows.items()
        if video in annotation.class_of
    ]


def _check_leaks(records: Sequence[VideoRecord], splits: Sequence[str], *, may_stand: bool) -> list[str]:
    """A line for each split that has groups on both sides; ManifestError where they may not stand."""
    leaks = []
    for split in splits:
        first: dict[str, dict[str, str]] = {}
        for record in records:
            side = record.splits[split]
            if side is not None:
                first.setdefault(record.group, {}).setdefault(side, record.video)
        both = [(group, videos) for group, videos in first.items() if len(videos) > 1]
        if both:
            group, videos = both[0]
            leaks.append(
                f"{split}: {len(both)} of {len(first)} groups stand on both sides, first {group!r} "
                f"(train {videos['train']!r}, test {videos['test']!r})"
            )
    if leaks and not may_stand:
        raise ManifestError(f"{leaks[0]}: move one side in the list, or pass --allow-leaks")
    return leaks


def _report(
    found: FoundFrames, annotation: Annotation, records: Sequence[VideoRecord], **rest: Any
) -> CatalogReport:
    usable = [record for record in records if record.status != "failed"]
    counts = {name: Counter(record.splits[name] for record in usable) for name in records[0].splits}
    statuses = Counter(record.status for record in records)
    return CatalogReport(
        layout=annotation.layout,
        num_classes_met=len({record.label for record in records}),
        by_status={status: statuses[status] for status in STATUSES},
        by_split={name: {side: count[side] for side in SIDES} for name, count in counts.items()},
        num_frames=sum(record.num_frames for record in usable),
        duration_s=sum(record.duration_s for record in usable),
        failures={row.video: row.error or "" for row in found.rows.values() if row.status == "failed"},
        unreadable=found.unreadable,
        missing=annotation.missing,
        unlisted=annotation.unlisted,
        unclassed=annotation.unclassed,
        **rest,
    )
