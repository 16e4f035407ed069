import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from av.video.frame import PictureType
from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import content_hash
from pipeline.offline.sample import (
    ANGLE,
    MOTIONS,
    NUM_SPLITS,
    SAMPLE_JSON,
    SIZE,
    Clip,
    SampleError,
    SampleSpec,
    Scene,
    X,
    Y,
    draw_clip,
    draw_frames,
    draw_poses,
    draw_scene,
    encode_avi,
    held_out_groups,
    list_clips,
    split_lists,
    write_sample,
)
from scripts import run
from scripts.make_sample import main

SMALL = SampleSpec(groups=3, clips=1, min_frames=16, max_frames=18)
SMALL_OPTIONS = ["--groups", "3", "--clips", "1", "--min-frames", "16", "--max-frames", "18", "--jobs", "1"]
OPPOSITES = [
    ("MoveRight", "MoveLeft"),
    ("MoveDown", "MoveUp"),
    ("TurnClockwise", "TurnCounterClockwise"),
    ("Grow", "Shrink"),
]
PERIODS = {X: 160, Y: 240, ANGLE: 360, SIZE: np.inf}
PLAIN = np.full((240, 320, 3), 30, np.uint8)
LINES = {
    "classInd": r"\d+ [A-Za-z]+\r\n",
    "testlist": r"[A-Za-z]+/v_[A-Za-z]+_g\d\d_c\d\d\.avi\r\n",
    "trainlist": r"[A-Za-z]+/v_[A-Za-z]+_g\d\d_c\d\d\.avi \d+\r\n",
}

seeds = st.integers(0, 2**64 - 1)
classes = st.sampled_from(list(MOTIONS))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small sample that tests only look at."""
    root = tmp_path_factory.mktemp("sample")
    write_sample(root, SMALL, jobs=1)
    return root


def files_of(root: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def bytes_of(root: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in files_of(root).items()}


def poses_of(class_name: str, seed: int, spec: SampleSpec = SampleSpec()) -> np.ndarray:
    return draw_poses(MOTIONS[class_name], spec, np.random.default_rng(seed))


def pose(x: float, y: float, angle: float, size: float) -> np.ndarray:
    return np.array([[x, y, angle, size]])


# --- poses ---------------------------------------------------------------------------------------------


@given(class_name=classes, seed=seeds)
def test_one_coordinate_moves_steadily_and_the_others_stand_still(class_name, seed):
    poses = poses_of(class_name, seed)
    axis, backwards = MOTIONS[class_name]
    assert poses.shape[1] == 4
    assert 32 <= len(poses) <= 52
    steps = np.diff(np.log(poses[:, axis]) if axis == SIZE else poses[:, axis])
    np.testing.assert_allclose(steps, steps[0], atol=1e-9)
    assert (steps < 0).all() if backwards else (steps > 0).all()
    assert (np.delete(poses, axis, axis=1) == np.delete(poses, axis, axis=1)[0]).all()
    assert (poses[:, SIZE] >= 24 - 1e-9).all()
    assert (poses[:, SIZE] <= 70 + 1e-9).all()


@given(class_name=classes, seed=seeds)
def test_any_16_frames_show_the_motion(class_name, seed):
    poses = poses_of(class_name, seed, SampleSpec(min_frames=16, max_frames=54))
    change = np.abs(poses[15:] - poses[:-15])[:, MOTIONS[class_name].axis]
    ratio = np.maximum(poses[15:, SIZE] / poses[:-15, SIZE], poses[:-15, SIZE] / poses[15:, SIZE])
    axis = MOTIONS[class_name].axis
    assert (ratio.min() if axis == SIZE else change.min()) >= {X: 30, Y: 30, ANGLE: 45, SIZE: 1.349}[axis]


@pytest.mark.parametrize(("forward", "backward"), OPPOSITES)
@given(seed=seeds)
def test_opposite_motions_have_the_same_poses_in_the_other_order(forward, backward, seed):
    np.testing.assert_array_equal(poses_of(forward, seed)[::-1], poses_of(backward, seed))


def drawn_poses(class_name: str, count: int) -> Iterator[np.ndarray]:
    """Poses of that many clips; other ones for each class."""
    rng = np.random.default_rng(list(MOTIONS).index(class_name))
    return (draw_poses(MOTIONS[class_name], SampleSpec(), rng) for _ in range(count))


def largest_gap(values: np.ndarray, expected: np.ndarray) -> float:
    """Kolmogorov-Smirnov: between the shares of both that lie below any value."""
    places = np.searchsorted(np.sort(values), np.sort(expected), side="right") / len(values)
    return np.abs(places - np.arange(1, len(expected) + 1) / len(expected)).max()


def test_one_frame_is_distributed_alike_in_all_classes():
    rng = np.random.default_rng(0)
    frames = {name: np.array([p[rng.integers(len(p))] for p in drawn_poses(name, 1500)]) for name in MOTIONS}
    pooled = np.concatenate(list(frames.values()))
    for name, poses in frames.items():
        for axis, period in PERIODS.items():
            gap = largest_gap(poses[:, axis] % period, pooled[:, axis] % period)
            assert gap < 1.95 / np.sqrt(1500), (name, axis)  # exceeded by chance in 1 of 1,000 cases


@pytest.mark.parametrize("name", ["MoveLeft", "MoveRight", "MoveDown", "MoveUp", *OPPOSITES[2]])
def test_places_and_angles_tell_nothing_at_the_first_frame_either(name):
    axis = MOTIONS[name].axis
    starts = np.array([poses[0, axis] % PERIODS[axis] for poses in drawn_poses(name, 1500)])
    assert largest_gap(starts, np.linspace(0, PERIODS[axis], 1500)) < 1.95 / np.sqrt(1500)


# --- pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "backward"), OPPOSITES)
def test_a_clip_played_backwards_is_the_clip_of_the_opposite_class(forward, backward):
    there = list(draw_clip(SMALL, Clip(forward, 2, 1)))
    back = list(draw_clip(SMALL, Clip(backward, 2, 1)))
    assert {frame.shape for frame in there} == {(240, 320, 3)}
    assert {frame.dtype for frame in there} == {np.dtype(np.uint8)}
    np.testing.assert_array_equal(there[::-1], back)
    assert (np.asarray(there) != np.asarray(back)).any()


def test_x_points_right_and_y_points_down():
    scene = Scene(PLAIN, draw_scene(SampleSpec(), 1, 1).sprites)
    here, right, down = (next(draw_frames(scene, pose(x, y, 40, 50))) for x, y in [(9, 5), (16, 5), (9, 14)])
    # On a plain background the wall has no edge, so moving it is rolling the picture.
    np.testing.assert_array_equal(right, np.roll(here, 7, axis=1))
    np.testing.assert_array_equal(down, np.roll(here, 9, axis=0))


def test_angles_count_clockwise():
    scene = Scene(PLAIN, draw_scene(SampleSpec(), 1, 1).sprites)
    upright, turned = (
        next(draw_frames(scene, pose(0, 120, angle, 50)))[68:173, 108:213].astype(int) for angle in (20, 110)
    )
    quarter_clockwise = np.rot90(upright, -1)
    assert np.abs(turned - quarter_clockwise).mean() < 1
    assert np.abs(turned - upright).mean() > 10


@pytest.mark.parametrize(("small_px", "large_px"), [(24, 34), (34, 36), (40, 70)])
def test_the_picture_of_an_object_grows_with_its_size(small_px, large_px):
    scene = Scene(PLAIN, draw_scene(SampleSpec(), 4, 1).sprites)
    # Red runs from 30 on the background to about 200 on the object: half way is its outline.
    areas = [
        (next(draw_frames(scene, pose(50, 60, 0, size)))[..., 0] > 110).sum() for size in (small_px, large_px)
    ]
    assert areas[1] / areas[0] == pytest.approx((large_px / small_px) ** 2, rel=0.06)


def test_every_crop_of_a_quarter_holds_a_part_of_an_object():
    rng = np.random.default_rng(0)
    for size in (24, 70):
        for _ in range(20):
            scene = Scene(PLAIN, draw_scene(SampleSpec(), int(rng.integers(1, 13)), 1).sprites)
            angle, x, y = rng.uniform(0, [360, 160, 240])
            hit = (next(draw_frames(scene, pose(x, y, angle, size))) != PLAIN).any(axis=2).astype(np.float64)
            assert cv2.boxFilter(hit, -1, (160, 120), normalize=False)[60:180, 80:240].min() > 20


def test_objects_stand_out_from_their_backgrounds():
    for group in range(1, 13):
        for number in range(1, 4):
            scene = draw_scene(SampleSpec(), group, number)
            sprite = scene.sprites[0].astype(np.float64)
            ahead = sprite[sprite[..., 3] == 255][:, :3] @ [0.299, 0.587, 0.114]
            behind = scene.background.reshape(-1, 3) @ [0.299, 0.587, 0.114]
            assert abs(np.median(ahead) - np.median(behind)) > 80


def test_scenes_differ_between_groups_and_objects_between_clips():
    scenes = {
        (group, number): draw_scene(SampleSpec(), group, number) for group in (1, 2, 7) for number in (1, 2)
    }
    assert (scenes[1, 1].background == scenes[1, 2].background).all()
    assert (scenes[1, 1].background != scenes[7, 1].background).any()
    sprites = [scene.sprites[0].tobytes() for scene in scenes.values()]
    assert len(set(sprites)) == len(sprites)


def test_no_object_looks_the_same_after_less_than_a_whole_turn():
    for number in range(1, 8):  # one clip for each outline
        alpha = draw_scene(SampleSpec(), 1, number).sprites[0][..., 3]
        middle = (alpha.shape[0] - 1) / 2
        for angle in range(30, 331, 10):
            matrix = cv2.getRotationMatrix2D((middle, middle), angle, 1)
            turned = cv2.warpAffine(alpha, matrix, alpha.shape)
            assert np.minimum(alpha, turned).sum() / np.maximum(alpha, turned).sum() < 0.85


# --- videos --------------------------------------------------------------------------------------------


def test_a_video_is_like_those_of_ucf101(small):
    for video in sorted(small.glob("videos/*/*.avi")):
        with av.open(str(video)) as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            assert (stream.codec.name, context.codec_tag, context.pix_fmt) == ("mpeg4", "XVID", "yuv420p")
            assert (context.width, context.height, stream.average_rate) == (320, 240, 25)
            assert len(container.streams) == 1
            packets = [packet for packet in container.demux(stream) if packet.size]
            assert not context.has_b_frames
        assert [packet.is_keyframe for packet in packets] == [True] + [False] * (len(packets) - 1)
        assert [packet.pts for packet in packets] == list(range(len(packets)))
        assert 16 <= len(packets) <= 18


def test_a_video_decodes_to_the_pictures_that_were_drawn(small):
    for clip in (Clip("MoveUp", 1, 1), Clip("Grow", 2, 1), Clip("TurnClockwise", 3, 1)):
        with av.open(str(small / "videos" / clip.video)) as container:
            frames = list(container.decode(video=0))
        drawn = list(draw_clip(SMALL, clip))
        assert len(frames) == len(drawn)
        kinds = [PictureType(frame.pict_type).name for frame in frames]
        assert kinds == ["I"] + ["P"] * (len(frames) - 1)
        for frame, pixels in zip(frames, drawn, strict=True):
            error = frame.to_ndarray(format="rgb24").astype(float) - pixels
            assert 10 * np.log10(255**2 / np.mean(error**2)) > 28


def test_no_cut_makes_a_second_key_frame():
    rng = np.random.default_rng(0)
    content = encode_avi(rng.integers(0, 256, (54, 240, 320, 3), dtype=np.uint8))
    assert content == encode_avi(np.random.default_rng(0).integers(0, 256, (54, 240, 320, 3), dtype=np.uint8))
    assert b"Lav" not in content  # no version of the encoder or the muxer


# --- lists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [f"{kind}{number}.txt" for kind in LINES for number in ("", "01", "02", "03")]
)
def test_lists_are_written_as_the_official_ones_are(small, shared, name):
    official = shared / "data" / "lists" / "ucf101" / "ucfTrainTestlist" / name
    if name not in split_lists(SMALL):
        assert not official.exists()
        return
    lines = f"(?:{LINES[re.sub(r'[0-9.].*', '', name)]})+"
    assert re.fullmatch(lines, official.read_bytes().decode())
    assert re.fullmatch(lines, (small / "splits" / name).read_bytes().decode())


def test_labels_count_from_one_in_alphabetical_order():
    lists = split_lists(SMALL)
    indexed = [line.split(" ") for line in lists["classInd.txt"].splitlines()]
    assert indexed == [[str(label), name] for label, name in enumerate(sorted(MOTIONS), start=1)]
    labels = {name: label for label, name in indexed}
    for split in ("01", "02", "03"):
        for line in lists[f"trainlist{split}.txt"].splitlines():
            video, label = line.split(" ")
            assert labels[video.split("/")[0]] == label


@given(groups=st.integers(3, 99), clips=st.integers(1, 4))
def test_every_video_is_on_one_side_of_a_split_and_groups_are_never_shared(groups, clips):
    spec = SampleSpec(groups=groups, clips=clips)
    lists = split_lists(spec)
    videos = {clip.video for clip in list_clips(spec)}
    tested = []
    for split in range(1, NUM_SPLITS + 1):
        test = lists[f"testlist{split:02d}.txt"].splitlines()
        train = [line.split(" ")[0] for line in lists[f"trainlist{split:02d}.txt"].splitlines()]
        assert sorted(test + train) == sorted(videos)
        groups_of = [{re.search(r"_g(\d\d)_", video)[1] for video in side} for side in (test, train)]
        assert all(groups_of)
        assert not groups_of[0] & groups_of[1]
        assert {int(group) for group in groups_of[0]} == set(held_out_groups(spec, split))
        tested.append(groups_of[0])
    assert not tested[0] & tested[1] | tested[1] & tested[2] | tested[0] & tested[2]


def test_a_quarter_of_the_default_sample_is_tested():
    lists = split_lists(SampleSpec())
    counts = [len(lists[name].splitlines()) for name in ("testlist01.txt", "trainlist01.txt")]
    assert counts == [72, 216]


# --- the whole dataset ---------------------------------------------------------------------------------


def test_two_builds_are_the_same_bytes_whatever_the_jobs(small, tmp_path):
    seen = []
    report = write_sample(tmp_path, SMALL, jobs=2, on_video=seen.append)
    assert (report.written, report.kept) == (24, 0)
    assert sorted(video.video for video in seen) == sorted(clip.video for clip in list_clips(SMALL))
    assert {content_hash(tmp_path / "videos" / video.video) for video in seen} == {
        video.sha256 for video in seen
    }
    assert bytes_of(tmp_path) == bytes_of(small)


def test_another_seed_draws_other_videos(small, tmp_path):
    write_sample(tmp_path, SampleSpec(groups=3, clips=1, min_frames=16, max_frames=18, seed=1), jobs=1)
    one, other = bytes_of(small), bytes_of(tmp_path)
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one if name.endswith(".avi"))
    assert all(one[name] == other[name] for name in one if name.startswith("splits/"))


def test_a_second_run_writes_nothing(small):
    before = files_of(small)
    report = write_sample(small, SMALL, jobs=1)
    assert (report.written, report.kept) == (0, 24)
    assert files_of(small) == before


def test_what_is_missing_is_drawn_again(small, tmp_path):
    write_sample(tmp_path, SMALL, jobs=1)
    missing = [tmp_path / "videos" / "Grow" / "v_Grow_g02_c01.avi", tmp_path / "splits" / "testlist02.txt"]
    for path in missing:
        path.unlink()
    report = write_sample(tmp_path, SMALL, jobs=1)
    assert (report.written, report.kept) == (1, 23)
    assert bytes_of(tmp_path) == bytes_of(small)


def test_a_run_that_was_killed_is_finished_by_the_next(small, tmp_path):
    command = [sys.executable, "-m", "scripts.make_sample", "--data", str(tmp_path), *SMALL_OPTIONS]
    root = tmp_path / "sample"
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list(root.glob("videos/*/v_*.avi"))) < 3:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    whole = bytes_of(small)
    left = {name: content for name, content in bytes_of(root).items() if "/v_" in name}
    assert 3 <= len(left) < 24
    assert all(whole[name] == content for name, content in left.items())
    report = write_sample(root, SMALL, jobs=1)
    assert (report.written, report.kept) == (24 - len(left), len(left))
    assert {name: content for name, content in bytes_of(root).items() if "/.tmp-" not in name} == whole


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def write_half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    write_sample(tmp_path, SMALL, jobs=1)
    video = tmp_path / "videos" / "Grow" / "v_Grow_g01_c01.avi"
    video.unlink()
    before = files_of(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_sample(tmp_path, SMALL, jobs=1)
    assert files_of(tmp_path) == before


def test_an_error_in_the_callback_stops_the_run_and_what_is_finished_stays(small, tmp_path):
    def stop(video):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_sample(tmp_path, SMALL, jobs=2, on_video=stop)
    write_sample(tmp_path, SMALL, jobs=1)
    assert bytes_of(tmp_path) == bytes_of(small)


def test_a_file_of_the_users_own_is_never_replaced(tmp_path):
    own = tmp_path / "videos" / "Grow" / "v_Grow_g01_c01.avi"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"my own")
    with pytest.raises(SampleError, match=r"v_Grow_g01_c01\.avi is there and is not the sample's own"):
        write_sample(tmp_path, SMALL, jobs=1)
    assert own.read_bytes() == b"my own"


def test_videos_that_were_added_later_are_left_alone(tmp_path):
    write_sample(tmp_path, SMALL, jobs=1)
    added = [tmp_path / "videos" / name for name in ("Mine/v_Mine_g01_c01.avi", "Grow/v_Grow_g50_c01.avi")]
    for path in added:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"my own")
    before = files_of(tmp_path)
    assert write_sample(tmp_path, SMALL, jobs=1).kept == 24
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", ["videos/Archery/v_Archery_g01_c01.avi", "splits/classInd.txt"])
def test_another_dataset_is_refused_and_left_as_it_is(tmp_path, name):
    own = tmp_path / name
    own.parent.mkdir(parents=True)
    own.write_bytes(b"1 Archery\r\n")
    with pytest.raises(SampleError, match="move it away, or draw the sample into another folder"):
        write_sample(tmp_path, SMALL, jobs=1)
    assert bytes_of(tmp_path) == {name: b"1 Archery\r\n"}


def test_a_sample_with_other_options_is_refused_and_left_as_it_is(small):
    before = files_of(small)
    other = SampleSpec(groups=4, clips=1, min_frames=16, max_frames=18, seed=7)
    with pytest.raises(SampleError, match=r"other options \(groups 3 instead of 4, seed 0 instead of 7\)"):
        write_sample(small, other, jobs=1)
    assert files_of(small) == before


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"format": 1, "spec": {"groups": []}, "sha256": {}}'])
def test_a_record_that_cannot_be_read_is_named(tmp_path, record):
    (tmp_path / SAMPLE_JSON).write_text(record)
    with pytest.raises(SampleError, match=r"sample\.json cannot be read .*: delete it and run again"):
        write_sample(tmp_path, SMALL, jobs=1)


def test_the_record_holds_the_options_and_a_hash_of_each_video(small):
    record = json.loads((small / SAMPLE_JSON).read_text())
    assert record["spec"] == {"groups": 3, "clips": 1, "seed": 0, "min_frames": 16, "max_frames": 18}
    assert record["sha256"] == {
        path.relative_to(small / "videos").as_posix(): content_hash(path)
        for path in small.glob("videos/*/*.avi")
    }


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(small_disk):
    with pytest.raises(
        SampleError, match=r"disk/sample has 1\.0 MB free, and needs up to 74\.9 MB for 288 videos"
    ):
        write_sample(small_disk / "sample", jobs=1)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{"groups": 2}, {"groups": 100}, {"clips": 0}, {"seed": -1}, {"min_frames": 15}, {"max_frames": 55}],
)
def test_options_that_make_no_sample_are_refused(options):
    with pytest.raises(ValueError, match="must hold"):
        SampleSpec(**options)


# --- the command ---------------------------------------------------------------------------------------


def test_the_command_says_what_is_where_and_what_comes_next(tmp_path, capsys):
    for done in ("24 written, 0 kept", "all there, nothing to do"):
        with pytest.raises(SystemExit) as stopped:
            run(main, ["--data", str(tmp_path), "--dataset", "tiny", *SMALL_OPTIONS])
        assert stopped.value.code == 0
        output = capsys.readouterr()
        assert output.out.splitlines() == [
            f"{tmp_path}/tiny: 24 videos of 8 classes, 3 splits ({done})",
            "next: make frames DATASET=tiny",
        ]
        assert output.err == ""


@pytest.mark.parametrize(
    "options",
    [["--dataset", ""], ["--dataset", "a/b"], ["--jobs", "0"], ["--groups", "1"], ["--max-frames", "99"]],
)
def test_a_mistake_in_use_is_one_line_and_exit_2(tmp_path, capsys, options):
    with pytest.raises(SystemExit) as stopped:
        run(main, ["--data", str(tmp_path / "data"), *options])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
