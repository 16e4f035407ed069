"""What was read, added up over all processes that read from one store."""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

_TOKEN_BYTES = 16

_lock = threading.Lock()


def _renew_lock() -> None:
    """A thread that held the lock when a process was forked does not exist in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class StoreCounters(NamedTuple):
    """What a store has handed out since it was opened, in all processes that it was given to."""

    reads: int = 0
    """Calls of `read`: one for each clip."""
    frames: int = 0
    bytes: int = 0
    """Bytes of the JPEGs of those frames."""
    watched: int = 0
    """Frames of which it was looked up, before they were read, whether they were in memory."""
    resident: int = 0
    """Those of them that were."""

    @property
    def hit_rate(self) -> float | None:
        """Share of frames that were in memory when they were asked for; None where it was not watched."""
        return self.resident / self.watched if self.watched else None


_NUM_VALUES = len(StoreCounters._fields)
_SIZE_BYTES = _TOKEN_BYTES + 8 * _NUM_VALUES


class SharedCounters:
    """Counters in memory that forked children share, and that a pickled copy finds again.

    The memory has no name, so nothing is left when the last process is gone, even if it was
    killed. A copy opens it through the process that made it; where that process is gone (or the
    system has no such memory) the copy counts for itself. Exact: who adds holds a lock (2.7 us).
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("clipfeed-counters")
        os.write(descriptor, os.urandom(_TOKEN_BYTES) + bytes(8 * _NUM_VALUES))
        self._hold(descriptor, (os.getpid(), descriptor))

    def __reduce__(self) -> tuple[Callable[..., "SharedCounters"], tuple[int, int, bytes]]:
        return _attach, (*self._home, self._token)

    def add(self, counted: StoreCounters) -> None:
        """Count something more."""
        with _lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)  # other processes; threads are kept out above
            try:
                for place, value in enumerate(counted):
                    self._values[place] += value
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def read(self) -> StoreCounters:
        """The sums so far."""
        with _lock:
            return StoreCounters(*self._values)

    def _hold(self, descriptor: int, home: tuple[int, int]) -> None:
        """Map the memory. `home`: the process and its descriptor through which copies find it."""
        self._descriptor, self._home = descriptor, home
        weakref.finalize(self, os.close, descriptor)
        shared = memoryview(mmap.mmap(descriptor, _SIZE_BYTES))
        self._token = bytes(shared[:_TOKEN_BYTES])
        self._values = shared[_TOKEN_BYTES:].cast("q")


def _attach(process: int, number: int, token: bytes) -> SharedCounters:
    """The counters that a process made, or new ones where they cannot be reached."""
    try:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return SharedCounters()
    if not _is_ours(descriptor, token):
        os.close(descriptor)
        return SharedCounters()
    counters = SharedCounters.__new__(SharedCounters)
    counters._hold(descriptor, (process, number))
    return counters


def _is_ours(descriptor: int, token: bytes) -> bool:
    """Whether a descriptor leads to these counters; its number may stand for something else by now."""
    try:
        return os.fstat(descriptor).st_size == _SIZE_BYTES and os.pread(descriptor, _TOKEN_BYTES, 0) == token
    except OSError:
        return False
