"""Timers: what each stage of a worker's work takes, and how long a step waits and computes.

Wall-clock seconds are of `time.monotonic`, which is one clock for all processes of a machine.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple


class StageSum(NamedTuple):
    """What one stage took."""

    seconds: float = 0.0
    """By the clock, added up over threads."""
    cpu_s: float = 0.0
    """Seconds of those in which its thread had a core; the others it waited, for a disk or for a core."""
    entries: int = 0
    """Times that it was entered."""

    def plus(self, other: "StageSum") -> "StageSum":
        """Both together."""
        return StageSum(self.seconds + other.seconds, self.cpu_s + other.cpu_s, self.entries + other.entries)


class StageClock:
    """Adds up the time of stages by their names, in all threads of one process.

    `with clock("decode"): ...` counts; `take` gives the sums and begins anew. A copy in another process
    begins at nothing, so that what a worker took travels with the batch that it took it for, and no
    process ever waits for another. To enter and leave a stage costs some 2 us: `stage_cost_s`.

    >>> clock = StageClock()
    >>> with clock("read"):
    ...     pass
    >>> clock.take()["read"].entries, clock.take()
    (1, {})
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list[float]] = {}

    def __reduce__(self) -> tuple[type["StageClock"], tuple[()]]:
        return StageClock, ()

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """A block that is counted under this name."""
        return _Entered(self, name)

    def add(self, name: str, seconds: float, cpu_s: float) -> None:
        """Count one entry."""
        with self._lock:
            sums = self._sums.setdefault(name, [0.0, 0.0, 0])
            sums[0] += seconds
            sums[1] += cpu_s
            sums[2] += 1

    def take(self) -> dict[str, StageSum]:
        """The sums since this was last asked."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: StageSum(seconds, cpu_s, int(count)) for name, (seconds, cpu_s, count) in sums.items()}


class _Entered:
    """One stay in a stage."""

    __slots__ = ("_begin", "_clock", "_cpu", "_name")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._cpu, self._begin = time.thread_time(), time.monotonic()

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._begin
        self._clock.add(self._name, seconds, time.thread_time() - self._cpu)


def stage_cost_s(*, rounds: int = 5, entries: int = 200) -> float:
    """Seconds that it costs to enter and leave a stage, on this machine now: the best of some rounds."""
    clock, best = StageClock(), float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(entries):
            with clock("cost"):
                pass
        best = min(best, (time.perf_counter() - begin) / entries)
    return best


@dataclass(frozen=True, slots=True)
class Timer:
    """How moments are marked and compared."""

    mark: Callable[[], Any]
    """This moment; on a GPU, when it will have done what was queued so far."""
    seconds: Callable[[Any, Any], float]
    """From one mark to a later one, both over."""
    finish: Callable[[], None]
    """Wait until all marks are over."""


def wall_timer() -> Timer:
    """Of the host's clock."""
    return Timer(time.perf_counter, lambda begin, end: float(end - begin), lambda: None)


def cuda_timer(device: Any = None) -> Timer:
    """Of the GPU's own clock, on the stream that is current; to mark does not wait for the GPU.

    A step on a GPU is only queued when its last line is over, so that the host's clock would count the
    GPU's work as waiting for the next batch.
    """
    import torch  # the half that decodes must not load it

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1000

    return Timer(mark, seconds, lambda: torch.cuda.synchronize(device))


class StepMarks:
    """When steps began and ended, and so how long was waited between them."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self._marks = [(None, timer.mark())]
        self._begin: Any = None

    def __len__(self) -> int:
        return len(self._marks) - 1

    def begin(self) -> None:
        """A batch is there: its step begins."""
        self._begin = self.timer.mark()

    def end(self) -> None:
        """The step is done, or queued."""
        self._marks.append((self._begin, self.timer.mark()))

    def take(self) -> list[tuple[float, float]]:
        """Seconds waited before each step, and seconds of it; begins anew at the end of the last."""
        self.timer.finish()
        marks, self._marks = self._marks, self._marks[-1:]
        return [
            (self.timer.seconds(before, begin), self.timer.seconds(begin, end))
            for (_, before), (begin, end) in pairwise(marks)
        ]
