"""A bar on a terminal, and nothing elsewhere: logs stay readable."""

import threading
import time
from typing import Never

from tqdm import tqdm


class VideoBar:
    """Videos done, frames per second, time left, and failures so far."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._bar: tqdm[Never] | None = None
        self._lock = threading.Lock()
        self._frames = 0
        self._failures = 0
        self._begin = 0.0

    def start(self, total: int) -> None:
        """Show the bar; `disable=None` is tqdm's own way to be quiet where there is no terminal."""
        self._begin = time.monotonic()
        self._bar = tqdm(total=total, desc=self._description, unit="video", disable=None, dynamic_ncols=True)

    def add_frames(self, count: int) -> None:
        """Count frames; called from several threads, and within a video, so that long ones move."""
        with self._lock:
            self._frames += count
            self._show()

    def add_video(self, *, failed: bool) -> None:
        """Count a video."""
        with self._lock:
            self._failures += failed
            if self._bar is not None:
                self._bar.update()
            self._show()

    def _show(self) -> None:
        if self._bar is not None and not self._bar.disable:
            rate = self._frames / max(time.monotonic() - self._begin, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} frames/s, {self._failures} failed")

    def stop(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
