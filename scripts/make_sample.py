"""Draw a small dataset in UCF101's layout, whose classes only motion can tell apart."""

from pathlib import Path

from tqdm import tqdm

from pipeline.offline.sample import MOTIONS, NUM_SPLITS, SampleSpec, list_clips, write_sample
from scripts import run


def main(
    spec: SampleSpec = SampleSpec(),
    *,
    dataset: str = "sample",
    data: Path = Path("data"),
    jobs: int = -1,
) -> int:
    """Draw a small dataset in UCF101's layout, whose classes only motion can tell apart.

    What is there already is kept, and no other file is touched.

    Args:
        spec: What the sample holds.
        dataset: The folder below DATA to draw into.
        data: Root of the datasets.
        jobs: Processes; -1 is one on each core.
    """
    if not dataset or Path(dataset).name != dataset or jobs == 0:
        raise ValueError(f"dataset must name one folder and jobs must not be 0, got {dataset!r} and {jobs}")
    root = data / dataset
    total = len(list_clips(spec))
    # `disable=None` is tqdm's own way to be quiet where there is no terminal.
    with tqdm(total=total, desc=f"sample {dataset}", unit="video", disable=None, dynamic_ncols=True) as bar:
        report = write_sample(root, spec, jobs=jobs, on_video=lambda _: bar.update())
    done = f"{report.written} written, {report.kept} kept" if report.written else "all there, nothing to do"
    print(f"{root}: {total} videos of {len(MOTIONS)} classes, {NUM_SPLITS} splits ({done})")
    print(f"next: make frames DATASET={dataset}")
    return 0


if __name__ == "__main__":
    run(main)
