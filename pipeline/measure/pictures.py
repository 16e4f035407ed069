"""Small pictures of frames, for a page or a sheet: cells of one size, rows of cells, JPEGs as text."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PipelineError
from pipeline.jpeg import JpegError, decode_jpeg, encode_jpeg, jpeg_size, restart_mcus
from pipeline.measure.folder_stats import choose_evenly
from pipeline.online.store import Store

Picture = NDArray[np.uint8]
"""uint8 (H, W, 3), red first."""

CELL_HW = 84, 112
"""Height and width (px) of a frame in a strip."""
_GAP_PX = 2
_QUALITY = 78


class PictureError(PipelineError):
    """The frames of a video cannot be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Frames of one video, from its first to its last, side by side."""

    video: str
    class_name: str
    status: str
    num_frames: int
    times_s: tuple[float, ...]
    """Of each frame shown, since the video's first one."""
    image: str
    """A `data:` URI of a JPEG; empty where it cannot be shown."""
    size_wh: tuple[int, int]
    """Pixels of the picture."""
    error: str | None
    """Why it cannot be shown; None where it can."""


def fit_cell(picture: Picture, height: int, width: int) -> Picture:
    """A picture shrunk or enlarged to lie in the middle of a cell, the rest of which is black.

    >>> fit_cell(np.full((40, 20, 3), 255, np.uint8), 4, 6)[1, :, 0].tolist()
    [0, 0, 255, 255, 0, 0]
    """
    scale = min(height / picture.shape[0], width / picture.shape[1])
    inner_h, inner_w = (max(round(side * scale), 1) for side in picture.shape[:2])
    way = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    cell = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner_h) // 2, (width - inner_w) // 2
    cell[top : top + inner_h, left : left + inner_w] = cv2.resize(
        picture, (inner_w, inner_h), interpolation=way
    )
    return cell


def join_row(cells: Sequence[Picture], *, gap_px: int = _GAP_PX) -> Picture:
    """Cells of one size side by side, with a black gap between each two.

    >>> join_row([np.zeros((4, 6, 3), np.uint8)] * 3).shape
    (4, 22, 3)
    """
    gap = np.zeros((cells[0].shape[0], gap_px, 3), np.uint8)
    parts = [part for cell in cells for part in (gap, cell)][1:]
    return np.concatenate(parts, axis=1)


def join_grid(cells: Sequence[Picture], columns: int) -> Picture:
    """Cells of one size in rows of `columns`, read like text; what is left of the last row is black.

    >>> join_grid([np.zeros((4, 6, 3), np.uint8)] * 3, 2).shape
    (10, 14, 3)
    """
    blank = np.zeros_like(cells[0])
    rows = [
        join_row(
            [*cells[first : first + columns], *[blank] * (columns - len(cells[first : first + columns]))]
        )
        for first in range(0, len(cells), columns)
    ]
    gap = np.zeros((_GAP_PX, rows[0].shape[1], 3), np.uint8)
    return np.concatenate([part for row in rows for part in (gap, row)][1:])


def jpeg_uri(picture: Picture, *, quality: int = _QUALITY) -> str:
    """A picture as a `data:` URI that stands in a page itself."""
    bgr = np.ascontiguousarray(picture[..., ::-1])
    jpeg = encode_jpeg(bgr, quality=quality, restart_mcus=restart_mcus(picture.shape[1]))
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def read_small(jpeg: bytes | memoryview, height: int, width: int) -> Picture:
    """A JPEG decoded no larger than a cell needs; JpegError where it is damaged."""
    source_h, source_w = jpeg_size(jpeg)
    factor = min(source_h / height, source_w / width)
    return decode_jpeg(jpeg, reduce=next(by for by in (8, 4, 2, 1) if by <= factor or by == 1))


def draw_strip(store: Store, key: str, *, video: str, class_name: str, status: str, frames: int) -> Strip:
    """A strip of some frames, evenly spaced, of the video that a store knows by `key`.

    What cannot be read becomes the strip's `error`: one damaged video must not take a page from the others.
    """
    about = {"video": video, "class_name": class_name, "status": status}
    try:
        times_us = store.times_us(key)
        indices = choose_evenly(len(times_us), frames)
        jpegs = store.read(key, indices)
        row = join_row([_read_cell(jpeg, key, i) for jpeg, i in zip(jpegs, indices.tolist(), strict=True)])
    except PipelineError as error:
        return Strip(**about, num_frames=0, times_s=(), image="", size_wh=(0, 0), error=str(error))
    return Strip(
        **about,
        num_frames=len(times_us),
        times_s=tuple((times_us[indices] / 1e6).tolist()),
        image=jpeg_uri(row),
        size_wh=(row.shape[1], row.shape[0]),
        error=None,
    )


def _read_cell(jpeg: bytes | memoryview, key: str, index: int) -> Picture:
    try:
        return fit_cell(read_small(jpeg, *CELL_HW), *CELL_HW)
    except JpegError as error:
        raise PictureError(f"frame {index} of {key!r}: {error}; run `make verify REPAIR=1`") from error
