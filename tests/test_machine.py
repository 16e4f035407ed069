"""What a machine has, read from planted files, a planted NVML, and this machine itself."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import joblib
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.measure import machine
from pipeline.measure.machine import (
    Cores,
    measure_jpeg,
    read_cores,
    read_cpu_model,
    read_cpu_quota,
    read_driver,
    read_jpeg_library,
    read_memory_size,
    read_open_files,
    read_package,
    read_packages,
    read_torch,
)

# As nvml.h declares them; -DSTATUS=n makes the first call fail, -DMEMORY=n that for the memory.
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return STATUS; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "535.104.05", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12020; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
static int devices[2];
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = devices + index; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    memory[0] = 80ull << 30; memory[1] = 70ull << 30; memory[2] = 10ull << 30; return MEMORY;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 9; *minor = (int *)device - devices; return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, device == devices ? "First" : "Second", length); return 0;
}
"""


def plant(root: Path, files: dict[str, str]) -> dict[str, Path]:
    """/proc and /sys/fs/cgroup with these files, as keyword arguments."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": root / "proc", "cgroups": root / "cgroup"}


@pytest.fixture
def fake_nvml(tmp_path):
    def build(*, status: int = 0, memory: int = 0) -> str:
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        (tmp_path / "nvml.c").write_text(NVML)
        library = tmp_path / f"libnvml-{status}-{memory}.so"
        options = ["-shared", "-fPIC", f"-DSTATUS={status}", f"-DMEMORY={memory}"]
        subprocess.run(["cc", *options, "-o", library, tmp_path / "nvml.c"], check=True)
        return str(library)

    return build


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/job/step\n", "cgroup/job/cpu.max": "400000 100000\n"}, 4.0),
        # The host's path, which is not there inside of the container.
        ({"proc/self/cgroup": "0::/docker/0123\n", "cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/\n",
                "cgroup/cpu/job/cpu.cfs_quota_us": "250000\n",
                "cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/cpu.max": "200000 100000\n",
                "cgroup/a/b/cpu.max": "300000 100000\n",
            },
            2.0,
        ),
    ],
)
def test_the_tightest_quota_of_either_version_counts(tmp_path, files, quota):
    assert read_cpu_quota(**plant(tmp_path, files)) == quota


def test_a_memory_limit_is_read_beside_the_machines_memory(tmp_path):
    meminfo = {"proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:    9000000 kB\n"}
    places = plant(tmp_path / "v2", meminfo | {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "4096\n"})
    size = read_memory_size(**places)
    assert (size.total, size.limit) == (16_000_000 * 1024, 4096)
    unlimited = {"proc/self/cgroup": "5:memory:/\n", "cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}"}
    assert read_memory_size(**plant(tmp_path / "v1", meminfo | unlimited)).limit is None


def test_this_machines_cores_and_memory_are_those_of_other_tools():
    cores = read_cores()
    assert (cores.seen, cores.granted) == (os.cpu_count(), joblib.cpu_count())
    assert cores.allowed == len(psutil.Process().cpu_affinity())
    assert read_memory_size().total == psutil.virtual_memory().total
    assert read_open_files().soft == int(subprocess.check_output(["bash", "-c", "ulimit -n"]))


def test_a_processor_that_tells_no_name_has_none(tmp_path):
    places = plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 50.00\n"})
    assert read_cpu_model(proc=places["proc"]) == ""
    (places["proc"] / "cpuinfo").write_text("model name\t: Fast One @ 3 GHz\n" * 2)
    assert read_cpu_model(proc=places["proc"]) == "Fast One @ 3 GHz"


@given(seen=st.integers(1, 256), allowed=st.integers(1, 256), quota=st.none() | st.floats(0.1, 300))
def test_usable_cores_are_never_more_than_any_of_the_limits(seen, allowed, quota):
    allowed = min(allowed, seen)
    cores = Cores(model="", seen=seen, allowed=allowed, quota=quota, granted=1)
    assert cores.usable == min(seen, allowed, math.inf if quota is None else quota)


def test_a_package_that_cannot_be_loaded_is_named_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_one.py").write_text("raise OSError('libGL.so.1: cannot open\\nand more')")
    assert read_package("Broken", "broken_one").error == "libGL.so.1: cannot open"
    assert "absent_one" in read_package("Absent", "absent_one").error


def test_every_package_that_is_needed_is_there_with_its_version():
    packages = {package.name: package for package in read_packages()}
    assert all(package.error is None for package in packages.values())
    import av

    assert packages["PyAV"].version == f"{av.__version__} (FFmpeg {av.ffmpeg_version_info})"


def test_the_facts_load_no_package_that_may_be_broken():
    code = "import sys, pipeline.measure.checks, pipeline.measure.machine; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(machine.MODULES.values()) & set(loaded.stdout.split())


def test_nvml_tells_of_driver_and_gpus(fake_nvml):
    driver = read_driver(fake_nvml())
    assert (driver.version, driver.cuda, driver.error) == ("535.104.05", (12, 2), None)
    assert [(gpu.name, gpu.capability) for gpu in driver.gpus] == [("First", (9, 0)), ("Second", (9, 1))]
    assert {(gpu.memory_bytes, gpu.free_bytes) for gpu in driver.gpus} == {(80 << 30, 70 << 30)}


def test_a_gpu_without_memory_of_its_own_is_still_a_gpu(fake_nvml):
    driver = read_driver(fake_nvml(memory=3))
    assert driver.error is None
    assert [gpu.memory_bytes for gpu in driver.gpus] == [None, None]


def test_nvml_that_says_no_is_quoted(fake_nvml):
    driver = read_driver(fake_nvml(status=18))
    assert (driver.error, driver.gpus) == ("Driver/library version mismatch", ())


def test_without_nvml_there_is_no_driver():
    assert read_driver("libno-such-thing.so.1") is None


def test_nvml_from_before_a_function_says_so(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "old.c").write_text(
        "int nvmlInit_v2(void) { return 0; } int nvmlShutdown(void) { return 0; }"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "old.so", tmp_path / "old.c"], check=True)
    assert "too old to know nvmlSystemGetCudaDriverVersion_v2" in read_driver(str(tmp_path / "old.so")).error


def test_torch_is_asked_what_it_was_built_for():
    import torch

    build = read_torch()
    assert build.cuda == torch.version.cuda
    assert len(build.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_the_jpeg_library_is_told_by_its_binary():
    assert read_jpeg_library().startswith("libjpeg-turbo 3.")


def test_simd_shows_in_the_time_and_its_absence_too(monkeypatch):
    import numpy as np

    from pipeline.jpeg import encode_jpeg
    from tests.videos import grey

    picture = np.full((240, 320, 3), grey(9), np.uint8)
    picture[::3] = 77
    jpeg = encode_jpeg(picture, quality=90, restart_mcus=4)
    speed = measure_jpeg(jpeg)
    assert speed.plain_seconds > 1.3 * speed.seconds
    monkeypatch.setenv("JSIMD_FORCENONE", "1")
    forced = measure_jpeg(jpeg)
    assert forced.plain_seconds < 1.3 * forced.seconds
