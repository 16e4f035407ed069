"""The tiles of a JPEG with restart markers: what its header says of them, and cutting them out as bytes."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias, cast

import numpy as np

Data: TypeAlias = bytes | memoryview

MAX_PX = 65_500
"""The most pixels a side that libjpeg takes; the format itself ends at 65,535."""


class JpegError(ValueError):
    """Bytes that are no JPEG, or a damaged one; `place` says which of several."""

    def __init__(self, message: str, place: int = 0) -> None:
        super().__init__(message)
        self.place = place


class JpegRun(list[memoryview]):
    """JPEGs that lie one directly behind the other: what is done to all of them need not copy them first."""

    def __init__(self, joined: memoryview, ends: Sequence[int], tile_bytes: np.ndarray | None = None) -> None:
        """`ends`: where each JPEG ends in `joined`, ascending, the last at its end.

        `tile_bytes`: what `measure_tiles` says of them, if that is known.
        """
        super().__init__(joined[start:end] for start, end in pairwise((0, *ends)))
        self.joined = joined
        self.ends = ends
        self.tile_bytes = tile_bytes


class Layout(NamedTuple):
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
def read_layout(header: bytes) -> Layout:
    """Parse a header, from SOI up to the scan's data; it is the same for all frames of a video."""
    frame_at, interval = 0, 0
    for marker, at in segments(header):
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
    return Layout(
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


def segments(data: Data) -> Iterator[tuple[int, int]]:
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


class _Recent:
    """The header that was read last: the frames of a dataset have few different ones."""

    header = b""


def read_header(data: Data) -> bytes:
    """All up to the scan's data."""
    recent = _Recent.header
    if recent and bytes(data[: len(recent)]) == recent:  # a header says itself where it ends
        return recent
    for marker, at in segments(data):
        if marker == 0xDA:
            _Recent.header = bytes(data[: at + (data[at] << 8 | data[at + 1])])
            return _Recent.header
    raise JpegError("a JPEG without a scan")


def jpeg_size(data: Data) -> tuple[int, int]:
    """Height and width (pixels) of a JPEG by its header; JpegError where it has none."""
    layout = read_layout(read_header(data))
    return layout.height, layout.width


class Cut(NamedTuple):
    """Which tiles of each frame of a clip a box needs, and the pixels that they hold."""

    header: bytes
    layout: Layout
    rows: range
    columns: range
    """Empty where frames cannot be taken apart."""
    stands_apart: bool
    """Whether pixels of the box do not depend on what lies above and below the tiles."""
    top: int
    left: int
    height: int
    width: int
    """Pixels, of the whole frame where it cannot be taken apart."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut off, as all tiles are needed or frames cannot be taken apart."""
        return (self.height, self.width) == (self.layout.height, self.layout.width)


def plan_cut(
    jpegs: Sequence[Data], top: int, left: int, height: int, width: int, *, margin: int | None = None
) -> Cut:
    """`margin` in pixels, None for that of the layout.

    JpegError, with the `place` of the frame, where one is of another size.
    """
    header = read_header(jpegs[0])
    layout = read_layout(header)
    # As bytes, which are compared at once; views are compared byte by byte.
    if not all(bytes(jpeg[: len(header)]) == header for jpeg in jpegs):
        _check_sizes(jpegs, layout)
        return Cut(header, layout, range(0), range(0), False, 0, 0, layout.height, layout.width)
    if not layout.columns:
        return Cut(header, layout, range(0), range(0), False, 0, 0, layout.height, layout.width)
    margin = layout.margin if margin is None else margin
    rows = _needed(top, height, margin, layout.tile_height, layout.height)
    columns = _needed(left, width, margin, layout.tile_width, layout.width)
    first_row, first_column = rows.start * layout.tile_height, columns.start * layout.tile_width
    end_row = min(rows.stop * layout.tile_height, layout.height)
    end_column = min(columns.stop * layout.tile_width, layout.width)
    is_clear = margin <= top and top + height + margin <= layout.height
    is_even = end_row % layout.tile_height == 0
    return Cut(
        header,
        layout,
        rows,
        columns,
        stands_apart=is_clear and is_even,
        top=first_row,
        left=first_column,
        height=end_row - first_row,
        width=end_column - first_column,
    )


def _check_sizes(jpegs: Sequence[Data], layout: Layout) -> None:
    for place, jpeg in enumerate(jpegs):
        try:
            height, width = jpeg_size(jpeg)
        except JpegError as error:
            raise JpegError(str(error), place) from error
        if (height, width) != (layout.height, layout.width):
            found = f"{width}x{height}, the clip's first frame {layout.width}x{layout.height}"
            raise JpegError(f"a frame of another size: {found}", place)


def _needed(start: int, length: int, margin: int, tile: int, size: int) -> range:
    """Tiles along one axis of `size` pixels that cover a stretch and its margin."""
    first, stop = max(start - margin, 0) // tile, -(-min(start + length + margin, size) // tile)
    # libjpeg repeats chroma instead of interpolating it in a picture of up to four pixels (jdsample.c),
    # so the rest of a tile at the border never stands alone.
    if first and min(stop * tile, size) - first * tile <= 4:
        first -= 1
    return range(first, stop)


def join_tiles(jpegs: Sequence[Data], cut: Cut, *, stacked: bool = False) -> list[memoryview]:
    """The asked tiles of each frame behind a new header, their markers counted anew from 0 to 7.

    `stacked` puts all frames into one JPEG, one below the other. One pass over the bytes of all frames: frame
    by frame it costs 46 us each instead of 10.
    """
    columns = cut.columns
    height = cut.height * len(jpegs) if stacked else cut.height
    head = _resized_header(cut.header, cut.layout.size_at, height, cut.width)
    tiles = _asked_tiles(jpegs, cut)
    pieces: list[Data] = []
    per_frame = len(tiles.runs) // len(jpegs)
    for frame in range(len(jpegs)):
        if frame == 0 or not stacked:
            pieces.append(head)
        pieces += tiles.runs[frame * per_frame : (frame + 1) * per_frame]
    parts = bytearray().join(pieces)
    heads = 1 if stacked else np.arange(1, len(jpegs) + 1)[:, None]
    run_ends = np.cumsum(tiles.run_bytes).reshape(tiles.run_bytes.shape) + len(head) * heads
    asked = np.stack([_bounds_at(tiles.bounds, cut, column + 1) for column in columns], axis=2)  # (T, R, C)
    marks = asked - (asked[:, :, -1] - run_ends)[:, :, None]
    marks = marks.reshape(1 if stacked else len(jpegs), -1) - 1
    codes = (0xD0 + np.arange(marks.shape[1]) % 8).astype(np.uint8)
    codes[-1] = 0xD9  # an end of image in place of the last restart
    np.frombuffer(parts, np.uint8)[marks] = codes
    bounds = [0, len(parts)] if stacked else [0, *run_ends[:, -1].tolist()]
    return [memoryview(parts)[start:stop] for start, stop in pairwise(bounds)]


def stack_tiles(
    jpegs: Sequence[Data], cut: Cut, header: bytes, size_at: int, *, padding: int = 0
) -> memoryview:
    """The asked tiles of all frames behind a header, one frame below the other, rows of tiles always whole.

    For a decoder that does not look at the numbers of markers: they stay as they are, out of order. Behind
    what comes back lie as many zeros as `padding` asks for.
    """
    height = len(jpegs) * len(cut.rows) * cut.layout.tile_height
    tiles = _asked_tiles(jpegs, cut)
    head = _resized_header(header, size_at, height, cut.width)
    parts = bytearray().join([head, *tiles.runs, bytes(padding)])
    # The last tile of a frame ends with an end of image, in place of which the next frame is to follow.
    ends = len(header) + np.add.accumulate(np.add.reduce(tiles.run_bytes, axis=1))
    codes = np.frombuffer(parts, np.uint8)
    codes[ends - 1] = 0xD0
    codes[ends[-1] - 1] = 0xD9
    return memoryview(parts)[: ends[-1]]


def _resized_header(header: bytes, size_at: int, height: int, width: int) -> bytes:
    return header[:size_at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + header[size_at + 4 :]


class _Tiles(NamedTuple):
    """Where a cut's tiles lie, and their bytes: those of a row lie side by side, and are one run."""

    runs: list[memoryview]
    """Of one frame after the other, each with the marker behind its last tile; whole rows are one run."""
    run_bytes: np.ndarray
    """int64 (T, R)."""
    bounds: np.ndarray
    """int64 (T, tiles + 1): where each tile begins, asked for or not, and where the last one ends."""


def num_tiles(height: int, width: int, restart_mcus: int) -> int:
    """Tiles of a 4:2:0 frame of that many pixels, with a marker after so many MCUs of 16 x 16 pixels.

    >>> num_tiles(240, 320, 2)
    150
    """
    return -(-height // 16) * (-(-width // 16) // restart_mcus)


def measure_tiles(jpeg: Data) -> np.ndarray | None:
    """int64 (tiles,): the bytes of each tile, with the marker behind it.

    None where a JPEG cannot be taken apart, is damaged, or is none.
    """
    try:
        header = read_header(jpeg)
        layout = read_layout(header)
        if not layout.columns:
            return None
        (bounds,) = _find_bounds([jpeg], np.frombuffer(jpeg, np.uint8), len(header), layout)
    except JpegError:
        return None
    return cast(np.ndarray, np.diff(bounds))


def _asked_tiles(jpegs: Sequence[Data], cut: Cut) -> _Tiles:
    source = jpegs.joined if isinstance(jpegs, JpegRun) else b"".join(jpegs)
    values = np.frombuffer(source, np.uint8)
    bounds = _known_bounds(jpegs, cut)
    if bounds is None or not _end_in_markers(values, _bounds_at(bounds, cut, cut.columns.stop)):
        bounds = _find_bounds(jpegs, values, len(cut.header), cut.layout)
    starts, stops = (_bounds_at(bounds, cut, column) for column in (cut.columns.start, cut.columns.stop))
    run_bytes = stops - starts
    if len(cut.columns) == cut.layout.columns:  # whole rows
        starts, stops = starts[:, 0], stops[:, -1]
    view = memoryview(source)
    spans = zip(starts.ravel().tolist(), stops.ravel().tolist(), strict=True)
    return _Tiles([view[start:stop] for start, stop in spans], run_bytes, bounds)


def _bounds_at(bounds: np.ndarray, cut: Cut, column: int) -> np.ndarray:
    """Of (T, tiles + 1), those before a column of tiles in the asked rows: (T, R), a view."""
    across = cut.layout.columns
    return bounds[:, cut.rows.start * across + column : (cut.rows.stop - 1) * across + column + 1 : across]


def _known_bounds(jpegs: Sequence[Data], cut: Cut) -> np.ndarray | None:
    """What `_find_bounds` says, from what is known of a run; None where that is nothing, or does not fit."""
    tiles = cut.layout.rows * cut.layout.columns
    if not isinstance(jpegs, JpegRun) or jpegs.tile_bytes is None or jpegs.tile_bytes.shape[1] != tiles:
        return None
    bounds = np.empty((len(jpegs), tiles + 1), np.int64)
    bounds[:, 0] = len(cut.header)
    bounds[:, 1:] = jpegs.tile_bytes
    np.add.accumulate(bounds, axis=1, out=bounds)  # np.cumsum, without its detours
    ends = np.array(jpegs.ends)
    bounds[1:] += ends[:-1, None]
    return bounds if (bounds[:, -1] == ends).all() else None


def _end_in_markers(values: np.ndarray, stops: np.ndarray) -> bool:
    """Whether markers end there; only of runs, since every byte that is looked at comes from far away."""
    before: bytes = values[stops - 2].tobytes()
    at: bytes = (values[stops - 1] & 0xF0).tobytes()
    return before.count(0xFF) == len(before) and at.count(0xD0) == len(at)


def _find_bounds(jpegs: Sequence[Data], source: np.ndarray, header_bytes: int, layout: Layout) -> np.ndarray:
    """int64 (T, tiles + 1): where the first tile begins, and where the marker behind each ends."""
    tiles = layout.rows * layout.columns
    ends = np.cumsum([len(jpeg) for jpeg in jpegs])
    begins = np.concatenate(([0], ends[:-1])) + header_bytes
    restarts = _find_restarts(source)
    if len(jpegs) == 1:
        restarts = restarts[restarts >= header_bytes]  # a table may hold the same bytes
    is_whole = len(restarts) == len(jpegs) * (tiles - 1) and bool(
        ((source[ends - 2] == 0xFF) & (source[ends - 1] == 0xD9)).all()
    )
    if is_whole:
        inner = restarts.reshape(len(jpegs), tiles - 1)  # a frame a row
        is_whole = tiles == 1 or bool(((inner[:, 0] >= begins) & (inner[:, -1] < ends)).all())
    if not is_whole:
        return _find_bounds_singly(jpegs, source, header_bytes, layout, len(restarts))
    return np.hstack((begins[:, None], inner + 2, ends[:, None]))


def _find_restarts(source: np.ndarray) -> np.ndarray:
    """Places of all restart markers, ascending."""
    # Few bytes are 0xFF. Eight flags in one byte, of which most are 0, are looked through in a third of the
    # time that the flags themselves take.
    flags = np.packbits(source[:-1] == 0xFF)
    groups = np.flatnonzero(flags != 0)
    bits = np.flatnonzero(np.unpackbits(flags[groups]))
    places = groups[bits >> 3] * 8 + (bits & 7)
    return cast(np.ndarray, places[(source[places + 1] & 0xF8) == 0xD0])


def _find_bounds_singly(
    jpegs: Sequence[Data], source: np.ndarray, header_bytes: int, layout: Layout, found: int
) -> np.ndarray:
    """The same frame by frame, so that the one that is damaged can be told."""
    if len(jpegs) == 1:
        expected = layout.rows * layout.columns - 1
        raise JpegError(f"a damaged JPEG: {found} restart markers of {expected}, or no end of image")
    bounds, begin = [], 0
    for place, jpeg in enumerate(jpegs):
        one = source[begin : begin + len(jpeg)]
        try:
            bounds.append(_find_bounds([jpeg], one, header_bytes, layout) + begin)
        except JpegError as error:
            raise JpegError(str(error), place) from error
        begin += len(jpeg)
    return np.vstack(bounds)
