"""Every real video beside the checkout, held against what ffprobe and ffmpeg say of it."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from pipeline.folder import FrameFolder, read_frames_json
from pipeline.jpeg import encode_jpeg
from pipeline.offline.extract import RunSpec, extract_all
from pipeline.offline.frames import FrameSpec
from tests.conftest import SHARED

INDEX = SHARED / "data" / "index.json"
VIDEOS = SHARED / "data" / "videos"
FILES: dict[str, dict[str, Any]] = {}
if INDEX.exists():
    FILES = {file["path"].removeprefix("data/videos/"): file for file in json.loads(INDEX.read_text())}

pytestmark = pytest.mark.skipif(not FILES, reason="needs the real videos in ../shared")

LONG = "hard/timestamps/long_1080p_videoonly_lowbitrate.mp4"  # 10,883 frames: stored small

OTHER_STATUS = {
    # The truth was made with FFmpeg 5.1, which has no VVC decoder; the one in PyAV has.
    "hard/containers/sample_vvc.mp4": "ok",
}
OTHER_COUNT = {
    "hard/containers/sample_vvc.mp4": 120,  # the header's count; OpenCV's FFmpeg decodes them, too
    # The truth counts stream 0; FFmpeg's best stream, which is stored, is the larger one.
    "hard/multistream/nasa_13013.mp4": 390,
    # Cut in the middle: how many frames an HEVC decoder gives before its first key frame is its own choice.
    "hard/timestamps/loewe.ts": 6,
}
OTHER_TIMES = {
    "hard/multistream/nasa_13013.mp4",
    "hard/timestamps/loewe.ts",
    # A raw stream: only the first frame has a pts, 0, and all others have a dts that begins at 1 / 15 s.
    # ffprobe mixes them, so that its first gap is twice the others; by dts alone all 19 are 1 / 15 s apart.
    "hard/timestamps/fixture.mpg",
}
OTHER_PIXELS = {
    "hard/timestamps/loewe.ts": "other frames are decoded",
    "hard/timestamps/SMM0005.wmv": "the damaged end is concealed in another way",
    "hard/timestamps/empty_edit_5s.mp4": "damage is concealed in another way",
    "hard/colour/h264_10bits.mp4": "colour noise; FFmpeg 8 places 10 bit chroma by the stream's flag",
    "hard/geometry/h264_multi_stsd.mp4": "FFmpeg 8 scales frames after the change by other weights",
    "hard/geometry/av1-1-b8-03-sizeup.ivf": "FFmpeg 8 scales frames after the change by other weights",
}
STATUS = {"ok": "ok", "decodes_with_errors": "partial"}
DECODED = [name for name, file in FILES.items() if file["outcome"] in STATUS]


@dataclass(frozen=True)
class Extracted:
    folders: dict[str, Path]
    failed: dict[str, str]

    def frames(self, name: str) -> FrameFolder | None:
        return read_frames_json(self.folders[name]) if name in self.folders else None


@pytest.fixture(scope="module")
def extracted() -> Iterator[Extracted]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.exists() else None) as temporary:  # half a gigabyte
        root = Path(temporary)
        folders, failed = {}, {}
        for names, spec in (
            (sorted(FILES.keys() - {LONG}), FrameSpec(quality=95)),
            ([LONG], FrameSpec(quality=95, short_side_px=36)),
        ):
            report = extract_all(names, VIDEOS, root, spec, RunSpec(jobs=2))
            folders |= {done.task.video: root / done.task.frames for done in report.made}
            failed |= {failure.video: f"{failure.stage}: {failure.error}" for failure in report.failures}
        yield Extracted(folders, failed)


@pytest.mark.parametrize("name", FILES)
def test_status_and_count_are_those_of_ffprobe(extracted, name):
    truth = FILES[name]
    frames = extracted.frames(name)
    expected = OTHER_STATUS.get(name, STATUS.get(truth["outcome"], "failed"))
    assert (frames.status if frames else "failed") == expected
    assert (name in extracted.failed) == (expected == "failed")
    assert (frames.num_frames if frames else 0) == OTHER_COUNT.get(
        name, truth["frames_decoded"] if frames else 0
    )
    assert bool(frames and frames.error) == (expected == "partial")


def test_videos_without_a_picture_say_so(extracted):
    for name, truth in FILES.items():
        if truth["outcome"] == "no_video":
            assert "no video stream" in extracted.failed[name]


@pytest.mark.parametrize("name", DECODED)
def test_times_are_the_best_effort_timestamps_of_ffprobe(extracted, name):
    frames = extracted.frames(name)
    assert frames.times_us[0] == 0
    assert (np.diff(frames.times_us) > 0).all()
    truth = FILES[name]
    if not truth["timestamps_strictly_increasing"] or name in OTHER_TIMES:
        return  # nothing to agree with but that they increase
    stamps = [*truth["first3_pts"], *truth["last3_pts"]]
    ours = [(frames.start_us + time_us) / 1e6 for time_us in (*frames.times_us[:3], *frames.times_us[-3:])]
    for our, stamp in zip(ours, stamps, strict=True):
        assert stamp is None or our == pytest.approx(stamp, abs=1e-3)
    gaps_s = np.diff(frames.times_us) / 1e6
    assert gaps_s.min() == pytest.approx(truth["dt_min"], abs=1e-3)
    assert gaps_s.max() == pytest.approx(truth["dt_max"], abs=1e-3)


@pytest.mark.parametrize("name", DECODED)
def test_pictures_are_upright_and_of_the_right_size(extracted, name):
    truth = FILES[name]
    frames = extracted.frames(name)
    if name != "hard/multistream/nasa_13013.mp4" and name != LONG:
        assert (frames.width, frames.height) == (truth["upright_width"], truth["upright_height"])
    assert frames.rotation == (truth["rotation"] or 0)
    aspect = truth["sample_aspect_ratio"]
    # A display matrix that stretches changes what ffprobe prints, not the stream's own ratio.
    if name != "hard/rotation/moviedispmat.mp4":
        assert frames.sample_aspect_ratio == (aspect if aspect not in (None, "0:1", "N/A") else "1:1")


def test_the_clip_with_a_dropped_frame_keeps_the_gap(extracted):
    frames = extracted.frames("ucf101/YoYo/v_YoYo_g11_c04.avi")
    gaps_us = np.diff(frames.times_us)
    assert sorted(set(gaps_us.tolist())) == [40_000, 80_000]
    assert (gaps_us == 80_000).sum() == 1


def ffmpeg_frames(name: str, frames: FrameFolder, limit: int) -> np.ndarray:
    """uint8 (T, H, W, 3), blue first: the first frames as ffmpeg makes them, upright."""
    command = ["ffmpeg", "-v", "quiet", "-i", str(VIDEOS / name), "-map", f"0:{frames.stream}"]
    command += ["-frames:v", str(limit), "-vsync", "passthrough", "-f", "rawvideo", "-pix_fmt", "bgr24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, frames.height, frames.width, 3)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.square(one.astype(float) - other).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the ffmpeg command")
@pytest.mark.parametrize("name", [name for name in DECODED if name not in OTHER_PIXELS])
def test_pixels_are_those_of_ffmpeg(extracted, name):
    if name == LONG:
        return  # stored small; its twin in kind, at full size, are the other 1080p videos
    frames = extracted.frames(name)
    theirs = ffmpeg_frames(name, frames, 10)
    assert len(theirs) == min(10, frames.num_frames)
    for k, their in enumerate(theirs):
        path = extracted.folders[name] / frames.frame_names()[k]
        our = cv2.imread(str(path))
        # Where a JPEG of ffmpeg's own pixels is no nearer to them, the loss is 4:2:0's and not ours:
        # saturated edges of screens and test pictures.
        jpeg = encode_jpeg(their, quality=95, restart_mcus=frames.restart_mcus)
        best = psnr(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), their)
        assert psnr(our, their) >= min(34.0, best - 0.1)
        shift = (our.astype(float) - their).mean((0, 1))
        assert np.abs(shift).max() < 2.5
