import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.manifest import Manifest, read_manifest, write_manifest
from pipeline.offline.sample_imu import EARLY_S
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    EpochSampler,
    EvalSampler,
    FolderStore,
    LoaderSpec,
    WindowSpec,
    build_loader,
)
from pipeline.online.device import Normalize, prefetch
from pipeline.online.loader import ClipLoader
from pipeline.online.series import SeriesSource, SeriesSpec
from pipeline.training.fusion import FusionNet, build_fusion, fit_fusion, judge_fusion, score_clips
from pipeline.training.models import ModelError
from pipeline.training.recipe import TrainingError, TrainSpec
from scripts import demo, demo_fusion, run
from scripts.demo_fusion import RIGHT, TRIALS, WRONG, Outcome, format_outcomes, judge
from tests.folders import record_of, write_folder
from tests.training_runs import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


# --- the model -----------------------------------------------------------------------------------------


def frames_of(clips: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(clips, 3, 8, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_readings", [1, 8, 40])
def test_a_model_gives_a_score_for_each_clip_and_class(num_readings):
    model = build_fusion(5, 6, width=2).eval()
    readings = torch.randn(3, num_readings, 6)
    assert model(frames_of()).shape == (3, 5)
    assert model(frames_of(), readings).shape == (3, 5)
    assert model(frames_of(), readings, torch.ones(3, num_readings, dtype=torch.bool)).shape == (3, 5)


def test_a_model_is_that_of_its_seed_and_leaves_torchs_chance_alone():
    before = torch.get_rng_state()
    one, two, other = (build_fusion(4, 3, width=2, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(values, two[name]) for name, values in one.items())
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_what_is_masked_does_not_count():
    model = build_fusion(4, 3, width=2).eval()
    readings, mask = torch.randn(3, 8, 3), torch.ones(3, 8, dtype=torch.bool)
    mask[:, 5:] = False
    changed = readings.clone()
    changed[:, 5:] += 100
    assert torch.equal(model(frames_of(), readings, mask), model(frames_of(), changed, mask))
    assert not torch.equal(model(frames_of(), readings), model(frames_of(), changed))


@settings(max_examples=10, deadline=None)
@given(scale=st.floats(0.1, 50), shift=st.floats(-20, 20))
def test_units_and_gravity_do_not_count_in_training(scale, shift):
    model = build_fusion(4, 3, width=2).eval()
    model.normalize.train()
    readings = torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(0)).double()
    model.double()
    frames = frames_of().double()
    with torch.no_grad():
        expected, found = model(frames, readings), model(frames, readings * scale + shift)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # the norm adds 1e-5 to a variance


# --- training ------------------------------------------------------------------------------------------

TINY = WindowSpec(frames=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """16 videos whose pictures are all alike, and a channel that is 1 in one class and -1 in the other."""
    root = tmp_path_factory.mktemp("tiny")
    records = []
    for place in range(16):
        label, name = place % 2, "AB"[place % 2]
        key = f"{name}/v_{name}_g{place // 2:02d}_c01"
        write_folder(root / "frames", key, frames=4)
        (root / "imu" / name).mkdir(parents=True, exist_ok=True)
        rows = [f"{0.04 * k:.2f},{1 - 2 * label},{k}" for k in range(-1, 6)]
        (root / "imu" / f"{key}.csv").write_text("\n".join(["t,push,other", *rows]))
        side = {"split01": "test" if place < 4 else "train"}
        records.append(record_of(key, 4, label=label, class_name=name, splits=side))
    write_manifest(
        root / "tiny.parquet", records, dataset="tiny", classes="AB", spec={"format": 1, "quality": 90}
    )
    return root


def rows_of(root: Path, side: str) -> Manifest:
    return read_manifest(root / "tiny.parquet").select(split01=side)


def dataset_of(root: Path, side: str) -> ClipDataset:
    spec = SeriesSpec(pattern="{video}.csv", mirror=("push",))
    sources = {"imu": SeriesSource(root / "imu", spec)}
    augment = AugmentSpec(size_px=16, flip_p=0.0)
    if side == "test":
        augment = AugmentSpec(size_px=16, mode="centre")
    return ClipDataset(
        rows_of(root, side), FolderStore(root / "frames"), TINY, augment=augment, sources=sources
    )


def train_loader(root: Path) -> ClipLoader:
    sampler = EpochSampler(rows_of(root, "train"), TINY, seed=3)
    return build_loader(dataset_of(root, "train"), sampler, LoaderSpec(batch_size=6, workers=0))


def held_out_loader(root: Path) -> ClipLoader:
    sampler = EvalSampler(rows_of(root, "test"), TINY)
    return build_loader(dataset_of(root, "test"), sampler, LoaderSpec(batch_size=3, workers=0))


SPEC = TrainSpec(epochs=8, lr=0.02)


def fitted(root: Path, source: str | None) -> tuple[FusionNet, list[float]]:
    model = build_fusion(2, 2, width=2)
    return model, fit_fusion(model, train_loader(root), SPEC, source=source)


def test_training_learns_what_only_the_readings_tell(tiny):
    model, losses = fitted(tiny, "imu")
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    assert judge_fusion(model, held_out_loader(tiny), source="imu") == 1.0
    alone, losses = fitted(tiny, None)
    assert losses[-1] > 0.6  # ln 2 is what a coin costs
    assert judge_fusion(alone, held_out_loader(tiny), source=None) == 0.5


def test_training_again_ends_with_the_same_bits_and_leaves_torchs_chance_alone(tiny):
    before = torch.get_rng_state()
    (one, losses), (two, again) = fitted(tiny, "imu"), fitted(tiny, "imu")
    assert torch.equal(torch.get_rng_state(), before)
    assert losses == again
    theirs = two.state_dict()
    assert all(torch.equal(values, theirs[name]) for name, values in one.state_dict().items())


def test_judging_changes_nothing_and_counts_like_a_slow_loop(tiny):
    model = build_fusion(2, 2, width=2).train()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    found = judge_fusion(model, held_out_loader(tiny), source="imu")
    assert model.training
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    dataset, model = dataset_of(tiny, "test"), model.eval()
    right = 0
    for ref in EvalSampler(rows_of(tiny, "test"), TINY):
        batch = Normalize()(dataset.__getitems__([ref]))
        right += int(score_clips(model, batch, "imu").argmax()) == int(batch.labels)
    assert found == right / 4


def test_readings_that_are_not_at_the_frames_are_named(tiny):
    model = build_fusion(2, 2, width=2)
    batch = next(iter(prefetch(held_out_loader(tiny), "cpu")))
    with pytest.raises(
        ModelError, match=r"readings 'gyro' at the frames, .* the batch has .*imu \(3, 4, 2\)"
    ):
        score_clips(model, batch, "gyro")
    windows = batch._replace(extras={"imu": torch.zeros(3, 9, 2)})
    with pytest.raises(ModelError, match='with take="frames"'):
        score_clips(model, windows, "imu")


def test_training_wants_a_sampler_that_has_epochs_and_a_loss_that_is_a_number(tiny):
    with pytest.raises(TrainingError, match="a EvalSampler has no epochs: train with an EpochSampler"):
        fit_fusion(build_fusion(2, 2, width=2), held_out_loader(tiny), SPEC, source="imu")
    spoilt = build_fusion(2, 2, width=2)
    torch.nn.init.constant_(spoilt.head.weight, float("nan"))
    with pytest.raises(TrainingError, match="the loss is nan in epoch 1: take a lower lr"):
        fit_fusion(spoilt, train_loader(tiny), SPEC, source="imu")


# --- the demo ------------------------------------------------------------------------------------------


def outcomes_of(*top1: float) -> list[Outcome]:
    return [
        Outcome(title=trial.title, top1=share, seconds=1.25)
        for trial, share in zip(TRIALS, top1, strict=True)
    ]


@pytest.mark.parametrize(
    ("top1", "is_as_promised", "verdict"),
    [
        ((0.5, 1.0, 0.5, 0.5), True, "lift top-1 from 50.0% to 100.0%; a clock half a second off undoes it"),
        ((0.5, 0.8, 0.5, 0.5), False, "frames and readings come to 80.0%, expected 90% or more"),
        ((0.7, 1.0, 0.5, 0.5), False, "70.0% without readings and 50.0% by the wrong clock"),
        ((0.5, 1.0, 0.5, 0.9), False, "50.0% without readings and 90.0% by the wrong clock"),
    ],
)
def test_the_verdict_says_what_came_of_the_promise(top1, is_as_promised, verdict):
    found, said = judge(outcomes_of(*top1))
    assert found == is_as_promised
    assert verdict in said


def test_the_table_has_a_row_for_each_trial():
    lines = list(format_outcomes(outcomes_of(0.5, 1.0, 0.5, 0.5)))
    assert len(lines) == 1 + len(TRIALS)
    assert lines[2].split() == ["frames", "+", "imu", "100.0%", "1.2", "s"]


def test_the_clocks_are_half_a_second_apart():
    assert WRONG.offset_s - RIGHT.offset_s == 0.5
    assert RIGHT.to_video_s(np.array([EARLY_S])).tolist() == [0.0]


def test_the_demo_is_the_samples_unless_it_is_asked_for_fusion(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(demo_fusion, "main", lambda **options: called.append(options) or 1)
    monkeypatch.setattr(demo, "run_stage", lambda number, total, stage: called.append(stage.title) or 0.0)
    monkeypatch.setattr(demo, "describe", lambda *_: [])
    where = ["--data", str(tmp_path), "--manifests", str(tmp_path), "--jobs", "1"]
    for args, expected in ((["fusion", *where], 1), ([*where, "fusion"], 1), (where, 0)):
        with pytest.raises(SystemExit) as end:
            run(demo.main, args)
        assert end.value.code == expected
    options = {"data": tmp_path, "manifests": tmp_path, "runs": Path("runs"), "jobs": 1}
    assert called[:2] == [options] * 2
    assert [title.split()[0] for title in called[2:]] == ["draw", "decode", "pack", "train"]


@pytest.mark.slow
def test_readings_by_the_right_clock_lift_top1_from_a_coin_to_nearly_all_and_by_a_wrong_one_do_not(
    tmp_path, capsys
):
    places = {name: tmp_path / name for name in ("data", "manifests", "runs")}
    options = [word for name, path in places.items() for word in (f"--{name}", str(path))]
    small = ["--groups", "8", "--clips", "2", "--epochs", "10", "--jobs", "1"]
    with pytest.raises(SystemExit) as end:
        run(demo_fusion.main, [*options, *small])
    said = capsys.readouterr()
    assert (end.value.code, said.err) == (0, ""), said.out
    assert "a clock half a second off undoes it" in said.out
    alone, fused, *shifted = [
        row["top1"] for row in json.loads((tmp_path / "runs/fusion/report.json").read_text())
    ]
    assert fused >= 0.9
    assert alone == pytest.approx(0.5, abs=0.1)
    assert shifted == pytest.approx([0.5, 0.5], abs=0.1)
    assert torch.load(tmp_path / "runs/fusion/fusion.pt").keys() == build_fusion(4, 3).state_dict().keys()
