"""From what was measured to what limits training, what it costs, and the change that would win most.

Arithmetic alone. A run is seen as two lines that work at the same time: workers, which bring a batch every
`made_s / workers` seconds, and the step. The slower of the two sets the pace.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Stage = Literal["storage", "decode", "augment", "transport", "copy", "model"]

NOTHING_LOST = 0.05
"""A smaller share of a step that is lost is not worth a change, and is within what two runs differ by."""

_UNEVEN = 0.9
_SHRINKS = 1.25
_MANY_OTHERS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Mean seconds for one batch, which is one step, by where they are spent."""

    read_s: float
    """In a worker: bytes out of the store; also where decoding waited for them."""
    decode_s: float
    """In a worker."""
    augment_s: float
    """In a worker: resizing, and the user's own transform."""
    sources_s: float = 0.0
    """In a worker: what further sources offer of a clip."""
    batch_s: float
    """In a worker: all that remains, such as memory for the batch."""
    cpu_share: float = 1.0
    """Of a worker's time while it makes a batch, the share in which it had a core; in [0, 1]."""
    pin_s: float = 0.0
    """Into pinned memory, beside the step."""
    copy_s: float = 0.0
    """To the GPU, measured alone; 0 without one."""
    prepare_s: float = 0.0
    """To float, normalised and augmented on the device."""
    making_s: float = 0.0
    """Waited for a batch that was not made yet."""
    transport_s: float = 0.0
    """Waited for one that was made and not here yet: queues, opening its memory, pinning."""
    handing_s: float = 0.0
    """Waited for a batch that was here and not ready: copy and preparation."""
    step_s: float
    """The step itself, in the run."""
    ceiling_s: float
    """The same step on a batch that is kept on the device, with no workers."""

    @property
    def made_s(self) -> float:
        """A worker's time for a batch."""
        return self.read_s + self.decode_s + self.augment_s + self.sources_s + self.batch_s

    @property
    def waiting_s(self) -> float:
        """Of each step's time, what nothing was computed in."""
        return self.making_s + self.transport_s + self.handing_s

    @property
    def total_s(self) -> float:
        """From one step to the next."""
        return self.waiting_s + self.step_s

    @property
    def slowed_s(self) -> float:
        """How much longer the step took than without workers."""
        return max(self.step_s - self.ceiling_s, 0.0)

    @property
    def lost_share(self) -> float:
        """Share of each step's time that the same steps on a batch in memory do not need; in [0, 1)."""
        return max(1 - self.ceiling_s / self.total_s, 0.0) if self.total_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run was made with, as far as it can be changed."""

    batch_size: int
    workers: int
    threads: int = 1
    readers: int = 0
    """Threads of each worker that read ahead."""
    prefetch: int = 2
    """Batches that each worker makes ahead."""
    is_cuda: bool = False
    pins: bool = False
    cache: str | None = None
    """Where bytes came from: `ram`, `disk` (the pack), `off` (folders); None: another store."""
    missed_share: float | None = None
    """Share of the frames read that were not in memory; None where nobody watched."""
    has_transform: bool = False
    """Whether clips go through a transform of the user's own."""
    shrink: float = 1.0
    """How much larger, in pixels of a side, what is cut out of a frame is than the clip; about 1 at best."""
    reduces: bool = False
    """Whether pictures are decoded at a fraction where clips are so much smaller."""
    spare_cores: float = 0.0
    """Cores' worth of time that nobody used during the run and that this process may."""
    other_cores: float = 0.0
    """Cores' worth of time that other programs had meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something to do, and what it can win."""

    stage: Stage
    text: str
    """In words, with the option of `train` where there is one."""
    won_share: float
    """Share of each step's time that it wins at most; in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits, what that costs, and what to do."""

    limit: Stage
    lost_share: float
    """Share of each step's time that is lost to the loading of data; in [0, 1)."""
    reason: str
    """Why this stage, in words."""
    changes: tuple[Change, ...]
    """What would win something, the most first; may be empty."""
    advice: str
    """The next thing to do."""


def judge(times: StageTimes, setting: Setting) -> Verdict:
    """The verdict on a run.

    The model limits where less than `NOTHING_LOST` of a step is lost. Else the stage does that the most of
    the loss is due to: waiting for batches that are not made counts for the longest stage of a worker.
    """
    limit, reason = _find_limit(times, setting)
    if limit == "model":
        return Verdict(
            limit=limit,
            lost_share=times.lost_share,
            reason=reason,
            changes=(),
            advice="make the step itself faster, or leave it: no change to the loader wins anything",
        )
    found = sorted(_changes(times, setting), key=lambda change: -change.won_share)
    changes = tuple(change for change in found if change.won_share > NOTHING_LOST / 2)
    return Verdict(
        limit=limit,
        lost_share=times.lost_share,
        reason=reason,
        changes=changes,
        advice=_describe(changes[0]) if changes else _LAST_RESORT[limit],
    )


def format_verdict(verdict: Verdict) -> list[str]:
    """The verdict in two lines: what limits, and what to do next."""
    name = "the model" if verdict.limit == "model" else verdict.limit
    return [
        f"verdict   {name} limits, {100 * verdict.lost_share:.0f} % of each step is lost: {verdict.reason}",
        f"next      {verdict.advice}",
    ]


def won_if_free(times: StageTimes, setting: Setting, **then: float) -> float:
    """Share of each step's time that is won where some times become other ones; in [0, 1).

    Bounds are what this is for: `won_if_free(times, setting, decode_s=0.0)` is the most that any change to
    decoding can win.
    """
    return _won(times, setting, replace(times, **then), setting)


def supply_s(times: StageTimes, setting: Setting) -> float:
    """Seconds from one batch to the next that the workers are able to make."""
    return times.made_s / max(setting.workers, 1)


def pace_s(times: StageTimes, setting: Setting, *, stall_s: float = 0.0) -> float:
    """Seconds from one step to the next, by two lines at work at the same time; without workers, in turn.

    stall_s  what a step waits although workers are fast enough in the mean
    """
    beside = times.step_s + times.handing_s
    if setting.workers == 0:
        return beside + times.made_s
    return max(supply_s(times, setting), beside + stall_s)


def is_behind(times: StageTimes, setting: Setting) -> bool:
    """Whether making batches sets the pace."""
    return setting.workers == 0 or supply_s(times, setting) > _UNEVEN * (times.step_s + times.handing_s)


def _won(times: StageTimes, setting: Setting, then: StageTimes, changed: Setting) -> float:
    then = _relieved(times, then)

    def stall_s(one: StageTimes) -> float:
        # Where workers are behind, what was waited for them is their pace already.
        return 0.0 if is_behind(times, setting) else one.making_s + one.transport_s

    now, after = (pace_s(one, how, stall_s=stall_s(one)) for one, how in ((times, setting), (then, changed)))
    return max(now - after, 0.0) / max(now, times.total_s, 1e-9)


def _relieved(times: StageTimes, then: StageTimes) -> StageTimes:
    """A step that workers slow down is slowed less by workers that have less to do."""
    less = 1 - min(then.made_s / max(times.made_s, 1e-9), 1.0)
    return replace(then, step_s=then.step_s - then.slowed_s * less)


# What limits.


def _find_limit(times: StageTimes, setting: Setting) -> tuple[Stage, str]:
    if times.lost_share < NOTHING_LOST:
        faster = times.step_s / max(supply_s(times, setting), 1e-9)
        spare = f", and workers can bring {faster:.1f} times as many" if setting.workers else ""
        return "model", f"batches are there when the step wants them{spare}"
    causes = {
        "making": times.making_s,
        "transport": times.transport_s,
        "handing": times.handing_s,
        "slowed": times.slowed_s,
    }
    cause = max(causes, key=lambda name: causes[name])
    longest, seconds, doing = _longest(times)
    share = f"{100 * seconds / max(times.made_s, 1e-9):.0f} % of making one is {doing}"
    if cause == "making":
        return longest, f"steps wait for batches, which {_makers(setting)}, and {share}"
    if cause == "slowed":
        percent = 100 * times.slowed_s / max(times.ceiling_s, 1e-9)
        return longest, f"a step takes {percent:.0f} % longer while batches are made beside it, and {share}"
    if cause == "transport":
        return "transport", "batches are made, and steps wait for them to come over from the workers"
    if times.copy_s > times.prepare_s:
        return "copy", "batches are here, and steps wait for them to be copied to the GPU"
    return "augment", "batches are here, and steps wait for them to be made float and augmented on the device"


def _makers(setting: Setting) -> str:
    if not setting.workers:
        return "the main process makes itself"
    threads = f" of {setting.threads} threads" if setting.threads > 1 else ""
    return (
        f"one worker{threads} makes" if setting.workers == 1 else f"{setting.workers} workers{threads} make"
    )


def _longest(times: StageTimes) -> tuple[Stage, float, str]:
    """A worker's longest stage, its seconds, and what it does."""
    stages: list[tuple[Stage, float, str]] = [
        ("storage", times.read_s, "reading"),
        ("decode", times.decode_s, "decoding"),
        ("augment", times.augment_s, "augmenting"),
        ("storage", times.sources_s, "reading further sources"),
        ("transport", times.batch_s, "putting it together"),
    ]
    return max(stages, key=lambda stage: stage[1])


_LAST_RESORT: dict[Stage, str] = {
    "storage": "put the dataset on a faster disk, or into memory (make pack, then --cache ram)",
    "decode": "give it more cores, or smaller clips: all cores are in use",
    "augment": "augment on the device instead (--randaugment-ops, --brightness ...), or give it more cores",
    "transport": "send less: smaller clips, fewer extras; or --threads in place of workers",
    "copy": "send less: smaller clips, fewer extras",
}


# What would win.


def _changes(times: StageTimes, setting: Setting) -> Iterator[Change]:
    yield from _storage_changes(times, setting)
    yield from _worker_changes(times, setting)
    yield from _decode_changes(times, setting)
    if setting.has_transform:
        text = "do on the device what the transform does (DeviceAugment), or make it cheaper"
        yield Change(stage="augment", text=text, won_share=won_if_free(times, setting, augment_s=0.0))
    if not is_behind(times, setting):
        yield from _evening_changes(times, setting)
    if setting.other_cores > _MANY_OTHERS:
        won = won_if_free(times, setting, step_s=times.step_s - times.slowed_s)
        text = f"stop what else runs here, which had {setting.other_cores:.1f} cores, and measure again"
        yield Change(stage=_longest(times)[0], text=text, won_share=won)
    if setting.is_cuda and not setting.pins:
        won = won_if_free(times, setting, handing_s=0.0)
        yield Change(stage="copy", text="take --pin True: copies then run beside the step", won_share=won)


def _worker_changes(times: StageTimes, setting: Setting) -> Iterator[Change]:
    """More workers where there are cores for them, as many as the step can use."""
    stage = _longest(times)[0]
    needed = math.ceil(times.made_s / max(times.ceiling_s + times.handing_s, 1e-9))
    # One that waits for a disk half of its time needs half a core.
    room = int(setting.spare_cores / max(times.cpu_share * setting.threads, 0.05))
    workers = min(setting.workers + room, max(needed, 1))
    if workers > setting.workers:
        # What was waited for will be made meanwhile.
        won = _won(times, setting, times, replace(setting, workers=workers))
        text = (
            f"take --workers {workers}: {setting.spare_cores:.1f} cores are idle, more bring batches faster"
        )
        yield Change(stage=stage, text=text, won_share=won)
    if times.slowed_s > 0 and needed < setting.workers:
        won = won_if_free(times, setting, step_s=times.ceiling_s)
        text = f"take --workers {needed}: more of them only take cores from the step"
        yield Change(stage=stage, text=text, won_share=won)


def _storage_changes(times: StageTimes, setting: Setting) -> Iterator[Change]:
    won = won_if_free(times, setting, read_s=0.0)
    texts = {
        "off": "run make pack: one file in memory in place of a file for each frame",
        "disk": "take --cache ram: the pack in memory",
        None: "take a faster store, such as a PackStore in memory: open_store(cache='ram')",
    }
    is_warm = setting.cache == "disk" and setting.missed_share is not None and setting.missed_share < 0.01
    if setting.cache in texts and not is_warm:
        yield Change(stage="storage", text=texts[setting.cache], won_share=won)
    if not setting.readers and times.cpu_share < 0.9:  # who waits leaves a core to who reads ahead
        text = "take --readers 4: bytes are fetched while other clips are decoded"
        yield Change(stage="storage", text=text, won_share=won)


def _decode_changes(times: StageTimes, setting: Setting) -> Iterator[Change]:
    """Fewer pixels, where more are decoded than the clip has."""
    if setting.shrink >= 2 and not setting.reduces:
        won = won_if_free(times, setting, decode_s=times.decode_s / 2, augment_s=times.augment_s / 2)
        yield Change(
            stage="decode",
            text="take --reduce: pictures are decoded at half their size or less",
            won_share=won,
        )
    elif setting.shrink > _SHRINKS and not setting.reduces:
        factor = setting.shrink**-2
        won = won_if_free(
            times, setting, decode_s=times.decode_s * factor, augment_s=times.augment_s * factor
        )
        text = (
            "make smaller frames (--short-side-px of make frames): "
            f"what is cut out of them is {setting.shrink:.1f} times as wide as a clip"
        )
        yield Change(stage="decode", text=text, won_share=won)


def _evening_changes(times: StageTimes, setting: Setting) -> Iterator[Change]:
    """Workers are fast enough in the mean, and yet they were waited for."""
    total_s = max(times.total_s, 1e-9)
    text = f"take --prefetch {2 * setting.prefetch}: workers are fast enough, but batches come unevenly"
    yield Change(stage=_longest(times)[0], text=text, won_share=times.making_s / total_s)
    text = "send less from worker to parent: smaller clips, fewer extras, larger batches"
    yield Change(stage="transport", text=text, won_share=times.transport_s / total_s)


def _describe(change: Change) -> str:
    return f"{change.text}; wins at most {100 * change.won_share:.0f} % of each step's time"
