"""Decode what is new or changed in a dataset to folders of JPEGs, then write its manifest."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import joblib
import tyro

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.offline.catalog import CatalogReport, build_manifest
from pipeline.offline.extract import ExtractReport, RunSpec, extract_all
from pipeline.offline.frames import FrameSpec
from pipeline.offline.layouts import find_dataset, find_videos
from scripts import run
from scripts.build_manifest import print_catalog
from scripts.progress import VideoBar


def main(
    spec: FrameSpec = FrameSpec(),
    run_spec: RunSpec = RunSpec(),
    *,
    dataset: str = "sample",
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    layout: str = "auto",
    cluster: Literal["none", "dask", "ray"] = "none",
    scheduler: str | None = None,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Decode the videos of DATASET, once, to folders of JPEGs named by frame number and time.

    Only what is new or changed is decoded; a run that was killed goes on where it was. Afterwards the
    manifest is written. Exits with 1 where some videos failed.

    Args:
        spec: Which frames are stored, and how.
        run_spec: How the run goes.
        dataset: The folder below DATA that holds `videos/` and, if there are lists, `splits/`.
        data: Root of the datasets.
        manifests: Where the manifest goes, as DATASET.parquet.
        layout: How the dataset names classes, groups and splits; `auto` looks at the lists.
        cluster: Run on the machines of a Dask or Ray cluster that share the file system.
        scheduler: Address of the cluster; without it the cluster's own default counts.
        json_file: Where to write the summary as JSON, too.
    """
    root = find_dataset(data, dataset)
    found = find_videos(root / "videos")
    bar = VideoBar(f"frames {dataset}")
    try:
        with _backend(cluster, scheduler):
            report = extract_all(
                found.videos,
                root / "videos",
                root / "frames",
                spec,
                run_spec,
                on_plan=lambda plan: bar.start(len(plan.tasks)),
                on_frames=bar.add_frames,
                on_video=lambda done: bar.add_video(failed=done.failure is not None),
            )
    finally:
        bar.stop()
    print_report(report, found.ignored)
    catalog = build_manifest(
        root / "frames", root / "splits", manifests / f"{dataset}.parquet", dataset=dataset, layout=layout
    )
    print_catalog(catalog)
    if json_file is not None:
        write_text(json_file, json.dumps(as_json(report, catalog), ensure_ascii=False, indent=1) + "\n")
    return 0 if catalog.is_complete and not report.failures else 1


def _backend(cluster: str, scheduler: str | None) -> AbstractContextManager[Any]:
    """Where joblib runs its tasks."""
    if cluster == "none":
        if scheduler is not None:
            raise PipelineError("--scheduler needs --cluster dask or ray")
        return nullcontext()
    try:
        if cluster == "dask":
            from distributed import Client

            Client(scheduler)  # type: ignore[no-untyped-call]
        else:
            import ray
            from ray.util.joblib import register_ray

            ray.init(address=scheduler or "auto")
            register_ray()
    except ImportError as error:
        raise PipelineError(
            f"--cluster {cluster} needs a package that is not installed: {error.name}"
        ) from error
    return cast(AbstractContextManager[Any], joblib.parallel_config(backend=cluster))


def print_report(report: ExtractReport, ignored: Sequence[str]) -> None:
    """What became of the videos, for a person."""
    rate = report.num_frames / max(report.seconds, 1e-9)
    print(
        f"{len(report.made)} videos decoded, {report.kept} kept, {len(report.failures)} failed: "
        f"{report.num_frames:,} frames, {report.num_bytes / 1e6:,.1f} MB "
        f"in {report.seconds:.1f} s ({rate:,.0f} frames/s)"
    )
    for failure in report.failures:
        print(f"  failed   {shown(failure.video)}: {failure.stage}: {failure.error}")
    for video, error in report.partial:
        print(f"  partial  {shown(video)}: {error}")
    if ignored:
        print(f"  {len(ignored)} files are no videos by their names, first {shown(ignored[0])}")


def shown(name: str) -> str:
    """A file name on one line."""
    return name if name.isprintable() else repr(name)


def as_json(report: ExtractReport, catalog: CatalogReport) -> dict[str, Any]:
    """The summary for programs."""
    return {
        "decoded": [done.task.video for done in report.made],
        "kept": report.kept,
        "failed": [asdict(failure) for failure in report.failures],
        "partial": dict(report.partial),
        "frames": report.num_frames,
        "bytes": report.num_bytes,
        "seconds": report.seconds,
        "catalog": asdict(catalog),
    }


if __name__ == "__main__":
    run(main)
