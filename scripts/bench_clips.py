"""What the online benches run on: videos, their frames, manifest and pack, in a temporary folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import cv2
import numpy as np

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, read_manifest
from pipeline.offline.catalog import build_manifest
from pipeline.offline.extract import RunSpec, extract_all
from pipeline.offline.frames import FrameSpec
from pipeline.offline.layouts import find_videos
from pipeline.online import PackStore
from pipeline.online.pack import write_pack
from scripts.bench_quality import read_pictures

LONG_FRAMES = 300
LONG_SIZE_WH = (640, 480)
_LONG_VIDEOS = 16
_KEY_FRAME_EVERY = 250  # what x264 does by itself where there are no cuts
_RATE = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Videos after the offline half."""

    videos_root: Path
    frames_root: Path
    manifest_file: Path
    manifest: Manifest
    store: PackStore

    def describe(self) -> str:
        """How much there is, in words."""
        first, info = self.manifest[0], self.store.info
        return (
            f"{info.num_videos} videos, {info.num_frames:,} frames, "
            f"first {first.width}x{first.height}, {info.frames_bytes / info.num_frames:,.0f} bytes each"
        )


def link_videos(clips: Sequence[Path], root: Path) -> None:
    """The clips below `root`, a folder for each class, as links; classes are the folders they lie in."""
    for clip in clips:
        link = root / clip.parent.name / clip.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(clip)


def store_frames(
    videos_root: Path, folder: Path, *, quality: int, short_side_px: int | None = None
) -> Stored:
    """Extract, list and pack all videos below a root; PipelineError names one that fails."""
    spec = FrameSpec(quality=quality, short_side_px=short_side_px)
    report = extract_all(find_videos(videos_root).videos, videos_root, folder / "frames", spec, RunSpec())
    if report.failures:
        failure = report.failures[0]
        raise PipelineError(f"{failure.video} cannot be used ({failure.error}): leave it out of --videos")
    path = folder / "bench.parquet"
    build_manifest(folder / "frames", folder / "splits", path, dataset="bench")
    manifest = read_manifest(path).select()
    write_pack(folder / "pack", folder / "frames", manifest)
    return Stored(
        videos_root=videos_root,
        frames_root=folder / "frames",
        manifest_file=path,
        manifest=manifest,
        store=PackStore(folder / "pack"),
    )


def store_clips(clips: Sequence[Path], folder: Path, *, short_side_px: int | None = None) -> Stored:
    """Frames of the clips at quality 90, as they are unless a short side is given."""
    link_videos(clips, folder / "videos")
    return store_frames(folder / "videos", folder / "frames", quality=90, short_side_px=short_side_px)


def make_long_videos(clips: Sequence[Path], root: Path) -> None:
    """Videos as cameras and sites hand them out: H.264, 640x480, 300 frames, a key frame every 250.

    Made of the clips' own pictures, enlarged, one clip after the other; as many videos as there are pictures
    for, 16 at most.
    """
    pictures = (picture for clip in clips for picture in read_pictures(clip))
    for number in range(_LONG_VIDEOS):
        some = islice(pictures, LONG_FRAMES)
        first = next(some, None)
        if first is None:
            return
        path = root / f"Class{number % 4}" / f"v_Class{number % 4}_g{number:02d}_c01.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_h264(path, _chain(first, some))


def _chain(first: np.ndarray, others: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield first
    yield from others


def _write_h264(path: Path, pictures: Iterator[np.ndarray]) -> None:
    options = {"crf": "23", "preset": "fast", "g": str(_KEY_FRAME_EVERY), "sc_threshold": "0"}
    try:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=Fraction(_RATE), options=options)
            stream.width, stream.height, stream.pix_fmt = *LONG_SIZE_WH, "yuv420p"
            for picture in pictures:
                large = np.asarray(cv2.resize(picture, LONG_SIZE_WH, interpolation=cv2.INTER_CUBIC), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(large, format="bgr24")))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise PipelineError(f"no H.264 videos can be made here: {error}") from error
