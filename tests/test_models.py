"""Models by name, and whether they fit clips and classes."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.training.models import (
    MODELS,
    ModelError,
    build_model,
    check_clip,
    check_labels,
    count_outputs,
    find_model,
    load_weights,
    small_cnn,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def weights_of(model):
    return {name: values.clone() for name, values in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_the_clips_that_it_was_designed_for(name):
    # On the meta device: shapes without numbers, so that the largest cost nothing.
    with META:
        model = build_model(name, 7)
    size_px = find_model(name).size_px
    check_clip(name, frames=16, size_hw=(size_px, size_px))
    assert count_outputs(model, (3, 16, size_px, size_px), device=META) == 7
    assert dict(model.named_modules())[find_model(name).head] is not None
    head = [
        values.shape for key, values in model.state_dict().items() if key.startswith(find_model(name).head)
    ]
    assert head[0][0] == 7


@pytest.mark.parametrize("name", ["s3d", "mvit_v1_b", "mvit_v2_s"])
@pytest.mark.parametrize(("frames", "size_px"), [(12, 224), (16, 208), (16, 112)])
def test_a_clip_that_a_model_cannot_take_is_refused_as_the_model_would(name, frames, size_px):
    with pytest.raises(ModelError, match=f"{name} takes .* not {frames} frames of {size_px}x{size_px} px"):
        check_clip(name, frames=frames, size_hw=(size_px, size_px))
    with META:
        model = build_model(name, 3)
    with pytest.raises(ModelError, match=r"the model cannot take clips of \(C, T, H, W\)"):
        count_outputs(model, (3, frames, size_px, size_px), device=META)


@pytest.mark.parametrize("name", ["small", "r3d_18", "swin3d_t"])
def test_most_models_take_clips_of_any_size(name):
    check_clip(name, frames=4, size_hw=(32, 48))
    with META:
        model = build_model(name, 3)
    assert count_outputs(model, (3, 4, 32, 48), device=META) == 3


def test_the_smallest_clips_that_s3d_takes():
    check_clip("s3d", frames=13, size_hw=(209, 209))
    with META:
        model = build_model("s3d", 3)
    assert count_outputs(model, (3, 13, 209, 209), device=META) == 3


@settings(max_examples=15, deadline=None)
@given(frames=st.integers(1, 20), height=st.integers(1, 40), width=st.integers(1, 40))
def test_the_small_model_takes_any_clip(frames, height, width):
    assert count_outputs(small_cnn(5, width=2), (3, frames, height, width), device=CPU) == 5


def test_the_small_model_is_small():
    assert sum(parameter.numel() for parameter in small_cnn(8).parameters()) < 300_000


def test_weights_follow_from_the_seed_and_nothing_else_is_drawn():
    state = torch.get_rng_state()
    one, same, other = (weights_of(build_model("small", 3, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_running_statistics_of_s3d_move_as_those_of_a_network_that_is_trained_anew():
    with META:
        model = build_model("s3d", 3)
    assert {module.momentum for module in model.modules() if isinstance(module, nn.BatchNorm3d)} == {0.1}


def test_a_name_that_is_no_model_is_answered_with_the_nearest():
    with pytest.raises(
        ModelError, match=r"no model is named 'r3d18': did you mean r3d_18\? There are small,"
    ):
        build_model("r3d18", 3)


# Outputs and labels.


def test_counting_outputs_changes_nothing():
    model = small_cnn(4, width=2).train()
    before = weights_of(model)
    assert count_outputs(model, (3, 4, 16, 16), device=CPU) == 4
    assert model.training
    assert all(torch.equal(before[name], values) for name, values in weights_of(model).items())


def test_a_model_must_give_a_row_for_each_clip():
    with pytest.raises(
        ModelError, match=r"must give \(B, classes\) for B clips, it gave \(1, 3, 4, 8, 8\) for"
    ):
        count_outputs(nn.Identity(), (3, 4, 8, 8), device=CPU)
    pair = nn.Flatten()
    pair.register_forward_hook(lambda module, given, outputs: (outputs, outputs))
    with pytest.raises(ModelError, match="it gave tuple for one"):
        count_outputs(pair, (3, 4, 8, 8), device=CPU)


def test_outputs_must_be_as_many_as_the_classes():
    labels = np.array([0, 1, 2])
    check_labels(labels, ["A", "B", "C"], 3)
    with pytest.raises(ModelError, match="the model has 101 outputs and the dataset 3 classes"):
        check_labels(labels, ["A", "B", "C"], 101)


@pytest.mark.parametrize(("labels", "first"), [([0, 1, 3, 4], "3 in row 2"), ([-1, 0, 9], "-1 in row 0")])
def test_labels_must_be_in_range(labels, first):
    with pytest.raises(ModelError, match=rf"2 of . videos have a label outside of \[0, 3\), first {first}"):
        check_labels(np.array(labels), ["A", "B", "C"], 3)


# Weights of another training.


def test_weights_are_taken_over_whole():
    trained, model = small_cnn(3, width=2), small_cnn(3, width=2)
    wrapped = {f"module.{name}": values for name, values in trained.state_dict().items()}
    for state in (trained.state_dict(), wrapped):
        fresh = copy.deepcopy(model)
        assert load_weights(fresh, state, head="head", place="w.pt") == []
        assert all(
            torch.equal(values, fresh.state_dict()[key]) for key, values in trained.state_dict().items()
        )


def test_a_head_of_other_classes_begins_anew():
    trained, model = small_cnn(5, width=2), small_cnn(3, width=2)
    head = model.head.weight.clone()
    assert load_weights(model, trained.state_dict(), head="head", place="w.pt") == [
        "head.weight",
        "head.bias",
    ]
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.stem.moving[0].weight, trained.stem.moving[0].weight)
    headless = {key: values for key, values in trained.state_dict().items() if not key.startswith("head")}
    assert load_weights(model, headless, head="head", place="w.pt") == ["head.weight", "head.bias"]


def test_weights_of_another_model_are_refused_by_name():
    model = small_cnn(3, width=2)
    with pytest.raises(ModelError, match=r"w\.pt: weights of another model: it has features\.weight"):
        load_weights(model, {"features.weight": torch.zeros(2)}, head="head", place="w.pt")
    with pytest.raises(
        ModelError, match=r"w\.pt: stem\.still\.0\.weight has shape \(2, .*this model has \(1, "
    ):
        load_weights(model, small_cnn(3, width=4).state_dict(), head="head", place="w.pt")
