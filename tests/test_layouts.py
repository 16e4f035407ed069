import csv
import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from pipeline.errors import ManifestError, PipelineError
from pipeline.offline.annotate import annotate
from pipeline.offline.layouts import (
    find_dataset,
    find_videos,
    read_hmdb51,
    read_kinetics,
    read_something_something_v2,
    read_ucf101,
)
from pipeline.offline.lists import find_lists


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def touch(root: Path, *names: str) -> Path:
    return write(root, dict.fromkeys(names, ""))


def test_videos_are_found_by_suffix_in_any_case_and_sorted(tmp_path):
    names = ["b/y.MP4", "b/x.avi", "a/z.webm", "a/sound.mp3", "top.h264", "a/deep/er/v.1.mkv"]
    touch(tmp_path, *names, "a/notes.txt", "a/x.avi.part", "a/nosuffix")
    found = find_videos(tmp_path)
    assert found.videos == sorted(names)
    assert found.ignored == ["a/nosuffix", "a/notes.txt", "a/x.avi.part"]


def test_hidden_junk_is_neither_a_class_nor_a_video(tmp_path):
    junk = [".DS_Store", "A/._v_x.avi", "A/Thumbs.db", ".ipynb_checkpoints/v_x.avi", "__MACOSX/A/v_x.avi"]
    touch(tmp_path, "A/v_x.avi", *junk)
    found = find_videos(tmp_path)
    assert (found.videos, found.ignored) == (["A/v_x.avi"], [])


def test_names_that_are_not_plain_are_found_as_they_are(tmp_path):
    names = [
        "A b/ü 日本.avi",
        "A b/%d 'q' \"r\".avi",
        "-A/-x.avi",
        "A b/line\nbreak.avi",
        f"A b/{'n' * 200}.avi",
    ]
    touch(tmp_path, *names)
    assert find_videos(tmp_path).videos == sorted(names)


def test_a_name_that_is_no_utf8_is_counted_and_not_taken(tmp_path):
    touch(tmp_path, "A/x.avi")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/A/caf\xe9.avi")).touch()
    found = find_videos(tmp_path)
    assert found.videos == ["A/x.avi"]
    assert len(found.ignored) == 1


@pytest.mark.parametrize("make", [lambda root: None, lambda root: touch(root, "A/notes.txt", "A/.x.avi")])
def test_a_folder_without_videos_says_where_they_are_expected(tmp_path, make):
    root = tmp_path / "ucf101" / "videos"
    make(root)
    with pytest.raises(PipelineError, match=r"expected as .*ucf101/videos/<Class>/<video>\.avi") as caught:
        find_videos(root)
    assert "\n" not in str(caught.value)


def test_a_dataset_that_is_not_there_names_those_that_are(tmp_path):
    touch(tmp_path, "ucf101/videos/x.avi", "mine/videos/x.avi")
    assert find_dataset(tmp_path, "mine") == tmp_path / "mine"
    for name in ("ucf11", "", "..", "mine/videos"):
        with pytest.raises(PipelineError, match="there is mine, ucf101"):
            find_dataset(tmp_path, name)
    with pytest.raises(PipelineError, match="there is none"):
        find_dataset(tmp_path / "none", "ucf101")


UCF_LISTS = {
    "ucfTrainTestlist/classInd.txt": "1 Archery\r\n2 HandstandPushups\r\n3 YoYo\r\n",
    "ucfTrainTestlist/trainlist01.txt": "Archery/v_Archery_g08_c01.avi 1\r\n"
    "HandstandPushups/v_HandStandPushups_g08_c01.avi 2\r\n\r\n",
    "ucfTrainTestlist/testlist01.txt": "Archery/v_Archery_g01_c01.avi \r\nArchery/v_Archery_g01_c02.avi",
}
UCF_VIDEOS = [
    "Archery/v_Archery_g01_c01.avi",
    "Archery/v_Archery_g08_c01.avi",
    "HandstandPushups/v_HandStandPushups_g08_c01.avi",
    "YoYo/v_YoYo_g01_c01.avi",
]


def test_ucf101_lists_give_classes_from_1_as_labels_from_0(tmp_path):
    said = annotate(UCF_VIDEOS, write(tmp_path, UCF_LISTS))
    assert (said.layout, said.classes, said.official) == (
        "ucf101",
        ("Archery", "HandstandPushups", "YoYo"),
        True,
    )
    assert said.splits == {"split01": {UCF_VIDEOS[0]: "test", UCF_VIDEOS[1]: "train", UCF_VIDEOS[2]: "train"}}


def test_listed_but_not_there_and_there_but_not_listed_are_both_named(tmp_path):
    said = annotate(UCF_VIDEOS, write(tmp_path, UCF_LISTS))
    assert said.missing == ("Archery/v_Archery_g01_c02.avi",)
    assert said.unlisted == ("YoYo/v_YoYo_g01_c01.avi",)
    assert said.class_of["YoYo/v_YoYo_g01_c01.avi"] == "YoYo"


def test_a_group_of_ucf101_is_its_class_and_number(tmp_path):
    said = annotate(UCF_VIDEOS, write(tmp_path, UCF_LISTS))
    assert list(said.group_of.values()) == ["Archery_g01", "Archery_g08", "HandstandPushups_g08", "YoYo_g01"]


@pytest.mark.parametrize(
    ("folder", "listed"),
    list(itertools.product(["HandstandPushups", "HandStandPushups"], repeat=2)),
)
def test_a_folder_and_its_files_spelt_apart_are_one_class(tmp_path, folder, listed):
    video = f"{folder}/v_HandStandPushups_g08_c01.avi"
    lists = {
        "classInd.txt": "1 Archery\n2 HandstandPushups\n",
        "trainlist01.txt": f"{listed}/v_HandStandPushups_g08_c01.avi 2\n",
        "testlist01.txt": "Archery/v_Archery_g01_c01.avi\n",
    }
    said = annotate([video], write(tmp_path, lists))
    assert said.class_of == {video: "HandstandPushups"}
    assert said.group_of == {video: "HandstandPushups_g08"}
    assert said.splits == {"split01": {video: "train"}}
    assert len(said.warnings) == (folder != listed) + (folder != "HandstandPushups")


def test_without_a_class_index_the_class_is_spelt_as_the_folder(tmp_path):
    lists = {
        "trainlist01.txt": "handstandpushups/v_x_g01_c01.avi 2\n",
        "testlist01.txt": "A/v_y_g01_c01.avi\n",
    }
    said = annotate(["HandStandPushups/v_x_g01_c01.avi"], write(tmp_path, lists))
    assert (said.classes, said.official) == (None, False)
    assert said.class_of == {"HandStandPushups/v_x_g01_c01.avi": "HandStandPushups"}


def test_flat_videos_take_their_class_from_the_list(tmp_path):
    said = annotate(["v_Archery_g08_c01.avi", "v_Other_g01_c01.avi"], write(tmp_path, UCF_LISTS))
    assert said.class_of == {"v_Archery_g08_c01.avi": "Archery"}
    assert said.unclassed == ("v_Other_g01_c01.avi",)


def test_labels_that_contradict_the_class_index_are_counted_and_the_folder_decides(tmp_path):
    lists = {**UCF_LISTS, "ucfTrainTestlist/trainlist01.txt": "Archery/v_Archery_g08_c01.avi 2\n"}
    said = annotate(UCF_VIDEOS, write(tmp_path, lists))
    assert said.class_of[UCF_VIDEOS[1]] == "Archery"
    assert any(
        "1 labels do not agree with classInd.txt" in text and "line 1" in text for text in said.warnings
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 Archery\nBowling\n", r"classInd\.txt, line 2: 'Bowling', expected `<number> <class>`"),
        ("1 Archery\n1 Bowling\n", "line 2: '1 Bowling'"),
        ("1 Archery\n2 Archery\n", "line 2: '2 Archery'"),
        ("1 Archery\n3 Bowling\n", "numbers .* have a gap"),
        ("2 Archery\n3 Bowling\n", "expected 1, 2, 3"),
        ("", "expected 1, 2, 3"),
    ],
)
def test_a_class_index_that_is_wrong_is_an_error_with_file_and_line(tmp_path, text, said):
    with pytest.raises(ManifestError, match=said):
        annotate(UCF_VIDEOS, write(tmp_path, {**UCF_LISTS, "ucfTrainTestlist/classInd.txt": text}))


def test_a_class_index_may_count_from_0_and_hold_blanks(tmp_path):
    write(tmp_path, {"classInd.txt": "1\tb c\n0 a\n"})
    assert annotate(["a/x.avi"], tmp_path).classes == ("a", "b c")


def test_two_copies_of_the_lists_are_one_where_they_agree_and_an_error_where_not(tmp_path):
    copies = {
        name.replace("ucfTrain", "copy/ucfTrain"): text.replace("\r", "") for name, text in UCF_LISTS.items()
    }
    write(tmp_path, {**UCF_LISTS, **copies})
    assert len(annotate(UCF_VIDEOS, tmp_path).missing) == 1
    write(tmp_path, {"copy/ucfTrainTestlist/trainlist01.txt": "Archery/x.avi 1\n"})
    with pytest.raises(ManifestError, match="are different lists of one name: keep one"):
        annotate(UCF_VIDEOS, tmp_path)


def test_a_video_on_both_sides_of_one_split_is_an_error_that_names_both_lines(tmp_path):
    lists = {"trainlist01.txt": "A/x.avi 1\nA/y.avi 1\n", "testlist01.txt": "A/y.avi\n"}
    with pytest.raises(
        ManifestError, match=r"trainlist01\.txt, line 2: 'A/y\.avi' is train, but test in .*line 1"
    ):
        annotate(["A/x.avi", "A/y.avi"], write(tmp_path, lists))


def test_the_official_ucf101_lists_read_as_published(shared):
    lists = find_lists(shared / "data/lists/ucf101/ucfTrainTestlist")
    said = read_ucf101(lists, [])
    assert (len(said.classes), said.classes[0], said.classes[36], said.classes[100]) == (
        101,
        "ApplyEyeMakeup",
        "HandstandPushups",
        "YoYo",
    )
    label_map = (shared / "data/lists/mmaction2/label_map_ucf101.txt").read_text().splitlines()
    assert list(said.classes) == [name.strip() for name in label_map]
    counts = Counter((entry.split, entry.part) for entry in said.entries)
    assert [counts[f"split0{k}", "train"] for k in (1, 2, 3)] == [9537, 9586, 9624]
    assert [counts[f"split0{k}", "test"] for k in (1, 2, 3)] == [3783, 3734, 3696]
    assert said.warnings == []


def test_the_other_published_copy_of_the_ucf101_lists_means_the_same_videos(shared):
    official = read_ucf101(find_lists(shared / "data/lists/ucf101/ucfTrainTestlist"), [])
    videos = sorted({entry.video for entry in official.entries})
    assert len(videos) == 13320
    side_of = {entry.video: entry.part for entry in official.entries if entry.split == "split01"}
    said = annotate(videos, shared / "data/lists/ucf101/ucfTrainTestlist_lf")
    assert said.splits == {"split01": side_of}
    assert (said.missing, said.unlisted) == ((), ())
    assert said.class_of["HandstandPushups/v_HandStandPushups_g01_c01.avi"] == "HandstandPushups"
    assert len(said.warnings) == 1
    assert said.warnings[0].startswith("128 entries and their videos differ in case")


def test_the_real_ucf101_clips_stand_where_the_official_lists_put_them(shared):
    videos = find_videos(shared / "data/videos/ucf101").videos
    said = annotate(videos, shared / "data/lists/ucf101/ucfTrainTestlist")
    mini = annotate(videos, shared / "data/lists/ucf101/mini")
    assert said.splits == mini.splits
    assert len(videos) == 55
    assert (said.unlisted, len(said.missing)) == ((), 13320 - 55)
    assert said.splits["split01"]["ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi"] == "test"
    assert said.splits["split02"]["ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi"] == "train"


def test_hmdb51_lists_name_train_test_and_unused(tmp_path):
    files = {
        "splits/kick_test_split1.txt": "Film_(a)_kick_f_cm_np1_ba_med_0.avi 1 \n"
        "Film_b_kick_u_nm_np1_fr_bad_1.avi 2 \n",
        "splits/kick_ball_test_split1.txt": "My kick film_kick_ball_f_cm_np1_ba_med_0.avi 0 \n",
    }
    videos = [
        "kick/Film_(a)_kick_f_cm_np1_ba_med_0.avi",
        "kick/Film_b_kick_u_nm_np1_fr_bad_1.avi",
        "kick_ball/My kick film_kick_ball_f_cm_np1_ba_med_0.avi",
    ]
    said = annotate(videos, write(tmp_path, files))
    assert (said.layout, said.classes) == ("hmdb51", ("kick", "kick_ball"))
    assert said.splits == {"split01": {videos[0]: "train", videos[1]: "test"}}
    assert list(said.group_of.values()) == ["Film_(a)", "Film_b", "My kick film"]
    assert (said.missing, said.unlisted, said.leaks_stand) == ((), (), True)


@pytest.mark.parametrize("line", ["x_kick_f.avi", "x_kick_f.avi 3", "x_kick_f.avi train"])
def test_an_hmdb51_line_without_a_known_id_is_an_error_with_file_and_line(tmp_path, line):
    write(tmp_path, {"kick_test_split2.txt": f"ok_kick_f.avi 1 \n{line}\n"})
    with pytest.raises(
        ManifestError, match=r"kick_test_split2\.txt, line 2: .*expected `<video> <0, 1 or 2>`"
    ):
        annotate([], tmp_path)


def test_the_official_hmdb51_lists_read_as_published(shared):
    lists = [path for path in find_lists(shared / "data/lists/hmdb51") if "_test_split" in path.name]
    assert len(lists) == 153
    said = read_hmdb51(lists, [])
    counts = Counter(entry.part for entry in said.entries if entry.split == "split01")
    assert (counts["train"], counts["test"], counts[None]) == (3570, 1530, 1666)
    label_map = (shared / "data/lists/mmaction2/label_map_hmdb51.txt").read_text().split()
    assert said.classes == label_map
    videos = find_videos(shared / "data/videos/real/hmdb51").videos
    real = annotate(videos, shared / "data/lists/hmdb51")
    assert real.unlisted == ()
    assert real.group_of["wave/TrumanShow_wave_f_nm_np1_fr_med_26.avi"] == "TrumanShow"


KINETICS = {
    "val.csv": "label,youtube_id,time_start,time_end,split\n"
    "air drumming,-AbC_d1234x,7,17,val\n"
    '"hurling (sport)",-abC_d1234x,3,13,val\n'
    "surfing,twice000000,0,10,val\n"
    "surfing,twice000000,10,20,val\n"
    "air drumming,unclear0000,0,10,val\n"
    "surfing,unclear0000,10,20,val\n",
    "train.csv": "label,youtube_id,time_start,time_end,split\nsurfing,trainclip00,0,10,train\n",
    "test.csv": "youtube_id,time_start,time_end,split\nunlabelled0,0,10,test\n",
}


def test_kinetics_files_are_known_by_id_and_seconds_in_folders_or_flat(tmp_path):
    videos = [
        "-AbC_d1234x_000007_000017.mp4",
        "hurling_sport/-abC_d1234x.mp4",
        "surfing/trainclip00_000000_000010.mkv",
        "surfing/twice000000.mp4",
        "val/surfing/unclear0000.mp4",
    ]
    said = annotate(videos, write(tmp_path, KINETICS))
    assert (said.layout, said.official, said.leaks_stand) == ("kinetics", False, True)
    assert said.classes == ("air drumming", "hurling (sport)", "surfing")
    assert list(said.class_of.values()) == [
        "air drumming",
        "hurling (sport)",
        "surfing",
        "surfing",
        "surfing",
    ]
    assert list(said.splits["split01"].values()).count("test") == 4
    assert said.splits["split01"][videos[2]] == "train"
    assert list(said.group_of.values()) == [
        "-AbC_d1234x",
        "-abC_d1234x",
        "trainclip00",
        "twice000000",
        "unclear0000",
    ]
    assert said.missing == ("unlabelled0_000000_000010", "unclear0000_000000_000010")
    assert said.unlisted == ()


def test_a_kinetics_file_that_may_be_two_clips_is_on_no_side_and_named(tmp_path):
    said = annotate(["unclear0000.mp4", "unlabelled0.mp4"], write(tmp_path, KINETICS))
    assert said.splits == {"split01": {}}
    assert said.unclassed == ("unclear0000.mp4", "unlabelled0.mp4")
    assert said.unlisted == ("unclear0000.mp4",)
    assert any("1 videos may be several clips" in text and "unclear0000" in text for text in said.warnings)


def test_a_kinetics_row_without_whole_seconds_is_an_error_with_file_and_line(tmp_path):
    write(tmp_path, {"val.csv": "label,youtube_id,time_start,time_end\na,x,0,10\nb,y,,10\n"})
    with pytest.raises(ManifestError, match=r"val\.csv, line 3: no whole seconds"):
        annotate([], tmp_path)


def test_the_part_of_kinetics_may_stand_in_the_name_of_the_list(tmp_path):
    write(tmp_path, {"kinetics-600_val.csv": "label,youtube_id,time_start,time_end\na,x,0.0,10.0\n"})
    assert annotate(["x.mp4"], tmp_path).splits == {"split01": {"x.mp4": "test"}}


def test_the_published_kinetics_lists_read_whole(shared):
    lists = [shared / "data/lists/kinetics/kinetics-600_val.csv"]
    with lists[0].open() as file:
        rows = list(csv.DictReader(file))
    said = read_kinetics(lists, [])
    assert len(said.entries) == len(rows) == 29093
    assert said.classes == sorted({row["label"] for row in rows})
    assert {entry.part for entry in said.entries} == {"val"}
    dash = next(entry for entry in said.entries if entry.video.startswith("-"))
    assert said.match([dash], [f"{dash.video}.mp4"]).pairs == [(dash, f"{dash.video}.mp4")]


SSV2 = {
    "labels/labels.json": '{"Moving something up": "1",\r\n "Folding something": "0"}',
    "labels/train.json": '[{"id": "7", "template": "Moving [something] up"}]',
    "labels/validation.json": '[{"id": "8", "template": "Folding [Something]"}, '
    '{"id": 9, "template": "Folding [something]"}]',
    "labels/test.json": '[{"id": "10"}]',
}


def test_something_something_v2_gives_templates_as_classes(tmp_path):
    said = annotate(["10.webm", "11.webm", "7.webm", "8.webm"], write(tmp_path, SSV2))
    assert (said.layout, said.official) == ("something_something_v2", True)
    assert said.classes == ("Folding something", "Moving something up")
    assert said.class_of == {"7.webm": "Moving something up", "8.webm": "Folding something"}
    assert said.splits == {"split01": {"7.webm": "train", "8.webm": "test"}}
    assert (said.missing, said.unlisted, said.unclassed) == (("9",), ("11.webm",), ("10.webm", "11.webm"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("labels/labels.json", '{"a": "0", "b": "2"}', "numbers have a gap"),
        ("labels/labels.json", '{"a": "0", "b": "x"}', 'expected {"<class>": "<number>"'),
        ("labels/train.json", '[{"id": "7"}, {"video": 1}]', r"train\.json, entry 2: .*expected"),
        ("labels/train.json", "[7]", r"train\.json, entry 1: 7, expected"),
        ("labels/train.json", '{"id": "7"}', "holds a dict, expected a list"),
    ],
)
def test_something_something_lists_that_are_wrong_are_errors_that_name_the_file(tmp_path, name, text, said):
    with pytest.raises(ManifestError, match=said):
        annotate([], write(tmp_path, {**SSV2, name: text}))


def test_something_something_without_labels_says_which_file_is_expected(tmp_path):
    write(tmp_path, {"train.json": "[]"})
    with pytest.raises(ManifestError, match=r"expected something-something-v2-labels\.json"):
        annotate([], tmp_path)


def test_the_published_something_something_lists_read_whole(shared):
    lists = find_lists(shared / "data/lists/something_something_v2")
    said = read_something_something_v2(lists, [])
    assert said.classes == (shared / "data/lists/mmaction2/label_map_sthv2.txt").read_text().splitlines()
    assert Counter(entry.part for entry in said.entries) == {"val": 2000, None: 27157}
    videos = sorted(f"{entry.video}.webm" for entry in said.entries if entry.part)
    annotation = annotate(videos, shared / "data/lists/something_something_v2")
    assert set(annotation.class_of.values()) <= set(said.classes)
    assert annotation.class_of["74225.webm"] == "Spinning something that quickly stops spinning"
    assert len(annotation.class_of) == 2000


def test_a_table_of_ones_own_gives_class_group_and_sides(tmp_path):
    text = "video,class,split,group\nx.avi,Run,train,ann\ny.avi,Walk,val,bob\nz.avi,Run,test,cy\n"
    said = annotate(["x.avi", "y.avi", "z.avi", "other.avi"], write(tmp_path, {"list.csv": text}))
    assert (said.layout, said.official, said.classes) == ("csv", False, ("Run", "Walk"))
    assert said.class_of == {"x.avi": "Run", "y.avi": "Walk", "z.avi": "Run"}
    assert said.group_of == {"x.avi": "ann", "y.avi": "bob", "z.avi": "cy"}
    assert said.splits == {
        "split01": {"x.avi": "train", "y.avi": "test"},
        "split02": {"x.avi": "train", "z.avi": "test"},
    }
    assert (said.unlisted, said.unclassed) == (("other.avi",), ("other.avi",))


def test_a_table_may_hold_several_splits_and_leave_class_and_group_to_the_folder(tmp_path):
    text = "video,split1,split02\nRun/x.avi,train,\nWalk/y.avi,test,train\n"
    said = annotate(["Run/x.avi", "Walk/y.avi", "Walk/z.avi"], write(tmp_path, {"list.csv": text}))
    assert said.class_of == {"Run/x.avi": "Run", "Walk/y.avi": "Walk", "Walk/z.avi": "Walk"}
    assert said.group_of == {"Run/x.avi": "Run/x", "Walk/y.avi": "Walk/y", "Walk/z.avi": "Walk/z"}
    assert said.splits == {
        "split01": {"Run/x.avi": "train", "Walk/y.avi": "test"},
        "split02": {"Walk/y.avi": "train"},
    }


def test_a_table_without_sides_makes_no_split(tmp_path):
    said = annotate(["x.avi"], write(tmp_path, {"list.csv": "video,class\nx.avi,Run\n"}))
    assert said.splits == {}


@pytest.mark.parametrize(
    ("row", "said"),
    [(",Run,train", "line 2: no video"), ("x.avi,Run,holdout", "line 2: 'holdout' is no part of a split")],
)
def test_a_row_of_a_table_that_is_wrong_is_an_error_with_file_and_line(tmp_path, row, said):
    write(tmp_path, {"list.csv": f"video,class,split\n{row}\n"})
    with pytest.raises(ManifestError, match=rf"list\.csv, {said}"):
        annotate(["x.avi"], tmp_path)


def test_folders_alone_are_classes_and_ucf_names_are_groups(tmp_path):
    videos = ["Run/v_Run_g03_c01.avi", "Run/x.avi", "deep/Walk/x.avi"]
    said = annotate(videos, tmp_path / "none")
    assert (said.layout, said.classes, said.splits) == ("folders", None, {})
    assert list(said.class_of.values()) == ["Run", "Run", "Walk"]
    assert list(said.group_of.values()) == ["Run_g03", "Run/x", "deep/Walk/x"]
    assert (said.missing, said.unlisted, said.warnings) == ((), (), ())


def test_folders_named_train_and_val_are_the_sides(tmp_path):
    videos = ["train/Run/x.avi", "train/Walk/y.avi", "val/Run/x.avi"]
    said = annotate(videos, tmp_path / "none")
    assert said.splits == {"split01": {videos[0]: "train", videos[1]: "train", videos[2]: "test"}}
    assert list(said.class_of.values()) == ["Run", "Walk", "Run"]


def test_folders_of_which_only_some_are_sides_are_classes(tmp_path):
    assert annotate(["train/x.avi", "val/x.avi"], tmp_path).splits == {}
    assert annotate(["train/Run/x.avi", "Walk/x.avi"], tmp_path).splits == {}
    assert annotate(["train/Run/x.avi", "train/Walk/x.avi"], tmp_path).splits == {}
