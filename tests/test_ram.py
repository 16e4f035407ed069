import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.online import ram
from pipeline.online.pack import write_pack
from pipeline.online.packfile import open_pack
from pipeline.online.ram import FreeMemory, choose_cache, copies_in_ram, free_memory, hold_in_ram, release_ram
from pipeline.online.store import FolderStore, open_store
from tests.folders import LENGTHS, file_of, write_dataset, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Frames of three videos and their pack; not to be changed."""
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def own(data, tmp_path):
    """The same, to be changed."""
    return Path(shutil.copytree(data, tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("pack_bytes", "free_bytes", "choice"),
    [(499, 1000, "ram"), (500, 1000, "disk"), (501, 1000, "disk"), (0, 0, "disk"), (500, 1001, "ram")],
)
def test_a_pack_goes_to_ram_when_it_is_under_half_of_what_is_free(pack_bytes, free_bytes, choice):
    for least in ("available", "cgroup", "shm"):
        free = FreeMemory(**{"available": 10**6, "cgroup": 10**6, "shm": 10**6, least: free_bytes})
        assert free.bytes == free_bytes
        assert choose_cache(pack_bytes, free)[0] == choice


def test_the_choice_is_said_with_its_sum():
    free = FreeMemory(available=20_000_000_000, cgroup=11_800_000_000, shm=12_000_000_000)
    assert choose_cache(92_000_000, free) == (
        "ram",
        "pack 92.0 MB < half of 11.8 GB free (RAM 20.0 GB, cgroup 11.8 GB, /dev/shm 12.0 GB)",
    )
    assert choose_cache(6_000_000_000, free)[1].startswith("pack 6.0 GB >= half of 11.8 GB free")


def fake_system(root: Path, cgroup: str, files: dict[str, str]) -> dict[str, Path]:
    """A /proc and a /sys/fs/cgroup; `cgroup` is what /proc/self/cgroup says."""
    texts = {
        "proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  5000 kB\nHugePages_Total:  0\n",
        "proc/self/cgroup": cgroup,
        **{f"cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {"proc": root / "proc", "cgroups": root / "cgroup"}


V2 = "0::/user/job\n"
V1 = "5:cpu:/x\n4:memory:/user/job\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        (V2, {}, None),
        (
            V2,
            {"user/job/memory.max": "max", "user/job/memory.current": "7", "user/job/memory.stat": ""},
            None,
        ),
        (
            V2,
            {
                "user/job/memory.max": "1000\n",
                "user/job/memory.current": "700\n",
                "user/job/memory.stat": "anon 500\ninactive_file 150\n",
            },
            450,
        ),
        (
            V2,
            {  # the group above is tighter
                "user/job/memory.max": "1000",
                "user/job/memory.current": "0",
                "user/job/memory.stat": "",
                "user/memory.max": "900",
                "user/memory.current": "800",
                "user/memory.stat": "inactive_file 0",
            },
            100,
        ),
        (
            V2,
            {"memory.max": "100", "memory.current": "300", "memory.stat": ""},  # seen from inside a container
            0,
        ),
        (
            V1,
            {
                "memory/user/job/memory.limit_in_bytes": "1000",
                "memory/user/job/memory.usage_in_bytes": "600",
                "memory/user/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200",
                "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
                "memory/memory.usage_in_bytes": "0",
                "memory/memory.stat": "",
            },
            600,
        ),
    ],
)
def test_free_memory_heeds_the_cgroups_of_both_versions(tmp_path, cgroup, files, left):
    free = free_memory(tmp_path, **fake_system(tmp_path, cgroup, files))
    assert free.cgroup == left
    assert free.available == 5000 * 1024
    assert free.bytes == min(5000 * 1024 if left is None else left, free.shm)


def test_a_machine_without_shared_memory_reads_from_disk(data, tmp_path):
    assert free_memory(tmp_path / "none").shm == 0
    opened = open_store(data / "frames", data / "pack", ram_root=tmp_path / "none")
    assert opened.cache == "disk"
    with pytest.raises(StoreError, match=r"no .*none here .*use cache=disk"):
        open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path / "none")


def test_each_kind_of_cache_hands_out_the_same_bytes_and_says_where_from(data, tmp_path):
    said = {}
    for cache in ("off", "disk", "ram", "auto"):
        opened = open_store(data / "frames", data / "pack", cache=cache, ram_root=tmp_path)
        assert [bytes(jpeg) for jpeg in opened.store.read("B/three", [7])] == [file_of(data, "B/three", 7)]
        said[cache] = opened.cache, opened.reason
    copy = copies_in_ram(data / "pack", ram_root=tmp_path)[0]
    assert said["off"][0] == "off"
    assert said["disk"][0] == "disk"
    assert said["ram"][0] == said["auto"][0] == "ram"
    assert said["ram"][1].startswith("pack ")
    assert " < half of " in said["ram"][1]
    assert said["ram"][1].endswith(f"in RAM at {copy}")
    assert said["auto"][1].endswith(f"is in RAM already: {copy}")


def test_without_a_pack_auto_opens_files_and_the_others_say_what_to_run(own, tmp_path):
    shutil.rmtree(own / "pack")
    opened = open_store(own / "frames", own / "pack", ram_root=tmp_path)
    assert isinstance(opened.store, FolderStore)
    assert "make pack DATASET=tiny" in opened.reason
    for cache in ("ram", "disk"):
        with pytest.raises(StoreError, match=r"no pack at .*make pack DATASET=tiny"):
            open_store(own / "frames", own / "pack", cache=cache, ram_root=tmp_path)


def test_what_does_not_fit_stays_on_disk_or_is_refused(data, tmp_path, monkeypatch):
    size = open_pack(data / "pack").info.total_bytes
    monkeypatch.setattr(
        ram, "free_memory", lambda root: FreeMemory(available=size * 2, cgroup=None, shm=10**12)
    )
    opened = open_store(data / "frames", data / "pack", ram_root=tmp_path)
    assert (opened.cache, opened.store.path) == ("disk", data / "pack")
    assert ">= half of" in opened.reason
    assert open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path).cache == "ram"
    release_ram(data / "pack", ram_root=tmp_path)
    monkeypatch.setattr(ram, "free_memory", lambda root: FreeMemory(available=size, cgroup=None, shm=10**12))
    with pytest.raises(StoreError, match=r"needs .* in RAM, .* free .*use cache=disk"):
        open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path)


def test_a_copy_in_ram_is_its_owners_alone(data, tmp_path):
    opened = open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path)
    folder = opened.store.path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert str(os.getuid()) in folder.name
    assert opened.store.info.fingerprint.startswith(folder.name.rsplit("-", 1)[1])


def test_a_copy_that_another_user_put_there_is_refused(data, tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs the right to give a folder away")
    folder = open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path).store.path
    os.chown(folder, 12345, -1)
    with pytest.raises(StoreError, match="belongs to another user"):
        open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path)


def test_copies_of_older_packs_go_when_a_newer_one_is_copied(own, tmp_path):
    first = open_store(own / "frames", own / "pack", cache="ram", ram_root=tmp_path)
    view = first.store.read("A/one", [0])[0]
    expected = bytes(view)
    other = write_dataset(tmp_path / "other")
    kept = open_store(other / "frames", other / "pack", cache="ram", ram_root=tmp_path).store.path
    write_folder(own / "frames", "A/one", frames=4, first=20)
    write_pack(own / "pack", own / "frames", list(LENGTHS))
    second = open_store(own / "frames", own / "pack", cache="ram", ram_root=tmp_path)
    assert copies_in_ram(own / "pack", ram_root=tmp_path) == [second.store.path]
    assert bytes(view) == expected
    assert bytes(second.store.read("A/one", [0])[0]) == file_of(own, "A/one", 0) != expected
    size = sum(path.stat().st_size for path in second.store.path.iterdir())
    assert release_ram(own / "pack", ram_root=tmp_path) == size
    assert release_ram(own / "pack", ram_root=tmp_path) == 0
    assert copies_in_ram(own / "pack", ram_root=tmp_path) == []
    assert kept.exists()


def test_a_damaged_copy_is_made_anew(data, tmp_path):
    folder = open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path).store.path
    (folder / "frames.bin").write_bytes(b"")
    opened = open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path)
    assert bytes(opened.store.read("A/two", [0])[0]) == file_of(data, "A/two", 0)


def open_at_once(data: Path, ram_root: Path, barrier, answers) -> None:
    barrier.wait(30)
    opened = open_store(data / "frames", data / "pack", cache="ram", ram_root=ram_root)
    answers.put((opened.reason, bytes(opened.store.read("A/one", [1])[0])))


def test_of_two_ranks_that_ask_at_once_one_makes_the_copy(data, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.SimpleQueue()
    ranks = [context.Process(target=open_at_once, args=(data, tmp_path, barrier, answers)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    got = [answers.get() for _ in ranks]
    for rank in ranks:
        rank.join(30)
    assert sorted("already" in reason for reason, _ in got) == [False, True]
    assert {jpeg for _, jpeg in got} == {file_of(data, "A/one", 1)}


def die_while_copying(pack: Path, ram_root: Path) -> None:
    def half(source, target):
        target.mkdir()
        (target / "frames.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    ram.copy_pack = half
    hold_in_ram(pack, open_pack(pack).info, only_if_small=False, ram_root=ram_root)


def test_a_copy_that_was_killed_blocks_nobody_and_is_cleared_away(data, tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=die_while_copying, args=(data / "pack", tmp_path)
    )
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert [path.suffix for path in copies_in_ram(data / "pack", ram_root=tmp_path)] == [".new"]
    opened = open_store(data / "frames", data / "pack", cache="ram", ram_root=tmp_path)
    assert copies_in_ram(data / "pack", ram_root=tmp_path) == [opened.store.path]


def test_memory_that_runs_out_while_copying_is_said_and_nothing_stays(data, small_disk, monkeypatch):
    (small_disk / "other").write_bytes(bytes((1 << 20) - 8192))
    monkeypatch.setattr(
        ram, "free_memory", lambda root: FreeMemory(available=10**12, cgroup=None, shm=10**12)
    )
    with pytest.raises(StoreError, match=r"cannot be copied to .*No space left on device.*use cache=disk"):
        open_store(data / "frames", data / "pack", cache="ram", ram_root=small_disk)
    assert copies_in_ram(data / "pack", ram_root=small_disk) == []
