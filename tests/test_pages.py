import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.online.pages import _GAP_BYTES, _runs
from pipeline.online.store import PackStore
from tests.folders import file_of, write_dataset, write_sparse_pack


@pytest.fixture
def data(tmp_path):
    """Frames of three videos and their pack."""
    return write_dataset(tmp_path)


def test_a_pack_in_memory_is_hit_by_every_read(data):
    store = PackStore(data / "pack")
    for view in store.read("B/three", range(31)):
        bytes(view)
    before = store.counters()
    store.read("B/three", [0, 30, 30])
    after = store.counters()
    assert (after.watched - before.watched, after.resident - before.resident) == (3, 3)
    assert store.resident_share() == 1.0


def test_frames_that_come_from_disk_are_no_hits(data):
    path = data / "pack" / "frames.bin"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    store = PackStore(data / "pack")
    if store.resident_share() != 0.0:
        pytest.skip("this file system keeps its files in memory")
    views = store.read("B/three", [4, 5])
    assert store.counters()[3:] == (2, 0)
    assert store.counters().hit_rate == 0.0
    assert bytes(views[0]) == file_of(data, "B/three", 4)
    store.read("B/three", [4, 5])
    assert store.counters()[3:] == (4, 2)


def test_where_the_system_does_not_tell_no_hit_rate_is_made_up(data):
    store = PackStore(data / "pack")
    store._open().pages._is_own = False
    assert bytes(store.read("A/one", [2])[0]) == file_of(data, "A/one", 2)
    assert store.counters().hit_rate is None
    assert store.resident_share() is None


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 14)), max_size=30))
def test_stretches_are_joined_exactly_where_they_are_near_each_other(stretches):
    extents = [(start, start + size) for start, size in stretches]
    runs = list(_runs(extents))
    assert [extent for run in runs for extent in run] == sorted(extents)
    for run in runs:
        reach = run[0][1]
        for start, end in run[1:]:
            assert start - reach <= _GAP_BYTES
            reach = max(reach, end)
    for run, following in pairwise(runs):
        assert following[0][0] - max(end for _, end in run) > _GAP_BYTES


def test_frames_far_from_each_other_are_asked_for_one_by_one(data):
    """Of three frames of which one is in memory, one is a hit."""
    folder = data.parent / "sparse"
    write_sparse_pack(folder, 2, frames_each=40, frame_bytes=200_000)
    store = PackStore(folder)
    if store.resident_share() != 0.0:
        pytest.skip("this file system keeps holes in memory")
    bytes(store.read("K/0000001", [20])[0])
    store.read("K/0000001", [39, 20, 0])
    assert store.counters()[3:] == (4, 1)
