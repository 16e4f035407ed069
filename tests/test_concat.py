"""Several datasets are one: rows below each other, each with the bytes of its own store."""

import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ManifestError, StoreError
from pipeline.manifest import Manifest, read_manifest, write_manifest
from pipeline.online.collate import collate_clips
from pipeline.online.concat import ConcatStore, concat_manifests, source_ids, source_names
from pipeline.online.counters import StoreCounters
from pipeline.online.dataset import ClipDataset
from pipeline.online.loader import LoaderSpec, build_loader
from pipeline.online.samplers import ClipRef, EpochSampler
from pipeline.online.store import FolderStore, PackStore
from pipeline.online.windows import WindowSpec
from tests.folders import LENGTHS, record_of, write_dataset, write_tiny_manifest
from tests.manifests import manifest_of

WINDOW = WindowSpec(frames=4)


@pytest.fixture
def written(tmp_path):
    """Writes a manifest with one video of each class and reads it again."""

    def write(dataset, classes, *, spec=None, **changes):
        path = tmp_path / f"{dataset}.parquet"
        records = [
            record_of(f"{name}/v_1", 20, label=label, class_name=name, **{"group": "g01", **changes})
            for label, name in enumerate(classes)
        ]
        write_manifest(path, records, dataset=dataset, classes=classes, spec=spec or {"short_px": 256})
        return read_manifest(path)

    return write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Frames and pack of three videos, and their manifest."""
    root = write_dataset(tmp_path_factory.mktemp("data"))
    return root, write_tiny_manifest(root / "m.parquet", LENGTHS)


@pytest.fixture
def both(tiny):
    """The same videos as two sources: from folders, and from their pack."""
    root, manifest = tiny
    store = ConcatStore({"folder": FolderStore(root / "frames"), "pack": PackStore(root / "pack")})
    return concat_manifests({"folder": manifest, "pack": manifest}), store


# Rows


def test_rows_are_those_of_the_sources_under_the_names_of_their_sources(written):
    one, two = written("one", ["A", "B"]), written("two", ["C"], status="partial", note="cut short")
    both = concat_manifests({"x": one, "y": two})
    assert [r.video for r in both] == ["x/A/v_1.avi", "x/B/v_1.avi", "y/C/v_1.avi"]
    assert [r.frames for r in both] == ["x/A/v_1", "x/B/v_1", "y/C/v_1"]
    assert [r.group for r in both] == ["x/g01", "x/g01", "y/g01"]
    own = {"video", "frames", "group", "label"}
    for ours, theirs in zip(both, [*one, *two], strict=True):
        same = {name: value for name, value in asdict(theirs).items() if name not in own}
        assert same.items() <= asdict(ours).items()
    assert both.dataset == "x+y"


def test_a_split_that_only_one_source_has_is_silent_about_the_others(written):
    one = written("one", ["A"], splits={"split01": "train", "split02": None})
    two = written("two", ["B"], splits={"split01": "test"})
    both = concat_manifests({"x": one, "y": two, "z": written("three", ["C"])})
    assert both.split_names == ("split01", "split02")
    assert [dict(r.splits) for r in both] == [
        {"split01": "train", "split02": None},
        {"split01": "test", "split02": None},
        {"split01": None, "split02": None},
    ]
    assert [r.video for r in both.select(split01="train")] == ["x/A/v_1.avi"]


def test_a_failed_video_keeps_its_row_and_has_no_frames(written):
    failed = written("one", ["A"], status="failed", frames="", error="open: empty")
    both = concat_manifests({"x": failed, "y": written("two", ["B"])})
    assert [(r.video, r.frames, r.status) for r in both] == [
        ("x/A/v_1.avi", "", "failed"),
        ("y/B/v_1.avi", "y/B/v_1", "ok"),
    ]
    assert source_ids(both).tolist() == [0, 1]
    assert source_ids(both.select()).tolist() == [1]


def test_rows_of_a_file_and_rows_made_in_memory_go_together(written):
    both = concat_manifests({"file": written("one", ["A"]), "memory": manifest_of([20, 30])})
    assert [r.status for r in both] == ["ok", "ok", "ok"]
    assert len(both.select(class_name="A")) == 3


# Classes


def lists_of(both):
    return both.classes, [(r.class_name, r.label) for r in both]


def test_classes_of_one_name_are_one_and_new_ones_are_added(written):
    one, two = written("one", ["Run", "Jump"]), written("two", ["Swim", "Jump"])
    assert lists_of(concat_manifests({"x": one, "y": two})) == (
        ("Run", "Jump", "Swim"),
        [("Jump", 1), ("Run", 0), ("Jump", 1), ("Swim", 2)],  # rows in the order of their files
    )


def test_classes_by_source_are_never_merged(written):
    one = written("one", ["Run", "Jump"])
    both = concat_manifests({"x": one, "y": one}, labels="by_source")
    assert both.classes == ("x/Run", "x/Jump", "y/Run", "y/Jump")
    assert sorted(both.column("label").tolist()) == [0, 1, 2, 3]


def test_renamed_classes_are_merged_by_their_new_names(written):
    one, two = written("one", ["ShootBow", "Walk"]), written("two", ["shoot_bow", "walk"])
    names = {"y/shoot_bow": "ShootBow", "y/walk": "Stroll"}
    both = concat_manifests({"x": one, "y": two}, rename=names)
    assert both.classes == ("ShootBow", "Walk", "Stroll")
    assert [r.class_name for r in both] == ["ShootBow", "Walk", "ShootBow", "Stroll"]
    with pytest.raises(ManifestError, match=r"no class to rename is 'shoot_bow': write source/class, as 'x/"):
        concat_manifests({"x": one, "y": two}, rename={"shoot_bow": "ShootBow"})


def test_lists_that_must_be_the_same_name_the_first_class_that_is_not(written):
    one, two = written("one", ["A", "B"]), written("two", ["A", "C"])
    assert concat_manifests({"x": one, "y": one}, labels="same").classes == ("A", "B")
    with pytest.raises(ManifestError, match="x and y have other class lists, at first 'B' and 'C'"):
        concat_manifests({"x": one, "y": two}, labels="same")
    with pytest.raises(ValueError, match="by_name, by_source or same"):
        concat_manifests({"x": one}, labels="name")


@given(
    lists=st.lists(
        st.lists(st.sampled_from("ABC"), min_size=1, max_size=3, unique=True), min_size=1, max_size=3
    ),
    labels=st.sampled_from(["by_name", "by_source"]),
    data=st.data(),
)
def test_each_label_means_the_class_that_it_meant_before(lists, labels, data):
    parts = {}
    for number, classes in enumerate(lists):
        rows = data.draw(st.lists(st.integers(0, len(classes) - 1), max_size=4))
        table = manifest_of([20] * len(rows), labels=rows)._table
        metadata = {**table.schema.metadata, b"classes": str(classes).replace("'", '"').encode()}
        parts[f"s{number}"] = Manifest(table.replace_schema_metadata(metadata))
    both = concat_manifests(parts, labels=labels)
    found = [both.classes[label] for label in both.column("label").tolist()]
    prefix = {name: f"{name}/" if labels == "by_source" else "" for name in parts}
    expected = [
        prefix[name] + part.classes[label] for name, part in parts.items() for label in part.column("label")
    ]
    assert found == expected
    assert found == [r.class_name for r in both]
    assert len(set(both.classes)) == len(both.classes)
    assert source_ids(both).tolist() == [k for k, part in enumerate(parts.values()) for _ in range(len(part))]


# Sources


def test_the_source_of_a_row_stays_when_rows_are_selected(written):
    one, two = written("one", ["A", "B"], spec={"fps": 10}), written("two", ["A"])
    both = concat_manifests({"x": one, "x2": two})
    assert source_names(both) == ("x", "x2")
    assert source_ids(both).tolist() == [0, 0, 1]
    only = both.select(class_name="A")
    assert source_names(only) == ("x", "x2")
    assert source_ids(only).tolist() == [0, 1]
    assert source_ids(only).dtype == np.int64
    assert both.spec["sources"][0] == {"name": "x", "spec": {"fps": 10}}


def test_a_concatenation_can_be_a_source_of_another(written):
    inner = concat_manifests({"x": written("one", ["A"]), "y": written("two", ["A"])})
    outer = concat_manifests({"old": inner, "new": written("three", ["A"])})
    assert [r.video for r in outer] == ["old/x/A/v_1.avi", "old/y/A/v_1.avi", "new/A/v_1.avi"]
    assert source_ids(outer).tolist() == [0, 0, 1]


def test_a_manifest_of_one_dataset_has_no_sources():
    with pytest.raises(ManifestError, match="concat_manifests"):
        source_ids(manifest_of([20]))


@pytest.mark.parametrize("name", ["", "a/b", ".", ".."])
def test_a_name_that_cannot_begin_a_path_is_refused(name):
    with pytest.raises(ManifestError, match="cannot be"):
        concat_manifests({name: manifest_of([20])})


def test_nothing_to_put_together_is_a_mistake():
    with pytest.raises(ValueError, match="no manifests"):
        concat_manifests({})
    with pytest.raises(ValueError, match="no stores"):
        ConcatStore({})


def test_a_million_rows_stay_columns():
    part = manifest_of(np.full(500_000, 30))
    both = concat_manifests({"x": part, "y": part})
    assert len(both) == 1_000_000
    assert both[-1].video == "y/A/v_0499999.avi"
    assert np.bincount(source_ids(both)).tolist() == [500_000, 500_000]


# Bytes


def test_each_video_is_read_from_the_store_of_its_source(both, tiny):
    manifest, store = both
    plain = FolderStore(tiny[0] / "frames")
    for row in manifest:
        key = row.frames.split("/", 1)[1]
        indices = [row.num_frames - 1, 0]
        assert [bytes(jpeg) for jpeg in store.read(row.frames, indices)] == plain.read(key, indices)
        np.testing.assert_array_equal(store.times_us(row.frames), plain.times_us(key))
        store.read_ahead(row.frames, indices)


def test_all_that_is_read_is_counted_together(both):
    manifest, store = both
    before = store.counters()
    for row in manifest:
        store.read(row.frames, [0])
    counted = store.counters()
    assert (counted.reads - before.reads, counted.frames - before.frames) == (6, 6)
    assert counted.bytes > before.bytes


def test_a_store_need_not_count_nor_read_ahead_nor_close():
    class Bare:
        def read(self, video, indices):
            return [b""] * len(indices)

        def times_us(self, video):
            return np.zeros(1, np.int64)

    with ConcatStore({"x": Bare()}) as store:
        store.read_ahead("x/a", [0])
        assert store.counters() == StoreCounters()


def test_a_video_of_a_source_without_a_store_is_named(both):
    _, store = both
    for key in ("other/A/one", "A"):
        with pytest.raises(
            StoreError, match=f"video '{key}' is of source .*there are stores of folder, pack"
        ):
            store.times_us(key)
    with pytest.raises(StoreError, match="no video 'A/none'"):
        store.read("pack/A/none", [0])


def test_a_copy_reads_the_same_and_is_small(both):
    manifest, store = both
    copied = pickle.dumps(store)
    assert len(copied) < 2000
    again = pickle.loads(copied)
    key = manifest[3].frames
    assert [bytes(j) for j in again.read(key, [0])] == [bytes(j) for j in store.read(key, [0])]
    store.close()
    assert bytes(store.read(key, [0])[0]) == bytes(again.read(key, [0])[0])


def test_clips_of_all_sources_come_in_one_batch_that_says_whose_they_are(both):
    manifest, store = both
    dataset = ClipDataset(manifest, store, WINDOW, row_extras={"source_id": source_ids(manifest)})
    refs = [ClipRef(2, 5, 1), ClipRef(5, 5, 2)]
    batch = dataset.__getitems__(refs)
    assert batch.extras["source_id"].tolist() == [0, 1]
    assert batch.extras["source_id"].dtype == torch.int64
    assert torch.equal(batch.frames[0], batch.frames[1])
    assert collate_clips([dataset[ref] for ref in refs]).extras["source_id"].tolist() == [0, 1]


def test_workers_read_from_all_sources(both):
    manifest, store = both
    dataset = ClipDataset(manifest, store, WINDOW, row_extras={"source_id": source_ids(manifest)})
    sampler = EpochSampler(manifest, WINDOW)
    loader = build_loader(dataset, sampler, LoaderSpec(batch_size=3, workers=1))
    batches = [*loader]
    ids = source_ids(manifest)
    for batch in batches:
        assert batch.extras["source_id"].tolist() == ids[batch.videos].tolist()
    assert sorted(torch.cat([batch.videos for batch in batches]).tolist()) == [*range(6)]
