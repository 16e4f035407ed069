import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pipeline.errors import PipelineError
from pipeline.online.order import class_weights
from pipeline.online.samplers import ClipRef, EpochSampler, EvalSampler, SamplerError
from pipeline.online.windows import ShortVideoError, WindowSpec, count_starts, view_starts
from tests.manifests import manifest_of, videos

WINDOW = WindowSpec(frames=16)
seeds = st.integers(0, 2**63 - 1)
tails = st.sampled_from(["drop", "pad"])


def one_epoch(manifest, epoch=0, **options):
    sampler = EpochSampler(manifest, WINDOW, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def dealt_back(shares):
    """The line that ranks were dealt: one sample from each in turn."""
    return [ref for round_of_all in zip(*shares, strict=True) for ref in round_of_all]


# An epoch


@given(num_videos=st.integers(1, 60), seed=seeds, epoch=st.integers(0, 99), shuffle=st.booleans())
def test_an_epoch_has_every_video_once_at_a_start_that_fits(num_videos, seed, epoch, shuffle):
    manifest = videos(num_videos)
    refs = one_epoch(manifest, epoch, seed=seed, shuffle=shuffle)
    rows = [ref.video for ref in refs]
    assert sorted(rows) == [*range(num_videos)]
    if not shuffle:
        assert rows == [*range(num_videos)]
    num_frames = manifest.column("num_frames")
    assert all(0 <= ref.start <= num_frames[ref.video] - 16 for ref in refs)
    assert all(ref.crop == -1 for ref in refs)


@given(num_videos=st.integers(1, 60), seed=seeds, epoch=st.integers(0, 99))
def test_the_same_seed_and_epoch_give_the_same_clips(num_videos, seed, epoch):
    again = one_epoch(videos(num_videos), epoch, seed=seed)
    assert one_epoch(videos(num_videos), epoch, seed=seed) == again


def test_neighbouring_seeds_and_epochs_give_other_orders_starts_and_seeds():
    manifest = manifest_of(np.full(300, 200))
    streams = [one_epoch(manifest, epoch, seed=seed) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for k, stream in enumerate(streams):
        for other in streams[:k]:
            assert sum(a.video == b.video for a, b in zip(stream, other, strict=True)) < 15
            starts = {ref.video: ref.start for ref in other}
            assert sum(starts[ref.video] == ref.start for ref in stream) < 20
            assert not {ref.seed for ref in stream} & {ref.seed for ref in other}


def test_the_stream_is_pinned():
    # A change here changes every run that is under way: STATE_FORMAT goes up with it.
    assert one_epoch(videos(5), 3, seed=42)[:3] == [
        ClipRef(1, 0, 3464067682614857832),
        ClipRef(2, 1, 376028495670768648),
        ClipRef(0, 13, 1131614064826094811),
    ]


def test_all_starts_of_a_video_are_drawn_and_the_last_is_reached():
    refs = one_epoch(manifest_of(np.full(5000, 20)))
    counts = np.bincount([ref.start for ref in refs])
    assert len(counts) == 5  # 20 frames hold 16 five times
    assert abs(counts - 1000).max() < 120


@pytest.mark.parametrize("num_frames", [1, 15])
def test_a_video_shorter_than_the_window_begins_at_its_first_frame(num_frames):
    assert [ref.start for ref in one_epoch(manifest_of([num_frames] * 9))] == [0] * 9


def test_starts_by_fps_use_the_rate_of_each_video():
    manifest = manifest_of(np.full(2000, 60), fps=np.tile([25.0, 50.0], 1000))
    window = WindowSpec(frames=16, fps=25)
    refs = list(EpochSampler(manifest, window))
    for row_parity, rate in ((0, 25.0), (1, 50.0)):
        starts = {ref.start for ref in refs if ref.video % 2 == row_parity}
        assert starts == set(range(int(count_starts(60, window, video_fps=rate))))


def test_segments_begin_at_the_first_frame_and_differ_by_seed():
    refs = list(EpochSampler(videos(20), WindowSpec(frames=8, mode="segments")))
    assert {ref.start for ref in refs} == {0}
    assert len({ref.seed for ref in refs}) == 20


@given(repeats=st.integers(1, 5), num_videos=st.integers(1, 20), seed=seeds)
def test_repeated_clips_of_a_video_follow_each_other_and_differ(repeats, num_videos, seed):
    refs = one_epoch(videos(num_videos), seed=seed, clips_per_video=repeats)
    rows = [ref.video for ref in refs]
    assert rows == [row for row in rows[::repeats] for _ in range(repeats)]
    assert sorted(rows[::repeats]) == [*range(num_videos)]
    assert len({ref.seed for ref in refs}) == len(refs)


# Ranks


@given(
    num_videos=st.integers(1, 60), world=st.integers(1, 7), seed=seeds, repeats=st.integers(1, 3), tail=tails
)
def test_the_shares_of_all_ranks_dealt_back_are_the_order_of_one(num_videos, world, seed, repeats, tail):
    options = {"seed": seed, "clips_per_video": repeats}
    whole = one_epoch(videos(num_videos), **options)
    if tail == "drop" and len(whole) < world:
        return
    shares = [
        one_epoch(videos(num_videos), rank=rank, world=world, tail=tail, **options) for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    line = dealt_back(shares)
    if tail == "drop":
        assert len(whole) - world < len(line) <= len(whole)
        assert line == whole[: len(line)]
    else:
        assert len(whole) <= len(line) < len(whole) + world
        assert line[: len(whole)] == whole
        added = line[len(whole) :]
        assert [ref.video for ref in added] == [ref.video for ref in (whole * world)[: len(added)]]
        assert not {ref.seed for ref in added} & {ref.seed for ref in whole}


def test_what_pad_adds_is_counted():
    assert EpochSampler(videos(10), WINDOW, world=4, tail="pad").num_padded == 2
    assert EpochSampler(videos(10), WINDOW, world=4, tail="drop").num_padded == 0
    assert EpochSampler(videos(3), WINDOW, world=8, tail="pad").num_padded == 5


def test_fewer_samples_than_ranks_are_an_error_at_once():
    with pytest.raises(SamplerError, match="3 samples are fewer than 4 ranks"):
        EpochSampler(videos(3), WINDOW, rank=1, world=4)
    shares = [one_epoch(videos(3), rank=rank, world=4, tail="pad") for rank in range(4)]
    assert [len(share) for share in shares] == [1, 1, 1, 1]
    assert len(EpochSampler(videos(3), WINDOW, world=4, clips_per_video=2)) == 1


# Classes in balance


def test_balanced_classes_come_equally_often_on_any_ranks():
    labels = np.repeat([0, 1, 2], [5, 45, 250])
    manifest = manifest_of(np.full(300, 50), labels=labels)
    weights = class_weights(manifest.column("label"))
    whole = one_epoch(manifest, weights=weights)
    counts = np.bincount([labels[ref.video] for ref in whole])
    assert abs(counts - 100).max() < 2
    shares = [one_epoch(manifest, weights=weights, rank=rank, world=4) for rank in range(4)]
    assert dealt_back(shares) == whole


# A million rows


def test_a_million_rows_take_little_memory_and_a_small_state():
    manifest = manifest_of(np.full(1_000_000, 50))
    tracemalloc.start()
    sampler = EpochSampler(manifest, WINDOW)
    drawn = sum(1 for _, _ in zip(sampler, range(20_000), strict=False))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert drawn == 20_000
    assert peak < 4_000_000  # 8 MB would be one order of int64
    assert len(json.dumps(sampler.state_dict())) < 1000


# Through torch's loader


class Echo(Dataset):
    """Gives each ref back, from whatever worker."""

    def __getitem__(self, ref):
        return tuple(ref)


def test_persistent_workers_are_given_the_epoch_that_was_set():
    sampler = EpochSampler(videos(20), WINDOW, seed=3)
    loader = DataLoader(
        Echo(), sampler=sampler, batch_size=4, collate_fn=list, num_workers=2, persistent_workers=True
    )
    assert len(loader) == 5
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert [ref for batch in loader for ref in batch] == one_epoch(videos(20), epoch, seed=3)


# Evaluation


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("views", "crops"), [(1, 1), (3, 1), (2, 3)])
def test_an_evaluation_counts_each_video_once_whatever_the_ranks(world, views, crops):
    manifest = videos(5)
    samplers = [
        EvalSampler(manifest, WINDOW, views=views, crops=crops, rank=rank, world=world)
        for rank in range(world)
    ]
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    rows_of_rank = [{ref.video for ref in share} for share in shares]
    assert sorted(row for rows in rows_of_rank for row in rows) == [0, 1, 2, 3, 4]
    wanted = [
        ClipRef(row, start, 0, crop)
        for row in range(5)
        for start in view_starts(29 + row, WINDOW, views).tolist()
        for crop in ([1] if crops == 1 else [0, 1, 2])
    ]
    assert sorted(ref for share in shares for ref in share) == sorted(wanted)
    if world == 1:
        assert shares[0] == wanted


def test_an_evaluation_of_three_videos_leaves_the_fourth_rank_without_any():
    lengths = [len(list(EvalSampler(videos(3), WINDOW, rank=rank, world=4))) for rank in range(4)]
    assert lengths == [1, 1, 1, 0]


def test_two_passes_of_an_evaluation_are_identical():
    sampler = EvalSampler(videos(7), WINDOW, views=3, crops=3)
    assert list(sampler) == list(sampler)
    assert len(sampler) == 7 * sampler.clips_per_video == 63


def test_an_evaluation_of_more_videos_than_are_made_at_a_time_misses_none():
    refs = list(EvalSampler(videos(5000), WINDOW, rank=1, world=2))
    assert [ref.video for ref in refs] == [*range(1, 5000, 2)]
    assert refs[2] == ClipRef(5, (34 - 16) // 2, 0, 1)


def test_an_evaluation_by_fps_spreads_its_views_by_the_rate_of_each_video():
    manifest = manifest_of([60, 60], fps=np.array([25.0, 50.0]))
    window = WindowSpec(frames=16, fps=25)
    starts = [ref.start for ref in EvalSampler(manifest, window, views=2)]
    assert starts == [0, 44, 0, 29]


# Mistakes


@pytest.mark.parametrize("make", [EpochSampler, EvalSampler])
def test_rows_that_cannot_be_sampled_are_refused_by_name(make):
    with pytest.raises(SamplerError, match=r"1 of 3 videos have no frames, first A/v_0000001\.avi"):
        make(manifest_of([30, 0, 30]), WINDOW)
    with pytest.raises(SamplerError, match="no rows"):
        make(manifest_of([]), WINDOW)
    strict = replace(WINDOW, short="error")
    with pytest.raises(
        ShortVideoError, match=r"2 of 3 .* first A/v_0000001\.avi: it has 15 frames"
    ) as caught:
        make(manifest_of([16, 15, 9]), strict)
    assert isinstance(caught.value, PipelineError)
    assert len(make(manifest_of([16, 17]), strict)) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2, "world": 2},
        {"rank": -1},
        {"world": 0},
        {"seed": -1},
        {"clips_per_video": 0},
        {"tail": "wrap"},
        {"shuffle": False, "weights": np.ones(5)},
        {"weights": np.ones(4)},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        EpochSampler(videos(5), WINDOW, **options)


@pytest.mark.parametrize("options", [{"views": 0}, {"crops": 2}, {"rank": 3, "world": 3}])
def test_evaluations_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        EvalSampler(videos(5), WINDOW, **options)


def test_segments_have_one_view():
    window = WindowSpec(frames=8, mode="segments")
    assert [ref.start for ref in EvalSampler(videos(3), window, crops=3)] == [0] * 9
    with pytest.raises(ValueError, match="one view"):
        EvalSampler(videos(3), window, views=2)


def test_an_epoch_before_the_first_is_refused():
    with pytest.raises(ValueError, match="epoch"):
        EpochSampler(videos(3), WINDOW).set_epoch(-1)
