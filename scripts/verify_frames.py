"""`make verify`: hold every folder of frames against its frames.json; `--repair` makes anew what fails."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.offline.catalog import build_manifest
from pipeline.offline.extract import RunSpec
from pipeline.offline.layouts import find_dataset
from pipeline.offline.verify import (
    FolderVerdict,
    RepairReport,
    VerifyReport,
    VerifySpec,
    verify_all,
)
from pipeline.offline.verify import repair as repair_folders
from scripts import run
from scripts.progress import VideoBar

_SHOWN = 5
"""Problems of one folder that are printed; the JSON has all of them."""


def main(
    spec: VerifySpec = VerifySpec(),
    *,
    dataset: str = "sample",
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    layout: str = "auto",
    repair: bool = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Hold every folder of DATASET's frames against its frames.json.

    Names, sizes, CRC-32 and times of all frames are compared, and some frames decoded. Exits with 1 where
    a folder is damaged and was not repaired.

    Args:
        spec: How closely to look.
        dataset: The folder below DATA that holds `frames/`, and `videos/` to repair from.
        data: Root of the datasets.
        manifests: Where the manifest goes after a repair, as DATASET.parquet.
        layout: As for `make frames`: how the dataset names classes, groups and splits.
        repair: Decode the videos of damaged folders again, with the options they had; then the manifest.
        json_file: Where to write the verdict as JSON, too.
    """
    root = find_dataset(data, dataset)
    report = _verify(root / "frames", spec, dataset)
    repaired = _repair(report, root) if repair and report.damaged else None
    for verdict in report.damaged if repaired is None else repaired.left:
        print("\n".join(_lines(verdict, root / "frames")))
    if repair:
        target = manifests / f"{dataset}.parquet"
        print(build_manifest(root / "frames", root / "splits", target, dataset=dataset, layout=layout))
    print(_summary(report, repaired, dataset))
    if json_file is not None:
        values = as_json(report, repaired, root / "frames")
        write_text(json_file, json.dumps(values, ensure_ascii=False, indent=1) + "\n")
    return 1 if (report.damaged if repaired is None else repaired.left) else 0


def _verify(frames_root: Path, spec: VerifySpec, dataset: str) -> VerifyReport:
    if not frames_root.is_dir():
        raise PipelineError(f"{frames_root} is missing: run `make frames DATASET={dataset}` first")
    bar = VideoBar(f"verify {dataset}")

    def show(verdict: FolderVerdict) -> None:
        bar.add_frames(verdict.frames_checked)
        bar.add_video(failed=bool(verdict.problems))

    try:
        report = verify_all(frames_root, spec, on_plan=bar.start, on_folder=show)
    finally:
        bar.stop()
    if report.num_folders == 0:
        raise PipelineError(f"no frames below {frames_root}: run `make frames DATASET={dataset}` first")
    return report


def _repair(report: VerifyReport, root: Path) -> RepairReport:
    bar = VideoBar("repair")
    try:
        return repair_folders(
            report,
            root / "videos",
            root / "frames",
            RunSpec(jobs=report.spec.jobs),
            on_plan=bar.start,
            on_frames=bar.add_frames,
            on_video=lambda done: bar.add_video(failed=done.failure is not None),
        )
    finally:
        bar.stop()


def _lines(verdict: FolderVerdict, frames_root: Path) -> list[str]:
    """A folder, and what is wrong with it; the last problem may be why it cannot be repaired, so it stays."""
    problems = list(verdict.problems)
    if len(problems) > _SHOWN:
        left_out = len(problems) - _SHOWN
        problems[_SHOWN - 1 : -1] = [f"and {left_out + 1} kinds of damage more"]
    return [verdict.folder.relative_to(frames_root).as_posix(), *(f"  {problem}" for problem in problems)]


def _summary(report: VerifyReport, repaired: RepairReport | None, dataset: str) -> str:
    """The verdict in one line."""
    of_all = f"of {report.num_folders:,} folders"
    again = f"make verify DATASET={dataset} REPAIR=1"
    if not report.damaged:
        decoded = f" ({report.num_decoded:,} of them decoded)" if report.num_decoded else ""
        frames = f"{report.num_frames:,} frames{decoded}"
        return f"{report.num_folders:,} folders, {frames}: all as frames.json says"
    if repaired is None:
        return f"{len(report.damaged):,} {of_all} {_be(report.damaged)} damaged: run {again}"
    done = f"{len(repaired.repaired):,}"
    if not repaired.left:
        return f"{done} {of_all} had damage and {_be(repaired.repaired)} repaired: all as frames.json says"
    return (
        f"{len(repaired.left):,} {of_all} {_be(repaired.left)} damaged still, "
        f"{done} {_be(repaired.repaired)} repaired: see to what is named above, then run {again}"
    )


def _be(verdicts: Sequence[FolderVerdict]) -> str:
    return "is" if len(verdicts) == 1 else "are"


def as_json(report: VerifyReport, repaired: RepairReport | None, frames_root: Path) -> dict[str, Any]:
    """The verdict for programs; folders below the frames root, `left` None where nothing was repaired."""

    def listed(verdicts: Iterable[FolderVerdict]) -> list[dict[str, Any]]:
        return [
            {
                "folder": verdict.folder.relative_to(frames_root).as_posix(),
                "video": verdict.video,
                "problems": list(verdict.problems),
            }
            for verdict in verdicts
        ]

    return {
        "folders": report.num_folders,
        "frames": report.num_frames,
        "decoded": report.num_decoded,
        "damaged": listed(report.damaged),
        "left": None if repaired is None else listed(repaired.left),
    }


if __name__ == "__main__":
    run(main)
