"""Checkpoints: whole or not at all, data alone, and they know what they have seen."""

import os
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.online import WindowSpec
from pipeline.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    RunFolder,
    RunInfo,
    SeenError,
    TrainingState,
    check_unseen,
    read_checkpoint,
    read_weights,
    video_hashes,
    write_checkpoint,
)
from pipeline.training.reports import EpochRow, EpochTotals, EvalReport
from tests.manifests import manifest_of

HELD_OUT = EvalReport(
    top1=0.5,
    top5=1.0,
    loss=0.7,
    num_videos=2,
    clips_per_video=3,
    per_class=(0.5, None),
    confusion=((1, 1), (0, 0)),
)
ROW = EpochRow(epoch=0, loss=1.5, top1=0.25, clips=8, lr=0.1, seconds=2.0, waited_s=0.5, held_out=HELD_OUT)
ABOUT = RunInfo(
    model="small",
    classes=("A", "B"),
    dataset="drawn",
    split="split01",
    fingerprint="ab" * 32,
    num_videos=3,
    window=WindowSpec(frames=8, stride=2),
    size_hw=(56, 64),
    options={"flip_p": 0.5, "no_flip": ["A"]},
)
STATE = TrainingState(
    spec={"lr": 0.1, "step_at": (0.5, 0.75), "clip_grad": None},
    step=7,
    sampler={"epoch": 1, "delivered": 4, "stream": {"seed": 0}},
    optimizer={"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.arange(3.0)}}, "param_groups": []},
    scaler={},
    rng={"cpu": torch.arange(6, dtype=torch.uint8).view(2, 3)},
    totals=EpochTotals(loss=1.25, right=3.0, clips=4.0, waited_s=0.1, seconds=0.3, lr=0.01),
    history=(ROW, replace(ROW, epoch=1, held_out=None)),
)
SEEN = torch.tensor([-5, 2, 9])


def a_checkpoint(value: float = 1.0, training: TrainingState | None = STATE) -> Checkpoint:
    return Checkpoint(about=ABOUT, model={"weight": torch.full((2, 3), value)}, seen=SEEN, training=training)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "one" / "last.pt"


def test_a_checkpoint_comes_back_as_it_was(path):
    write_checkpoint(path, a_checkpoint())
    found = read_checkpoint(path)
    assert found.about == ABOUT
    assert torch.equal(found.model["weight"], torch.ones(2, 3))
    assert torch.equal(found.seen, SEEN)
    for name in ("spec", "step", "sampler", "scaler", "totals", "history"):
        assert getattr(found.training, name) == getattr(STATE, name)
    assert torch.equal(found.training.rng["cpu"], STATE.rng["cpu"])
    assert torch.equal(found.training.optimizer["state"][0]["exp_avg"], torch.arange(3.0))


def test_a_checkpoint_for_use_has_no_training_state(path):
    write_checkpoint(path, a_checkpoint(training=None))
    assert read_checkpoint(path).training is None


def test_the_order_in_memory_is_kept(path):
    weight = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    write_checkpoint(path, replace(a_checkpoint(), model={"weight": weight}))
    assert read_checkpoint(path).model["weight"].stride() == weight.stride()


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_code_in_a_checkpoint_is_refused_and_not_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path.parent.mkdir(parents=True)
    torch.save({"format": 1, "about": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"last\.pt cannot be read as a checkpoint"):
        read_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(CheckpointError, match=r"last\.pt cannot be read as a checkpoint"):
        read_checkpoint(path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_checkpoint_that_was_cut_is_refused_by_name(path, keep):
    write_checkpoint(path, a_checkpoint())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"last\.pt cannot be read as a checkpoint"):
        read_checkpoint(path)


def test_what_is_missing_foreign_or_too_new_is_refused(path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*last\.pt: train first"):
        read_checkpoint(path)
    path.parent.mkdir(parents=True)
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of ClipFeed"):
        read_checkpoint(path)
    torch.save(torch.ones(2), path)
    with pytest.raises(CheckpointError, match="holds a Tensor, expected a checkpoint"):
        read_checkpoint(path)
    torch.save({"format": 99, "about": {}}, path)
    with pytest.raises(CheckpointError, match="has format 99, this version reads up to 1"):
        read_checkpoint(path)


def test_a_write_that_fails_leaves_what_was_there(path, monkeypatch):
    write_checkpoint(path, a_checkpoint(1.0))

    def fail(values, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(path, a_checkpoint(2.0))
    assert read_checkpoint(path).model["weight"][0, 0] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


def test_a_full_disk_is_named_and_leaves_what_was_there(small_disk):
    path = small_disk / "last.pt"
    write_checkpoint(path, a_checkpoint())
    large = replace(a_checkpoint(2.0), model={"weight": torch.zeros(1_000_000)})
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_checkpoint(path, large)
    assert raised.value.filename == str(path)
    assert read_checkpoint(path).model["weight"][0, 0] == 1
    assert [file.name for file in small_disk.iterdir()] == ["last.pt"]


# Weights alone.


def test_weights_come_from_a_checkpoint_with_what_they_have_seen(path):
    write_checkpoint(path, a_checkpoint())
    state, seen = read_weights(path)
    assert list(state) == ["weight"]
    assert torch.equal(seen, SEEN)


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state, "epoch": 3}])
def test_weights_come_from_a_state_dict_bare_or_wrapped(tmp_path, wrap):
    torch.save(wrap({"weight": torch.ones(2)}), tmp_path / "w.pt")
    state, seen = read_weights(tmp_path / "w.pt")
    assert list(state) == ["weight"]
    assert len(seen) == 0


def test_a_file_without_weights_is_refused(tmp_path):
    torch.save({"lr": 0.1}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt holds no state dict"):
        read_weights(tmp_path / "w.pt")


# Which videos have been seen.

rows = st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=20)
ALL = manifest_of(np.full(61, 40))


def picked(numbers):
    return ALL.select(video=[f"A/v_{number:07d}.avi" for number in numbers])


@given(trained=rows, judged=rows)
def test_exactly_the_videos_that_were_trained_on_count_as_seen(trained, judged):
    seen = video_hashes(picked(trained))
    both = sorted(set(trained) & set(judged))
    if not both:
        check_unseen(picked(judged), seen, place="m.pt")
        return
    found = (
        f"m.pt was trained on {len(both)} of the {len(judged)} videos to evaluate on, first A/v_{both[0]:07d}"
    )
    with pytest.raises(SeenError, match=found):
        check_unseen(picked(judged), seen, place="m.pt")


def test_hashes_of_videos_are_sorted_and_do_not_depend_on_the_selection():
    seen = video_hashes(picked([3, 1, 2]), picked([2, 5]))
    assert seen.dtype == torch.int64
    assert torch.equal(seen, torch.unique(seen))
    assert torch.equal(seen, video_hashes(picked([1, 2, 3, 5])))
    # printf A/v_0000001.avi | b2sum -l 64
    known = int.from_bytes(bytes.fromhex("33e0b0c64e6ee3db"), "little")
    assert int(video_hashes(picked([1]))[0]) % 2**64 == known


# A run's folder.


def folder_of(path, **about):
    return RunFolder(root=path.parent, about=replace(ABOUT, **about), seen=SEEN)


def test_a_run_that_has_not_begun_is_not_found(path):
    assert folder_of(path).find() is None


def test_a_run_is_found_where_it_is_the_same(path):
    folder = folder_of(path)
    folder.save_last({"weight": torch.ones(1)}, STATE)
    folder.save_best({"weight": torch.zeros(1)})
    assert folder.find().training.step == 7
    assert read_checkpoint(folder.best).training is None
    assert replace(folder, resumes=False).find() is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"model": "r3d_18"}, "model 'small', now 'r3d_18'"),
        ({"fingerprint": "cd" * 32}, "fingerprint 'abab"),
        ({"window": WindowSpec(frames=16)}, r"window .*'frames': 8, .* now .*'frames': 16"),
        ({"classes": ("A", "B", "C")}, "classes"),
        ({"options": {"flip_p": 0.0, "no_flip": ["A"]}}, "options .*'flip_p': 0.5.*now .*'flip_p': 0.0"),
    ],
)
def test_another_run_in_the_folder_is_refused_by_what_differs(path, other, difference):
    folder_of(path).save_last({}, STATE)
    with pytest.raises(CheckpointError, match=rf"last\.pt is of another run: {difference}.*begin anew"):
        folder_of(path, **other).find()


def test_weights_for_use_are_not_taken_for_a_run(path):
    folder = folder_of(path)
    folder.save_best({})
    folder.best.rename(folder.last)
    with pytest.raises(CheckpointError, match="it holds weights for use, and not how to train on"):
        folder.find()


def test_a_run_that_began_with_other_weights_is_refused(path):
    folder_of(path).save_last({}, STATE)
    with pytest.raises(CheckpointError, match="it began with weights that had seen other videos"):
        replace(folder_of(path), seen=torch.tensor([-5, 2, 9, 10])).find()


def test_options_that_are_the_same_after_they_were_stored_are_the_same(path):
    folder = folder_of(path)
    folder.check_same({"step_at": [0.5], "lr": 0.1}, {"step_at": (0.5,), "lr": 0.1})
    with pytest.raises(CheckpointError, match=r"lr 0\.1, now 0\.2; repeat its options"):
        folder.check_same({"lr": 0.1}, {"lr": 0.2})
    assert asdict(RunInfo.from_plain(asdict(ABOUT))) == asdict(ABOUT)
