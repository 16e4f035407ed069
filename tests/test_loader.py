"""Defaults from the machine, memory that is there, and the troubles that workers bring."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import cv2
import joblib
import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.errors import PipelineError
from pipeline.jpeg import encode_jpeg
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EpochSampler,
    EvalSampler,
    LoaderSpec,
    WindowSpec,
    build_loader,
)
from pipeline.online.collate import ClipBatch
from pipeline.online.loader import check_shared_memory
from tests.manifests import manifest_of
from tests.streams import open_loader, samples, two_epochs, write_textured_dataset

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_textured_dataset(tmp_path_factory.mktemp("loader"))


def test_it_is_a_real_dataloader_of_batches(root):
    loader = open_loader(root, LoaderSpec(batch_size=5, workers=0))
    assert isinstance(loader, DataLoader)
    batches = list(loader)
    assert all(isinstance(batch, ClipBatch) for batch in batches)
    assert [len(batch.labels) for batch in batches] == [5, 5, 5, 5, 4]
    assert len(loader) == 5


def test_workers_are_the_cores_that_this_process_may_use_shared_by_the_ranks(monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: 12)
    assert LoaderSpec().num_workers == 12
    assert LoaderSpec(ranks_on_machine=4).num_workers == 3
    assert LoaderSpec(ranks_on_machine=4, threads=3).num_workers == 1
    assert LoaderSpec(ranks_on_machine=50).num_workers == 1
    assert LoaderSpec(workers=0).num_workers == 0
    assert LoaderSpec().for_evaluation().num_workers == 6


def test_affinity_counts():
    code = "from pipeline.online import LoaderSpec; print(LoaderSpec().num_workers)"
    first = min(psutil.Process().cpu_affinity())
    command = ["taskset", "-c", str(first), sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "1\n"


def test_nothing_is_pinned_without_cuda(root, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not LoaderSpec().pins
    assert not open_loader(root, LoaderSpec(workers=0)).pin_memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LoaderSpec().pins
    assert not LoaderSpec(pin=False).pins


def test_batches_that_do_not_fit_into_shared_memory_are_refused_with_the_sum():
    spec = LoaderSpec(batch_size=32, workers=4, prefetch=2)
    clip_bytes = 16 * 112 * 112 * 3
    check_shared_memory(spec, clip_bytes, 12 * 32 * clip_bytes)  # 4 x (2 + 1): see BatchMemory
    with pytest.raises(PipelineError, match=r"64.* free and 12 batches in flight need .*prefetch=|fewer"):
        check_shared_memory(spec, clip_bytes, 64 * 2**20)
    with pytest.raises(PipelineError, match="2 ranks x"):
        check_shared_memory(LoaderSpec(workers=4, ranks_on_machine=2), clip_bytes, 13 * 32 * clip_bytes)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"workers": -1}, {"prefetch": 0}, {"threads": 0}, {"ranks_on_machine": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoaderSpec(**wrong)


def test_iterating_leaves_torchs_global_generator_alone(root):
    before = torch.get_rng_state()
    list(open_loader(root, LoaderSpec(workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_reaches_workers_that_live_on(root):
    loader = open_loader(root, LoaderSpec(workers=2, persistent=True))
    assert two_epochs(loader) == two_epochs(open_loader(root, LoaderSpec(workers=0)))


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_opencv_used_in_the_parent_does_not_hang_workers(root, start_method):
    cv2.setNumThreads(4)
    cv2.GaussianBlur(np.zeros((2000, 2000, 3), np.uint8), (31, 31), 5)
    loader = open_loader(root, LoaderSpec(workers=2, start_method=start_method), store="folder")
    assert len(list(samples(loader))) == 24


class SlowToSend:
    """Something in a batch that is shared by one call of torch after another while a worker sends it."""

    def __getstate__(self):
        for _ in range(50_000):
            torch.UntypedStorage(1)._share_fd_cpu_()
        return {}


class CollateSlowToSend:
    """One batch that is quick, and then such."""

    first = True

    def __call__(self, clips):
        is_first, self.first = self.first, False
        return "quick" if is_first else SlowToSend()


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_a_worker_ends_well_while_it_sends_what_nobody_waits_for(root, start_method):
    loader = open_loader(root, LoaderSpec(batch_size=3, workers=1, start_method=start_method))
    loader.collate_fn = CollateSlowToSend()
    assert next(loader.batches()) == "quick"
    (worker,) = loader._iterator._workers
    time.sleep(0.2)
    loader._iterator._shutdown_workers()
    assert worker.exitcode == 0


def test_a_thousand_batches_need_few_open_files(root):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from pathlib import Path\n"
        "from tests.streams import *\n"
        "if __name__ == '__main__':\n"
        "    loader = open_loader(Path(sys.argv[1]), LoaderSpec(batch_size=1, workers=2), store='folder')\n"
        "    count = 0\n"
        "    for epoch in range(42):\n"
        "        loader.sampler.set_epoch(epoch)\n"
        "        count += sum(1 for _ in loader)\n"
        "    print(count)\n"
    )
    script = root / "many.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, str(script), str(root)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "1008\n", run.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 256


def test_a_dropped_last_batch_ends_the_epoch(root):
    loader = open_loader(root, LoaderSpec(batch_size=5, workers=0, drop_last=True))
    assert [len(batch.labels) for batch in loader] == [5, 5, 5, 5]
    assert loader.sampler.state_dict()["delivered"] == 24


def test_two_validation_passes_are_identical(root):
    loader = open_loader(root, LoaderSpec(workers=0))
    dataset = ClipDataset(
        loader.dataset.manifest,
        loader.dataset.store,
        WindowSpec(frames=4),
        augment=AugmentSpec(size_px=16, mode="centre"),
    )
    sampler = EvalSampler(loader.dataset.manifest, WindowSpec(frames=4), views=2)
    one, two = (list(samples(build_loader(dataset, sampler, LoaderSpec(workers=w)))) for w in (0, 1))
    assert one == two
    assert len(one) == 48


class Grey:
    """A store of videos of any name that all show the same."""

    def __init__(self):
        self.jpeg = encode_jpeg(np.full((48, 64, 3), 99, np.uint8), quality=90, restart_mcus=4)

    def read(self, video, indices):
        return [self.jpeg] * len(indices)

    def times_us(self, video):
        return np.arange(16) * 40_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_private_memory_of_workers_stays_flat_over_an_epoch_of_a_million_videos():
    num_videos = 1_000_000
    manifest = manifest_of(np.full(num_videos, 16))
    window = WindowSpec(frames=2)
    dataset = ClipDataset(manifest, Grey(), window, augment=AugmentSpec(size_px=8))
    sampler = EpochSampler(manifest, window)
    loader = build_loader(dataset, sampler, LoaderSpec(batch_size=64, workers=4))
    uss = []
    for number, _ in enumerate(loader):
        if number in (50, 300):
            workers = [
                child for child in psutil.Process().children(recursive=True) if child.num_threads() > 1
            ]
            uss.append({child.pid: child.memory_full_info().uss for child in workers})
        if number == 300:
            break
    growth = [after - uss[0][pid] for pid, after in uss[1].items() if pid in uss[0]]
    assert len(growth) >= 4
    assert max(growth) < 5e6
