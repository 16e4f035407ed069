"""A timer for the user's own loop: what share of it is waiting for batches.

from pipeline.measure import timed
for batch in timed(prefetch(loader, "cuda")):
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from typing import Any, Generic, TypeVar, cast

import torch

from pipeline.measure.verdict import NOTHING_LOST
from pipeline.online.collate import ClipBatch
from pipeline.online.device import CountedBatches
from pipeline.timing import StepMarks, Timer, cuda_timer, wall_timer

Batch = TypeVar("Batch")
Report = Callable[[str], None]


def timed(batches: Iterable[Batch], *, every: int = 50, report: Report = print) -> "Timed[Batch]":
    """The same batches; after each `every` steps, and at the end, a line says how much was waiting.

    batches  a loader, `prefetch(loader, device)`, or anything that iterates
    every    steps from one line to the next
    report   gets each line; `logging.info` or tqdm's `write` do as well

    Waiting is what passes between the end of the loop's body and the next batch. Where torch uses a GPU
    by the second batch, both are the GPU's: its steps are only queued when the body ends, and by the
    host's clock its work would pass for waiting. Then each line waits for the GPU once, and the steps
    must be on the stream that is current in the loop.

    The first batch, for which workers are started, is counted apart. Put it outermost, around `prefetch`:
    inside, work of `prefetch` on batches passes for the step. `len` and a second epoch are those of
    `batches`; a loop that is left early says nothing of its last steps. ValueError for `every` below 1.
    """
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    if isinstance(batches, CountedBatches):
        return cast("Timed[Batch]", TimedLoader(cast(Any, batches), every, report))
    return Timed(batches, every, report)


class Timed(Generic[Batch]):
    """What `timed` gives."""

    def __init__(self, batches: Iterable[Batch], every: int, report: Report) -> None:
        self._batches, self._every, self._report = batches, every, report

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        return self._timed(self._batches)

    def _timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        begin = time.perf_counter()
        with ExitStack() as held:
            source = iter(batches)
            if hasattr(source, "close"):
                held.enter_context(closing(cast(Any, source)))  # as a loop over it would on leaving
            yield from _count_steps(source, begin, self._every, self._report)


class TimedLoader(Timed[ClipBatch]):
    """The same of a loader that counts what it delivers, for use inside `prefetch`."""

    def batches(self) -> Iterator[ClipBatch]:
        """Batches that are not counted yet."""
        return self._timed(cast(CountedBatches, self._batches).batches())

    def mark_delivered(self, batch: ClipBatch) -> None:
        """Count a batch."""
        cast(CountedBatches, self._batches).mark_delivered(batch)


def _count_steps(source: Iterator[Batch], begin: float, every: int, report: Report) -> Iterator[Batch]:
    marks: StepMarks | None = None
    first, steps = "", 0
    for batch in source:
        if marks is None:
            first = f"; the first batch came after {time.perf_counter() - begin:.1f} s"
            yield batch
            del batch
            marks, steps = StepMarks(_timer()), 1
            continue
        marks.begin()
        yield batch
        marks.end()
        steps += 1
        del batch  # nothing here holds on to it while the next one is made
        if len(marks) == every:
            report(_line(steps, marks.take()) + first)
            first = ""
    if marks is not None and len(marks):
        report(_line(steps, marks.take()) + first)


def _timer() -> Timer:
    return cuda_timer() if _uses_cuda() else wall_timer()


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _line(last: int, steps: list[tuple[float, float]]) -> str:
    """What steps came to, of which the last has this number from 1.

    >>> _line(4, [(0.0, 0.03), (0.0, 0.01)])
    'steps 3-4: 20.0 ms each, waiting 0 % (0.0 ms): the loader keeps up'
    """
    waited_s = sum(waited for waited, _ in steps) / len(steps)
    total_s = waited_s + sum(used for _, used in steps) / len(steps)
    share = waited_s / max(total_s, 1e-9)
    says = "the loader keeps up" if share < NOTHING_LOST else "`make profile` says what to change"
    return (
        f"steps {last - len(steps) + 1}-{last}: {1e3 * total_s:.1f} ms each, "
        f"waiting {100 * share:.0f} % ({1e3 * waited_s:.1f} ms): {says}"
    )
