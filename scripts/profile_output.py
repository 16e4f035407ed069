"""What a profile shows: the table of its stages, what the machine did meanwhile, and the verdict."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from pipeline.measure.profiler import Profile
from pipeline.measure.verdict import format_verdict, won_if_free
from pipeline.online.packfile import format_bytes

_FEW_CORES = 16


class StageRow(NamedTuple):
    """One stage of one batch."""

    stage: str
    where: str
    seconds: float | None
    """Mean for a batch; None where there is no such stage."""
    beside: int = 1
    """How many do this at the same time."""
    won_share: float | None = None
    """Share of each step's time that is won at most where it costs nothing; None where that means nothing."""


def stage_rows(profile: Profile) -> list[StageRow]:
    """The stages in the order in which a batch goes through them."""
    times, setting = profile.times, profile.setting
    count = setting.workers
    makers = f"{count} worker{'s' * (count > 1)}" if count else "main process"

    def row(stage: str, where: str, name: str) -> StageRow:
        won = won_if_free(times, setting, **{name: 0.0})
        return StageRow(stage, where, getattr(times, name), max(count, 1), won)

    sources = [row("sources", makers, "sources_s")] if times.sources_s else []
    pins, is_cuda = setting.pins and count > 0, setting.is_cuda
    return [
        row("read", makers, "read_s"),
        row("decode", makers, "decode_s"),
        row("augment", makers, "augment_s"),
        *sources,
        row("batch", makers, "batch_s"),
        StageRow("queue", "to main process", max(times.transport_s - times.pin_s, 0.0) if count else None),
        StageRow("pin", "its thread", times.pin_s if pins else None),
        StageRow("copy", "to the GPU", times.copy_s if is_cuda else None),
        StageRow("prepare", "on the device", times.prepare_s),
        StageRow("step", "on the device", times.step_s),
        StageRow("waiting", "the step", times.waiting_s),
    ]


def format_title(profile: Profile) -> str:
    """The verdict in a few words."""
    verdict = profile.verdict
    name = "the model" if verdict.limit == "model" else verdict.limit
    return f"{name} limits, {100 * verdict.lost_share:.0f} % of each step is lost"


def format_profile(profile: Profile) -> Iterator[str]:
    """All but the verdict."""
    times = profile.times
    yield f"measured  {profile.steps} steps of {profile.setting.batch_size} clips; milliseconds for a batch"
    yield ""
    yield f"  {'stage':<8} {'where':<16} {'ms':>8}  {'of a step':>9}  wins at most"
    for row in stage_rows(profile):
        yield _format_row(row, times.total_s)
    yield ""
    yield (
        f"step      {1e3 * times.total_s:.1f} ms from one to the next, {profile.clips_per_s:,.0f} clips/s, "
        f"waiting {100 * times.waiting_s / times.total_s:.0f} %"
    )
    yield (
        f"ceiling   {1e3 * times.ceiling_s:.1f} ms on one batch kept in memory, "
        f"{profile.ceiling_clips_per_s:,.0f} clips/s"
    )
    yield from _format_use(profile)
    yield f"own cost  {100 * profile.own_cost_share:.1f} % of what was measured"
    for note in profile.notes:
        yield f"note      {note}"


def _format_row(row: StageRow, total_s: float) -> str:
    if row.seconds is None:
        return f"  {row.stage:<8} {row.where:<16} {'-':>8}"
    won = "" if row.won_share is None else f"{100 * row.won_share:>11.0f} %"
    share = 100 * row.seconds / row.beside / total_s
    return f"  {row.stage:<8} {row.where:<16} {1e3 * row.seconds:>8.1f}  {share:>7.0f} %{won}".rstrip()


def _format_use(profile: Profile) -> Iterator[str]:
    use = profile.use
    if use.cores:
        each = ", ".join(f"{100 * share:.0f}" for share in use.cores[:_FEW_CORES])
        more = ", ..." if len(use.cores) > _FEW_CORES else ""
        yield (
            f"cores     {sum(use.cores):.1f} of {len(use.cores)} busy ({each}{more} %), "
            f"{use.own_cores:.1f} of them with this run"
        )
    else:
        yield "cores     the run was too short to look at them: take more --steps"
    parts = []
    if use.disk_bytes_per_s is not None:
        parts.append(f"{format_bytes(int(use.disk_bytes_per_s))}/s read from disks by the whole machine")
    if profile.store_bytes_per_s is not None:
        parts.append(f"{format_bytes(int(profile.store_bytes_per_s))}/s of JPEGs out of the store")
    if parts:
        yield f"bytes     {', '.join(parts)}"
    if use.gpu is not None:
        yield f"gpu       busy {100 * use.gpu:.0f} % of the time"


def profile_json(profile: Profile) -> dict[str, Any]:
    """A profile for programs: seconds, shares in [0, 1]."""
    times = profile.times
    derived = {
        "made_s": times.made_s,
        "waiting_s": times.waiting_s,
        "total_s": times.total_s,
        "lost_share": times.lost_share,
    }
    return {
        "verdict": {**asdict(profile.verdict), "lines": format_verdict(profile.verdict)},
        "stages": [row._asdict() for row in stage_rows(profile)],
        "times": {**asdict(times), **derived},
        "setting": asdict(profile.setting),
        "steps": profile.steps,
        "clips_per_s": profile.clips_per_s,
        "ceiling_clips_per_s": profile.ceiling_clips_per_s,
        "store_bytes_per_s": profile.store_bytes_per_s,
        "own_cost_share": profile.own_cost_share,
        "use": {
            "cores": profile.use.cores,
            "own_cores": profile.use.own_cores,
            "disk_bytes_per_s": profile.use.disk_bytes_per_s,
            "gpu": profile.use.gpu,
            "samples": [sample._asdict() for sample in profile.use.samples],
        },
        "notes": profile.notes,
    }
