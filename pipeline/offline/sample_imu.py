"""A sample whose look-alike classes only an inertial recording beside the pictures tells apart.

A thing of the sample moves to the left or to the right, and halfway through its video it goes over a bump
or through a dip that no picture shows. Each video is there twice, byte for byte, once as `Bump` and once as
`Dip`: what tells the two apart is the one jolt, up or down, of the recording beside it. The recorder begins
before the video and ends after it, and there are jolts every half second, which the two have in common: by a
clock that is wrong by half a second another jolt stands where the telling one should be.
"""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.files import replaced, write_text
from pipeline.offline.sample import (
    FPS,
    Clip,
    Floats,
    SampleError,
    SampleSpec,
    draw_clip,
    encode_avi,
    held_out_groups,
)
from pipeline.seeds import generator

RATE_HZ = 100
EARLY_S = 1.25
"""How long before a video's first frame its recorder begins to run and to count."""
LATE_S = 1.25
"""How long it runs on after the last."""
PERIOD_S = 0.5
"""From one jolt to the next."""
JOLT_S = 0.16
"""From the beginning of a jolt to its end."""
CHANNELS = ("acc_x", "acc_y", "acc_z")
_GRAVITY, _JOLT, _NOISE = 9.81, 6.0, 0.3  # m/s^2, along acc_z but for the noise

LONGEST = 20
"""Frames of a video, at most: then no part of it is seen half a second off as its own jolt."""
LOOK_ALIKES = SampleSpec(min_frames=16, max_frames=LONGEST)
"""The sample as it is drawn if nothing else is said."""
SAMPLE_JSON = "look_alikes.json"  # beside `videos`, `splits` and `imu`: the options
_FORMAT_VERSION = 1


class LookAlike(NamedTuple):
    """What a class shows, and what it does not."""

    motion: str
    """The class of the sample whose pictures it has."""
    sign: int
    """Of the jolt halfway through the video: 1 up, -1 down."""


CLASSES: Mapping[str, LookAlike] = {
    "MoveLeftBump": LookAlike("MoveLeft", 1),
    "MoveLeftDip": LookAlike("MoveLeft", -1),
    "MoveRightBump": LookAlike("MoveRight", 1),
    "MoveRightDip": LookAlike("MoveRight", -1),
}
"""The classes, in the order of their labels."""


class Recording(NamedTuple):
    """What an accelerometer in the moving thing recorded."""

    times_ns: np.ndarray
    """int64 (R,): since the recorder began, which was `EARLY_S` before the video's first frame."""
    values: Floats
    """float64 (R, 3): m/s^2, by `CHANNELS`."""


def list_look_alikes(spec: SampleSpec) -> list[Clip]:
    """Every video: by class, group and number."""
    groups, numbers = range(1, spec.groups + 1), range(1, spec.clips + 1)
    return [Clip(name, group, number) for name in CLASSES for group in groups for number in numbers]


def draw_video(spec: SampleSpec, clip: Clip) -> tuple[bytes, int]:
    """The video of a clip, and how many frames it has; look-alikes have the same bytes."""
    pictures = list(draw_clip(spec, clip._replace(class_name=CLASSES[clip.class_name].motion)))
    return encode_avi(pictures), len(pictures)


def draw_recording(spec: SampleSpec, clip: Clip, num_frames: int) -> Recording:
    """The recording beside a clip's video; look-alikes differ in the jolt halfway through alone."""
    motion, sign = CLASSES[clip.class_name]
    names = sorted({look_alike.motion for look_alike in CLASSES.values()})
    rng = generator(spec.seed, clip.group, clip.number, names.index(motion), RATE_HZ)
    length_s = (num_frames - 1) / FPS
    num_readings = round((EARLY_S + length_s + LATE_S) * RATE_HZ)
    times_s = np.arange(num_readings) / RATE_HZ
    places = np.arange(-2, 3)  # the jolt before the last one, ..., the next but one
    signs = np.where(places == 0, sign, rng.choice([-1, 1], size=len(places)))
    values = rng.normal(scale=_NOISE, size=(num_readings, len(CHANNELS)))
    values[:, CHANNELS.index("acc_z")] += _GRAVITY
    for place, up_or_down in zip(places, signs, strict=True):
        middle_s = EARLY_S + length_s / 2 + place * PERIOD_S
        values[:, CHANNELS.index("acc_z")] += up_or_down * _JOLT * _bell((times_s - middle_s) / JOLT_S)
    return Recording(np.rint(times_s * 1e9).astype(np.int64), values)


def _bell(at: Floats) -> Floats:
    """From 0 at -0.5 to 1 in the middle and 0 at 0.5 (Hann's window); exactly 0 beyond."""
    return np.where(np.abs(at) < 0.5, 0.5 + 0.5 * np.cos(2 * np.pi * at), 0.0)


def as_csv(recording: Recording) -> str:
    """A line for each reading, after one with the names: `time_ns,acc_x,acc_y,acc_z`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time_ns", *CHANNELS])
    for time_ns, values in zip(recording.times_ns.tolist(), recording.values.tolist(), strict=True):
        writer.writerow([time_ns, *(f"{value:.4f}" for value in values)])
    return text.getvalue()


def split_lists(spec: SampleSpec) -> dict[str, str]:
    """Text of each official list by its file name: one split, no group of which is on both sides."""
    clips, labels = list_look_alikes(spec), {name: label for label, name in enumerate(CLASSES, start=1)}
    tested = held_out_groups(spec, 1)
    lists = {
        "classInd.txt": [f"{label} {name}" for name, label in labels.items()],
        "testlist01.txt": [clip.video for clip in clips if clip.group in tested],
        "trainlist01.txt": [
            f"{clip.video} {labels[clip.class_name]}" for clip in clips if clip.group not in tested
        ],
    }
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in lists.items()}


def write_look_alikes(root: Path, spec: SampleSpec = LOOK_ALIKES) -> int:
    """Draw the dataset below `root`: `videos`, `splits` and `imu/<Class>/*.csv`; returns videos written.

    What is there is kept, and each file appears whole, so a run that was killed is finished by the next
    one. SampleError where `root` holds another dataset, or this one with other options; ValueError for
    videos so long that half a second would not lead out of their own jolt.
    """
    if spec.max_frames > LONGEST:
        raise ValueError(f"max_frames must be {LONGEST} or less, got {spec.max_frames}")
    _claim(root, spec)
    for name, text in split_lists(spec).items():
        _write_missing(root / "splits" / name, text.encode())
    return sum(_write_clip(root, spec, clip) for clip in list_look_alikes(spec))


def _write_clip(root: Path, spec: SampleSpec, clip: Clip) -> bool:
    """Write a clip's video and recording where one is missing; whether it was so."""
    video = root / "videos" / clip.video
    recording = root / "imu" / Path(clip.video).with_suffix(".csv")
    if video.exists() and recording.exists():
        return False
    content, num_frames = draw_video(spec, clip)
    _write_missing(video, content)
    _write_missing(recording, as_csv(draw_recording(spec, clip, num_frames)).encode())
    return True


def _write_missing(path: Path, content: bytes) -> None:
    if not path.exists():
        with replaced(path) as beside:
            beside.write_bytes(content)


def _claim(root: Path, spec: SampleSpec) -> None:
    """Note the options, once; SampleError where `root` is not of this sample with these options."""
    path = root / SAMPLE_JSON
    ours = json.dumps({"format": _FORMAT_VERSION, **asdict(spec)}, indent=1) + "\n"
    if not path.exists():
        if (root / "videos").exists():
            raise SampleError(f"{root} holds another dataset: move it away, or draw into another folder")
        write_text(path, ours)
    elif path.read_text(encoding="utf-8") != ours:
        raise SampleError(f"{root} was drawn with other options ({path}): move it away, or use those again")
