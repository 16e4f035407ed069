import pytest

from pipeline.errors import ManifestError
from pipeline.offline.annotate import annotate, choose_layout
from pipeline.offline.layouts import LAYOUTS

LISTS = {
    "ucf101": ("trainlist01.txt", "A/x.avi 1\n"),
    "hmdb51": ("kick_test_split1.txt", "x_kick_f.avi 1 \n"),
    "kinetics": ("val.csv", "label,youtube_id,time_start,time_end\na,x,0,10\n"),
    "something_something_v2": ("x-labels.json", '{"a": "0"}'),
    "csv": ("mine.csv", "video,class\nx.avi,A\n"),
}


def write(root, name, text):
    root.mkdir(exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize("layout", LISTS)
def test_a_layout_is_known_by_its_lists_whatever_the_dataset_is_called(tmp_path, layout):
    write(tmp_path, *LISTS[layout])
    assert choose_layout(tmp_path) == (layout, [tmp_path / LISTS[layout][0]], [])
    assert annotate(["A/x.avi"], tmp_path).layout == layout


def test_a_missing_or_empty_folder_of_lists_means_folders(tmp_path):
    assert choose_layout(tmp_path / "none")[0] == "folders"
    write(tmp_path, "README.txt", "put lists here")
    assert choose_layout(tmp_path)[0] == "folders"


def test_lists_of_two_layouts_are_an_error_until_one_is_named(tmp_path):
    write(tmp_path, *LISTS["hmdb51"])
    write(tmp_path, *LISTS["csv"])
    with pytest.raises(ManifestError, match="holds lists of hmdb51 and csv: name one with --layout"):
        choose_layout(tmp_path)
    assert choose_layout(tmp_path, "csv") == (
        "csv",
        [tmp_path / "mine.csv"],
        [tmp_path / "kick_test_split1.txt"],
    )


def test_lists_that_no_layout_knows_are_an_error_and_no_random_split(tmp_path):
    write(tmp_path, "my_train.txt", "x.avi\n")
    with pytest.raises(
        ManifestError, match=r"no list that is known, but my_train\.txt: name one with --layout"
    ):
        choose_layout(tmp_path)
    assert choose_layout(tmp_path, "folders")[0] == "folders"


def test_a_layout_that_is_unknown_or_finds_no_list_says_what_is_expected(tmp_path):
    with pytest.raises(ManifestError, match=f"no layout 'ucf': expected auto, {', '.join(LAYOUTS)}"):
        choose_layout(tmp_path, "ucf")
    with pytest.raises(ManifestError, match=r"no list of layout ucf101 below .*: expected classInd\.txt"):
        choose_layout(tmp_path, "ucf101")


def test_a_list_that_is_not_read_is_named(tmp_path):
    write(tmp_path, *LISTS["hmdb51"])
    write(tmp_path, "class_list.txt", "kick\n")
    said = annotate(["kick/x_kick_f.avi"], tmp_path)
    assert any(
        "1 files are no lists of hmdb51" in text and "class_list.txt" in text for text in said.warnings
    )


def test_folders_that_are_spelt_apart_are_counted_in_one_line(tmp_path):
    write(tmp_path, "classInd.txt", "1 air drumming\n2 Run\n3 walk\n")
    said = annotate(["air_drumming/x.avi", "run/x.avi", "walk/x.avi"], tmp_path)
    assert list(said.class_of.values()) == ["air drumming", "Run", "walk"]
    assert len(said.warnings) == 1
    assert "2 folders are spelt apart" in said.warnings[0]
    assert "'air_drumming' for 'air drumming'" in said.warnings[0]


def test_the_folder_decides_where_it_and_the_list_name_other_classes(tmp_path):
    text = "label,youtube_id,time_start,time_end,split\nrun,a,0,10,train\nwalk,b,0,10,val\n"
    write(tmp_path, "list.csv", text)
    said = annotate(["walk/a.mp4", "walk/b.mp4"], tmp_path)
    assert said.class_of == {"walk/a.mp4": "walk", "walk/b.mp4": "walk"}
    assert any("1 videos lie in the folder of another class" in text for text in said.warnings)


def test_a_table_of_the_users_own_goes_before_the_folder(tmp_path):
    write(tmp_path, "list.csv", "video,class\n2020/x.avi,Run\nRun/y.avi,Walk\n")
    said = annotate(["2020/x.avi", "Run/y.avi"], tmp_path)
    assert said.class_of == {"2020/x.avi": "Run", "Run/y.avi": "Walk"}
    assert said.warnings == ()


def test_a_folder_that_an_official_list_does_not_know_is_a_class_with_a_warning(tmp_path):
    write(tmp_path, "classInd.txt", "1 A\n2 B\n")
    said = annotate(["A/x.avi", "New/x.avi"], tmp_path)
    assert said.class_of == {"A/x.avi": "A", "New/x.avi": "New"}
    assert any("1 classes are in no list and follow" in text and "'New'" in text for text in said.warnings)


def test_a_video_that_lists_give_two_classes_is_an_error_that_names_both_lines(tmp_path):
    write(tmp_path, "trainlist01.txt", "A/x.avi 1\nB/x.avi 2\n")
    with pytest.raises(
        ManifestError, match=r"line 2: 'x\.avi' is of class 'B', but of 'A' in .*line 1: keep one"
    ):
        annotate(["x.avi"], tmp_path)


def test_a_split_with_one_side_only_is_said(tmp_path):
    write(tmp_path, "trainlist01.txt", "A/x.avi 1\n")
    assert any(
        "split01: no list names a video to test on" in text
        for text in annotate(["A/x.avi"], tmp_path).warnings
    )


def test_columns_depend_on_the_lists_and_not_on_the_videos_that_are_there(tmp_path):
    write(tmp_path, "list.csv", "video,class,split\na.avi,A,train\nb.avi,A,val\nc.avi,A,test\n")
    assert annotate(["a.avi"], tmp_path).splits == {
        "split01": {"a.avi": "train"},
        "split02": {"a.avi": "train"},
    }
