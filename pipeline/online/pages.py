"""Pages of a mapped file: which are in memory, and asking for the others before they are touched."""

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.errors import StoreError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_GAP_BYTES = 32 << 10
"""Stretches nearer to each other than this are read as one: reading the gap costs less than a request."""
_SAMPLES = 1024
_SAMPLE_BYTES = 1 << 20

Extent = tuple[int, int]
"""First byte, and the one after the last."""


class MappedPages:
    """A mapped file, read by extents that the disk should get as one request each.

    Left alone, the first touch of a page that is not in memory reads the pages around it too: of
    a file on disk, a window of 90 kB took 930 us and read 1,333 kB. Asked for exactly
    (MADV_WILLNEED) and with that guess turned off (MADV_RANDOM) it takes 100 us and reads 91 kB.
    """

    def __init__(self, mapping: mmap.mmap, *, is_own: bool, is_memory: bool = False) -> None:
        """`is_own`: whether this user owns the file or may write it; only then does the system
        tell which of its pages are in memory. `is_memory`: whether it lies in a file system that is all
        memory, where there is nothing to ask for."""
        self.bytes = memoryview(mapping)
        self._address: int = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self._is_own, self._is_memory = is_own, is_memory
        mapping.madvise(mmap.MADV_RANDOM)

    def fetch(self, extents: Sequence[Extent]) -> tuple[int, int]:
        """Ask for what is not in memory, without waiting; (extents looked up, of these in memory).

        (0, 0) where the system does not tell. Costs 40 us where all is in memory, which is the system's time
        for looking up 62 pages.
        """
        if self._is_memory:
            return len(extents), len(extents)
        resident = 0
        for run in _runs(extents):
            first, end = run[0][0] // mmap.PAGESIZE, -(-max(end for _, end in run) // mmap.PAGESIZE)
            pages = self._resident(first, end) if self._is_own else b"\0"
            if 0 not in pages:
                resident += len(run)
                continue
            resident += sum(_is_within(extent, first, pages) for extent in run) if self._is_own else 0
            self._madvise(first, end, mmap.MADV_WILLNEED)
        return (len(extents), resident) if self._is_own else (0, 0)

    def resident_share(self) -> float | None:
        """Share of the file's pages that are in memory; None where the system does not tell.

        Exact up to 1 GB; of larger files 1,024 stretches of 1 MB are looked at, evenly spaced.
        """
        if not self._is_own:
            return None
        size = len(self.bytes)
        starts = range(0, size, max(_SAMPLE_BYTES, -(-size // _SAMPLES)))
        counts = [0, 0]
        for start in starts:
            end = min(start + _SAMPLE_BYTES, size)
            pages = self._resident(start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))
            counts[0] += len(pages) - pages.count(0)
            counts[1] += len(pages)
        return counts[0] / counts[1]

    def _resident(self, first: int, end: int) -> bytes:
        """For each page from `first` to before `end`: 0 where it is not in memory."""
        vector = np.empty(end - first, np.uint8)  # ctypes would make a type for each length, in 40 us
        address = self._address + first * mmap.PAGESIZE
        if _libc.mincore(address, (end - first) * mmap.PAGESIZE, vector.ctypes.data) != 0:
            raise StoreError(f"mincore failed: {os.strerror(ctypes.get_errno())}")
        return vector.tobytes()

    def _madvise(self, first: int, end: int, advice: int) -> None:
        """Through ctypes, which lets other threads run meanwhile, unlike the method of mmap."""
        _libc.madvise(self._address + first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE, advice)


def _runs(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Extents in ascending order, those near each other together."""
    run: list[Extent] = []
    reach = 0
    for extent in sorted(extents):
        if run and extent[0] - reach > _GAP_BYTES:
            yield run
            run = []
        run.append(extent)
        reach = max(reach, extent[1])
    if run:
        yield run


def _is_within(extent: Extent, first_page: int, pages: bytes) -> bool:
    start, end = extent[0] // mmap.PAGESIZE, -(-extent[1] // mmap.PAGESIZE)
    return 0 not in pages[start - first_page : end - first_page]
