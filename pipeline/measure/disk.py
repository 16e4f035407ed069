"""The disk that a folder lies on: its file system, what is free, how fast it reads; and what will hurt."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import PipelineError
from pipeline.files import free_bytes
from pipeline.measure.checks import Check, Verdict
from pipeline.measure.machine import PROC, JpegSpeed
from pipeline.online.packfile import format_bytes
from pipeline.online.windows import WindowSpec

RANDOM_BYTES = 16 << 10
"""One random read: about a JPEG of 320x240 (15.6 kB in the mean of 6,606 frames of UCF101)."""

_SEQUENTIAL_BYTES = 1 << 20
_FILE_BYTES = 64 << 20
_LEAST_BYTES = 4 << 20
_SECONDS = 0.2
_PAGE = 4096


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """What a folder lies on."""

    kind: str
    """`ext4`, `xfs`, `nfs4`, `overlay`, ...; `unknown` where the system does not tell."""
    device: str
    mount: str
    """The folder that it is mounted at."""


def read_file_system(folder: Path, *, proc: Path = PROC) -> FileSystem:
    """The file system of a folder, or of the nearest above it that is there."""
    place = nearest_folder(folder).resolve()
    found = FileSystem(kind="unknown", device="", mount="")
    for line in (proc / "self" / "mountinfo").read_text(errors="surrogateescape").splitlines():
        # proc(5): 36 35 98:0 /root /mount options [optional fields] - kind device options
        left, _, right = line.partition(" - ")
        mount, (kind, device) = _unescape(left.split(" ")[4]), right.split(" ")[:2]
        # Later mounts lie on top of earlier ones, so of two at one place the last counts.
        if place.is_relative_to(mount) and len(mount) >= len(found.mount):
            found = FileSystem(kind=kind, device=_unescape(device), mount=mount)
    return found


def _unescape(text: str) -> str:
    r"""A path of mountinfo, where blanks and the like stand as octal numbers.

    >>> _unescape(r"/mnt/my\040disk")
    '/mnt/my disk'
    """
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may still be written below a folder."""

    free_bytes: int
    total_bytes: int
    free_files: int | None
    """Inodes; None where the file system makes them as it needs them."""
    block_bytes: int
    """A file takes whole blocks of this size."""
    is_writable: bool


def read_space(folder: Path) -> Space:
    """Space below a folder, or below the nearest above it that is there."""
    place = nearest_folder(folder)
    stats = os.statvfs(place)
    return Space(
        free_bytes=free_bytes(place),
        total_bytes=stats.f_blocks * stats.f_frsize,
        free_files=stats.f_favail if stats.f_files else None,
        block_bytes=stats.f_frsize,
        is_writable=os.access(place, os.W_OK),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """How fast one process reads, one request after the other, from the disk and not from memory."""

    sequential_bytes_per_s: float
    """In requests of 1 MiB."""
    random_reads_per_s: float
    """Of `RANDOM_BYTES` each."""
    what: str
    """What was read, and how the page cache was kept out of it."""

    def seconds_for(self, num_bytes: float) -> float:
        """To read so many bytes that lie together, from a place where nobody has read yet."""
        return 1 / self.random_reads_per_s + num_bytes / self.sequential_bytes_per_s


def measure_reads(folder: Path, large_file: Path | None = None) -> ReadRates:
    """Read rates of a folder's disk, in 0.4 s and at most 0.4 s more to write a file.

    Reads `large_file`, such as a pack, where it is large enough and can be read past the page cache:
    that is the data itself, where it lies, and what is in memory stays there. Else a file of at most
    64 MB without a name, written now in `folder` or the nearest above it. PipelineError where that is
    too full; OSError where it cannot be written.
    """
    rng = np.random.default_rng()  # other places each time: a disk remembers those of the last
    if large_file is not None and large_file.exists() and large_file.stat().st_size >= _FILE_BYTES:
        with large_file.open("rb") as file:
            if _read_directly(file.fileno()):
                return _measure(file.fileno(), rng, f"{large_file.name}, past the page cache")
    with _written_file(nearest_folder(folder)) as descriptor:
        size = f"{os.fstat(descriptor).st_size >> 20} MB written just now"
        if _read_directly(descriptor):
            return _measure(descriptor, rng, f"{size}, past the page cache")
        return _measure(descriptor, rng, f"{size}, dropped from the page cache")


def _read_directly(descriptor: int) -> bool:
    """Have a file read past the page cache; False, and as before, where its file system cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(descriptor, [memoryview(mmap(-1, _PAGE))], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


@contextmanager
def _written_file(folder: Path) -> Iterator[int]:
    """A file with no name, which is gone however the process ends; on the disk, not in memory."""
    size = min(_FILE_BYTES, free_bytes(folder) // 10)
    if size < _LEAST_BYTES:
        raise PipelineError(f"{folder} is too full to write a file for it")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        block, end = os.urandom(_SEQUENTIAL_BYTES), time.perf_counter() + 2 * _SECONDS
        while file.tell() < size and (file.tell() < _LEAST_BYTES or time.perf_counter() < end):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file.fileno()


def _measure(descriptor: int, rng: np.random.Generator, what: str) -> ReadRates:
    size = os.fstat(descriptor).st_size
    starts = np.arange(0, size - _SEQUENTIAL_BYTES + 1, _SEQUENTIAL_BYTES)
    ahead = np.roll(starts, -int(rng.integers(len(starts))))[: _FILE_BYTES // _SEQUENTIAL_BYTES]
    sequential = _reads_per_s(descriptor, ahead.tolist(), _SEQUENTIAL_BYTES) * _SEQUENTIAL_BYTES
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    num_places = size // RANDOM_BYTES
    places = rng.choice(num_places, min(num_places, 20_000), replace=False) * RANDOM_BYTES
    return ReadRates(
        sequential_bytes_per_s=sequential,
        random_reads_per_s=_reads_per_s(descriptor, places.tolist(), RANDOM_BYTES),
        what=what,
    )


def _reads_per_s(descriptor: int, offsets: list[int], num_bytes: int) -> float:
    buffer = memoryview(mmap(-1, num_bytes))  # O_DIRECT wants whole pages
    begin, num_reads = time.perf_counter(), 0
    for offset in offsets:
        os.preadv(descriptor, [buffer], offset)
        num_reads += 1
        if time.perf_counter() - begin > _SECONDS:
            break
    return num_reads / (time.perf_counter() - begin)


class Need(NamedTuple):
    """What a dataset will still take of its disk, about."""

    num_bytes: float
    num_files: float
    what: str
    """What for; empty where nothing is left to be written."""


_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "fuse",
    "drvfs",
    "virtiofs",
    "lustre",
    "ceph",
    "beegfs",
    "gpfs",
    "afs",
)


def check_file_system(system: FileSystem) -> Check:
    """Whether frames lie where many small files are quick to open, and where they stay."""
    found = f"{system.kind} on {system.device}, mounted at {system.mount}"
    if system.kind.startswith(_NETWORK):
        advice = "read from a pack there (`make pack`), or have the data on a disk of this machine (DATA=)"
        return _say("file system", "warning", f"{found}: slow to open many small files", advice)
    if system.kind in ("tmpfs", "ramfs"):
        advice = "have the data on a disk (DATA=), and let training hold the pack in RAM"
        return _say("file system", "warning", f"{found}: it is memory, gone at a restart", advice)
    if system.kind == "overlay":
        advice = "mount a folder of the host for the data (docker run -v)"
        return _say("file system", "warning", f"{found}: gone with this container", advice)
    return _say("file system", "ok", found)


def check_space(space: Space, need: Need) -> Check:
    """Whether what the dataset still needs fits, in bytes and in files."""
    files = "" if space.free_files is None else f" and {space.free_files:,} files"
    found = f"{format_bytes(space.free_bytes)}{files} free; "
    found += (
        f"{need.what} will take about {format_bytes(round(need.num_bytes))}"
        if need.what
        else "no need of more"
    )
    found += f" and {need.num_files:,.0f} files" if need.num_files >= 1 else ""
    needs = [(need.num_bytes, space.free_bytes)]
    needs += [] if space.free_files is None else [(need.num_files, space.free_files)]
    advice = "make room, or have the data on another disk (DATA=), or store smaller frames (--short-side-px)"
    if any(needed > free for needed, free in needs):
        return _say("space", "error", found, advice)
    if need.what and not space.is_writable:
        return _say("space", "error", f"{found}; not writable", "get the right to write there, or use DATA=")
    is_tight = any(needed > 0.8 * free for needed, free in needs)
    if is_tight or 20 * space.free_bytes < min(space.total_bytes, 20 << 30):
        return _say("space", "warning", f"{found}: nearly full", advice)
    return _say("space", "ok", found)


def check_read_rates(rates: ReadRates, frame_bytes: float, speed: JpegSpeed | None) -> Check:
    """Whether a worker waits longer for a clip that is not in memory than it decodes."""
    found = (
        f"{format_bytes(round(rates.sequential_bytes_per_s))}/s, {rates.random_reads_per_s:,.0f} "
        f"random reads/s of {RANDOM_BYTES >> 10} KiB ({rates.what})"
    )
    if speed is None:
        return _say("read speed", "ok", found)
    frames = WindowSpec().frames
    read_s, decode_s = rates.seconds_for(frames * frame_bytes), frames * speed.seconds
    found += f"; a clip reads in {read_s * 1e3:.1f} ms, decodes in {decode_s * 1e3:.1f} ms"
    if read_s <= decode_s:
        return _say("read speed", "ok", found)
    advice = "`make pack`, which training holds in RAM where it fits; else a faster disk or smaller frames"
    return _say("read speed", "warning", found, advice)


def _say(name: str, verdict: Verdict, found: str, advice: str = "") -> Check:
    return Check(area="disk", name=name, verdict=verdict, found=found, advice=advice)
