"""`bench scale`: what a clip costs as the dataset grows, from a thousand videos to a million.

The manifests are real. The packs are files with holes: only the frames that the measured clips need are
written, all of them the same JPEG, so that a million videos take a few hundred megabytes.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.manifest import FORMAT_VERSION, SCHEMA, read_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    EpochSampler,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.loader import ClipLoader
from pipeline.online.packfile import (
    FRAMES_BIN,
    INDEX_BIN,
    PACK_JSON,
    TILE_DTYPE,
    TILES_BIN,
    PackInfo,
    encode_key,
    key_hash,
)
from pipeline.tiles import measure_tiles
from scripts.bench_common import fresh_folder, rotated
from scripts.bench_memory import process_memory
from scripts.bench_online import GivenClips
from scripts.bench_quality import encode, read_pictures

_FRAMES_EACH = 32
_WINDOW = WindowSpec(frames=16)
_AUGMENT = AugmentSpec(size_px=112)
_NAMES_AT_ONCE = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBench:
    """What is measured."""

    scale_videos: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    """Videos of each dataset; each has 32 frames."""
    scale_clips: int = 320
    """Clips in a round, of the first epoch's order."""
    scale_workers: int = 2
    """Worker processes."""

    def __post_init__(self) -> None:
        if (
            not self.scale_videos
            or min(*self.scale_videos, self.scale_clips, self.scale_workers, 1 << 30) < 1
        ):
            raise ValueError(f"all numbers must be 1 or more, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """One size of a dataset."""

    videos: int
    start_up_s: float
    """Manifest and pack opened, dataset, sampler and loader made."""
    first_batch_s: float
    """From the first request to the first batch, the start of the workers included."""
    clips_per_s: float
    """Median over the rounds, by all workers."""
    clip_us: float
    """A clip in one process, processor's time: median over the rounds."""
    worker_mb: float
    """Private memory of the largest worker that is no page of a file, after all rounds."""
    pickle_kb: float
    """What each worker is sent when it starts."""


class _Opened:
    """A dataset of one size, and what was measured of it."""

    def __init__(self, folder: Path, videos: int, bench: ScaleBench) -> None:
        begin = time.perf_counter()
        manifest = read_manifest(folder / "m.parquet").select()
        self.dataset = ClipDataset(manifest, PackStore(folder / "pack"), _WINDOW, augment=_AUGMENT)
        self.refs = _refs(EpochSampler(manifest, _WINDOW), bench)
        self.loader: ClipLoader = build_loader(
            self.dataset, GivenClips(self.refs), LoaderSpec(workers=bench.scale_workers)
        )
        self.start_up_s = time.perf_counter() - begin
        self.videos = videos
        self.pickle_kb = len(ForkingPickler.dumps(self.dataset)) / 1e3
        begin = time.perf_counter()
        batches = iter(self.loader)
        next(batches)
        self.first_batch_s = time.perf_counter() - begin
        for _ in batches:
            pass
        self.clips_per_s: list[float] = []
        self.clip_us: list[float] = []

    def measure(self) -> None:
        """One round: an epoch by the workers, and some clips in this process."""
        begin = time.perf_counter()
        count = sum(len(batch.labels) for batch in self.loader)
        self.clips_per_s.append(count / (time.perf_counter() - begin))
        some = self.refs[:64]
        begin = time.thread_time()
        self.dataset.__getitems__(some)
        self.clip_us.append((time.thread_time() - begin) / len(some) * 1e6)

    def row(self, worker_mb: float) -> ScaleRow:
        """All that was found."""
        return ScaleRow(
            videos=self.videos,
            start_up_s=self.start_up_s,
            first_batch_s=self.first_batch_s,
            clips_per_s=median(self.clips_per_s),
            clip_us=median(self.clip_us),
            worker_mb=worker_mb,
            pickle_kb=self.pickle_kb,
        )


def measure_scale(
    clip: Path,
    bench: ScaleBench,
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> list[ScaleRow]:
    """Datasets of all sizes out of one picture of a clip, measured in turns."""
    jpeg = encode(next(read_pictures(clip)))
    with fresh_folder(work_dir) as folder:
        opened, workers = [], []
        for videos in bench.scale_videos:
            on_case(f"{videos:,} videos")
            make_dataset(folder / str(videos), videos, jpeg, bench)
            with _new_workers(bench) as found:
                opened.append(_Opened(folder / str(videos), videos, bench))
            workers.append(found)
        for number in range(rounds):
            for each in rotated(opened, number):
                on_case(f"round {number + 1}, {each.videos:,} videos")
                each.measure()
        return [each.row(_most_mb(some)) for each, some in zip(opened, workers, strict=True)]


@contextmanager
def _new_workers(bench: ScaleBench) -> Iterator[list[psutil.Process]]:
    """The processes that the block starts, as soon as it is over."""
    before = set(psutil.Process().children(recursive=True))
    found: list[psutil.Process] = []
    yield found
    new = [process for process in psutil.Process().children(recursive=True) if process not in before]
    # The first loader also starts the server that forks the workers.
    found += sorted(new, key=lambda process: process.pid)[-bench.scale_workers :]


def _most_mb(workers: Sequence[psutil.Process]) -> float:
    return float(max(process_memory(worker.pid).private for worker in workers) / 1e6)


def _refs(sampler: EpochSampler, bench: ScaleBench) -> list[ClipRef]:
    return sampler.refs_at(np.arange(min(bench.scale_clips, len(sampler))), epoch=0)


# Datasets made on the spot.


def make_dataset(folder: Path, num_videos: int, jpeg: bytes, bench: ScaleBench) -> None:
    """A manifest `m.parquet` and a `pack` of so many videos, whose frames are all this JPEG."""
    folder.mkdir()
    _write_manifest(folder / "m.parquet", num_videos)
    refs = _refs(EpochSampler(read_manifest(folder / "m.parquet"), _WINDOW), bench)
    _write_pack(folder / "pack", num_videos, jpeg, refs)


def _key(row: int) -> str:
    return f"Class{row % 100:02d}/v_{row:07d}"


def _write_manifest(path: Path, num_videos: int) -> None:
    """As `write_manifest` does it, but without an object for each row."""
    keys = sorted(map(_key, range(num_videos)))
    labels = np.array([int(key[5:7]) for key in keys])
    columns: dict[str, Any] = {
        "video": [f"{key}.avi" for key in keys],
        "frames": keys,
        "class_name": [key[:7] for key in keys],
        "label": labels,
        "group": keys,
        "num_frames": np.full(num_videos, _FRAMES_EACH),
        "width": np.full(num_videos, 320),
        "height": np.full(num_videos, 240),
        "fps": np.full(num_videos, 25.0),
        "duration_s": np.full(num_videos, _FRAMES_EACH / 25),
        "start_s": np.zeros(num_videos),
        "time_source": ["pts"] * num_videos,
        "status": ["ok"] * num_videos,
        "error": [None] * num_videos,
        "note": [None] * num_videos,
    }
    classes = [f"Class{label:02d}" for label in range(100)]
    about = {"format": FORMAT_VERSION, "dataset": "scale", "classes": classes, "spec": {}}
    schema = SCHEMA.with_metadata({name: json.dumps(value) for name, value in about.items()})
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCHEMA]
    pq.write_table(pa.table(arrays, schema=schema), path, compression="zstd")


def _write_pack(folder: Path, num_videos: int, jpeg: bytes, refs: Sequence[ClipRef]) -> None:
    keys = sorted(map(_key, range(num_videos)))
    num_frames = num_videos * _FRAMES_EACH
    tiles = np.asarray(measure_tiles(jpeg), TILE_DTYPE)
    info = PackInfo(
        dataset="scale",
        num_videos=num_videos,
        num_frames=num_frames,
        frames_bytes=num_frames * len(jpeg),
        num_tiles=num_frames * len(tiles),
        key_bytes=sum(map(len, keys)),
        fingerprint="0" * 64,
        manifest=None,
        spec=None,
    )
    folder.mkdir()
    with (folder / INDEX_BIN).open("wb") as index:
        _write_index(index, info, keys, len(jpeg))
    for name, frame in ((FRAMES_BIN, jpeg), (TILES_BIN, tiles.tobytes())):
        with (folder / name).open("wb") as file:
            file.truncate(num_frames * len(frame))
            for ref in refs:
                first = ref.video * _FRAMES_EACH + ref.start
                os.pwrite(file.fileno(), frame * _WINDOW.frames, first * len(frame))
    (folder / PACK_JSON).write_text(info.to_json(), encoding="utf-8")


def _write_index(index: BinaryIO, info: PackInfo, keys: list[str], frame_bytes: int) -> None:
    hashes = np.fromiter((key_hash(encode_key(key)) for key in keys), np.uint64, len(keys))
    order = np.argsort(hashes, kind="stable")
    arrays = {
        "frame_offsets": np.arange(info.num_frames + 1) * frame_bytes,
        "times_us": np.arange(info.num_frames) % _FRAMES_EACH * 40_000,
        "first_frames": np.arange(info.num_videos + 1) * _FRAMES_EACH,
        "first_tiles": np.arange(info.num_videos + 1) * (info.num_tiles // info.num_videos),
        "key_offsets": np.cumsum([0, *map(len, keys)]),
        "sorted_hashes": hashes[order],
        "sorted_rows": order,
        "prints": np.zeros(info.num_videos),
        "keys": np.frombuffer("".join(keys).encode(), np.uint8),
    }
    for name, (dtype, offset, _) in info.sections().items():
        index.seek(offset)
        index.write(arrays[name].astype(dtype).tobytes())


# What came out.


def format_scale(rows: Sequence[ScaleRow]) -> str:
    """All figures for a person."""
    lines = [
        f"\n{'videos':>10}{'start-up s':>12}{'first batch s':>15}{'clips/s':>9}{'CPU us/clip':>13}"
        f"{'worker MB':>11}{'pickle kB':>11}"
    ]
    lines += [
        f"{row.videos:>10,}{row.start_up_s:>12.3f}{row.first_batch_s:>15.2f}{row.clips_per_s:>9.1f}"
        f"{row.clip_us:>13,.0f}{row.worker_mb:>11.1f}{row.pickle_kb:>11.1f}"
        for row in rows
    ]
    first, last = rows[0], rows[-1]
    lines.append(
        f"a clip of {last.videos:,} videos / of {first.videos:,}: {last.clip_us / first.clip_us:.2f}"
    )
    return "\n".join(lines)


def scale_json(rows: Sequence[ScaleRow]) -> dict[str, Any]:
    """All figures for programs."""
    growth = rows[-1].clip_us / rows[0].clip_us
    return {"rows": [asdict(row) for row in rows], "ratios": {"clip_cost_growth": growth}}
