"""One row for each video, in one Parquet file: columns, not objects, so that a million rows stay cheap.

What the columns mean: manifests/README.md.
"""

import hashlib
import json
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ManifestError
from pipeline.files import replaced

FORMAT_VERSION = 1
"""Goes up when a reader of the old format would misunderstand the new one."""

Status = Literal["ok", "partial", "failed"]
Side = Literal["train", "test"]
STATUSES: tuple[Status, ...] = ("ok", "partial", "failed")
SIDES: tuple[Side, ...] = ("train", "test")

_COLUMNS = {
    "video": pa.string(),
    "frames": pa.string(),
    "class_name": pa.string(),
    "label": pa.int32(),
    "group": pa.string(),
    "num_frames": pa.int32(),
    "width": pa.int32(),
    "height": pa.int32(),
    "fps": pa.float64(),
    "duration_s": pa.float64(),
    "start_s": pa.float64(),
    "time_source": pa.string(),
    "status": pa.string(),
    "error": pa.string(),
    "note": pa.string(),
}
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name in ("error", "note")) for name, kind in _COLUMNS.items()]
)
"""The columns that every manifest has, in the order of the file; the columns of the splits follow."""

# Text that repeats is read as a dictionary: a code for each row, and each word once. 1,000,000 rows with
# 400 classes and 10,000 groups opened in 0.18 s instead of 0.32 s, and gave a split in 0.05 s instead of
# 0.08 s.
_REPEATING = ("class_name", "group", "time_source", "status")
_ROWS_IN_GROUP = 131_072
_SPLIT_NAME = re.compile(r"split\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRecord:
    """One row: what is true of a video, not of each frame."""

    video: str
    """Path below the root of videos, POSIX, with its suffix; unique."""
    frames: str
    """Its folder below the frames root, POSIX; empty where the video failed."""
    class_name: str
    label: int
    """The class's place in the class list, from 0."""
    group: str
    """Clips of one group show the same scene or person: they belong on one side of a split."""
    num_frames: int
    width: int
    height: int
    """Pixels of the stored frames, upright."""
    fps: float
    """Frames per second; 0 where unknown."""
    duration_s: float
    """From the first frame to the end of the last one."""
    start_s: float
    """The first frame's own timestamp."""
    time_source: str
    """Where the times come from: `pts`, `dts` or `rate`; empty where the video failed."""
    status: Status
    error: str | None
    """What went wrong; None where nothing did."""
    note: str | None
    """What is worth knowing and is no error."""
    splits: Mapping[str, str | None]
    """For each split, by its column's name: `train`, `test`, or None where its list is silent."""


class Manifest:
    """The rows of a manifest, or some of them, in the order of the file; immutable."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.unify_dictionaries().combine_chunks()
        metadata = table.schema.metadata
        self._classes: tuple[str, ...] = tuple(json.loads(metadata[b"classes"]))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> VideoRecord:
        """One row; negative indices count from the end, IndexError beyond the ends."""
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a manifest of {len(self)} rows")
        return next(self._records(self._table.slice(row % len(self), 1)))

    def __iter__(self) -> Iterator[VideoRecord]:
        for start in range(0, len(self), 4096):
            yield from self._records(self._table.slice(start, 4096))

    def __repr__(self) -> str:
        return f"<Manifest of {self.dataset}: {len(self)} videos, {len(self.classes)} classes>"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels, also of those without a row here."""
        return self._classes

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return str(json.loads(self._table.schema.metadata[b"dataset"]))

    @property
    def spec(self) -> dict[str, Any]:
        """The options that the frames were made with."""
        return dict(json.loads(self._table.schema.metadata[b"spec"]))

    @property
    def split_names(self) -> tuple[str, ...]:
        """Columns of the splits, sorted."""
        return tuple(name for name in self._table.column_names if name not in SCHEMA.names)

    def column(self, name: str) -> Any:
        """One column: a numpy array (N,) for numbers, a pyarrow array (N,) for text.

        Text that repeats comes as a pyarrow DictionaryArray: `indices` are its codes, `dictionary`
        its words. Not to be written to.
        """
        values = self._values(name)
        is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        return values.to_numpy() if is_number else values

    def select(self, *, status: str | Collection[str] | None = ("ok", "partial"), **where: Any) -> "Manifest":
        """The rows where every named column has the value given, or one of those given.

        `select(split01="train", class_name=["Archery", "Bowling"])`; None stands for null. Failed
        videos have no frames, so they only come with `status="failed"` or `status=None` (all).
        ManifestError for a column, split, status or class that the manifest does not know.
        """
        if status is not None:
            where["status"] = status
        mask = None
        for name, wanted in where.items():
            one = self._mask(name, _as_list(wanted))
            mask = one if mask is None else pc.and_(mask, one)
        return self if mask is None else Manifest(self._table.filter(mask))

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over video, frames, label and num_frames of the rows in order.

        The same for the same rows however they were selected; other options or splits do not count.
        """
        digest = hashlib.sha256()
        for name in ("video", "frames"):
            values = self._values(name)
            digest.update(pc.binary_length(values).to_numpy().astype("<i4").tobytes())
            digest.update(_text_bytes(values))
        for name in ("label", "num_frames"):
            digest.update(self.column(name).astype("<i4").tobytes())
        return digest.hexdigest()

    def _records(self, rows: pa.Table) -> Iterator[VideoRecord]:
        splits = self.split_names
        # Column by column: 100,000 rows took 1.0 s; by `Table.to_pylist`, which is row by row, 7.0 s.
        columns = [_plain(rows.column(name)).to_pylist() for name in (*SCHEMA.names, *splits)]
        for values in zip(*columns, strict=True):
            row = dict(zip(SCHEMA.names, values, strict=False))
            yield VideoRecord(**row, splits=dict(zip(splits, values[len(row) :], strict=True)))

    def _values(self, name: str) -> pa.Array:
        if name not in self._table.column_names:
            raise ManifestError(
                f"the manifest of {self.dataset} has no column {name!r}: it has "
                f"{', '.join(SCHEMA.names)}; splits: {', '.join(self.split_names) or 'none'}"
            )
        column = self._table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def _mask(self, name: str, wanted: list[Any]) -> pa.Array:
        values = self._values(name)
        self._check_known(name, wanted)
        is_coded = pa.types.is_dictionary(values.type)
        kind = values.type.value_type if is_coded else values.type
        try:
            wanted_values = pa.array(wanted, type=kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ManifestError(f"column {name} holds {kind} values, not {wanted}: {error}") from error
        if not is_coded:
            return pc.is_in(values, value_set=wanted_values)
        of_word = pc.is_in(values.dictionary, value_set=wanted_values)
        return of_word.take(values.indices).fill_null(None in wanted)

    def _check_known(self, name: str, wanted: list[Any]) -> None:
        known: dict[str, tuple[str | None, ...]] = {"status": STATUSES, "class_name": self.classes}
        known |= dict.fromkeys(self.split_names, (*SIDES, None))
        for value in wanted:
            if name in known and value not in known[name]:
                names = ", ".join(map(str, known[name][:20])) + (", ..." if len(known[name]) > 20 else "")
                raise ManifestError(f"{name} of {self.dataset} is never {value!r}, only {names}")


def read_manifest(path: str | Path) -> Manifest:
    """Open a manifest; ManifestError says what to do where it is missing, foreign or too new."""
    path = Path(path)
    if not path.exists():
        raise ManifestError(
            f"{path} is missing: run `make frames DATASET={path.stem}`, "
            f"or `make manifest DATASET={path.stem}` where the frames are there already"
        )
    try:
        # Not through Arrow's threads: a process that has started some is not safe to fork afterwards,
        # and one thread is quick enough.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            schema = file.schema_arrow
            _check_format(path, schema)
            repeating = [name for name in schema.names if name in _REPEATING or name not in SCHEMA.names]
        with pq.ParquetFile(path, pre_buffer=False, read_dictionary=repeating) as file:
            return Manifest(file.read(use_threads=False))
    except (pa.ArrowInvalid, ValueError, TypeError) as error:
        raise _foreign(path, str(error).partition("\n")[0]) from error


def _foreign(path: Path, why: str) -> ManifestError:
    return ManifestError(
        f"{path} is not a manifest ({why}): move it away and run `make manifest DATASET={path.stem}`"
    )


def write_manifest(
    path: str | Path,
    records: Iterable[VideoRecord],
    *,
    dataset: str,
    classes: Sequence[str],
    spec: Mapping[str, Any],
) -> None:
    """Write a manifest, whole or not at all; the same records in any order give the same bytes.

    ManifestError where the rows contradict each other or the class list.
    """
    table = _to_table(sorted(records, key=lambda record: record.video), dataset, tuple(classes), spec)
    with replaced(Path(path)) as beside:
        pq.write_table(
            table,
            beside,
            row_group_size=_ROWS_IN_GROUP,
            compression="zstd",
            compression_level=3,
            use_dictionary=True,
            write_statistics=True,
            version="2.6",
            data_page_version="1.0",
        )


def leaking_groups(manifest: Manifest, split: str) -> list[str]:
    """Groups, sorted, that a split has on both sides: a model would be tested on what it has seen."""
    groups = manifest.column("group")
    codes = groups.indices.to_numpy()
    is_on_both = np.ones(len(groups.dictionary), dtype=bool)
    for side in SIDES:
        is_side = pc.equal(manifest.column(split), side).fill_null(False)
        is_here = np.zeros_like(is_on_both)
        is_here[codes[is_side.to_numpy(zero_copy_only=False)]] = True
        is_on_both &= is_here
    return sorted(groups.dictionary.filter(pa.array(is_on_both)).to_pylist())


def _as_list(wanted: Any) -> list[Any]:
    if wanted is None or isinstance(wanted, str) or not isinstance(wanted, Iterable):
        return [wanted]
    return list(wanted)


def _plain(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return values.cast(pa.string()) if pa.types.is_dictionary(values.type) else values


def _text_bytes(values: pa.Array) -> memoryview:
    """The UTF-8 of all values of a string array, one after the other, without a copy."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    return memoryview(data or b"")[ends[0] : ends[-1]] if len(values) else memoryview(b"")


def _to_table(
    records: list[VideoRecord], dataset: str, classes: tuple[str, ...], spec: Mapping[str, Any]
) -> pa.Table:
    _check_records(records, classes)
    split_names = sorted(records[0].splits) if records else []
    metadata = {"format": FORMAT_VERSION, "dataset": dataset, "classes": classes, "spec": spec}
    schema = pa.schema(
        [*SCHEMA, *(pa.field(name, pa.string()) for name in split_names)],
        metadata={key: json.dumps(value, sort_keys=True) for key, value in metadata.items()},
    )
    columns = {name: [getattr(record, name) for record in records] for name in SCHEMA.names}
    columns |= {name: [record.splits[name] for record in records] for name in split_names}
    return pa.table(columns, schema=schema)


def _check_records(records: list[VideoRecord], classes: tuple[str, ...]) -> None:
    """ManifestError names the first row that contradicts another, or the class list."""
    _check_unique("class", classes)
    _check_unique("video", (record.video for record in records))
    _check_unique("folder of frames", (record.frames for record in records if record.status != "failed"))
    for record in records:
        if not 0 <= record.label < len(classes) or classes[record.label] != record.class_name:
            raise ManifestError(
                f"{record.video}: label {record.label} is not that of class {record.class_name!r} "
                f"in the list of {len(classes)} classes; labels count from 0 in its order"
            )
        if record.status not in STATUSES or (record.status == "failed") != (record.frames == ""):
            raise ManifestError(
                f"{record.video}: status {record.status!r} with frames {record.frames!r}; "
                "a failed video has no frames, every other has its folder"
            )
        _check_splits(record, records[0])


def _check_splits(record: VideoRecord, first: VideoRecord) -> None:
    if record.splits.keys() != first.splits.keys():
        raise ManifestError(
            f"{record.video} has splits {sorted(record.splits)}, {first.video} has {sorted(first.splits)}: "
            "every video needs the same ones, None where a list is silent"
        )
    for name, side in record.splits.items():
        if not _SPLIT_NAME.fullmatch(name) or side not in (*SIDES, None):
            raise ManifestError(
                f"{record.video}: {name} is {side!r}; a split is named like split01 "
                "and holds train, test or None"
            )


def _check_unique(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise ManifestError(f"{what} {name!r} stands {count} times in the manifest, expected once")


def _check_format(path: Path, schema: pa.Schema) -> None:
    metadata = schema.metadata or {}
    if any(name not in metadata for name in (b"format", b"dataset", b"classes", b"spec")):
        raise _foreign(path, "its metadata does not name a dataset and its classes")
    version = json.loads(metadata[b"format"])
    if version > FORMAT_VERSION:
        raise ManifestError(
            f"{path} has format {version}, this version reads up to {FORMAT_VERSION}: update ClipFeed, "
            f"or delete the file and run `make manifest DATASET={path.stem}`"
        )
    wrong = [field.name for field in SCHEMA if not _has(schema, field)]
    if wrong:
        raise _foreign(path, f"columns missing or of another type: {', '.join(wrong)}")


def _has(schema: pa.Schema, field: pa.Field) -> bool:
    return field.name in schema.names and bool(schema.field(field.name).type == field.type)
