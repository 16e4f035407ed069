"""Builds finished folders of frames and their manifest, without a decoder."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.folder import FrameFolder, SourceFile, frame_name, write_frames_json
from pipeline.jpeg import encode_jpeg
from pipeline.manifest import Manifest, VideoRecord, read_manifest, write_manifest
from pipeline.online.pack import _Plan, _put_videos, write_pack
from pipeline.online.packfile import PackInfo
from tests.videos import grey

SPEC = {"format": 1, "quality": 90}
LENGTHS = {"A/one": 4, "A/two": 1, "B/three": 31}
"""Frames of the videos of `write_dataset`."""


def write_folder(
    root: Path, key: str, *, frames: int = 6, first: int = 0, spec: Mapping[str, Any] = SPEC
) -> FrameFolder:
    """A folder below `root`: frame i shows grey number first + i (modulo 31), at i / 25 s."""
    folder = root / key
    folder.mkdir(parents=True, exist_ok=True)
    times_us = [40_000 * i for i in range(frames)]
    jpegs = []
    for i, time_us in enumerate(times_us):
        picture = np.full((48, 64, 3), grey((first + i) % 31), np.uint8)
        jpegs.append(encode_jpeg(picture, quality=90, restart_mcus=4))
        (folder / frame_name(i, time_us)).write_bytes(jpegs[-1])
    written = FrameFolder(
        video=f"{key}.avi",
        status="ok",
        error=None,
        note=None,
        times_us=times_us,
        sizes=[len(jpeg) for jpeg in jpegs],
        crc32=[zlib.crc32(jpeg) for jpeg in jpegs],
        start_us=0,
        time_source="pts",
        width=64,
        height=48,
        fps=25.0,
        duration_s=frames / 25,
        rotation=0,
        mirrored=False,
        sample_aspect_ratio="1:1",
        stream=0,
        codec="mpeg4",
        pixel_format="yuv420p",
        restart_mcus=4,
        source=SourceFile(bytes=1, mtime_ns=2, sha256="ab"),
        spec=dict(spec),
    )
    write_frames_json(folder, written)
    return written


def record_of(key: str, num_frames: int, *, label: int, class_name: str, **other: Any) -> VideoRecord:
    """A manifest's row for a folder of `write_folder`; `other` replaces what is usual."""
    values = {
        "video": f"{key}.avi",
        "frames": key,
        "class_name": class_name,
        "label": label,
        "group": key,
        "num_frames": num_frames,
        "width": 64,
        "height": 48,
        "fps": 25.0,
        "duration_s": num_frames / 25,
        "start_s": 0.0,
        "time_source": "pts",
        "status": "ok",
        "error": None,
        "note": None,
        "splits": {},
    }
    return VideoRecord(**{**values, **other})


def write_tiny_manifest(
    path: Path, lengths: Mapping[str, int], *, spec: Mapping[str, Any] = SPEC, failed: tuple[str, ...] = ()
) -> Manifest:
    """A manifest of folders, by the number of frames of each; `failed` are videos without one."""
    classes = sorted({Path(key).parts[0] for key in (*lengths, *failed)})
    records = [
        record_of(key, count, label=classes.index(Path(key).parts[0]), class_name=Path(key).parts[0])
        for key, count in lengths.items()
    ]
    records += [
        record_of(
            key,
            0,
            label=classes.index(Path(key).parts[0]),
            class_name=Path(key).parts[0],
            frames="",
            status="failed",
            error="open: not a video",
            time_source="",
        )
        for key in failed
    ]
    write_manifest(path, records, dataset=path.stem, classes=classes, spec=spec)
    return read_manifest(path)


def write_dataset(root: Path) -> Path:
    """A dataset `tiny` below `root`, its frames and its pack; returns the dataset's folder."""
    for place, (key, count) in enumerate(LENGTHS.items()):
        write_folder(root / "tiny" / "frames", key, frames=count, first=5 * place)
    write_pack(root / "tiny" / "pack", root / "tiny" / "frames", list(LENGTHS))
    return root / "tiny"


def file_of(data: Path, key: str, index: int) -> bytes:
    """A JPEG of `write_folder` as it lies in its file."""
    return (data / "frames" / key / frame_name(index, 40_000 * index)).read_bytes()


def write_sparse_pack(folder: Path, num_videos: int, *, frames_each: int, frame_bytes: int) -> None:
    """A pack of videos `K/0000000` ..., whose JPEGs are holes in the file."""
    keys = [f"K/{k:07d}" for k in range(num_videos)]
    num_frames = num_videos * frames_each
    info = PackInfo(
        dataset=None,
        num_videos=num_videos,
        num_frames=num_frames,
        frames_bytes=num_frames * frame_bytes,
        num_tiles=0,
        key_bytes=sum(map(len, keys)),
        fingerprint="0" * 64,
        manifest=None,
        spec=dict(SPEC),
    )
    counts = np.full(num_videos, frames_each)
    folder.mkdir()
    with (folder / "index.bin").open("wb") as index:
        index.write((np.arange(num_frames + 1, dtype="<i8") * frame_bytes).tobytes())
        index.write((np.arange(num_frames, dtype="<i8") % frames_each * 40_000).tobytes())
        zeros = np.zeros(num_videos, np.uint64)
        _put_videos(index, _Plan(info=info, keys=keys, counts=counts, tiles=zeros, prints=zeros))
    with (folder / "frames.bin").open("wb") as file:
        file.truncate(info.frames_bytes)
    (folder / "tiles.bin").touch()
    (folder / "pack.json").write_text(info.to_json())
