"""A process of its own for each decoder, so that what kills or hangs it costs one video.

joblib's own process pool gives up everything when one worker dies, and knows no time limit for a
task. Here whoever runs a task (a thread, or a process on another machine) watches over a child.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cv2

import pipeline
from pipeline.errors import VideoError
from pipeline.folder import FrameFolder
from pipeline.offline.frames import FrameSpec, extract_frames

_REPORT_EVERY_S = 0.2
_IDLE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is asked to do; all paths absolute."""

    video: Path
    folder: Path
    scratch: Path
    name: str
    spec: FrameSpec
    threads: int


@dataclass(frozen=True, slots=True)
class _Failed:
    stage: str
    message: str


@dataclass(frozen=True, slots=True)
class _Refused:
    """The system refused to write: a full disk, no permission. No video is to blame."""

    number: int
    reason: str
    path: str | None


class DecoderProcess:
    """A child that makes one video after the other into frames, started again whenever it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any]
        self._busy = threading.Lock()
        self._stopped = False

    def run(
        self, job: Job, *, time_limit_s: float | None, stall_limit_s: float, on_frames: Callable[[int], None]
    ) -> FrameFolder:
        """Do one job. `on_frames` is told, now and then, how many more frames are written.

        Raises VideoError for what is wrong with this video, the death of the child and the end of its
        time included; OSError where the system refuses to write.
        """
        with self._busy:
            try:
                connection = self._started()
                connection.send(job)
                return self._wait(connection, time_limit_s, stall_limit_s, on_frames)
            except (EOFError, ConnectionError) as error:
                raise VideoError("worker", self._cause_of_death()) from error

    def _started(self) -> "Connection[Any, Any]":
        if self._stopped:
            raise EOFError
        if self._process is not None:
            if self._process.poll() is None:
                return self._connection
            self._close()  # it was idle for long, and left
        ours, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        root = Path(pipeline.__file__).parents[1]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.offline.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                cwd=root,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._connection = Connection(ours.detach())
        return self._connection

    def _wait(
        self,
        connection: "Connection[Any, Any]",
        time_limit_s: float | None,
        stall_limit_s: float,
        on_frames: Callable[[int], None],
    ) -> FrameFolder:
        begin = heard = time.monotonic()
        while True:
            limit = heard + stall_limit_s
            if time_limit_s is not None:
                limit = min(limit, begin + time_limit_s)
            if not connection.poll(max(limit - time.monotonic(), 0)):
                self._close()
                if time_limit_s is not None and limit == begin + time_limit_s:
                    raise VideoError("worker", f"took longer than the time limit of {time_limit_s:g} s")
                raise VideoError("worker", f"hangs: no new frame for {stall_limit_s:g} s")
            answer = connection.recv()
            heard = time.monotonic()
            match answer:
                case int():
                    on_frames(answer)
                case _Failed(stage, message):
                    raise VideoError(stage, message)
                case _Refused(number, reason, path):
                    raise OSError(number, reason, path)
                case FrameFolder():
                    return answer

    def _cause_of_death(self) -> str:
        if self._process is None:
            return "stopped"
        code = self._process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._close()
        if code < 0:
            return f"the decoder died of {signal.Signals(-code).name}"
        return f"the decoder ended with status {code}: {last}"

    def _close(self) -> None:
        """Kill the child, if there is one; the next job starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._stderr.close()
            self._process = None

    def stop(self) -> None:
        """Kill the child for good, also from another thread: a job that runs there fails at once."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()
        with self._busy:
            self._close()


def _serve(connection: "Connection[Any, Any]") -> None:
    """The child: jobs in, frames written and answers out, until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted parent ends us by hanging up
    cv2.setNumThreads(1)
    jobs: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    while True:
        try:
            job = jobs.get(timeout=_IDLE_LIMIT_S)
        except queue.Empty:
            return
        connection.send(_do(job, connection))


def _receive(connection: "Connection[Any, Any]", jobs: "queue.Queue[Job]") -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # whoever asked is gone, perhaps killed: nothing may be put in place any more


def _do(job: Job, connection: "Connection[Any, Any]") -> FrameFolder | _Failed | _Refused:
    counter = _FrameCounter(connection)
    try:
        frames = extract_frames(
            job.video,
            job.folder,
            job.spec,
            name=job.name,
            scratch=job.scratch,
            threads=job.threads,
            on_frame=counter,
        )
    except VideoError as error:
        return _Failed(error.stage, error.message)
    except OSError as error:
        return _Refused(error.errno or 0, error.strerror or str(error), error.filename)
    except Exception as error:  # whatever a library raises on a strange file costs that file
        return _Failed("worker", f"{type(error).__name__}: {error}")
    counter.flush()
    return frames


class _FrameCounter:
    """Sends on how many frames were written, not more often than a person can read."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._count = 0
        self._next = time.monotonic() + _REPORT_EVERY_S

    def __call__(self) -> None:
        self._count += 1
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        self._connection.send(self._count)
        self._count = 0
        self._next = time.monotonic() + _REPORT_EVERY_S


if __name__ == "__main__":
    from pipeline.offline import worker  # so that answers are pickled by a name the parent knows

    worker._serve(Connection(int(sys.argv[1])))
