"""JPEGs into a folder, encoded beside the decoder where there are threads for it."""

import os
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import av.logging
import cv2
import numpy as np

from pipeline.errors import VideoError
from pipeline.jpeg import encode_jpeg

_CHUNK_BYTES = 1 << 20
"""Decoded frames that are handed to another thread at a time, at least one."""

_CHUNKS_AHEAD = 2
"""Chunks that wait for each thread that encodes; where it has as many, the one that decodes helps out."""


class _Job(NamedTuple):
    """One frame to be encoded and written."""

    path: str
    picture: Callable[[], np.ndarray]
    quality: int
    restart_mcus: int


class _Chunk:
    """Frames that a thread of the pool encodes, or this one where none has begun."""

    def __init__(self, jobs: list[_Job], future: "Future[list[tuple[int, int]]]") -> None:
        self.jobs = jobs
        self.future = future

    def take_back(self) -> None:
        """Encode here what no other thread has begun with."""
        if self.future.cancel():
            self.future = Future()
            self.future.set_result(_encode_all(self.jobs))


class JpegFolder:
    """JPEGs into a folder, in the order of the frames, whichever thread encodes them.

    Frames go to the other threads by the chunk, since waking a thread costs: frame by frame took 329 us of
    wall time a frame, four at a time 304, one thread alone 476 (320x240, the least of six rounds in turn).
    They go as they were decoded: a picture that is made where it is encoded lies in the cache of that
    core, and in the same memory each time (10 to 18 page faults a frame otherwise). At the end of a video
    the thread that decodes takes back what no other has begun with.
    Encoding straight from the decoder's planes would save an eighth (26 us to bring planes to JPEG's full
    range and 190 to encode them by simplejpeg, against 45 to BGR and 228 by OpenCV), but no well-kept wheel
    of libjpeg-turbo writes restart markers from planes.
    """

    def __init__(self, folder: Path, quality: int, threads: int, on_frame: Callable[[], None]) -> None:
        self.sizes: list[int] = []
        self.crc32: list[int] = []
        self._folder, self._quality = folder, quality
        self._threads = threads
        self._on_frame = on_frame
        self._pool: ThreadPoolExecutor | None = None
        self._chunk: list[_Job] = []
        self._pending: deque[_Chunk] = deque()

    def __enter__(self) -> "JpegFolder":
        self._pool = ThreadPoolExecutor(self._threads) if self._threads else None
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is under way; what waits its turn is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pending.clear()
        self._chunk.clear()

    def add(self, name: str, picture: Callable[[], np.ndarray], held_bytes: int, restart_mcus: int) -> None:
        """Encode and write one frame, now or soon; raises what went wrong with an earlier one.

        `picture` gives it, uint8 (H, W, 3), blue first, in the thread that encodes it, and holds
        `held_bytes` until then.
        """
        job = _Job(f"{self._folder}/{name}", picture, self._quality, restart_mcus)
        if self._pool is None:
            self._keep([_encode(job)])
            return
        self._chunk.append(job)
        if len(self._chunk) * held_bytes >= _CHUNK_BYTES:
            self._hand_over(self._pool)

    def finish(self) -> None:
        """Wait until all is written."""
        if self._pool is not None:
            self._hand_over(self._pool)
        for chunk in reversed(self._pending):  # the other threads begin at the other end
            chunk.take_back()
        while self._pending:
            self._keep(self._pending.popleft().future.result())

    def clear(self) -> None:
        """Begin anew."""
        self.sizes.clear()
        self.crc32.clear()
        for left in self._folder.iterdir():
            left.unlink()

    def _hand_over(self, pool: ThreadPoolExecutor) -> None:
        """The chunk to a thread that has too little to do, or encoded here."""
        jobs, self._chunk = self._chunk, []
        waiting = sum(not chunk.future.done() for chunk in self._pending)
        chunk = _Chunk(jobs, pool.submit(_encode_all, jobs))
        self._pending.append(chunk)
        if waiting > _CHUNKS_AHEAD * self._threads:
            chunk.take_back()
        while self._pending and self._pending[0].future.done():
            self._keep(self._pending.popleft().future.result())

    def _keep(self, stored: list[tuple[int, int]]) -> None:
        for size, crc32 in stored:
            self.sizes.append(size)
            self.crc32.append(crc32)
            self._on_frame()


def _encode_all(jobs: list[_Job]) -> list[tuple[int, int]]:
    """Encode and write some frames; the bytes of each and their CRC-32."""
    with av.logging.Capture():  # what the scaler says is not the video's fault, and not for the terminal
        return [_encode(job) for job in jobs]


def _encode(job: _Job) -> tuple[int, int]:
    try:
        data = encode_jpeg(job.picture(), quality=job.quality, restart_mcus=job.restart_mcus)
    except (ValueError, cv2.error) as error:
        raise VideoError("encode", str(error)) from error
    _write_file(job.path, data)
    return len(data), zlib.crc32(data)


def _write_file(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        written = os.write(descriptor, data)
        while written < len(data):  # a nearly full disk takes a part, and the next call says why
            written += os.write(descriptor, data[written:])
    finally:
        os.close(descriptor)
