"""Write a dataset's manifest from its frame folders and split lists, or show the one that is there."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.compute as pc
import tyro

from pipeline.files import write_text
from pipeline.manifest import SIDES, STATUSES, Manifest, leaking_groups, read_manifest
from pipeline.offline.catalog import CatalogReport, build_manifest
from pipeline.offline.layouts import find_dataset
from scripts import run


def main(
    *,
    dataset: str = "sample",
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    layout: str = "auto",
    seed: int | None = None,
    test_fraction: float | None = None,
    allow_leaks: bool = False,
    show: bool = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Write the manifest of DATASET from its frame folders and lists alone; the videos may be gone.

    Two builds from the same folders are byte-identical, and labels keep their meaning when classes
    are added. Exits with 1 where videos have no frames.

    Args:
        dataset: The folder below DATA that holds `frames/` and, if there are lists, `splits/`.
        data: Root of the datasets.
        manifests: Where the manifest is, as DATASET.parquet.
        layout: How the dataset names classes, groups and splits: ucf101, hmdb51, kinetics,
            something_something_v2, csv or folders; `auto` looks at the lists.
        seed: For the random split of a dataset without lists; as before, or 0.
        test_fraction: Share of each class's groups on its test side; as before, or 0.25.
        allow_leaks: Take lists that have a group on both sides of a split.
        show: Build nothing, only print what the manifest holds.
        json_file: Where to write the summary as JSON, too.
    """
    path = manifests / f"{dataset}.parquet"
    if show:
        summary = summarise(read_manifest(path))
        print("\n".join(describe(summary)))
        _write_json(json_file, asdict(summary))
        return 0
    root = find_dataset(data, dataset)
    report = build_manifest(
        root / "frames",
        root / "splits",
        path,
        dataset=dataset,
        layout=layout,
        seed=seed,
        test_fraction=test_fraction,
        allow_leaks=allow_leaks,
    )
    print_catalog(report)
    _write_json(json_file, asdict(report))
    return 0 if report.is_complete else 1


def print_catalog(report: CatalogReport) -> None:
    """What a build found, for a person."""
    print(report)


def _write_json(path: Path | None, summary: dict[str, Any]) -> None:
    if path is not None:
        write_text(path, json.dumps(summary, ensure_ascii=False, indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One class of a manifest; frames, minutes and sizes are of the videos that did not fail."""

    label: int
    name: str
    videos: int
    failed: int
    frames: int
    shortest: int
    """Frames of the shortest video; 0 where there is none."""
    longest: int
    minutes: float
    sizes: str
    """Width x height of the smallest and of the largest picture, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a manifest holds."""

    dataset: str
    spec: dict[str, Any]
    statuses: dict[str, int]
    time_sources: dict[str, int]
    splits: dict[str, dict[str, int]]
    """For each split the videos that have frames: `train`, `test`, and `none` for those on no side."""
    leaks: dict[str, list[str]]
    """For each split that has any, the groups that stand on both sides."""
    classes: list[ClassRow]
    failures: dict[str, str]


def summarise(manifest: Manifest) -> Summary:
    """Count a manifest's videos by status, time source, split and class."""
    usable = manifest.select()
    leaks = {split: leaking_groups(manifest, split) for split in manifest.split_names}
    statuses = _count(manifest, "status")
    sides = {split: _count(usable, split) for split in manifest.split_names}
    return Summary(
        dataset=manifest.dataset,
        spec=manifest.spec,
        statuses={status: statuses.get(status, 0) for status in STATUSES},
        time_sources=_count(usable, "time_source"),
        splits={
            split: {side: count.get(side, 0) for side in (*SIDES, "none")} for split, count in sides.items()
        },
        leaks={split: groups for split, groups in leaks.items() if groups},
        classes=list(_class_rows(manifest, usable)),
        failures={record.video: record.error or "" for record in manifest.select(status="failed")},
    )


def _count(manifest: Manifest, column: str) -> dict[str, int]:
    counts = pc.value_counts(manifest.column(column)).to_pylist()
    return {count["values"] or "none": count["counts"] for count in counts}


def _class_rows(manifest: Manifest, usable: Manifest) -> Iterator[ClassRow]:
    num_classes = len(manifest.classes)
    videos = np.bincount(manifest.column("label"), minlength=num_classes)
    kept = np.bincount(usable.column("label"), minlength=num_classes)
    order = np.argsort(usable.column("label"), kind="stable")
    rows_of = np.split(order, np.cumsum(kept)[:-1])
    frames, seconds = usable.column("num_frames"), usable.column("duration_s")
    sizes = np.stack([usable.column("width"), usable.column("height")], axis=1)  # (N, 2)
    for label, (name, rows) in enumerate(zip(manifest.classes, rows_of, strict=True)):
        yield ClassRow(
            label=label,
            name=name,
            videos=int(videos[label]),
            failed=int(videos[label] - kept[label]),
            frames=int(frames[rows].sum()),
            shortest=int(frames[rows].min(initial=2**31 - 1)) if len(rows) else 0,
            longest=int(frames[rows].max(initial=0)),
            minutes=round(float(seconds[rows].sum()) / 60, 3),
            sizes=_size_range(sizes[rows]),
        )


def _size_range(sizes: np.ndarray) -> str:
    different = sorted({(int(width), int(height)) for width, height in np.unique(sizes, axis=0)}, key=np.prod)
    ends = different[:1] + different[1:][-1:]
    return " to ".join(f"{width}x{height}" for width, height in ends)


def describe(summary: Summary) -> Iterator[str]:
    """The lines of a summary, for a person: a row for each class that has a video."""
    met = [row for row in summary.classes if row.videos]
    frames, minutes = sum(row.frames for row in met), sum(row.minutes for row in met)
    yield (
        f"{summary.dataset}: {sum(summary.statuses.values())} videos, {frames:,} frames, {minutes:.1f} min, "
        f"{len(met)} of {len(summary.classes)} classes"
    )
    yield f"status: {_say(summary.statuses)}"
    yield f"times from: {_say(summary.time_sources)}"
    yield f"options: {', '.join(f'{name}={value}' for name, value in summary.spec.items())}"
    for split, sides in summary.splits.items():
        yield f"{split}: {_say(sides)}"
        if groups := summary.leaks.get(split):
            yield f"  LEAK: {len(groups)} groups stand on both sides, first {groups[0]!r}"
    yield from _class_table(met)
    if empty := [row.name for row in summary.classes if not row.videos]:
        yield f"{len(empty)} classes have no video, first: {', '.join(empty[:5])}"
    if summary.failures:
        yield f"failed: {len(summary.failures)}"
        for video, error in list(summary.failures.items())[:10]:
            yield f"  {video if video.isprintable() else repr(video)}: {error}"


def _say(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _class_table(rows: list[ClassRow]) -> Iterator[str]:
    width = min(max((len(row.name) for row in rows), default=0), 40)
    yield (
        f"{'label':>5} {'class':{width}} {'videos':>7} {'failed':>6} {'frames':>9} {'shortest':>8} "
        f"{'longest':>7} {'minutes':>8}  size"
    )
    for row in rows:
        yield (
            f"{row.label:5} {row.name[:width]:{width}} {row.videos:7} {row.failed:6} {row.frames:9,} "
            f"{row.shortest:8} {row.longest:7} {row.minutes:8.1f}  {row.sizes}"
        )


if __name__ == "__main__":
    run(main, resumes=False)
