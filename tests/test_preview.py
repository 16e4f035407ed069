"""`make preview` draws the clips that training gets, with the same bytes every time."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.errors import PipelineError
from pipeline.manifest import read_manifest
from pipeline.measure.pictures import fit_cell, join_grid, join_row
from pipeline.measure.preview import draw_moving, draw_sheet, frame_duration_ms, write_gif, write_png
from pipeline.measure.shown_clips import ShownClip, StreamSpec, draw_clips
from pipeline.online import (
    AugmentSpec,
    DeviceAugment,
    DeviceAugmentSpec,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
)
from pipeline.training.ranks import ALONE
from scripts import preview as script
from scripts import run
from scripts.train import build_training_loader, describe_run
from scripts.train_options import ClipOptions, RunOptions
from scripts.train_place import Place, Stop
from tests.training_runs import CLASSES, write_shades

WINDOW = WindowSpec(frames=4)
SPEC = StreamSpec(window=WINDOW, augment=AugmentSpec(size_px=16))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("preview")
    write_shades(root)
    return root


def train_rows(root):
    return read_manifest(root / "manifests" / "shades.parquet").select(split01="train")


def store_of(root):
    return PackStore(root / "shades" / "pack")


def clip(frames=4, *, times_s=None, label="Dark", size=(8, 10)):
    pictures = [np.full((*size, 3), 7 * k, np.uint8) for k in range(frames)]
    times_s = tuple(k / 25 for k in range(frames)) if times_s is None else times_s
    return ShownClip(pictures=pictures, label=label, video="Dark/v.avi", start=3, times_s=times_s)


@pytest.mark.parametrize(
    "options",
    [
        ClipOptions(size_px=16),
        ClipOptions(size_px=16, balance=True, clips_per_video=2, flip_p=1.0, scale=(0.2, 0.9)),
        ClipOptions(size_px=16, no_flip=("Dark", "Light"), brightness=0.5, erase_p=1.0),
        ClipOptions(size_px=16, mixup_alpha=0.8),
    ],
)
def test_the_clips_drawn_are_those_that_the_training_script_delivers(root, options):
    rows, store = train_rows(root), store_of(root)
    loading = LoaderSpec(batch_size=6, workers=0)
    place = Place(RunOptions(), torch.device("cpu"), ALONE, loading, Stop())
    about = describe_run(RunOptions(), options, WINDOW, rows)
    loader = build_training_loader(place, options, about, rows, store, seed=5)
    prepare = DeviceAugment(options.device_augment(len(CLASSES)))
    stream = script.StreamOptions(seed=5, batch_size=6)
    spec = script.stream_spec(stream, options, WINDOW, rows)
    shown = draw_clips(rows, store, spec, num_clips=9)
    assert (len(shown.clips), shown.errors) == (9, ())
    delivered = [prepare(batch) for batch in itertools.islice(loader.batches(), 2)]
    mean, std = (torch.tensor(values) for values in (prepare.normalize.mean, prepare.normalize.std))
    for number, one in enumerate(shown.clips):
        batch, place_in_it = delivered[number // 6], number % 6
        expected = batch.frames[place_in_it].permute(1, 2, 3, 0) * std + mean  # (C, T, H, W) -> (T, H, W, C)
        found = torch.from_numpy(np.stack(one.pictures)) / 255
        assert (expected.clamp(0, 1) - found).abs().max() < 1 / 255
        assert one.start == int(batch.starts[place_in_it])
        assert one.video == rows[int(batch.videos[place_in_it])].video
        assert one.times_s == tuple(batch.times_s[place_in_it].tolist())


def test_a_mixed_clip_names_each_class_with_its_share(root):
    device = DeviceAugmentSpec(mixup_alpha=1.0, num_classes=3)
    spec = StreamSpec(window=WINDOW, augment=AugmentSpec(size_px=16), device=device, seed=1)
    labels = [one.label for one in draw_clips(train_rows(root), store_of(root), spec, num_clips=8).clips]
    mixed = [label for label in labels if "+" in label]
    assert mixed
    for label in mixed:
        assert sum(float(part.split()[0]) for part in label.split(" + ")) == pytest.approx(1, abs=0.011)


def test_more_clips_than_there_are_are_as_many_as_there_are(root):
    rows = train_rows(root)
    seen = []
    shown = draw_clips(rows, store_of(root), SPEC, num_clips=10_000, on_clip=lambda: seen.append(1))
    assert len(shown.clips) == len(rows) == len(seen)


def test_clips_of_no_rows_are_an_error(root):
    empty = train_rows(root).select(class_name=[])
    with pytest.raises(PipelineError):
        draw_clips(empty, store_of(root), SPEC, num_clips=1)


# Pictures.


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.integers(1, 40))
def test_a_picture_in_a_cell_keeps_its_shape_and_touches_two_sides(height, width, cell_h, cell_w):
    cell = fit_cell(np.full((height, width, 3), 255, np.uint8), cell_h, cell_w)
    assert cell.shape == (cell_h, cell_w, 3)
    rows, columns = (cell.max(axis=axes) > 0 for axes in ((1, 2), (0, 2)))
    assert rows.all() or columns.all()
    assert abs(rows.sum() * width - columns.sum() * height) <= max(height, width)


@given(st.integers(1, 9), st.integers(1, 5))
def test_every_cell_of_a_grid_is_where_it_is_read(count, columns):
    cells = [np.full((4, 6, 3), 10 + number, np.uint8) for number in range(count)]
    grid = join_grid(cells, columns)
    for number in range(count):
        top, left = number // columns * 6, number % columns * 8
        assert (grid[top : top + 4, left : left + 6] == 10 + number).all()
    assert join_row(cells).shape == (4, 8 * count - 2, 3)


def test_the_pixels_of_a_sheet_are_those_of_the_clips():
    rng = np.random.default_rng(0)
    one = clip()
    noise = [rng.integers(0, 255, (40, 50, 3), np.uint8) for _ in range(4)]
    shown = ShownClip(pictures=noise, label="Dark", video=one.video, start=0, times_s=one.times_s)
    sheet = draw_sheet([shown, shown])
    half = sheet.shape[0] // 2
    for top in (0, half):
        row = sheet[top : top + half]
        places = [
            (y, x)
            for y in range(half - 40)
            for x in range(row.shape[1] - 50)
            if (row[y, x] == noise[0][0, 0]).all()
        ]
        y, x = next((y, x) for y, x in places if (row[y : y + 40, x : x + 50] == noise[0]).all())
        for number, picture in enumerate(noise):
            left = x + number * 52
            assert (row[y : y + 40, left : left + 50] == picture).all()


def test_a_sheet_has_no_more_frames_in_a_row_than_asked_for():
    wide, narrow = draw_sheet([clip(30)], max_frames=30), draw_sheet([clip(30)], max_frames=5)
    assert wide.shape[1] == narrow.shape[1] + 25 * 12


def test_a_moving_picture_shows_the_same_moment_of_every_clip():
    pictures = draw_moving([clip(size=(40, 50)) for _ in range(5)])
    assert len(pictures) == 4
    for number, picture in enumerate(pictures):
        assert (picture[:40, :50] == 7 * number).all()
        assert (picture == 7 * number).all(axis=2).sum() >= 5 * 40 * 50


@pytest.mark.parametrize("draw", [draw_sheet, draw_moving])
def test_a_picture_of_no_clips_is_refused(draw):
    with pytest.raises(ValueError, match="at least one clip"):
        draw([])


@pytest.mark.parametrize(
    ("times_s", "duration_ms"),
    [
        ([0.0, 0.04, 0.08, 0.12], 40),
        ([0.0, 0.033, 0.067, 0.1], 30),
        ([0.0, 0.5, 0.0, 0.5], 500),
        ([0.0, 0.001, 0.002, 0.003], 20),
        ([1.0, 1.0, 1.0, 1.0], 100),
    ],
)
def test_a_moving_picture_moves_as_fast_as_the_clips(times_s, duration_ms):
    assert frame_duration_ms([clip(times_s=tuple(times_s))]) == duration_ms


def test_files_are_what_they_say_and_the_same_each_time(tmp_path):
    clips = [clip(size=(40, 50)), clip(size=(40, 50), label="Ünïcode\n<b>")]
    for name in ("a", "b"):
        write_png(tmp_path / f"{name}.png", draw_sheet(clips))
        write_gif(tmp_path / f"{name}.gif", draw_moving(clips), duration_ms=40)
    for suffix in ("png", "gif"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert (np.asarray(Image.open(tmp_path / "a.png")) == draw_sheet(clips)).all()
    with Image.open(tmp_path / "a.gif") as moving:
        assert (moving.n_frames, moving.info["duration"], moving.info["loop"]) == (4, 40, 0)
        for number in range(4):
            moving.seek(number)
            grey = np.asarray(moving.convert("RGB"))[20, 20].astype(int)
            assert np.abs(grey - 7 * number).max() <= 4


# The command.


def command(capsys, root, *args):
    where = ["--dataset", "shades", "--data", str(root), "--manifests", str(root / "manifests")]
    with pytest.raises(SystemExit) as end:
        run(script.main, [*where, "--size-px", "16", "--frames", "4", *args])
    said = capsys.readouterr()
    return end.value.code, said.out.splitlines(), said.err


def test_the_command_writes_both_pictures_beside_the_manifest(root, capsys):
    status, out, _ = command(capsys, root, "--clips", "5")
    sheet, moving = (root / "manifests" / f"shades.preview.{suffix}" for suffix in ("png", "gif"))
    assert status == 0
    assert out[0] == "5 clips of 18 videos to train on, by split01"
    assert str(sheet) in out[1]
    assert str(moving) in out[2]
    assert out[-1].endswith("next: make train DATASET=shades")
    with Image.open(sheet) as picture:
        assert picture.height == 5 * (12 + 15 + 8 + 16 + 11 + 10)


def test_two_runs_give_the_same_bytes_from_pack_and_folders(root, capsys, tmp_path):
    assert command(capsys, root, "--out", str(tmp_path / "one"))[0] == 0
    (root / "shades" / "pack").rename(root / "shades" / "away")
    try:
        assert command(capsys, root, "--out", str(tmp_path / "two"))[0] == 0
    finally:
        (root / "shades" / "away").rename(root / "shades" / "pack")
    for suffix in ("png", "gif"):
        one, two = (tmp_path / name / f"shades.preview.{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_a_clip_that_cannot_be_made_is_named_and_the_others_are_drawn(capsys, tmp_path):
    write_shades(tmp_path)
    (tmp_path / "shades" / "pack").rename(tmp_path / "away")
    first = draw_clips(train_rows(tmp_path), FolderStore(tmp_path / "shades" / "frames"), SPEC, num_clips=1)
    folder = tmp_path / "shades" / "frames" / first.clips[0].video.removesuffix(".avi")
    for path in folder.glob("*.jpg"):
        path.write_bytes(path.read_bytes()[:100])
    status, out, _ = command(capsys, tmp_path, "--clips", "3")
    assert status == 1
    assert out[0].startswith("no clip: ")
    assert out[1].startswith("2 clips of")
    assert out[-1].endswith("make verify DATASET=shades REPAIR=1")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--clips", "0"], "clips and sheet_frames must be >= 1"),
        (["--model", "nosuch"], "nosuch"),
        (["--model", "mvit_v2_s"], "takes 16 frames of 224x224 px"),
        (["--split", "split09"], "split09"),
        (["--no-flip", "Drak"], "did you mean Dark?"),
        (["--manifests", "/nosuch"], "make manifest DATASET=shades"),
    ],
)
def test_a_mistake_in_use_is_one_line(root, capsys, args, says):
    status, _, err = command(capsys, root, *args)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
