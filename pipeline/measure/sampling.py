"""How busy cores, disks and the GPU are meanwhile: a thread that looks a few times a second."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import psutil

INTERVAL_S = 0.2
"""From one look to the next. One costs 0.1 ms on 2 cores, 1 ms on 100: under 1 % of one core."""

ReadGpu = Callable[[], float | None]
"""Share of the last moments in which the GPU was at work, in [0, 1]; None where it does not tell."""


class Sample(NamedTuple):
    """One look."""

    time_s: float
    """Since the first."""
    cores: tuple[float, ...]
    """Share of the time since the look before in which each core that this process may use was busy."""
    disk_bytes_per_s: float | None
    """Read from all disks of the machine, not from memory; None where the system does not tell."""
    gpu: float | None
    """Share of the time in which the GPU was at work; None where nobody tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What was used while something ran."""

    seconds: float
    samples: tuple[Sample, ...]
    own_cores: float
    """Cores' worth of time that this process and those it started took."""
    cost_s: float
    """Seconds of a core that looking took."""

    @property
    def cores(self) -> tuple[float, ...]:
        """Share of the time in which each core was busy, with whatever; empty where it was too short."""
        columns = zip(*(sample.cores for sample in self.samples), strict=True)
        return tuple(sum(column) / len(column) for column in columns)

    @property
    def disk_bytes_per_s(self) -> float | None:
        """The mean over the looks."""
        return _mean([sample.disk_bytes_per_s for sample in self.samples])

    @property
    def gpu(self) -> float | None:
        """The mean over the looks."""
        return _mean([sample.gpu for sample in self.samples])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class UseSampler:
    """Looks while its block runs: `with UseSampler() as sampler: ...; sampler.use()`."""

    def __init__(self, *, read_gpu: ReadGpu | None = None, interval_s: float = INTERVAL_S) -> None:
        self._read_gpu, self._interval_s = read_gpu, interval_s
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="clipfeed-use", daemon=True)
        self._cost_s = self._seconds = self._own_s = 0.0

    def __enter__(self) -> Self:
        self._begin, self._own_begin = time.monotonic(), read_own_cpu()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.monotonic() - self._begin
        self._own_s = _grown(self._own_begin, read_own_cpu())
        self._over.set()
        self._thread.join()

    def use(self) -> Use:
        """What was seen, after the block."""
        return Use(
            seconds=self._seconds,
            samples=tuple(self._samples),
            own_cores=self._own_s / max(self._seconds, 1e-9),
            cost_s=self._cost_s,
        )

    def _look_on(self) -> None:
        cores = [core for core in sorted(os.sched_getaffinity(0)) if core < (psutil.cpu_count() or 1)]
        psutil.cpu_percent(percpu=True)  # what the next call compares with
        before, disk = time.monotonic(), read_disk_bytes()
        while not self._over.wait(self._interval_s):
            shares = psutil.cpu_percent(percpu=True)
            now, disk_now = time.monotonic(), read_disk_bytes()
            rate = None if disk is None or disk_now is None else max(disk_now - disk, 0) / (now - before)
            busy = tuple(shares[core] / 100 for core in cores if core < len(shares))
            gpu = self._read_gpu() if self._read_gpu else None
            self._samples.append(Sample(now - self._begin, busy, rate, gpu))
            before, disk = now, disk_now
        self._cost_s = time.thread_time()


def read_disk_bytes() -> int | None:
    """Bytes read from all disks since the machine began; None where the system does not tell."""
    try:
        counters = psutil.disk_io_counters()
    except (OSError, RuntimeError, NotImplementedError):
        return None
    return None if counters is None else int(counters.read_bytes)


def read_own_cpu() -> dict[int, float]:
    """Seconds of a core that this process and each that it started have had, by process."""
    seconds: dict[int, float] = {}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
    return seconds


def _grown(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(max(seconds - before.get(process, 0.0), 0.0) for process, seconds in after.items())


def open_gpu(index: int) -> tuple[ReadGpu | None, str]:
    """What tells how busy torch's GPU of this number is, or None and why there is nothing."""
    try:
        import pynvml
    except ImportError:
        return None, "no NVML: pip install nvidia-ml-py (the extra `nvml`) shows how busy the GPU is"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(index))
    except pynvml.NVMLError as error:
        return None, f"NVML does not tell how busy the GPU is: {error}"

    def read() -> float | None:
        with suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        return None

    return read, ""


def _uuid(index: int) -> Any:
    """NVML numbers all GPUs, torch those that CUDA_VISIBLE_DEVICES leaves: their names agree."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
