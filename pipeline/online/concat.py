"""Several datasets as one: their rows below each other, and each row's bytes from its own store."""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ManifestError, StoreError
from pipeline.manifest import FORMAT_VERSION, SCHEMA, Manifest
from pipeline.online.counters import StoreCounters
from pipeline.online.store import Indices, Jpeg, Store
from pipeline.online.windows import Integers

Labels = Literal["by_name", "by_source", "same"]

_SOURCES = "sources"
"""Where the spec of a concatenation keeps the names of its parts, and their specs."""


def concat_manifests(
    manifests: Mapping[str, Manifest], *, labels: Labels = "by_name", rename: Mapping[str, str] | None = None
) -> Manifest:
    """The rows of all manifests, one after the other in the order given, as columns: 1,000,000 rows in 1 s.

    `video`, `frames` and `group` begin with their source's name and a slash, so that they stay unique and a
    `ConcatStore` of the same names finds the bytes. Select before (`{"a": a.select(split01="train")}`) or
    after: a split that only some sources have is null in the others.

    labels   by_name    a class is its name: the first source's list, then what the next ones add to it
             by_source  a class is its source and its name, `ucf101/Archery`: nothing is merged
             same       all sources have one and the same class list
    rename   new names of classes, before they are merged: `{"hmdb51/shoot_bow": "Archery"}`

    ManifestError for a source's name that cannot be a folder's, or class lists that do not fit `labels`.
    """
    if not manifests:
        raise ValueError("no manifests to put together")
    for name in manifests:
        if not name or "/" in name or name in (".", ".."):
            raise ManifestError(f"a source's name begins the paths of its videos, so it cannot be {name!r}")
    words = _class_words(manifests, labels, rename or {})
    classes = tuple(dict.fromkeys(word for each in words.values() for word in each))
    metadata = {
        "format": FORMAT_VERSION,
        "dataset": "+".join(manifests),
        "classes": classes,
        "spec": {_SOURCES: [{"name": name, "spec": one.spec} for name, one in manifests.items()]},
    }
    splits = sorted({split for one in manifests.values() for split in one.split_names})
    parts = [_columns(name, one, words[name], classes, splits) for name, one in manifests.items()]
    table = pa.table({name: _joined([part[name] for part in parts]) for name in (*SCHEMA.names, *splits)})
    return Manifest(
        table.replace_schema_metadata({key: json.dumps(value) for key, value in metadata.items()})
    )


def source_names(manifest: Manifest) -> tuple[str, ...]:
    """The sources of a concatenation in the order of their numbers, also of those without a row here.

    ManifestError for a manifest that `concat_manifests` did not make.
    """
    if _SOURCES not in manifest.spec:
        raise ManifestError(f"{manifest!r} has no sources: make one of several by concat_manifests")
    return tuple(source["name"] for source in manifest.spec[_SOURCES])


def source_ids(manifest: Manifest) -> Integers:
    """The source of each row of a concatenation, or of rows selected from one: int64 (N,).

    A source's number is its place in `source_names`. `ClipDataset(..., row_extras={"source_id": ids})`
    hands it on in each batch.
    """
    videos = manifest.column("video")
    ids = np.empty(len(manifest), dtype=np.int64)
    for number, name in enumerate(source_names(manifest)):
        ids[pc.starts_with(videos, f"{name}/").to_numpy(zero_copy_only=False)] = number
    return ids


class ConcatStore:
    """Each video from the store of its source, which its key begins with: `ucf101/Archery/v_01`.

    Pickles, counts and is safe in threads and processes as the stores in it are.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = dict(stores)
        if not self._stores:
            raise ValueError("no stores to put together")

    def __repr__(self) -> str:
        return f"ConcatStore({self._stores!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stores that can be closed."""
        self._of_each("close")

    @property
    def stores(self) -> dict[str, Store]:
        """By the name of their source."""
        return dict(self._stores)

    def read(self, video: str, indices: Indices) -> Sequence[Jpeg]:
        """The JPEG of each frame; StoreError for a source that is not here, or from its own store."""
        store, key = self._routed(video)
        return store.read(key, indices)

    def read_ahead(self, video: str, indices: Indices) -> None:
        """Ask for frames that `read` will want soon, where the source's store can."""
        store, key = self._routed(video)
        ask = getattr(store, "read_ahead", None)
        if ask is not None:
            ask(key, indices)

    def times_us(self, video: str) -> np.ndarray:
        """int64 (num_frames,): whole microseconds since the first frame; not to be written to."""
        store, key = self._routed(video)
        return store.times_us(key)

    def counters(self) -> StoreCounters:
        """What all stores that count have handed out, together."""
        return StoreCounters(*map(sum, zip(StoreCounters(), *self._of_each("counters"), strict=True)))

    def _routed(self, video: str) -> tuple[Store, str]:
        name, _, key = video.partition("/")
        try:
            return self._stores[name], key
        except KeyError:
            raise StoreError(
                f"video {video!r} is of source {name!r}, and there are stores of {', '.join(self._stores)}: "
                "give ConcatStore the names that concat_manifests was given"
            ) from None

    def _of_each(self, method: str) -> list[Any]:
        calls = [getattr(store, method, None) for store in self._stores.values()]
        return [call() for call in calls if call is not None]


def _class_words(
    manifests: Mapping[str, Manifest], labels: Labels, rename: Mapping[str, str]
) -> dict[str, list[str]]:
    """For each source, what each class of its list is called in the concatenation."""
    if labels not in ("by_name", "by_source", "same"):
        raise ValueError(f"labels is by_name, by_source or same, got {labels!r}")
    names = {source: {word: f"{source}/{word}" for word in one.classes} for source, one in manifests.items()}
    known = {name for of_source in names.values() for name in of_source.values()}
    for name in rename:
        if name not in known:
            raise ManifestError(f"no class to rename is {name!r}: write source/class, as {min(known)!r}")
    words = {
        source: [
            rename.get(name, name if labels == "by_source" else word) for word, name in of_source.items()
        ]
        for source, of_source in names.items()
    }
    if labels == "same":
        _check_same(words)
    return words


def _check_same(words: Mapping[str, list[str]]) -> None:
    (first, expected), *others = words.items()
    for source, found in others:
        if found != expected:
            unlike = [pair for pair in zip_longest(expected, found) if pair[0] != pair[1]]
            raise ManifestError(
                f"{first} and {source} have other class lists, at first {unlike[0][0]!r} and "
                f"{unlike[0][1]!r}: labels='same' wants one list for all, labels='by_name' merges them"
            )


def _columns(
    source: str, manifest: Manifest, words: list[str], classes: tuple[str, ...], splits: list[str]
) -> dict[str, pa.Array]:
    """The columns of one source as they are in the concatenation."""
    place = {word: label for label, word in enumerate(classes)}
    label = pa.array(np.array([place[word] for word in words], dtype=np.int32)[manifest.column("label")])
    frames = manifest.column("frames")
    columns = {name: pa.array(manifest.column(name)) for name in (*SCHEMA.names, *manifest.split_names)}
    return columns | {
        "video": _prefixed(source, manifest.column("video")),
        # A failed video has no frames, which is written as an empty text.
        "frames": pc.if_else(pc.equal(frames, ""), "", _prefixed(source, frames)),
        "group": _prefixed(source, manifest.column("group")),
        "label": label,
        "class_name": pa.DictionaryArray.from_arrays(label, pa.array(classes, pa.string())),
        **{name: _silent(len(manifest)) for name in splits if name not in columns},
    }


def _prefixed(source: str, values: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        return pa.DictionaryArray.from_arrays(values.indices, _prefixed(source, values.dictionary))
    return pc.binary_join_element_wise(source, values, "/")


def _silent(rows: int) -> pa.Array:
    """A split's column where a source does not have the split."""
    return pa.DictionaryArray.from_arrays(pa.nulls(rows, pa.int32()), pa.array([], pa.string()))


def _joined(parts: Sequence[pa.Array]) -> pa.ChunkedArray:
    """One column: coded where all sources have it coded, as those that were read from a file do."""
    if len({part.type for part in parts}) == 1:
        return pa.chunked_array(parts)
    return pa.chunked_array([part.cast(pa.string()) for part in parts])
