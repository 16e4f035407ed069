"""What belongs to one process or thread, and is never handed on to another: memory to decode in, threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from pipeline.online.readahead import Pace


class Local:
    """A lock, memory and threads, each made where it is first asked for. A pickled copy begins empty."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pace = Pace()
        self._thread = threading.local()
        self._pools: dict[tuple[int, str], ThreadPoolExecutor] = {}

    def __reduce__(self) -> tuple[type["Local"], tuple[()]]:
        return Local, ()

    def scratch(self, size: int) -> np.ndarray:
        """uint8 (size,), this thread's own, good until it is asked for again."""
        buffer = getattr(self._thread, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._thread.buffer = np.empty(size, np.uint8)
        return cast(np.ndarray, buffer[:size])

    def pool(self, work: str, threads: int) -> ThreadPoolExecutor:
        """This process's threads for a kind of work; those of a parent do not exist in a fork."""
        place = os.getpid(), work
        if place not in self._pools:
            self._pools[place] = ThreadPoolExecutor(threads, thread_name_prefix=f"clipfeed-{work}")
        return self._pools[place]
