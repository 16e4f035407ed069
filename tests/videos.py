"""Builds tiny videos whose frame k is flat grey 8k + 4, so that a test reads k back from pixels."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np


def grey(k: int) -> int:
    """The grey of frame k, of 31 at most."""
    return 8 * k + 4


def read_k(jpeg: Path) -> int:
    """k back from a stored frame: the nearest of the greys, after codec and JPEG."""
    return round((float(cv2.imread(str(jpeg)).mean()) - 4) / 8)


def write_video(
    path: Path,
    *,
    frames: int = 30,
    fps: int | Fraction = 25,
    size: tuple[int, int] = (64, 48),
    codec: str = "mpeg4",
    pix_fmt: str = "yuv420p",
    times_s: Sequence[float] | None = None,
    pictures: Iterable[np.ndarray] | None = None,
    b_frames: int = 0,
    format: str | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    colour: tuple[int, int] | None = None,
) -> Path:
    """Write a video. `times_s` sets each frame's pts, `pictures` (uint8 RGB) replaces the greys.

    `colour` is (colorspace, color_range) as FFmpeg numbers them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format=format, options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps), options=options or {})
        stream.width, stream.height = size
        stream.bit_rate = 8_000_000  # so that greys survive
        stream.pix_fmt = pix_fmt
        stream.codec_context.max_b_frames = b_frames
        stream.codec_context.thread_count = 1
        if times_s is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if colour is not None:
            stream.codec_context.colorspace, stream.codec_context.color_range = colour
        if pictures is None:
            pictures = (np.full((size[1], size[0], 3), grey(k), np.uint8) for k in range(frames))
        for k, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if colour is not None:
                frame = frame.reformat(
                    format=pix_fmt, dst_colorspace=colour[0], dst_color_range=colour[1], src_color_range=2
                )
                frame.colorspace, frame.color_range = colour
            else:
                frame = frame.reformat(format=pix_fmt)
            frame.pts = k
            if times_s is not None:
                frame.pts, frame.time_base = round(times_s[k] * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def set_display_matrix(path: Path, matrix: Sequence[int]) -> None:
    """Overwrite the display matrix of an MP4's only track: a b c d as whole numbers, 1 or -1 or 0."""
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 4
    a, b, c, d = (value << 16 for value in matrix)
    numbers = np.array([a, b, 0, c, d, 0, 0, 0, 1 << 30], ">i4").tobytes()
    offset = start + (52 if data[start] == 1 else 40)
    data[offset : offset + 36] = numbers
    path.write_bytes(data)
