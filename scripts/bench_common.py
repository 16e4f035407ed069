"""What every bench shares: rounds that take turns, medians, ratios, a table, JSON, the machine."""

import json
import math
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import joblib
import psutil

from pipeline.files import write_text

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measured run."""

    seconds: float
    """By the clock on the wall."""
    cpu_s: float
    """By the processors: this process, and its children that have ended."""
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender, over all rounds."""

    name: str
    what: str
    frames: int
    """Frames of one round."""
    seconds: float
    """Median over the rounds."""
    frames_per_s: float
    cpu_us_per_frame: float
    """Median over the rounds, in microseconds."""
    rounds_s: tuple[float, ...]
    """Seconds of each round, in their order."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A ratio of frames per second, ours / theirs, that is to be reached."""

    peer: str
    ours: str
    theirs: str
    at_least: float


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure: `run` gets an empty folder to write to, and times what it does itself."""

    name: str
    run: Callable[[Path], Mapping[str, Timing]]
    """Gives one or more timings by the name of their row."""


class Stopwatch:
    """Adds up the seconds spent inside of `with stopwatch:`, as often as it is entered."""

    def __init__(self) -> None:
        self._seconds = self._cpu_s = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), _cpu_s()

    def __exit__(self, *exception: object) -> None:
        self._seconds += time.perf_counter() - self._begin[0]
        self._cpu_s += _cpu_s() - self._begin[1]

    def timing(self, frames: int) -> Timing:
        """What has been added up, as the time that so many frames took."""
        return Timing(seconds=self._seconds, cpu_s=self._cpu_s, frames=frames)


def sum_of(timings: Iterable[Timing]) -> Timing:
    """Timings of the same frames, one after the other."""
    timings = list(timings)
    return Timing(
        seconds=sum(timing.seconds for timing in timings),
        cpu_s=sum(timing.cpu_s for timing in timings),
        frames=timings[0].frames,
    )


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def fresh_folder(below: Path | None) -> Iterator[Path]:
    """An empty folder below `below` (the system's place for temporary files if None), removed at the end."""
    if below is not None:
        below.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=below)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rotated(items: Sequence[_T], by: int) -> list[_T]:
    """The items in their order, beginning with another one.

    >>> rotated("abc", 1)
    ['b', 'c', 'a']
    """
    begin = by % len(items)
    return [*items[begin:], *items[:begin]]


def run_rounds(
    cases: Sequence[Case],
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> dict[str, list[Timing]]:
    """Timings by row, one for each round. The cases take turns, and each round begins with another one.

    So a machine that gets slower or faster on the way does so for all of them. `on_case` is told the
    name of each case before it runs.
    """
    return run_rounds_of_parts([cases], rounds=rounds, work_dir=work_dir, on_case=on_case)


def run_rounds_of_parts(
    parts: Sequence[Sequence[Case]],
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> dict[str, list[Timing]]:
    """The same where each round has parts, whose cases take turns: a timing is the sum of a round's parts.

    The shorter the parts, the less a machine's pace can change from one case to the next.
    """
    timings: dict[str, list[Timing]] = {}
    for number in range(rounds):
        of_round: dict[str, list[Timing]] = {}
        for part, cases in enumerate(parts):
            for case in rotated(cases, number + part):
                on_case(case.name)
                with fresh_folder(work_dir) as folder:
                    for name, timing in case.run(folder).items():
                        of_round.setdefault(name, []).append(timing)
        for name, each in of_round.items():
            frames = sum(timing.frames for timing in each)
            timings.setdefault(name, []).append(replace(sum_of(each), frames=frames))
    return timings


def make_row(name: str, what: str, timings: Sequence[Timing], note: str = "") -> Row:
    """A row of medians; frames are the same in each round. Without timings all figures are 0."""
    frames = timings[0].frames if timings else 0
    seconds = median(timing.seconds for timing in timings) if timings else 0.0
    cpu_s = median(timing.cpu_s for timing in timings) if timings else 0.0
    return Row(
        name=name,
        what=what,
        frames=frames,
        seconds=seconds,
        frames_per_s=frames / seconds if seconds else 0.0,
        cpu_us_per_frame=cpu_s / frames * 1e6 if frames else 0.0,
        rounds_s=tuple(timing.seconds for timing in timings),
        note=note,
    )


def speed_ratios(rows: Sequence[Row], targets: Sequence[Target]) -> dict[str, float | None]:
    """Ours / theirs in frames per second, by peer; None where one of the two was not measured.

    The median of each round's own ratio: what a machine does in another round has no part in it.
    """
    seconds = {row.name: [each / row.frames for each in row.rounds_s] for row in rows}
    ratios: dict[str, float | None] = {}
    for target in targets:
        pairs = zip(seconds.get(target.ours, []), seconds.get(target.theirs, []), strict=False)
        of_rounds = [theirs / ours for ours, theirs in pairs]
        ratios[target.peer] = median(of_rounds) if of_rounds else None
    return ratios


def judge(target: Target, ratio: float | None) -> str:
    """A line for a person.

    >>> judge(Target(peer="ffmpeg", ours="ours", theirs="ffmpeg", at_least=2.5), 2.75)
    'ours / ffmpeg >= 2.50: met, 2.75'
    """
    line = f"{target.ours} / {target.theirs} >= {target.at_least:.2f}: "
    if ratio is None:
        return line + "not measured"
    shown = math.floor(ratio * 100) / 100  # never rounded up to a target that is missed
    return line + ("met" if ratio >= target.at_least else "NOT met") + f", {shown:.2f}"


def format_rows(rows: Sequence[Row]) -> str:
    """Rows as a table, with what each is and its note below its figures."""
    lines = [f"{'':<16}{'frames':>8}{'seconds':>9}{'frames/s':>10}{'CPU us/frame':>14}{'rounds (s)':>16}"]
    for row in rows:
        figures = [f"{'-':>8}{'-':>9}{'-':>10}{'-':>14}"]
        if row.rounds_s:
            figures = [
                f"{row.frames:>8,}{row.seconds:>9.2f}{row.frames_per_s:>10,.0f}",
                f"{row.cpu_us_per_frame:>14,.0f}",
                f"{min(row.rounds_s):.2f} - {max(row.rounds_s):.2f}".rjust(16),
            ]
        lines.append(f"{row.name:<16}" + "".join(figures))
        lines += [f"    {text}" for text in (row.what, row.note) if text]
    return "\n".join(lines)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a bench's outcome as JSON: dataclasses become objects."""
    write_text(path, json.dumps(report, ensure_ascii=False, indent=1, default=asdict) + "\n")


def describe_machine(packages: Sequence[str], *, work_dir: Path) -> dict[str, str]:
    """What the figures depend on: cores, memory, systems and versions, in words."""
    memory = psutil.virtual_memory()
    described = {
        "cpu": _cpu_model(),
        "cores": f"{os.cpu_count()} seen, {joblib.cpu_count()} allowed",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free",
        "system": platform.platform(),
        "work_dir": f"{work_dir}: {_file_system(work_dir)}",
        "load": _load(),
        "python": platform.python_version(),
    }
    return described | {package: _version(package) for package in packages}


def _load() -> str:
    load = os.getloadavg()[0]
    others = ": others are at work on this machine, so figures scatter" if load >= 0.5 else ""
    return f"{load:.1f} in the minute before{others}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _file_system(folder: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    if not mounts:
        return "file system unknown"
    nearest = max(mounts, key=lambda part: len(part.mountpoint))
    return f"{nearest.fstype} on {nearest.device}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
