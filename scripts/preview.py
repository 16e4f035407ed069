"""`make preview`: a picture of what training sees."""

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, read_manifest
from pipeline.measure.preview import draw_moving, draw_sheet, frame_duration_ms, write_gif, write_png
from pipeline.measure.shown_clips import StreamSpec, draw_clips
from pipeline.online import WindowSpec, open_store
from pipeline.online.store import Cache
from pipeline.training.models import check_clip, find_model
from scripts import run
from scripts.train_options import ClipOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Whose training it is that is looked at; what is meant is what `make train` calls so, too."""

    model: str = "small"
    """The model to be trained, which decides the size of the clips."""
    split: str = "split01"
    """Column of the manifest that says which videos are trained on."""
    seed: int = 0
    """Of the clips."""
    batch_size: int = 8
    """Clips of a batch, within which MixUp and CutMix mix."""

    def __post_init__(self) -> None:
        if self.seed < 0 or self.batch_size < 1:
            raise ValueError(f"seed must be >= 0 and batch_size >= 1, got {self.seed} and {self.batch_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewOptions:
    """What is drawn of what, and where it goes."""

    dataset: str = "sample"
    """The folder below DATA that holds `frames/` or `pack/`."""
    data: Path = Path("data")
    """Root of the datasets."""
    manifests: Path = Path("manifests")
    """Where the manifest is, as DATASET.parquet."""
    clips: int = 12
    """Clips to draw."""
    sheet_frames: int = 16
    """Frames of a clip in the PNG, at most; the GIF has all."""
    out: Path | None = None
    """Folder of the pictures; without it MANIFESTS. They are DATASET.preview.png and .gif."""

    def __post_init__(self) -> None:
        if self.clips < 1 or self.sheet_frames < 1:
            raise ValueError(f"clips and sheet_frames must be >= 1, got {self.clips} and {self.sheet_frames}")


OPTIONS, STREAM, AUGMENT, WINDOW = PreviewOptions(), StreamOptions(), ClipOptions(), WindowSpec()


def main(
    options: PreviewOptions = OPTIONS,
    stream: StreamOptions = STREAM,
    augment: ClipOptions = AUGMENT,
    window: WindowSpec = WINDOW,
) -> int:
    """Draw the first clips of the first epoch as `make train` with the same options gives them to the model.

    A PNG with a row for each clip, with its times, and a GIF in which all of them move. Exits with 1 where
    a clip cannot be made.

    Args:
        options: What is drawn of what, and where it goes.
        stream: Whose training it is.
        augment: Which clips are drawn for training, and what is done to their pictures.
        window: Which frames make up a clip.
    """
    manifest = read_manifest(options.manifests / f"{options.dataset}.parquet")
    rows = manifest.select(**{stream.split: "train"})
    root = options.data / options.dataset
    # In RAM for training; a few clips are not worth a copy of the pack.
    cache: Cache = "disk" if (root / "pack").exists() else "off"
    store = open_store(root / "frames", root / "pack", cache=cache, manifest=manifest).store
    spec = stream_spec(stream, augment, window, manifest)
    with tqdm(total=options.clips, desc="clips", unit="clip", disable=None, dynamic_ncols=True) as bar:
        shown = draw_clips(rows, store, spec, num_clips=options.clips, on_clip=bar.update)
    for error in shown.errors:
        print(f"no clip: {error}")
    if not shown.clips:
        raise PipelineError(
            f"none of {options.clips} clips can be made, and training would stop at the first"
        )
    folder = options.out or options.manifests
    sheet, moving = (folder / f"{options.dataset}.preview.{suffix}" for suffix in ("png", "gif"))
    write_png(sheet, draw_sheet(shown.clips, max_frames=options.sheet_frames))
    write_gif(moving, draw_moving(shown.clips), duration_ms=frame_duration_ms(shown.clips))
    print(f"{len(shown.clips)} clips of {len(rows):,} videos to train on, by {stream.split}")
    print(f"  rows    {sheet}\n  moving  {moving}")
    print(verdict(len(shown.errors), options.dataset))
    return 1 if shown.errors else 0


def stream_spec(
    stream: StreamOptions, augment: ClipOptions, window: WindowSpec, manifest: Manifest
) -> StreamSpec:
    """The stream that `scripts.train` makes of these options; PipelineError where it would stop.

    That is for a model or class that there is not, and for clips that the model cannot take.
    """
    size_px = augment.size_px or find_model(stream.model).size_px
    check_clip(stream.model, frames=window.frames, size_hw=(size_px, size_px))
    return StreamSpec(
        window=window,
        augment=augment.augment(size_px, manifest.classes),
        device=augment.device_augment(len(manifest.classes)),
        seed=stream.seed,
        clips_per_video=augment.clips_per_video,
        is_balanced=augment.balance,
        on_bad=augment.on_bad,
        batch_size=stream.batch_size,
    )


def verdict(num_errors: int, dataset: str) -> str:
    """What to do next."""
    if num_errors:
        return f"training stops at such a clip; next: make verify DATASET={dataset} REPAIR=1"
    return f"look whether the classes can be told apart; next: make train DATASET={dataset}"


if __name__ == "__main__":
    run(main, resumes=False)
