"""Bytes fetched by threads before the decoders need them: two queues, for slow storage.

    refs of a batch -> readers (N threads: open, read, wait) -> fetched clips, bounded -> decoders

Readers hardly use the processor, they wait: for a network, or for a disk that turns. While a clip is
decoded the next ones arrive. Which clips there are, and in which order, is not touched.

Where nothing has to be waited for, handing clips from thread to thread costs 3 % (2 readers) to 14 % (8); so
whoever finds its reads quick makes them itself, until they are quick no more: `Pace`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Generic, TypeVar

import numpy as np

K = TypeVar("K")
V = TypeVar("V")

_WORTH_S = 1e-3
"""A read of at least so many seconds is worth another thread; of a pack in memory it takes 0.1 to 0.3 ms."""


class Pace:
    """Whether a process's reads keep one waiting: as those of the last batch did, at first yes."""

    def __init__(self) -> None:
        self.is_slow = True
        self._took_s: list[float] = []

    def timed(self, read: Callable[[K], V], key: K) -> V:
        """`read(key)`, and its time noted."""
        begin = time.perf_counter()
        value = read(key)
        self._took_s.append(time.perf_counter() - begin)
        return value

    def settle(self) -> None:
        """Judge by the median of what was noted since the last call."""
        if self._took_s:
            self.is_slow = median(self._took_s) >= _WORTH_S
            self._took_s.clear()


@contextmanager
def reading_ahead(
    pool: ThreadPoolExecutor, read: Callable[[K], V], keys: Sequence[K], *, ahead: int
) -> Iterator[list[Callable[[], V]]]:
    """For each key a function that gives `read(key)`, or raises what that raised; each may be called once.

    At most `ahead` keys beyond the furthest that was called for are read or lie ready, so memory is bounded
    and no order of calls can wait for itself. Leaving the block drops what was not begun.
    """
    fetched = _Fetched(pool, read, keys, ahead)
    try:
        yield [fetched.taker(place) for place in range(len(keys))]
    finally:
        fetched.drop()


class _Fetched(Generic[K, V]):
    """What the readers of one batch have, and have yet to get."""

    def __init__(
        self, pool: ThreadPoolExecutor, read: Callable[[K], V], keys: Sequence[K], ahead: int
    ) -> None:
        self._pool, self._read, self._keys, self._ahead = pool, read, keys, ahead
        self._lock = threading.Lock()
        self._futures: list[Future[V] | None] = []
        self._ask_for(ahead)

    def taker(self, place: int) -> Callable[[], V]:
        def take() -> V:
            self._ask_for(place + 1 + self._ahead)
            future, self._futures[place] = self._futures[place], None  # decoded, its bytes can go
            if future is None:
                raise ValueError(f"key {place} was taken before")
            return future.result()

        return take

    def _ask_for(self, count: int) -> None:
        """Have the first `count` keys read, in their order."""
        with self._lock:
            for key in self._keys[len(self._futures) : count]:
                self._futures.append(self._pool.submit(self._read, key))

    def drop(self) -> None:
        for future in self._futures:
            if future is not None:
                future.cancel()


class _Together(Generic[K, V]):
    """Keys that are read in groups, each when the first of its group is asked for."""

    def __init__(self, read: Callable[[K], V], keys: Sequence[K], size: int) -> None:
        self._read, self._keys, self._size = read, keys, size
        self._results: dict[int, V | Exception] = {}

    def taker(self, place: int) -> Callable[[], V]:
        def take() -> V:
            if place not in self._results:
                self._read_group(place)
            result = self._results.pop(place)  # decoded, its bytes can go
            if isinstance(result, Exception):
                raise result
            return result

        return take

    def _read_group(self, place: int) -> None:
        first = place - place % self._size
        for other in range(place, min(first + self._size, len(self._keys))):
            try:
                self._results[other] = self._read(self._keys[other])
            except Exception as error:  # raised when it is asked for: what comes before is not its concern
                self._results[other] = error


def reading_together(read: Callable[[K], V], keys: Sequence[K], *, size: int = 8) -> list[Callable[[], V]]:
    """For each key a function that gives `read(key)`, or raises what that raised; to be called in order, each
    once, by one thread. So many keys are read one directly after the other, and held.

    What is done once for each clip is slow behind 3 ms of decoding, which leave nothing of it in the
    processor's caches: to read and draw took 430 us for a clip of UCF101 singly, 250 eight at a time.
    """
    together = _Together(read, keys, size)
    return [together.taker(place) for place in range(len(keys))]


def touch(jpegs: Sequence[bytes | memoryview]) -> None:
    """Wait until all bytes are in memory. Views into a mapped file are not yet when they are handed out.

    The copy is thrown away: numpy makes it without the GIL, so that decoders go on while the disk turns.
    """
    for jpeg in jpegs:
        if isinstance(jpeg, memoryview):
            np.array(np.frombuffer(jpeg, np.uint8))
