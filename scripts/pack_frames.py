"""Pack the frames of a dataset into one file that all workers share."""

import json
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Never

import tyro
from tqdm import tqdm

from pipeline.files import write_text
from pipeline.manifest import read_manifest
from pipeline.online.pack import PackReport, Stage, write_pack
from pipeline.online.packfile import format_bytes
from pipeline.online.ram import choose_cache, copies_in_ram, free_memory
from scripts import run


def main(
    *,
    dataset: str = "sample",
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    force: bool = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Copy the JPEGs of DATASET into one file with an index, which training maps into memory.

    Does nothing where the pack is of the same frames already; otherwise the new pack takes the old
    one's place at once. Every JPEG is checked on the way.

    Args:
        dataset: The folder below DATA that holds `frames/`.
        data: Root of the datasets.
        manifests: Where the manifest is, as DATASET.parquet.
        force: Write the pack anew, whatever is there.
        json_file: Where to write the summary as JSON, too.
    """
    manifest = read_manifest(manifests / f"{dataset}.parquet")
    root, begin = data / dataset, time.monotonic()
    with closing(_Bar(dataset)) as bar:
        report = write_pack(root / "pack", root / "frames", manifest, force=force, on_video=bar.show)
    summary = summarise(report, seconds=time.monotonic() - begin)
    print_summary(report, summary)
    if json_file is not None:
        write_text(json_file, json.dumps(summary, ensure_ascii=False, indent=1) + "\n")
    return 0


class _Bar:
    """One bar for each stage, on a terminal only."""

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._stage: Stage | None = None
        self._bar: tqdm[Never] = tqdm(disable=True)

    def show(self, stage: Stage, done: int, total: int) -> None:
        """Move the bar, or begin the next one; `disable=None` is quiet where there is no terminal."""
        if stage != self._stage:
            self.close()
            self._stage, title = stage, f"{stage} {self._dataset}"
            unit, is_bytes = ("B", True) if stage == "copy" else ("video", False)
            self._bar = tqdm(
                total=total, desc=title, unit=unit, unit_scale=is_bytes, disable=None, dynamic_ncols=True
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


def summarise(report: PackReport, *, seconds: float) -> dict[str, Any]:
    """The summary for programs."""
    cache, reason = choose_cache(report.info.total_bytes, free_memory())
    return {
        "path": str(report.path),
        "written": report.written,
        "seconds": seconds,
        "bytes": report.info.total_bytes,
        "cache_auto": cache,
        "reason": reason,
        "copies_in_ram": [str(copy) for copy in copies_in_ram(report.path)],
        "pack": asdict(report.info),
    }


def print_summary(report: PackReport, summary: dict[str, Any]) -> None:
    """What a person wants to know at the end."""
    info, seconds = report.info, max(summary["seconds"], 1e-9)
    how = (
        f"written in {seconds:.1f} s ({format_bytes(int(info.frames_bytes / seconds))}/s)"
        if report.written
        else "unchanged: it is of these frames already"
    )
    print(f"{info.num_videos:,} videos, {info.num_frames:,} frames, {format_bytes(info.total_bytes)}: {how}")
    print(f"  pack        {report.path}")
    print(f"  cache=auto  {summary['cache_auto']}: {summary['reason']}")
    for copy in summary["copies_in_ram"]:
        print(f"  in RAM      {copy}, until `rm -r {copy}`, a newer pack is used, or the machine restarts")


if __name__ == "__main__":
    run(main)
