from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ManifestError
from pipeline.offline.lists import (
    Entry,
    find_lists,
    list_path,
    match_paths,
    match_stems,
    parse_part,
    read_header,
    read_json,
    read_lines,
    read_rows,
    spell_class,
    split_label,
    walk_files,
)

PLAIN = "A/v_A_g01_c01.avi 1\nA/v_A_g02_c01.avi 1\n"
IN_THE_WILD = {
    "plain": PLAIN.encode(),
    "CR LF": PLAIN.replace("\n", "\r\n").encode(),
    "CR alone": PLAIN.replace("\n", "\r").encode(),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "UTF-16": PLAIN.encode("utf-16"),
    "trailing blanks": PLAIN.replace("\n", " \t \n").encode(),
    "blank lines": ("\n" + PLAIN.replace("\n", "\n\n") + " \n").encode(),
    "no last line end": PLAIN.rstrip().encode(),
    "backslashes": PLAIN.replace("/", "\\").encode(),
    "leading dot": PLAIN.replace("A/", "./A/").encode(),
    "tabs": PLAIN.replace(" ", "\t").encode(),
}


@pytest.mark.parametrize("data", IN_THE_WILD.values(), ids=IN_THE_WILD)
def test_a_list_reads_the_same_however_it_was_saved(tmp_path, data):
    (tmp_path / "list.txt").write_bytes(data)
    read = [split_label(text) for _, text in read_lines(tmp_path / "list.txt")]
    assert read == [("A/v_A_g01_c01.avi", 1), ("A/v_A_g02_c01.avi", 1)]


def test_lines_keep_their_numbers_over_blank_ones(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"one\r\n\r\n two \nthree\x0bstill three")
    assert read_lines(tmp_path / "list.txt") == [(1, "one"), (3, "two"), (4, "three\x0bstill three")]


def test_a_list_that_is_no_text_is_an_error_with_file_and_line(tmp_path):
    (tmp_path / "list.txt").write_bytes("A/é.avi\nA/é.avi\n".encode("latin-1"))
    with pytest.raises(ManifestError, match=r"list\.txt, line 1: not utf-8-sig text, save the list as UTF-8"):
        read_lines(tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("A/b.avi", ("A/b.avi", None)),
        ("A/b.avi 12", ("A/b.avi", 12)),
        ("A/my clip 1.avi", ("A/my clip 1.avi", None)),
        ("A/my clip 1.avi 2", ("A/my clip 1.avi", 2)),
        ("My Class/b.avi", ("My Class/b.avi", None)),
        ("clip 7", ("clip 7", None)),
        ("clip.mp4 7", ("clip.mp4", 7)),
        ("A/b.avi -1", ("A/b.avi -1", None)),
        ("A/b.avi two", ("A/b.avi two", None)),
        ("A\\b.avi 3", ("A/b.avi", 3)),
    ],
)
def test_a_label_is_split_off_only_where_it_is_one(text, read):
    assert split_label(text) == read


def test_paths_of_lists_become_relative_posix_paths():
    assert [list_path(text) for text in ("./A/b.avi", "/home/u/A/b.avi", "A//b.avi", ".\\A\\b c.avi")] == [
        "A/b.avi",
        "home/u/A/b.avi",
        "A/b.avi",
        "A/b c.avi",
    ]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_reads_with_any_common_separator(tmp_path, separator):
    path = tmp_path / "list.csv"
    text = 'Video, Class ,split\n"A/b, c.avi",A, train\n\nA/d.avi,A,test\n'
    quoted = text.replace(",", separator).replace(f"b{separator} c", "b, c")
    path.write_bytes(b"\xef\xbb\xbf" + quoted.replace("\n", "\r\n").encode())
    assert read_header(path) == ["video", "class", "split"]
    assert read_rows(path) == [
        (2, {"video": "A/b, c.avi", "class": "A", "split": "train"}),
        (4, {"video": "A/d.avi", "class": "A", "split": "test"}),
    ]


def test_a_short_row_is_an_error_with_file_and_line(tmp_path):
    (tmp_path / "list.csv").write_text("video,class\na.avi,A\nb.avi\n")
    with pytest.raises(ManifestError, match=r"list\.csv, line 3: 1 values, expected 2: video,class"):
        read_rows(tmp_path / "list.csv")


def test_json_that_is_broken_or_of_another_kind_is_an_error(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(ManifestError, match=r"list\.json, line 2: not JSON"):
        read_json(path, dict)
    path.write_text("[]")
    with pytest.raises(ManifestError, match="holds a list, expected a dict"):
        read_json(path, dict)


def test_parts_of_a_split_have_many_names():
    assert [parse_part(name, "") for name in ("train", "Training", "VAL", "validate", "test", "")] == [
        "train",
        "train",
        "val",
        "val",
        "test",
        None,
    ]
    with pytest.raises(
        ManifestError, match=r"list\.csv, line 3: 'holdout' is no part of a split, expected train"
    ):
        parse_part("holdout", "list.csv, line 3")


def test_litter_and_pages_about_the_lists_are_no_lists(tmp_path):
    for name in ("b/list.txt", "a.CSV", "._a.csv", ".hidden/x.txt", "README.txt", "__MACOSX/x.txt", "c.pdf"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert find_lists(tmp_path) == [tmp_path / "a.CSV", tmp_path / "b" / "list.txt"]
    assert find_lists(tmp_path / "none") == []


def test_a_circle_of_links_ends_and_linked_folders_are_walked(tmp_path):
    (tmp_path / "far" / "A").mkdir(parents=True)
    (tmp_path / "far" / "A" / "x.avi").touch()
    root = tmp_path / "videos"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(root)
    (root / "self").symlink_to(root)
    (root / "nowhere.avi").symlink_to(tmp_path / "gone.avi")
    (root / "itself.avi").symlink_to(root / "itself.avi")
    assert sorted(map(str, walk_files(root))) == ["itself.avi", "linked/A/x.avi", "nowhere.avi"]


def entries(*videos: str, split: str = "split01") -> list[Entry]:
    return [Entry(Path("list.txt"), line, video, split) for line, video in enumerate(videos, start=1)]


def matched(listed: list[Entry], videos: list[str]) -> dict[str, str]:
    return {entry.video: video for entry, video in match_paths(listed, videos).pairs}


def test_an_exact_match_goes_before_one_without_case_and_says_nothing():
    videos = ["A/clip.avi", "A/Clip.avi"]
    matches = match_paths(entries("A/Clip.avi", "A/clip.avi"), videos)
    assert [(entry.video, video) for entry, video in matches.pairs] == [
        ("A/Clip.avi", "A/Clip.avi"),
        ("A/clip.avi", "A/clip.avi"),
    ]
    assert (matches.missing, matches.warnings) == ([], [])


def test_a_unique_match_without_case_holds_with_a_warning():
    listed = entries("HandStandPushups/v_HandStandPushups_g01_c01.avi", "Nowhere/x.avi")
    matches = match_paths(listed, ["HandstandPushups/v_HandStandPushups_g01_c01.avi"])
    assert matches.pairs == [(listed[0], "HandstandPushups/v_HandStandPushups_g01_c01.avi")]
    assert matches.missing == ["Nowhere/x.avi"]
    assert len(matches.warnings) == 1
    assert "1 entries and their videos differ in case" in matches.warnings[0]
    assert "list.txt, line 1" in matches.warnings[0]


def test_an_ambiguous_match_without_case_is_an_error_with_file_and_line():
    with pytest.raises(ManifestError, match=r"list\.txt, line 1: 'a/x.avi' may mean 'A/X.avi' or 'A/x.avi'"):
        match_paths(entries("a/x.avi"), ["A/X.avi", "A/x.avi"])


def test_what_is_matched_exactly_is_not_matched_loosely_by_another_entry():
    assert matched(entries("A/clip.avi", "A/clip.mp4"), ["A/clip.mp4"]) == {"A/clip.mp4": "A/clip.mp4"}
    assert match_paths(entries("A/clip.avi", "A/clip.mp4"), ["A/clip.mp4"]).missing == ["A/clip.avi"]


def test_accents_match_however_a_system_writes_them():
    assert matched(entries("A/caf\u00e9.avi"), ["A/cafe\u0301.avi"]) == {
        "A/caf\u00e9.avi": "A/cafe\u0301.avi"
    }


def test_another_suffix_matches_with_a_warning():
    matches = match_paths(entries("A/v.1.avi"), ["A/v.1.mp4", "A/v.mp4"])
    assert [video for _, video in matches.pairs] == ["A/v.1.mp4"]
    assert "differ in their suffix" in matches.warnings[0]


def test_extra_folders_above_the_class_do_not_matter():
    assert matched(entries("A/x.avi"), ["UCF-101/A/x.avi"]) == {"A/x.avi": "UCF-101/A/x.avi"}
    assert matched(entries("home/u/UCF-101/A/x.avi"), ["A/x.avi"]) == {"home/u/UCF-101/A/x.avi": "A/x.avi"}


def test_a_flat_video_and_an_entry_without_folder_match_by_name():
    assert matched(entries("A/x.avi"), ["x.avi", "B/x.avi"]) == {"A/x.avi": "x.avi"}
    assert matched(entries("x.avi"), ["B/x.avi"]) == {"x.avi": "B/x.avi"}
    with pytest.raises(ManifestError, match=r"'x\.avi' may mean 'A/x\.avi' or 'B/x\.avi'"):
        match_paths(entries("x.avi"), ["A/x.avi", "B/x.avi"])


names = st.lists(
    st.tuples(st.sampled_from("ABab"), st.sampled_from(["x", "X", "y"])), unique=True, max_size=8
)


@given(listed=names, there=names)
def test_matching_agrees_with_a_search_through_all_videos(listed, there):
    listed_paths = [f"{folder}/{name}.avi" for folder, name in listed]
    videos = [f"{folder}/{name}.avi" for folder, name in there]
    expected = {path: path for path in listed_paths if path in videos}
    is_ambiguous = False
    for path in listed_paths:
        if path not in videos:
            fitting = [v for v in videos if v.lower() == path.lower() and v not in listed_paths]
            is_ambiguous |= len(fitting) > 1
            if fitting:
                expected[path] = fitting[0]
    if is_ambiguous:
        with pytest.raises(ManifestError):
            match_paths(entries(*listed_paths), videos)
    else:
        matches = match_paths(entries(*listed_paths), videos)
        assert {entry.video: video for entry, video in matches.pairs} == expected
        assert matches.missing == [path for path in listed_paths if path not in expected]


def test_identifiers_match_the_stem_exactly_in_any_folder():
    listed = entries("12", "-aB")
    matches = match_stems(listed, ["12.webm", "x/-aB.mp4", "-ab.mp4"])
    assert [video for _, video in matches.pairs] == ["12.webm", "x/-aB.mp4"]
    assert match_stems(entries("13"), ["12.webm"]).missing == ["13"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HandStandPushups", "HandstandPushups"),
        ("hurling_sport", "hurling (sport)"),
        ("hurling (sport)", "hurling (sport)"),
        ("Run", "Run"),
        ("run", "run"),
        ("Surfing", None),
    ],
)
def test_a_folder_means_the_class_that_is_spelt_most_like_it(name, meant):
    assert spell_class(name, ["HandstandPushups", "hurling (sport)", "Run", "run"]) == meant


def test_a_folder_that_may_mean_two_classes_is_an_error():
    with pytest.raises(ManifestError, match="class 'RUN' may mean 'Run' or 'run': rename its folder"):
        spell_class("RUN", ["Run", "run"])
