"""Bytes are fetched before decoders need them: bounded, in order, and without any trace in the stream."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from pipeline.errors import StoreError
from pipeline.folder import frame_name
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    EpochSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.readahead import Pace, reading_ahead, reading_together, touch
from pipeline.online.reuse import ReuseSpec
from tests.folders import LENGTHS, write_dataset, write_tiny_manifest
from tests.streams import open_loader, two_epochs, write_textured_dataset

WINDOW = WindowSpec(frames=4)
AUGMENT = AugmentSpec(size_px=32)
REFS = [ClipRef(2, k, 100 + k) for k in range(12)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def manifest(tiny):
    return write_tiny_manifest(tiny / "m.parquet", LENGTHS)


@given(count=st.integers(0, 20), size=st.integers(1, 9), bad=st.sets(st.integers(0, 19)))
def test_keys_that_are_read_together_are_read_once_and_fail_each_at_its_own_turn(count, size, bad):
    read = []

    def reader(key):
        read.append(key)
        if key in bad:
            raise StoreError(f"key {key}")
        return 10 * key

    for key, take in enumerate(reading_together(reader, range(count), size=size)):
        if key in bad:
            with pytest.raises(StoreError, match=f"key {key}$"):
                take()
        else:
            assert take() == 10 * key
        assert read == list(range(min((key // size + 1) * size, count)))


def test_a_bad_clip_costs_no_other_of_those_read_with_it(tiny, manifest):
    class Failing(Slow):
        def read(self, video, indices):
            if indices[0] == 5:
                raise StoreError("not there")
            return super().read(video, indices)

    options = {"augment": AUGMENT, "on_bad": "skip"}
    dataset = ClipDataset(manifest, Failing(FolderStore(tiny / "frames")), WINDOW, **options)
    batch = dataset.__getitems__(REFS)
    assert dataset.replaced == 1
    whole = ClipDataset(manifest, FolderStore(tiny / "frames"), WINDOW, **options).__getitems__(REFS)
    others = [place for place, ref in enumerate(REFS) if ref.start != 5]
    assert torch.equal(batch.frames[others], whole.frames[others])
    assert batch.starts[others].tolist() == [ref.start for ref in REFS if ref.start != 5]


class Slow:
    """A store that keeps one waiting for 5 ms a read, and notes how many wait at the same time."""

    def __init__(self, store):
        self.store = store
        self.lock = threading.Lock()
        self.reads = self.in_flight = self.most = 0

    def read(self, video, indices):
        with self.lock:
            self.reads += 1
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        time.sleep(0.005)
        with self.lock:
            self.in_flight -= 1
        return self.store.read(video, indices)

    def times_us(self, video):
        return self.store.times_us(video)


def is_same(one, other) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one[:-1], other[:-1], strict=True))


@given(order=st.permutations(range(9)), ahead=st.integers(1, 12), threads=st.integers(1, 4))
def test_each_key_is_read_once_and_none_too_early_in_whatever_order_they_are_taken(order, ahead, threads):
    read, taken = [], [-1]

    def reader(key):
        assert key <= max(taken) + ahead
        read.append(key)
        return 10 * key

    with (
        ThreadPoolExecutor(threads) as pool,
        reading_ahead(pool, reader, range(9), ahead=ahead) as fetched,
    ):
        for place in order:
            taken.append(place)
            assert fetched[place]() == 10 * place
    assert sorted(read) == [*range(9)]


def test_an_error_comes_where_its_key_is_taken_and_what_was_not_begun_is_dropped():
    read = []

    def reader(key):
        read.append(key)
        if key == 2:
            raise StoreError("bad")
        return key

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(StoreError, match="bad"),
        reading_ahead(pool, reader, range(100), ahead=3) as fetched,
    ):
        assert [fetched[0](), fetched[1]()] == [0, 1]
        fetched[2]()
    assert max(read) <= 2 + 3
    with ThreadPoolExecutor(1) as pool, reading_ahead(pool, reader, [7], ahead=1) as fetched:
        fetched[0]()
        with pytest.raises(ValueError, match="taken before"):
            fetched[0]()


def test_of_a_slow_store_several_clips_are_on_their_way_at_once_and_never_more_than_there_are_readers(
    tiny, manifest
):
    slow = Slow(PackStore(tiny / "pack"))
    plain = ClipDataset(manifest, slow, WINDOW, augment=AUGMENT).__getitems__(REFS)
    assert slow.most == 1
    ahead = ClipDataset(manifest, slow, WINDOW, augment=AUGMENT, readers=4).__getitems__(REFS)
    assert 2 <= slow.most <= 4  # what waits at once is what is won: 12 x 5 ms become 3 x 5 ms
    assert slow.reads == 2 * len(REFS)
    assert is_same(plain, ahead)


@pytest.mark.parametrize("kind", [FolderStore, PackStore])
@pytest.mark.parametrize(
    "options", [{}, {"threads": 3}, {"augment": None}, {"transform": v2.RandomInvert()}], ids=str
)
def test_readers_change_nothing(tiny, manifest, kind, options):
    store = kind(tiny / ("frames" if kind is FolderStore else "pack"))
    plain, ahead = (
        ClipDataset(manifest, store, WINDOW, **{"augment": AUGMENT, "readers": readers, **options})
        for readers in (0, 2)
    )
    assert is_same(plain.__getitems__(REFS), ahead.__getitems__(REFS))
    assert torch.equal(plain[REFS[0]].frames, ahead[REFS[0]].frames)


def test_what_cannot_be_read_is_named_or_replaced_as_without_readers(tmp_path):
    root = write_dataset(tmp_path)
    (root / "frames" / "A" / "one" / frame_name(2, 80_000)).unlink()
    manifest = write_tiny_manifest(root / "m.parquet", LENGTHS)
    refs = [ClipRef(0, 0, 5), *REFS[:4], ClipRef(0, 0, 6)]
    raising, *skipping = (
        ClipDataset(
            manifest, FolderStore(root / "frames"), WINDOW, augment=AUGMENT, on_bad=on_bad, readers=readers
        )
        for on_bad, readers in (("raise", 3), ("skip", 0), ("skip", 3))
    )
    with pytest.raises(StoreError, match="A/one"):
        raising.__getitems__(refs)
    plain, ahead = (dataset.__getitems__(refs) for dataset in skipping)
    assert is_same(plain, ahead)
    assert skipping[0].replaced == skipping[1].replaced >= 2


def test_clips_that_are_kept_are_not_read(tiny, manifest, tmp_path):
    slow = Slow(PackStore(tiny / "pack"))
    dataset = ClipDataset(
        manifest, slow, WINDOW, augment=AUGMENT, readers=2, reuse_cache=ReuseSpec(root=tmp_path)
    )
    refs = [ClipRef(row, 0, 7) for row in range(3)]
    first = dataset.__getitems__(refs)
    assert slow.reads == 3
    assert is_same(first, dataset.__getitems__(refs))
    assert slow.reads == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_of_workers_with_readers_is_the_same(tmp_path, workers):
    root = write_textured_dataset(tmp_path)
    unbroken = two_epochs(open_loader(root, LoaderSpec(batch_size=4, workers=0)))
    spec = LoaderSpec(batch_size=4, workers=workers, readers=3)
    loader = open_loader(root, spec, store="folder")
    assert loader.dataset.readers == 3
    assert two_epochs(loader) == unbroken


def test_a_loader_that_says_nothing_of_readers_leaves_the_dataset_its_own(tiny, manifest):
    dataset = ClipDataset(manifest, PackStore(tiny / "pack"), WINDOW, readers=2)
    build_loader(dataset, EpochSampler(manifest, WINDOW), LoaderSpec(workers=0))
    assert dataset.readers == 2


def test_a_store_that_does_not_wait_is_read_without_further_threads(tiny, manifest):
    dataset = ClipDataset(manifest, FolderStore(tiny / "frames"), WINDOW, augment=AUGMENT, readers=4)
    dataset.store = Noting(dataset.store)
    dataset.__getitems__(REFS[:4])
    assert threading.current_thread() not in dataset.store.threads
    dataset._local.pace.is_slow = False
    dataset.store.threads.clear()
    dataset.__getitems__(REFS[:4])
    assert dataset.store.threads == {threading.current_thread()}


def test_the_last_reads_say_whether_a_store_keeps_one_waiting():
    pace = Pace()
    assert pace.is_slow
    assert pace.timed(str, 5) == "5"
    for wait_s, is_slow in ((0.0, False), (0.01, True), (0.0, False)):
        for _ in range(5):
            pace.timed(time.sleep, wait_s)
        pace.settle()
        assert pace.is_slow == is_slow
    pace.settle()
    assert not pace.is_slow  # nothing new to judge by


class Noting:
    """A store that notes in which threads it is read."""

    def __init__(self, store):
        self.store, self.threads = store, set()
        self.times_us = store.times_us

    def read(self, video, indices):
        self.threads.add(threading.current_thread())
        return self.store.read(video, indices)


def test_touching_leaves_bytes_as_they_are(tiny):
    jpegs = PackStore(tiny / "pack").read("B/three", np.arange(5))
    before = [bytes(jpeg) for jpeg in jpegs]
    touch([*jpegs, b"", b"abc"])
    assert [bytes(jpeg) for jpeg in jpegs] == before


@pytest.mark.parametrize("wrong", [{"readers": -1}, {"threads": 0}])
def test_numbers_of_threads_that_make_no_sense_are_refused(tiny, manifest, wrong):
    with pytest.raises(ValueError, match="readers"):
        ClipDataset(manifest, PackStore(tiny / "pack"), WINDOW, **wrong)
