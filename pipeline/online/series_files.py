"""Readings out of CSV, Parquet and NPY files, with times that stay exact.

Times of epoch size fill all of an int64 of nanoseconds, and more than a float32: what they count from is
taken off before anything else is done to them.
"""

import csv
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.errors import SourceError

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]

_UNIT_NS: dict[str, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_MAX_STEP_S = 1e-4
"""Times of a narrow type are refused where neighbouring values are further apart than this."""
_NO_VALUE = ["", "nan", "NaN", "NAN", "null", "NULL", "None", "NA", "N/A", "n/a"]


class RawSeries(NamedTuple):
    """What a file holds, in its own order."""

    times_s: np.ndarray
    """float64 (R,): seconds since `origin_ns`; NaN where a reading has no time."""
    origin_ns: int
    """What was taken off the times, in nanoseconds of the file's own clock."""
    values: np.ndarray
    """float64 (R, C): NaN where a reading has no value."""
    columns: tuple[str, ...]
    """Names of the C channels."""
    bad_rows: int = 0
    """Lines of a CSV that had not as many cells as its header, such as the last one of a log cut short."""


class _Columns(NamedTuple):
    """A file's columns before their times are looked at."""

    times: np.ndarray
    missing: np.ndarray
    values: np.ndarray
    columns: tuple[str, ...]
    bad_rows: int = 0


_Pick: TypeAlias = Callable[[Sequence[str]], tuple[int, list[int]]]
"""Names of a file's columns -> place of the time, places of the values."""


def read_series(
    path: Path,
    *,
    time_column: str | int = 0,
    columns: Sequence[str] | None = None,
    time_unit: TimeUnit | None = None,
    delimiter: str | None = None,
) -> RawSeries:
    """The readings of a `.csv`, `.tsv`, `.txt`, `.parquet` or `.npy` file.

    time_column  its name, or its place from 0
    columns      the channels, in this order; None: all columns but the time
    time_unit    of the time column; None: whole numbers are nanoseconds, others are seconds. Dates and
                 times as text (ISO 8601, UTC where no zone is given) and timestamps are understood as well
    delimiter    of a CSV; None: a tab in `.tsv`, else a comma

    A CSV whose first line holds numbers alone has no header: its columns are named by the comment (`#`)
    above, if that fits, or `0`, `1`, ..., as are those of a plain NPY (R, C). Other lines that begin with
    `#` before a CSV's header are passed over.
    SourceError where the file cannot be read, or a column is not there or holds no numbers.
    """

    def pick(names: Sequence[str]) -> tuple[int, list[int]]:
        return _picked(path, names, time_column, columns)

    suffix = path.suffix.lower()
    try:
        if suffix in (".csv", ".tsv", ".txt"):
            found = _read_csv(path, pick, delimiter or ("\t" if suffix == ".tsv" else ","))
        elif suffix in (".parquet", ".pq"):
            found = _read_parquet(path, pick)
        elif suffix == ".npy":
            found = _read_npy(path, pick)
        else:
            raise SourceError(f"{path}: readings are .csv, .tsv, .txt, .parquet or .npy, not {suffix!r}")
        times_s, origin_ns = since_origin(found.times, unit=time_unit, missing=found.missing)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise SourceError(f"{path}: {_one_line(error)}; choose columns= that hold numbers") from error
    except _TimesError as error:
        raise SourceError(f"{path}: {error}") from error
    return RawSeries(times_s, origin_ns, found.values, found.columns, found.bad_rows)


class _TimesError(SourceError):
    """Times that cannot be used, before it is known which file they are from."""


def since_origin(
    times: np.ndarray, *, unit: TimeUnit | None = None, missing: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Times as float64 seconds since a moment near the first of them, and that moment in nanoseconds.

    times    (R,): whole numbers (nanoseconds), floats (seconds; another `unit` for either), or datetime64
    missing  bool (R,): True where there is no time
    returns  float64 (R,), NaN where there is no time; and an int

    The difference of whole numbers is exact. SourceError for float32 times that are too large to tell
    0.1 ms apart: those of epoch size have been rounded to 128 s.
    """
    gone = np.zeros(len(times), bool) if missing is None else missing
    if times.dtype.kind == "M":
        gone = gone | np.isnat(times)
        return _whole_since(times.astype("datetime64[ns]").astype(np.int64), gone, 1)
    if times.dtype.kind in "iu":
        return _whole_since(times, gone, _UNIT_NS[unit or "ns"])
    if times.dtype.kind == "f":
        return _float_since(times, gone | ~np.isfinite(times), _UNIT_NS[unit or "s"])
    raise _TimesError(f"times are numbers or timestamps, got {times.dtype}")


def _whole_since(times: np.ndarray, gone: np.ndarray, unit_ns: int) -> tuple[np.ndarray, int]:
    there = times[~gone]
    if len(there) == 0:
        return np.full(len(times), np.nan), 0
    if int(there.max()) > np.iinfo(np.int64).max or int(there.max()) - int(there.min()) >= 2**63:
        raise _TimesError(f"times reach from {there.min()} to {there.max()}: more than an int64 can hold")
    origin = int(there[0])
    seconds = (times.astype(np.int64) - origin) / (10**9 / unit_ns)
    return np.where(gone, np.nan, seconds), origin * unit_ns


def _float_since(times: np.ndarray, gone: np.ndarray, unit_ns: int) -> tuple[np.ndarray, int]:
    there = times[~gone]
    if len(there) == 0:
        return np.full(len(times), np.nan), 0
    step_s = float(np.spacing(np.abs(there).max())) * unit_ns / 1e9
    if step_s > _MAX_STEP_S:
        raise _TimesError(
            f"{times.dtype} times around {there[0]} are {step_s:.3g} s apart at the least: "
            "store them as int64 nanoseconds or float64 seconds"
        )
    origin = math.floor(there[0])
    seconds = (np.where(gone, np.nan, times).astype(np.float64) - origin) / (10**9 / unit_ns)
    return seconds, origin * unit_ns


def _picked(
    path: Path, names: Sequence[str], time_column: str | int, columns: Sequence[str] | None
) -> tuple[int, list[int]]:
    time = _place(path, names, time_column)
    if columns is None:
        values = [place for place in range(len(names)) if place != time]
    else:
        values = [_place(path, names, name) for name in columns]
    if not values:
        raise SourceError(f"{path} has no column beside its time {names[time]!r}: is the delimiter right?")
    return time, values


def _place(path: Path, names: Sequence[str], wanted: str | int) -> int:
    if isinstance(wanted, int):
        if 0 <= wanted < len(names):
            return wanted
    elif names.count(wanted) == 1:
        return names.index(wanted)
    fault = "more than one column" if isinstance(wanted, str) and wanted in names else "no column"
    raise SourceError(f"{path} has {fault} {wanted!r}, only {', '.join(names)[:200]}")


def _read_csv(path: Path, pick: _Pick, delimiter: str) -> _Columns:
    with path.open("rb") as file:
        names, encoding, skip = _csv_head(path, file, delimiter)
        file.seek(0)
        has_rows = any(line.strip() for line in itertools.islice(file, skip, None))
    time, values = pick(names)
    columns = tuple(names[place] for place in values)
    if not has_rows:
        empty = np.empty(0)
        return _Columns(empty, empty.astype(bool), np.empty((0, len(values))), columns)
    keys = [str(place) for place in range(len(names))]  # Arrow wants them to be unique
    types = {keys[place]: pa.float64() for place in values} | {keys[time]: pa.string()}
    bad_rows = 0

    def skip_row(_: Any) -> str:
        nonlocal bad_rows
        bad_rows += 1
        return "skip"

    # A type for each column: Arrow guesses them from the first megabyte, and fails where a column of
    # whole numbers has its first fraction after that. One thread: workers are processes.
    table = pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(use_threads=False, column_names=keys, skip_rows=skip, encoding=encoding),
        pyarrow.csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip_row),
        pyarrow.csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=_NO_VALUE),
    )
    times, missing = _arrow_times(table.column(keys[time]))
    numbers = [table.column(keys[place]).to_numpy() for place in values]
    return _Columns(times, missing, np.stack(numbers, axis=1), columns, bad_rows)


def _csv_head(path: Path, file: BinaryIO, delimiter: str) -> tuple[list[str], str, int]:
    """Names of the columns, encoding, and how many lines come before the first reading."""
    skip, comment, line = 0, b"", b""
    for line in file:
        skip += 1
        if line.startswith(b"#"):
            comment = line.lstrip(b"#")
        elif line.strip(b"\xef\xbb\xbf \t\r\n"):
            break
    else:
        raise SourceError(f"{path} is empty: expected a header and readings")
    names, encoding = _csv_names(line, delimiter)
    if not _all_numbers(names):
        return names, encoding, skip
    titles, encoding = _csv_names(comment, delimiter)  # numpy.savetxt writes the header as a comment
    named = titles if len(titles) == len(names) > 1 else [str(place) for place in range(len(names))]
    return named, encoding, skip - 1


def _csv_names(line: bytes, delimiter: str) -> tuple[list[str], str]:
    try:
        text, encoding = line.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        text, encoding = line.decode("latin-1"), "latin-1"
    return [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])], encoding


def _all_numbers(names: Sequence[str]) -> bool:
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|nan", re.IGNORECASE)
    return all(number.fullmatch(name) for name in names)


def _read_parquet(path: Path, pick: _Pick) -> _Columns:
    with path.open("rb") as opened, pq.ParquetFile(opened) as file:
        names = file.schema_arrow.names
        time, values = pick(names)
        columns = tuple(names[place] for place in values)
        table = file.read([names[time], *columns], use_threads=False)
    times, missing = _arrow_times(table.column(names[time]))
    numbers = [pc.cast(table.column(name), pa.float64(), safe=False).to_numpy() for name in columns]
    return _Columns(times, missing, np.stack(numbers, axis=1), columns)


def _arrow_times(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Times as they are, and where there is none; whole numbers never pass through a float."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _parsed(column)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
        unit_free = column.fill_null(0).to_numpy().astype("datetime64[ns]")
        return unit_free, column.is_null().to_numpy()
    return column.fill_null(0).to_numpy(), column.is_null().to_numpy()


def _parsed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text as whole numbers, else as floats, else as timestamps."""
    text = pc.utf8_trim_whitespace(column)
    text = pc.if_else(pc.is_in(text, pa.array(_NO_VALUE, text.type)), pa.scalar(None, text.type), text)
    for kind in (pa.int64(), pa.float64(), pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        try:
            return text.cast(kind)
        except pa.ArrowInvalid:
            continue
    raise _TimesError(f"times are numbers or dates, found {text.drop_null()[0].as_py()!r} among them")


def _read_npy(path: Path, pick: _Pick) -> _Columns:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise SourceError(f"{path}: {_one_line(error)}") from error
    if array.dtype.names:
        names = list(array.dtype.names)
        fields = [array[name] for name in names]
    else:
        if array.ndim != 2 or array.dtype.kind not in "iuf":
            found = f"{array.dtype} {array.shape}"
            raise SourceError(f"{path}: expected numbers (R, C) with a column of times, found {found}")
        names = [str(place) for place in range(array.shape[1])]
        fields = list(array.T)
    time, values = pick(names)
    for place in (time, *values):
        if fields[place].ndim != 1 or fields[place].dtype.kind not in "iufMb":
            raise SourceError(f"{path}: column {names[place]!r} holds {array.dtype[place]}, expected numbers")
    numbers = np.stack([fields[place].astype(np.float64) for place in values], axis=1)
    missing = np.zeros(len(array), bool)
    return _Columns(fields[time], missing, numbers, tuple(names[place] for place in values))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
