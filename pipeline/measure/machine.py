"""What a machine has: packages, cores, memory, limits and GPUs, as the system grants them.

Facts alone; what to think of them `measure.doctor` says. torch and the like are imported by the functions
that ask about them, so that a package that is broken can be named.
"""

import ctypes
import importlib
import mmap
import os
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib

from pipeline.errors import PipelineError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 of cgroups writes "no limit" as a huge number


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A Python package that the pipeline stands on."""

    name: str
    version: str
    """Empty where it cannot be imported."""
    error: str | None
    """Why it cannot be imported; None where it can."""


MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "PyAV": "av",
    "OpenCV": "cv2",
    "simplejpeg": "simplejpeg",
    "pyarrow": "pyarrow",
}
"""Packages with native code, which may be there and yet not load, and the modules that they are."""


def read_package(name: str, module: str) -> Package:
    """Import a package, to see whether it can be."""
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # ImportError, OSError, RuntimeError: broken native code raises anything
        return Package(name=name, version="", error=str(error).partition("\n")[0] or repr(error))
    ffmpeg = getattr(loaded, "ffmpeg_version_info", None)
    return Package(
        name=name, version=loaded.__version__ + (f" (FFmpeg {ffmpeg})" if ffmpeg else ""), error=None
    )


def read_packages() -> list[Package]:
    """Each of `MODULES`; the first call loads them, which takes seconds."""
    return [read_package(name, module) for name, module in MODULES.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegSpeed:
    """Seconds to decode one JPEG, the best of many times."""

    seconds: float
    plain_seconds: float
    """With the library's SIMD code turned off."""


# libjpeg-turbo reads the variable when a process decodes for the first time, so each measurement is a fork
# that has not decoded yet. The two ways take turns: whatever else the machine does, it does to both.
_DECODE = """
import os, sys, time
import simplejpeg
data = sys.stdin.buffer.read()
for turn in range(6):
    if os.fork() == 0:
        if turn % 2:
            os.environ["JSIMD_FORCENONE"] = "1"
        end, best = time.perf_counter() + 0.03, 1e9
        while time.perf_counter() < end:
            begin = time.perf_counter()
            simplejpeg.decode_jpeg(data)
            best = min(best, time.perf_counter() - begin)
        print(turn % 2, best, flush=True)
        os._exit(0)
    os.wait()
"""


def measure_jpeg(jpeg: bytes) -> JpegSpeed:
    """How fast this machine decodes, with the library's SIMD code and without; takes 0.5 s."""
    run = subprocess.run(
        [sys.executable, "-c", _DECODE], input=jpeg, capture_output=True, timeout=30, check=True
    )
    turns = [line.split() for line in run.stdout.decode().splitlines()]
    return JpegSpeed(
        seconds=min(float(seconds) for is_plain, seconds in turns if is_plain == "0"),
        plain_seconds=min(float(seconds) for is_plain, seconds in turns if is_plain == "1"),
    )


def read_jpeg_library() -> str:
    """The library that simplejpeg carries, by the version that stands in its binary."""
    binary = importlib.import_module("simplejpeg._jpeg").__file__
    with Path(binary or "").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = re.search(rb"libjpeg-turbo version ([0-9.]+)", text)
        return f"libjpeg-turbo {found[1].decode()}" if found else "a libjpeg of the system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """How many cores there are, and how many of them are for this process."""

    model: str
    seen: int
    allowed: int
    """By the affinity of this process."""
    quota: float | None
    """By the tightest quota of its cgroups, in cores; None where there is none."""
    granted: int
    """What joblib makes of it: the number of workers that a loader begins with."""

    @property
    def usable(self) -> float:
        """Cores' worth of time that this process can really get."""
        return min(self.allowed, self.seen if self.quota is None else self.quota)


def read_cores(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Cores:
    """Cores seen, allowed and granted."""
    return Cores(
        model=read_cpu_model(proc=proc),
        seen=os.cpu_count() or 1,
        allowed=len(os.sched_getaffinity(0)),
        quota=read_cpu_quota(proc=proc, cgroups=cgroups),
        granted=joblib.cpu_count(),
    )


def read_cpu_model(*, proc: Path = PROC) -> str:
    """The processor's name as it gives it; empty where it gives none, as most ARM ones."""
    lines = (proc / "cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


def read_cpu_quota(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Cores that the tightest quota of this process's cgroups allows, such as 1.5; None without one."""
    quotas = [_quota_of(folder) for folder in _cgroup_folders("cpu", proc, cgroups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySize:
    """Bytes of memory."""

    total: int
    limit: int | None
    """The tightest limit of this process's cgroups; None where there is none."""


def read_memory_size(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> MemorySize:
    """How much memory the machine has, and how much of it this process may have at most."""
    fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    limits = [_limit_of(folder) for folder in _cgroup_folders("memory", proc, cgroups)]
    return MemorySize(
        total=int(fields["MemTotal"].split()[0]) * 1024,
        limit=min((limit for limit in limits if limit is not None), default=None),
    )


def _limit_of(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (folder / name).exists():
            limit = (folder / name).read_text().strip()
            return None if limit == "max" or int(limit) >= _UNLIMITED else int(limit)
    return None


def _cgroup_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """This process's cgroup and those above it, of both versions, that have a say in `controller`."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", controller) and controller not in controllers.split(","):
            continue
        # Inside a container the path may be the host's and not be there: then only `base` is.
        base = cgroups / controller if controllers else cgroups
        inner = base / path.strip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(base))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """How many files a process may have open at the same time."""

    soft: int
    """What holds now."""
    hard: int
    """How far a user may raise it."""


def read_open_files() -> OpenFiles:
    """The limits of this process, which its workers inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    huge = sys.maxsize  # RLIM_INFINITY is -1
    return OpenFiles(soft=soft if soft >= 0 else huge, hard=hard if hard >= 0 else huge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    memory_bytes: int | None
    """None where nobody tells, as of a GPU that has the machine's own memory."""
    free_bytes: int | None
    """Not taken by this or other processes; None where nobody tells."""
    capability: tuple[int, int]
    """Compute capability, which decides whose machine code it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """NVIDIA's driver, as its own library NVML tells."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it runs."""
    gpus: tuple[Gpu, ...]
    error: str | None = None
    """What NVML complains of; the rest is empty then. None where it works."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlError(PipelineError):
    """NVML is there and does not work."""


def read_driver(library: str = "libnvidia-ml.so.1") -> Driver | None:
    """Driver and GPUs by NVML, without torch; None where the library is not there, as without a driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    try:
        _call(nvml, "nvmlInit_v2")
        try:
            return _read_driver(nvml)
        finally:
            nvml.nvmlShutdown()
    except NvmlError as error:
        return Driver(version="", cuda=(0, 0), gpus=(), error=str(error))


def _read_driver(nvml: ctypes.CDLL) -> Driver:
    cuda = _number(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    gpus = [_read_gpu(nvml, index) for index in range(_number(nvml, "nvmlDeviceGetCount_v2"))]
    return Driver(
        version=_text(nvml, "nvmlSystemGetDriverVersion"),
        cuda=(cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(gpus),
    )


def _read_gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    total, free = _read_gpu_memory(nvml, device)
    return Gpu(
        name=_text(nvml, "nvmlDeviceGetName", device),
        memory_bytes=total,
        free_bytes=free,
        capability=(major.value, minor.value),
    )


def _read_gpu_memory(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int | None, int | None]:
    memory = _Memory()
    try:
        _call(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    except NvmlError:
        return None, None
    return memory.total, memory.free


def _number(nvml: ctypes.CDLL, function: str) -> int:
    value = ctypes.c_int()
    _call(nvml, function, ctypes.byref(value))
    return value.value


def _text(nvml: ctypes.CDLL, function: str, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(96)
    _call(nvml, function, *arguments, text, ctypes.c_uint(len(text)))
    return text.value.decode(errors="replace")


def _call(nvml: ctypes.CDLL, function: str, *arguments: Any) -> None:
    try:
        status = getattr(nvml, function)(*arguments)
    except AttributeError as error:
        raise NvmlError(f"the driver is too old to know {function}") from error
    if status != 0:
        explain = nvml.nvmlErrorString
        explain.restype = ctypes.c_char_p
        raise NvmlError(explain(status).decode(errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch was built for, and what it makes of this machine."""

    cuda: str | None
    """Version of CUDA, like `13.0`; None where it was built without."""
    cudnn: str | None
    arches: tuple[str, ...]
    """What its kernels were compiled for: `sm_90`, `compute_90`; empty where torch does not tell."""
    gpus: tuple[Gpu, ...]
    """Those that it can use."""
    problem: str | None
    """What it says about a GPU, cuDNN or driver that it cannot use."""


def read_torch() -> TorchBuild:
    """Ask torch; initialises CUDA where there is a GPU."""
    import torch

    problems: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # `device_count` counts by NVML, also what a driver that is too old cannot use.
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = _attempt(problems, lambda: [_torch_gpu(index) for index in range(num_gpus)])
        cudnn = _attempt(problems, torch.backends.cudnn.version)
        arches = _attempt(problems, torch.cuda.get_arch_list)
    problems += [str(warning.message).partition("\n")[0] for warning in said]
    return TorchBuild(
        cuda=torch.version.cuda,
        cudnn=_cudnn_version(cudnn) if cudnn else None,
        arches=tuple(arches or ()),
        gpus=tuple(gpus or ()),
        problem=problems[0] if problems else None,
    )


def _torch_gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        free_bytes=None,  # to ask torch would take some 400 MB of the GPU
        capability=(properties.major, properties.minor),
    )


def _attempt(problems: list[str], ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (RuntimeError, AssertionError) as error:
        problems.append(str(error).partition("\n")[0])
        return None


def _cudnn_version(number: int) -> str:
    """cuDNN's number in words; from version 9 on it has a digit more.

    >>> _cudnn_version(92400), _cudnn_version(8902)
    ('9.24.0', '8.9.2')
    """
    unit = 10_000 if number >= 90_000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
