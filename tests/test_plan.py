import os

from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import content_hash
from pipeline.folder import read_frames_json
from pipeline.offline.frames import FrameSpec, extract_frames
from pipeline.offline.plan import make_plan, place_videos
from tests.videos import write_video

names = st.sampled_from(
    ["A/clip.avi", "A/clip.mp4", "A/clip", "A/clip.avi.avi", "A/clip/x.avi", "A/clip/x.mp4"]
)
more = st.sampled_from(
    ["B/clip.avi", "A/v.1.avi", "A/v.avi", "A/clip.avi~2.mkv", "A/clip~2/x.avi", "clip.avi"]
)


@given(first=st.lists(names | more, unique=True), later=st.lists(names | more, unique=True))
def test_each_video_has_its_own_folder_and_a_later_one_moves_nothing(first, later):
    before = place_videos(sorted(first), {})
    after = place_videos(sorted({*first, *later}), before)
    assert before.items() <= after.items()
    folders = list(after.values())
    assert len(set(folders)) == len(folders)
    for folder in folders:
        assert not any(other.startswith(folder + "/") for other in folders)


@given(videos=st.lists(names | more, unique=True), data=st.data())
def test_a_run_that_was_killed_places_the_rest_as_an_unbroken_one_does(videos, data):
    whole = place_videos(sorted(videos), {})
    done = data.draw(st.lists(st.sampled_from(sorted(videos)), unique=True)) if videos else []
    assert place_videos(sorted(videos), {video: whole[video] for video in done}) == whole


def test_videos_with_the_same_stem_are_told_apart():
    placed = place_videos(["A/clip.avi", "A/clip.mp4", "A/v.1.avi", "A/v.avi", "B/clip.avi"], {})
    assert placed == {
        "A/clip.avi": "A/clip",
        "A/clip.mp4": "A/clip.mp4",
        "A/v.1.avi": "A/v.1",
        "A/v.avi": "A/v",
        "B/clip.avi": "B/clip",
    }


def plan_of(root, spec=FrameSpec(), **options):
    return make_plan(["A/x.avi"], root / "videos", root / "frames", spec, [], **options)


def reasons(plan):
    return [task.reason for task in plan.tasks]


def test_only_a_change_that_matters_makes_work(tmp_path):
    video = write_video(tmp_path / "videos" / "A" / "x.avi", frames=5)
    assert reasons(plan_of(tmp_path)) == ["new"]
    folder = tmp_path / "frames" / "A" / "x"
    extract_frames(video, folder, name="A/x.avi")
    assert reasons(plan_of(tmp_path)) == []
    assert list(plan_of(tmp_path).kept) == ["A/x.avi"]
    assert reasons(plan_of(tmp_path, FrameSpec(quality=80))) == ["other options"]
    assert reasons(plan_of(tmp_path, redo=["A/x.avi"])) == ["repair"]


def test_a_touch_redoes_nothing_and_is_noted(tmp_path):
    video = write_video(tmp_path / "videos" / "A" / "x.avi", frames=5)
    folder = tmp_path / "frames" / "A" / "x"
    extract_frames(video, folder, name="A/x.avi")
    os.utime(video, ns=(1, 123_456_789))
    assert reasons(plan_of(tmp_path)) == []
    assert read_frames_json(folder).source.mtime_ns == 123_456_789


def test_another_file_of_equal_size_is_noticed(tmp_path):
    video = write_video(tmp_path / "videos" / "A" / "x.avi", frames=5)
    extract_frames(video, tmp_path / "frames" / "A" / "x", name="A/x.avi")
    data = bytearray(video.read_bytes())
    data[-1] ^= 1
    before = content_hash(video)
    video.write_bytes(data)
    assert content_hash(video) != before
    assert reasons(plan_of(tmp_path)) == ["changed video"]


def test_a_folder_whose_frames_json_is_damaged_is_made_anew(tmp_path):
    video = write_video(tmp_path / "videos" / "A" / "x.avi", frames=5)
    extract_frames(video, tmp_path / "frames" / "A" / "x", name="A/x.avi")
    (tmp_path / "frames" / "A" / "x" / "frames.json").write_text("{")
    assert reasons(plan_of(tmp_path)) == ["new"]
