"""The stream of clips depends on manifest, specs, seed and epoch, and on nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.online import LoaderSpec
from tests.streams import merged, open_loader, samples, two_epochs, write_textured_dataset

ROOT = Path(__file__).parents[1]

# More workers than cores are wanted here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_textured_dataset(tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def unbroken(root):
    lines = two_epochs(open_loader(root, LoaderSpec(batch_size=4, workers=0)))
    assert len(lines) == 48
    assert len({line.split()[0] for line in lines[:24]}) == 24  # an epoch has each video once
    assert lines[:24] != lines[24:]
    return lines


@pytest.mark.parametrize(
    ("spec", "store"),
    [
        ({"workers": 1}, "pack"),
        ({"workers": 2}, "folder"),
        ({"workers": 4}, "pack"),
        ({"workers": 2, "start_method": "fork"}, "pack"),
        ({"workers": 2, "start_method": "spawn"}, "folder"),
        ({"workers": 0, "threads": 3}, "folder"),
        ({"workers": 2, "threads": 3}, "pack"),
        ({"workers": 2, "persistent": False, "prefetch": 4}, "pack"),
    ],
    ids=str,
)
def test_workers_threads_start_methods_and_stores_change_nothing(root, unbroken, spec, store):
    assert two_epochs(open_loader(root, LoaderSpec(batch_size=4, **spec), store=store)) == unbroken


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_dealt_the_same_line(root, unbroken, world):
    command = [sys.executable, "-m", "tests.streams", str(root)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world
    assert printed[0].splitlines() == unbroken


def test_a_run_stopped_twice_inside_an_epoch_goes_on_with_other_workers_and_ranks(root, unbroken):
    lines = []
    first = open_loader(root, LoaderSpec(batch_size=4, workers=2))
    for _, batch in zip(range(2), first, strict=False):
        lines += samples([batch])
    state = first.sampler.state_dict()
    assert state["delivered"] == 8  # and not what the workers had made ahead
    # Two ranks with other workers, three batches of two each.
    ranks = [open_loader(root, LoaderSpec(batch_size=2, workers=rank), rank=rank, world=2) for rank in (0, 1)]
    shares = []
    for loader in ranks:
        loader.sampler.load_state_dict(state)
        shares.append([line for _, batch in zip(range(3), loader, strict=False) for line in samples([batch])])
    lines += merged(shares)
    states = [loader.sampler.state_dict() for loader in ranks]
    assert states[0] == states[1]
    last = open_loader(root, LoaderSpec(batch_size=5, workers=4))
    last.sampler.load_state_dict(states[0])
    lines += samples(last)
    last.sampler.set_epoch(1)
    lines += samples(last)
    assert lines == unbroken


def test_another_seed_is_another_stream(root, unbroken):
    other = two_epochs(open_loader(root, LoaderSpec(batch_size=4, workers=0), seed=4))
    assert sorted(line.split()[0] for line in other) == sorted(line.split()[0] for line in unbroken)
    assert not set(other) & set(unbroken)
