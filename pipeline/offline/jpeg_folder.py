"""JPEGs into a folder, encoded beside the decoder where there are threads for it."""

import os
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import av.logging
import cv2
import numpy as np

from pipeline.errors import VideoError
from pipeline.jpeg import encode_jpeg

_WAITING_BYTES = 4 << 20
"""Decoded frames that wait for each thread that encodes, at least two; more the decoding one takes itself."""
_AT_ONCE, _AT_ONCE_BYTES = 4, 1 << 20
"""Frames for which each step (decode, encode, write) is done before the next; fewer where they are large."""


class _Frame:
    """One frame on its way to its file; each step is one thread's."""

    __slots__ = ("crc32", "data", "error", "is_done", "path", "picture", "restart_mcus", "size")

    def __init__(self, path: str, picture: Callable[[], np.ndarray], restart_mcus: int) -> None:
        self.path = path
        self.picture: Callable[[], np.ndarray] | None = picture
        self.restart_mcus = restart_mcus
        self.data: bytes | None = None
        self.size = self.crc32 = 0
        self.error: Exception | None = None
        self.is_done = False
        """Whether the thread that encodes has done its part; set last."""

    def encode(self, quality: int) -> None:
        """Make the JPEG, and let go of what the decoder gave."""
        picture, self.picture = self.picture, None
        assert picture is not None
        try:
            self.data = encode_jpeg(picture(), quality=quality, restart_mcus=self.restart_mcus)
        except (ValueError, cv2.error) as error:
            raise VideoError("encode", str(error)) from error

    def write(self) -> None:
        """Write the JPEG, if that is not done yet, and let go of it."""
        data, self.data = self.data, None
        if data is not None:
            _write_file(self.path, data)
            self.size, self.crc32 = len(data), zlib.crc32(data)


class JpegFolder:
    """JPEGs into a folder, in the order of the frames, whichever thread encodes them.

    The thread that decodes does each step for some frames at a time, as tables and code then stay in its
    caches: 5 % less time where it does all (320x240).
    Frames wait for other threads as they were decoded: a picture that is made where it is encoded lies in
    the cache of that core, and in the same memory each time (10 to 18 page faults a frame otherwise). Where
    one thread encodes it does nothing else, and the one that decodes writes the files: so the two seldom wait
    for the interpreter's lock, 50 us each time on a virtual machine. Files written by the other thread took
    3 to 6 % longer. At the end of a video the thread that decodes encodes what is left, too.
    Encoding straight from the decoder's planes would save an eighth (26 us to bring planes to JPEG's full
    range and 190 to encode them by simplejpeg, against 45 to BGR and 228 by OpenCV), but no well-kept wheel
    of libjpeg-turbo writes restart markers from planes.
    """

    def __init__(self, folder: Path, quality: int, threads: int, on_frame: Callable[[], None]) -> None:
        self.sizes: list[int] = []
        self.crc32: list[int] = []
        self._folder, self._quality = folder, quality
        self._on_frame = on_frame
        self._count = threads
        self._threads: list[Thread] = []
        self._todo: SimpleQueue[_Frame | None] = SimpleQueue()
        """Frames that nobody has begun with; None ends a thread."""
        self._pending: deque[_Frame] = deque()
        """All frames that are not kept yet, in their order."""

    def __enter__(self) -> "JpegFolder":
        self._threads = [Thread(target=self._encode_beside, daemon=True) for _ in range(self._count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is under way; what waits its turn is dropped."""
        while self._next() is not None:
            pass
        self._end_threads()
        self._pending.clear()

    def add(self, name: str, picture: Callable[[], np.ndarray], held_bytes: int, restart_mcus: int) -> None:
        """Encode and write one frame, now or soon; raises what went wrong with an earlier one.

        `picture` gives it, uint8 (H, W, 3), blue first, in the thread that encodes it, and holds
        `held_bytes` until then.
        """
        frame = _Frame(f"{self._folder}/{name}", picture, restart_mcus)
        self._pending.append(frame)
        self._todo.put(frame)
        at_once = max(1, min(_AT_ONCE, _AT_ONCE_BYTES // held_bytes))
        waiting = len(self._threads) * max(2, _WAITING_BYTES // held_bytes)
        if self._todo.qsize() >= waiting + at_once:
            for _ in range(at_once):
                self._encode_next()
        self._keep_done(at_least=at_once)

    def finish(self) -> None:
        """Wait until all is written."""
        while self._encode_next():
            self._keep_done()
        self._end_threads()
        self._keep_done()

    def clear(self) -> None:
        """Begin anew."""
        self.sizes.clear()
        self.crc32.clear()
        for left in self._folder.iterdir():
            left.unlink()

    def _encode_beside(self) -> None:
        """The whole work of another thread."""
        with av.logging.Capture():  # what the scaler says is not the video's fault, and not for the terminal
            while (frame := self._todo.get()) is not None:
                try:
                    frame.encode(self._quality)
                    if self._count > 1:
                        frame.write()
                except Exception as error:
                    frame.error = error
                frame.is_done = True

    def _encode_next(self) -> bool:
        """Encode the frame that has waited longest; whether there was one."""
        frame = self._next()
        if frame is not None:
            self._encode(frame)
        return frame is not None

    def _next(self) -> _Frame | None:
        try:
            return self._todo.get_nowait()
        except Empty:
            return None

    def _encode(self, frame: _Frame) -> None:
        frame.encode(self._quality)
        frame.is_done = True

    def _keep_done(self, at_least: int = 1) -> None:
        """Write and count what is encoded, in the order of the frames, unless it is less than that."""
        if len(self._pending) < at_least or not self._pending[at_least - 1].is_done:
            return
        while self._pending and self._pending[0].is_done:
            frame = self._pending.popleft()
            if frame.error is not None:
                raise frame.error
            frame.write()
            self.sizes.append(frame.size)
            self.crc32.append(frame.crc32)
            self._on_frame()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def _write_file(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        written = os.write(descriptor, data)
        while written < len(data):  # a nearly full disk takes a part, and the next call says why
            written += os.write(descriptor, data[written:])
    finally:
        os.close(descriptor)
