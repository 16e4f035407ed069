"""The same clips for some epochs: what the sampler says, and the cache that nobody can tell is there."""

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from pipeline.errors import PipelineError
from pipeline.folder import frame_name
from pipeline.manifest import read_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    EpochSampler,
    EvalSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.reuse import ClipCache, Kept, ReuseError, ReuseSpec
from pipeline.online.samplers import SamplerError
from tests.folders import LENGTHS, write_dataset, write_tiny_manifest
from tests.manifests import manifest_of, videos
from tests.streams import AUGMENT, WINDOW, samples, write_textured_dataset
from tests.test_dataset import start_up_pickle

ROOT = Path(__file__).parents[1]
LONG = WindowSpec(frames=16)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# What the sampler says.


def one_epoch(sampler: EpochSampler, epoch: int) -> list[ClipRef]:
    sampler.set_epoch(epoch)
    return list(sampler)


@given(
    num_videos=st.integers(2, 40),
    seed=st.integers(0, 2**63 - 1),
    reuse=st.integers(1, 5),
    generation=st.integers(0, 9),
    repeats=st.integers(1, 3),
)
def test_the_epochs_of_a_set_have_the_same_clips_and_the_next_set_others(
    num_videos, seed, reuse, generation, repeats
):
    sampler = EpochSampler(videos(num_videos), LONG, seed=seed, reuse=reuse, clips_per_video=repeats)
    epochs = [one_epoch(sampler, generation * reuse + k) for k in range(reuse + 1)]
    for refs in epochs[:reuse]:
        assert sorted(refs) == sorted(epochs[0])
        assert len({ref.seed for ref in refs}) == num_videos * repeats
    assert not {ref.seed for ref in epochs[reuse]} & {ref.seed for ref in epochs[0]}


def test_each_epoch_of_a_set_has_an_order_of_its_own():
    sampler = EpochSampler(videos(40), LONG, reuse=3)
    first, second, third = (one_epoch(sampler, epoch) for epoch in range(3))
    assert first != second != third != first


def test_without_reuse_the_stream_is_what_it_was():
    assert one_epoch(EpochSampler(videos(5), LONG, seed=42, reuse=1), 3) == one_epoch(
        EpochSampler(videos(5), LONG, seed=42), 3
    )


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_ranks_are_dealt_the_same_line_with_reuse(tail):
    options = {"reuse": 2, "tail": tail, "clips_per_video": 2}
    whole = list(EpochSampler(videos(7), LONG, **options))
    shares = [list(EpochSampler(videos(7), LONG, rank=rank, world=4, **options)) for rank in range(4)]
    dealt = [ref for round_of_all in zip(*shares, strict=True) for ref in round_of_all]
    assert dealt[:12] == whole[:12]
    assert len({ref.seed for ref in dealt}) == len(dealt)  # also those that fill the last round


def test_reuse_is_part_of_what_a_state_says():
    state = EpochSampler(videos(10), LONG, reuse=3).state_dict()
    with pytest.raises(SamplerError, match="reuse 3, now 1"):
        EpochSampler(videos(10), LONG).load_state_dict(state)
    older = EpochSampler(videos(10), LONG).state_dict()
    del older["stream"]["reuse"]  # of a run that began before there was such a choice
    EpochSampler(videos(10), LONG).load_state_dict(older)
    with pytest.raises(SamplerError, match="reuse 1, now 3"):
        EpochSampler(videos(10), LONG, reuse=3).load_state_dict(older)
    with pytest.raises(ValueError, match="reuse must be >= 1"):
        EpochSampler(videos(10), LONG, reuse=0)


# What the dataset keeps.


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_textured_dataset(tmp_path_factory.mktemp("reuse"))


@pytest.fixture(scope="module")
def manifest(root):
    return read_manifest(root / "m.parquet")


def dataset_of(root, manifest, spec, **options) -> ClipDataset:
    store = options.pop("store", None) or PackStore(root / "pack")
    return ClipDataset(manifest, store, WINDOW, **{"augment": AUGMENT, "reuse_cache": spec, **options})


def loader_of(dataset, manifest, workers, **options):
    sampler = EpochSampler(manifest, WINDOW, seed=3, reuse=2)
    return build_loader(dataset, sampler, LoaderSpec(batch_size=5, workers=workers, **options))


def epochs_of(loader, epochs) -> list[str]:
    lines = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        lines += samples(loader)
    return lines


@pytest.fixture(scope="module")
def unbroken(root, manifest):
    lines = epochs_of(loader_of(dataset_of(root, manifest, None), manifest, 0), range(4))
    assert set(lines[:24]) == set(lines[24:48])
    assert lines[:24] != lines[24:48]
    assert not set(lines[:24]) & set(lines[48:])
    return lines


@pytest.mark.parametrize(
    "spec",
    [
        {"workers": 0},
        {"workers": 2},
        {"workers": 2, "start_method": "fork"},
        {"workers": 2, "readers": 2},
        {"workers": 0, "threads": 3},
    ],
    ids=str,
)
def test_the_stream_is_the_same_with_a_cache_and_every_second_epoch_comes_from_it(
    root, manifest, unbroken, tmp_path, spec
):
    dataset = dataset_of(root, manifest, ReuseSpec(root=tmp_path))
    assert epochs_of(loader_of(dataset, manifest, **spec), range(4)) == unbroken
    found = dataset.cache.counters()
    assert (found.reads, found.hit_rate) == (96, 0.5)


def test_what_is_kept_is_not_read_again(root, manifest, tmp_path):
    dataset = dataset_of(root, manifest, ReuseSpec(root=tmp_path))
    for expected in (24, 24, 48):
        epochs_of(loader_of(dataset, manifest, 0), [0] if expected == 24 else [2])
        assert dataset.store.counters().reads == expected


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(root, manifest, unbroken, tmp_path):
    lines = []
    first = loader_of(dataset_of(root, manifest, ReuseSpec(root=tmp_path)), manifest, 2)
    lines += epochs_of(first, [0])
    first.sampler.set_epoch(1)
    for _, batch in zip(range(2), first, strict=False):
        lines += samples([batch])
    state = json.loads(json.dumps(first.sampler.state_dict()))
    del first
    second = loader_of(dataset_of(root, manifest, ReuseSpec(root=tmp_path)), manifest, 1)
    second.sampler.load_state_dict(state)
    assert lines + epochs_of(second, [1, 2, 3]) == unbroken


@pytest.mark.parametrize(
    "options",
    [
        {"augment": None},
        {"transform": v2.ColorJitter(0.5)},
        {"transform": lambda clip: clip.flip(-1)},
        {"transform": v2.CenterCrop(8)},
    ],
    ids=["whole", "jitter", "lambda", "smaller"],
)
def test_clips_of_every_path_are_kept(root, manifest, tmp_path, options):
    kept = dataset_of(root, manifest, ReuseSpec(root=tmp_path), **options)
    plain = dataset_of(root, manifest, None, **options)
    refs = [ClipRef(row, 0, 50 + row) for row in range(6)]
    for _ in range(2):
        for ours, theirs in zip(kept.__getitems__(refs)[:-1], plain.__getitems__(refs)[:-1], strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype
    assert kept.cache.counters().hit_rate == 0.5


def test_a_transform_that_enlarges_clips_is_refused_with_the_sizes(root, manifest, tmp_path):
    dataset = dataset_of(root, manifest, ReuseSpec(root=tmp_path), transform=v2.Resize(64))
    with pytest.raises(ReuseError, match=r"\(4, 64, 64, 3\).*must not enlarge"):
        dataset[ClipRef(0, 0, 1)]


def test_replacements_are_counted_each_time_as_without_a_cache(tmp_path):
    root = write_dataset(tmp_path)
    (root / "frames" / "A" / "one" / frame_name(2, 80_000)).unlink()
    manifest = write_tiny_manifest(root / "m.parquet", LENGTHS)
    counts = []
    for spec in (None, ReuseSpec(root=tmp_path)):
        store = FolderStore(root / "frames")
        dataset = dataset_of(root, manifest, spec, store=store, on_bad="skip")
        rows = [dataset[ClipRef(0, 0, 5)].video for _ in range(3)]
        counts.append((rows, dataset.replaced))
    assert counts[0] == counts[1]
    assert counts[0][1] >= 3


def test_settings_under_which_nothing_is_found_again_are_refused(root, manifest, tmp_path):
    dataset = dataset_of(root, manifest, ReuseSpec(root=tmp_path))
    spec = LoaderSpec(workers=0)
    with pytest.raises(PipelineError, match="give the sampler reuse=k"):
        build_loader(dataset, EpochSampler(manifest, WINDOW), spec)
    with pytest.raises(PipelineError, match=r"keeps 1 clips .* asks for 2: give .*clips_per_video=2"):
        build_loader(dataset, EpochSampler(manifest, WINDOW, reuse=2, clips_per_video=2), spec)
    build_loader(dataset, EvalSampler(manifest, WINDOW), spec)
    with pytest.raises(ValueError, match="clips_per_video must be >= 1"):
        ReuseSpec(clips_per_video=0)


def test_what_a_worker_is_sent_is_small(tmp_path, root):
    dataset = ClipDataset(
        manifest_of(np.full(20_000, 40)),
        PackStore(root / "pack"),
        WINDOW,
        augment=AUGMENT,
        reuse_cache=ReuseSpec(root=tmp_path),
    )
    assert len(start_up_pickle(dataset)) < 20_000


# The cache alone.

T = 4


def cache_of(
    folder: Path, *, run: str | None = None, rows: int = 3, clips: int = 1, content=("a",)
) -> ClipCache:
    spec = ReuseSpec(root=folder, clips_per_video=clips, run=run)
    return ClipCache(spec, rows=rows, frames=T, clip_bytes=T * 8 * 8 * 3, content=content)


def pixels_of(number: int) -> np.ndarray:
    return np.full((T, 8, 8, 3), number, np.uint8)


def kept_of(number: int) -> Kept:
    return Kept(np.arange(T) + number, np.arange(T) / 7, 48, 64)


def put(cache: ClipCache, ref: ClipRef) -> None:
    cache.put(ref, kept_of(ref.seed), pixels_of(ref.seed))


def test_a_clip_comes_back_with_all_that_is_known_of_it(tmp_path):
    cache = cache_of(tmp_path)
    ref = ClipRef(2, 5, 9, -1)
    assert cache.get(ref) is None
    put(cache, ref)
    kept, pixels = cache.get(ref)
    np.testing.assert_array_equal(kept.indices, np.arange(T) + 9)
    np.testing.assert_array_equal(kept.times_s, np.arange(T) / 7)
    assert (kept.height, kept.width) == (48, 64)
    np.testing.assert_array_equal(pixels, pixels_of(9))
    out = pixels_of(0)
    assert cache.get(ref, out)[1] is out
    np.testing.assert_array_equal(out, pixels_of(9))
    for other in (ClipRef(2, 4, 9), ClipRef(2, 5, 8), ClipRef(2, 5, 9, 0), ClipRef(1, 5, 9)):
        assert not cache.has(other)
    assert cache.counters()[:2] == (3, 2 * T)


@given(clips=st.integers(1, 3), numbers=st.lists(st.integers(1, 9), max_size=12))
def test_a_row_keeps_its_newest_clips(tmp_path_factory, clips, numbers):
    cache = cache_of(tmp_path_factory.mktemp("cache"), clips=clips)
    newest = []
    for number in numbers:
        put(cache, ClipRef(1, 0, number))
        if number not in newest:
            newest = [*newest, number][-clips:]
    assert [number for number in range(1, 10) if cache.has(ClipRef(1, 0, number))] == sorted(newest)


def test_the_file_goes_with_its_last_user_and_the_ranks_of_a_run_share_it(tmp_path):
    one, other = cache_of(tmp_path, run="r"), cache_of(tmp_path, run="r")
    assert one.path == other.path
    assert one.path.stat().st_size == one.num_bytes
    assert one.path.stat().st_blocks * 512 >= one.num_bytes  # set aside, not promised
    put(one, ClipRef(0, 0, 4))
    assert other.has(ClipRef(0, 0, 4))
    one.close()
    assert other.get(ClipRef(0, 0, 4)) is not None
    del other
    assert not list(tmp_path.glob("clipfeed-*"))


def test_only_equal_clips_are_shared(tmp_path):
    caches = [
        cache_of(tmp_path),
        cache_of(tmp_path),
        cache_of(tmp_path, run="r"),
        cache_of(tmp_path, run="s"),
    ]
    caches += [cache_of(tmp_path, run="r", content=("b",)), cache_of(tmp_path, run="r", clips=2)]
    assert len({cache.path for cache in caches}) == 6


def test_datasets_of_other_pixels_never_share(root, manifest, tmp_path):
    spec = ReuseSpec(root=tmp_path, run="r")
    options = [
        {},
        {"augment": AugmentSpec(size_px=16, flip_p=0.0)},
        {"transform": v2.ColorJitter(0.1)},
        {"transform": v2.ColorJitter(0.2)},
        {"store": FolderStore(root / "frames")},
    ]
    datasets = [dataset_of(root, manifest, spec, **each) for each in options]
    assert len({dataset.cache.path for dataset in datasets}) == 5
    again = dataset_of(root, manifest, spec, transform=v2.ColorJitter(0.2))
    assert again.cache.path == datasets[3].cache.path


def test_what_does_not_fit_is_refused_with_the_sum(small_disk):
    with pytest.raises(ReuseError, match=r"needs .*: 5000 clips x .*; .* has .* free: take fewer"):
        cache_of(small_disk, rows=5000)
    assert not list(small_disk.glob("clipfeed-*"))
    fits = cache_of(small_disk, rows=700)
    with pytest.raises(ReuseError, match="needs"):
        cache_of(small_disk, rows=700)
    fits.close()
    cache_of(small_disk, rows=700)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReuseError, match=r"file.* cannot hold augmented clips"):
        cache_of(tmp_path / "file")


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.test_reuse import *\n"
        "cache = cache_of(Path(sys.argv[1])); put(cache, ClipRef(0, 0, 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("clipfeed-*"))) == 1
    cache = cache_of(tmp_path)
    assert list(tmp_path.glob("clipfeed-*")) == [cache.path]


def test_a_slot_that_was_half_written_is_empty(tmp_path):
    cache = cache_of(tmp_path)
    put(cache, ClipRef(0, 0, 3))
    broken = kept_of(4)._replace(times_s=np.arange(T + 1) / 7)
    with pytest.raises(ValueError, match="broadcast"):
        cache.put(ClipRef(0, 0, 4), broken, pixels_of(4))
    assert cache.get(ClipRef(0, 0, 3)) is None
    assert cache.get(ClipRef(0, 0, 4)) is None
    put(cache, ClipRef(0, 0, 4))
    assert cache.get(ClipRef(0, 0, 4)) is not None


def test_a_slot_that_another_process_has_in_hand_is_a_miss_and_nobody_waits(tmp_path):
    cache = cache_of(tmp_path)
    put(cache, ClipRef(1, 0, 3))
    hold = (
        "import fcntl, os, sys; d = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.lockf(d, fcntl.LOCK_EX, 1, 1); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, cache.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert cache.get(ClipRef(1, 0, 3)) is None
        put(cache, ClipRef(1, 0, 4))
        put(cache, ClipRef(2, 0, 4))
        holder.stdin.close()
    assert cache.get(ClipRef(1, 0, 3)) is not None
    assert cache.get(ClipRef(2, 0, 4)) is not None


def hammer(cache: ClipCache, first: int) -> None:
    """Read and write one slot again and again; exit with 1 at a clip that is not of one piece."""
    seen = 0
    for step in range(400):
        put(cache, ClipRef(0, 0, 1 + (first + step) % 5))
        for number in range(1, 6):
            found = cache.get(ClipRef(0, 0, number))
            if found is not None:
                seen += 1
                if not ((found[1] == number).all() and found[0].indices[0] == number):
                    os._exit(1)
    os._exit(0 if seen else 2)


def test_processes_that_write_and_read_one_slot_never_see_half_a_clip(tmp_path):
    cache = cache_of(tmp_path)
    put(cache, ClipRef(0, 0, 1))  # opened before the fork: children must not use the parent's locks
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=hammer, args=(cache, k)) for k in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert cache.path.exists()


def test_locks_of_slots_do_not_meddle_with_the_lock_of_the_file(tmp_path):
    cache = cache_of(tmp_path)
    descriptor = os.open(cache.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
