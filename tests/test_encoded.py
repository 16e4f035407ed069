"""What workers send in place of pixels: the part of each JPEG that its crop needs, and a few numbers."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError, StoreError
from pipeline.jpeg import crop_jpegs, encode_jpeg
from pipeline.online import AugmentSpec, ClipRef, LoaderSpec, build_loader
from pipeline.online.augment import DrawnAugment, draw_augment
from pipeline.online.collate import collate_clips
from pipeline.online.crops import Axis
from pipeline.online.encoded import EncodedBatch, pack_drawn, unpack_drawn
from tests.encoded_clips import (
    AUGMENT,
    REFS,
    Scenes,
    damaged_pair,
    frame_of,
    make_pair,
    replace_frame,
    write_scenes,
)
from tests.folders import write_dataset
from tests.manifests import manifest_of


@pytest.fixture
def damaged(tmp_path):
    return write_dataset(tmp_path)


# Only bytes, and few.


def test_what_is_moved_is_the_part_of_each_jpeg_that_the_crop_needs():
    augment = AugmentSpec(size_px=32, scale=(0.1, 0.3))
    pixels, encoded = make_pair(augment)
    batch = encoded.__getitems__(REFS)
    assert isinstance(batch, EncodedBatch)
    parts, whole = [], 0
    for ref in REFS:
        store, key = pixels.store, pixels.columns.frames(ref.video)
        jpegs = store.read(key, range(ref.start, ref.start + 4))
        height, width = Scenes.sizes[Scenes.kind(key)]
        drawn = draw_augment(augment, ref.seed, height=height, width=width)
        parts += crop_jpegs(jpegs, *drawn.box).jpegs
        whole += sum(map(len, jpegs))
    assert batch.frames.numpy().tobytes() == b"".join(parts)
    assert len(batch.frames) < 0.8 * whole
    assert [bytes(jpeg.numpy()) for clip in batch.clips() for jpeg in clip.jpegs] == list(map(bytes, parts))


def test_the_bytes_of_a_batch_are_one_piece_of_shared_memory():
    _, encoded = make_pair(AUGMENT)
    loader = build_loader(encoded, REFS, LoaderSpec(batch_size=3, workers=1, persistent=False))
    for batch in loader:
        assert batch.frames.is_shared()
        assert len(pickle.dumps(tuple(batch[1:]))) < 6_000
        storages = {jpeg.untyped_storage().data_ptr() for clip in batch.clips() for jpeg in clip.jpegs}
        assert storages == {batch.frames.untyped_storage().data_ptr()}


def test_what_a_worker_is_sent_is_small():
    _, encoded = make_pair(AUGMENT, manifest=manifest_of([40] * 20_000), store=NoStore())
    assert len(pickle.dumps(encoded.__getstate__()["columns"])) < 2_000_000
    again = pickle.loads(pickle.dumps(encoded))
    assert again.manifest is None
    assert again.clip_bytes == encoded.clip_bytes


class NoStore:
    def read(self, video, indices):
        raise AssertionError("read")

    times_us = read


def test_the_memory_of_a_clip_is_reckoned_from_its_frames(tmp_path):
    _, encoded = make_pair(AUGMENT, manifest=write_scenes(tmp_path / "m.parquet", 6))
    assert encoded.clip_bytes == 4 * 120 * 160 // 2
    batch = encoded.__getitems__(REFS)
    assert len(batch.frames) < len(REFS) * encoded.clip_bytes


# What is drawn, as numbers.


axes = st.builds(
    Axis,
    *[st.integers(0, 70_000)] * 4,
    st.floats(1e-6, 1e6, allow_nan=False),
)


@given(
    part=st.tuples(st.integers(1, 65_500), st.integers(1, 65_500)),
    drawn=st.builds(DrawnAugment, axes, axes, st.booleans(), st.booleans()),
)
def test_what_was_drawn_comes_back_from_its_numbers(part, drawn):
    row = torch.tensor(pack_drawn(part, drawn), dtype=torch.float64)
    assert unpack_drawn(row.tolist()) == (part, drawn)


@pytest.mark.parametrize("options", [{"threads": 3}, {"readers": 2}])
def test_threads_and_readers_change_nothing(options):
    _, one = make_pair(AUGMENT)
    _, other = make_pair(AUGMENT, **options)
    for ours, theirs in zip(one.__getitems__(REFS)[:5], other.__getitems__(REFS)[:5], strict=True):
        assert torch.equal(ours, theirs)


def test_a_batch_passes_collation_and_keeps_its_kind():
    batch = make_pair(AUGMENT)[1].__getitems__(REFS)
    assert collate_clips(batch) is batch
    assert type(batch._replace(labels=batch.labels + 1)) is EncodedBatch


def test_a_single_clip_is_not_to_be_had():
    with pytest.raises(PipelineError, match="gives batches of JPEGs and no single clip"):
        make_pair(AUGMENT)[1][3]


# What is bad.


CUTS = {
    "cut at 60 %": lambda jpeg: jpeg[: len(jpeg) * 6 // 10],
    "ends in zeros": lambda jpeg: jpeg[: len(jpeg) * 6 // 10] + bytes(len(jpeg) * 4 // 10),
    "without its end": lambda jpeg: jpeg[:-2],
    "empty": lambda jpeg: b"",
    "zeroed": lambda jpeg: bytes(len(jpeg)),
    "of another size": lambda jpeg: encode_jpeg(np.zeros((32, 64, 3), np.uint8), quality=90, restart_mcus=4),
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_frame_that_is_cut_is_named_by_the_worker_or_replaced(damaged, kind):
    replace_frame(damaged, CUTS[kind](frame_of(damaged)))
    with pytest.raises(StoreError, match=r"frame 2 of 'A/one'.*make verify REPAIR=1"):
        damaged_pair(damaged).__getitems__([ClipRef(0, 0, 1)])
    skipping = damaged_pair(damaged, on_bad="skip")
    batch = skipping.__getitems__([ClipRef(0, 0, 1), ClipRef(2, 0, 2)])
    assert 0 not in batch.videos.tolist()
    assert skipping.replaced >= 1
    with pytest.raises(StoreError, match=r"frame 2 of 'A/one'"):
        skipping.__getitems__([ClipRef(0, 0, 0)])  # evaluation never replaces
