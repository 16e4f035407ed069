from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.online import order
from pipeline.online.order import (
    InOrder,
    Shuffled,
    Weighted,
    class_weights,
    clip_seeds,
    draws_below,
    permuted,
    share_length,
)

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 1000)


def keys_of(seed):
    return np.random.default_rng(seed).integers(2**64, size=order.ROUNDS, dtype=np.uint64)


def all_rows(row_order, *, seed=0, epoch=0):
    return row_order.rows(np.arange(row_order.num_slots), seed=seed, epoch=epoch)


# The permutation


@given(size=st.integers(1, 3000), seed=seeds)
def test_every_place_is_taken_to_another(size, seed):
    assert sorted(permuted(np.arange(size), size, keys_of(seed)).tolist()) == [*range(size)]


@given(size=st.integers(1, 2**31), seed=seeds, data=st.data())
def test_a_place_is_taken_where_it_would_be_in_any_company(size, seed, data):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    together = permuted(places, size, keys_of(seed))
    alone = [int(permuted(places[k : k + 1], size, keys_of(seed))[0]) for k in range(len(places))]
    assert together.tolist() == alone
    assert len(set(alone)) == len(places)
    assert 0 <= together.min() <= together.max() < size


@pytest.mark.parametrize(("size", "draws"), [(2, 400), (3, 900), (4, 1200), (5, 2400)])
def test_all_orders_of_a_few_rows_come_equally_often(size, draws):
    found = Counter(tuple(all_rows(Shuffled(size), seed=seed).tolist()) for seed in range(draws))
    orders = [*permutations(range(size))]
    expected = draws / len(orders)
    chi_square = sum((found[one] - expected) ** 2 / expected for one in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_every_row_comes_at_every_place_and_after_every_other_equally_often():
    size, draws = 30, 1500
    at_place = np.zeros((size, size))
    after = np.zeros((size, size))
    for seed in range(draws):
        rows = all_rows(Shuffled(size), seed=seed)
        at_place[np.arange(size), rows] += 1
        after[rows[:-1], rows[1:]] += 1
    assert abs(at_place - draws / size).max() < 5 * (draws / size) ** 0.5
    off_diagonal = after[~np.eye(size, dtype=bool)]
    assert abs(off_diagonal - draws / size).max() < 5 * (draws / size) ** 0.5


@given(num_rows=st.integers(100, 2000), seed=st.integers(0, 2**62), epoch=epochs)
def test_neighbouring_seeds_and_epochs_have_unrelated_orders(num_rows, seed, epoch):
    rows = all_rows(Shuffled(num_rows), seed=seed, epoch=epoch)
    for other in (
        all_rows(Shuffled(num_rows), seed=seed + 1, epoch=epoch),
        all_rows(Shuffled(num_rows), seed=seed, epoch=epoch + 1),
        all_rows(Shuffled(num_rows), seed=seed + 1, epoch=max(epoch - 1, 0)),
    ):
        assert (rows == other).sum() < 15  # one in the mean, whatever the size
        assert abs(np.corrcoef(rows, other)[0, 1]) < 6 / num_rows**0.5


def test_rows_in_order_are_the_slots():
    assert all_rows(InOrder(4), seed=3, epoch=2).tolist() == [0, 1, 2, 3]


# Seeds and draws


def test_the_hash_is_splitmix64():
    # The first words of Vigna's splitmix64.c from state 1234567.
    words = order._hashed(np.arange(1, 6), np.uint64(1234567))
    assert words.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(seed=st.integers(0, 2**62), epoch=epochs, first=st.integers(0, 10**9))
def test_no_two_clips_share_a_seed(seed, epoch, first):
    positions = first + np.arange(500)
    found = [
        *clip_seeds(positions, seed=seed, epoch=epoch).tolist(),
        *clip_seeds(positions, seed=seed, epoch=epoch + 1).tolist(),
        *clip_seeds(positions, seed=seed + 1, epoch=epoch).tolist(),
    ]
    assert len(set(found)) == 1500
    assert 0 < min(found) <= max(found) < 2**63


@given(seed=seeds, count=st.integers(1, 2**31))
def test_draws_stay_below_their_count(seed, count):
    clips = clip_seeds(np.arange(200), seed=seed, epoch=0)
    draws = draws_below(clips, np.full(200, count))
    assert 0 <= draws.min() <= draws.max() < count


def test_draws_are_uniform_and_those_of_neighbours_unrelated():
    draws = draws_below(clip_seeds(np.arange(70_000), seed=0, epoch=0), np.full(70_000, 7))
    pairs = Counter(pairwise(draws.tolist()))
    expected = 70_000 / 49
    chi_square = sum((pairs[a, b] - expected) ** 2 / expected for a in range(7) for b in range(7))
    assert chi_square < 48 + 4 * 96**0.5


# Weights


def weighted_rows(num_rows):
    weights = st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5, 40.0]), min_size=num_rows, max_size=num_rows)
    labels = st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows)
    return st.tuples(weights.filter(any).map(np.array), labels.map(np.array))


@given(rows=st.integers(1, 150).flatmap(weighted_rows), seed=seeds, epoch=epochs)
def test_each_row_and_each_class_comes_within_two_of_its_expected_count(rows, seed, epoch):
    weights, labels = rows
    drawn = all_rows(Weighted(weights, labels), seed=seed, epoch=epoch)
    expected = weights / weights.sum() * len(weights)
    counts = np.bincount(drawn, minlength=len(weights))
    assert abs(counts - expected).max() < 2
    assert (counts[weights == 0] == 0).all()
    of_class = np.bincount(labels, counts) - np.bincount(labels, expected)
    assert abs(of_class).max() < 2 + 1e-9


def test_over_many_epochs_each_row_is_drawn_in_proportion_to_its_weight():
    weights = np.array([1.0, 0.25, 0.25, 3.0, 0.5, 2.0, 0.1, 0.9])
    row_order = Weighted(weights, np.array([0, 1, 1, 0, 2, 1, 0, 2]))
    counts = sum(np.bincount(all_rows(row_order, epoch=epoch), minlength=8) for epoch in range(1000))
    expected = weights / weights.sum() * 8 * 1000
    assert abs(counts - expected).max() < 5 * expected.max() ** 0.5
    assert abs(counts / expected - 1).max() < 0.15


def test_draws_are_not_in_the_order_of_their_classes():
    labels = np.repeat(np.arange(4), 50)
    drawn = labels[all_rows(Weighted(np.ones(200), labels))]
    assert (np.diff(drawn) == 0).mean() < 0.4  # a quarter of neighbours by chance


def test_class_weights_make_classes_equally_likely():
    labels = np.repeat([0, 3, 7], [10, 60, 230])
    drawn = labels[all_rows(Weighted(class_weights(labels), labels))]
    assert all(abs(count - 100) < 2 for count in Counter(drawn.tolist()).values())


@pytest.mark.parametrize(
    "weights", [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 1.0], [1.0, np.inf, 1.0]]
)
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        Weighted(np.array(weights), np.array([0, 0, 1]))


@given(samples=st.integers(0, 1000), world=st.integers(1, 50))
def test_shares_leave_out_or_add_less_than_a_round(samples, world):
    assert 0 <= samples - world * share_length(samples, world, "drop") < world
    assert 0 <= world * share_length(samples, world, "pad") - samples < world
