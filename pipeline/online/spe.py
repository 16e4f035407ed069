"""SPE files of Princeton Instruments' cameras: 2.x by their binary header, 3.0 by their XML footer.

A file is 4100 bytes of header, then the frames. Up to 2.x the header says all. From 3.0 on, an XML
footer (its place stands at byte 678) says what a frame holds: one or more regions of pixels, and behind
them, it may be, time stamps and counters, so that frames do not lie end to end.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from pipeline.errors import SourceError

HEADER_BYTES = 4100

_VERSION, _XML_OFFSET = (1992, "<f"), (678, "<Q")
_WIDTH, _HEIGHT, _FRAMES, _TYPE = (42, "<H"), (656, "<H"), (1446, "<i"), (108, "<h")
_EXPOSURE_S, _DATE, _SOFTWARE, _COMMENTS = (10, "<f"), (20, "<10s"), (688, "<16s"), (200, "<400s")
# The calibration of the x axis: whether it is valid, the unit and order of its polynomial, coefficients.
_X_VALID, _X_UNIT, _X_ORDER, _X_POLYNOMIAL = (3098, "<b"), (3100, "<b"), (3101, "<b"), (3263, "<6d")
_TYPES = {0: "<f4", 1: "<i4", 2: "<i2", 3: "<u2", 5: "<f8", 6: "<u1", 8: "<u4"}
_UNITS = {0: None, 4: "nm", 5: "cm-1", 6: "Raman shift"}
"""Units of an x axis that is a spectrum's; 0 where the software did not say."""
_PIXEL_FORMATS = {
    "MonochromeUnsigned16": "<u2",
    "MonochromeUnsigned32": "<u4",
    "MonochromeFloating32": "<f4",
}
_META_TYPES = {("Int64", 64): "<i8", ("Double", 64): "<f8"}


class MetaField(NamedTuple):
    """One number that a 3.0 file keeps with each frame."""

    name: str
    """Like `ExposureStarted`, `FrameTrackingNumber`, `Delay`."""
    dtype: str
    ticks_per_s: int | None
    """Of a time stamp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeFile:
    """Where the pixels of one region lie in an SPE file."""

    path: Path
    version: float
    dtype: np.dtype
    num_frames: int
    height: int
    width: int
    offset: int
    """Bytes before the region's first pixel of the first frame."""
    frame_stride: int
    """Bytes from one frame to the next: its pixels, and what is kept with it."""
    num_regions: int
    wavelengths: np.ndarray | None
    """float64 (width,): of each column, where the x axis is calibrated as a spectrum."""
    wavelength_units: str | None
    meta_offset: int
    """Bytes before the first frame's `meta_fields`."""
    meta_fields: tuple[MetaField, ...]
    metadata: dict[str, Any]
    """2.x: `exposure_s`, `date`, `software`, `comments`. 3.0: `xml`, the whole footer."""


def read_spe(path: Path, *, region: int | None = None) -> SpeFile:
    """What an SPE file holds; SourceError where it is cut short or not what its header says.

    `region` chooses one of several regions of interest of a 3.0 file, counted from 0. In a 2.x file the
    software has pasted them into one picture.
    """
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            file_bytes = file.seek(0, 2)
            if len(header) < HEADER_BYTES:
                raise _fault(path, f"{file_bytes} bytes are less than a header of {HEADER_BYTES}")
            version = _number(header, _VERSION)
            if version < 3:
                return _read_header(path, header, file_bytes, region)
            xml_offset = int(_number(header, _XML_OFFSET))
            if not HEADER_BYTES <= xml_offset < file_bytes:
                raise _fault(path, f"its footer should be at byte {xml_offset} of {file_bytes}: cut short?")
            file.seek(xml_offset)
            footer = file.read().strip(b"\0 \t\r\n")
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    return _read_footer(path, version, footer, xml_offset, region)


def read_frame_metadata(spe: SpeFile) -> dict[str, np.ndarray]:
    """What a 3.0 file keeps with its frames, (num_frames,) by name; empty where it keeps nothing.

    Time stamps come as float64 seconds since the acquisition began, and the rest as stored.
    """
    if not spe.meta_fields:
        return {}
    record = np.dtype([(field.name, field.dtype) for field in spe.meta_fields])
    with spe.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        frames = np.array(
            np.ndarray(spe.num_frames, record, mapping, spe.meta_offset, (spe.frame_stride,)), copy=True
        )
    return {
        field.name: frames[field.name] / field.ticks_per_s if field.ticks_per_s else frames[field.name].copy()
        for field in spe.meta_fields
    }


def _read_header(path: Path, header: bytes, file_bytes: int, region: int | None) -> SpeFile:
    """A file up to 2.x."""
    width, height, code = (int(_number(header, field)) for field in (_WIDTH, _HEIGHT, _TYPE))
    if region not in (None, 0):
        raise _fault(path, f"there is no region {region} in a file of version 2: it has one picture a frame")
    if width < 1 or height < 1 or code not in _TYPES:
        raise _fault(path, f"its header says {width} x {height} pixels of type {code}")
    dtype = np.dtype(_TYPES[code])
    frame_bytes = width * height * dtype.itemsize
    whole = (file_bytes - HEADER_BYTES) // frame_bytes
    told = int(_number(header, _FRAMES))
    num_frames = told if told > 0 else whole  # a header that was never finished says 0 or -1
    if not 0 < num_frames <= whole:
        raise _fault(path, f"it holds {whole} whole frames of {told}: cut short?")
    wavelengths, units = _polynomial(header, width)
    return SpeFile(
        path=path,
        version=_number(header, _VERSION),
        dtype=dtype,
        num_frames=num_frames,
        height=height,
        width=width,
        offset=HEADER_BYTES,
        frame_stride=frame_bytes,
        num_regions=1,
        wavelengths=wavelengths,
        wavelength_units=units,
        meta_offset=0,
        meta_fields=(),
        metadata={
            "exposure_s": _number(header, _EXPOSURE_S),
            "date": _text(header, _DATE),
            "software": _text(header, _SOFTWARE),
            "comments": _text(header, _COMMENTS),
        },
    )


def _polynomial(header: bytes, width: int) -> tuple[np.ndarray | None, str | None]:
    """Wavelengths of the columns by the header's calibration, which counts pixels from 1."""
    unit, order = _number(header, _X_UNIT), int(_number(header, _X_ORDER))
    if _number(header, _X_VALID) != 1 or unit not in _UNITS or not 1 <= order <= 5:
        return None, None
    coefficients = struct.unpack_from(_X_POLYNOMIAL[1], header, _X_POLYNOMIAL[0])[: order + 1]
    return np.polynomial.polynomial.polyval(np.arange(1.0, width + 1), coefficients), _UNITS[int(unit)]


def _read_footer(path: Path, version: float, footer: bytes, end: int, region: int | None) -> SpeFile:
    """A file from 3.0 on, whose frames end where the footer begins, at byte `end`."""
    try:
        spe = _described(path, version, ElementTree.fromstring(footer), region)
    except ElementTree.ParseError as error:
        raise _fault(path, f"its footer is no XML ({error}): cut short?") from error
    except StopIteration as error:
        raise _fault(path, "its footer describes no frames") from error
    except (KeyError, ValueError) as error:
        raise _fault(path, f"its footer cannot be understood: {error}") from error
    if spe.num_frames < 1 or HEADER_BYTES + spe.num_frames * spe.frame_stride > end:
        whole = (end - HEADER_BYTES) // spe.frame_stride
        raise _fault(path, f"it holds {whole} whole frames of {spe.num_frames}: cut short?")
    return replace(spe, metadata={"xml": footer.decode("utf-8", "replace")})


def _described(path: Path, version: float, root: ElementTree.Element, region: int | None) -> SpeFile:
    """What a footer says; StopIteration, KeyError or ValueError where it does not say enough."""
    frame = next(block for block in _tagged(root, "DataBlock") if block.get("type") == "Frame")
    regions = [block for block in _tagged(frame, "DataBlock") if block.get("type") == "Region"]
    place = _chosen(path, region, len(regions))
    height, width = _attribute(regions[place], "height"), _attribute(regions[place], "width")
    dtype = np.dtype(_PIXEL_FORMATS[frame.attrib["pixelFormat"]])
    before = sum(_attribute(block, "stride") for block in regions[:place])
    size, stride = _attribute(frame, "size"), _attribute(frame, "stride")
    meta_fields = tuple(_meta_fields(root, frame))
    meta_bytes = sum(np.dtype(field.dtype).itemsize for field in meta_fields)
    if min(width, height, stride) < 1 or before + height * width * dtype.itemsize > size:
        raise ValueError(f"{height} x {width} {dtype.name} in a frame of {size} bytes")
    if regions[place].get("count", "1") != "1" or stride < size + meta_bytes:
        raise ValueError(f"{regions[place].attrib}, {meta_bytes} bytes behind it, in {frame.attrib}")
    wavelengths = _mapped_wavelengths(root, regions[place], width)
    return SpeFile(
        path=path,
        version=version,
        dtype=dtype,
        num_frames=_attribute(frame, "count"),
        height=height,
        width=width,
        offset=HEADER_BYTES + before,
        frame_stride=stride,
        num_regions=len(regions),
        wavelengths=wavelengths,
        wavelength_units=None if wavelengths is None else "nm",
        meta_offset=HEADER_BYTES + size,
        meta_fields=meta_fields,
        metadata={},
    )


def _chosen(path: Path, region: int | None, num_regions: int) -> int:
    if region is None and num_regions > 1:
        raise _fault(path, f"a frame has {num_regions} regions: choose one by region=")
    if not 0 <= (region or 0) < num_regions:
        raise _fault(path, f"there is no region {region or 0}: a frame has {num_regions}")
    return region or 0


def _meta_fields(root: ElementTree.Element, frame: ElementTree.Element) -> Iterator[MetaField]:
    """What stands behind the pixels of a frame, in its order."""
    wanted = [part.strip() for part in frame.get("metaFormat", "").split(",") if part.strip()]
    blocks = {block.get("id", ""): block for block in _tagged(root, "MetaBlock")}
    for block in (blocks[name] for name in wanted):
        for entry in block:
            kind = entry.tag.rpartition("}")[2]
            name = entry.get("event") or entry.get("component") or kind
            ticks = int(entry.get("resolution", "0")) or None
            dtype = _META_TYPES[entry.get("type", ""), int(entry.get("bitDepth", "0"))]
            yield MetaField(name if kind != "ModulationTracking" else f"Modulation{name}", dtype, ticks)


def _mapped_wavelengths(
    root: ElementTree.Element, region: ElementTree.Element, width: int
) -> np.ndarray | None:
    """Wavelengths (nm) of a region's columns: one for each, or one for each column of the sensor."""
    mapping = next(_tagged(root, "WavelengthMapping"), None)
    if mapping is None or len(mapping) == 0:
        return None
    # `Wavelength` lists numbers; `WavelengthError` pairs of a number and its error, set apart by blanks.
    words = (mapping[0].text or "").split()
    is_pairs = mapping[0].tag.endswith("WavelengthError")
    texts = [word.split(",")[0] for word in words] if is_pairs else "".join(words).split(",")
    wavelengths = np.array([float(text) for text in texts if text])
    if len(wavelengths) == width:
        return wavelengths
    mine = region.get("calibrations", "").split(",")
    for sensor in _tagged(root, "SensorMapping"):
        if sensor.get("id") in mine:
            first, columns = _attribute(sensor, "x"), _attribute(sensor, "width")
            part = wavelengths[first : first + columns]
            if len(part) == columns == width * _attribute(sensor, "xBinning"):
                return np.asarray(part.reshape(width, -1).mean(axis=1))
    return None


def _tagged(element: ElementTree.Element, tag: str) -> Iterator[ElementTree.Element]:
    """Elements below one, by their tag without its namespace, which differs between versions."""
    return (below for below in element.iter() if below.tag.rpartition("}")[2] == tag and below is not element)


def _attribute(element: ElementTree.Element, name: str) -> int:
    return int(element.attrib[name])


def _number(header: bytes, place: tuple[int, str]) -> float:
    return float(struct.unpack_from(place[1], header, place[0])[0])


def _text(header: bytes, place: tuple[int, str]) -> str:
    found: bytes = struct.unpack_from(place[1], header, place[0])[0]
    return found.replace(b"\0", b" ").decode("latin-1").strip()


def _fault(path: Path, what: str) -> SourceError:
    return SourceError(f"{path} is not an SPE file that can be read: {what}")
