"""A pack in RAM: how much is free, whether it fits, and one copy of it for the whole machine.

A copy is a folder in /dev/shm that only its owner can read. It outlives the processes that use
it, so that the next run starts at once; it goes when `release_ram` is called, when a newer pack
of the same path is copied, or when the machine restarts.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import StoreError
from pipeline.files import free_bytes
from pipeline.online.pack import locked
from pipeline.online.packfile import PackInfo, copy_pack, format_bytes, open_pack

RAM_ROOT = Path("/dev/shm")

_UNLIMITED = 1 << 60  # version 1 of cgroups writes "no limit" as a huge number


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Bytes that may still be taken for a copy, by each of the three that have a say."""

    available: int
    """What the system can give without swapping: MemAvailable of /proc/meminfo."""
    cgroup: int | None
    """What is left below the limit of this process's cgroup; None where there is no limit."""
    shm: int
    """Free in /dev/shm."""

    @property
    def bytes(self) -> int:
        """The least of them."""
        return min(self.available, self.shm, *([] if self.cgroup is None else [self.cgroup]))

    def __str__(self) -> str:
        cgroup = "" if self.cgroup is None else f", cgroup {format_bytes(self.cgroup)}"
        return (
            f"{format_bytes(self.bytes)} free "
            f"(RAM {format_bytes(self.available)}{cgroup}, /dev/shm {format_bytes(self.shm)})"
        )


def choose_cache(pack_bytes: int, free: FreeMemory) -> tuple[Literal["ram", "disk"], str]:
    """Where a pack goes: RAM when it is under half of what is free, else disk; and the sum in words.

    Half, because the other half is for the workers and for what they decode.
    """
    fits = 2 * pack_bytes < free.bytes
    sum_in_words = f"pack {format_bytes(pack_bytes)} {'<' if fits else '>='} half of {free}"
    return ("ram" if fits else "disk"), sum_in_words


def free_memory(
    ram_root: Path = RAM_ROOT, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> FreeMemory:
    """How much memory this process may still take, and how much of it in /dev/shm."""
    fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    shm = free_bytes(ram_root) if ram_root.is_dir() else 0
    return FreeMemory(available=available, cgroup=_cgroup_free(proc, cgroups), shm=shm)


def hold_in_ram(
    pack: Path, info: PackInfo, *, only_if_small: bool, ram_root: Path = RAM_ROOT
) -> tuple[Path | None, str]:
    """The copy of a pack in RAM, made if there is none yet, and the reason in one line.

    However many processes ask at once, one makes the copy and the others wait for it. Copies of
    older packs of the same path are removed. With `only_if_small` the path is None where the
    pack is not under half of what is free; without, StoreError where it does not fit at all.
    """
    if not ram_root.is_dir():
        if only_if_small:
            return None, f"no {ram_root} here: on disk at {pack}"
        raise StoreError(f"no {ram_root} here to hold pack {pack}: use cache=disk")
    try:
        with locked(_lock_path(pack, ram_root)):
            return _find_or_copy(pack, info, only_if_small=only_if_small, ram_root=ram_root)
    except OSError as error:
        raise StoreError(
            f"pack {pack} cannot be copied to {ram_root} ({error.strerror or error}): use cache=disk"
        ) from error


def release_ram(pack: Path, *, ram_root: Path = RAM_ROOT) -> int:
    """Remove every copy of a pack from RAM, also of older ones of its path; bytes set free.

    Processes that have a copy open go on reading it, and the memory is free when they end.
    """
    with locked(_lock_path(pack, ram_root)):
        return _remove_copies(pack, ram_root)


def copies_in_ram(pack: Path, *, ram_root: Path = RAM_ROOT) -> list[Path]:
    """Folders in RAM that hold a copy of a pack, or of an older one of its path."""
    return sorted(ram_root.glob(f"{_prefix(pack)}-*"))


def _prefix(pack: Path) -> str:
    """What all names of one user and one pack's path begin with."""
    place = hashlib.blake2b(os.fsencode(pack.resolve()), digest_size=4).hexdigest()
    return f"clipfeed-{os.getuid()}-{place}"


def _copy_path(pack: Path, fingerprint: str, ram_root: Path) -> Path:
    return ram_root / f"{_prefix(pack)}-{fingerprint[:16]}"


def _lock_path(pack: Path, ram_root: Path) -> Path:
    return ram_root / f".{_prefix(pack)}.lock"


def _is_whole(copy: Path, info: PackInfo) -> bool:
    """Whether a copy is there, whole, and this user's own: anybody may write to /dev/shm."""
    if not copy.exists():
        return False
    if copy.lstat().st_uid != os.getuid():
        raise StoreError(f"{copy} belongs to another user: use cache=disk")
    try:
        return open_pack(copy).info.fingerprint == info.fingerprint
    except StoreError:
        return False


def _remove_copies(pack: Path, ram_root: Path) -> int:
    freed = 0
    for folder in copies_in_ram(pack, ram_root=ram_root):
        freed += sum(file.stat().st_size for file in folder.iterdir())
        shutil.rmtree(folder)
    return freed


def _find_or_copy(
    pack: Path, info: PackInfo, *, only_if_small: bool, ram_root: Path
) -> tuple[Path | None, str]:
    """`hold_in_ram`, by the one process that holds the lock."""
    copy = _copy_path(pack, info.fingerprint, ram_root)
    if _is_whole(copy, info):
        return copy, f"pack {format_bytes(info.total_bytes)} is in RAM already: {copy}"
    _remove_copies(pack, ram_root)
    free = free_memory(ram_root)
    choice, reason = choose_cache(info.total_bytes, free)
    if choice == "disk" and only_if_small:
        return None, f"{reason}: on disk at {pack}"
    if info.total_bytes >= free.bytes:
        raise StoreError(f"pack {pack} needs {format_bytes(info.total_bytes)} in RAM, {free}: use cache=disk")
    _copy(pack, copy, info)
    return copy, f"{reason}: in RAM at {copy}"


def _copy(pack: Path, copy: Path, info: PackInfo) -> None:
    new = copy.with_name(copy.name + ".new")  # a killed copy keeps this name, and the next one removes it
    try:
        copy_pack(pack, new)
        if open_pack(new).info.fingerprint != info.fingerprint:
            raise StoreError(f"pack {pack} was replaced while it was copied to RAM: start again")
        new.rename(copy)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _cgroup_free(proc: Path, cgroups: Path) -> int | None:
    """Bytes below the tightest limit of this process's cgroup and of those above it."""
    found: list[int | None] = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, base = ("memory.max", "memory.current", "inactive_file"), cgroups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = cgroups / "memory"
        else:
            continue
        # Inside a container the path may be the host's and not be there: then only `base` is.
        inner = base / path.strip("/")
        folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(base)]
        found += [_left_below(folder, *names) for folder in folders]
    limits = [left for left in found if left is not None]
    return min(limits) if limits else None


def _left_below(folder: Path, limit_name: str, usage_name: str, cached_name: str) -> int | None:
    """Limit less usage; pages of files that were not used lately are no usage, the system drops them."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max" or int(limit) >= _UNLIMITED:
        return None
    return max(int(limit) - usage + int(stat.get(cached_name, 0)), 0)
