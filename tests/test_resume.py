import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.manifest import Manifest
from pipeline.online.order import Shuffled, class_weights
from pipeline.online.samplers import EpochSampler, SamplerError
from pipeline.online.windows import WindowSpec
from tests.manifests import manifest_of, videos

WINDOW = WindowSpec(frames=16)
seeds = st.integers(0, 2**63 - 1)
tails = st.sampled_from(["drop", "pad"])


def dealt_back(shares):
    """The line that ranks were dealt: one sample from each in turn."""
    return [ref for round_of_all in zip(*shares, strict=True) for ref in round_of_all]


@dataclass
class Training:
    """A run of some ranks, which loads the state that the last one left."""

    manifest: Manifest
    options: dict
    line: list = field(default_factory=list)

    def go_on(self, state, world, rounds, prefetched):
        """`rounds` samples on each rank, of which workers had asked for some more."""
        samplers = [
            EpochSampler(self.manifest, WINDOW, rank=r, world=world, **self.options) for r in range(world)
        ]
        shares = []
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
                sampler.set_epoch(state["epoch"])
            share = [ref for ref, _ in zip(sampler, range(rounds + prefetched), strict=False)][:rounds]
            for _ in share:
                sampler.mark_delivered(1)
            shares.append(share)
        self.line += dealt_back(shares)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(one == states[0] for one in states)
        return states[0]


stages = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6)


@given(
    stages=stages,
    seed=seeds,
    tail=tails,
    repeats=st.integers(1, 3),
    is_weighted=st.booleans(),
)
def test_a_run_that_stops_and_goes_on_with_other_ranks_is_the_unbroken_run(
    stages, seed, tail, repeats, is_weighted
):
    manifest = manifest_of(29 + np.arange(25), labels=np.arange(25) % 3)
    options = {"seed": seed, "tail": tail, "clips_per_video": repeats}
    if is_weighted:
        options["weights"] = class_weights(manifest.column("label"))
    run, state = Training(manifest, options), None
    for world, rounds, prefetched in stages:
        state = run.go_on(state, world, rounds, prefetched)
    state = run.go_on(state, 1, 1000, 0)
    unbroken = list(EpochSampler(manifest, WINDOW, **options))
    assert run.line[: len(unbroken)] == unbroken
    assert len(run.line) < len(unbroken) + 4  # what `pad` may have added in the last stage of several ranks
    assert state["delivered"] == len(run.line)


def test_a_run_of_ten_stopped_at_four_and_at_seven_is_the_unbroken_run():
    run = Training(videos(10), {"seed": 5})
    state = run.go_on(None, world=2, rounds=2, prefetched=2)
    assert state["delivered"] == 4
    state = run.go_on(state, world=3, rounds=1, prefetched=1)
    assert state["delivered"] == 7
    run.go_on(state, world=1, rounds=3, prefetched=0)
    assert run.line == list(EpochSampler(videos(10), WINDOW, seed=5))


def test_resuming_late_in_an_epoch_computes_what_is_left_and_no_more():
    @dataclass(frozen=True)
    class Counted:
        """A shuffled order that notes how many slots it was asked for."""

        inner: Shuffled
        asked: list

        @property
        def num_slots(self):
            return self.inner.num_slots

        def rows(self, slots, *, seed, epoch):
            self.asked.append(len(slots))
            return self.inner.rows(slots, seed=seed, epoch=epoch)

        def settings(self):
            return self.inner.settings()

    asked = []
    sampler = EpochSampler(videos(10_000), WINDOW, order=Counted(Shuffled(10_000), asked))
    sampler.load_state_dict(EpochSampler(videos(10_000), WINDOW).state_dict() | {"delivered": 9_990})
    assert len(list(sampler)) == 10
    assert asked == [10]


def test_iteration_begins_at_the_first_sample_that_was_not_delivered():
    sampler = EpochSampler(videos(10), WINDOW)
    whole = list(sampler)
    sampler.mark_delivered(4)
    assert (sampler.delivered, sampler.remaining, len(sampler)) == (4, 6, 10)
    assert list(sampler) == whole[4:]
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_the_next_epoch_begins_at_its_start_and_differs():
    sampler = EpochSampler(videos(40), WINDOW)
    first = list(sampler)
    sampler.mark_delivered(40)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.delivered, sampler.remaining) == (1, 0, 40)
    second = list(sampler)
    assert sorted(ref.video for ref in second) == sorted(ref.video for ref in first)
    assert second != first


def test_without_set_epoch_a_finished_epoch_is_given_again():
    sampler = EpochSampler(videos(10), WINDOW)
    first = list(sampler)
    sampler.mark_delivered(10)
    assert list(sampler) == first
    assert sampler.delivered == 0


def test_an_epoch_that_was_over_when_it_was_saved_stays_over():
    sampler = EpochSampler(videos(10), WINDOW)
    sampler.mark_delivered(8)
    sampler.finish_epoch()  # a loader that drops its last batch
    resumed = EpochSampler(videos(10), WINDOW, world=2)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(0)
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert len(list(resumed)) == 5


def test_counting_a_batch_twice_is_noticed():
    sampler = EpochSampler(videos(10), WINDOW, world=2)
    sampler.mark_delivered(4)
    with pytest.raises(ValueError, match="after 8 of 10"):
        sampler.mark_delivered(4)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        ({"clips_per_video": 2}, "clips_per_video 1, now 2"),
        ({"shuffle": False}, "order 'shuffled', now 'rows'"),
        ({"weights": np.ones(10)}, "order 'shuffled', now 'weighted'"),
        ({"window": WindowSpec(frames=8)}, "window.frames 16, now 8"),
        ({"manifest": videos(11)}, "manifest '"),
    ],
)
def test_a_state_of_another_stream_is_refused_by_what_differs(other, named):
    state = EpochSampler(videos(10), WINDOW).state_dict()
    options = {"manifest": videos(10), "window": WINDOW} | other
    sampler = EpochSampler(**options)
    with pytest.raises(SamplerError, match="cannot resume another stream") as caught:
        sampler.load_state_dict(state)
    assert named in str(caught.value)
    assert sampler.delivered == 0


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 0}, {"format": 1, "stream": None, "epoch": 0, "delivered": 0}]
)
def test_what_is_not_a_state_is_refused(state):
    with pytest.raises(SamplerError, match="not the state"):
        EpochSampler(videos(3), WINDOW).load_state_dict(state)


def test_weights_that_changed_are_noticed():
    state = EpochSampler(videos(3), WINDOW, weights=np.array([1.0, 1.0, 2.0])).state_dict()
    with pytest.raises(SamplerError, match="weights"):
        EpochSampler(videos(3), WINDOW, weights=np.array([1.0, 1.0, 3.0])).load_state_dict(state)
