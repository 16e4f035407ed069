"""Videos, pairs of datasets and damaged frames, for tests of JPEGs that are decoded on a device."""

import io
from dataclasses import replace

import cv2
import numpy as np
import pytest

from pipeline.folder import frame_name
from pipeline.jpeg import encode_jpeg
from pipeline.manifest import read_manifest, write_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    FolderStore,
    LoaderSpec,
    WindowSpec,
    build_loader,
)
from pipeline.online.device_decode import DecodedBatches
from pipeline.online.encoded import EncodedClipDataset
from tests.folders import LENGTHS, record_of, write_tiny_manifest
from tests.manifests import manifest_of

WINDOW = WindowSpec(frames=4)
AUGMENT = AugmentSpec(size_px=32)
MODES = {
    "random": AugmentSpec(size_px=56),
    "small crops": AugmentSpec(size_px=(40, 64), scale=(0.02, 0.2)),
    "no filter": AugmentSpec(size_px=56, antialias=False),
    "fixed places": AugmentSpec(size_px=48, mode="multi_scale_crop"),
    "jitter": AugmentSpec(size_px=48, mode="short_side_jitter"),
}
EVALUATION = {mode: AugmentSpec(size_px=56, mode=mode) for mode in ("centre", "three_crop")}


REFS = [ClipRef(video, 3 * video, 100 + video) for video in range(6)]


class Scenes:
    """A store of videos of 40 smooth, moving pictures; those of odd rows are of another size."""

    sizes = ((120, 160), (96, 144))

    def __init__(self, *, restart_mcus=2):
        rng = np.random.default_rng(0)
        self.jpegs = []
        for height, width in self.sizes:
            small = rng.integers(0, 256, (9, 12 + 40, 3), np.uint8)
            shots = [cv2.resize(small[:, k : k + 12], (width, height), interpolation=2) for k in range(40)]
            self.jpegs.append([encode_jpeg(shot, quality=90, restart_mcus=restart_mcus) for shot in shots])

    def read(self, video, indices):
        return [self.jpegs[self.kind(video)][int(index)] for index in indices]

    def times_us(self, video):
        return np.arange(40) * 40_000

    @staticmethod
    def kind(video):
        return int(video.removesuffix(".avi")[-1]) % 2


def write_scenes(path, rows):
    """A manifest of `Scenes` that knows the sizes of its frames."""
    records = []
    for row in range(rows):
        height, width = Scenes.sizes[row % 2]
        key = f"A/v_{row:07d}"
        records.append(record_of(key, 40, label=0, class_name="A", height=height, width=width))
    write_manifest(path, records, dataset="scenes", classes=["A"], spec={"format": 1})
    return read_manifest(path)


def make_pair(augment, *, store=None, manifest=None, window=WINDOW, **options):
    """The dataset that decodes in workers, to RGB as the device does, and the one that does not."""
    manifest, store = manifest or manifest_of([40] * 6), store or Scenes()
    pixels = ClipDataset(manifest, store, window, augment=augment and replace(augment, resize_in="rgb"))
    return pixels, EncodedClipDataset(manifest, store, window, augment=augment, **options)


def opened(dataset, device="cpu", *, refs=None, workers=0, batch_size=4, **options):
    loader = build_loader(dataset, list(refs or []), LoaderSpec(batch_size=batch_size, workers=workers))
    return DecodedBatches(loader, device, **options)


def decode_refs(dataset, refs, device="cpu", **options):
    return opened(dataset, device, **options).decoded(dataset.__getitems__(refs))


def replace_frame(data, jpeg, *, index=2):
    """Another JPEG in place of one of video A/one, and its size in frames.json."""
    folder = data / "frames" / "A" / "one"
    path = folder / frame_name(index, 40_000 * index)
    text, before = (folder / "frames.json").read_text(), path.stat().st_size
    path.write_bytes(jpeg)
    at = text.index('"sizes"')
    head, sizes, tail = text[:at], text[at : text.index("]", at)], text[text.index("]", at) :]
    parts = sizes.split("[")[1].split(",")
    assert int(parts[index]) == before
    parts[index] = str(len(jpeg))
    (folder / "frames.json").write_text(f'{head}"sizes": [{",".join(parts)}{tail}')


def frame_of(data, index=2):
    return (data / "frames" / "A" / "one" / frame_name(index, 40_000 * index)).read_bytes()


def damaged_pair(data, **options):
    manifest = write_tiny_manifest(data / "m.parquet", LENGTHS)
    return make_pair(AUGMENT, store=FolderStore(data / "frames"), manifest=manifest, **options)[1]


def cmyk_jpeg():
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (64, 48), (90, 90, 90)).convert("CMYK").save(buffer, "JPEG", quality=95)
    return buffer.getvalue()
