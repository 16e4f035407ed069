"""Every batch holds its share of each source, however few rows that has, and a report says so."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ManifestError
from pipeline.online.concat import concat_manifests, source_ids
from pipeline.online.distribution import Part, report_distribution
from pipeline.online.order import ROUNDS, dealt_again, draws_at, permuted
from pipeline.online.quotas import (
    QuotaOrder,
    balanced_order,
    balanced_weights,
    quota_order,
    share_counts,
)
from pipeline.online.samplers import EpochSampler, SamplerError
from pipeline.online.windows import WindowSpec
from tests.manifests import manifest_of

WINDOW = WindowSpec(frames=16)
seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 1000)
worlds = st.sampled_from([1, 2, 4])


def sources_of(*rows, labels=None):
    """A concatenation of sources a, b, ... with so many rows each."""
    parts = [manifest_of([20] * count, labels=labels and labels[k]) for k, count in enumerate(rows)]
    return concat_manifests(dict(zip("abcdef", parts, strict=False)))


@st.composite
def orders(draw, *, per_rank=4):
    """Few rows of each source in a batch that 4 ranks can share."""
    quotas = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any))
    quotas[0] += -sum(quotas) % per_rank
    counts = [draw(st.integers(1, 12)) for _ in quotas]
    ids = draw(st.permutations(np.repeat(np.arange(len(quotas)), counts).tolist()))
    return QuotaOrder(np.array(ids), tuple(quotas), draw(st.none() | st.integers(1, 12)))


def all_rows(order, *, seed=0, epoch=0):
    return order.rows(np.arange(order.num_slots), seed=seed, epoch=epoch)


def rank_batches(manifest, order, size, *, world, delivered=0, epoch=0, **options):
    """Rows of each rank's batches, (world, batches, size), in an epoch that was delivered in part."""
    shares = []
    for rank in range(world):
        sampler = EpochSampler(manifest, WINDOW, order=order, rank=rank, world=world, **options)
        sampler.set_epoch(epoch)
        sampler.mark_delivered(delivered // world)
        shares.append([ref.video for ref in sampler])
    return np.array(shares).reshape(world, -1, size)


# Shares to whole rows


@given(parts=st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any), total=st.integers(0, 500))
def test_whole_numbers_are_within_one_of_their_shares_and_make_up_the_total(parts, total):
    shares = np.array(parts) / sum(parts)
    counts = share_counts(shares, total)
    assert sum(counts) == total
    assert (abs(np.array(counts) - shares * total) < 1).all()
    assert all(count == 0 for count, part in zip(counts, parts, strict=True) if part == 0)


def test_shares_that_are_whole_rows_are_exact_though_they_are_not_binary_fractions():
    for percent in range(101):
        assert share_counts([percent / 100, 1 - percent / 100], 100) == (percent, 100 - percent)


# The stream of one source


@given(size=st.integers(1, 40), draws=st.integers(0, 200), seed=seeds, epoch=epochs)
def test_draws_from_the_first_on_hold_each_row_equally_often_within_one(size, draws, seed, epoch):
    drawn = dealt_again(np.arange(draws), size, seed=seed, epoch=epoch, stream=0)
    counts = np.bincount(drawn, minlength=size)
    assert len(counts) == size
    assert counts.max() - counts.min() <= 1


def test_each_pass_and_each_stream_has_an_order_of_its_own():
    size = 60
    streams = [dealt_again(np.arange(3 * size), size, seed=0, epoch=0, stream=k) for k in range(2)]
    passes = [each.tolist() for stream in streams for each in stream.reshape(3, size)]
    for k, one in enumerate(passes):
        assert sorted(one) == [*range(size)]
        for other in passes[:k]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12


def test_all_orders_of_a_few_rows_come_equally_often_over_passes():
    drawn = dealt_again(np.arange(6000 * 3), 3, seed=5, epoch=2, stream=1).reshape(-1, 3)
    found = Counter(map(tuple, drawn.tolist()))
    assert len(found) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in found.values()) < 5 + 4 * 10**0.5


@given(size=st.integers(1, 50), seed=seeds)
def test_a_key_for_each_place_is_the_same_as_one_key_for_all(size, seed):
    keys = np.random.default_rng(seed).integers(2**64, size=ROUNDS, dtype=np.uint64)
    places = np.arange(size)
    together = permuted(places, size, np.repeat(keys[:, None], size, axis=1))
    assert together.tolist() == permuted(places, size, keys).tolist()


def test_turns_are_uniform():
    counts = np.bincount(draws_at(np.arange(16_000), 16, seed=1, epoch=0), minlength=16)
    assert abs(counts - 1000).max() < 5 * 1000**0.5


# Batches


@given(order=orders(), seed=seeds, epoch=epochs)
def test_every_batch_holds_exactly_its_quotas(order, seed, epoch):
    rows = all_rows(order, seed=seed, epoch=epoch).reshape(-1, order.batch_size)
    for batch in order.source_ids[rows]:
        assert tuple(np.bincount(batch, minlength=len(order.quotas))) == order.quotas


@given(order=orders(), seed=seeds, epoch=epochs)
def test_each_row_of_a_source_comes_equally_often_within_one(order, seed, epoch):
    counts = np.bincount(all_rows(order, seed=seed, epoch=epoch), minlength=order.num_rows)
    for source, mean in enumerate(order.passes):
        of_source = counts[order.source_ids == source]
        assert of_source.max() - of_source.min() <= 1
        assert of_source.mean() == pytest.approx(mean)


@given(order=orders(), seed=seeds, epoch=epochs, data=st.data())
def test_a_slot_holds_the_same_row_in_any_company(order, seed, epoch, data):
    slots = np.array(data.draw(st.lists(st.integers(0, order.num_slots - 1), min_size=1, max_size=9)))
    expected = all_rows(order, seed=seed, epoch=epoch)[slots]
    assert order.rows(slots, seed=seed, epoch=epoch).tolist() == expected.tolist()


@given(order=orders(), world=worlds, data=st.data())
def test_every_ranks_batch_holds_its_share_within_one_also_after_a_resume(order, world, data):
    manifest = manifest_of([20] * order.num_rows)
    done = data.draw(st.integers(0, order.num_batches - 1)) * order.batch_size
    rows = rank_batches(manifest, order, order.batch_size // world, world=world, delivered=done)
    ids = order.source_ids[rows]  # (world, batches, batch_size / world)
    for source, quota in enumerate(order.quotas):
        counts = (ids == source).sum(axis=2)
        assert (abs(counts - quota / world) < 1).all()
        assert (counts.sum(axis=0) == quota).all()
    line = rows.transpose(1, 2, 0).ravel()  # dealt back: one from each rank in turn
    assert line.tolist() == all_rows(order)[done:].tolist()


def test_the_odd_row_of_a_share_goes_to_every_rank_in_turn():
    order = QuotaOrder(np.array([0] * 50 + [1]), (7, 1), 400)
    rows = rank_batches(manifest_of([20] * 51), order, 2, world=4)
    of_rank = (rows == 50).sum(axis=(1, 2))
    assert of_rank.sum() == 400
    assert abs(of_rank - 100).max() < 5 * 75**0.5


@given(clips=st.sampled_from([1, 2, 4]), world=worlds, seed=seeds)
def test_several_clips_of_a_video_keep_the_shares_of_their_batch(clips, world, seed):
    manifest = sources_of(9, 3)
    order = quota_order(manifest, 16 // clips, shares={"a": 0.75, "b": 0.25})
    rows = rank_batches(manifest, order, 16 // world, world=world, clips_per_video=clips, seed=seed)
    is_scarce = source_ids(manifest)[rows] == 1
    assert (is_scarce.sum(axis=2) == 4 / world).all()


def test_a_hundred_to_one_in_equal_shares():
    manifest = sources_of(1000, 10)
    order = quota_order(manifest, 32)
    assert order.quotas == (16, 16)
    assert order.num_batches == 63  # 1000 rows by 16
    rows = all_rows(order).reshape(-1, 32)
    assert (source_ids(manifest)[rows].sum(axis=1) == 16).all()
    counts = np.bincount(rows.ravel())
    assert set(counts[:1000].tolist()) == {1, 2}  # 63 x 16 is 8 more than there are
    assert set(counts[1000:].tolist()) == {100, 101}
    assert order.passes == (1.008, 100.8)


def test_an_epoch_ends_when_every_row_came_once_or_after_the_batches_asked_for():
    manifest = sources_of(10, 50)
    order = quota_order(manifest, 8, shares={"a": 0.5, "b": 0.5})
    assert order.num_batches == 13
    assert set(all_rows(order).tolist()) == {*range(60)}
    assert len(all_rows(quota_order(manifest, 8, num_batches=3))) == 24


def test_a_share_of_nothing_leaves_a_source_out():
    manifest = sources_of(10, 50)
    order = quota_order(manifest, 8, shares={"a": 1, "b": 0})
    assert sorted(all_rows(order)[:8].tolist()) == sorted(set(all_rows(order)[:8].tolist()))
    assert max(all_rows(order)) < 10


def test_epochs_and_seeds_have_orders_of_their_own():
    manifest = sources_of(400, 20)
    order = quota_order(manifest, 16)
    lines = [all_rows(order, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0))]
    for k, line in enumerate(lines):
        for other in lines[:k]:
            assert (line == other).mean() < 0.1


# Resume


@given(world=worlds, later=worlds, seed=seeds, data=st.data())
def test_a_run_that_stops_at_any_batch_goes_on_at_the_next_with_other_ranks(world, later, seed, data):
    manifest = sources_of(30, 4)
    order = quota_order(manifest, 8)
    done = data.draw(st.integers(0, order.num_batches - 1)) * 8
    first = EpochSampler(manifest, WINDOW, order=order, seed=seed, world=world)
    first.set_epoch(3)
    first.mark_delivered(done // world)
    shares = []
    for rank in range(later):
        again = quota_order(manifest, 8)
        sampler = EpochSampler(manifest, WINDOW, order=again, seed=seed, rank=rank, world=later)
        sampler.load_state_dict(first.state_dict())
        sampler.set_epoch(3)
        shares.append([*sampler])
    whole = EpochSampler(manifest, WINDOW, order=order, seed=seed)
    whole.set_epoch(3)
    assert [ref for refs in zip(*shares, strict=True) for ref in refs] == [*whole][done:]


@pytest.mark.parametrize(
    "other",
    [
        lambda manifest: quota_order(manifest, 16),
        lambda manifest: quota_order(manifest, 8, shares={"a": 0.25, "b": 0.75}),
        lambda manifest: quota_order(manifest, 8, num_batches=3),
        lambda manifest: QuotaOrder(1 - source_ids(manifest), (4, 4), 8),
    ],
)
def test_a_state_of_other_quotas_is_refused(other):
    manifest = sources_of(30, 4)
    state = EpochSampler(manifest, WINDOW, order=quota_order(manifest, 8)).state_dict()
    with pytest.raises(SamplerError, match="cannot resume another stream"):
        EpochSampler(manifest, WINDOW, order=other(manifest)).load_state_dict(state)


# Mistakes


def test_shares_that_cannot_be_meant_are_refused():
    manifest = sources_of(10, 5)
    for shares in ({"a": 0.5}, {"a": 0.5, "c": 0.5}, {"a": 0.5, "b": 0.4}, {"a": 1.5, "b": -0.5}):
        with pytest.raises(ValueError, match="shares"):
            quota_order(manifest, 8, shares=shares)


def test_a_share_without_a_place_or_without_rows_is_named():
    with pytest.raises(
        SamplerError, match=r"share of 0\.01 has no place in a batch of 8: give b more, or .*100"
    ):
        quota_order(sources_of(10, 5), 8, shares={"a": 0.99, "b": 0.01})
    manifest = sources_of(10, 0)
    with pytest.raises(SamplerError, match=r"b is to have a share of 0\.5 and has no rows"):
        quota_order(manifest, 8)
    with pytest.raises(SamplerError, match="b is to have a share and has no rows"):
        balanced_weights(manifest)
    assert quota_order(manifest, 8, shares={"a": 1, "b": 0}).num_batches == 2


@pytest.mark.parametrize(
    ("ids", "quotas", "num_batches"),
    [([0, 1], (0, 0), None), ([0, 1], (1, -1), None), ([0, 1], (1, 1), 0), ([0, 1], (1,), None)],
)
def test_quotas_that_mean_nothing_are_refused(ids, quotas, num_batches):
    with pytest.raises(ValueError):
        QuotaOrder(np.array(ids), quotas, num_batches)
    with pytest.raises(SamplerError, match="source 1 has no rows"):
        QuotaOrder(np.array([0]), (1, 1))


def test_an_order_of_other_rows_is_refused():
    manifest = sources_of(10, 5)
    order = quota_order(manifest, 8)
    with pytest.raises(SamplerError, match="of other rows"):
        EpochSampler(sources_of(10, 4), WINDOW, order=order)


def test_a_manifest_of_one_dataset_has_no_shares():
    with pytest.raises(ManifestError, match="concat_manifests"):
        quota_order(manifest_of([20]), 8)


# Weights


def test_weights_go_by_source_then_by_class_then_by_row():
    manifest = sources_of(6, 2, labels=[[0, 0, 0, 1, 1, 2], [1, 1]])
    weights = balanced_weights(manifest)
    expected = [1 / 6 / 3] * 3 + [1 / 6 / 2] * 2 + [1 / 6] + [1 / 2 / 2] * 2
    np.testing.assert_allclose(weights, expected)
    weights = balanced_weights(manifest, shares={"a": 0.9, "b": 0.1})
    assert weights[6:].sum() == pytest.approx(0.1)


@given(
    labels=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=3),
    seed=seeds,
    epoch=epochs,
)
def test_a_balanced_order_keeps_sources_and_classes_within_two_of_their_expected_counts(labels, seed, epoch):
    manifest = sources_of(*map(len, labels), labels=labels)
    sampler = EpochSampler(manifest, WINDOW, order=balanced_order(manifest), seed=seed)
    sampler.set_epoch(epoch)
    found = report_distribution(sampler, samples=sampler.num_samples)
    for part in found.parts:
        assert abs(part.delivered - part.expected) < 2 + 1e-9
    for part in found.sources:
        assert part.expected == pytest.approx(len(manifest) / len(labels))


# The report


def test_the_distribution_counts_what_was_delivered_by_source_and_class():
    manifest = sources_of(6, 2, labels=[[0, 0, 0, 1, 1, 2], [1, 1]])
    sampler = EpochSampler(manifest, WINDOW, order=quota_order(manifest, 4))
    whole = report_distribution(sampler, samples=sampler.num_samples)
    assert whole.samples == 12
    assert whole.parts == (
        Part("a", None, 6, 6.0, 6, 1, 1),
        Part("a", "A", 3, 3.0, 3, 1, 1),
        Part("a", "B", 2, 2.0, 2, 1, 1),
        Part("a", "C", 1, 1.0, 1, 1, 1),
        Part("b", None, 2, 6.0, 6, 3, 3),
        Part("b", "B", 2, 6.0, 6, 3, 3),
    )
    assert report_distribution(sampler).samples == 0
    sampler.mark_delivered(4)
    assert [part.delivered for part in report_distribution(sampler).sources] == [2, 2]


@given(order=orders(), clips=st.sampled_from([1, 2]), world=worlds, epoch=epochs, data=st.data())
def test_the_distribution_is_what_ranks_were_given(order, clips, world, epoch, data):
    rows = np.bincount(order.source_ids, minlength=len(order.quotas))
    manifest = sources_of(*rows)
    order = QuotaOrder(source_ids(manifest), order.quotas, order.num_batches)
    options = {"order": order, "clips_per_video": clips, "world": world}
    samplers = [EpochSampler(manifest, WINDOW, rank=rank, **options) for rank in range(world)]
    given_refs = []
    most = data.draw(st.integers(0, len(samplers[0])))
    for sampler in samplers:
        sampler.set_epoch(epoch)
        given_refs += [ref.video for ref, _ in zip(sampler, range(most), strict=False)]
        sampler.mark_delivered(most)
    counts = np.bincount(source_ids(manifest)[given_refs], minlength=len(order.quotas))
    assert [part.delivered for part in report_distribution(samplers[-1]).sources] == counts.tolist()


def test_the_distribution_of_any_order_says_what_its_rule_means():
    manifest = sources_of(30, 10)
    shuffled = EpochSampler(manifest, WINDOW)
    assert [p.expected for p in report_distribution(shuffled, samples=40).sources] == pytest.approx([30, 10])
    weighted = EpochSampler(manifest, WINDOW, weights=balanced_weights(manifest))
    assert [p.expected for p in report_distribution(weighted, samples=40).sources] == pytest.approx([20, 20])


def test_the_table_has_a_line_for_each_part():
    manifest = sources_of(6, 2, labels=[[0, 0, 0, 1, 1, 2], [1, 1]])
    sampler = EpochSampler(manifest, WINDOW, order=quota_order(manifest, 4))
    lines = str(report_distribution(sampler, samples=12)).splitlines()
    assert lines[0].split() == ["source", "rows", "expected", "delivered", "share", "times", "a", "row"]
    assert lines[5].split() == ["b", "2", "6.0", "6", "50.0%", "3", "to", "3"]
    assert len({len(line) for line in lines}) == 1
