"""JPEG with restart markers: a grid of tiles, of which a part can be decoded without the rest."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

import cv2
import numpy as np
import simplejpeg

Data: TypeAlias = bytes | memoryview

_MCU_PX = 16
"""Side of the square of pixels that one MCU covers with 4:2:0 subsampling (ITU-T T.81, A.2)."""


def restart_mcus(width_px: int) -> int:
    """MCUs between two restart markers for a frame of this width.

    It divides the row of MCUs, so that no tile goes over the end of a row, and is 4, 3, 5 or 2,
    in that order; the whole row where none of them divides it.

    A short interval lets a crop take less than the whole row but costs bytes: on UCF101 at
    quality 90, 2 MCUs cost 3.8 % more than one marker a row, 4 cost 1.7 %, 5 cost 1.3 %.

    >>> [restart_mcus(width) for width in (320, 340, 171, 16)]
    [4, 2, 11, 1]
    """
    row = -(-width_px // _MCU_PX)
    return next((mcus for mcus in (4, 3, 5, 2) if row % mcus == 0), row)


def encode_jpeg(bgr: np.ndarray, *, quality: int, restart_mcus: int) -> bytes:
    """A baseline JPEG, 4:2:0, with a restart marker after every `restart_mcus` MCUs.

    bgr  uint8 (H, W, 3), blue first

    Raises ValueError where the picture is too large for a JPEG (65,500 pixels a side).
    """
    if max(bgr.shape[:2]) > 65_500:
        raise ValueError(f"{bgr.shape[1]}x{bgr.shape[0]} is more than a JPEG can hold: use a short side")
    _, data = cv2.imencode(
        ".jpg",
        bgr,
        [
            cv2.IMWRITE_JPEG_QUALITY,
            quality,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
            cv2.IMWRITE_JPEG_RST_INTERVAL,
            restart_mcus,
        ],
    )
    return data.tobytes()


class JpegError(ValueError):
    """Bytes that are no JPEG, or a damaged one."""


class Region(NamedTuple):
    """A JPEG of a part of a frame, and where the part lies."""

    data: Data
    top: int
    left: int
    height: int
    width: int


class _Layout(NamedTuple):
    """What the header of a JPEG says of its grid of tiles; a tile lies between two restart markers."""

    height: int
    width: int
    tile_height: int
    tile_width: int
    rows: int
    columns: int
    """Tiles in a row; 0 where the frame cannot be taken apart."""
    margin: int
    """Pixels beyond a crop on which it depends, since chroma is interpolated between neighbours."""
    size_at: int
    """Where height and width stand in the header."""


@lru_cache(maxsize=256)
def _read_layout(header: bytes) -> _Layout:
    """Parse a header, from SOI up to the scan's data; it is the same for all frames of a video."""
    frame_at, interval = 0, 0
    for marker, at in _segments(header):
        if marker in _FRAME_MARKERS:
            frame_at, frame_marker = at, marker
        elif marker == 0xDD:
            interval = int.from_bytes(header[at + 2 : at + 4], "big")
    if not frame_at:
        raise JpegError("a JPEG without a frame header")
    height, width = (int.from_bytes(header[at : at + 2], "big") for at in (frame_at + 3, frame_at + 5))
    sampling = [header[frame_at + 9 + 3 * k] for k in range(header[frame_at + 7])]
    across, down = 8 * (sampling[0] >> 4), 8 * (sampling[0] & 15)
    mcus = -(-width // across)
    whole_scan = header[header.rindex(b"\xff\xda") + 4] == len(sampling)
    divisible = (
        frame_marker in (0xC0, 0xC1)  # baseline, or extended with Huffman coding: one pass, no refinement
        and len(sampling) == 3
        and sampling[1:] == [0x11, 0x11]
        and whole_scan
        and interval > 0
        and mcus % interval == 0
    )
    return _Layout(
        height=height,
        width=width,
        tile_height=down,
        tile_width=across * interval,
        rows=-(-height // down),
        columns=mcus // interval if divisible else 0,
        margin=0 if sampling[0] == 0x11 else 2,
        size_at=frame_at + 3,
    )


_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""SOF0 to SOF15 (ITU-T T.81, table B.1): all that is not DHT, JPG or DAC."""


def _segments(data: Data) -> Iterator[tuple[int, int]]:
    """Marker and place of the length field of each segment up to and with the start of scan."""
    if bytes(data[:2]) != b"\xff\xd8":
        raise JpegError("no JPEG: it does not begin with a start of image")
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise JpegError(f"a damaged JPEG: no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        yield marker, at + 2
        if marker == 0xDA:
            return
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    raise JpegError("a JPEG that is cut short in its header")


def _header(data: Data) -> bytes:
    """All up to the scan's data."""
    for marker, at in _segments(data):
        if marker == 0xDA:
            return bytes(data[: at + (data[at] << 8 | data[at + 1])])
    raise JpegError("a JPEG without a scan")


def jpeg_size(data: Data) -> tuple[int, int]:
    """Height and width (pixels) of a JPEG by its header; JpegError where it has none."""
    layout = _read_layout(_header(data))
    return layout.height, layout.width


def crop_jpeg(data: Data, top: int, left: int, height: int, width: int) -> Region:
    """Cut out the tiles that a box needs: a smaller, valid JPEG, without decoding anything.

    What the box covers decodes to the same pixels as from the whole frame: the part reaches one chroma
    sample further, to a border of the frame or of a tile. A JPEG that cannot be taken apart (without
    restart markers, progressive, grey) comes back whole. JpegError where its markers are not all there.
    """
    header = _header(data)
    layout = _read_layout(header)
    if not layout.columns:
        return Region(data, 0, 0, layout.height, layout.width)
    rows = _needed(top, height, layout.margin, layout.tile_height, layout.height)
    columns = _needed(left, width, layout.margin, layout.tile_width, layout.width)
    down, across = layout.tile_height, layout.tile_width
    if len(rows) == layout.rows and len(columns) == layout.columns:
        return Region(data, 0, 0, layout.height, layout.width)
    first_row, first_column = rows.start * down, columns.start * across
    part_height = min(rows.stop * down, layout.height) - first_row
    part_width = min(columns.stop * across, layout.width) - first_column
    ends = _tile_ends(data, len(header), layout.rows * layout.columns)
    size = part_height.to_bytes(2, "big") + part_width.to_bytes(2, "big")
    pieces = [header[: layout.size_at], size, header[layout.size_at + 4 :]]
    part = _join_tiles(data, ends, layout.columns, rows, columns, pieces)
    return Region(part, first_row, first_column, part_height, part_width)


def _needed(start: int, length: int, margin: int, tile: int, size: int) -> range:
    """Tiles along one axis of `size` pixels that cover a stretch and its margin."""
    first, stop = max(start - margin, 0) // tile, -(-min(start + length + margin, size) // tile)
    # libjpeg repeats chroma instead of interpolating it in a picture of up to four pixels (jdsample.c),
    # so the rest of a tile at the border never stands alone.
    if first and min(stop * tile, size) - first * tile <= 4:
        first -= 1
    return range(first, stop)


def _tile_ends(data: Data, start: int, tiles: int) -> np.ndarray:
    """int64 (tiles + 1,): where each tile's marker ends, headed by where the scan's data begins."""
    scan = np.frombuffer(data, np.uint8)
    marks = start + np.flatnonzero(scan[start:-1] == 0xFF)
    codes = scan[marks + 1]
    restarts = marks[(codes & 0xF8) == 0xD0]
    end = marks[codes == 0xD9]
    if len(restarts) != tiles - 1 or not len(end):
        found = f"{len(restarts)} restart markers, expected {tiles - 1}"
        raise JpegError(f"a damaged JPEG: {found}" if len(end) else "a damaged JPEG: it has no end")
    return np.concatenate(([start], restarts + 2, end[-1:] + 2))


def _join_tiles(
    data: Data, ends: np.ndarray, row_length: int, rows: range, columns: range, pieces: list[Any]
) -> bytes:
    """The asked tiles behind the header in `pieces`, their markers counted anew from 0 to 7."""
    starts = ends[row_length * np.arange(rows.start, rows.stop) + columns.start]
    grid = ends[1:].reshape(-1, row_length)[rows.start : rows.stop, columns.start : columns.stop]
    pieces += [data[start:stop] for start, stop in zip(starts.tolist(), grid[:, -1].tolist(), strict=True)]
    part = np.frombuffer(bytearray().join(pieces), np.uint8)
    lengths = grid[:, -1] - starts
    begin = len(part) - int(lengths.sum())
    shift = begin + np.cumsum(lengths) - grid[:, -1]
    marks = (grid + shift[:, None]).ravel() - 1  # the second byte of the marker behind each tile
    part[marks] = (
        _RESTARTS[: len(marks)] if len(marks) <= len(_RESTARTS) else 0xD0 + np.arange(len(marks)) % 8
    )
    part[marks[-1]] = 0xD9
    return part.tobytes()


_RESTARTS = (0xD0 + np.arange(4096) % 8).astype(np.uint8)


def decode_jpeg(data: Data, out: np.ndarray | None = None) -> np.ndarray:
    """A JPEG to pixels: uint8 (H, W, 3), red first; in `out` (uint8, contiguous, large enough) if given.

    simplejpeg, since it writes into memory that is there already and treats a warning of libjpeg as
    damage: on 944 frames of UCF101 635 us a frame, torchvision 1,081, OpenCV 935, in one run, all three
    to the same pixels. JpegError where the JPEG is damaged, even if something could be made of it.
    """
    try:
        return cast(np.ndarray, simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=out))
    except ValueError as error:
        raise JpegError(f"a damaged JPEG: {error}") from error
