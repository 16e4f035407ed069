"""`train`: one command from frames to a number, which may be stopped at any time and given again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.online import LoaderSpec
from pipeline.training.checkpoint import read_checkpoint
from pipeline.training.ranks import Ranks
from scripts import run, train
from scripts.train_place import choose_device, share_cores
from tests.training_runs import one_thread, write_shades

ROOT = Path(__file__).parents[1]
SMALL = [
    "--size-px",
    "16",
    "--frames",
    "4",
    "--stride",
    "1",
    "--workers",
    "0",
    "--device",
    "cpu",
    "--batch-size",
    "6",
]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("shades")
    write_shades(root)
    return root


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    where = ["--dataset", "shades", "--data", str(root), "--manifests", str(root / "manifests")]
    return [*where, "--out", str(out), "--cache", "disk", *SMALL, *more]


def call(capsys, *args: str) -> tuple[int, list[str], str]:
    """Exit status, lines on stdout, and stderr."""
    with pytest.raises(SystemExit) as end:
        run(train.main, list(args))
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out.splitlines(), said.err


TRAINING = ("--epochs", "3", "--lr", "0.02")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(path).model


def same_weights(one: Path, two: Path) -> bool:
    theirs = weights(two)
    return all(torch.equal(values, theirs[name]) for name, values in weights(one).items())


@pytest.fixture(scope="module")
def unbroken(root, tmp_path_factory):
    """A run that nothing disturbed: its folder and its outcome."""
    out = tmp_path_factory.mktemp("unbroken")
    with one_thread(), pytest.raises(SystemExit) as end:
        run(train.main, arguments(root, out, *TRAINING, "--json", str(out / "run.json")))
    assert end.value.code == 0
    return out, json.loads((out / "run.json").read_text())


def test_a_run_says_what_it_does_and_what_came_of_it(root, tmp_path, capsys):
    status, lines, errors = call(capsys, *arguments(root, tmp_path / "out", *TRAINING, "--confusion"))
    assert (status, errors) == (0, "")
    text = "\n".join(lines)
    for expected in (
        "videos    18 to train on, 6 held out, by split01",
        "model     small, 0.30 M parameters, 4 frames (stride 1) of 16x16 px",
        "device    CPU, processes 1, threads ",
        "6 videos, scores averaged over 3 clips of each",
        "videos were taken for another class",
    ):
        assert expected in text
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]  # no bar, a line for each
    for part in ("loss ", "top-1 ", "held-out top-1 ", "clips/s", "waiting "):
        assert all(part in line for line in epochs)
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= {"Dark", "Grey", "Light"}


def test_the_outcome_is_there_for_programs_too(unbroken):
    out, outcome = unbroken
    assert [row["epoch"] for row in outcome["epochs"]] == [0, 1, 2]
    assert (outcome["steps"], outcome["is_finished"]) == (9, True)
    assert outcome["held_out"]["num_videos"] == 6
    assert outcome["held_out"]["clips_per_video"] == 3
    assert set(outcome["held_out"]["per_class"]) == {"Dark", "Grey", "Light"}
    assert outcome["checkpoint"] == str(out / "last.pt")
    about = read_checkpoint(out / "last.pt").about
    assert (about.model, about.split, about.num_videos) == ("small", "split01", 18)


def test_a_finished_run_is_only_evaluated_again(root, unbroken, tmp_path, capsys):
    out, outcome = unbroken
    before = (out / "last.pt").read_bytes()
    status, lines, _ = call(capsys, *arguments(root, out, *TRAINING, "--json", str(tmp_path / "again.json")))
    assert status == 0
    assert not [line for line in lines if line.startswith("epoch")]
    assert json.loads((tmp_path / "again.json").read_text())["held_out"] == outcome["held_out"]
    assert (out / "last.pt").read_bytes() == before


def test_a_checkpoint_alone_is_evaluated_to_the_same_numbers(root, unbroken, tmp_path, capsys):
    out, outcome = unbroken
    evaluate = ("--evaluate-only", "--checkpoint", str(out / "last.pt"), "--json", str(tmp_path / "e.json"))
    # The checkpoint knows model and clips: what is said of them here does not count.
    status, lines, _ = call(
        capsys, *arguments(root, tmp_path, *evaluate, "--model", "r3d_18", "--frames", "9")
    )
    assert status == 0
    assert any("small, 0.30 M parameters, 4 frames" in line for line in lines)
    assert json.loads((tmp_path / "e.json").read_text())["held_out"] == outcome["held_out"]


def test_videos_that_were_trained_on_are_not_evaluated_on_unless_told(root, unbroken, capsys):
    out, _ = unbroken
    seen = arguments(root, out, "--evaluate-only", "--side", "train")
    status, _, errors = call(capsys, *seen)
    assert status == 2
    assert (
        "last.pt was trained on 18 of the 18 videos to evaluate on, first Dark/v_Dark_g02_c01.avi" in errors
    )
    assert call(capsys, *seen, "--allow-seen")[0] == 0


def test_training_does_not_judge_itself_on_its_own_videos(root, tmp_path, capsys):
    status, _, errors = call(capsys, *arguments(root, tmp_path, "--side", "train"))
    assert status == 2
    assert "this model was trained on 18 of the 18 videos" in errors


def test_weights_to_begin_with_hand_on_what_they_have_seen(root, unbroken, tmp_path, capsys):
    out, _ = unbroken
    begin = ("--weights", str(out / "last.pt"), "--epochs", "1", "--split", "split02")
    status, _, errors = call(capsys, *arguments(root, tmp_path, *begin))
    assert status == 2
    assert "this model was trained on 6 of the 6 videos to evaluate on, first Dark/v_Dark_g02" in errors
    status, lines, _ = call(capsys, *arguments(root, tmp_path, *begin, "--allow-seen"))
    assert status == 0
    assert f"weights   {out / 'last.pt'}" in lines
    assert len(read_checkpoint(out / "last.pt").seen) == 18
    assert len(read_checkpoint(tmp_path / "last.pt").seen) == 24


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--model", "r3d18"), "no model is named 'r3d18': did you mean r3d_18?"),
        (("--model", "mvit_v2_s"), "mvit_v2_s takes 16 frames of 224x224 px alone, not 4 frames of 16x16 px"),
        (("--no-flip", "Drak"), "no class is named 'Drak' among the 3 of this dataset; did you mean Dark"),
        (("--split", "split09"), "no column 'split09'"),
        (("--dataset", "shadows"), "shadows.parquet is missing: run `make frames DATASET=shadows`"),
        (("--weights", "nowhere.pt"), "no checkpoint at nowhere.pt"),
        (("--evaluate-only", "--checkpoint", "nowhere.pt"), "no checkpoint at nowhere.pt"),
        (("--amp", "fp16"), "amp fp16 is for CUDA"),
        (("--mixup-alpha", "-1"), "mixup_alpha and cutmix_alpha must be >= 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_exit_2(root, tmp_path, capsys, wrong, message):
    status, _, errors = call(capsys, *arguments(root, tmp_path / "out", *wrong))
    assert status == 2
    assert message in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "last.pt").exists()


def test_other_options_in_the_same_folder_are_refused_and_never_mixed(root, unbroken, capsys):
    out, _ = unbroken
    before = (out / "last.pt").read_bytes()
    for other, message in (
        (("--epochs", "4", "--lr", "0.02"), "epochs 3, now 4"),
        ((*TRAINING, "--flip-p", "0"), "'flip_p': 0.5"),
        ((*TRAINING, "--seed", "1"), "seed 0, now 1"),
    ):
        status, _, errors = call(capsys, *arguments(root, out, *other))
        assert status == 2
        assert "last.pt is of another run" in errors
        assert message in errors
    assert (out / "last.pt").read_bytes() == before


def test_a_run_can_begin_anew_in_the_place_of_another(root, unbroken, tmp_path, capsys):
    out, _ = unbroken
    first = arguments(root, tmp_path, "--epochs", "1", "--lr", "0.5")
    assert call(capsys, *first)[0] == 0
    assert call(capsys, *arguments(root, tmp_path, *TRAINING, "--resume", "never"))[0] == 0
    assert same_weights(tmp_path / "last.pt", out / "last.pt")


def test_help_names_the_options(capsys):
    status, lines, _ = call(capsys, "--help")
    text = " ".join(lines)
    assert status == 0
    for option in ("--model", "--no-flip", "--evaluate-only", "--batch-size", "--amp", "--json", "--epochs"):
        assert option in text


# Stopped by signals.


def start(*args: str) -> subprocess.Popen[str]:
    """The command in a session of its own, as a terminal would have it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.train", *args],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(process.communicate())


LONG = ("--epochs", "400", "--lr", "0.02", "--eval-every", "400")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_its_processes_is_a_stop_between_two_steps(root, tmp_path, number, status):
    process = start(*arguments(root, tmp_path, *LONG), "--workers", "1")
    read_until(process, "epoch")
    time.sleep(0.1)
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "stopped: " in out
    assert "run the same command again to go on" in out
    assert "Traceback" not in errors
    state = read_checkpoint(tmp_path / "last.pt").training
    assert f"{len(state.history)} epochs and {state.step} steps" in out


def test_a_stopped_command_given_again_ends_with_the_bits_of_an_unbroken_one(
    root, unbroken, tmp_path, capsys, monkeypatch
):
    asked = []

    def is_asked(stop):
        asked.append(1)
        return len(asked) in (3, 8)  # inside the first epoch, and inside the second run

    monkeypatch.setattr("scripts.train_place.Stop.is_asked", is_asked)
    command = arguments(root, tmp_path, *TRAINING)
    assert [call(capsys, *command)[0] for _ in range(3)] == [143, 143, 0]
    assert same_weights(tmp_path / "last.pt", unbroken[0] / "last.pt")


def test_a_killed_command_given_again_ends_with_the_bits_of_an_unbroken_one(root, tmp_path, capsys):
    options = ("--epochs", "6", "--lr", "0.02", "--eval-every", "6", "--checkpoint-every", "2")
    process = start(*arguments(root, tmp_path / "killed", *options), "--workers", "2")
    read_until(process, "epoch")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for name in ("killed", "whole"):
        assert call(capsys, *arguments(root, tmp_path / name, *options))[0] == 0
    assert same_weights(tmp_path / "killed" / "last.pt", tmp_path / "whole" / "last.pt")
    assert [file.name for file in (tmp_path / "killed").glob(".tmp*")] == []


# Several processes.


def test_torchrun_trains_and_evaluates_with_several_processes(root, tmp_path, capsys):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "scripts.train", *arguments(root, tmp_path, *TRAINING, "--json", str(tmp_path / "run.json"))),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "run.json").read_text())
    assert [row["clips"] for row in outcome["epochs"]] == [18] * 3
    assert outcome["held_out"]["num_videos"] == 6
    assert len([line for line in done.stdout.splitlines() if line.startswith("epoch")]) == 3
    assert "processes 2" in done.stdout
    alone = ("--evaluate-only", "--json", str(tmp_path / "alone.json"))
    assert call(capsys, *arguments(root, tmp_path, *alone))[0] == 0
    held_out = json.loads((tmp_path / "alone.json").read_text())["held_out"]
    loss = held_out.pop("loss")  # whose last digits depend on the number of threads
    assert loss == pytest.approx(outcome["held_out"].pop("loss"))
    assert held_out == outcome["held_out"]


@pytest.mark.parametrize(
    ("cores", "local_world", "workers", "expected"),
    [
        (2, 1, None, (1, 1)),
        (16, 1, None, (8, 8)),
        (16, 4, None, (2, 2)),
        (1, 1, None, (1, 1)),
        (2, 4, None, (1, 1)),
        (5, 1, None, (2, 3)),
        (4, 1, 0, (0, 2)),
        (4, 1, 3, (3, 2)),
    ],
)
def test_on_the_cpu_workers_and_the_models_threads_share_the_cores(
    monkeypatch, cores, local_world, workers, expected
):
    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    ranks = Ranks()
    object.__setattr__(ranks, "local_world", local_world)
    shared = share_cores(LoaderSpec(workers=workers), torch.device("cpu"), ranks)
    assert (shared.num_workers, torch.get_num_threads()) == expected
    assert shared.ranks_on_machine == local_world


def test_a_gpu_is_chosen_where_there_is_one(monkeypatch):
    assert choose_device("cpu", Ranks()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", Ranks()) == torch.device("cpu")


# TensorBoard.


def test_tensorboard_gets_a_point_for_each_epoch(root, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = ("--tensorboard", str(tmp_path / "events"))
    assert call(capsys, *arguments(root, tmp_path / "out", *TRAINING, *events))[0] == 0
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    losses = found.Scalars("train/loss")
    history = read_checkpoint(tmp_path / "out" / "last.pt").training.history
    assert [point.step for point in losses] == [1, 2, 3]
    assert [point.value for point in losses] == pytest.approx([row.loss for row in history])
    assert {"held_out/top1", "speed/clips_per_s", "speed/waiting_share"} <= set(found.Tags()["scalars"])


def test_tensorboard_that_is_missing_is_said_before_anything_is_trained(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    status, lines, errors = call(capsys, *arguments(root, tmp_path / "out", "--tensorboard", str(tmp_path)))
    assert status == 2
    assert "--tensorboard needs a package that is missing" in errors
    assert not [line for line in lines if line.startswith("epoch")]
