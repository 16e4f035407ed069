"""A bottleneck is planted, and the profile of the real loader names it."""

import os
import sys
import time
import types
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.manifest import read_manifest
from pipeline.measure import profile_loader, sampling
from pipeline.measure.machine import Cores
from pipeline.measure.parcels import Parcel, ParcelLoader
from pipeline.measure.plots import bars_of, draw_profile
from pipeline.measure.profiler import _Taken, cache_of, shrink_of, spare_cores, worker_times
from pipeline.measure.sampling import Sample, Use, UseSampler, open_gpu
from pipeline.measure.verdict import judge
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EpochSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    build_loader,
)
from pipeline.online.collate import collate_clips
from pipeline.timing import StageSum
from tests.streams import AUGMENT, WINDOW, open_loader, samples, write_textured_dataset

ONE = LoaderSpec(batch_size=4, workers=1, prefetch=1)
ALONE = LoaderSpec(batch_size=4, workers=0)


class SlowStore(PackStore):
    def read(self, video, indices):
        time.sleep(0.02)
        return super().read(video, indices)


class SlowDecoder(ClipDataset):
    def _decode(self, *args):
        with self.stage("decode"):
            time.sleep(0.02)
        super()._decode(*args)


def slow_transform(video):
    time.sleep(0.02)
    return video


class Late:
    """Something in a batch that takes long to come out of the queue."""

    def __setstate__(self, state):
        time.sleep(0.06)

    def __getstate__(self):
        return {"late": True}

    def to(self, *_, **__):
        return self


def late_collate(clips):
    batch = collate_clips(clips)
    return batch._replace(extras={**batch.extras, "late": Late()})


def rest(seconds):
    return lambda batch: time.sleep(seconds)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_textured_dataset(tmp_path_factory.mktemp("profiler"))


def open_planted(root, spec=ONE, *, store=PackStore, dataset=ClipDataset, **options):
    manifest = read_manifest(root / "m.parquet")
    clips = dataset(manifest, store(root / "pack"), WINDOW, augment=AUGMENT, **options)
    return build_loader(clips, EpochSampler(manifest, WINDOW), spec)


def test_a_slow_store_is_storage(root):
    profile = profile_loader(open_planted(root, store=SlowStore), rest(0.001), steps=4)
    assert profile.verdict.limit == "storage"
    assert profile.times.read_s > 4 * 0.02
    assert profile.verdict.lost_share > 0.7
    # It is waited for without a core: then others may read meanwhile.
    assert any("--readers" in change.text for change in profile.verdict.changes)


def test_a_heavy_transform_is_augment(root):
    profile = profile_loader(open_planted(root, transform=slow_transform), rest(0.001), steps=4)
    assert profile.verdict.limit == "augment"
    assert profile.setting.has_transform
    assert any("DeviceAugment" in change.text for change in profile.verdict.changes)


def test_one_worker_that_decodes_too_slowly_gets_others_if_there_are_cores(root):
    profile = profile_loader(open_planted(root, dataset=SlowDecoder), rest(0.02), steps=4)
    assert profile.verdict.limit == "decode"
    idle = judge(profile.times, replace(profile.setting, spare_cores=4.0))
    assert "take --workers" in idle.advice
    full = judge(replace(profile.times, cpu_share=1.0), replace(profile.setting, spare_cores=0.0))
    assert not any("--workers" in change.text for change in full.changes)


def test_a_slow_step_is_the_model(root):
    profile = profile_loader(open_planted(root), rest(0.5), steps=3)
    assert profile.times.ceiling_s >= 0.5
    assert profile.verdict.lost_share < 0.3
    # But for how differently a busy machine wakes up who sleeps, nothing is lost.
    even = judge(replace(profile.times, step_s=profile.times.ceiling_s), profile.setting)
    assert (even.limit, even.changes) == ("model", ())


def test_a_queue_that_takes_long_is_transport(root):
    loader = open_planted(root, LoaderSpec(batch_size=4, workers=1, prefetch=4))
    loader.collate_fn = late_collate
    profile = profile_loader(loader, rest(0.001), steps=4)
    assert profile.verdict.limit == "transport"
    assert profile.times.transport_s > 0.03


def test_the_main_process_alone_is_told_to_take_workers(root):
    profile = profile_loader(open_planted(root, ALONE, store=SlowStore), rest(0.05), steps=3)
    assert profile.verdict.limit == "storage"
    assert profile.setting.workers == 0
    assert "the main process makes itself" in profile.verdict.reason
    idle = judge(profile.times, replace(profile.setting, spare_cores=4.0))
    assert any("--workers" in change.text for change in idle.changes)


@pytest.fixture(scope="module")
def profile(root):
    """One that nothing was planted in."""
    return profile_loader(open_planted(root, ALONE), rest(0.02), steps=12)


def test_parts_add_up(profile):
    times = profile.times
    assert times.total_s == pytest.approx(times.making_s + times.transport_s + times.handing_s + times.step_s)
    assert times.made_s <= times.making_s + 1e-3  # without workers, to make is to wait
    assert times.transport_s < times.making_s
    assert (times.pin_s, times.copy_s) == (0.0, 0.0)
    assert 0 < times.prepare_s <= times.handing_s + 1e-3
    assert profile.clips_per_s == pytest.approx(4 / times.total_s)
    assert profile.ceiling_clips_per_s > profile.clips_per_s
    assert profile.store_bytes_per_s > 0


def test_what_measuring_costs_is_told(profile):
    assert 0 < profile.own_cost_share < 1


def test_what_there_is_not_is_said(profile):
    assert any("no GPU in use" in note for note in profile.notes)
    assert any("an epoch has 6 steps" in note for note in profile.notes)
    assert profile.use.gpu is None


def test_the_loader_and_what_it_is_made_of_stay_as_they_were(root):
    loader = open_loader(root, LoaderSpec(batch_size=5, workers=0))
    dataset, state, stage = loader.dataset, loader.sampler.state_dict(), loader.dataset.stage
    profile_loader(loader, rest(0.0), steps=7)
    assert loader.dataset is dataset
    assert dataset.stage is stage
    assert dataset.manifest is not None
    assert loader.sampler.state_dict() == state
    assert list(samples(loader)) == list(samples(open_loader(root, LoaderSpec(batch_size=5, workers=0))))


def test_an_endless_epoch_is_the_epochs_one_after_the_other(root):
    loader = open_loader(root, LoaderSpec(batch_size=6, workers=0))
    parcels = ParcelLoader(loader).parcels()
    given = list(samples(next(parcels).unpack() for _ in range(8)))
    parcels.close()
    expected = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        expected += samples(loader)
    assert given == expected


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_what_a_worker_took_comes_with_its_batch(root, start_method):
    spec = LoaderSpec(batch_size=3, workers=1, prefetch=1, start_method=start_method)
    parcels = ParcelLoader(open_loader(root, spec)).parcels()
    asked_s = time.monotonic()
    first = next(parcels)
    parcels.close()
    assert {name: stage.entries for name, stage in first.stages.items()} == {
        "batch": 1,
        "read": 3,
        "decode": 3,
        "augment": 3,
    }
    assert asked_s - 1 < first.begin_s < first.made_s < time.monotonic()
    took_s = sum(stage.seconds for stage in first.stages.values())
    assert 0 < took_s <= first.made_s - first.begin_s


def test_threads_share_the_time_by_the_clock(root):
    spec = replace(ALONE, batch_size=8, threads=4)
    profile = profile_loader(open_planted(root, spec, store=SlowStore), rest(0.0), steps=3)
    assert profile.times.made_s < 8 * 0.02  # eight sleeps, four at a time
    assert profile.verdict.limit == "storage"


def parcel(wall_s, **stages):
    return Parcel(None, 10.0, 10.0 + wall_s, {name: StageSum(*parts, 1) for name, parts in stages.items()})


def test_what_no_stage_accounts_for_is_the_batchs():
    times = worker_times([parcel(1.0, read=(0.1, 0.1), decode=(0.5, 0.5), batch=(0.05, 0.05))], 1, None)
    assert times["read_s"] == pytest.approx(0.1)
    assert times["batch_s"] == pytest.approx(0.4)
    assert times["augment_s"] == 0.0
    assert times["cpu_share"] == 1.0


def test_what_decoding_waits_for_bytes_is_reading_but_not_what_it_waits_for_a_core():
    one = parcel(1.0, read=(0.1, 0.1), decode=(0.6, 0.2), augment=(0.2, 0.1))
    warm, cold = (worker_times([one], 1, missed) for missed in (0.0, 0.5))
    assert warm["decode_s"] == pytest.approx(0.6)
    assert cold["decode_s"] == pytest.approx(0.4)  # 0.2 s of a core, of which it had a half
    assert cold["read_s"] == pytest.approx(0.3)
    assert sum(cold[name] for name in ("read_s", "decode_s", "augment_s", "batch_s")) == pytest.approx(1.0)


def test_a_wait_ends_being_for_the_worker_when_the_batch_is_made():
    made = parcel(5.0)  # at 15.0
    assert _Taken(made, asked_s=14.0, taken_s=15.5).waits() == (1.0, 0.5, 0.0)
    assert _Taken(made, asked_s=16.0, taken_s=16.25).waits() == (0.0, 0.25, 0.0)
    assert _Taken(made, asked_s=14.0, taken_s=14.5).waits() == (0.5, 0.0, 0.0)


def test_pinning_goes_into_the_batch_and_is_timed(monkeypatch, root):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    loader = ParcelLoader(open_loader(root, LoaderSpec(batch_size=2, workers=0)))
    one = loader.make_one()
    labels = one.batch.labels
    pinned = one.pin_memory()
    batch = pinned.unpack()
    assert torch.equal(batch.labels, labels + 1)
    assert batch.extras["seed"].shape == (2,)
    assert pinned.pin_s > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_so(root):
    with pytest.raises(PipelineError, match="torch sees no CUDA GPU"):
        profile_loader(open_planted(root, ALONE), rest(0.0), steps=2, device="cuda:0")


def test_another_dataset_and_too_few_steps_are_refused(root):
    loader = open_planted(root, ALONE)
    with pytest.raises(ValueError, match="steps must be >= 2"):
        profile_loader(loader, rest(0.0), steps=1)
    with pytest.raises(PipelineError, match="cannot profile a loader of list"):
        profile_loader(types.SimpleNamespace(dataset=[1]), rest(0.0))


def test_no_clips_are_an_error(root):
    loader = open_planted(root, ALONE)
    none = types.SimpleNamespace(**{name: getattr(loader, name) for name in _SETTINGS}, sampler=[])
    with pytest.raises(PipelineError, match="gives no clips"):
        next(ParcelLoader(none).parcels())


_SETTINGS = (
    "dataset",
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "slot_bytes",
)


def test_where_bytes_come_from_is_told_by_the_store(root, monkeypatch):
    assert cache_of(PackStore(root / "pack")) == "disk"
    assert cache_of(FolderStore(root / "frames")) == "off"
    assert cache_of(object()) is None
    monkeypatch.setattr("pipeline.measure.profiler.RAM_ROOT", root)
    assert cache_of(PackStore(root / "pack")) == "ram"


def test_how_much_larger_frames_are_than_clips(root):
    dataset = open_planted(root, ALONE).dataset
    area = 64 * 48 * sum(AUGMENT.scale) / 2
    assert shrink_of(dataset) == pytest.approx((area / 16**2) ** 0.5)
    dataset.augment = AugmentSpec(size_px=500)
    assert shrink_of(dataset) == 1.0
    dataset.augment = None
    assert shrink_of(dataset) == 1.0


# How busy the machine is.


def use_of(*cores, own=0.5):
    samples = (Sample(0.2, tuple(cores), None, 0.5), Sample(0.4, tuple(cores), 2e6, 1.0))
    return Use(seconds=1.0, samples=samples, own_cores=own, cost_s=0.001)


def test_the_means_of_looks_leave_out_what_was_not_told():
    use = use_of(0.25, 0.75)
    assert use.cores == (0.25, 0.75)
    assert use.disk_bytes_per_s == 2e6
    assert use.gpu == 0.75
    assert Use(seconds=0.0, samples=(), own_cores=0.0, cost_s=0.0).cores == ()


@pytest.mark.parametrize(("quota", "spare"), [(None, 1.0), (1.5, 1.0), (0.25, 0.0)])
def test_cores_are_spare_that_nobody_uses_and_that_are_granted(monkeypatch, quota, spare):
    cores = sampling_cores(quota)
    monkeypatch.setattr("pipeline.measure.profiler.read_cores", lambda: cores)
    assert spare_cores(use_of(0.25, 0.75)) == pytest.approx(spare)


def sampling_cores(quota):
    return Cores(model="", seen=2, allowed=2, quota=quota, granted=2)


def test_a_sampler_sees_the_cores_of_this_process_and_what_it_took():
    with UseSampler(interval_s=0.02) as sampler:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            sum(range(1000))
    use = sampler.use()
    assert use.samples
    assert use.seconds >= 0.3
    assert use.own_cores > 0
    assert all(0 <= share <= 1 for share in use.cores)
    assert use.cost_s > 0


def test_a_system_that_tells_nothing_of_its_disks_is_borne(monkeypatch):
    monkeypatch.setattr(sampling.psutil, "disk_io_counters", lambda: None)
    assert sampling.read_disk_bytes() is None
    with UseSampler(interval_s=0.01) as sampler:
        time.sleep(0.1)
    assert sampler.use().disk_bytes_per_s is None


def nvml(monkeypatch, *, error=False):
    class NVMLError(Exception):
        pass

    def init():
        if error:
            raise NVMLError("Driver Not Loaded")

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=42),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(sampling, "_uuid", lambda index: f"GPU-{index}")


def test_a_gpu_is_asked_through_nvml(monkeypatch):
    nvml(monkeypatch)
    read, note = open_gpu(0)
    assert (read(), note) == (0.42, "")
    with UseSampler(read_gpu=read, interval_s=0.01) as sampler:
        time.sleep(0.1)
    assert sampler.use().gpu == pytest.approx(0.42)


def test_an_nvml_that_is_not_there_or_does_not_work_is_said(monkeypatch):
    nvml(monkeypatch, error=True)
    read, note = open_gpu(0)
    assert read is None
    assert "Driver Not Loaded" in note
    monkeypatch.setitem(sys.modules, "pynvml", None)
    read, note = open_gpu(0)
    assert read is None
    assert "pip install nvidia-ml-py" in note


# The picture.


def test_bars_are_as_long_as_the_times(profile):
    made, step, ceiling = (sum(parts.values()) for _, parts in bars_of(profile))
    assert made == pytest.approx(1e3 * profile.times.made_s)
    assert step == pytest.approx(1e3 * profile.times.total_s)
    assert ceiling == pytest.approx(1e3 * profile.times.ceiling_s)
    many = replace(profile, setting=replace(profile.setting, workers=4))
    assert sum(bars_of(many)[0][1].values()) == pytest.approx(made / 4)


@pytest.mark.parametrize("is_short", [False, True])
def test_the_picture_is_a_png(profile, tmp_path, is_short):
    shown = use_of(0.2, 0.9) if not is_short else replace(profile.use, samples=())
    draw_profile(replace(profile, use=shown), tmp_path / "deep" / "profile.png", title="a title")
    picture = cv2.imread(str(tmp_path / "deep" / "profile.png"))
    assert picture.shape[1] > 800
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10


def test_without_matplotlib_there_is_no_picture_and_the_error_says_why(profile, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PipelineError, match="no picture: matplotlib is missing"):
        draw_profile(profile, tmp_path / "profile.png", title="")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_a_gpu_copies_are_measured_and_a_slow_step_is_the_model(root):
    if not torch.cuda.is_available():
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail("REQUIRE_GPU=1, and torch sees no CUDA GPU")
        pytest.skip("needs a CUDA GPU")
    matrix = torch.randn(4096, 4096, device="cuda")

    def step(batch):
        for _ in range(100):
            matrix @ matrix

    profile = profile_loader(open_planted(root), step, steps=10, device="cuda")
    assert profile.times.copy_s > 0
    assert profile.times.pin_s > 0
    assert profile.verdict.limit == "model"
    slow = profile_loader(
        open_planted(root, store=SlowStore), step=lambda batch: None, steps=4, device="cuda"
    )
    assert slow.verdict.limit == "storage"
