"""Made-up stages lead to the verdict that a person would give: what limits, what it costs, what to change."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.measure.verdict import (
    NOTHING_LOST,
    Setting,
    StageTimes,
    format_verdict,
    is_behind,
    judge,
    pace_s,
    supply_s,
    won_if_free,
)

QUICK = StageTimes(
    read_s=0.001, decode_s=0.010, augment_s=0.002, batch_s=0.001, prepare_s=0.0, step_s=0.1, ceiling_s=0.1
)
"""Workers that are seven times as fast as the step."""
TWO = Setting(batch_size=8, workers=2, cache="ram", spare_cores=6.0)


def slow(stage: str, seconds: float, *, step_s: float = 0.01) -> StageTimes:
    """Two workers that are behind by one stage, and what the step waits for them."""
    times = replace(QUICK, **{stage: seconds}, step_s=step_s, ceiling_s=step_s)
    return replace(times, making_s=max(times.made_s / 2 - step_s, 0.0))


seconds = st.floats(0.0, 10.0)
all_times = st.builds(
    StageTimes,
    **{field.name: seconds for field in fields(StageTimes) if field.name != "cpu_share"},
    cpu_share=st.floats(0.0, 1.0),
)
settings = st.builds(
    Setting,
    batch_size=st.integers(1, 64),
    workers=st.integers(0, 64),
    threads=st.integers(1, 8),
    readers=st.integers(0, 4),
    prefetch=st.integers(1, 8),
    is_cuda=st.booleans(),
    pins=st.booleans(),
    cache=st.sampled_from(["ram", "disk", "off", None]),
    missed_share=st.none() | st.floats(0.0, 1.0),
    has_transform=st.booleans(),
    shrink=st.floats(1.0, 10.0),
    reduces=st.booleans(),
    spare_cores=st.floats(0.0, 100.0),
)


@given(times=all_times, setting=settings)
def test_any_numbers_lead_to_shares_that_can_be_and_to_advice(times, setting):
    verdict = judge(times, setting)
    assert 0 <= verdict.lost_share <= 1
    assert verdict.advice
    assert verdict.reason
    assert (verdict.limit == "model") == (times.lost_share < NOTHING_LOST)
    won = [change.won_share for change in verdict.changes]
    assert won == sorted(won, reverse=True)
    assert all(0 < share <= 1 for share in won)
    assert len(format_verdict(verdict)) == 2
    assert all("\n" not in line for line in format_verdict(verdict))


@given(
    times=all_times, setting=settings, stage=st.sampled_from(["read_s", "decode_s", "augment_s", "batch_s"])
)
def test_no_stage_wins_more_than_it_takes(times, setting, stage):
    times = replace(times, step_s=times.ceiling_s)  # nobody slows it down
    won = won_if_free(times, setting, **{stage: 0.0})
    assert 0 <= won <= 1
    assert won * times.total_s <= getattr(times, stage) + 1e-9


@given(times=all_times, setting=settings)
def test_without_workers_all_is_done_in_turn_and_with_them_the_slower_line_sets_the_pace(times, setting):
    beside = times.step_s + times.handing_s
    assert pace_s(times, replace(setting, workers=0)) == pytest.approx(times.made_s + beside)
    many = replace(setting, workers=max(setting.workers, 1))
    assert pace_s(times, many) == max(supply_s(times, many), beside)


def test_a_step_that_never_waits_is_limited_by_the_model_and_nothing_can_be_won():
    verdict = judge(QUICK, TWO)
    assert (verdict.limit, verdict.lost_share, verdict.changes) == ("model", 0.0, ())
    assert "14.3 times as many" in verdict.reason
    assert "no change to the loader wins anything" in verdict.advice
    assert format_verdict(verdict)[0].startswith("verdict   the model limits, 0 % of each step is lost")


def test_a_little_waiting_is_the_model_still():
    assert judge(replace(QUICK, making_s=0.004), TWO).limit == "model"
    assert judge(replace(QUICK, making_s=0.006), TWO).limit == "decode"


@pytest.mark.parametrize(
    ("stage", "limit"),
    [
        ("read_s", "storage"),
        ("decode_s", "decode"),
        ("augment_s", "augment"),
        ("sources_s", "storage"),
        ("batch_s", "transport"),
    ],
)
def test_the_longest_stage_of_workers_that_are_waited_for_is_named(stage, limit):
    verdict = judge(slow(stage, 0.4), TWO)
    assert verdict.limit == limit
    assert verdict.lost_share > 0.9
    assert "steps wait for batches, which 2 workers make" in verdict.reason


def test_idle_cores_are_given_to_workers_as_many_as_the_step_can_use():
    first = judge(slow("decode_s", 0.1), TWO).changes[0]
    assert "take --workers 8: 6.0 cores are idle" in first.text
    # 104 ms in two workers; 8 of them bring one each 13 ms.
    assert first.won_share == pytest.approx(1 - 13 / 52, abs=0.01)
    assert "take --workers 3:" in judge(slow("decode_s", 0.1, step_s=0.04), TWO).advice


def test_no_more_workers_than_there_are_cores_for():
    verdict = judge(slow("decode_s", 0.1), replace(TWO, spare_cores=0.4))
    assert not any("--workers" in change.text for change in verdict.changes)
    assert "more cores" in verdict.advice
    # Who waits for a disk needs a fifth of a core.
    waiting = replace(slow("read_s", 0.1), cpu_share=0.2)
    assert "--workers 4" in str(judge(waiting, replace(TWO, spare_cores=0.4)).changes)


def test_the_main_process_that_does_all_itself_is_told_to_take_workers():
    times = replace(QUICK, making_s=QUICK.made_s, step_s=0.02, ceiling_s=0.02)
    verdict = judge(times, replace(TWO, workers=0))
    assert verdict.limit == "decode"
    assert "which the main process makes itself" in verdict.reason
    assert "take --workers 1:" in verdict.advice


@pytest.mark.parametrize(
    ("cache", "missed", "advice"),
    [
        ("off", None, "run make pack"),
        ("disk", 0.5, "take --cache ram"),
        (None, None, "take a faster store"),
    ],
)
def test_a_slow_store_is_replaced_by_the_next_faster_one(cache, missed, advice):
    setting = replace(TWO, cache=cache, missed_share=missed, spare_cores=0.0)
    verdict = judge(slow("read_s", 0.2), setting)
    assert verdict.limit == "storage"
    assert verdict.advice.startswith(advice)
    assert verdict.changes[0].won_share == pytest.approx(1 - 13 / 214, abs=0.1)


def test_a_pack_that_is_in_memory_is_not_blamed():
    warm = replace(TWO, cache="disk", missed_share=0.0)
    assert not any("--cache ram" in change.text for change in judge(slow("decode_s", 0.2), warm).changes)


def test_who_waits_for_a_disk_may_read_ahead():
    times = replace(slow("read_s", 0.2), cpu_share=0.1)
    found = judge(times, TWO).changes
    assert any("--readers" in change.text for change in found)
    assert not any("--readers" in change.text for change in judge(times, replace(TWO, readers=4)).changes)


def test_large_frames_are_decoded_at_a_fraction_or_made_smaller():
    full = replace(TWO, spare_cores=0.0)
    assert "--reduce" in judge(slow("decode_s", 0.2), replace(full, shrink=4.0)).advice
    assert "--short-side-px" in judge(slow("decode_s", 0.2), replace(full, shrink=1.7)).advice
    for fits in (replace(full, shrink=1.1), replace(full, shrink=4.0, reduces=True)):
        assert "more cores" in judge(slow("decode_s", 0.2), fits).advice


def test_a_heavy_transform_belongs_on_the_device():
    setting = replace(TWO, has_transform=True, spare_cores=0.0)
    assert "DeviceAugment" in judge(slow("augment_s", 0.4), setting).advice


def test_batches_that_are_made_and_late_are_transport():
    verdict = judge(replace(QUICK, transport_s=0.05), TWO)
    assert verdict.limit == "transport"
    assert "send less" in verdict.advice
    assert verdict.changes[0].won_share == pytest.approx(1 / 3)


def test_workers_that_are_fast_enough_and_uneven_get_more_ahead():
    verdict = judge(replace(QUICK, making_s=0.05), TWO)
    assert not is_behind(QUICK, TWO)
    assert "take --prefetch 4" in verdict.advice
    assert verdict.lost_share == pytest.approx(1 / 3)


def test_a_copy_that_is_waited_for_is_pinned_first():
    on_gpu = replace(TWO, is_cuda=True)
    times = replace(QUICK, handing_s=0.05, copy_s=0.05)
    assert judge(times, on_gpu).limit == "copy"
    assert "--pin" in judge(times, on_gpu).advice
    assert "send less" in judge(times, replace(on_gpu, pins=True)).advice
    assert judge(replace(times, copy_s=0.0, prepare_s=0.05), on_gpu).limit == "augment"


def test_workers_that_take_the_cores_from_the_step_are_too_many():
    times = replace(QUICK, step_s=0.2)
    verdict = judge(times, TWO)
    assert verdict.limit == "decode"
    assert "a step takes 100 % longer while batches are made beside it" in verdict.reason
    assert verdict.advice.startswith("take --workers 1:")
    # Two workers that decode nothing leave it most of what they took.
    assert won_if_free(times, TWO, decode_s=0.0) == pytest.approx(0.1 * 10 / 14 / 0.2)


def test_other_programs_are_named_before_the_loader_is_blamed_for_them():
    times = replace(QUICK, step_s=0.2)
    assert (
        "which had 1.5 cores, and measure again"
        in judge(times, replace(TWO, workers=1, other_cores=1.5)).advice
    )
    assert "measure again" not in str(judge(times, TWO).changes)
