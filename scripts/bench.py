"""`make bench`: what is here beside the others, on the same input, in one run."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import av
import tyro

from scripts import run
from scripts.bench_caching import CachingBench, caching_json, format_caching, measure_caching
from scripts.bench_clip import ClipBench, clip_json, format_clip, measure_clip
from scripts.bench_clips import store_clips
from scripts.bench_common import (
    describe_machine,
    format_rows,
    fresh_folder,
    judge,
    speed_ratios,
    write_report,
)
from scripts.bench_memory import MemoryBench, format_memory, measure_memory, memory_json
from scripts.bench_offline import TARGETS, OfflineBench, OfflineResult, find_clips, measure_offline
from scripts.bench_online import measure_online
from scripts.bench_online_report import OnlineBench, format_online, online_json
from scripts.bench_plot import write_plot
from scripts.bench_scale import ScaleBench, format_scale, measure_scale, scale_json
from scripts.bench_storage import StorageBench, format_storage, measure_storage, storage_json

OFFLINE, ONLINE, MEMORY, SCALE = OfflineBench(), OnlineBench(), MemoryBench(), ScaleBench()
CACHING, STORAGE, CLIP = CachingBench(), StorageBench(), ClipBench()
PACKAGES = ("av", "opencv-python", "numpy", "joblib", "simplejpeg", "torch", "torchvision", "pillow")
PEERS = ("mmaction2", "mmcv-lite", "PyTurboJPEG", "torchcodec", "decord", "eva-decord")
Bench = Literal["offline", "online", "memory", "scale", "caching", "storage", "clip"]
BENCHES: tuple[Bench, ...] = ("offline", "online", "memory", "scale", "caching", "storage", "clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What all benches of a run have in common."""

    clips: list[Path]
    rounds: int
    work_dir: Path | None


def main(
    what: Annotated[Bench | Literal["all"], tyro.conf.Positional],
    offline: OfflineBench = OFFLINE,
    online: OnlineBench = ONLINE,
    memory: MemoryBench = MEMORY,
    scale: ScaleBench = SCALE,
    caching: CachingBench = CACHING,
    storage: StorageBench = STORAGE,
    clip: ClipBench = CLIP,
    *,
    videos: Path | None = None,
    data: Path = Path("data"),
    clips: int | None = None,
    rounds: int = 5,
    work_dir: Path | None = None,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    plot: Path | None = None,
) -> int:
    """Measure what is here and what others use, in turns, on the same input.

    Only figures of one run can be compared. Whatever is written is removed again.

    Args:
        what: `offline`: videos to frames. `online`: frames to batches. `memory`: of all processes. `scale`: a
            clip's cost as the videos become more. `caching`: ways to have a clip again. `storage`: sizes and
            qualities of frames. `clip`: what each part of the work on a clip takes, and what else was
            tried. `all`: one after the other.
        offline: What `offline` measures.
        online: What `online` measures.
        memory: What `memory` measures.
        scale: What `scale` measures.
        caching: What `caching` measures.
        storage: What `storage` measures.
        clip: What `clip` measures.
        videos: Folder of the clips; without it real UCF101 clips, if they are there, else the sample's.
        data: Root of the datasets, where the sample is.
        clips: At most so many clips.
        rounds: How often each contender runs; medians are shown.
        work_dir: Where frames are written meanwhile; the system's place for temporary files by default.
        json_file: Where to write all figures as JSON, too.
        plot: Where to draw them, too: a PNG, or an SVG or PDF by the name's ending.
    """
    if rounds < 1 or (clips is not None and clips < 1):
        raise ValueError(f"--rounds and --clips must be 1 or more, got {rounds} and {clips}")
    given = _Run(clips=find_clips(videos, data=data, limit=clips), rounds=rounds, work_dir=work_dir)
    machine = _describe(work_dir)
    _print_head(given.clips, rounds, machine)
    runs: dict[Bench, Callable[[], dict[str, Any]]] = {
        "offline": lambda: _offline(given, offline),
        "online": lambda: _online(given, online),
        "memory": lambda: _memory(given, memory),
        "scale": lambda: _scale(given, scale),
        "caching": lambda: _caching(given, caching),
        "storage": lambda: _storage(given, storage),
        "clip": lambda: _clip(given, clip),
    }
    about = {"machine": machine, "clips": [str(clip) for clip in given.clips]}
    reports: dict[str, Any] = {
        bench: {"bench": bench, **about, **runs[bench]()} for bench in BENCHES if what in (bench, "all")
    }
    if json_file is not None:
        write_report(json_file, reports if what == "all" else reports[what])
    if plot is not None:
        write_plot(plot, list(reports.values()))
    return 0


def _offline(given: _Run, bench: OfflineBench) -> dict[str, Any]:
    result = measure_offline(given.clips, bench, rounds=given.rounds, work_dir=given.work_dir, on_case=_show)
    ratios = speed_ratios(result.rows, TARGETS)
    _print(format_offline(result, ratios))
    return as_json(result, ratios)


def _online(given: _Run, bench: OnlineBench) -> dict[str, Any]:
    result = measure_online(given.clips, bench, rounds=given.rounds, work_dir=given.work_dir, on_case=_show)
    _print(format_online(result))
    return online_json(result)


def _memory(given: _Run, bench: MemoryBench) -> dict[str, Any]:
    with fresh_folder(given.work_dir) as folder:
        _show("frames")
        stored = store_clips(given.clips, folder)
        rows = measure_memory(stored.manifest_file, stored.store.path, bench, on_case=_show)
    _print(format_memory(rows))
    return memory_json(rows)


def _scale(given: _Run, bench: ScaleBench) -> dict[str, Any]:
    rows = measure_scale(given.clips[0], bench, rounds=given.rounds, work_dir=given.work_dir, on_case=_show)
    _print(format_scale(rows))
    return scale_json(rows)


def _caching(given: _Run, bench: CachingBench) -> dict[str, Any]:
    rows = measure_caching(given.clips, bench, rounds=given.rounds, work_dir=given.work_dir, on_case=_show)
    _print(format_caching(rows, bench))
    return caching_json(rows)


def _storage(given: _Run, bench: StorageBench) -> dict[str, Any]:
    rows = measure_storage(given.clips, bench, rounds=given.rounds, work_dir=given.work_dir, on_case=_show)
    _print(format_storage(rows, bench))
    return storage_json(rows)


def _clip(given: _Run, bench: ClipBench) -> dict[str, Any]:
    rows = measure_clip(given.clips, bench, rounds=given.rounds, work_dir=given.work_dir, on_case=_show)
    _print(format_clip(rows))
    return clip_json(rows)


def _print(text: str) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(text, flush=True)


def _describe(work_dir: Path | None) -> dict[str, str]:
    with fresh_folder(work_dir) as folder:
        machine = describe_machine(PACKAGES + PEERS, work_dir=folder.parent)
    return machine | {"FFmpeg of av": str(av.ffmpeg_version_info), "ffmpeg": _ffmpeg_version()}


def _ffmpeg_version() -> str:
    try:
        return subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True).stdout.split(" Copy")[0]
    except OSError:
        return "not installed"


def _print_head(clips: Sequence[Path], rounds: int, machine: dict[str, str]) -> None:
    print(f"{len(clips)} clips, {clips[0]} and on; {rounds} rounds in turns, medians")
    for key, value in machine.items():
        print(f"  {key:<14}{value}")


def _show(name: str) -> None:
    """Which contender runs now, on a terminal alone."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name} ...", end="", file=sys.stderr, flush=True)


def format_offline(result: OfflineResult, ratios: dict[str, float | None]) -> str:
    """All figures for a person."""
    lines = ["", format_rows(result.rows), "", "targets on UCF101's clips, in frames/s"]
    lines += [f"  {judge(target, ratios[target.peer])}" for target in TARGETS]
    lines += ["", "where the time of `ours_1_thread` goes, us/frame"]
    total = sum(result.stages_us.values())
    lines += [f"  {name:<10}{us:>7.1f}  {us / total:>4.0%}" for name, us in result.stages_us.items()]
    lines += ["", "quality against the decoded pictures"]
    for quality in result.qualities:
        lines.append(
            f"  {quality.name:<14}{quality.psnr_db:>7.2f} dB{quality.bytes_per_frame:>9,.0f} bytes/frame"
        )
    return "\n".join(lines)


def as_json(result: OfflineResult, ratios: dict[str, float | None]) -> dict[str, Any]:
    """All figures for programs; a ratio is null where one of its two was not measured."""
    return {
        "rows": [asdict(row) for row in result.rows],
        "ratios": ratios,
        "targets": {target.peer: target.at_least for target in TARGETS},
        "stages_us": result.stages_us,
        "qualities": [asdict(quality) for quality in result.qualities],
        "ffmpeg_quality": result.ffmpeg_quality,
    }


if __name__ == "__main__":
    run(main, resumes=False)
