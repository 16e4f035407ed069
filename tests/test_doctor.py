"""Each trouble is planted and leads to its line; the whole of it runs on this machine whatever is missing."""

import json
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.measure import doctor
from pipeline.measure.checks import Check, check_packages, conclude, format_check, next_step, split_advice
from pipeline.measure.doctor import (
    SharedMemory,
    check_cores,
    check_cuda,
    check_gpu,
    check_gpus,
    check_jpeg,
    check_memory,
    check_open_files,
    check_shm,
    examine,
    read_shm,
    runs_on,
    typical_jpeg,
)
from pipeline.measure.inventory import read_dataset
from pipeline.measure.machine import (
    Cores,
    Driver,
    Gpu,
    JpegSpeed,
    MemorySize,
    OpenFiles,
    Package,
    TorchBuild,
    read_cpu_quota,
)
from pipeline.online.loader import LoaderSpec
from pipeline.online.ram import FreeMemory
from scripts import doctor as script
from scripts import run
from tests.folders import LENGTHS, write_dataset, write_tiny_manifest

GB = 1_000_000_000
H200 = Gpu(name="NVIDIA H200", memory_bytes=150 * GB, free_bytes=149 * GB, capability=(9, 0))
CUDA = TorchBuild(cuda="13.0", cudnn="9.24.0", arches=("sm_75", "sm_90"), gpus=(H200,), problem=None)
BLIND = replace(CUDA, gpus=())
DRIVER = Driver(version="580.65.06", cuda=(13, 0), gpus=(H200,))
OLD = replace(DRIVER, version="535.104.05", cuda=(12, 2))
TWO = LoaderSpec(workers=2)


def verdicts(checks):
    return {check.name: check.verdict for check in checks}


def cores(**other):
    return Cores(**{"model": "", "seen": 16, "allowed": 16, "quota": None, "granted": 16, **other})


def memory(available, cgroup=None):
    return FreeMemory(available=available, cgroup=cgroup, shm=0)


def test_a_gpu_with_a_driver_that_fits_is_ok():
    assert verdicts(check_gpus(CUDA, DRIVER)) == {"cuda": "ok", "gpu": "ok"}
    assert "driver 580.65.06 is for CUDA 13.0" in check_cuda(CUDA, DRIVER).found
    assert check_gpu(CUDA, DRIVER).found == "NVIDIA H200 of 150.0 GB, 149.0 GB free"


def test_a_driver_too_old_for_the_build_is_an_error_that_names_the_driver_to_get():
    check = check_cuda(BLIND, OLD)
    assert check.verdict == "error"
    assert "CUDA 13.0" in check.found
    assert "535.104.05 is for CUDA 12.2: too old" in check.found
    assert check.advice == "update the driver to 580 or newer, or install a torch built for CUDA 12"
    assert check_gpu(BLIND, OLD).advice == "see to `cuda` above"


@pytest.mark.parametrize(
    ("cuda", "driver", "is_old"),
    [("12.8", (12, 2), False), ("12.1", (13, 0), False), ("11.8", (12, 2), False), ("12.1", (11, 8), True)],
)
def test_the_same_major_version_is_enough_for_a_driver(cuda, driver, is_old):
    check = check_cuda(replace(BLIND, cuda=cuda), replace(DRIVER, cuda=driver))
    assert (check.verdict == "error") == is_old


def test_what_torch_can_use_fits_whatever_the_numbers_say():
    assert check_cuda(CUDA, OLD).verdict == "ok"


def test_without_a_gpu_there_is_one_warning():
    assert verdicts(check_gpus(BLIND, None)) == {"cuda": "ok", "gpu": "warning"}
    assert "no NVML" in check_cuda(BLIND, None).found
    without = replace(BLIND, cuda=None, cudnn=None)
    assert verdicts(check_gpus(without, None)) == {"cuda": "ok", "gpu": "warning"}


def test_a_missing_nvml_beside_a_gpu_is_said():
    check = check_cuda(CUDA, None)
    assert check.verdict == "warning"
    assert "libnvidia-ml" in check.advice
    assert check_gpu(replace(CUDA, gpus=(replace(H200, free_bytes=None),)), None).verdict == "ok"


def test_what_nvml_complains_of_is_quoted():
    check = check_cuda(
        BLIND, Driver(version="", cuda=(0, 0), gpus=(), error="Driver/library version mismatch")
    )
    assert check.verdict == "warning"
    assert "Driver/library version mismatch" in check.found
    assert "restart" in check.advice


def test_a_torch_without_cuda_beside_a_gpu_is_said():
    build = replace(BLIND, cuda=None, cudnn=None)
    assert verdicts(check_gpus(build, OLD)) == {"cuda": "warning", "gpu": "warning"}
    assert "CUDA 12.2 or older" in check_cuda(build, OLD).advice


def test_a_gpu_that_torch_does_not_see_is_an_error_with_its_reason():
    check = check_gpu(replace(BLIND, problem="CUDA unknown error"), DRIVER)
    assert check.verdict == "error"
    assert "CUDA unknown error" in check.found
    assert "CUDA_VISIBLE_DEVICES" in check.advice


def test_a_gpu_that_the_build_has_no_code_for_is_an_error():
    old = replace(H200, name="Tesla V100", capability=(7, 0))
    check = check_gpu(replace(CUDA, gpus=(old,)), replace(DRIVER, gpus=(old,)))
    assert check.verdict == "error"
    assert "compute capability 7.0, torch is for sm_75, sm_90" in check.found


@pytest.mark.parametrize(
    ("capability", "arches", "runs"),
    [
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("sm_100f",), False),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_89",), False),
        ((12, 0), ("sm_80", "compute_90"), True),
        ((7, 5), ("compute_80",), False),
        ((9, 0), (), True),
        ((9, 0), ("gfx90a",), False),
    ],
)
def test_machine_code_runs_within_a_major_version_and_intermediate_code_beyond(capability, arches, runs):
    assert runs_on(capability, arches) == runs


def test_a_gpu_that_others_use_is_said_and_equal_gpus_are_counted():
    busy = replace(H200, free_bytes=20 * GB)
    assert check_gpu(CUDA, replace(DRIVER, gpus=(busy,))).verdict == "warning"
    four = replace(DRIVER, gpus=(H200,) * 4)
    found = check_gpu(CUDA, four).found
    assert found == "4 x NVIDIA H200 of 150.0 GB, 149.0 GB free; 3 more than torch may use"


def test_cudnn_that_does_not_load_is_said():
    check = check_cuda(replace(CUDA, cudnn=None, problem="cuDNN version incompatibility"), DRIVER)
    assert check.verdict == "warning"
    assert "cuDNN version incompatibility" in check.found


@pytest.mark.parametrize(
    ("found", "verdict", "advice"),
    [
        (cores(), "ok", ""),
        (cores(seen=1, allowed=1, granted=1), "warning", "docker run --cpus"),
        (cores(allowed=1, granted=1), "warning", "docker run --cpus"),
        (cores(quota=1.5, granted=2), "warning", "docker run --cpus"),
        (cores(quota=1.5, granted=16), "warning", "LOKY_MAX_CPU_COUNT=2"),
        (cores(quota=4.0, granted=4), "ok", ""),
        (cores(quota=0.2, granted=1), "warning", "docker run --cpus"),
        (cores(granted=2), "ok", ""),
    ],
)
def test_few_cores_are_said_and_a_quota_that_joblib_does_not_see(found, verdict, advice):
    check = check_cores(found)
    assert check.verdict == verdict
    assert advice in check.advice


def test_a_quota_in_the_cgroup_reaches_the_line(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    quota = read_cpu_quota(proc=tmp_path, cgroups=tmp_path)
    check = check_cores(cores(quota=quota, granted=2))
    assert check.found == "16 seen, 16 allowed, a quota of 1.5; default workers: 2"


@pytest.mark.parametrize(
    ("size", "free", "verdict", "says"),
    [
        (MemorySize(total=16 * GB, limit=None), memory(12 * GB), "ok", "12.0 GB free of 16.0 GB"),
        (MemorySize(total=16 * GB, limit=4 * GB), memory(12 * GB, 3 * GB), "ok", "limited to 4.0 GB"),
        (MemorySize(total=16 * GB, limit=4 * GB), memory(12 * GB, 2 * GB), "warning", "2.0 GB free"),
        (MemorySize(total=16 * GB, limit=None), memory(GB), "error", "1.0 GB free"),
    ],
)
def test_little_memory_is_said_by_the_tighter_of_machine_and_cgroup(size, free, verdict, says):
    check = check_memory(size, free)
    assert check.verdict == verdict
    assert says in check.found


def test_a_small_shm_is_an_error_with_the_sum():
    check = check_shm(SharedMemory(free=64_000_000, total=64_000_000), TWO)
    assert check.verdict == "error"
    assert "64.0 MB free and 6 batches in flight need 115.6 MB" in check.found
    assert check.advice.startswith("take ")
    assert "--shm-size" in check.advice


def test_a_shm_that_is_large_enough_is_ok():
    assert check_shm(SharedMemory(free=GB, total=GB), TWO).verdict == "ok"


def test_a_machine_without_shm_is_told_how_to_get_one(tmp_path):
    check = check_shm(read_shm(tmp_path / "shm"), TWO)
    assert check.verdict == "error"
    assert "mount -t tmpfs" in check.advice
    assert "workers=0" in check.advice


@pytest.mark.parametrize(
    ("limit", "workers", "verdict", "advice"),
    [
        (OpenFiles(soft=20_000, hard=20_000), 2, "ok", ""),
        (OpenFiles(soft=1024, hard=1024), 2, "ok", ""),
        (OpenFiles(soft=256, hard=1 << 20), 2, "warning", "ulimit -n 4096"),
        (OpenFiles(soft=256, hard=256), 32, "error", "have the hard limit raised"),
        (OpenFiles(soft=1024, hard=1 << 20), 128, "error", "ulimit -n"),
    ],
)
def test_a_low_limit_on_open_files_is_said(limit, workers, verdict, advice):
    check = check_open_files(limit, LoaderSpec(workers=workers))
    assert check.verdict == verdict
    assert check.advice.startswith(advice)


def test_a_jpeg_library_without_simd_is_said():
    fast, slow = JpegSpeed(seconds=2e-4, plain_seconds=4e-4), JpegSpeed(seconds=4e-4, plain_seconds=4e-4)
    assert check_jpeg("libjpeg-turbo 3.1.2", fast, (240, 320)).found == (
        "libjpeg-turbo 3.1.2: 320x240 in 200 us, 2.0 times as fast as without SIMD"
    )
    check = check_jpeg("libjpeg-turbo 3.1.2", slow, (240, 320))
    assert check.verdict == "warning"
    assert "JSIMD_FORCENONE" in check.advice


def test_the_jpeg_that_is_timed_is_one_of_the_datasets_own(tmp_path):
    write_dataset(tmp_path)
    found = read_dataset("tiny", data=tmp_path, manifests=tmp_path)
    first = min((tmp_path / "tiny" / "frames" / "A" / "one").glob("*.jpg"))
    assert typical_jpeg(found) == first.read_bytes()
    nothing = read_dataset("none", data=tmp_path, manifests=tmp_path)
    assert 10_000 < len(typical_jpeg(nothing)) < 40_000


def test_a_broken_package_is_an_error_and_the_others_are_listed():
    packages = [
        Package(name="torch", version="2.14.1", error=None),
        Package(name="OpenCV", version="", error="libGL.so.1: cannot open shared object file"),
    ]
    broken, listed = check_packages(packages)
    assert broken.verdict == "error"
    assert "OpenCV cannot be imported: libGL.so.1" in broken.found
    assert "make setup" in broken.advice
    assert listed.found.startswith("Python 3.")
    assert listed.found.endswith("torch 2.14.1")


def check(area, verdict, name="x", advice="do it"):
    return Check(area=area, name=name, verdict=verdict, found="found", advice=advice)


def test_errors_of_the_machine_come_first_and_warnings_of_the_dataset():
    machine, disk, dataset = (check(area, "warning", area) for area in ("machine", "disk", "dataset"))
    assert next_step([machine, disk, dataset]) == dataset
    errors = [replace(each, verdict="error") for each in (dataset, disk, machine)]
    assert next_step([machine, *errors]) == errors[-1]
    assert next_step([check("machine", "ok")]) is None


areas, kinds = st.sampled_from(["machine", "disk", "dataset"]), st.sampled_from(["ok", "warning", "error"])


@given(st.lists(st.builds(check, areas, kinds), max_size=12))
def test_the_verdict_counts_what_is_not_ok_and_never_passes_over_an_error(checks):
    text = conclude(checks, otherwise="make train")
    errors, warnings = (sum(each.verdict == kind for each in checks) for kind in ("error", "warning"))
    assert (f"{errors} error" in text) == (errors > 0)
    assert (f"{warnings} warning" in text) == (warnings > 0)
    assert text.endswith("next: make train") == (errors + warnings == 0)
    if errors:
        assert next_step(checks).verdict == "error"


def test_a_line_stays_one_line_whatever_a_file_is_called():
    line = format_check(check("disk", "error", advice="rm 'a\nb\x1b[31m'"))
    assert line == "x            error    found -> rm 'a b [31m'"


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("pack is stale (A): run `make pack DATASET=a`", ("pack is stale (A)", "make pack DATASET=a")),
        (
            "shm is small: 1 x 2; take prefetch=1, or enlarge it",
            ("shm is small: 1 x 2", "take prefetch=1, or enlarge it"),
        ),
        ("nothing: to do", ("nothing: to do", "")),
    ],
)
def test_the_advice_in_an_error_is_told_from_what_was_found(message, parts):
    assert split_advice(message) == parts


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A dataset that is ready, on a machine where measuring takes no time."""
    write_dataset(tmp_path / "data")
    write_tiny_manifest(tmp_path / "manifests" / "tiny.parquet", LENGTHS)
    monkeypatch.setattr(doctor, "measure_jpeg", lambda jpeg: JpegSpeed(seconds=1e-4, plain_seconds=3e-4))
    return tmp_path


def command(project, *args):
    places = ["--data", str(project / "data"), "--manifests", str(project / "manifests")]
    with pytest.raises(SystemExit) as end:
        run(script.main, [*places, *args])
    return end.value.code


def test_the_command_prints_a_line_for_each_check_and_a_verdict(project, capsys):
    status = command(project, "--dataset", "tiny", "--json", str(project / "doctor.json"))
    lines = capsys.readouterr().out.splitlines()
    report = json.loads((project / "doctor.json").read_text())
    assert len(lines) == len(report["checks"]) + 1
    assert lines[-1] == report["verdict"]
    assert {line[13:20].strip() for line in lines[:-1]} <= {"ok", "warning", "error"}
    names = [each["name"] for each in report["checks"]]
    assert names == [
        *("packages", "cores", "memory", "/dev/shm", "open files", "jpeg", "cuda", "gpu"),
        *("file system", "space", "read speed", "videos", "frames", "manifest", "pack"),
    ]
    assert {each["verdict"] for each in report["checks"] if each["area"] == "dataset"} == {"ok"}
    assert status == (1 if report["errors"] else 0)


def test_the_command_exits_with_1_where_there_is_an_error_and_names_the_remedy(project, capsys):
    write_tiny_manifest(project / "manifests" / "tiny.parquet", {**LENGTHS, "A/one": 3})
    assert command(project, "--dataset", "tiny") == 1
    assert "next for pack: make pack DATASET=tiny" in capsys.readouterr().out.splitlines()[-1]


def test_a_name_that_is_no_folders_name_is_a_mistake_in_use(project, capsys):
    for name in ("../data", "", "a/b"):
        assert command(project, "--dataset", name) == 2
    assert "no dataset is named 'a/b'" in capsys.readouterr().err


def test_with_a_broken_package_the_command_names_it_and_ends(project, capsys, monkeypatch):
    broken = [Package(name="torch", version="", error="libcudart.so.13: cannot open")]
    monkeypatch.setattr(script, "read_packages", lambda: broken)
    assert command(project, "--dataset", "tiny") == 1
    out = capsys.readouterr().out
    assert "torch cannot be imported: libcudart.so.13" in out
    assert out.splitlines()[-1].startswith("1 error; next for packages: delete .venv")


def test_whatever_cannot_be_looked_at_is_said_and_the_rest_is_looked_at(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(13, "Permission denied", "/proc")

    for name in ("read_torch", "read_cores", "free_memory", "read_shm", "read_open_files", "measure_reads"):
        monkeypatch.setattr(doctor, name, fail)
    timeout = subprocess.TimeoutExpired("python", 30)
    monkeypatch.setattr(doctor, "measure_jpeg", lambda jpeg: (_ for _ in ()).throw(timeout))
    checks = list(examine("none", data=tmp_path / "data", manifests=tmp_path / "manifests"))
    unseen = {each.name for each in checks if "cannot be looked at here" in each.found}
    assert unseen == {"cuda", "cores", "memory", "/dev/shm", "open files", "jpeg", "read speed"}
    assert {"file system", "space", "videos", "pack"} <= {each.name for each in checks}


def test_a_dataset_that_may_not_be_looked_at_leaves_the_machine(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "data/none")

    monkeypatch.setattr(doctor, "read_dataset", fail)
    names = [each.name for each in examine("none", data=tmp_path, manifests=tmp_path)]
    assert names[-4:] == ["jpeg", "cuda", "gpu", "dataset"]


def test_the_drawn_jpeg_is_as_hard_to_decode_as_a_real_one(shared, tmp_path):
    import av

    from pipeline.jpeg import encode_jpeg

    video = next((shared / "data" / "videos" / "ucf101").rglob("*.avi"))
    with av.open(str(video)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="bgr24")
    real = len(encode_jpeg(np.ascontiguousarray(frame), quality=90, restart_mcus=4))
    drawn = len(typical_jpeg(read_dataset("none", data=tmp_path, manifests=tmp_path)))
    assert 0.5 < drawn / real < 2
