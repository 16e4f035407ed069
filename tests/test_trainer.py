"""Training: options that do what they say, and a stop anywhere that changes nothing."""

import math
import os
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline.errors import PipelineError
from pipeline.online import EvalSampler, LoaderSpec, build_loader
from pipeline.online.device import Normalize
from pipeline.online.device_augment import DeviceAugment, DeviceAugmentSpec
from pipeline.online.samplers import SamplerError
from pipeline.training.checkpoint import CheckpointError, read_checkpoint
from pipeline.training.models import ModelError, small_cnn
from pipeline.training.ranks import Ranks, generator_states
from pipeline.training.recipe import (
    TrainingError,
    TrainSpec,
    autocast_dtype,
    build_optimizer,
    learning_rate,
)
from pipeline.training.reports import EvalReport
from pipeline.training.trainer import Hooks, fit
from tests.training_runs import (
    SPEC,
    in_ranks,
    make_model,
    one_thread,
    run_folder,
    train,
    training_loader,
    write_shades,
)

STEPS = 4
"""Of an epoch: 18 videos in batches of 5."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("shades")
    write_shades(root)
    return root


@pytest.fixture(scope="module")
def unbroken(root):
    """Weights and report of a run that was never stopped."""
    model, report = train(root)
    assert report.is_finished
    assert report.steps == SPEC.epochs * STEPS
    return model.state_dict(), report


def same_weights(one, two):
    return one.keys() == two.keys() and all(torch.equal(values, two[name]) for name, values in one.items())


def outcome(report):
    """What must not depend on where a run was stopped: all but times."""
    return [replace(row, seconds=0.0, waited_s=0.0) for row in report.history]


class StopAfter:
    """Asks for a stop once so many steps have been made."""

    def __init__(self, steps):
        self.left = steps

    def hooks(self):
        return Hooks(on_step=self.count, should_stop=lambda: self.left <= 0)

    def count(self, epoch, steps):
        self.left -= 1


# A stop changes nothing.


@pytest.mark.parametrize(
    ("stops", "workers"),
    [((0,), (0, 0)), ((1,), (0, 0)), ((4,), (1, 0)), ((7,), (0, 2)), ((5, 2, 3), (2, 0, 1, 0))],
    ids=str,
)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(root, tmp_path, unbroken, stops, workers):
    for stop, count in zip(stops, workers, strict=False):
        _, report = train(root, out=tmp_path, workers=count, hooks=StopAfter(stop).hooks())
        assert not report.is_finished
    model, report = train(root, out=tmp_path, model=make_model(seed=9), workers=workers[-1])
    assert report.is_finished
    assert report.steps == SPEC.epochs * STEPS
    assert same_weights(model.state_dict(), unbroken[0])
    assert outcome(report) == outcome(unbroken[1])
    assert same_weights(read_checkpoint(tmp_path / "last.pt").model, unbroken[0])


@pytest.mark.parametrize("death", [2, 3, 6, 11])
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(root, tmp_path, unbroken, death):
    spec = replace(SPEC, checkpoint_every=3)
    steps = []

    def die(epoch, step):
        steps.append(step)
        if len(steps) == death:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(root, out=tmp_path, spec=spec, hooks=Hooks(on_step=die))
    last = max(step for step in (0, 3, 4, 6, 8, 9) if step < death)  # ends of epochs, and every third step
    again = []
    hooks = Hooks(on_step=lambda epoch, step: again.append(step))
    model, report = train(root, out=tmp_path, spec=spec, model=make_model(seed=9 if last else 0), hooks=hooks)
    assert len(again) == SPEC.epochs * STEPS - last
    assert same_weights(model.state_dict(), unbroken[0])
    assert outcome(report) == outcome(unbroken[1])


def test_a_stop_while_it_evaluates_loses_no_step(root, tmp_path, unbroken):
    _, report = train(root, out=tmp_path, should_stop=lambda: True)
    assert (report.is_finished, report.steps, report.history) == (False, STEPS, ())
    model, report = train(root, out=tmp_path)
    assert report.steps == SPEC.epochs * STEPS
    assert same_weights(model.state_dict(), unbroken[0])
    assert outcome(report) == outcome(unbroken[1])


def test_a_run_that_is_over_is_not_trained_again(root, tmp_path, unbroken):
    train(root, out=tmp_path)
    steps = []
    model, report = train(
        root, out=tmp_path, model=make_model(seed=9), hooks=Hooks(on_step=lambda *at: steps.append(at))
    )
    assert (report.is_finished, steps) == (True, [])
    assert same_weights(model.state_dict(), unbroken[0])
    assert outcome(report) == outcome(unbroken[1])


def test_other_options_are_refused_in_a_folder_that_has_a_run(root, tmp_path):
    train(root, out=tmp_path, hooks=StopAfter(2).hooks())
    with pytest.raises(CheckpointError, match=r"lr 0\.02, now 0\.01; repeat its options"):
        train(root, out=tmp_path, spec=replace(SPEC, lr=0.01))
    with pytest.raises(CheckpointError, match="clips in a batch of all ranks 5, now 6"):
        train(root, out=tmp_path, batch_size=6)
    _, report = train(root, out=tmp_path, spec=replace(SPEC, checkpoint_every=1, eval_every=2))
    assert report.is_finished


def test_the_global_generators_are_left_as_they_were(root, unbroken):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, _ = train(root)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(6)
    again, _ = train(root)
    assert same_weights(model.state_dict(), again.state_dict())
    assert same_weights(model.state_dict(), unbroken[0])


def test_another_seed_draws_another_dropout(root, unbroken):
    model, _ = train(root, spec=replace(SPEC, seed=1))
    assert not same_weights(model.state_dict(), unbroken[0])


# What a run says.


def test_a_row_is_the_mean_over_the_epochs_clips(root):
    spec = replace(SPEC, epochs=1, lr=1e-12, warmup=0.0, weight_decay=0.0)
    model = make_model()
    model.dropout.p = 0.0
    loader = training_loader(root)
    losses, right = [], []
    model.train()
    loader.sampler.set_epoch(0)
    for batch in loader:
        frames = Normalize()(batch).frames
        outputs = model(frames)
        losses += nn.functional.cross_entropy(outputs, batch.labels, reduction="none").tolist()
        right += (outputs.argmax(1) == batch.labels).tolist()
    model = make_model()
    model.dropout.p = 0.0
    _, report = train(root, model=model, spec=spec, validates=False)
    (row,) = report.history
    assert row.clips == 18
    assert row.loss == pytest.approx(sum(losses) / 18, rel=1e-5)
    assert row.top1 == sum(right) / 18
    assert row.held_out is None
    assert row.clips_per_s == pytest.approx(18 / row.seconds)


def test_time_spent_waiting_for_clips_is_told_apart_from_work(root):
    def slowed(model, given):
        time.sleep(0.05)

    idle, busy = make_model(), make_model()
    busy.register_forward_pre_hook(slowed)
    spec = replace(SPEC, epochs=1)
    assert train(root, model=busy, spec=spec, validates=False)[1].history[0].waiting_share < 0.5

    loader = training_loader(root)
    loader.dataset.store.__class__ = type("Slow", (type(loader.dataset.store),), {"read": _read_slowly})
    report = fit(idle, loader, spec)
    assert report.history[0].waiting_share > 0.5


def _read_slowly(self, video, indices):
    time.sleep(0.02)
    return super(type(self), self).read(video, indices)


def test_evaluations_come_as_often_as_asked_and_after_the_last_epoch(root):
    _, report = train(root, spec=replace(SPEC, epochs=5, eval_every=2))
    assert [row.held_out is not None for row in report.history] == [False, True, False, True, True]


def test_the_first_of_the_best_epochs_is_kept(root, tmp_path):
    scores = iter([0.2, 0.8, 0.8, 0.5])
    states = []

    def judge(model):
        states.append({name: values.clone() for name, values in model.state_dict().items()})
        top1 = next(scores)
        return EvalReport(top1=top1, top5=1.0, loss=0.0, num_videos=1, clips_per_video=1, per_class=())

    folder = run_folder(root, tmp_path)
    report = fit(make_model(), training_loader(root), replace(SPEC, epochs=4), validate=judge, folder=folder)
    assert report.best.epoch == 1
    assert same_weights(read_checkpoint(folder.best).model, states[1])
    assert same_weights(read_checkpoint(folder.last).model, states[3])


def test_a_model_learns_what_a_brightness_tells(root):
    spec = TrainSpec(epochs=15, lr=0.02, eval_every=15)
    _, report = train(root, model=make_model(width=8, dropout=0.0), spec=spec)
    assert report.history[-1].loss < 0.6 * report.history[0].loss
    assert report.history[-1].held_out.top1 == 1.0


def test_targets_that_are_mixed_can_be_trained_on(root):
    spec = DeviceAugmentSpec(mixup_alpha=0.8, cutmix_alpha=1.0, erase_p=0.5, num_classes=3)
    report = fit(make_model(), training_loader(root), SPEC, prepare=DeviceAugment(spec))
    assert 0 <= report.history[-1].top1 <= 1
    assert math.isfinite(report.history[-1].loss)


# What cannot be trained.


def test_a_loss_that_is_no_number_ends_the_run_before_a_sound_checkpoint_is_replaced(root, tmp_path):
    model = make_model()

    def spoil(epoch, step):
        if epoch == 1:
            model.head.weight.data.fill_(float("inf"))

    with pytest.raises(TrainingError, match=r"the loss is nan by step 8 \(lr .*last\.pt is the last"):
        train(root, out=tmp_path, model=model, hooks=Hooks(on_step=spoil))
    found = read_checkpoint(tmp_path / "last.pt")
    assert found.training.step == STEPS
    assert all(values.isfinite().all() for values in found.model.values())


def test_a_model_of_other_classes_is_refused_before_the_first_batch(root):
    with pytest.raises(ModelError, match="the model has 4 outputs and the dataset 3 classes"):
        train(root, model=small_cnn(4, width=2), hooks=Hooks(on_step=pytest.fail))


def test_a_model_that_cannot_take_the_clips_is_refused_before_the_first_batch(root):
    model = nn.Sequential(nn.Flatten(), nn.Linear(10, 3))
    with pytest.raises(ModelError, match=r"cannot take clips of \(C, T, H, W\) = \(3, 4, 16, 16\)"):
        train(root, model=model, hooks=Hooks(on_step=pytest.fail))


def test_an_epoch_without_a_batch_is_refused(root):
    loader = training_loader(root, batch_size=19, drop_last=True)
    with pytest.raises(
        TrainingError, match=r"have \[0\] batches in an epoch, expected the same number from 1"
    ):
        fit(make_model(), loader, SPEC)


def test_a_sampler_that_cannot_be_resumed_is_refused(root):
    loader = training_loader(root)
    sampler = EvalSampler(loader.sampler.manifest, loader.sampler.window)
    with pytest.raises(TrainingError, match="a EvalSampler cannot be resumed"):
        fit(make_model(), build_loader(loader.dataset, sampler, LoaderSpec(workers=0)), SPEC)


def test_half_precision_is_for_what_can_do_it():
    cpu = torch.device("cpu")
    assert [autocast_dtype(amp, cpu) for amp in ("auto", "off", "bf16")] == [None, None, torch.bfloat16]
    with pytest.raises(TrainingError, match="fp16 is for CUDA, and this is cpu"):
        autocast_dtype("fp16", cpu)


def test_a_run_in_bf16_resumes_too(root, tmp_path):
    spec = replace(SPEC, amp="bf16", clip_grad=0.5, optimizer="sgd", label_smoothing=0.1)
    unbroken, _ = train(root, spec=spec)
    train(root, spec=spec, out=tmp_path, hooks=StopAfter(6).hooks())
    model, _ = train(root, spec=spec, out=tmp_path)
    assert same_weights(model.state_dict(), unbroken.state_dict())


# The recipe.


@given(
    progress=st.floats(0, 1),
    warmup=st.floats(0, 0.9),
    schedule=st.sampled_from(["cosine", "step"]),
    lr=st.floats(1e-6, 10),
)
def test_the_lr_is_never_above_its_peak_nor_below_zero(progress, warmup, schedule, lr):
    spec = TrainSpec(lr=lr, warmup=warmup, schedule=schedule)
    assert 0 <= learning_rate(progress, spec) <= lr * (1 + 1e-12)


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=2), st.floats(0, 0.9), st.sampled_from(["cosine", "step"])
)
def test_the_lr_rises_in_the_warm_up_and_never_after(places, warmup, schedule):
    spec = TrainSpec(lr=1.0, warmup=warmup, schedule=schedule)
    early, late = (learning_rate(place, spec) for place in sorted(places))
    if max(places) < warmup:
        assert early <= late
    elif min(places) >= warmup:
        assert early >= late - 1e-12


def test_steps_fall_where_they_are_set():
    spec = TrainSpec(lr=1.0, warmup=0.1, schedule="step", step_at=(0.5, 0.75), step_factor=0.1)
    lrs = [learning_rate(at, spec) for at in (0.05, 0.1, 0.49, 0.5, 0.74, 0.75, 1.0)]
    assert lrs == pytest.approx([0.5, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


def test_the_lr_of_a_step_is_that_of_its_middle(root, monkeypatch):
    used = []
    real = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        used.extend({group["lr"] for group in self.param_groups})
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(root, spec=replace(SPEC, epochs=2), validates=False)
    middles = [2.5, 7.5, 12.5, 16.5]  # of batches of 5, 5, 5 and 3 clips of 18
    places = [(epoch + middle / 18) / 2 for epoch in (0, 1) for middle in middles]
    assert used == pytest.approx([learning_rate(place, SPEC) for place in places])


def test_biases_and_norms_do_not_decay():
    model = small_cnn(3, width=2)
    decayed, free = build_optimizer(model, TrainSpec(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2, 5}
    assert {parameter.ndim for parameter in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert build_optimizer(model, TrainSpec(optimizer="sgd")).param_groups[0]["nesterov"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"lr": 0.0},
        {"warmup": 1.0},
        {"step_at": (0.5, 1.5)},
        {"label_smoothing": 1.0},
        {"clip_grad": 0.0},
        {"checkpoint_every": -1},
        {"seed": -1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainSpec(**wrong)


# Several ranks.


def train_in_ranks(ranks, root, out):
    """Two epochs; a run that is stopped and resumed; and where the weights stand."""
    batch_size = 6 // ranks.world
    spec = replace(SPEC, epochs=2)
    model, report = train(root, spec=spec, ranks=ranks, batch_size=batch_size)
    stop = StopAfter(3 if ranks.rank == 0 else 99)  # one rank is told, all must stop
    stopped = train(root, out=out, spec=spec, ranks=ranks, batch_size=batch_size, hooks=stop.hooks())[1]
    again, resumed = train(
        root, out=out, spec=spec, ranks=ranks, model=make_model(seed=ranks.rank), batch_size=batch_size
    )
    return {
        "weights": model.state_dict(),
        "report": report,
        "stopped": stopped.steps,
        "again": again.state_dict(),
        "resumed": resumed,
    }


def test_ranks_train_one_model_and_stop_together(root, tmp_path):
    one, two = in_ranks(train_in_ranks, root, tmp_path, 2)
    assert same_weights(one["weights"], two["weights"])
    assert outcome(one["report"]) == outcome(two["report"])
    assert one["report"].history[0].clips == 18
    assert one["stopped"] == two["stopped"] == 3
    for rank in (one, two):
        assert same_weights(rank["again"], one["weights"])
        assert outcome(rank["resumed"]) == outcome(one["report"])


def test_a_run_of_one_rank_goes_on_in_two(root, tmp_path):
    """With the same clips in a step, though not with the same bits: each rank normalises by its own clips."""
    spec = replace(SPEC, epochs=2)
    train(root, out=tmp_path, spec=spec, batch_size=6, hooks=StopAfter(2).hooks())
    one, two = in_ranks(resume_in_ranks, root, tmp_path, 2)
    assert (one["steps"], one["clips"]) == (two["steps"], two["clips"]) == (6, [18, 18])
    assert same_weights(one["weights"], two["weights"])


def resume_in_ranks(ranks, root, out):
    model, report = train(
        root, out=out, spec=replace(SPEC, epochs=2), ranks=ranks, batch_size=6 // ranks.world
    )
    clips = [row.clips for row in report.history]
    return {"weights": model.state_dict(), "steps": report.steps, "clips": clips}


def test_ranks_with_different_numbers_of_batches_are_refused(root, tmp_path):
    assert (
        in_ranks(train_unevenly, root, tmp_path, 2)
        == ["the 2 ranks have [9, 5] batches in an epoch, expected the same number from 1 on"] * 2
    )


def train_unevenly(ranks, root, out):
    try:
        train(root, ranks=ranks, batch_size=1 + ranks.rank)
    except TrainingError as error:
        return str(error).partition(":")[0]


def test_fewer_videos_than_ranks_are_refused_before_anything_waits(root):
    loader = training_loader(root)
    few = loader.sampler.manifest.select(class_name="Dark", num_frames=[5, 6, 7])
    sampler = type(loader.sampler)
    with pytest.raises(SamplerError, match="3 samples are fewer than 4 ranks"):
        sampler(few, loader.sampler.window, rank=0, world=4)


# On a GPU.


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        missing = "needs a CUDA device"
        pytest.fail(missing) if os.environ.get("REQUIRE_GPU") == "1" else pytest.skip(missing)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_a_gpu_trains_stops_and_resumes(root, tmp_path, gpu, amp):
    spec = replace(SPEC, amp=amp, clip_grad=1.0)
    loader = training_loader(root)
    folder = run_folder(root, tmp_path)
    stopped = fit(make_model(), loader, spec, device=gpu, folder=folder, hooks=StopAfter(6).hooks())
    assert (stopped.is_finished, stopped.steps) == (False, 6)
    model = make_model(seed=9)
    report = fit(model, training_loader(root), spec, device=gpu, folder=folder)
    assert report.is_finished
    assert next(model.parameters()).is_cuda
    assert set(read_checkpoint(folder.last).training.rng) == {"cpu", "cuda"}
    assert all(math.isfinite(row.loss) for row in report.history)


@pytest.mark.gpu
def test_dropout_on_a_gpu_goes_on_where_it_was(gpu):
    with torch.random.fork_rng([gpu]):
        states = generator_states(Ranks(), gpu)
        assert states["cuda"].shape[0] == 1


def test_an_error_of_training_is_one_that_a_user_can_mend():
    assert issubclass(TrainingError, PipelineError)
