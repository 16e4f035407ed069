"""What was looked at, what was found, and what to do about it: one line each, and a verdict in words."""

import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.measure.machine import Package

Verdict = Literal["ok", "warning", "error"]
Area = Literal["machine", "disk", "dataset"]
AREAS: tuple[Area, ...] = ("machine", "disk", "dataset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    area: Area
    name: str
    verdict: Verdict
    """`error`: the next step fails on it; `warning`: it will hurt, or is still to be done."""
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to."""


def split_advice(message: str) -> tuple[str, str]:
    """What an error of this project found, and what it says to do next; the latter may be empty.

    >>> split_advice("no pack at data/a/pack: run `make pack DATASET=a`")
    ('no pack at data/a/pack', 'make pack DATASET=a')
    """
    parts = re.fullmatch(r"(.+?)[:;] (?:(?:run|use) )?((?:`?make|take|delete|move|use) .+)", message)
    return (parts[1], re.sub(r"^`([^`]+)`$", r"\1", parts[2])) if parts else (message, "")


def check_packages(packages: Sequence[Package]) -> list[Check]:
    """Versions in one line, and an error for each package that cannot be imported."""
    broken = [package for package in packages if package.error is not None]
    checks = [
        Check(
            area="machine",
            name="packages",
            verdict="error",
            found=f"{package.name} cannot be imported: {package.error}",
            advice="delete .venv, then make setup" + _HINTS.get(package.name, ""),
        )
        for package in broken
    ]
    versions = [f"{package.name} {package.version}" for package in packages if package.error is None]
    found = ", ".join([f"Python {platform.python_version()}", *versions])
    return [*checks, Check(area="machine", name="packages", verdict="ok", found=found)]


_HINTS = {"OpenCV": " (where libGL is missing: apt-get install libgl1)"}


def count_of(checks: Iterable[Check], verdict: Verdict) -> int:
    """How many checks ended so."""
    return sum(check.verdict == verdict for check in checks)


def next_step(checks: Sequence[Check]) -> Check | None:
    """The check to see to first; None where all are ok.

    An error goes before a warning. Of errors the machine's come first, since what stands on it cannot
    work; of warnings the dataset's, since they are the way on, and a machine without a GPU stays one.
    """
    errors = [check for area in AREAS for check in checks if check.area == area and check.verdict == "error"]
    warnings = [
        check for area in AREAS[::-1] for check in checks if check.area == area and check.verdict == "warning"
    ]
    return next(iter(errors + warnings), None)


def format_check(check: Check) -> str:
    """A check on one line, in columns that are the same for all.

    >>> format_check(Check(area="machine", name="cores", verdict="warning", found="1 core", advice="more"))
    'cores        warning  1 core -> more'
    """
    advice = f" -> {check.advice}" if check.advice else ""
    return f"{check.name:<12} {check.verdict:<7}  {_on_one_line(check.found + advice)}"


def conclude(checks: Sequence[Check], *, otherwise: str) -> str:
    """The verdict in one line: how many are not ok, and the next thing to do; `otherwise` where all are."""
    step = next_step(checks)
    if step is None:
        return f"all is well; next: {otherwise}"
    counts = [_counted(count_of(checks, verdict), verdict) for verdict in ("error", "warning")]
    advice = step.advice or "see the line above"
    return f"{', '.join(filter(None, counts))}; next for {step.name}: {_on_one_line(advice)}"


def _counted(count: int, verdict: Verdict) -> str:
    return f"{count} {verdict}{'s' * (count != 1)}" if count else ""


def _on_one_line(text: str) -> str:
    """File names and other programs' messages may hold anything."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
