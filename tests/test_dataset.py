"""A ref to a clip: pure, from any store, in any process; and what happens when a frame is bad."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from pipeline.errors import PipelineError, StoreError
from pipeline.folder import frame_name
from pipeline.offline.frames import FrameSpec, extract_frames
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    EpochSampler,
    FolderStore,
    PackStore,
    WindowSpec,
)
from pipeline.online.augment import draw_augment
from pipeline.online.collate import Clip, collate_clips
from pipeline.online.windows import ShortVideoError
from tests.folders import LENGTHS, write_dataset, write_tiny_manifest
from tests.manifests import manifest_of
from tests.videos import grey

WINDOW = WindowSpec(frames=4)
AUGMENT = AugmentSpec(size_px=32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def manifest(tiny):
    return write_tiny_manifest(tiny / "m.parquet", LENGTHS)


@pytest.fixture(params=["folder", "pack"])
def store(request, tiny):
    return FolderStore(tiny / "frames") if request.param == "folder" else PackStore(tiny / "pack")


def greys(clip) -> list[int]:
    return [round((float(frame.float().mean()) - 4) / 8) for frame in clip.frames]


def test_a_clip_holds_the_frames_that_its_ref_asks_for(store, manifest):
    clip = ClipDataset(manifest, store, WINDOW)[ClipRef(2, 7, 1)]
    assert greys(clip) == [10 + 7 + k for k in range(4)]
    assert clip.frames.shape == (4, 48, 64, 3)
    assert clip.frames.dtype == torch.uint8
    assert (clip.label, clip.video, clip.start) == (1, 2, 7)
    np.testing.assert_allclose(clip.times_s, np.arange(7, 11) / 25)


@pytest.mark.parametrize(("short", "expected"), [("loop", [0, 1, 2, 3, 0, 1]), ("hold", [0, 1, 2, 3, 3, 3])])
def test_a_short_video_fills_a_clip_by_the_stated_policy(store, manifest, short, expected):
    dataset = ClipDataset(manifest, store, WindowSpec(frames=6, short=short))
    assert greys(dataset[ClipRef(0, 0, 1)]) == expected


def test_a_short_video_is_an_error_where_the_policy_says_so(store, manifest):
    dataset = ClipDataset(manifest, store, WindowSpec(frames=6, short="error"))
    with pytest.raises(ShortVideoError, match="A/one"):
        dataset[ClipRef(0, 0, 1)]


def test_a_batch_is_its_clips(store, manifest):
    dataset = ClipDataset(manifest, store, WINDOW, augment=AUGMENT)
    refs = [ClipRef(2, 3, 11), ClipRef(0, 0, 12), ClipRef(2, 20, 13), ClipRef(1, 0, 14)]
    batch = dataset.__getitems__(refs)
    again = collate_clips([dataset[ref] for ref in refs])
    assert batch.frames.shape == (4, 4, 32, 32, 3)
    for ours, theirs in zip(batch[:-1], again[:-1], strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert batch.extras["seed"].tolist() == [11, 12, 13, 14]
    assert [batch.labels.dtype, batch.videos.dtype, batch.starts.dtype] == [torch.int64] * 3
    assert batch.times_s.dtype == torch.float64


def test_the_same_ref_gives_the_same_clip_and_another_seed_another(store, manifest):
    dataset = ClipDataset(manifest, store, WINDOW, augment=AugmentSpec(size_px=32, scale=(0.1, 0.5)))
    video = write_textured(dataset)
    one, same, other = (video[ClipRef(0, 0, seed)].frames for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


class Textured:
    """A store of one picture of noise, many times."""

    def __init__(self):
        noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
        self.jpeg = cv2.imencode(".jpg", noise, [cv2.IMWRITE_JPEG_RST_INTERVAL, 2])[1].tobytes()

    def read(self, video, indices):
        return [self.jpeg] * len(indices)

    def times_us(self, video):
        return np.arange(40) * 40_000


def write_textured(dataset: ClipDataset) -> ClipDataset:
    return ClipDataset(manifest_of([40, 40]), Textured(), dataset.window, augment=dataset.augment)


def test_equal_frames_are_equal_after_every_augmentation():
    augment = AugmentSpec(size_px=24, scale=(0.1, 0.9))
    transform = v2.Compose([v2.ColorJitter(0.5, 0.5, 0.5, 0.2), v2.RandomErasing(1.0), v2.RandomRotation(20)])
    dataset = ClipDataset(
        manifest_of([40, 40]), Textured(), WindowSpec(frames=16), augment=augment, transform=transform
    )
    clips = [dataset[ClipRef(0, 0, seed)].frames for seed in (1, 1, 2)]
    for frames in clips:
        assert (frames == frames[0]).all()
    assert torch.equal(clips[0], clips[1])
    assert not torch.equal(clips[0], clips[2])


def test_threads_change_nothing(store, manifest):
    refs = [ClipRef(2, k, 100 + k) for k in range(9)]
    one = ClipDataset(manifest, store, WINDOW, augment=AUGMENT).__getitems__(refs)
    three = ClipDataset(manifest, store, WINDOW, augment=AUGMENT, threads=3).__getitems__(refs)
    assert torch.equal(one.frames, three.frames)


def test_a_position_is_the_clip_of_epoch_0(store, manifest):
    dataset = ClipDataset(manifest, store, WINDOW, augment=AUGMENT)
    refs = EpochSampler(manifest, WINDOW).refs_at(np.arange(3), epoch=0)
    assert len(dataset) == 3
    for position, ref in enumerate(refs):
        assert torch.equal(dataset[position].frames, dataset[ref].frames)
    assert torch.equal(dataset[-1].frames, dataset[refs[-1]].frames)
    with pytest.raises(IndexError):
        dataset[3]


def test_ordinary_tools_work_with_positions(store, manifest):
    dataset = ClipDataset(manifest, store, WINDOW, augment=AUGMENT)
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate_clips)
    assert [len(batch.labels) for batch in loader] == [2, 1]


def test_clips_of_different_sizes_ask_for_an_augmentation():
    frames = [torch.zeros(2, side, side, 3, dtype=torch.uint8) for side in (4, 5)]
    clips = [Clip(each, 0, 0, 0, torch.zeros(2), {}) for each in frames]
    with pytest.raises(PipelineError, match="give augment="):
        collate_clips(clips)


def start_up_pickle(dataset: ClipDataset) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(dataset)
    return buffer.getvalue()


def test_what_a_worker_is_sent_is_small_for_a_million_videos(tiny):
    dataset = ClipDataset(
        manifest_of(np.full(1_000_000, 40)), PackStore(tiny / "pack"), WINDOW, augment=AUGMENT
    )
    assert len(start_up_pickle(dataset)) < 100_000
    assert dataset.columns.frames(999_999) == "A/v_0999999.avi"


@pytest.fixture
def damaged(tmp_path) -> Path:
    return write_dataset(tmp_path)


DAMAGE = {
    "cut at 60 %": lambda jpeg: jpeg[: len(jpeg) * 6 // 10] + bytes(len(jpeg) - len(jpeg) * 6 // 10),
    "empty": lambda jpeg: b"",
    "zeroed": lambda jpeg: bytes(len(jpeg)),
    "missing": lambda jpeg: None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_frame_is_named_with_its_video(damaged, kind):
    path = damaged / "frames" / "A" / "one" / frame_name(2, 80_000)
    jpeg = DAMAGE[kind](path.read_bytes())
    path.unlink() if jpeg is None else path.write_bytes(jpeg)
    manifest = write_tiny_manifest(damaged / "m.parquet", LENGTHS)
    dataset = ClipDataset(manifest, FolderStore(damaged / "frames"), WINDOW, augment=AUGMENT)
    with pytest.raises(StoreError, match=r"A/one"):
        dataset[ClipRef(0, 0, 1)]
    skipping = ClipDataset(manifest, FolderStore(damaged / "frames"), WINDOW, augment=AUGMENT, on_bad="skip")
    clips = [skipping[ClipRef(0, 0, seed)] for seed in (1, 2, 3, 1)]
    assert all(clip.video != 0 for clip in clips)
    assert skipping.replaced >= 4
    assert torch.equal(clips[0].frames, clips[3].frames)
    with pytest.raises(StoreError, match=r"A/one"):
        skipping[ClipRef(0, 0, 0)]  # evaluation never replaces


def test_a_replacement_is_of_the_same_source(damaged):
    path = damaged / "frames" / "A" / "one" / frame_name(2, 80_000)
    path.write_bytes(b"")
    manifest = write_tiny_manifest(damaged / "m.parquet", LENGTHS)
    ids = np.zeros(len(manifest), np.int64)
    ids[[0, 2]] = 1
    dataset = ClipDataset(
        manifest,
        FolderStore(damaged / "frames"),
        WINDOW,
        augment=AUGMENT,
        on_bad="skip",
        row_extras={"source_id": ids},
    )
    clips = [dataset[ClipRef(0, 0, seed)] for seed in range(1, 9)]
    assert {(clip.video, int(clip.extras["source_id"])) for clip in clips} == {(2, 1)}


def test_replacements_end_at_their_limit(damaged):
    path = damaged / "frames" / "A" / "one" / frame_name(2, 80_000)
    path.write_bytes(b"")
    manifest = write_tiny_manifest(damaged / "m.parquet", LENGTHS)
    dataset = ClipDataset(
        manifest, FolderStore(damaged / "frames"), WINDOW, augment=AUGMENT, on_bad="skip", max_skips=2
    )
    with pytest.raises(StoreError):
        for seed in range(1, 20):
            dataset[ClipRef(0, 0, seed)]
    assert dataset.replaced == 2


def test_a_grey_jpeg_is_a_frame_like_any_other(damaged):
    path = damaged / "frames" / "A" / "two" / frame_name(0, 0)
    picture = cv2.imencode(".jpg", np.full((48, 64), grey(9), np.uint8))[1].tobytes()
    path.write_bytes(picture)
    text = (path.parent / "frames.json").read_text()
    size = text[text.index('"sizes"') :].partition("\n")[0]
    (path.parent / "frames.json").write_text(text.replace(size, f'"sizes": [{len(picture)}],'))
    manifest = write_tiny_manifest(damaged / "m.parquet", LENGTHS)
    dataset = ClipDataset(manifest, FolderStore(damaged / "frames"), WINDOW, augment=AUGMENT)
    assert greys(dataset[ClipRef(1, 0, 1)]) == [9, 9, 9, 9]


@pytest.mark.parametrize(("size_px", "factor"), [(100, 2), (50, 4), (25, 8)])
def test_a_reduced_decode_is_near_the_exact_one(shared, tmp_path, size_px, factor):
    """What `reduce` costs in accuracy, on a real clip of 640x360: under 3 levels on the average."""
    video = shared / "data" / "videos" / "real" / "misc" / "basketball.mp4"
    frames = extract_frames(video, tmp_path / "A" / "x", FrameSpec(max_frames=40))
    manifest = write_tiny_manifest(tmp_path / "m.parquet", {"A/x": frames.num_frames})
    specs = [AugmentSpec(size_px=size_px, scale=(0.6, 1.0), reduce=reduce) for reduce in (False, True)]
    exact, reduced = (ClipDataset(manifest, FolderStore(tmp_path), WINDOW, augment=spec) for spec in specs)
    differences = []
    for seed in range(1, 9):
        one, other = (dataset[ClipRef(0, 3 * seed, seed)].frames.float() for dataset in (exact, reduced))
        differences.append(float((one - other).abs().mean()))
    drawn = draw_augment(specs[0], 1, height=360, width=640)
    assert drawn.reduction == factor
    assert 0 < np.mean(differences) < 3


def test_evaluation_is_never_reduced(store, manifest):
    exact, reduced = (
        ClipDataset(manifest, store, WINDOW, augment=AugmentSpec(size_px=8, mode="centre", reduce=reduce))
        for reduce in (False, True)
    )
    assert torch.equal(exact[ClipRef(2, 0, 0, 1)].frames, reduced[ClipRef(2, 0, 0, 1)].frames)


def test_a_manifest_of_other_frames_than_the_stores_is_noticed(store, tiny):
    manifest = write_tiny_manifest(tiny / "other.parquet", {**LENGTHS, "A/one": 50})
    dataset = ClipDataset(manifest, store, WINDOW, augment=AUGMENT, on_bad="skip")
    with pytest.raises(PipelineError, match="manifest and store are of different frames"):
        dataset[ClipRef(0, 40, 1)]
