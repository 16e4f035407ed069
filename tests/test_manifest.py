import hashlib
import json
import pickle
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ManifestError
from pipeline.manifest import (
    SCHEMA,
    Manifest,
    VideoRecord,
    leaking_groups,
    read_manifest,
    write_manifest,
)

README = Path(__file__).parents[1] / "manifests" / "README.md"
CLASSES = ("Archery", "Bowling", "YoYo")
ODD_NAME = "Archery/ü 日本 'q' %d\n.avi"
SPEC = {"quality": 90, "format": 1}


def record(video: str, label: int = 0, **other) -> VideoRecord:
    values = {
        "video": video,
        "frames": video.rsplit(".", 1)[0],
        "class_name": CLASSES[label],
        "label": label,
        "group": f"{CLASSES[label]}_g01",
        "num_frames": 29,
        "width": 320,
        "height": 240,
        "fps": 25.0,
        "duration_s": 1.16,
        "start_s": 0.04,
        "time_source": "pts",
        "status": "ok",
        "error": None,
        "note": None,
        "splits": {"split01": "train", "split02": None},
    }
    return VideoRecord(**{**values, **other})


FAILED = {
    "frames": "",
    "status": "failed",
    "error": "open: no video stream",
    "num_frames": 0,
    "time_source": "",
}
RECORDS = [
    record("Archery/a.avi"),
    record(
        "Archery/ü 日本 'q' %d\n.avi", splits={"split01": "test", "split02": "train"}, group="Archery_g02"
    ),
    record("Bowling/b.avi", 1, status="partial", error="2 errors, first: cut", num_frames=28),
    record("Bowling/c.avi", 1, **FAILED),
    record("YoYo/-d.mp4", 2, note="scaled", splits={"split01": None, "split02": "test"}, time_source="rate"),
]


def write(path: Path, records=tuple(RECORDS), **other) -> Manifest:
    write_manifest(path, records, **{"dataset": "tiny", "classes": CLASSES, "spec": SPEC, **other})
    return read_manifest(path)


@pytest.fixture
def manifest(tmp_path):
    return write(tmp_path / "tiny.parquet")


def test_rows_come_back_as_they_were_written_sorted_by_video(manifest):
    in_order = sorted(RECORDS, key=lambda row: row.video)
    assert list(manifest) == in_order
    assert [manifest[row] for row in range(len(manifest))] == in_order
    assert manifest[-1] == in_order[-1]
    assert manifest[np.int64(1)] == in_order[1]


def test_a_row_beyond_the_ends_is_an_index_error(manifest):
    for row in (5, -6):
        with pytest.raises(IndexError):
            manifest[row]


def test_the_columns_are_those_that_the_readme_promises(manifest):
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| ", README.read_text(), flags=re.MULTILINE)
    promised = []
    for names, types in rows:
        of_type = types.split(", ")
        found = re.findall(r"`(\w+)`", names)
        promised += [(name, of_type[min(place, len(of_type) - 1)]) for place, name in enumerate(found)]
    kinds = {"string": pa.string(), "int32": pa.int32(), "float64": pa.float64()}
    assert [(field.name, field.type) for field in SCHEMA] == [
        (name, kinds[kind]) for name, kind in promised if not name.startswith("split")
    ]
    assert manifest.split_names == ("split01", "split02")


def test_the_file_itself_is_plain_parquet_with_json_metadata(manifest, tmp_path):
    schema = pq.read_schema(tmp_path / "tiny.parquet")
    metadata = {key.decode(): json.loads(value) for key, value in schema.metadata.items()}
    assert metadata == {"format": 1, "dataset": "tiny", "classes": list(CLASSES), "spec": SPEC}
    assert schema.field("class_name").type == pa.string()
    assert [field.name for field in schema if field.nullable] == ["error", "note", "split01", "split02"]
    assert (manifest.dataset, manifest.classes, manifest.spec) == ("tiny", CLASSES, SPEC)


def test_numbers_come_as_numpy_and_repeating_text_as_codes(manifest):
    assert manifest.column("label").dtype == np.int32
    assert manifest.column("fps").dtype == np.float64
    assert manifest.column("num_frames").tolist() == [29, 29, 28, 0, 29]
    assert manifest.column("video").to_pylist() == sorted(row.video for row in RECORDS)
    for name in ("class_name", "group", "time_source", "status", "split01"):
        assert pa.types.is_dictionary(manifest.column(name).type)


def test_failed_videos_are_only_selected_when_asked_for(manifest):
    assert len(manifest.select()) == 4
    assert [row.video for row in manifest.select(status="failed")] == ["Bowling/c.avi"]
    assert len(manifest.select(status=None)) == 5


def test_a_value_a_collection_and_null_can_be_asked_for(manifest):
    assert [row.video for row in manifest.select(split01="test")] == [ODD_NAME]
    assert len(manifest.select(split01=["train", "test"])) == 3
    assert [row.video for row in manifest.select(split01=None)] == ["YoYo/-d.mp4"]
    assert len(manifest.select(split01=["test", None])) == 2
    assert len(manifest.select(label={0, 2})) == 3
    assert len(manifest.select(class_name="Archery", split02="train")) == 1


def test_a_selection_keeps_the_class_list_of_the_whole(manifest):
    test = manifest.select(split01="test")
    assert (test.classes, test.dataset, test.spec) == (CLASSES, "tiny", SPEC)
    assert test.column("label").tolist() == [0]


def test_an_empty_selection_is_an_empty_manifest(manifest):
    none = manifest.select(class_name="YoYo", split01="test")
    assert len(none) == 0
    assert list(none) == []
    assert none.column("label").tolist() == []
    assert len(none.select(split02="train")) == 0
    assert leaking_groups(none, "split01") == []
    assert none.fingerprint() == hashlib.sha256().hexdigest()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"split09": "train"}, "no column 'split09'.*splits: split01, split02"),
        ({"clas_name": "YoYo"}, "no column 'clas_name': it has video, frames, class_name"),
        ({"split01": "validation"}, "split01 of tiny is never 'validation', only train, test"),
        ({"class_name": "yoyo"}, "class_name of tiny is never 'yoyo', only Archery, Bowling, YoYo"),
        ({"status": "OK"}, "status of tiny is never 'OK', only ok, partial, failed"),
        ({"label": "YoYo"}, "column label holds int32 values"),
    ],
)
def test_a_misspelt_selection_is_an_error_that_names_what_is_known(manifest, where, said):
    with pytest.raises(ManifestError, match=said):
        manifest.select(**where)


rows = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2]),
        st.sampled_from(["ok", "partial", "failed"]),
        st.sampled_from(["train", "test", None]),
        st.sampled_from(["g1", "g2", "g3"]),
        st.integers(0, 3),
    ),
    max_size=12,
)


def records_of(drawn) -> list[VideoRecord]:
    return [
        record(
            f"{place:02d}.avi",
            label,
            status=status,
            splits={"split01": side},
            group=group,
            num_frames=num,
            frames="" if status == "failed" else f"{place:02d}",
        )
        for place, (label, status, side, group, num) in enumerate(drawn)
    ]


@given(
    drawn=rows,
    side=st.sampled_from(["train", "test", None]),
    labels=st.lists(st.integers(0, 2)),
    status=st.sampled_from(["ok", ("ok", "partial"), None]),
)
def test_a_selection_agrees_with_a_loop_over_the_rows(tmp_path_factory, drawn, side, labels, status):
    records = records_of(drawn)
    manifest = write(tmp_path_factory.mktemp("m") / "m.parquet", records)
    if not records:
        assert len(manifest.select(label=labels)) == 0
        return
    kept = [
        row
        for row in records
        if row.splits["split01"] == side
        and row.label in labels
        and (status is None or row.status in ([status] if isinstance(status, str) else status))
    ]
    assert list(manifest.select(status=status, split01=side, label=labels)) == kept


@given(drawn=rows)
def test_leaking_groups_are_those_that_a_loop_finds_on_both_sides(tmp_path_factory, drawn):
    records = records_of(drawn)
    manifest = write(tmp_path_factory.mktemp("m") / "m.parquet", records)
    if not records:
        return
    sides = [{row.group for row in records if row.splits["split01"] == side} for side in ("train", "test")]
    assert leaking_groups(manifest, "split01") == sorted(sides[0] & sides[1])


def slow_fingerprint(records) -> str:
    parts = []
    for name in ("video", "frames"):
        texts = [getattr(row, name).encode() for row in records]
        parts += [struct.pack("<i", len(text)) for text in texts] + texts
    for name in ("label", "num_frames"):
        parts += [struct.pack("<i", getattr(row, name)) for row in records]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_fingerprint_is_of_the_rows_however_they_were_selected(manifest, tmp_path):
    train = manifest.select(split01="train")
    assert train.fingerprint() == slow_fingerprint(list(train))
    assert train.fingerprint() == manifest.select(split01="train", label=[0, 1]).fingerprint()
    alone = write(tmp_path / "alone.parquet", list(train), spec={}, dataset="other")
    assert alone.fingerprint() == train.fingerprint()


@pytest.mark.parametrize(
    "change",
    [{"video": "Archery/z.avi"}, {"frames": "z"}, {"num_frames": 30}, {"label": 1, "class_name": "Bowling"}],
)
def test_a_fingerprint_tells_rows_apart(manifest, tmp_path, change):
    changed = write(tmp_path / "changed.parquet", [replace(RECORDS[0], **change), *RECORDS[1:]])
    assert changed.fingerprint() != manifest.fingerprint()


def test_records_in_any_order_give_the_same_bytes(manifest, tmp_path):
    write(tmp_path / "again.parquet", reversed(RECORDS), spec=dict(reversed(SPEC.items())))
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "tiny.parquet").read_bytes()


def test_a_manifest_survives_a_pickle(manifest):
    train = pickle.loads(pickle.dumps(manifest.select(split01="train")))
    assert list(train) == list(manifest.select(split01="train"))
    assert train.classes == CLASSES


def test_many_rows_in_several_row_groups_are_one_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.manifest._ROWS_IN_GROUP", 10)
    records = [record(f"{place:03d}.avi", place % 3, group=f"g{place // 3}") for place in range(95)]
    manifest = write(tmp_path / "many.parquet", records)
    assert pq.ParquetFile(tmp_path / "many.parquet").num_row_groups == 10
    assert list(manifest) == records
    assert manifest.column("group").to_pylist() == [row.group for row in records]
    assert list(manifest.select(label=1)) == records[1::3]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record("a.avi"), record("a.avi", frames="b")], "video 'a.avi' stands 2 times"),
        ([record("a.avi"), record("b.avi", frames="a")], "folder of frames 'a' stands 2 times"),
        ([record("a.avi", 1, class_name="Archery")], "a.avi: label 1 is not that of class 'Archery'"),
        ([replace(record("a.avi"), label=3)], "label 3 .* list of 3 classes"),
        ([replace(record("a.avi"), label=-1)], "label -1"),
        ([record("a.avi", status="failed")], "a failed video has no frames"),
        ([record("a.avi", frames="")], "every other has its folder"),
        ([record("a.avi", status="fine")], "status 'fine'"),
        ([record("a.avi"), record("b.avi", splits={})], r"b.avi has splits \[\], a.avi has"),
        ([record("a.avi", splits={"split01": "val"})], "split01 is 'val'"),
        ([record("a.avi", splits={"fps": "train"})], "a split is named like split01"),
    ],
)
def test_rows_that_contradict_each_other_are_refused_and_the_old_file_stays(tmp_path, records, said):
    path = tmp_path / "tiny.parquet"
    write(path)
    before = path.read_bytes()
    with pytest.raises(ManifestError, match=said):
        write(path, records)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.parquet"]


def test_a_class_that_stands_twice_in_the_list_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="class 'A' stands 2 times"):
        write(tmp_path / "m.parquet", [], classes=["A", "A"])


def test_two_failed_videos_may_both_have_no_folder(tmp_path):
    records = [record("a.avi", **FAILED), record("a.mp4", **FAILED)]
    assert list(write(tmp_path / "m.parquet", records)) == records


def test_a_missing_manifest_says_what_to_run(tmp_path):
    with pytest.raises(ManifestError, match=r"ucf101\.parquet is missing: run `make frames DATASET=ucf101`"):
        read_manifest(tmp_path / "ucf101.parquet")


def foreign_files():
    table = pa.table({"video": ["a"]})
    metadata = {"format": "1", "dataset": '"d"', "classes": "[]", "spec": "{}"}
    yield "empty", lambda path: path.write_bytes(b"")
    yield "text", lambda path: path.write_text("video,class\n")
    yield "other parquet", lambda path: pq.write_table(table, path)
    yield "too few columns", lambda path: pq.write_table(table.replace_schema_metadata(metadata), path)
    yield (
        "no json",
        lambda path: pq.write_table(table.replace_schema_metadata({**metadata, "format": "one"}), path),
    )


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in foreign_files()])
def test_a_foreign_file_is_one_line_that_says_what_to_do(tmp_path, make):
    path = tmp_path / "100%d" / "x.parquet"
    path.parent.mkdir()
    make(path)
    with pytest.raises(ManifestError, match=r"is not a manifest .*run `make manifest DATASET=x`") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused_by_its_number(tmp_path):
    path = tmp_path / "x.parquet"
    write(path)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"format": b"2"}), path)
    with pytest.raises(ManifestError, match="has format 2, this version reads up to 1: update"):
        read_manifest(path)


def test_a_record_is_a_plain_dataclass_of_the_columns():
    assert [*asdict(RECORDS[0])] == [*SCHEMA.names, "splits"]
