"""ENVI headers: a text file of `key = value` beside a plain binary file.

Keys are taken without regard to case; a value in braces may run over several lines; a line that begins
with `;` is a comment. Text that is not UTF-8 is Latin-1.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pipeline.errors import SourceError

Fields: TypeAlias = Mapping[str, str | list[str]]

_TYPES = {
    **{1: "u1", 2: "i2", 3: "i4", 4: "f4", 5: "f8", 6: "c8", 9: "c16"},
    **{12: "u2", 13: "u4", 14: "i8", 15: "u8"},
}
"""ENVI's `data type` -> numpy's."""
_REQUIRED = ("samples", "lines", "bands", "data type", "interleave", "byte order")
_SUFFIXES = ("", ".img", ".dat", ".raw", ".bin", ".bsq", ".bil", ".bip", ".cube", ".hyspex", ".envi")
"""What the data's name may have where the header has `.hdr`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnviHeader:
    """What an ENVI header says of its data."""

    path: Path
    data_path: Path
    bands: int
    lines: int
    samples: int
    interleave: str
    """`bsq`, `bil` or `bip`."""
    dtype: np.dtype
    """As stored, with its byte order."""
    offset: int
    """Bytes of the data file before the first pixel."""
    wavelengths: np.ndarray | None
    """float64 (bands,), in `wavelength_units`."""
    wavelength_units: str | None
    good_bands: np.ndarray | None
    """bool (bands,): False where the bad band list (`bbl`) has a 0."""
    ignore_value: float | None
    """Pixels of this value hold nothing."""
    fields: Fields
    """All that the header says: keys in lower case; values in braces are lists, but for `description`."""

    def strides(self) -> tuple[int, int, int]:
        """Bytes from one band, line and sample to the next."""
        size, bands, lines, samples = self.dtype.itemsize, self.bands, self.lines, self.samples
        return {
            "bsq": (lines * samples * size, samples * size, size),
            "bil": (samples * size, bands * samples * size, size),
            "bip": (size, samples * bands * size, bands * size),
        }[self.interleave]


def read_envi(path: Path) -> EnviHeader:
    """The header of an ENVI cube, by the path of the header or of the data.

    SourceError where either file is missing or ambiguous, or the header lacks a key or contradicts itself.
    """
    header, data = _pair(path)
    try:
        fields = parse_envi(_text(header.read_bytes()))
        return _checked(header, data, fields)
    except OSError as error:
        raise SourceError(f"{header} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SourceError(f"{header}: {error}") from error


def parse_envi(text: str) -> dict[str, str | list[str]]:
    """Keys and values of a header's text; ValueError where it is no ENVI header.

    >>> parse_envi("ENVI\\nSamples = 3\\n; a note\\nwavelength = {400.5,\\n 500}")
    {'samples': '3', 'wavelength': ['400.5', '500']}
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(";"))
    if next(lines, "").lstrip("\ufeff").split()[:1] != ["ENVI"]:
        raise ValueError("no ENVI header: its first line must be ENVI")
    fields: dict[str, str | list[str]] = {}
    for line in lines:
        key, is_pair, value = line.partition("=")
        if is_pair:
            name = " ".join(key.lower().split())
            fields[name] = _value(name, value.strip(), lines)
    return fields


def _value(name: str, value: str, lines: Iterator[str]) -> str | list[str]:
    """A value as text, or as a list where it is in braces, which may close some lines on."""
    if not value.startswith("{"):
        return value
    parts = [value]
    while "}" not in parts[-1]:
        line = next(lines, None)
        if line is None:
            raise ValueError(f"the brace of {name!r} is never closed")
        parts.append(line.strip())
    inner = "\n".join(parts)[1:].rpartition("}")[0].strip()
    if name == "description":
        return inner
    return [part.strip() for part in inner.replace("\n", " ").split(",")] if inner else []


def _pair(path: Path) -> tuple[Path, Path]:
    """The header and the data, one of which is given."""
    if path.suffix.lower() == ".hdr":
        stem = path.with_suffix("")
        names = [stem.name + suffix for end in _SUFFIXES for suffix in dict.fromkeys((end, end.upper()))]
        found = [stem.with_name(name) for name in names if stem.with_name(name).is_file()]
        wanted = f"{stem.name} with one of {', '.join(suffix or 'no suffix' for suffix in _SUFFIXES)}"
        return path, _only(found, f"{path} has {{}} of data beside it: expected {wanted}")
    names = [path.name + ".hdr", path.name + ".HDR", path.stem + ".hdr", path.stem + ".HDR"]
    found = [path.with_name(name) for name in dict.fromkeys(names) if path.with_name(name).is_file()]
    return _only(found[:1], f"{path} has {{}} beside it: expected {path.name}.hdr or {path.stem}.hdr"), path


def _only(found: list[Path], message: str) -> Path:
    if len(found) != 1:
        named = f"{len(found)} files ({', '.join(path.name for path in found)})" if found else "no file"
        raise SourceError(message.format(named) + ("; open the data by its own name" if found else ""))
    return found[0]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _checked(header: Path, data: Path, fields: Fields) -> EnviHeader:
    missing = [key for key in _REQUIRED if key not in fields]
    if missing:
        raise ValueError(f"the header lacks {', '.join(map(repr, missing))}")
    _refuse(fields)
    interleave = str(fields["interleave"]).lower()
    if interleave not in ("bsq", "bil", "bip"):
        raise ValueError(f"interleave is bsq, bil or bip, found {fields['interleave']!r}")
    bands = _whole(fields, "bands", at_least=1)
    return EnviHeader(
        path=header,
        data_path=data,
        bands=bands,
        lines=_whole(fields, "lines", at_least=1),
        samples=_whole(fields, "samples", at_least=1),
        interleave=interleave,
        dtype=_dtype(fields),
        offset=_whole(fields, "header offset", at_least=0) if "header offset" in fields else 0,
        wavelengths=_band_numbers(fields, "wavelength", bands),
        wavelength_units=str(fields["wavelength units"]) if "wavelength units" in fields else None,
        good_bands=None if (flags := _band_numbers(fields, "bbl", bands)) is None else flags != 0,
        ignore_value=_number(fields, "data ignore value"),
        fields=fields,
    )


def _refuse(fields: Fields) -> None:
    """ValueError for what would be read wrongly without any other sign of it."""
    if "spectral library" in str(fields.get("file type", "")).lower():
        raise ValueError("this is a spectral library, not an image")
    if str(fields.get("file compression", "0")).strip() != "0":
        raise ValueError("the data is compressed: unpack it and set `file compression = 0`")
    for key in ("major frame offsets", "minor frame offsets"):
        if re.search("[1-9]", str(fields.get(key, ""))):
            raise ValueError(f"{key!r} other than 0 are not supported: save the image without them")


def _dtype(fields: Fields) -> np.dtype:
    code, order = _whole(fields, "data type", at_least=0), _whole(fields, "byte order", at_least=0)
    if code not in _TYPES or order not in (0, 1):
        known = ", ".join(map(str, _TYPES))
        raise ValueError(f"data type {code} and byte order {order}: expected one of {known}, and 0 or 1")
    return np.dtype("<>"[order] + _TYPES[code])


def _whole(fields: Fields, key: str, *, at_least: int) -> int:
    try:
        number = int(str(fields[key]))
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise ValueError(f"{key!r} must be a whole number >= {at_least}, found {fields[key]!r}")
    return number


def _number(fields: Fields, key: str) -> float | None:
    try:
        return float(str(fields[key])) if key in fields else None
    except ValueError as error:
        raise ValueError(f"{key!r} must be a number, found {fields[key]!r}") from error


def _band_numbers(fields: Fields, key: str, bands: int) -> np.ndarray | None:
    """float64 (bands,) of a list; None where the header does not have it, or has it empty."""
    listed = fields.get(key) or []
    texts = [listed] if isinstance(listed, str) else [text for text in listed if text]
    if not texts:
        return None
    try:
        numbers = np.array([float(text) for text in texts])
    except ValueError as error:
        raise ValueError(f"{key!r} must list numbers: {error}") from error
    if len(numbers) != bands:
        raise ValueError(f"{key!r} lists {len(numbers)} numbers for {bands} bands")
    return numbers
