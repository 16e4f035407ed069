"""What `bench online` is asked for and what it found: the spec, the targets, the table, the JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from scripts.bench_common import Row, Target, judge, speed_ratios
from scripts.bench_peers import FRAME_PEERS, VIDEO_PEERS


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineBench:
    """What is measured, besides the videos."""

    clips_per_round: int = 640
    """Clips that each contender makes in a round; the videos are gone through as often as needed."""
    batch_size: int = 32
    """Clips in a batch."""
    workers: int = 2
    """Worker processes of each contender."""
    clip_frames: int = 16
    """Frames of a clip, one after the other."""
    size_px: int = 112
    """Height and width of the clips; they are random resized crops of scale 0.25 to 1."""
    frame_quality: int = 90
    """JPEG quality of the stored frames."""
    short_side_px: int | None = None
    """Also measure frames stored at this short side."""
    long_gop: bool = False
    """Use H.264 videos of 640x480 with a key frame every 250 frames, made out of the clips first."""

    def __post_init__(self) -> None:
        least = min(self.clips_per_round, self.batch_size, self.workers, self.clip_frames, self.size_px)
        if least < 1:
            raise ValueError(f"all numbers must be 1 or more, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How a contender's clips compare with torchvision's of the same frames."""

    psnr_db: float
    """Median over clips; infinite where they are the same."""
    other_clips: int
    """Clips that are nearer to what lies one frame earlier or later."""
    clips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineResult:
    """All that is measured."""

    rows: list[Row]
    likeness: dict[str, Likeness]
    targets: list[Target]
    ratios: dict[str, float | None]
    """This loader / the others in clips per second, by the others' names and by those of the targets."""
    videos: str
    """What the clips come from, in words."""
    clip_frames: int


def small_name(bench: OnlineBench) -> str:
    """The row of frames that were stored smaller."""
    return f"ours_{bench.short_side_px}"


def descriptions(bench: OnlineBench) -> dict[str, str]:
    """All rows in their order, and what each is."""
    found = {
        "ours": "this loader: ClipDataset, PackStore, build_loader: uint8 batches",
        "ours_float": "the same through prefetch(loader, 'cpu'): float32, normalised, in the main process",
        "ours_folder": "this loader with FolderStore",
        "ours_plain": "this loader with antialias=False",
    }
    if torch.cuda.is_available():
        found["ours_nvjpeg"] = "this loader with EncodedClipDataset: uint8 batches, decoded on the GPU"
    if bench.short_side_px is not None:
        small = f"this loader on frames stored at short side {bench.short_side_px}"
        found |= {small_name(bench): small, f"{small_name(bench)}_float": "the same through prefetch"}
    return found | {peer.name: peer.what for peer in FRAME_PEERS + VIDEO_PEERS}


def make_targets(rows: Sequence[Row], bench: OnlineBench) -> list[Target]:
    """What is to be reached; against the best where there are several of a kind."""
    mmaction = _fastest(rows, "mmaction2_cv2", "mmaction2_turbojpeg", "mmaction2_pillow")
    if bench.long_gop:
        best = _fastest(rows, *(peer.name for peer in VIDEO_PEERS))
        ours = "ours" if bench.short_side_px is None else small_name(bench)
        return [Target(peer="best_from_video", ours=ours, theirs=best, at_least=3.0)]
    targets = [
        Target(peer="ceiling", ours="ours", theirs="ceiling", at_least=1.1),
        Target(peer="mmaction2_best", ours="ours", theirs=mmaction, at_least=1.9),
        Target(peer="pil", ours="ours", theirs="pil", at_least=3.0),
        Target(peer="torchvision", ours="ours", theirs="torchvision", at_least=2.1),
        Target(peer="torchcodec", ours="ours", theirs="torchcodec", at_least=1.15),
    ]
    if bench.short_side_px is not None:
        small = small_name(bench)
        targets += [
            Target(peer=f"torchcodec_{bench.short_side_px}", ours=small, theirs="torchcodec", at_least=2.2),
            Target(peer=f"native_{bench.short_side_px}", ours=small, theirs="ours", at_least=2.0),
        ]
    return targets


def _fastest(rows: Sequence[Row], *names: str) -> str:
    """The fastest of some rows; the first of the names where none was measured."""
    speeds = {row.name: row.frames_per_s for row in rows}
    return max(names, key=lambda name: speeds.get(name, 0.0))


def make_ratios(rows: Sequence[Row], targets: Sequence[Target]) -> dict[str, float | None]:
    """This loader / each of the others, and the ratio of each target, by name."""
    peers = [peer.name for peer in FRAME_PEERS + VIDEO_PEERS]
    asked = [Target(peer=name, ours="ours", theirs=name, at_least=0.0) for name in peers]
    return speed_ratios(rows, asked) | speed_ratios(rows, targets)


def format_online(result: OnlineResult) -> str:
    """All figures for a person."""
    lines = [f"\n{result.videos}", "", _HEAD]
    for row in result.rows:
        lines.append(_figures(row, result))
        lines += [f"    {text}" for text in (row.what, row.note, _frames_note(row, result)) if text]
    lines += ["", "targets, in clips/s"]
    return "\n".join(lines + [f"  {judge(target, result.ratios[target.peer])}" for target in result.targets])


_HEAD = f"{'':<20}{'clips/s':>8}{'ours / it':>11}{'CPU ms/clip':>13}{'PSNR dB':>9}{'rounds (s)':>16}"


def _figures(row: Row, result: OnlineResult) -> str:
    if not row.rounds_s:
        return f"{row.name:<20}{'-':>8}{'-':>11}{'-':>13}{'-':>9}"
    ratio, alike = result.ratios.get(row.name), result.likeness.get(row.name)
    cpu_ms = row.cpu_us_per_frame * result.clip_frames / 1e3
    return (
        f"{row.name:<20}{row.frames_per_s / result.clip_frames:>8.1f}"
        + ("" if ratio is None else f"{ratio:.2f}").rjust(11)
        + f"{cpu_ms:>13.2f}"
        + ("" if alike is None else f"{alike.psnr_db:.1f}").rjust(9)
        + f"{min(row.rounds_s):.2f} - {max(row.rounds_s):.2f}".rjust(16)
    )


def _frames_note(row: Row, result: OnlineResult) -> str:
    alike = result.likeness.get(row.name)
    if alike is None or not alike.other_clips:
        return ""
    return (
        f"{alike.other_clips} of {alike.clips} clips show other frames: it went by timestamps that are wrong"
    )


def online_json(result: OnlineResult) -> dict[str, Any]:
    """All figures for programs."""
    return {
        "videos": result.videos,
        "rows": [_json_row(row, result) for row in result.rows],
        "ratios": result.ratios,
        "targets": {target.peer: target.at_least for target in result.targets},
    }


def _json_row(row: Row, result: OnlineResult) -> Mapping[str, Any]:
    alike = result.likeness.get(row.name)
    found = {} if alike is None else asdict(alike)
    if alike is not None and not np.isfinite(alike.psnr_db):
        found["psnr_db"] = None  # JSON knows no infinity
    return asdict(row) | {"clips_per_s": row.frames_per_s / result.clip_frames} | found
