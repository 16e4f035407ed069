"""Many videos to folders of frames, in parallel: what is finished is kept, and one bad video is one row."""

import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import joblib
from joblib import Parallel, delayed

from pipeline.errors import PipelineError, VideoError
from pipeline.files import free_bytes
from pipeline.folder import FrameFolder
from pipeline.offline.failures import FailedVideo, clear_failure, read_failures, write_failure
from pipeline.offline.frames import SCRATCH, FrameSpec
from pipeline.offline.plan import Plan, Task, make_plan
from pipeline.offline.worker import DecoderProcess, Job

LOCK = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How a run goes; nothing here changes a pixel or a name."""

    jobs: int = -1
    """Videos at the same time, one process each; -1 for as many as there are cores to use."""
    threads: int | None = None
    """Threads in each process that encode while it decodes; None for one where cores are left over."""
    time_limit_s: float | None = None
    """Seconds that one video may take; None for as long as frames keep coming."""
    stall_limit_s: float = 120.0
    """Seconds that one video may go without a new frame before it counts as hanging."""

    def __post_init__(self) -> None:
        if self.jobs == 0 or self.jobs < -1:
            raise ValueError(f"jobs must be 1 or more, or -1 for all cores, got {self.jobs}")
        if self.threads is not None and self.threads < 0:
            raise ValueError(f"threads must be 0 or more, got {self.threads}")
        if self.stall_limit_s <= 0 or (self.time_limit_s is not None and self.time_limit_s <= 0):
            raise ValueError("limits of time must be more than 0 seconds")

    @property
    def encoders(self) -> int:
        """Threads that encode in each process."""
        if self.threads is not None:
            return self.threads
        return int(self.jobs != -1 and joblib.cpu_count() >= 2 * self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoDone:
    """What became of one video: its frames, or why it has none."""

    task: Task
    frames: FrameFolder | None
    failure: FailedVideo | None


@dataclass(kw_only=True)
class ExtractReport:
    """What a run made, kept and could not make."""

    made: list[VideoDone] = field(default_factory=list)
    """Videos that were decoded in this run, in the order of the videos."""
    kept: int = 0
    """Videos whose frames stood already."""
    failures: list[FailedVideo] = field(default_factory=list)
    partial: list[tuple[str, str]] = field(default_factory=list)
    """Videos that have frames, though not all is well, and why; those kept included."""
    num_frames: int = 0
    """Frames written in this run."""
    num_bytes: int = 0
    """Bytes of the JPEGs written in this run."""
    seconds: float = 0.0


def extract_all(
    videos: Sequence[str],
    videos_root: Path,
    frames_root: Path,
    spec: FrameSpec = FrameSpec(),
    run: RunSpec = RunSpec(),
    *,
    redo: Collection[str] = (),
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_frames: Callable[[int], None] = lambda count: None,
    on_video: Callable[[VideoDone], None] = lambda done: None,
) -> ExtractReport:
    """Decode what is new, changed or failed before; `videos` are paths below `videos_root`.

    Runs in processes of this machine; inside `joblib.parallel_config(backend="dask")` or `"ray"` on
    the machines of a cluster that share the file system. `on_plan` is called once, `on_frames` with
    each number of frames written (on this machine; from several threads), `on_video` after each video.

    Raises PipelineError where another run is at work in `frames_root`, where the disk is full, or
    where nothing may be written; what is finished then stays.
    """
    begin = time.monotonic()
    with _locked(frames_root):
        shutil.rmtree(frames_root / SCRATCH, ignore_errors=True)  # what a killed run has left
        failures = read_failures(frames_root)
        plan = make_plan(videos, videos_root, frames_root, spec, failures, redo=redo)
        on_plan(plan)
        report = _report_kept(plan)
        hooks = _Hooks(on_frames)
        calls = [
            delayed(_extract_one)(task, videos_root, frames_root, spec, run, hooks) for task in plan.tasks
        ]
        runner = Parallel(n_jobs=run.jobs, prefer="threads", batch_size=1, return_as="generator_unordered")
        try:
            for done in runner(calls) if calls else ():
                if isinstance(done, OSError):
                    raise _refusal(done, frames_root, report, len(plan.tasks)) from done
                _note(done, frames_root, report)
                on_video(done)
        finally:
            hooks.stop()
            shutil.rmtree(frames_root / SCRATCH, ignore_errors=True)
    order = {task.video: number for number, task in enumerate(plan.tasks)}
    report.made.sort(key=lambda done: order[done.task.video])
    report.failures.sort(key=lambda failed: failed.video)
    report.partial.sort()
    report.seconds = time.monotonic() - begin
    return report


@contextmanager
def _locked(frames_root: Path) -> Iterator[None]:
    """One run at a time in a root of frames; the system lets go when a run dies, however it dies."""
    frames_root.mkdir(parents=True, exist_ok=True)
    with (frames_root / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip()
            raise PipelineError(f"another run is at work in {frames_root} ({owner}): wait for it") from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


class _Hooks:
    """What a task tells the process that started the run; on another machine nobody listens."""

    def __init__(self, on_frames: Callable[[int], None] | None = None) -> None:
        self.on_frames = on_frames or (lambda count: None)
        self.stopped = threading.Event()
        self._workers: list[DecoderProcess] = []

    def __reduce__(self) -> tuple[type["_Hooks"], tuple[()]]:
        return _Hooks, ()

    def watch(self, worker: DecoderProcess) -> None:
        """Have a worker stopped when the run ends."""
        self._workers.append(worker)

    def stop(self) -> None:
        """End all that still runs."""
        self.stopped.set()
        for worker in self._workers:
            worker.stop()


_local = threading.local()


def _extract_one(
    task: Task, videos_root: Path, frames_root: Path, spec: FrameSpec, run: RunSpec, hooks: _Hooks
) -> VideoDone | OSError:
    """One task, in a thread or process of joblib's. An OSError is handed back: it ends the run."""
    if hooks.stopped.is_set():
        return InterruptedError(errno.EINTR, "stopped")
    job = Job(
        video=(videos_root / task.video).absolute(),
        folder=(frames_root / task.frames).absolute(),
        scratch=(frames_root / SCRATCH).absolute(),
        name=task.video,
        spec=spec,
        threads=run.encoders,
    )
    try:
        frames = _worker(hooks).run(
            job, time_limit_s=run.time_limit_s, stall_limit_s=run.stall_limit_s, on_frames=hooks.on_frames
        )
    except VideoError as error:
        return VideoDone(task=task, frames=None, failure=_failed(task, spec, error))
    except OSError as error:
        return error
    return VideoDone(task=task, frames=frames, failure=None)


def _worker(hooks: _Hooks) -> DecoderProcess:
    """This thread's own child, which lives as long as the run."""
    if getattr(_local, "hooks", None) is not hooks:
        _local.hooks, _local.worker = hooks, DecoderProcess()
        hooks.watch(_local.worker)
    worker: DecoderProcess = _local.worker
    return worker


def _failed(task: Task, spec: FrameSpec, error: VideoError) -> FailedVideo:
    return FailedVideo(
        video=task.video,
        frames=task.frames,
        stage=error.stage,
        error=error.message,
        spec=spec.as_json(),
    )


def _report_kept(plan: Plan) -> ExtractReport:
    report = ExtractReport(kept=len(plan.kept))
    report.partial = [(video, stands.error or "") for video, stands in plan.kept.items() if stands.error]
    return report


def _note(done: VideoDone, frames_root: Path, report: ExtractReport) -> None:
    """Keep the outcome on disk and in the report."""
    if done.failure is not None:
        # Frames of an older file or of other options must not pass for this video's.
        shutil.rmtree(frames_root / done.task.frames, ignore_errors=True)
        write_failure(frames_root, done.failure)
        report.failures.append(done.failure)
    elif done.frames is not None:
        clear_failure(frames_root, done.task.video)
        report.made.append(done)
        report.num_frames += done.frames.num_frames
        report.num_bytes += sum(done.frames.sizes)
        if done.frames.error:
            report.partial.append((done.task.video, done.frames.error))


def _refusal(error: OSError, frames_root: Path, report: ExtractReport, num_tasks: int) -> PipelineError:
    """The system's refusal as a line that says what to do."""
    kept = "what is finished is kept; run the same command again to go on"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needs = ""
        if report.made:
            left = (num_tasks - len(report.made)) * report.num_bytes / len(report.made)
            needs = f", about {left / 1e6:,.0f} MB more are needed"
        free = free_bytes(frames_root) / 1e6
        return PipelineError(f"disk full at {frames_root} ({free:,.0f} MB free{needs}); {kept}")
    place = error.filename or frames_root
    return PipelineError(f"cannot write to {place}: {error.strerror or error}; {kept}")
