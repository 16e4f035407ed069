"""What comes beside the frames becomes a batch, also where it is nested or of different lengths."""

from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from pipeline.online.collate import (
    Clip,
    CollateError,
    collate_clips,
    collate_extras,
    map_extras,
    take_extras,
)
from pipeline.online.sources import SourceSample

DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64"]


def window(length, *, channels=2):
    """A sample of readings, each its own number, whose first one is made up."""
    values = np.arange(1, length * channels + 1, dtype=np.float32).reshape(length, channels)
    return SourceSample(values, np.arange(length) > 0, np.arange(length) / 10)


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one.dtype == other.dtype and torch.equal(one, other)


class Readings(Dataset):
    """Clips of a user's own, with windows of 1, 2, ... readings, each of which is the clip's number."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        frames = torch.full((2, 4, 4, 3), index, dtype=torch.uint8)
        imu = {"values": torch.full((index + 1, 2), float(index))}
        extras = {"seed": index, "imu": imu, "box": {"left": torch.tensor([index, 1])}}
        return Clip(frames, index, index, 0, torch.zeros(2), extras)


# Of equal shapes


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    num_samples=st.integers(1, 4),
    as_tensor=st.booleans(),
)
def test_arrays_of_one_shape_are_stacked_and_keep_their_dtype(dtype, shape, num_samples, as_tensor):
    arrays = [np.random.default_rng(k).integers(2, size=shape).astype(dtype) for k in range(num_samples)]
    values = list(map(torch.from_numpy, arrays)) if as_tensor else arrays
    batch = collate_extras([{"a": value} for value in values])
    assert equal(batch, default_collate([{"a": array} for array in map(torch.from_numpy, arrays)]))


def test_numbers_arrays_and_tensors_of_one_dtype_go_together():
    batch = collate_extras([{"a": 1}, {"a": np.int64(2)}, {"a": torch.tensor(3)}])
    assert equal(batch, {"a": torch.tensor([1, 2, 3])})


def test_mappings_and_named_tuples_are_stacked_inside():
    Pair = namedtuple("Pair", ["left", "right"])
    batch = collate_extras([{"a": {"b": Pair(k, {"c": k + 0.5})}} for k in range(2)])
    inside = {"left": torch.tensor([0, 1]), "right": {"c": torch.tensor([0.5, 1.5], dtype=torch.float64)}}
    assert equal(batch, {"a": {"b": inside}})


def test_a_sample_of_a_source_is_its_values_and_mask_and_what_is_none_is_left_out():
    batch = collate_extras([{"imu": window(3)._replace(times_s=None)}] * 2)
    assert {name: part.shape for name, part in batch["imu"].items()} == {"values": (2, 3, 2), "mask": (2, 3)}


def test_arrays_that_torch_would_not_take_as_they_are_come_through():
    given_arrays = {
        "read_only": np.broadcast_to(np.float32(2), (2, 2)),
        "turned": np.arange(4, dtype=np.float32).reshape(2, 2)[::-1],
        "swapped": np.arange(4).reshape(2, 2).astype(">i4"),
    }
    batch = collate_extras([given_arrays])
    for name, array in given_arrays.items():
        np.testing.assert_array_equal(batch[name][0].numpy(), array)
    assert batch["swapped"].dtype == torch.int32


def test_a_tensor_that_is_being_learned_is_batched_without_its_history():
    batch = collate_extras([{"a": torch.ones(2, requires_grad=True)}])
    assert not batch["a"].requires_grad


# Ragged


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    tail=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from(DTYPES),
)
def test_a_ragged_array_is_padded_to_the_longest_and_comes_back_by_its_length(lengths, tail, dtype):
    arrays = [np.random.default_rng(n).integers(2, size=(n, *tail)).astype(dtype) for n in lengths]
    padded = collate_extras([{"a": array} for array in arrays], ragged=["a"])["a"]
    assert padded.keys() == {"values", "lengths", "mask"}
    assert padded["values"].shape == (len(lengths), max(lengths), *tail)
    assert equal(padded["lengths"], torch.tensor(lengths))
    assert (padded["mask"].dtype, padded["mask"].shape) == (torch.bool, (len(lengths), max(lengths)))
    assert padded["mask"].sum(1).tolist() == lengths
    for array, values, mask in zip(arrays, padded["values"], padded["mask"], strict=True):
        assert values.numpy().dtype == array.dtype
        np.testing.assert_array_equal(values[mask].numpy(), array)
        assert not values[~mask].any()


def test_a_ragged_sample_brings_its_times_and_its_own_mask():
    padded = collate_extras([{"imu": window(1)}, {"imu": window(3)}], ragged=["imu"])["imu"]
    assert padded["lengths"].tolist() == [1, 3]
    assert padded["mask"].tolist() == [[False, False, False], [False, True, True]]
    assert padded["times_s"].tolist() == [[0.0, 0.0, 0.0], [0.0, 0.1, 0.2]]
    assert padded["times_s"].dtype == torch.float64
    assert padded["values"].tolist() == [[[1, 2], [0, 0], [0, 0]], [[1, 2], [3, 4], [5, 6]]]


def test_a_single_mask_holds_for_all_values_of_its_sample():
    samples = [window(2)._replace(mask=np.array(has)) for has in (True, False)]
    padded = collate_extras([{"imu": sample} for sample in samples], ragged=["imu"])["imu"]
    assert padded["mask"].tolist() == [[True, True], [False, False]]


def test_what_a_batch_holds_does_not_depend_on_whether_its_lengths_happen_to_be_equal():
    by_lengths = [
        collate_extras([{"imu": window(n)} for n in lengths], ragged=["imu"])["imu"]
        for lengths in ([2, 3], [3, 3], [3], [0, 0])
    ]
    forms = {tuple((name, part.ndim, part.dtype) for name, part in sorted(one.items())) for one in by_lengths}
    assert len(forms) == 1


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_the_clips_of_a_batch_make_the_same_batch_again_without_being_told_what_is_ragged(lengths):
    samples = [{"seed": n, "imu": window(n), "deep": {"a": {"b": np.ones(n)}}} for n in lengths]
    batch = collate_extras(samples, ragged=["imu", "deep.a.b"])
    clips = [take_extras(batch, place) for place in range(len(lengths))]
    assert [len(clip["deep"]["a"]["b"]["values"]) for clip in clips] == lengths
    assert equal(collate_extras(clips), batch)


def test_a_name_with_a_dot_can_be_ragged():
    assert "lengths" in collate_extras([{"imu.left": window(2)}], ragged=["imu.left"])["imu.left"]


# What does not fit


@pytest.mark.parametrize(
    ("samples", "ragged", "message"),
    [
        (
            [{"imu": window(2)}, {"imu": window(3)}],
            [],
            r"sample 1 \(B\): extras\.imu\.values is float32 \(3, 2\), expected float32 \(2, 2\), as "
            r"sample 0 \(A\); pad by ragged=\['imu'\]",
        ),
        (
            [{"imu": window(2)}, {"imu": window(3, channels=4)}],
            ["imu"],
            r"sample 1 \(B\): extras\.imu\.values is float32 \(3, 4\), expected float32 \(2, 2\), as",
        ),
        ([{"a": 1}, {"a": 1.5}], [], r"sample 1 \(B\): extras\.a is float64 \(\), expected int64 \(\)"),
        ([{"a": 1}, {"b": 1}], [], r"sample 1 \(B\): extras holds b, expected a"),
        ([{"a": {"b": 1}}, {"a": {}}], [], r"sample 1 \(B\): extras\.a holds nothing, expected b"),
        ([{"a": {"b": 1}}, {"a": 1}], [], r"sample 1 \(B\): extras\.a is int, expected a mapping"),
        ([{"a": 1}, {"a": {"b": 1}}], [], r"sample 1 \(B\): extras\.a is dict, expected numbers"),
        ([{"a": "x"}, {"a": "y"}], [], r"sample 0 \(A\): extras\.a is str, expected numbers"),
        ([{"a": [[1], [1, 2]]}], [], r"sample 0 \(A\): extras\.a is list, expected numbers"),
        ([{"a": 1}, {"a": 1}], ["a"], r"sample 0 \(A\): extras\.a\.values is int64 \(\), expected an axis"),
        ([{"a": {"b": [1]}}], ["a"], r"extras\.a is ragged and has no values"),
        (
            [{"a": {"values": [1], "times_s": [1, 2]}}],
            ["a"],
            r"extras\.a\.times_s is int64 \(2,\), expected 1",
        ),
        ([{"a": 1}], ["b"], r"ragged names b, but the extras are a"),
    ],
)
def test_what_does_not_fit_is_named_by_sample_and_key(samples, ragged, message):
    with pytest.raises(CollateError, match=message) as raised:
        collate_extras(samples, names=["A", "B"][: len(samples)], ragged=ragged)
    assert "\n" not in str(raised.value)


def test_without_names_a_sample_is_its_position():
    with pytest.raises(CollateError, match=r"^sample 1: extras\.a is"):
        collate_extras([{"a": 1}, {"a": "x"}])


def test_no_samples_or_names_for_others_are_a_mistake():
    with pytest.raises(ValueError, match="no samples"):
        collate_extras([])
    with pytest.raises(ValueError, match="2 names for 1 samples"):
        collate_extras([{}], names=["A", "B"])


# Clips


def test_clips_of_a_users_own_are_batched_with_what_is_nested_and_ragged_in_them():
    data = Readings()
    batch = collate_clips([data[k] for k in (3, 0)], ragged=["imu"])
    assert batch.frames.shape == (2, 2, 4, 4, 3)
    assert batch.extras["imu"]["lengths"].tolist() == [4, 1]
    assert equal(batch.extras["box"], {"left": torch.tensor([[3, 1], [0, 1]])})
    assert equal(batch.extras["seed"], batch.labels)


def test_a_clip_that_does_not_fit_is_named_by_its_row_and_frame():
    data = Readings()
    with pytest.raises(CollateError, match=r"sample 1 \(row 2 from frame 0\): extras\.imu\.values"):
        collate_clips([data[1], data[2]])


def test_workers_hand_on_what_is_nested_and_ragged():
    collate = partial(collate_clips, ragged=["imu"])
    loader = DataLoader(
        Readings(), batch_size=2, collate_fn=collate, num_workers=1, multiprocessing_context="fork"
    )
    alone = DataLoader(Readings(), batch_size=2, collate_fn=collate)
    batches = [*loader]
    assert [batch.extras["imu"]["values"].shape for batch in batches] == [(2, 2, 2), (2, 4, 2), (1, 5, 2)]
    for ours, theirs in zip(batches, alone, strict=True):
        assert equal(ours.extras, theirs.extras)
        assert torch.equal(ours.frames, theirs.frames)


def test_a_function_of_each_tensor_reaches_inside():
    batch = collate_extras([{"imu": window(2), "seed": 3}], ragged=["imu"])
    doubled = map_extras(lambda part: part.to(torch.float64) * 2, batch)
    assert equal(doubled["imu"]["values"], batch["imu"]["values"].double() * 2)
    assert doubled["seed"].tolist() == [6.0]


def test_pinning_reaches_inside(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda part, *_: pinned.append(part) or part)
    batch = collate_clips([Readings()[k] for k in range(2)], ragged=["imu"])
    pin_memory(batch)
    assert len(pinned) == 5 + 5  # frames, labels, videos, starts, times; seed, box, three of imu
