"""`bench storage`: what a short side and a JPEG quality cost in bytes and bring in clips per second."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import cv2
import numpy as np
from torch.utils.data import DataLoader

from pipeline.jpeg import decode_jpeg
from scripts.bench_clips import Stored, link_videos, make_long_videos, store_frames
from scripts.bench_common import Case, fresh_folder, make_row, run_rounds
from scripts.bench_online import Contender, draw_refs, own_loader, run_epoch, start_worker_server
from scripts.bench_online_report import OnlineBench
from scripts.bench_quality import read_pictures

_LOOKED_AT = range(0, 30, 10)
"""Frames of a video whose likeness is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageBench:
    """Which ways of storing frames are measured."""

    storage_sides: tuple[int, ...] = (128, 171, 256)
    """Short sides (pixels), besides the videos' own."""
    storage_qualities: tuple[int, ...] = (75, 85, 90, 95)
    """JPEG qualities."""
    storage_clips: int = 256
    """Clips that are made of each kind in a round."""
    storage_workers: int = 2
    """Worker processes."""
    storage_size_px: int = 112
    """Height and width of the clips; they are random resized crops of scale 0.25 to 1 of 16 frames."""
    storage_large: bool = False
    """Use H.264 videos of 640x480, made out of the clips first."""

    def __post_init__(self) -> None:
        if min(self.storage_clips, self.storage_workers, self.storage_size_px, *self.storage_sides) < 1:
            raise ValueError(f"all numbers must be 1 or more, got {self}")
        if not self.storage_qualities or not all(1 <= quality <= 100 for quality in self.storage_qualities):
            raise ValueError(f"qualities must be 1 to 100, got {self.storage_qualities}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRow:
    """One way of storing frames."""

    side: int | None
    """Short side asked for (pixels); None for the videos' own."""
    quality: int
    size: str
    """Width and height of the first video's frames."""
    bytes_per_frame: float
    psnr_db: float
    """Of frames brought to the clip's size, against the decoded pictures brought there: mean over frames."""
    clips_per_s: float
    """Median over the rounds."""
    cpu_ms_per_clip: float


def measure_storage(
    clips: Sequence[Path],
    bench: StorageBench,
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> list[StorageRow]:
    """Store the frames in every way, then make clips of all of them in turns.

    A short side that is no smaller than the first video's own is left out: frames are never enlarged.
    """
    online = OnlineBench(
        clips_per_round=bench.storage_clips, workers=bench.storage_workers, size_px=bench.storage_size_px
    )
    start_worker_server()
    with fresh_folder(work_dir) as folder:
        videos = folder / "videos"
        (make_long_videos if bench.storage_large else link_videos)(clips, videos)
        kinds = dict(_store_all(videos, folder, bench, on_case))
        loaders = {name: _loader(stored, online) for name, stored in kinds.items()}
        contenders = [Contender(name, partial(_same, loader), None) for name, loader in loaders.items()]
        for contender in contenders:
            on_case(f"start of {contender.name}")
            run_epoch(contender, online, folder)
        cases = [Case(each.name, partial(run_epoch, each, online)) for each in contenders]
        timings = run_rounds(cases, rounds=rounds, work_dir=work_dir, on_case=on_case)
        rows = []
        for name, stored in kinds.items():
            row = make_row(name, "", timings[name])
            info, first = stored.store.info, stored.manifest[0]
            side, _, quality = name.partition(" q")
            rows.append(
                StorageRow(
                    side=None if side == "native" else int(side),
                    quality=int(quality),
                    size=f"{first.width}x{first.height}",
                    bytes_per_frame=info.frames_bytes / info.num_frames,
                    psnr_db=_psnr_db(stored, bench.storage_size_px),
                    clips_per_s=row.frames_per_s / online.clip_frames,
                    cpu_ms_per_clip=row.cpu_us_per_frame * online.clip_frames / 1e3,
                )
            )
    return rows


def _store_all(
    videos: Path, folder: Path, bench: StorageBench, on_case: Callable[[str], None]
) -> Iterator[tuple[str, Stored]]:
    native_side = 0
    for side in (None, *sorted(bench.storage_sides, reverse=True)):
        if side is not None and side >= native_side:
            continue
        for quality in bench.storage_qualities:
            name = f"{'native' if side is None else side} q{quality}"
            on_case(f"frames, {name}")
            stored = store_frames(videos, folder / name, quality=quality, short_side_px=side)
            native_side = native_side or min(stored.manifest[0].width, stored.manifest[0].height)
            yield name, stored


def _loader(stored: Stored, online: OnlineBench) -> DataLoader[Any]:
    return own_loader(stored, stored.store, draw_refs(stored.manifest, online), online)


def _same(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader


def _psnr_db(stored: Stored, size_px: int) -> float:
    """How near stored frames come to the decoded pictures where both are shown at the clip's size."""
    found = []
    for record in stored.manifest:
        pictures = enumerate(islice(read_pictures(stored.videos_root / record.video), _LOOKED_AT.stop))
        looked_at = [(index, picture.copy()) for index, picture in pictures if index in _LOOKED_AT]
        jpegs = stored.store.read(record.frames, [index for index, _ in looked_at])
        for jpeg, (_, picture) in zip(jpegs, looked_at, strict=True):
            scale = size_px / min(picture.shape[:2])
            size_wh = round(picture.shape[1] * scale), round(picture.shape[0] * scale)
            found.append(cv2.PSNR(_shown(decode_jpeg(jpeg)[:, :, ::-1], size_wh), _shown(picture, size_wh)))
    return mean(found)


def _shown(picture: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
    return np.asarray(cv2.resize(np.ascontiguousarray(picture), size_wh, interpolation=cv2.INTER_AREA))


def format_storage(rows: Sequence[StorageRow], bench: StorageBench) -> str:
    """All figures for a person; a ratio is clips/s against native size at quality 90 or nearest to it."""
    own, size = _reference(rows), bench.storage_size_px
    lines = [
        f"\nclips of 16 x {size} x {size}, random resized crops of scale 0.25 to 1",
        "",
        f"{'short side':>11}{'quality':>9}{'size':>11}{'bytes/frame':>13}{'GB/hour':>9}{'PSNR dB':>9}"
        f"{'clips/s':>9}{'ratio':>7}{'CPU ms/clip':>13}",
    ]
    for row in rows:
        side = "native" if row.side is None else str(row.side)
        lines.append(
            f"{side:>11}{row.quality:>9}{row.size:>11}{row.bytes_per_frame:>13,.0f}"
            f"{row.bytes_per_frame * 25 * 3600 / 1e9:>9.2f}{row.psnr_db:>9.1f}{row.clips_per_s:>9.1f}"
            f"{row.clips_per_s / own.clips_per_s:>7.2f}{row.cpu_ms_per_clip:>13.2f}"
        )
    lines.append(
        "\nGB/hour: of video at 25 frames/s. PSNR: at the clip's size, against the decoded pictures."
    )
    left_out = sorted(set(bench.storage_sides) - {row.side for row in rows})
    if left_out:
        lines.append(f"Short side {', '.join(map(str, left_out))}: the videos are no larger, so as native.")
    return "\n".join(lines)


def _reference(rows: Sequence[StorageRow]) -> StorageRow:
    return min((row for row in rows if row.side is None), key=lambda row: abs(row.quality - 90))


def storage_json(rows: Sequence[StorageRow]) -> dict[str, Any]:
    """All figures for programs; `ratios` are clips/s against the videos' own size at quality 90."""
    own = _reference(rows)
    names = [f"{'native' if row.side is None else row.side}_q{row.quality}" for row in rows]
    ratios = {name: row.clips_per_s / own.clips_per_s for name, row in zip(names, rows, strict=True)}
    return {"rows": [asdict(row) for row in rows], "ratios": ratios}
