"""Further sources and numbers of rows, from the dataset to the batch, on every path that a clip can take."""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from pipeline.errors import SourceError
from pipeline.folder import frame_name
from pipeline.manifest import read_manifest, write_manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    EpochSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
    prefetch,
)
from pipeline.online.augment import draw_augment
from pipeline.online.collate import CollateError
from pipeline.online.extras import keys_of, leave_out_missing
from pipeline.online.hyperspectral import CubeSource, CubeSpec
from pipeline.online.series import SeriesSource, SeriesSpec
from pipeline.online.sources import ClipSpan, SourceSample
from tests.folders import LENGTHS, SPEC, record_of, write_dataset
from tests.test_dataset import start_up_pickle
from tests.test_envi import write_envi

WINDOW = WindowSpec(frames=4)
AUGMENT = AugmentSpec(size_px=32)
START_S = {key: 2.5 + place for place, key in enumerate(LENGTHS)}
IDS = np.array([7, 8, 9], dtype=np.int32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Videos, and of each a series of 100 Hz that reads 10 t and -t at video time t, and a cube."""
    root = write_dataset(tmp_path_factory.mktemp("data"))
    for place, (key, count) in enumerate(LENGTHS.items()):
        times_s = np.arange(0, count / 25 + 0.2, 0.01)
        rows = [f"{t!r},{10 * t!r},{-t!r}" for t in times_s.tolist()]
        path = root / "imu" / f"{key}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["t,up,left", *rows]))
        write_envi(root / "cubes" / key, np.arange(24, dtype=np.int16).reshape(2, 3, 4) + 100 * place)
    return root


@pytest.fixture(scope="module")
def manifest(tiny):
    return written(tiny / "m.parquet")


def written(path: Path):
    records = [
        record_of(key, count, label="AB".index(key[0]), class_name=key[0], start_s=START_S[key])
        for key, count in LENGTHS.items()
    ]
    write_manifest(path, records, dataset="tiny", classes=["A", "B"], spec=SPEC)
    return read_manifest(path)


def series(root: Path, **spec) -> SeriesSource:
    return SeriesSource(root, SeriesSpec(pattern="imu/{video}.csv", **{"mirror": ("left",), **spec}))


def cubes(root: Path) -> CubeSource:
    return CubeSource(root, CubeSpec(pattern="cubes/{video}.hdr"))


class Told:
    """A source whose values are what it was told of the clip."""

    ragged = False

    def has(self, video: str) -> bool:
        return True

    def read(self, clip: ClipSpan) -> SourceSample:
        values = np.array([clip.start_s, clip.flipped, len(clip.video), *clip.times_s])
        return SourceSample(values, np.array(True))


REFS = [ClipRef(2, 5, 11), ClipRef(0, 0, 12), ClipRef(2, 20, 13), ClipRef(1, 0, 14), ClipRef(2, 9, 15)]


def test_readings_at_the_frames_come_with_their_mask(tiny, manifest):
    batch = ClipDataset(
        manifest, PackStore(tiny / "pack"), WINDOW, sources={"imu": series(tiny)}
    ).__getitems__(REFS)
    assert batch.extras["imu"].shape == (5, 4, 2)
    assert batch.extras["imu"].dtype == torch.float32
    assert batch.extras["imu_mask"].shape == (5, 4)
    assert batch.extras["imu_mask"].all()
    np.testing.assert_allclose(batch.extras["imu"][..., 0], 10 * batch.times_s, atol=1e-5)
    assert set(batch.extras) == {"seed", "imu", "imu_mask"}


def test_windows_of_readings_are_padded_with_lengths_times_and_mask(tiny, manifest):
    source = series(tiny, take="window", margin_s=0.005)
    dataset = ClipDataset(manifest, PackStore(tiny / "pack"), WINDOW, sources={"imu": source})
    batch = dataset.__getitems__(REFS)
    lengths = batch.extras["imu_lengths"].tolist()
    assert lengths[0] > lengths[3] >= 1  # four frames, and one that is shown four times
    assert batch.extras["imu"].shape == (5, max(lengths), 2)
    assert batch.extras["imu_mask"].sum(1).tolist() == lengths
    times_s = batch.extras["imu_times_s"]
    mask = batch.extras["imu_mask"]
    np.testing.assert_allclose(batch.extras["imu"][..., 0][mask], 10 * times_s[mask], atol=1e-5)
    assert set(batch.extras) == {"seed", *keys_of("imu")}
    clip = dataset[REFS[3]]
    assert clip.extras["imu"].shape == (lengths[3], 2)
    assert clip.extras["imu_lengths"] == lengths[3]


def test_a_source_is_told_the_clip_as_it_is_shown(tiny, manifest):
    dataset = ClipDataset(
        manifest, PackStore(tiny / "pack"), WINDOW, augment=AUGMENT, sources={"told": Told()}
    )
    refs = [ClipRef(2, 3, seed) for seed in range(1, 9)] + [ClipRef(0, 0, 9)]
    batch = dataset.__getitems__(refs)
    told = batch.extras["told"]
    flips = [draw_augment(AUGMENT, ref.seed, height=48, width=64).flip for ref in refs]
    assert told[:, 1].tolist() == flips
    assert 0 < sum(flips) < len(flips)
    assert told[:, 0].tolist() == [START_S["B/three"]] * 8 + [START_S["A/one"]]
    assert torch.equal(told[:, 3:], batch.times_s)


def test_mirrored_clips_have_mirrored_readings_and_cubes(tiny, manifest):
    sources = {"imu": series(tiny), "cube": cubes(tiny)}
    dataset = ClipDataset(
        manifest,
        PackStore(tiny / "pack"),
        WINDOW,
        augment=AugmentSpec(size_px=32, flip_p=1.0),
        sources=sources,
    )
    plain = ClipDataset(manifest, PackStore(tiny / "pack"), WINDOW, sources=sources)
    ours, theirs = dataset[ClipRef(2, 3, 1)].extras, plain[ClipRef(2, 3, 1)].extras
    assert torch.equal(ours["imu"] * torch.tensor([1, -1]), theirs["imu"])
    assert torch.equal(ours["cube"], theirs["cube"].flip(-1))
    assert theirs["cube"].shape == (2, 3, 4)
    assert theirs["cube_mask"]


def test_a_video_without_a_file_is_masked_or_an_error_as_the_spec_says(tiny, manifest, tmp_path):
    (tmp_path / "imu" / "A").mkdir(parents=True)
    (tmp_path / "imu" / "A" / "one.csv").write_bytes((tiny / "imu" / "A" / "one.csv").read_bytes())
    store = PackStore(tiny / "pack")
    masked = series(tmp_path, missing="mask", columns=("up", "left"))
    batch = ClipDataset(manifest, store, WINDOW, sources={"imu": masked}).__getitems__(REFS)
    assert batch.extras["imu_mask"].any(1).tolist() == [False, True, False, False, False]
    assert not batch.extras["imu"][0].any()
    skipping = ClipDataset(manifest, store, WINDOW, on_bad="skip", sources={"imu": series(tmp_path)})
    with pytest.raises(SourceError, match="B/three"):
        skipping.__getitems__(REFS)
    assert skipping.replaced == 0


def test_videos_that_lack_a_source_are_left_out_with_a_count(tiny, manifest, tmp_path):
    (tmp_path / "imu" / "A").mkdir(parents=True)
    (tmp_path / "imu" / "A" / "one.csv").write_bytes((tiny / "imu" / "A" / "one.csv").read_bytes())
    left = leave_out_missing(manifest, {"imu": series(tmp_path), "cube": cubes(tiny)})
    assert [record.frames for record in left.manifest] == ["A/one"]
    assert left.missing == {"imu": 2, "cube": 0}
    assert leave_out_missing(manifest, {"cube": cubes(tiny)}).manifest is manifest
    with pytest.raises(SourceError, match=r"none of 3 videos has all sources .*imu lacks 3"):
        leave_out_missing(manifest, {"imu": series(tmp_path / "nowhere")})


def test_numbers_of_rows_come_with_their_clips(tiny, manifest):
    dataset = ClipDataset(
        manifest,
        PackStore(tiny / "pack"),
        WINDOW,
        row_extras={"source_id": IDS, "weight": np.array([0.5, 1.5, 2.5])},
    )
    batch = dataset.__getitems__(REFS)
    assert batch.extras["source_id"].dtype == torch.int64
    assert batch.extras["source_id"].tolist() == [9, 7, 9, 8, 9]
    assert batch.extras["weight"].tolist() == [2.5, 0.5, 2.5, 1.5, 2.5]
    assert dataset[REFS[1]].extras["source_id"] == 7


@pytest.mark.parametrize(
    ("names", "numbers", "named"),
    [
        (["seed"], {}, "'seed' twice"),
        (["imu", "imu_mask"], {}, "'imu_mask' twice"),
        (["imu"], {"imu": IDS}, "'imu' twice"),
        ([], {"seed": IDS}, "'seed' twice"),
        (["a.b"], {}, "without a dot"),
        ([], {"short": IDS[:2]}, r"'short' must have a number for each of 3 rows, got int32 \(2,\)"),
        ([], {"words": np.array(["a", "b", "c"])}, "'words' must have a number"),
    ],
)
def test_names_that_clash_and_numbers_that_do_not_fit_are_refused(tiny, manifest, names, numbers, named):
    with pytest.raises(ValueError, match=named):
        ClipDataset(
            manifest,
            PackStore(tiny / "pack"),
            WINDOW,
            sources={name: Told() for name in names},
            row_extras=numbers,
        )


def test_cubes_that_differ_in_shape_are_named_with_their_clip(tiny, manifest, tmp_path):
    for place, key in enumerate(LENGTHS):
        write_envi(tmp_path / "cubes" / key, np.zeros((2, 3, 4 + place), np.int16))
    dataset = ClipDataset(manifest, PackStore(tiny / "pack"), WINDOW, sources={"cube": cubes(tmp_path)})
    with pytest.raises(CollateError, match=r"A/one from frame 0.*cube"):
        dataset.__getitems__(REFS)


def all_sources(root: Path) -> dict:
    window = series(root, take="window", margin_s=0.01)
    return {"imu": series(root), "window": window, "cube": cubes(root), "told": Told()}


def full_dataset(root: Path, manifest, **options) -> ClipDataset:
    return ClipDataset(
        manifest,
        PackStore(root / "pack"),
        WINDOW,
        **{"augment": AUGMENT, "sources": all_sources(root), "row_extras": {"source_id": IDS}, **options},
    )


def digest(batch) -> str:
    """Of all that a batch holds."""
    parts = {**batch._asdict(), **batch.extras}
    del parts["extras"]
    text = [f"{name} {part.dtype} {tuple(part.shape)}" for name, part in sorted(parts.items())]
    total = hashlib.sha256("\n".join(text).encode())
    for _, part in sorted(parts.items()):
        total.update(part.contiguous().numpy().tobytes())
    return total.hexdigest()


def two_epochs(dataset: ClipDataset, manifest, spec: LoaderSpec) -> list[str]:
    sampler = EpochSampler(manifest, WINDOW, seed=3, clips_per_video=4)
    loader = build_loader(dataset, sampler, spec)
    found = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        found += map(digest, loader)
    return found


@pytest.mark.parametrize(
    "spec",
    [{"workers": 2}, {"workers": 1, "start_method": "fork"}, {"threads": 3}, {"workers": 1, "readers": 2}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_stream_with_its_extras_is_the_same_on_any_topology(tiny, manifest, spec):
    plain = two_epochs(full_dataset(tiny, manifest), manifest, LoaderSpec(batch_size=5, workers=0))
    assert len(set(plain)) == len(plain) == 6
    other = LoaderSpec(batch_size=5, **{"workers": 0, **spec})
    assert two_epochs(full_dataset(tiny, manifest), manifest, other) == plain


@pytest.mark.parametrize("options", [{}, {"transform": v2.Identity()}, {"augment": None}], ids=str)
def test_a_clip_is_its_part_of_the_batch_on_every_path(tiny, manifest, options):
    dataset = full_dataset(tiny, manifest, **options)
    batch = dataset.__getitems__(REFS)
    for place, ref in enumerate(REFS):
        clip = dataset[ref]
        length = batch.extras["window_lengths"][place]
        for name, ours in clip.extras.items():
            theirs = batch.extras[name][place]
            cut = name in ("window", "window_mask", "window_times_s")
            assert torch.equal(ours, theirs[:length] if cut else theirs), name


def test_a_replacement_brings_its_own_readings(tiny, manifest, tmp_path):
    root = write_dataset(tmp_path)
    (root / "frames" / "A" / "one" / frame_name(2, 80_000)).write_bytes(b"")
    dataset = ClipDataset(
        manifest,
        FolderStore(root / "frames"),
        WINDOW,
        augment=AUGMENT,
        on_bad="skip",
        sources={"told": Told()},
        row_extras={"source_id": IDS},
    )
    batch = dataset.__getitems__([ClipRef(0, 0, seed) for seed in range(1, 5)])
    rows = batch.videos.tolist()
    assert 0 not in rows
    assert batch.extras["source_id"].tolist() == [int(IDS[row]) for row in rows]
    assert batch.extras["told"][:, 0].tolist() == [[*START_S.values()][row] for row in rows]
    assert torch.equal(batch.extras["told"][:, 3:], batch.times_s)


def test_extras_arrive_with_the_batch_on_the_device(tiny, manifest):
    loader = build_loader(
        full_dataset(tiny, manifest), EpochSampler(manifest, WINDOW), LoaderSpec(batch_size=3, workers=0)
    )
    (batch,) = prefetch(loader, "cpu")
    assert batch.frames.dtype == torch.float32
    assert batch.extras["imu"].shape == (3, 4, 2)


def test_what_a_worker_is_sent_stays_small(tiny, manifest):
    dataset = full_dataset(tiny, manifest)
    dataset.__getitems__(REFS)  # readings that were read stay here
    assert len(start_up_pickle(dataset)) < 20_000


def test_the_example_of_the_readme_works(tiny, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text[text.index("## Further sources") :], re.DOTALL)[1]
    shutil.copytree(tiny, tmp_path / "data" / "ucf101")
    (tmp_path / "data" / "ucf101" / "imu" / "B" / "three.csv").unlink()
    (tmp_path / "manifests").mkdir()
    written(tmp_path / "manifests" / "ucf101.parquet")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("acc_x", "left"), names)
    assert capsys.readouterr().out == "{'imu': 1}\n"
    assert names["dataset"][ClipRef(0, 0, 1)].extras["imu"].shape == (16, 2)
