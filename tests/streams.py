"""What a training run is given, as one digest; run as a module, one rank of several."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
import torch.distributed as dist

from pipeline.folder import frame_name, read_frames_json, write_frames_json
from pipeline.manifest import read_manifest
from pipeline.online import (
    AugmentSpec,
    ClipBatch,
    ClipDataset,
    EpochSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
)
from pipeline.online.loader import ClipLoader
from pipeline.online.pack import write_pack
from tests.folders import write_folder, write_tiny_manifest

WINDOW = WindowSpec(frames=4)
AUGMENT = AugmentSpec(size_px=16)
LENGTHS = {f"{name}/v{number}": 3 + 2 * number for name in "AB" for number in range(12)}


def write_textured_dataset(root: Path) -> Path:
    """Folders of frames that all differ, their manifest and their pack; returns the root."""
    rng = np.random.default_rng(0)
    for key, count in LENGTHS.items():
        frames = write_folder(root / "frames", key, frames=count)
        folder = root / "frames" / key
        jpegs = []
        for index, time_us in enumerate(frames.times_us):
            picture = cv2.resize(rng.integers(0, 256, (6, 8, 3), np.uint8), (64, 48))
            jpegs.append(cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_RST_INTERVAL, 2])[1].tobytes())
            (folder / frame_name(index, time_us)).write_bytes(jpegs[-1])
        from dataclasses import replace
        from zlib import crc32

        sizes, sums = [len(jpeg) for jpeg in jpegs], [crc32(jpeg) for jpeg in jpegs]
        write_frames_json(folder, replace(read_frames_json(folder), sizes=sizes, crc32=sums))
    manifest = write_tiny_manifest(root / "m.parquet", LENGTHS)
    write_pack(root / "pack", root / "frames", manifest)
    return root


def open_loader(
    root: Path, spec: LoaderSpec, *, store: str = "pack", rank: int = 0, world: int = 1, seed: int = 3
) -> ClipLoader:
    """A loader as a training run has it."""
    manifest = read_manifest(root / "m.parquet")
    dataset = ClipDataset(
        manifest,
        PackStore(root / "pack") if store == "pack" else FolderStore(root / "frames"),
        WINDOW,
        augment=AUGMENT,
    )
    return build_loader(dataset, EpochSampler(manifest, WINDOW, seed=seed, rank=rank, world=world), spec)


def samples(batches: Iterable[ClipBatch]) -> Iterator[str]:
    """One line for each clip: which, from where, its label and pixels."""
    for batch in batches:
        for row in range(len(batch.labels)):
            pixels = hashlib.sha256(batch.frames[row].numpy().tobytes()).hexdigest()
            yield f"{batch.videos[row]} {batch.starts[row]} {batch.labels[row]} {pixels}"


def two_epochs(loader: ClipLoader) -> list[str]:
    """Lines of epochs 0 and 1."""
    lines = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        lines += samples(loader)
    return lines


def merged(shares: list[list[str]]) -> list[str]:
    """What the ranks were dealt, back in one line."""
    return [line for round_ in zip(*shares, strict=True) for line in round_]


def main(root: str, rank: str, world: str) -> None:
    """One rank: rank 0 prints the merged lines."""
    store = f"file://{root}/rendezvous-{world}"
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(world))
    spec = LoaderSpec(batch_size=3, workers=1)
    loader = open_loader(Path(root), spec, rank=int(rank), world=int(world))
    shares: list[list[str]] = [[] for _ in range(int(world))]
    dist.all_gather_object(shares, two_epochs(loader))
    if rank == "0":
        print("\n".join(merged(shares)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
