"""From nothing to a trained and evaluated classifier, on videos that this project draws itself."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pipeline.errors import PipelineError
from pipeline.manifest import read_manifest
from pipeline.online.packfile import format_bytes, read_info
from scripts import run

DATASET = "sample"
WITH_A_DIRECTION = ("MoveLeft", "MoveRight", "TurnClockwise", "TurnCounterClockwise")
"""Classes whose mirror image is another class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the demo: a command that a person could give, and what came of it."""

    title: str
    command: Sequence[str]
    """Module of `scripts`, and its options."""
    place: Path
    """Where its work lies."""


def main(
    example: Annotated[Literal["sample", "fusion"], tyro.conf.Positional] = "sample",
    *,
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    runs: Path = Path("runs"),
    jobs: int = -1,
) -> int:
    """Sample videos, frames, manifest, pack, a short training, an evaluation on held-out groups.

    What is there already is kept, so that a second demo is over in seconds.

    Args:
        example: `sample`: the above. `fusion`: a model that has inertial readings beside the frames, and what
            becomes of it by a clock that is wrong (`scripts.demo_fusion`, which has more options).
        data: Root of the datasets; the sample goes to DATA/sample, or DATA/fusion.
        manifests: Where the manifest goes.
        runs: Where the trained model goes.
        jobs: Processes; -1 is one on each core.
    """
    if example == "fusion":
        from scripts import demo_fusion  # with torch, without which the sample's demo begins at once

        return demo_fusion.main(data=data, manifests=manifests, runs=runs, jobs=jobs)
    stages = list_stages(data, manifests, runs, jobs)
    seconds = [run_stage(number, len(stages), stage) for number, stage in enumerate(stages, 1)]
    print("\n" + "\n".join(describe(stages, seconds, data, manifests, runs)))
    return 0


def list_stages(data: Path, manifests: Path, runs: Path, jobs: int) -> list[Stage]:
    """What is done, in order."""
    root, here = data / DATASET, ["--dataset", DATASET, "--data", str(data), "--manifests", str(manifests)]
    training = ["--out", str(runs / DATASET), "--no-flip", *WITH_A_DIRECTION]
    return [
        Stage(
            title="draw videos whose classes only motion can tell apart",
            command=["make_sample", "--data", str(data), "--jobs", str(jobs)],
            place=root / "videos",
        ),
        Stage(
            title="decode them to frames, and write the manifest",
            command=["extract_frames", *here, "--jobs", str(jobs)],
            place=root / "frames",
        ),
        Stage(title="pack the frames into one file", command=["pack_frames", *here], place=root / "pack"),
        Stage(
            title="train a small 3D-CNN, and evaluate it on the held-out groups",
            command=["train", *here, *training, "--json", str(runs / DATASET / "report.json")],
            place=runs / DATASET,
        ),
    ]


def run_stage(number: int, total: int, stage: Stage) -> float:
    """Run a step as a command of its own; returns its seconds. PipelineError where it fails."""
    print(f"\n[{number}/{total}] {stage.title}\n$ python -m scripts.{' '.join(stage.command)}", flush=True)
    begin = time.monotonic()
    module, *options = stage.command
    status = subprocess.run([sys.executable, "-m", f"scripts.{module}", *options], check=False).returncode
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise PipelineError(f"step {number} ended with status {status}: {stage.title}")
    return time.monotonic() - begin


def describe(
    stages: Sequence[Stage], seconds: Sequence[float], data: Path, manifests: Path, runs: Path
) -> list[str]:
    """The table at the end: what was made, where it is, how long it took."""
    manifest = read_manifest(manifests / f"{DATASET}.parquet")
    pack = read_info(data / DATASET / "pack")
    report = json.loads((runs / DATASET / "report.json").read_text())["held_out"]
    made = [
        f"{len(manifest)} videos of {len(manifest.classes)} classes",
        f"{pack.num_frames:,} frames, {format_bytes(pack.frames_bytes)}",
        f"{format_bytes(pack.total_bytes)} in one file",
        f"top-1 {report['top1']:.1%} on {report['num_videos']} held-out videos",
    ]
    rows = [
        (what, str(stage.place), f"{took:.1f} s")
        for what, stage, took in zip(made, stages, seconds, strict=True)
    ]
    rows.insert(2, ("the manifest", str(manifests / f"{DATASET}.parquet"), ""))
    rows = [("made", "where", "took"), *rows, ("", "in all", f"{sum(seconds):.1f} s")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{what:<{widths[0]}}  {where:<{widths[1]}}  {took:>{widths[2]}}".rstrip()
        for what, where, took in rows
    ]


if __name__ == "__main__":
    run(main)
