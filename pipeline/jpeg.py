"""JPEG with restart markers: a grid of tiles, of which a part can be decoded without the rest."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import cv2
import numpy as np
import simplejpeg

from pipeline.tiles import MAX_PX, Data, join_tiles, plan_cut
from pipeline.tiles import JpegError as JpegError
from pipeline.tiles import JpegRun as JpegRun
from pipeline.tiles import jpeg_size as jpeg_size

_MCU_PX = 16
"""Side of the square of pixels that one MCU covers with 4:2:0 subsampling (ITU-T T.81, A.2)."""


def restart_mcus(width_px: int) -> int:
    """MCUs between two restart markers for a frame of this width.

    It divides the row of MCUs, so that no tile goes over the end of a row, and is 2, 3, 4 or 5,
    the least that does; 1 where none of them divides it.

    A short interval lets a crop take less than the whole row but costs bytes: on UCF101 at
    quality 90, 2 MCUs cost 3.8 % more than one marker a row, 4 cost 1.7 %, 5 cost 1.3 %. Where only 1
    is left (short side 128: 171 pixels, 11 MCUs) it costs 4.0 %, and a clip takes 13 % less time.

    >>> [restart_mcus(width) for width in (320, 340, 240, 171, 16)]
    [2, 2, 3, 1, 1]
    """
    row = -(-width_px // _MCU_PX)
    return next((mcus for mcus in (2, 3, 4, 5) if row % mcus == 0), 1)


def encode_jpeg(bgr: np.ndarray, *, quality: int, restart_mcus: int) -> bytes:
    """A baseline JPEG, 4:2:0, with a restart marker after every `restart_mcus` MCUs.

    bgr  uint8 (H, W, 3), blue first

    Raises ValueError where the picture is too large for a JPEG (65,500 pixels a side).
    """
    if max(bgr.shape[:2]) > MAX_PX:
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


class Regions(NamedTuple):
    """The same part of the frames of a clip, each a JPEG, and where the part lies in a frame."""

    jpegs: Sequence[Data]
    top: int
    left: int
    height: int
    width: int


def crop_jpegs(jpegs: Sequence[Data], top: int, left: int, height: int, width: int) -> Regions:
    """Cut out of each frame of a clip the tiles that a box needs, without decoding anything.

    What comes out are smaller, valid JPEGs. What the box covers decodes to the same pixels as from the
    whole frames: the part reaches one chroma sample further, to a border of the frame or of a tile.
    JPEGs that cannot be taken apart (without restart markers, progressive, grey, with different tables)
    come back whole. JpegError, with the `place` of the frame, where a frame's markers are not all there
    or its size is another than the first one's.
    """
    cut = plan_cut(jpegs, top, left, height, width)
    if cut.is_whole:
        return Regions(jpegs, 0, 0, cut.layout.height, cut.layout.width)
    return Regions(join_tiles(jpegs, cut), cut.top, cut.left, cut.height, cut.width)


class Cropped(NamedTuple):
    """The same part of the frames of a clip, decoded, and where the part lies in a frame."""

    pixels: np.ndarray
    """uint8 (T, H, W, 3), red first."""
    top: int
    left: int


def decode_crop(
    jpegs: Sequence[Data],
    top: int,
    left: int,
    height: int,
    width: int,
    *,
    memory: Callable[[int], np.ndarray],
    reduce: int = 1,
) -> Cropped:
    """Decode what a box needs of each frame of a clip: `crop_jpegs` and `decode_jpegs` in one.

    What the box covers has the same pixels; around it, where they are not asked for, they may be others.
    `memory` gives uint8 of a length (bytes) to decode into; `reduce` is as for `decode_jpeg`. JpegError, with
    the `place` of the frame, where one is damaged or of another size.

    Where the box stays clear of the frames' upper and lower borders, the tiles of all frames are put one
    below the other in one tall JPEG: what a decoder does once for each picture, 12 us, it does once for a
    clip (5 % of its time on UCF101).
    """
    cut = plan_cut(jpegs, top, left, height, width)
    shape = len(jpegs), -(-cut.height // reduce), -(-cut.width // reduce), 3
    pixels = memory(math.prod(shape)).reshape(shape)
    if cut.stands_apart and len(jpegs) * cut.height <= MAX_PX:
        try:
            decode_jpeg(join_tiles(jpegs, cut, stacked=True)[0], pixels, reduce=reduce)
            return Cropped(pixels, cut.top, cut.left)
        except JpegError:
            pass  # frame by frame, to tell which
    decode_jpegs(jpegs if cut.is_whole else join_tiles(jpegs, cut), pixels, reduce=reduce)
    return Cropped(pixels, cut.top, cut.left)


def decode_jpeg(data: Data, out: np.ndarray | None = None, *, reduce: int = 1) -> np.ndarray:
    """A JPEG to pixels: uint8 (H, W, 3), red first; in `out` (uint8, contiguous, large enough) if given.

    `reduce` 2, 4 or 8 decodes to that fraction of height and width, rounded up, in the DCT domain: the
    pixels between are never made.

    simplejpeg, since it writes into memory that is there already and treats a warning of libjpeg as
    damage: on 944 frames of UCF101 635 us a frame, torchvision 1,081, OpenCV 935, in one run, all three
    to the same pixels. JpegError where the JPEG is damaged, even if something could be made of it.
    """
    height = width = 0
    if reduce > 1:
        height, width = (-(-size // reduce) for size in jpeg_size(data))
    try:
        pixels = simplejpeg.decode_jpeg(
            data, colorspace="RGB", min_height=height, min_width=width, buffer=out
        )
    except ValueError as error:
        raise JpegError(f"a damaged JPEG: {error}") from error
    return cast(np.ndarray, pixels)


def decode_jpegs(jpegs: Sequence[Data], out: np.ndarray, *, reduce: int = 1) -> None:
    """JPEGs of one size into `out`, uint8 (T, H, W, 3), contiguous; `reduce` as for `decode_jpeg`.

    JpegError, with the `place` of the frame, where one is damaged or not of that size.
    """
    for place, (jpeg, pixels) in enumerate(zip(jpegs, out, strict=True)):
        try:
            found = decode_jpeg(jpeg, pixels, reduce=reduce)
        except JpegError as error:
            raise JpegError(str(error), place) from error
        if found.shape != pixels.shape:
            raise JpegError(f"a frame of another size: {found.shape[:2]}, expected {pixels.shape[:2]}", place)
