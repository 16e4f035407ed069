"""`make report`: a page to look at a dataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from tqdm import tqdm

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.measure.checks import conclude, count_of, format_check
from pipeline.measure.inventory import Dataset, read_dataset
from pipeline.measure.report import Report, ReportSpec, build_report
from pipeline.measure.report_page import render_page
from pipeline.online import WindowSpec
from pipeline.online.packfile import format_bytes
from scripts import run
from scripts.preview import AUGMENT, WINDOW, StreamOptions, stream_spec
from scripts.train_options import ClipOptions

SPEC = ReportSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Which dataset is looked at, and where the page goes."""

    dataset: str = "sample"
    """The folder below DATA to look at."""
    data: Path = Path("data")
    """Root of the datasets."""
    manifests: Path = Path("manifests")
    """Where the manifest is, as DATASET.parquet."""
    out: Path | None = None
    """The page, or a folder for it; without it MANIFESTS/DATASET.report.html."""
    model: str = "small"
    """The model to be trained, which decides the size of the clips."""
    seed: int = 0
    """Of the clips."""

    @property
    def page(self) -> Path:
        """Where the page goes."""
        name = f"{self.dataset}.report.html"
        if self.out is None:
            return self.manifests / name
        return self.out if self.out.suffix in (".html", ".htm") else self.out / name


OPTIONS = ReportOptions()


def main(
    options: ReportOptions = OPTIONS,
    spec: ReportSpec = SPEC,
    augment: ClipOptions = AUGMENT,
    window: WindowSpec = WINDOW,
) -> int:
    """Look at DATASET, and write one page: what is in it, what is wrong with it, what training sees of it.

    Nothing has to be there: what is missing is said, and the rest is done. The page needs no network and no
    other file. Exits with 1 where there is an error.

    Args:
        options: Which dataset is looked at, and where the page goes.
        spec: How much of it is looked at and shown.
        augment: Which clips are drawn for training, and what is done to their pictures.
        window: Which frames make up a clip.
    """
    dataset = look(options)
    chosen = StreamOptions(model=options.model, split=spec.split, seed=options.seed)
    stream = None if dataset.manifest is None else stream_spec(chosen, augment, window, dataset.manifest)
    bar = _Bar()
    try:
        report = build_report(dataset, stream, spec, on_progress=bar.show)
    finally:
        bar.close()
    write_text(options.page, render_page(report))
    print("\n".join(summarise(report, options.page)))
    return 1 if count_of(report.checks, "error") else 0


def look(options: ReportOptions) -> Dataset:
    """What there is of the dataset; PipelineError where there is nothing by that name."""
    name, root = options.dataset, options.data / options.dataset
    if Path(name).name != name or name in ("", "..", "."):
        raise PipelineError(f"no dataset is named {name!r}: expected a folder of {options.data}, by its name")
    dataset = read_dataset(name, data=options.data, manifests=options.manifests)
    if not root.is_dir() and not dataset.manifest_path.exists():
        beside = (
            f"there is {', '.join(dataset.others[:5])}" if dataset.others else "there is no other, either"
        )
        raise PipelineError(f"neither {root} nor {dataset.manifest_path} exists ({beside}): say DATASET=")
    return dataset


def summarise(report: Report, page: Path) -> Iterator[str]:
    """What is not well, and where the page is."""
    stats, name = report.stats, report.dataset.name
    if stats is not None:
        yield (
            f"{name}: {stats.videos:,} videos, {stats.frames:,} frames, {stats.seconds / 60:,.1f} min, "
            f"{sum(one.videos > 0 for one in stats.classes)} classes, {stats.failed:,} failed"
        )
    yield from (f"  {format_check(check)}" for check in report.checks if check.verdict != "ok")
    yield f"page: {page} ({format_bytes(page.stat().st_size)}), open it in a browser"
    yield conclude(report.checks, otherwise=report.dataset.command("train"))


class _Bar:
    """One bar for each stage, on a terminal only."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm[Never] = tqdm(disable=True)

    def show(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._bar = tqdm(total=total, desc=stage, disable=None, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    run(main, resumes=False)
