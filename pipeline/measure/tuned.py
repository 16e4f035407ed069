"""What tuning a loader found: a small TOML file beside the manifest, and whether it holds on this machine."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.measure.machine import read_cores, read_memory_size
from pipeline.online.loader import LoaderSpec
from pipeline.online.packfile import format_bytes

HeldIn = Literal["ram", "disk", "off"]
"""Where frames are read from, as `open_store` calls it."""
DeviceType = Literal["cpu", "cuda"]

_MEMORY_SHARE = 0.05
"""Memory of one machine differs by less, from one kernel to another."""


class TunedError(PipelineError):
    """A file of tuned settings cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What of a loader changes its speed alone, and no batch."""

    workers: int
    threads: int
    prefetch: int
    readers: int
    pin: bool
    cache: HeldIn

    def __post_init__(self) -> None:
        self.apply(LoaderSpec())  # whose checks are these
        if self.cache not in get_args(HeldIn):
            raise ValueError(f"cache must be one of {get_args(HeldIn)}, got {self.cache!r}")

    def apply(self, spec: LoaderSpec) -> LoaderSpec:
        """A loader's spec with these in place of its own."""
        loading = asdict(self)
        del loading["cache"]
        return replace(spec, **loading)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipShape:
    """What a batch holds: settings that were tuned for one size may not fit another."""

    batch_size: int
    frames: int
    height_px: int
    width_px: int

    def __str__(self) -> str:
        return f"{self.batch_size} clips of {self.frames} frames of {self.width_px}x{self.height_px} px"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured, when and how."""

    device: DeviceType
    """What was trained on: on the CPU, the model needs cores of its own."""
    clips_per_s_before: float
    """With the settings that were begun with."""
    clips_per_s_after: float
    date: str
    """As 2031-12-24."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What settings depend on."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    """That this process may have at most."""
    gpu: str
    """Its name; empty where there is none."""

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return f"{cores}, {format_bytes(self.memory_bytes)}, {self.gpu or 'no GPU'}"


def read_machine() -> Machine:
    """This one."""
    cores, memory = read_cores(), read_memory_size()
    return Machine(
        cpu=cores.model,
        cores=cores.granted,
        memory_bytes=memory.total if memory.limit is None else min(memory.total, memory.limit),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Settings, and all that says whether they hold here."""

    tuning: Tuning
    clips: ClipShape
    measured: Measured
    machine: Machine


def tuned_path(manifests: Path, dataset: str) -> Path:
    """Where a dataset's tuned settings are."""
    return manifests / f"{dataset}.tuned.toml"


def find_misfit(tuned: Tuned, machine: Machine, clips: ClipShape, device: str) -> str | None:
    """Why tuned settings do not hold for this machine and these clips, in words; None where they do.

    The processor's name is not compared: machines of one cluster differ in it and in little else.
    """
    there, here = tuned.machine, machine
    share = abs(there.memory_bytes - here.memory_bytes) / max(here.memory_bytes, 1)
    if there.cores != here.cores or share > _MEMORY_SHARE or bool(there.gpu) != bool(here.gpu):
        return f"measured on {there}, and this machine has {here}"
    if tuned.measured.device != device:
        return f"measured for training on {tuned.measured.device}, and this is on {device}"
    if tuned.clips != clips:
        return f"measured with {tuned.clips}, and these are {clips}"
    return None


# The file.


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Write the file whole, or leave what was there."""
    write_text(path, "\n".join(_lines(tuned)) + "\n")


def read_tuned(path: Path) -> Tuned | None:
    """The settings in a file; None where there is none, TunedError where it cannot be understood."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        tuning = {**tables["loader"], **tables["store"]}
        return Tuned(
            tuning=_record(Tuning, tuning),
            clips=_record(ClipShape, tables["clips"]),
            measured=_record(Measured, tables["measured"]),
            machine=_record(Machine, tables["machine"]),
        )
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise TunedError(f"{path} has no {error.args[0]!r}: delete it, or run `make tune` again") from error
    except (OSError, ValueError, TypeError) as error:  # a TOMLDecodeError is a ValueError
        raise TunedError(f"{path} cannot be read ({error}): delete it, or run `make tune` again") from error


def _lines(tuned: Tuned) -> Iterator[str]:
    yield "# What `make tune` found to be fastest here. `make train` takes it where its options do not say"
    yield "# otherwise. To undo it, delete this file, or give --tuned off."
    tuning = asdict(tuned.tuning)
    tables = {
        "store": {"cache": tuning.pop("cache")},
        "loader": tuning,
        "clips": asdict(tuned.clips),
        "measured": asdict(tuned.measured),
        "machine": asdict(tuned.machine),
    }
    for name, table in tables.items():
        yield f"\n[{name}]"
        yield from (f"{key} = {_as_toml(value)}" for key, value in table.items())


def _as_toml(value: str | float | bool) -> str:
    """A plain value.

    >>> print(_as_toml('a "b"'), _as_toml(True), _as_toml(3), _as_toml(0.5))
    "a \\"b\\"" true 3 0.5
    """
    # JSON's strings are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


R = TypeVar("R")


def _record(kind: type[R], table: Mapping[str, Any]) -> R:
    """A record from a table that has its fields, of their types; what else is there is left alone."""
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        value = table[one.name]
        expected = one.type if isinstance(one.type, type) else str
        if type(value) is not expected:  # True is an int, too
            raise TypeError(f"{one.name} must be {expected.__name__}, got {value!r}")
        values[one.name] = value
    return kind(**values)
