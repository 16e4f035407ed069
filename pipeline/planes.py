"""JPEGs to planes: luma and chroma as a JPEG holds them, before they become red, green and blue.

Half of the values of RGB, and chroma that nobody has interpolated: who makes pictures smaller saves time at
both ends by making planes smaller, and colours of what is left.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import av
import numpy as np

from pipeline.tiles import MAX_PX, Cut, Data, JpegError, plan_cut, read_layout, segments, stack_tiles

_MAX_STACK_PX = 1 << 26
"""Pixels that are decoded in one call: FFmpeg refuses pictures of more than about four times as many."""
_PADDING_BYTES = 64
"""What FFmpeg may read beyond a packet (AV_INPUT_BUFFER_PADDING_SIZE)."""
_KEPT_MARKERS = frozenset({0xDB, 0xC0, 0xC1, 0xC4, 0xDD, 0xDA})
"""What a decoder needs of a header: tables, frame, restart interval and scan. Left out are remarks, by which
FFmpeg would guess at the habits of the program that wrote it."""
_ADOBE = 0xEE
"""APP14, which says that the components are no YCbCr; only old Adobe programs write it for those that are."""


class Planes(NamedTuple):
    """The same part of the frames of a clip, 4:2:0, in full range (JFIF), and where it lies in a frame."""

    luma: np.ndarray
    """uint8 (T, H, W)."""
    blue: np.ndarray
    """Cb: uint8 (T, ceil(H / 2), ceil(W / 2)); each value lies in the middle of four pixels."""
    red: np.ndarray
    """Cr, likewise."""
    top: int
    """Row of pixels of the frame at which the part begins, even."""
    left: int
    """Column of pixels, even."""


def decode_planes(jpegs: Sequence[Data], top: int, left: int, height: int, width: int) -> Planes | None:
    """Decode what a box needs of each frame of a clip to planes, all frames in one call.

    None where JPEGs cannot be taken apart into tiles of 4:2:0 (`pipeline.tiles`), or a frame is too large.
    The box has the same values as in whole frames, since nothing is interpolated; no margin is needed.
    JpegError where something is damaged; which frame, `pipeline.jpeg.decode_crop` tells.

    By PyAV's FFmpeg, as no well-kept wheel of libjpeg-turbo gives planes: on 300 frames of UCF101 209 us a
    frame, where simplejpeg takes 261 us to RGB and 201 us to luma alone. Its IDCT `xvid` is the quickest of
    those that it has (`simple`: 232 us). It overlooks more single bytes that are wrong than libjpeg (93
    against 70 of 100); of 100 frames with 256 wrong bytes it overlooks 1, and none that is cut short.
    """
    cut = plan_cut(jpegs, top, left, height, width, margin=0)
    header = _bare_header(cut.header)
    rows = len(cut.rows) * cut.layout.tile_height
    if header is None or not cut.columns or rows > MAX_PX or rows * cut.width > _MAX_STACK_PX:
        return None
    at_once = min(MAX_PX // rows, _MAX_STACK_PX // (rows * cut.width))
    if at_once >= len(jpegs):
        planes = _decode_stack(jpegs, cut, header, rows)
    else:
        stacks = [jpegs[first : first + at_once] for first in range(0, len(jpegs), at_once)]
        decoded = [_decode_stack(stack, cut, header, rows) for stack in stacks]
        planes = [np.concatenate(parts) for parts in zip(*decoded, strict=True)]
    luma, blue, red = planes
    return Planes(luma, blue, red, cut.top, cut.left)


def _decode_stack(jpegs: Sequence[Data], cut: Cut, header: bytes, rows: int) -> list[np.ndarray]:
    """Three planes, (T, height, width) each, of frames that take so many rows of the tall picture."""
    size_at = read_layout(header).size_at
    data = stack_tiles(jpegs, cut, header, size_at, padding=_PADDING_BYTES)
    decoder = _DECODER.get()
    try:
        # Packet takes any buffer, and reads it where it is.
        frames = decoder.decode(av.Packet(cast(bytes, data)))
    except av.FFmpegError as error:
        _DECODER.forget()
        raise JpegError(f"a damaged JPEG: {error.strerror}") from error
    if [(frame.height, frame.width) for frame in frames] != [(rows * len(jpegs), cut.width)]:
        _DECODER.forget()
        raise JpegError("a damaged JPEG: it does not decode to its size")
    planes = []
    for plane, half in zip(frames[0].planes, (1, 2, 2), strict=True):
        values = np.frombuffer(cast(Any, plane), np.uint8).reshape(len(jpegs), rows // half, plane.line_size)
        planes.append(values[:, : -(-cut.height // half), : -(-cut.width // half)])
    return planes


@lru_cache(maxsize=256)
def _bare_header(header: bytes) -> bytes | None:
    """A header with nothing but what decoding needs; None where the frame is not YCbCr 4:2:0."""
    kept = [header[:2]]
    for marker, at in segments(header):
        if marker == _ADOBE:
            return None
        if marker in _KEPT_MARKERS:
            kept.append(header[at - 2 : at + int.from_bytes(header[at : at + 2], "big")])
    bare = b"".join(kept)
    size_at = read_layout(header).size_at
    components = header[size_at + 5 : size_at + 14]
    is_420 = header[size_at + 4] == 3 and (components[1], components[4], components[7]) == (0x22, 0x11, 0x11)
    return bare if is_420 and components[::3] != b"RGB" else None


class _Decoder(threading.local):
    """Each thread's own."""

    context: av.VideoCodecContext | None = None

    def get(self) -> av.VideoCodecContext:
        if self.context is None:
            self.context = av.CodecContext.create("mjpeg", "r")
            self.context.thread_count = 1
            self.context.options = {"idct": "xvid", "err_detect": "explode"}
        return self.context

    def forget(self) -> None:
        """Begin anew next time, whatever an error has left."""
        self.context = None


_DECODER = _Decoder()
