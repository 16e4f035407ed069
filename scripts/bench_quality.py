"""The pictures of a clip, the JPEGs that are made of them, and how near these come: equal terms for all."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mean

import cv2
import numpy as np
import simplejpeg

from pipeline.errors import PipelineError, VideoError
from pipeline.jpeg import encode_jpeg, restart_mcus
from pipeline.offline.decode import BgrConverter, best_stream, decoded_frames, open_video

QUALITY = 90
FFMPEG_QUALITIES = (2, 3, 4, 5)
"""Values of `-q:v`, best first, of which the one is taken that comes closest to our quality."""
_LOOKED_AT = range(0, 30, 6)
"""Frames of a clip whose quality is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How near the JPEGs of a contender come to the decoded pictures."""

    name: str
    psnr_db: float
    """Peak signal-to-noise ratio against the decoded BGR pictures, mean over pictures."""
    bytes_per_frame: float


def read_pictures(clip: Path) -> Iterator[np.ndarray]:
    """Decoded pictures in their order: uint8 BGR (H, W, 3), each good until the next."""
    try:
        with open_video(clip) as (container, errors):
            stream = best_stream(container, errors)
            converter = BgrConverter(stream.codec_context.width, stream.codec_context.height)
            for frame in decoded_frames(container, stream, errors):
                yield converter.convert(frame)
    except VideoError as error:
        raise unusable(clip, str(error)) from error


def unusable(clip: Path, reason: str) -> PipelineError:
    """The error for a clip that a contender cannot do."""
    return PipelineError(f"{clip} cannot be measured with ({reason}): leave it out of --videos")


def encode(picture: np.ndarray) -> bytes:
    """Our JPEG of a BGR picture, without the rest of the extractor."""
    return encode_jpeg(picture, quality=QUALITY, restart_mcus=restart_mcus(picture.shape[1]))


def call_ffmpeg(clip: Path, out: Path, *, quality: int, one_thread: bool, frames: int | None = None) -> None:
    """`ffmpeg -q:v quality` to out/000001.jpg and so on, at most so many `frames`."""
    threads = ["-threads", "1"] if one_thread else []
    limit = [] if frames is None else ["-frames:v", str(frames)]
    command = ["ffmpeg", "-nostdin", "-loglevel", "error", *threads, "-i", str(clip), *threads, *limit]
    command += ["-q:v", str(quality), *ffmpeg_no_twins(), str(out / "%06d.jpg")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise unusable(clip, f"ffmpeg: {message}")


@cache
def ffmpeg_no_twins() -> tuple[str, str]:
    """The option with which no frame is written twice to even out the times; it changed its name in 5.1."""
    texts = subprocess.run(["ffmpeg", "-hide_banner", "-h", "long"], capture_output=True, check=False).stdout
    return "-fps_mode" if b"-fps_mode" in texts else "-vsync", "passthrough"


def measure_qualities(clips: Sequence[Path], folder: Path) -> list[Quality]:
    """PSNR and bytes of some frames of each clip: ours, OpenCV's, and ffmpeg's by `-q:v`, if installed."""
    jpegs: dict[str, list[bytes]] = {}
    pictures: list[np.ndarray] = []
    for number, clip in enumerate(clips):
        first = enumerate(islice(read_pictures(clip), _LOOKED_AT.stop))
        looked_at = [picture.copy() for index, picture in first if index in _LOOKED_AT]
        pictures += looked_at
        jpegs.setdefault("ours", []).extend(map(encode, looked_at))
        jpegs.setdefault("opencv_loop", []).extend(map(_encode_as_opencv, looked_at))
        for quality in FFMPEG_QUALITIES if shutil.which("ffmpeg") else ():
            out = folder / f"{number}-{quality}"
            out.mkdir()
            call_ffmpeg(clip, out, quality=quality, one_thread=True, frames=_LOOKED_AT.stop)
            files = [out / f"{index + 1:06d}.jpg" for index in _LOOKED_AT[: len(looked_at)]]
            jpegs.setdefault(_ffmpeg_name(quality), []).extend(file.read_bytes() for file in files)
    return [_quality(name, made, pictures) for name, made in jpegs.items()]


def _encode_as_opencv(picture: np.ndarray) -> bytes:
    data: bytes = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
    return data


def _quality(name: str, jpegs: Sequence[bytes], pictures: Sequence[np.ndarray]) -> Quality:
    return Quality(
        name=name,
        psnr_db=mean(cv2.PSNR(_decode(data), picture) for data, picture in zip(jpegs, pictures, strict=True)),
        bytes_per_frame=mean(map(len, jpegs)),
    )


def _decode(data: bytes) -> np.ndarray:
    picture: np.ndarray = simplejpeg.decode_jpeg(data, "BGR")
    return picture


def _ffmpeg_name(quality: int) -> str:
    return f"ffmpeg -q:v {quality}"


def closest_quality(qualities: Sequence[Quality]) -> int | None:
    """The `-q:v` whose PSNR is nearest to ours; None where ffmpeg was not measured."""
    psnr_db = {quality.name: quality.psnr_db for quality in qualities}
    measured = [quality for quality in FFMPEG_QUALITIES if _ffmpeg_name(quality) in psnr_db]
    return min(measured, key=lambda q: abs(psnr_db[_ffmpeg_name(q)] - psnr_db["ours"]), default=None)
