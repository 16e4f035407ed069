"""`make profile`: a table, a picture, and the verdict in the last lines, whatever is missing."""

import json
from pathlib import Path

import cv2
import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.online import ClipBatch, prefetch
from pipeline.training.recipe import TrainSpec
from pipeline.training.trainer import fit
from scripts import profile_loader as script
from scripts import run
from scripts.profile_output import stage_rows
from tests.training_runs import make_model, one_thread, training_loader, write_shades

SMALL = ("--size-px", "16", "--frames", "4", "--batch-size", "4", "--steps", "3", "--device", "cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("profiled")
    write_shades(root)
    return root


def call(capsys, root: Path, *args: str) -> tuple[int, list[str], str]:
    """Exit status, lines on stdout, and stderr."""
    where = ["--dataset", "shades", "--data", str(root), "--manifests", str(root / "manifests")]
    with pytest.raises(SystemExit) as end:
        run(script.main, [*where, "--cache", "disk", "--workers", "0", *SMALL, *args])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out.splitlines(), said.err


def test_the_real_step_is_profiled_and_the_verdict_stands_last(root, capsys):
    status, lines, errors = call(capsys, root)
    assert (status, errors) == (0, "")
    text = "\n".join(lines)
    for expected in (
        "frames    cache=disk: pack ",
        "model     small, 0.30 M parameters, 4 frames (stride 1) of 16x16 px",
        "device    CPU, processes 1, threads 1, workers 0, clips in a batch 4",
        "measured  3 steps of 4 clips",
        "ceiling   ",
        "own cost  ",
        "note      no GPU in use",
    ):
        assert expected in text
    assert lines[-2].startswith("verdict   ")
    assert lines[-1].startswith("next      ")
    stages = [line.split()[0] for line in lines if line.startswith("  ")][1:]
    assert stages == [
        *("read", "decode", "augment", "batch", "queue", "pin", "copy", "prepare", "step", "waiting")
    ]


def test_picture_and_json_lie_beside_the_manifest_and_say_the_same(root, capsys):
    _, lines, _ = call(capsys, root, "--step-ms", "1")
    outcome = json.loads((root / "manifests" / "shades.profile.json").read_text())
    assert outcome["verdict"]["lines"] == lines[-2:]
    assert [row["stage"] for row in outcome["stages"]][:3] == ["read", "decode", "augment"]
    assert outcome["times"]["total_s"] > 0
    assert outcome["steps"] == 3
    picture = root / "manifests" / "shades.profile.png"
    assert f"picture   {picture}" in lines
    assert cv2.imread(str(picture)) is not None


def test_places_can_be_told(root, tmp_path, capsys):
    out, outcome = tmp_path / "a.png", tmp_path / "a.json"
    status, lines, _ = call(
        capsys, root, "--step-ms", "1", "--out", str(out), "--json", str(outcome), "--cache", "off"
    )
    assert status == 0
    assert out.exists()
    assert json.loads(outcome.read_text())["setting"]["cache"] == "off"
    assert "model     none: a stand-in that waits 1 ms" in lines


def test_a_slow_stand_in_is_the_model_and_there_is_nothing_to_win(root, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.measure.verdict.NOTHING_LOST", 0.3)  # on a busy machine
    _, lines, _ = call(capsys, root, "--step-ms", "200", "--batch-size", "1", "--steps", "2")
    assert lines[-2].startswith("verdict   the model limits")
    assert "no change to the loader wins anything" in lines[-1]


def test_without_matplotlib_there_is_all_but_the_picture(root, capsys, monkeypatch):
    def refuse(*_, **__):
        raise PipelineError("no picture: matplotlib is missing (x): pip install matplotlib")

    monkeypatch.setattr(script, "draw_profile", refuse)
    status, lines, _ = call(capsys, root, "--step-ms", "1")
    assert status == 0
    assert "picture   no picture: matplotlib is missing (x): pip install matplotlib" in lines
    assert lines[-1].startswith("next")


@pytest.mark.parametrize("is_there", [False, True])
def test_without_shared_memory_it_is_measured_without_workers(root, capsys, monkeypatch, is_there):
    monkeypatch.setattr("pipeline.online.loader.RAM_ROOT", root if is_there else root / "nothing")
    monkeypatch.setattr("pipeline.online.loader.free_bytes", lambda _: 1000)
    status, lines, _ = call(capsys, root, "--step-ms", "1", "--workers", "2")
    assert status == 0
    assert any(line.startswith("warning: ") and "batches in flight need" in line for line in lines)
    assert "warning: measured without workers" in lines
    assert any("workers 0" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--dataset", "nothing"), "nothing.parquet"),
        (("--split", "split09"), "split09"),
        (("--model", "smal"), "did you mean small?"),
        (("--steps", "1"), "steps must be >= 2"),
        (("--step-ms", "-1"), "step_ms >= 0"),
        (("--stepms", "1"), "--step-ms"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(root, capsys, args, complaint):
    status, _, errors = call(capsys, root, *args)
    assert status == 2
    assert errors.count("\n") == 1
    assert complaint in errors


@pytest.mark.parametrize("cache", ["off", "disk"])
def test_no_frames_are_said(root, tmp_path, capsys, cache):
    status, _, errors = call(capsys, root, "--data", str(tmp_path), "--cache", cache)
    assert status == 2
    assert "make " in errors
    assert errors.count("\n") == 1


def test_the_step_is_the_trainers(root):
    spec = TrainSpec(epochs=1, warmup=0.0, schedule="step", step_at=(), lr=0.01, clip_grad=0.5)
    theirs, ours = make_model(dropout=0.0), make_model(dropout=0.0)
    fit(theirs, training_loader(root, batch_size=18), spec)
    step = script.training_step(ours, spec, torch.device("cpu"))
    for batch in prefetch(training_loader(root, batch_size=18), "cpu"):
        assert isinstance(batch, ClipBatch)
        step(batch)
    assert all(
        torch.equal(one, two)
        for one, two in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True)
    )


def test_stages_that_there_are_not_have_no_time(root, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(script, "format_profile", lambda profile: seen.append(profile) or ["table"])
    call(capsys, root, "--step-ms", "1")
    rows = {row.stage: row for row in stage_rows(seen[0])}
    assert [name for name, row in rows.items() if row.seconds is None] == ["queue", "pin", "copy"]
    assert rows["read"].where == "main process"
