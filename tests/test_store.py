import gc
import multiprocessing
import pickle
import resource
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StoreError
from pipeline.folder import frame_name
from pipeline.jpeg import JpegRun
from pipeline.online.counters import SharedCounters, StoreCounters
from pipeline.online.pack import write_pack
from pipeline.online.ram import copies_in_ram
from pipeline.online.store import FolderStore, PackStore, open_store
from pipeline.tiles import measure_tiles
from tests.folders import (
    LENGTHS,
    file_of,
    write_dataset,
    write_folder,
    write_sparse_pack,
    write_tiny_manifest,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

START_METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Frames of three videos and their pack; not to be changed."""
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def both(data):
    return stores_of(data)


@pytest.fixture
def own(data, tmp_path):
    """The same, to be changed."""
    return Path(shutil.copytree(data, tmp_path / "tiny"))


@pytest.fixture(params=["folder", "pack"])
def store(request, data):
    return stores_of(data)[request.param]


def stores_of(data: Path) -> dict[str, FolderStore | PackStore]:
    return {"folder": FolderStore(data / "frames"), "pack": PackStore(data / "pack")}


def open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@given(st.data())
def test_both_stores_hand_out_the_bytes_of_the_files_in_the_order_asked(data, both, drawn):
    key = drawn.draw(st.sampled_from(sorted(LENGTHS)))
    indices = drawn.draw(st.lists(st.integers(0, LENGTHS[key] - 1), max_size=40))
    for store in both.values():
        assert [bytes(jpeg) for jpeg in store.read(key, indices)] == [file_of(data, key, i) for i in indices]


def test_a_frame_decodes_to_its_picture(store):
    jpegs = store.read("A/one", np.array([2, 0, 2]))
    greys = [cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR).mean() for jpeg in jpegs]
    assert [round((grey - 4) / 8) for grey in greys] == [2, 0, 2]


def test_times_are_those_of_the_frames_and_cannot_be_changed(store):
    times = store.times_us("B/three")
    assert times.dtype == np.int64
    assert times.tolist() == [40_000 * k for k in range(31)]
    with pytest.raises(ValueError, match="read-only"):
        times[0] = 1


def test_a_window_of_a_pack_is_one_stretch_of_memory(data):
    views = PackStore(data / "pack").read("B/three", range(3, 19))
    arrays = [np.frombuffer(view, np.uint8) for view in views]
    ends = [array.ctypes.data + len(array) for array in arrays]
    assert [array.ctypes.data for array in arrays[1:]] == ends[:-1]
    assert all(view.readonly for view in views)


@pytest.mark.parametrize("indices", [[31], [0, -1], [5, 2**40], np.array([31], np.uint8)])
def test_a_frame_that_is_not_there_is_named(store, indices):
    with pytest.raises(StoreError, match=r"video 'B/three' has no frame -?\d+: they are 0 to 30"):
        store.read("B/three", indices)


@pytest.mark.parametrize("indices", [[0.5], [[0, 1]], ["0"], [True]])
def test_frame_numbers_are_integers(store, indices):
    with pytest.raises(StoreError, match="must be a list of integers"):
        store.read("B/three", indices)


@pytest.mark.parametrize("video", ["A/none", "", "a/one", "A"])
def test_a_video_that_is_not_there_is_named(store, video):
    with pytest.raises(StoreError, match=f"no video '{video}'"):
        store.read(video, [0])
    with pytest.raises(StoreError, match=f"no video '{video}'"):
        store.times_us(video)


def test_asking_ahead_counts_nothing_and_fails_as_reading_does(store):
    store.read_ahead("B/three", range(16))
    assert store.counters() == StoreCounters()
    with pytest.raises(StoreError, match="no frame 31"):
        store.read_ahead("B/three", [31])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:400]), "has 400 bytes, frames.json says"),
        (lambda path: path.write_bytes(b""), "has 0 bytes, frames.json says"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_a_file_that_is_missing_or_cut_is_named(own, damage, said):
    name = frame_name(2, 80_000)
    damage(own / "frames" / "A" / "one" / name)
    store = FolderStore(own / "frames")
    assert len(store.read("A/one", [1, 3])) == 2
    with pytest.raises(StoreError, match=f"A/one/{name} {said}"):
        store.read("A/one", [1, 2])


def test_no_folder_of_frames_is_said_at_once(tmp_path):
    with pytest.raises(StoreError, match="no folder of frames"):
        FolderStore(tmp_path / "frames")


def test_a_folder_store_remembers_few_videos_and_reads_all(data):
    store = FolderStore(data / "frames", index_bytes=100)  # room for A/one or A/two, never for B/three
    for key in [*LENGTHS, *LENGTHS, "A/one"]:
        assert len(store.times_us(key)) == LENGTHS[key]
    assert list(store._recent._entries) == ["A/one"]
    assert store._recent._held == 4 * 16


# Processes


def test_a_store_pickles_small_and_reads_the_same_afterwards(data, store):
    text = pickle.dumps(store)
    assert len(text) < 500
    store.read("A/one", [0])
    assert len(pickle.dumps(store)) == len(text)
    assert [bytes(jpeg) for jpeg in pickle.loads(text).read("A/one", [3])] == [file_of(data, "A/one", 3)]


def read_some(store, answers) -> None:
    for _ in range(50):
        jpegs = store.read("B/three", [30, 0])
    answers.put([bytes(jpeg) for jpeg in jpegs])


@pytest.mark.parametrize("method", START_METHODS)
def test_processes_of_every_kind_read_right_and_are_counted_together(data, store, method):
    store.read("A/one", [1])
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    workers = [context.Process(target=read_some, args=(store, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    expected = [file_of(data, "B/three", 30), file_of(data, "B/three", 0)]
    assert [answers.get() for _ in workers] == [expected, expected]
    for worker in workers:
        worker.join(30)
    counted = store.counters()
    assert (counted.reads, counted.frames) == (101, 201)
    assert counted.bytes == 100 * sum(map(len, expected)) + len(file_of(data, "A/one", 1))


def test_threads_read_right_and_none_is_lost_in_the_count(data, store):
    def read(k: int) -> bool:
        index = k % 31
        return bytes(store.read("B/three", [index])[0]) == file_of(data, "B/three", index)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(1000)))
    assert store.counters().reads == 1000


def test_a_fork_while_another_thread_reads_does_not_hang(data, store):
    stop = threading.Event()
    reader = threading.Thread(target=lambda: [store.read("A/one", [0]) for _ in iter(stop.is_set, True)])
    reader.start()
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(20):
            answers = context.SimpleQueue()
            worker = context.Process(target=read_some, args=(store, answers))
            worker.start()
            worker.join(20)
            assert worker.exitcode == 0
    finally:
        stop.set()
        reader.join()


def read_with_few_files(data: Path, answers) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    stores = stores_of(data)
    before = len(open_files())
    held = [store.read("B/three", range(16)) for _ in range(1000) for store in stores.values()]
    answers.put((len(held), len(open_files()) - before))


def test_a_limit_of_256_open_files_is_enough_for_any_number_of_reads(data):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=read_with_few_files, args=(data, answers))
    process.start()
    assert answers.get() == (2000, 0)
    process.join(30)


def test_stores_that_are_gone_leave_no_file_open(data):
    gc.collect()
    before = open_files()
    for _ in range(50):
        stores = stores_of(data)
        copies = pickle.loads(pickle.dumps(stores))
        copies["pack"].read("A/one", [0])
    del stores, copies
    gc.collect()
    assert open_files() == before


def test_counters_count_for_themselves_where_their_maker_is_gone():
    counters = SharedCounters()
    text = pickle.dumps(counters)
    counters.add(StoreCounters(1, 2, 3, 4, 1))
    assert pickle.loads(text).read() == counters.read() == StoreCounters(1, 2, 3, 4, 1)
    assert counters.read().hit_rate == 0.25
    del counters
    gc.collect()
    with Path("/dev/null").open(), Path("/dev/null").open():  # the numbers may stand for other files now
        alone = pickle.loads(text)
    assert alone.read() == StoreCounters()
    assert alone.read().hit_rate is None


# Packs that are replaced


def test_a_view_stays_valid_after_its_store_and_its_pack_are_gone(own):
    with PackStore(own / "pack") as store:
        view = store.read("A/one", [1])[0]
        times = store.times_us("A/one")
    expected = file_of(own, "A/one", 1)
    del store
    gc.collect()
    write_folder(own / "frames", "A/one", frames=9, first=20)
    write_pack(own / "pack", own / "frames", list(LENGTHS))
    shutil.rmtree(own / "pack")
    assert bytes(view) == expected
    assert times.tolist() == [0, 40_000, 80_000, 120_000]


def test_a_closed_store_opens_again_by_itself(data):
    store = PackStore(data / "pack")
    store.close()
    assert bytes(store.read("A/two", [0])[0]) == file_of(data, "A/two", 0)


def test_a_worker_never_gets_another_pack_than_the_one_that_was_opened(own):
    store = PackStore(own / "pack")
    text = pickle.dumps(store)
    write_folder(own / "frames", "A/one", frames=4, first=20)
    write_pack(own / "pack", own / "frames", list(LENGTHS))
    with pytest.raises(StoreError, match="pack was replaced since this store was opened"):
        pickle.loads(text).read("A/one", [0])
    shutil.rmtree(own / "pack")
    with pytest.raises(StoreError, match=r"no pack at .* was there when this store was opened"):
        pickle.loads(text).read("A/one", [0])
    assert len(store.read("A/one", [0])) == 1


def test_a_pack_cut_short_is_refused(own):
    with (own / "pack" / "frames.bin").open("rb+") as file:
        file.truncate(1000)
    with pytest.raises(StoreError, match=r"frames.bin has 1000 bytes, pack.json says \d+"):
        PackStore(own / "pack")


@pytest.mark.parametrize("cache", ["auto", "ram", "disk"])
def test_a_stale_pack_is_refused_by_name(own, tmp_path, cache):
    manifest = write_tiny_manifest(tmp_path / "tiny.parquet", {**LENGTHS, "A/two": 2})
    with pytest.raises(
        StoreError,
        match=r"tiny/pack was built from other frames \(video 'A/two' has 1 frames in the pack, "
        r"2 in the manifest\): run `make pack DATASET=tiny`",
    ):
        open_store(own / "frames", own / "pack", cache=cache, manifest=manifest, ram_root=tmp_path)
    assert copies_in_ram(own / "pack", ram_root=tmp_path) == []


def test_a_pack_of_changed_frames_is_refused_when_they_are_looked_at(own, tmp_path):
    manifest = write_tiny_manifest(tmp_path / "tiny.parquet", LENGTHS)
    write_folder(own / "frames", "B/three", frames=31, first=1)
    where = {"cache": "disk", "manifest": manifest}
    assert open_store(own / "frames", own / "pack", **where).cache == "disk"
    with pytest.raises(StoreError, match="'B/three' is not as"):
        open_store(own / "frames", own / "pack", is_thorough=True, **where)


def test_a_pack_of_many_videos_costs_no_memory_and_pickles_small(tmp_path):
    write_sparse_pack(tmp_path / "pack", 50_000, frames_each=20, frame_bytes=5_000)
    tracemalloc.start()
    try:
        store = PackStore(tmp_path / "pack")
        for k in range(0, 50_000, 500):
            assert len(store.read(f"K/{k:07d}", range(16))) == 16
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000
    assert len(pickle.dumps(store)) < 500
    with pytest.raises(StoreError, match=r"no video 'K/0050000' \(it has 50000\)"):
        store.times_us("K/0050000")


def test_a_window_of_the_pack_knows_its_tiles(data):
    run = PackStore(data / "pack").read("B/three", range(7, 12))
    assert [list(row) for row in run.tile_bytes] == [list(measure_tiles(jpeg)) for jpeg in run]
    assert not isinstance(PackStore(data / "pack").read("B/three", [7, 9]), JpegRun)
