"""What this machine and this dataset have, and what will hurt.

A `check_` function judges facts that it is given; `examine` reads them and asks all.
"""

import math
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from pipeline.errors import PipelineError
from pipeline.files import free_bytes
from pipeline.jpeg import encode_jpeg, jpeg_size
from pipeline.measure.checks import Area, Check, Verdict, split_advice
from pipeline.measure.disk import (
    RANDOM_BYTES,
    check_file_system,
    check_read_rates,
    check_space,
    measure_reads,
    read_file_system,
    read_space,
)
from pipeline.measure.inventory import Dataset, check_dataset, estimate_need, read_dataset
from pipeline.measure.machine import (
    Cores,
    Driver,
    Gpu,
    JpegSpeed,
    MemorySize,
    OpenFiles,
    TorchBuild,
    measure_jpeg,
    read_cores,
    read_driver,
    read_jpeg_library,
    read_memory_size,
    read_open_files,
    read_torch,
)
from pipeline.online.augment import AugmentSpec
from pipeline.online.loader import LoaderSpec, check_shared_memory
from pipeline.online.packfile import FRAMES_BIN, format_bytes
from pipeline.online.ram import RAM_ROOT, FreeMemory, free_memory
from pipeline.online.windows import WindowSpec


def examine(dataset: str, *, data: Path, manifests: Path) -> Iterator[Check]:
    """All checks but that of the packages, which have to be there to come here; each as soon as it is made.

    Takes about 1 s. What cannot be looked at on this machine is a warning that says why, and all the
    rest is looked at.
    """
    spec = LoaderSpec()
    yield from _guarded("machine", "cores", lambda: [check_cores(read_cores())])
    yield from _guarded("machine", "memory", lambda: [check_memory(read_memory_size(), free_memory())])
    yield from _guarded("machine", "/dev/shm", lambda: [check_shm(read_shm(), spec)])
    yield from _guarded("machine", "open files", lambda: [check_open_files(read_open_files(), spec)])
    found, unseen = _look_at_dataset(dataset, data, manifests)
    jpeg, speed = typical_jpeg(found), None
    try:
        speed = measure_jpeg(jpeg)
        yield check_jpeg(read_jpeg_library(), speed, jpeg_size(jpeg))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield _unseen("machine", "jpeg", error)
    yield from _guarded("machine", "cuda", lambda: check_gpus(read_torch(), read_driver()))
    yield from unseen
    if found is not None:
        yield from _guarded("disk", "disk", lambda: check_disk(found, speed))
        yield from _guarded("dataset", "dataset", lambda: check_dataset(found, _free_memory()))


def _look_at_dataset(name: str, data: Path, manifests: Path) -> tuple[Dataset | None, Sequence[Check]]:
    """The dataset, or else why not."""
    try:
        return read_dataset(name, data=data, manifests=manifests), ()
    except OSError as error:
        return None, [_unseen("dataset", "dataset", error)]


def _guarded(area: Area, name: str, look: Callable[[], Sequence[Check]]) -> Sequence[Check]:
    try:
        return look()
    except (OSError, PipelineError, LookupError, ValueError) as error:
        return [_unseen(area, name, error)]


def _free_memory() -> FreeMemory | None:
    with suppress(OSError, KeyError):
        return free_memory()
    return None


def _unseen(area: Area, name: str, error: Exception) -> Check:
    return Check(area=area, name=name, verdict="warning", found=f"cannot be looked at here: {error}")


def _say(name: str, verdict: Verdict, found: str, advice: str = "") -> Check:
    return Check(area="machine", name=name, verdict=verdict, found=found, advice=advice)


def check_gpus(build: TorchBuild, driver: Driver | None) -> list[Check]:
    """CUDA and its driver, then the GPUs."""
    return [check_cuda(build, driver), check_gpu(build, driver)]


_FIRST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The first driver of each major version of CUDA, by NVIDIA's table of minor version compatibility."""


def fits(cuda: str, driver: Driver) -> bool:
    """Whether a driver runs what was built for a version of CUDA: the same major version is enough."""
    return driver.cuda[0] >= int(cuda.partition(".")[0])


def check_cuda(build: TorchBuild, driver: Driver | None) -> Check:
    """Whether what torch was built for and the driver fit."""
    if build.cuda is None:
        return _check_without_cuda(driver)
    cudnn = f"cuDNN {build.cudnn}" if build.cudnn else "no cuDNN"
    found = f"torch is built for CUDA {build.cuda} with {cudnn}"
    if driver is None:
        return _check_without_nvml(build, found)
    if driver.error is not None:
        advice = "have `nvidia-smi` work again: after an update of the driver the machine wants a restart"
        return _say("cuda", "warning", f"{found}; NVML: {driver.error}", advice)
    found += f"; driver {driver.version} is for CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    # Where torch can use a GPU they fit whatever the numbers say, as with a forward compatibility package.
    if not build.gpus and not fits(build.cuda, driver):
        major = int(build.cuda.partition(".")[0])
        newer = f"{_FIRST_DRIVER[major]} or newer" if major in _FIRST_DRIVER else f"one for CUDA {major}"
        advice = f"update the driver to {newer}, or install a torch built for CUDA {driver.cuda[0]}"
        return _say("cuda", "error", f"{found}: too old", advice)
    if not build.cudnn:
        return _say("cuda", "warning", f"{found}; {build.problem}", "delete .venv, then make setup")
    return _say("cuda", "ok", found)


def _check_without_cuda(driver: Driver | None) -> Check:
    if driver is None or not driver.gpus:
        return _say("cuda", "ok", "torch is built without CUDA")
    advice = f"install a torch built for CUDA {driver.cuda[0]}.{driver.cuda[1]} or older"
    return _say("cuda", "warning", "torch is built without CUDA: it will not use the GPU", advice)


def _check_without_nvml(build: TorchBuild, found: str) -> Check:
    if not build.gpus:
        return _say("cuda", "ok", f"{found}; no NVIDIA driver here (no NVML)")
    found += "; no NVML, so nobody can tell how busy the GPU is"
    advice = "install libnvidia-ml; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return _say("cuda", "warning", found, advice)


def runs_on(capability: tuple[int, int], arches: Sequence[str]) -> bool:
    """Whether a GPU runs one of the architectures that kernels were compiled for.

    Machine code (sm) runs on the same major version from its minor one on, intermediate code (compute)
    on everything newer.

    >>> [runs_on(gpu, ["sm_75", "sm_80", "compute_90"]) for gpu in ((7, 0), (7, 5), (8, 6), (9, 0), (12, 0))]
    [False, True, True, True, True]
    """
    for arch in arches:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if parts is None:
            continue
        version = int(parts[2]), int(parts[3])
        is_near = capability[0] == version[0] and capability[1] >= version[1]
        if capability == version or (parts[4] != "a" and is_near):
            return True
        if parts[1] == "compute" and not parts[4] and capability >= version:
            return True
    return not arches


def check_gpu(build: TorchBuild, driver: Driver | None) -> Check:
    """Whether there is a GPU that torch can use, and what else is on it."""
    there = driver.gpus if driver else ()
    if not build.gpus:
        return _check_no_gpu(build, driver)
    foreign = [gpu for gpu in build.gpus if not runs_on(gpu.capability, build.arches)]
    if foreign:
        major, minor = foreign[0].capability
        found = (
            f"{_named(foreign)}: compute capability {major}.{minor}, torch is for {', '.join(build.arches)}"
        )
        return _say("gpu", "error", found, "install a torch that is built for this GPU")
    hidden = len(there) - len(build.gpus)
    found = _named(there or build.gpus) + (f"; {hidden} more than torch may use" if hidden > 0 else "")
    if any(gpu.memory_bytes and gpu.free_bytes and 2 * gpu.free_bytes < gpu.memory_bytes for gpu in there):
        return _say(
            "gpu", "warning", f"{found}: over half is taken", "see with `nvidia-smi` who else uses it"
        )
    return _say("gpu", "ok", found)


def _check_no_gpu(build: TorchBuild, driver: Driver | None) -> Check:
    if driver is None or not driver.gpus:
        advice = "train on a machine with an NVIDIA GPU; frames, manifest and pack need none"
        return _say("gpu", "warning", "none: training runs on the CPU, many times as long", advice)
    found = f"{_named(driver.gpus)}, not used by torch" + (f": {build.problem}" if build.problem else "")
    if build.cuda is None or not fits(build.cuda, driver):
        return _say("gpu", "warning", found, "see to `cuda` above")
    return _say("gpu", "error", found, "look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`")


def _named(gpus: Sequence[Gpu]) -> str:
    """GPUs in words; of equal ones, how many."""
    names: dict[str, int] = {}
    for gpu in gpus:
        size = "" if gpu.memory_bytes is None else f" of {format_bytes(gpu.memory_bytes)}"
        name = gpu.name + size + ("" if gpu.free_bytes is None else f", {format_bytes(gpu.free_bytes)} free")
        names[name] = names.get(name, 0) + 1
    return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())


def check_cores(cores: Cores) -> Check:
    """Whether there are enough cores to decode beside the training, and joblib knows how many."""
    quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:g}"
    found = f"{cores.seen} seen, {cores.allowed} allowed, {quota}; default workers: {cores.granted}"
    found += f" ({cores.model})" if cores.model else ""
    whole = max(math.ceil(cores.usable), 1)
    if cores.granted > whole:
        advice = f"set LOKY_MAX_CPU_COUNT={whole}, else more workers start than the quota lets run"
        return _say("cores", "warning", found, advice)
    if cores.usable < 2:
        advice = "get more (docker run --cpus, sbatch --cpus-per-task): decoding and training take turns"
        return _say("cores", "warning", found, advice)
    return _say("cores", "ok", found)


# A fork server with torch in it takes 0.6 GB once for all workers, 11 MB more each (2 workers on UCF101);
# the process that trains takes as much again, and its model.
_MEMORY_NEEDED = 1 << 30
_MEMORY_WANTED = 2 << 30


def check_memory(size: MemorySize, free: FreeMemory) -> Check:
    """Whether the trainer and its workers fit into memory."""
    left = free.available if free.cgroup is None else min(free.available, free.cgroup)
    limit = "" if size.limit is None else f", limited to {format_bytes(size.limit)} by the cgroup"
    found = f"{format_bytes(left)} free of {format_bytes(size.total)}{limit}"
    if left >= _MEMORY_WANTED:
        return _say("memory", "ok", found)
    found += f": the loader and the trainer take about {format_bytes(_MEMORY_WANTED)}"
    advice = "end what else takes memory, or raise the limit (docker run --memory)"
    return _say("memory", "error" if left < _MEMORY_NEEDED else "warning", found, advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Bytes of /dev/shm."""

    free: int
    total: int


def read_shm(root: Path = RAM_ROOT) -> SharedMemory | None:
    """Shared memory; None where there is none."""
    if not root.is_dir():
        return None
    return SharedMemory(free=free_bytes(root), total=read_space(root).total_bytes)


def check_shm(shm: SharedMemory | None, spec: LoaderSpec) -> Check:
    """Whether the batches that a loader has in flight fit into /dev/shm."""
    if shm is None:
        found = f"there is no {RAM_ROOT}: workers cannot hand over batches, and joblib runs one job at a time"
        advice = f"mount -t tmpfs tmpfs {RAM_ROOT}; till then train with workers=0"
        return _say("/dev/shm", "error", found, advice)
    clip_bytes = WindowSpec().frames * 3 * math.prod(AugmentSpec().size_hw)
    try:
        check_shared_memory(spec, clip_bytes, shm.free)
    except PipelineError as error:
        return _say("/dev/shm", "error", *split_advice(str(error)))
    loader = f"{spec.num_workers} workers x {spec.prefetch} batches of {spec.batch_size} clips"
    found = f"{format_bytes(shm.free)} free of {format_bytes(shm.total)}, enough for {loader}"
    return _say("/dev/shm", "ok", found)


def files_needed(spec: LoaderSpec) -> int:
    """Files that the process of a loader may have open at most.

    Counted: 14 before, 10 more with the first worker, 4 for each worker, and 6 for each batch that waits
    or is held, one for each of its tensors.
    """
    batches = spec.num_workers * spec.prefetch + 2
    return 40 + 4 * spec.num_workers + 6 * batches


def check_open_files(limit: OpenFiles, spec: LoaderSpec) -> Check:
    """Whether the limit on open files is enough for a loader, and the usual one."""
    needed, usual = files_needed(spec), 1024
    wanted = max(4096, 2 * needed)
    found = f"{limit.soft:,} at a time; with {spec.num_workers} workers a loader takes up to {needed:,}"
    if limit.soft >= max(needed, usual):
        return _say("open files", "ok", found)
    raised = f"have the hard limit raised (docker run --ulimit nofile={wanted})"
    advice = f"ulimit -n {wanted}" if limit.hard >= wanted else raised
    return _say("open files", "error" if limit.soft < needed else "warning", found, advice)


def typical_jpeg(dataset: Dataset | None) -> bytes:
    """A frame of the dataset; where there is none, one of 320x240 that is as hard to decode."""
    if dataset is not None:
        for key, frames in dataset.sample.folders.items():
            path = dataset.root / "frames" / key / (frames.frame_names() or [""])[0]
            if path.is_file():
                return path.read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    smooth = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 3.0), None, 0, 255, cv2.NORM_MINMAX)  # type: ignore[call-overload]
    return encode_jpeg(smooth, quality=90, restart_mcus=4)


def check_jpeg(library: str, speed: JpegSpeed, size_hw: tuple[int, int]) -> Check:
    """Whether the library that decodes JPEGs uses SIMD code, by the time that it takes with and without."""
    gain = speed.plain_seconds / speed.seconds
    height, width = size_hw
    found = f"{library}: {width}x{height} in {speed.seconds * 1e6:,.0f} us"
    if gain >= 1.3:
        return _say("jpeg", "ok", f"{found}, {gain:.1f} times as fast as without SIMD")
    found += ", no faster than without SIMD: it has none, or it is turned off"
    advice = "unset JSIMD_FORCENONE, else pip install --force-reinstall --only-binary :all: simplejpeg"
    return _say("jpeg", "warning", found, advice)


def check_disk(dataset: Dataset, speed: JpegSpeed | None) -> list[Check]:
    """File system, space and speed of the disk that a dataset's frames and pack lie on."""
    folder, pack = dataset.root / "frames", dataset.root / "pack" / FRAMES_BIN
    space = read_space(folder)
    need = estimate_need(dataset, block_bytes=space.block_bytes)
    checks = [check_file_system(read_file_system(folder)), check_space(space, need)]
    sample = dataset.sample
    frame_bytes = sample.num_bytes / sample.num_frames if sample.num_frames else RANDOM_BYTES
    try:
        rates = measure_reads(folder, pack)
    except (OSError, PipelineError) as error:
        return [*checks, _unseen("disk", "read speed", error)]
    return [*checks, check_read_rates(rates, frame_bytes, speed)]
