import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import FolderError
from pipeline.folder import (
    FrameFolder,
    SourceFile,
    find_folders,
    frame_name,
    parse_frame_name,
    read_frames_json,
    write_frames_json,
)

FRAMES = FrameFolder(
    video="A/clip  [1, 2].avi",
    status="ok",
    error=None,
    note=None,
    times_us=[0, 40_000],
    sizes=[700, 701],
    crc32=[1, 2],
    start_us=-5,
    time_source="pts",
    width=64,
    height=48,
    fps=25.0,
    duration_s=0.08,
    rotation=-90,
    mirrored=False,
    sample_aspect_ratio="1:1",
    stream=0,
    codec="mpeg4",
    pixel_format="yuv420p",
    restart_mcus=4,
    source=SourceFile(bytes=1, mtime_ns=2, sha256="ab"),
    spec={"format": 1, "quality": 90},
)


@given(index=st.integers(0, 10**9), time_us=st.integers(0, 10**15))
def test_number_and_time_come_back_from_a_name(index, time_us):
    assert parse_frame_name(frame_name(index, time_us)) == (index, time_us)


@given(st.lists(st.tuples(st.integers(0, 999_999), st.integers(0, 10**12 - 1)), min_size=2, max_size=8))
def test_names_sort_as_frames_do(frames):
    assert sorted(frame_name(*frame) for frame in frames) == [frame_name(*frame) for frame in sorted(frames)]


@pytest.mark.parametrize("name", ["42.jpg", "000042_000001680000us.png", "._000042_000001680000us.jpg", ""])
def test_another_name_is_no_frame(name):
    with pytest.raises(FolderError, match="not the name of a frame"):
        parse_frame_name(name)


def test_frames_json_comes_back_as_written(tmp_path):
    write_frames_json(tmp_path, FRAMES)
    assert read_frames_json(tmp_path) == FRAMES
    assert set(json.loads((tmp_path / "frames.json").read_text())) >= {
        *("video", "status", "error", "times_us", "sizes", "start_us", "time_source", "width", "height"),
        *("fps", "rotation", "source", "spec", "restart_mcus"),
    }


@pytest.mark.parametrize("text", ["", "[]", '{"video": 1}', "{", "null", '{"video": 3}'])
def test_frames_json_that_is_not_whole_names_the_file(tmp_path, text):
    (tmp_path / "frames.json").write_text(text)
    with pytest.raises(FolderError, match=r"frames\.json"):
        read_frames_json(tmp_path)


def test_times_and_sizes_of_different_length_are_refused(tmp_path):
    write_frames_json(tmp_path, replace(FRAMES, sizes=[700]))
    with pytest.raises(FolderError, match="2 times and 1 sizes"):
        read_frames_json(tmp_path)


def test_folders_are_found_in_order_and_hidden_ones_are_not_looked_into(tmp_path):
    for name in ("b/two", "a/one", ".scratch/half", "a/.ipynb_checkpoints/x"):
        (tmp_path / name).mkdir(parents=True)
        write_frames_json(tmp_path / name, FRAMES)
    (tmp_path / "c" / "empty").mkdir(parents=True)
    assert [str(folder.relative_to(tmp_path)) for folder in find_folders(tmp_path)] == ["a/one", "b/two"]
