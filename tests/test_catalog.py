import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.errors import ManifestError, PipelineError
from pipeline.folder import FRAMES_JSON, FrameFolder, SourceFile, write_frames_json
from pipeline.manifest import leaking_groups, read_manifest
from pipeline.offline.catalog import build_manifest
from pipeline.offline.failures import FailedVideo, write_failure
from pipeline.offline.memory import DATASET_JSON

SPEC = {"format": 1, "quality": 90}
SOURCE = SourceFile(bytes=7, mtime_ns=8, sha256="ab")


def make_folder(root: Path, video: str, *, name: str | None = None, num_frames: int = 3, **other) -> Path:
    """A finished folder as far as a manifest is concerned: frames.json, and no JPEG."""
    values = {
        "video": video,
        "status": "ok",
        "error": None,
        "note": None,
        "times_us": [40_000 * k for k in range(num_frames)],
        "sizes": [9] * num_frames,
        "crc32": [0] * num_frames,
        "start_us": 80_000,
        "time_source": "dts",
        "width": 320,
        "height": 240,
        "fps": 25.0,
        "duration_s": num_frames / 25,
        "rotation": 0,
        "mirrored": False,
        "sample_aspect_ratio": "1:1",
        "stream": 0,
        "codec": "mpeg4",
        "pixel_format": "yuv420p",
        "restart_mcus": 5,
        "source": SOURCE,
        "spec": SPEC,
    }
    folder = root / (video.rsplit(".", 1)[0] if name is None else name)
    folder.mkdir(parents=True)
    write_frames_json(folder, FrameFolder(**{**values, **other}))
    return folder


def fail(root: Path, video: str, **other) -> None:
    values = {"frames": video.rsplit(".", 1)[0], "stage": "open", "error": "no video stream"}
    write_failure(root, FailedVideo(video=video, **{**values, "spec": SPEC, **other}))


class Dataset:
    """A dataset's folders in a temporary place, and its manifest."""

    def __init__(self, root: Path) -> None:
        self.root, self.frames, self.splits = root, root / "frames", root / "splits"
        self.path = root / "tiny.parquet"

    def add(self, *videos: str, **other) -> None:
        for video in videos:
            make_folder(self.frames, video, **other)

    def list(self, name: str, text: str) -> None:
        self.splits.mkdir(exist_ok=True)
        (self.splits / name).write_text(text)

    def build(self, **other):
        self.report = build_manifest(self.frames, self.splits, self.path, dataset="tiny", **other)
        return read_manifest(self.path)


@pytest.fixture
def tiny(tmp_path):
    return Dataset(tmp_path)


def ucf(class_name: str, groups: int, clips: int = 2) -> list[str]:
    pairs = [(group, clip) for group in range(1, groups + 1) for clip in range(1, clips + 1)]
    return [f"{class_name}/v_{class_name}_g{group:02d}_c{clip:02d}.avi" for group, clip in pairs]


def test_a_row_says_what_frames_json_and_the_lists_say(tiny):
    tiny.add("A/x.avi", num_frames=164, status="partial", error="2 errors, first: cut", note="scaled")
    tiny.list("classInd.txt", "1 B\n2 A\n")
    tiny.list("trainlist01.txt", "A/x.avi 2\n")
    tiny.list("testlist01.txt", "B/gone.avi\n")
    assert [asdict(row) for row in tiny.build()] == [
        {
            "video": "A/x.avi",
            "frames": "A/x",
            "class_name": "A",
            "label": 1,
            "group": "A/x",
            "num_frames": 164,
            "width": 320,
            "height": 240,
            "fps": 25.0,
            "duration_s": 6.56,
            "start_s": 0.08,
            "time_source": "dts",
            "status": "partial",
            "error": "2 errors, first: cut",
            "note": "scaled",
            "splits": {"split01": "train"},
        }
    ]


def test_the_frame_count_is_what_decoded_and_not_what_is_published(tiny, shared):
    published = (shared / "data/lists/ucf101/with_frame_counts/val_rgb_split1.txt").read_text().split("\n")
    index = json.loads((shared / "data/index.json").read_text())
    video = "ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi"
    decoded = next(file["frames_decoded"] for file in index if file["path"].endswith(video))
    tiny.add(video, num_frames=decoded)
    tiny.list("testlist01.txt", f"{video}\n")
    assert "v_ApplyEyeMakeup_g01_c01 163 0" in published
    assert tiny.build()[0].num_frames == decoded == 164


def test_a_failed_video_keeps_a_row_with_its_error(tiny):
    tiny.add("A/x.avi")
    fail(tiny.frames, "A/y.avi")
    rows = list(tiny.build())
    assert [row.video for row in rows] == ["A/x.avi", "A/y.avi"]
    failed = rows[1]
    assert (failed.frames, failed.num_frames, failed.status) == ("", 0, "failed")
    assert (failed.error, failed.class_name, failed.fps) == ("open: no video stream", "A", 0.0)
    assert tiny.report.failures == {"A/y.avi": "open: no video stream"}
    assert not tiny.report.is_complete


def test_videos_of_one_stem_are_two_rows_with_two_folders(tiny):
    tiny.add("A/clip.avi", "B/clip.avi", "A/v.1.avi")
    tiny.add("A/clip.mp4", name="A/clip.mp4", num_frames=5)
    manifest = tiny.build()
    assert [(row.video, row.frames, row.num_frames) for row in manifest] == [
        ("A/clip.avi", "A/clip", 3),
        ("A/clip.mp4", "A/clip.mp4", 5),
        ("A/v.1.avi", "A/v.1", 3),
        ("B/clip.avi", "B/clip", 3),
    ]


def test_two_builds_from_the_same_folders_are_byte_identical(tiny):
    for name in ("C", "A"):
        tiny.add(*ucf(name, 5))
    fail(tiny.frames, "B/v_B_g01_c01.avi")
    tiny.build()
    first = tiny.path.read_bytes()
    assert (tiny.frames / DATASET_JSON).exists()
    tiny.build()
    assert tiny.path.read_bytes() == first
    tiny.path.unlink()
    tiny.build()
    assert tiny.path.read_bytes() == first


def test_a_moved_tree_gives_the_same_manifest(tiny, tmp_path):
    tiny.add(*ucf("A", 3))
    tiny.build()
    before = tiny.path.read_bytes()
    moved = tmp_path / "else where" / "data"
    moved.parent.mkdir()
    shutil.move(tiny.frames, moved)
    build_manifest(moved, tiny.splits, tmp_path / "again.parquet", dataset="tiny")
    assert (tmp_path / "again.parquet").read_bytes() == before
    assert str(tmp_path).encode() not in before


def test_a_class_added_later_keeps_the_labels_of_the_others(tiny):
    tiny.add(*ucf("A", 2), *ucf("C", 2))
    assert tiny.build().classes == ("A", "C")
    tiny.add(*ucf("B", 2))
    manifest = tiny.build()
    assert manifest.classes == ("A", "C", "B")
    assert {row.class_name: row.label for row in manifest} == {"A": 0, "C": 1, "B": 2}


@pytest.mark.parametrize("lost", ["manifest", "memory"])
def test_labels_outlive_the_loss_of_the_manifest_or_of_the_memory(tiny, lost):
    tiny.add(*ucf("C", 2))
    tiny.build()
    tiny.add(*ucf("A", 2))
    assert tiny.build().classes == ("C", "A")
    (tiny.path if lost == "manifest" else tiny.frames / DATASET_JSON).unlink()
    assert tiny.build().classes == ("C", "A")


def test_a_class_that_lost_its_videos_stays_in_the_list(tiny):
    tiny.add(*ucf("A", 2), *ucf("B", 2))
    tiny.build()
    shutil.rmtree(tiny.frames / "A")
    manifest = tiny.build()
    assert manifest.classes == ("A", "B")
    assert set(manifest.column("label").tolist()) == {1}
    assert (tiny.report.num_classes_met, len(tiny.report.classes)) == (1, 2)


def test_an_official_list_orders_the_classes_and_says_that_labels_change(tiny):
    tiny.add("A/x.avi", "C/x.avi", "X/x.avi")
    tiny.build()
    tiny.list("classInd.txt", "1 C\n2 B\n3 A\n")
    manifest = tiny.build()
    assert manifest.classes == ("C", "B", "A", "X")
    assert any("labels change their meaning" in text for text in tiny.report.warnings)
    assert tiny.build().classes == ("C", "B", "A", "X")
    assert not any("labels change their meaning" in text for text in tiny.report.warnings)


def test_all_splits_share_one_class_list_also_with_classes_only_in_test(tiny):
    tiny.add("A/x.avi", "A/y.avi", "B/x.avi")
    tiny.list("list.csv", "video,split\nA/x.avi,train\nA/y.avi,test\nB/x.avi,test\n")
    manifest = tiny.build()
    train, test = manifest.select(split01="train"), manifest.select(split01="test")
    assert train.classes == test.classes == ("A", "B")
    assert (train.column("label").tolist(), test.column("label").tolist()) == ([0], [0, 1])


def test_a_random_split_keeps_groups_whole_and_each_class_on_both_sides(tiny):
    tiny.add(*ucf("A", 25, 4), *ucf("B", 2, 3), *ucf("C", 1, 3))
    manifest = tiny.build()
    assert leaking_groups(manifest, "split01") == []
    groups = {
        (name, side): len({row.group for row in manifest.select(class_name=name, split01=side)})
        for name in "ABC"
        for side in ("train", "test")
    }
    assert groups == {
        ("A", "train"): 19,
        ("A", "test"): 6,
        ("B", "train"): 1,
        ("B", "test"): 1,
        ("C", "train"): 1,
        ("C", "test"): 0,
    }
    assert any(
        "1 classes have too few groups to be tested, first 'C'" in text for text in tiny.report.warnings
    )


def test_videos_added_later_move_no_group_of_a_random_split(tiny):
    tiny.add(*ucf("A", 8))
    before = {row.group: row.splits["split01"] for row in tiny.build()}
    tiny.add(*(video for video in ucf("A", 20, 3) if not (tiny.frames / video[:-4]).exists()), *ucf("B", 4))
    after = {row.group: row.splits["split01"] for row in tiny.build()}
    assert {group: after[group] for group in before} == before
    assert len(after) == 24
    assert sorted(after.values()).count("test") == 6


def test_another_seed_or_fraction_draws_anew_and_is_kept(tiny):
    tiny.add(*ucf("A", 20))
    sides = [row.splits["split01"] for row in tiny.build()]
    other = [row.splits["split01"] for row in tiny.build(seed=5)]
    assert other != sides
    assert [row.splits["split01"] for row in tiny.build()] == other
    half = [row.splits["split01"] for row in tiny.build(test_fraction=0.5)]
    assert half.count("test") == 20
    assert [row.splits["split01"] for row in tiny.build(seed=5)] == half
    assert [row.splits["split01"] for row in tiny.build(seed=0, test_fraction=0.25)] == sides


def test_a_group_of_failed_videos_is_on_no_side_until_it_has_frames(tiny):
    tiny.add("A/v_A_g01_c01.avi")
    fail(tiny.frames, "A/v_A_g02_c01.avi")
    assert [row.splits["split01"] for row in tiny.build()] == ["train", None]


def test_videos_without_groups_are_drawn_one_by_one_and_that_is_said(tiny):
    tiny.add("A/a.avi", "A/b.avi", "A/c.avi")
    assert sorted(row.splits["split01"] for row in tiny.build()) == ["test", "train", "train"]
    assert any("no groups are known" in text for text in tiny.report.warnings)


def test_lists_go_before_a_random_split_and_leave_its_memory_alone(tiny):
    tiny.add(*ucf("A", 4))
    drawn = [row.splits for row in tiny.build(seed=3)]
    tiny.list("list.csv", "video,split\n" + "".join(f"{video},train\n" for video in ucf("A", 4)))
    assert {row.splits["split01"] for row in tiny.build(seed=7)} == {"train"}
    assert any("seed and test fraction are idle" in text for text in tiny.report.warnings)
    shutil.rmtree(tiny.splits)
    assert [row.splits for row in tiny.build()] == drawn


LEAK = "video,split\nA/v_A_g01_c01.avi,train\nA/v_A_g01_c02.avi,test\n"


def test_a_list_with_a_group_on_both_sides_is_refused_and_nothing_is_written(tiny):
    tiny.add(*ucf("A", 2))
    tiny.list("list.csv", LEAK)
    with pytest.raises(
        ManifestError, match=r"split01: 1 of 1 groups .* first 'A_g01' .*--allow-leaks"
    ) as caught:
        tiny.build()
    assert "\n" not in str(caught.value)
    assert not tiny.path.exists()
    assert not (tiny.frames / DATASET_JSON).exists()


def test_a_leak_that_is_allowed_is_marked(tiny):
    tiny.add(*ucf("A", 2))
    tiny.list("list.csv", LEAK)
    manifest = tiny.build(allow_leaks=True)
    assert leaking_groups(manifest, "split01") == ["A_g01"]
    assert any("split01: 1 of 1 groups stand on both sides" in text for text in tiny.report.warnings)


def test_a_leak_of_a_dataset_s_authors_stands_with_a_warning(tiny):
    tiny.add("kick/Film_kick_f_0.avi", "kick/Film_kick_f_1.avi")
    tiny.list("kick_test_split1.txt", "Film_kick_f_0.avi 1 \nFilm_kick_f_1.avi 2 \n")
    assert len(tiny.build()) == 2
    assert any("groups stand on both sides, first 'Film'" in text for text in tiny.report.warnings)


def test_what_is_listed_and_what_is_there_are_both_counted(tiny):
    tiny.add("A/x.avi", "A/y.avi")
    tiny.list("trainlist01.txt", "A/x.avi 1\nA/gone.avi 1\n")
    tiny.list("testlist01.txt", "A/gone too.avi\n")
    assert [row.splits["split01"] for row in tiny.build()] == ["train", None]
    assert tiny.report.missing == ("A/gone too.avi", "A/gone.avi")
    assert tiny.report.unlisted == ("A/y.avi",)
    text = str(tiny.report)
    assert "listed, but not there: 2, first: A/gone too.avi; A/gone.avi" in text
    assert "there, but not listed: 1, first: A/y.avi" in text


def test_a_video_without_a_class_has_no_row_and_is_named(tiny):
    tiny.add("A/x.avi", "top.avi")
    assert [row.video for row in tiny.build()] == ["A/x.avi"]
    assert tiny.report.unclassed == ("top.avi",)
    assert "without a class, so without a row: 1, first: top.avi" in str(tiny.report)


def test_videos_that_all_lack_a_class_are_an_error_that_says_where_they_belong(tiny):
    tiny.add("x.avi", "y.avi")
    with pytest.raises(ManifestError, match=r"none of 2 videos has a class, first 'x\.avi': put them into"):
        tiny.build()


def test_frames_of_other_options_are_counted_and_the_most_common_are_named(tiny):
    tiny.add("A/x.avi", "A/y.avi")
    tiny.add("A/z.avi", spec={"format": 1, "quality": 75})
    manifest = tiny.build()
    assert manifest.spec == SPEC
    assert any("1 of 3 folders were made with other options" in text for text in tiny.report.warnings)


def test_a_folder_that_cannot_be_read_is_named_and_the_others_go_on(tiny):
    tiny.add("A/x.avi", "A/y.avi")
    (tiny.frames / "A" / "y" / FRAMES_JSON).write_text("{")
    assert [row.video for row in tiny.build()] == ["A/x.avi"]
    assert tiny.report.unreadable == ("A/y",)
    assert not tiny.report.is_complete
    assert "cannot be read; `make verify REPAIR=1` makes anew: 1, first: A/y" in str(tiny.report)


def test_of_two_folders_of_one_video_its_own_is_taken(tiny):
    for name in ("A/a copy", "A/x", "A/x copy"):
        tiny.add("A/x.avi", name=name)
    assert [row.frames for row in tiny.build()] == ["A/x"]
    assert sum("both hold 'A/x.avi'" in text for text in tiny.report.warnings) == 2


def test_a_failure_that_outlived_its_mending_is_forgotten(tiny):
    tiny.add("A/x.avi")
    fail(tiny.frames, "A/x.avi")
    assert [row.status for row in tiny.build()] == ["ok"]


def test_a_frames_root_that_cannot_be_written_is_named(tiny, monkeypatch):
    def refuse(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    tiny.add("A/x.avi")
    monkeypatch.setattr("pipeline.offline.memory.write_text", refuse)
    with pytest.raises(ManifestError, match=r"frames/dataset\.json cannot be written \(Permission denied\)"):
        tiny.build()
    assert not tiny.path.exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_root_without_frames_says_what_to_run(tiny, there):
    if there:
        tiny.frames.mkdir()
    with pytest.raises(PipelineError, match=r"no frames below .*: run `make frames DATASET=tiny`"):
        tiny.build()
    assert not tiny.path.exists()


def test_only_failed_videos_still_give_a_manifest(tiny):
    fail(tiny.frames, "A/x.avi")
    manifest = tiny.build()
    assert (len(manifest), len(manifest.select()), manifest.spec) == (1, 0, {})


def test_a_foreign_file_in_the_manifest_s_place_is_not_overwritten(tiny):
    tiny.add("A/x.avi")
    tiny.path.write_text("mine")
    with pytest.raises(ManifestError, match="is not a manifest"):
        tiny.build()
    assert tiny.path.read_text() == "mine"


def test_a_manifest_of_another_dataset_gives_no_classes(tiny):
    tiny.add("A/x.avi")
    build_manifest(tiny.frames, tiny.splits, tiny.path, dataset="other")
    (tiny.frames / DATASET_JSON).unlink()
    shutil.move(tiny.frames / "A", tiny.frames / "B")
    tiny.add("B/y.avi")
    (tiny.frames / "B" / "x" / FRAMES_JSON).unlink()
    assert tiny.build().classes == ("B",)


def test_odd_names_come_through_whole(tiny):
    videos = ["A b/ü 日本.avi", "A b/%d 'q'.avi", "-A/-x.avi", "A b/line\nbreak.avi", f"A b/{'n' * 200}.avi"]
    tiny.add(*videos)
    manifest = tiny.build()
    assert manifest.column("video").to_pylist() == sorted(videos)
    assert manifest.classes == ("-A", "A b")


def test_the_official_ucf101_lists_and_real_clips_make_the_manifest_that_they_should(tiny, shared):
    index = json.loads((shared / "data/index.json").read_text())
    clips = [file for file in index if file["dataset"] == "UCF101" and file.get("ucf101")]
    for file in clips:
        video = "/".join(file["path"].split("/")[-2:])
        tiny.add(video, num_frames=file["frames_decoded"])
    shutil.copytree(shared / "data/lists/ucf101/ucfTrainTestlist", tiny.splits / "ucfTrainTestlist")
    manifest = tiny.build()
    assert len(manifest.classes) == 101
    by_name = {Path(row.video).stem: row for row in manifest}
    for file in clips:
        row, facts = by_name[Path(file["path"]).stem], file["ucf101"]
        assert row.label == facts["class_index"] - 1
        assert row.splits == {f"split0{k}": facts["splits"][f"split{k}"] for k in (1, 2, 3)}
        assert row.num_frames == facts["published_frame_count"] + 1
    assert [leaking_groups(manifest, split) for split in manifest.split_names] == [[], [], []]
