"""`bench offline`: this extractor beside the ways in which frames are usually made, on the same clips.

Every contender turns the same clips into one JPEG for each frame, at equal quality (90, 4:2:0), in one
process each but for `two_processes`, and they take turns.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import av
import cv2
import joblib
import numpy as np

from pipeline.errors import PipelineError, VideoError
from pipeline.folder import frame_name
from pipeline.offline.decode import BgrConverter, best_stream, decoded_frames, open_video
from pipeline.offline.extract import RunSpec, extract_all
from pipeline.offline.frames import FrameSpec, extract_frames
from pipeline.offline.layouts import find_videos
from scripts.bench_common import (
    Case,
    Row,
    Stopwatch,
    Target,
    Timing,
    fresh_folder,
    make_row,
    run_rounds,
    run_rounds_of_parts,
    sum_of,
)
from scripts.bench_quality import (
    FFMPEG_QUALITIES,
    QUALITY,
    Quality,
    call_ffmpeg,
    closest_quality,
    encode,
    ffmpeg_no_twins,
    measure_qualities,
    read_pictures,
    unusable,
)

REAL_CLIPS = Path(__file__).parents[2] / "shared" / "data" / "videos" / "ucf101"
STAGES = ("decode", "convert", "encode", "write")
# Like with like: OpenCV's loop decodes in several threads, so ours may use two; the others have one.
TARGETS = (
    Target(peer="opencv_loop", ours="ours", theirs="opencv_loop", at_least=1.5),
    Target(peer="ffmpeg", ours="ours_1_thread", theirs="ffmpeg", at_least=2.5),
    Target(peer="ceiling", ours="ours_1_thread", theirs="ceiling", at_least=0.75),
    Target(peer="one_process", ours="two_processes", theirs="one_process", at_least=1.8),
)
WHAT = {
    "ours": "extract_frames as it comes: one thread decodes, one encodes (cv2.setNumThreads(1))",
    "ours_1_thread": "the same with threads=0, as in a run with a process for each core",
    "opencv_loop": "cv2.VideoCapture + cv2.imwrite as OpenCV comes: it decodes with a thread for each core",
    "opencv_1_thread": "the same with CAP_PROP_N_THREADS=1 and cv2.setNumThreads(1)",
    "ffmpeg": "the command, once for each clip, with -threads 1 for decoder and encoder",
    "ffmpeg_threads": "the command, once for each clip, with as many threads as it takes by itself",
    "ceiling": "the sum of the three rows below",
    "decode_only": "PyAV, 1 thread, frames dropped",
    "encode_only": "our JPEGs of pictures that lie ready in memory; 1 thread",
    "write_only": "the same bytes to files of the same names",
    "start_up": "extract_all of the shortest clip with 1 process: mostly the start of the child",
    "one_process": "extract_all with 1 process of 1 thread, its start included",
    "two_processes": "extract_all with 2 processes of 1 thread each, their start included",
}
_OTHER_CLIPS = {"start_up", "one_process", "two_processes"}
"""Rows that do more or less than each clip once."""
_SPEC = FrameSpec(quality=QUALITY)
_PART = 5
"""Clips after which the next contender takes its turn, where each runs in one process."""
_BATCH = 32
"""Pictures that lie ready at a time: memory stays bounded, however long the clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBench:
    """What is measured, besides the clips."""

    repeat: int = 4
    """How often extract_all is given each clip, under other names, so that its start weighs little."""
    quality_clips: int = 8
    """Clips on which the quality of the contenders is measured before the rounds."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.quality_clips < 1:
            raise ValueError(f"repeat and quality_clips must be 1 or more, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """All that is measured."""

    rows: list[Row]
    stages_us: dict[str, float]
    """Microseconds for each frame of ours, by stage; `rest` is what the stages leave of `ours_1_thread`."""
    qualities: list[Quality]
    ffmpeg_quality: int | None
    """The `-q:v` that was taken; None where ffmpeg is not installed."""


def find_clips(videos: Path | None, *, data: Path, limit: int | None) -> list[Path]:
    """Clips below `videos`, or the real UCF101 clips beside the project, or the sample's.

    PipelineError says what to do where there are none.
    """
    sample = data / "sample" / "videos"
    root = videos or next((place for place in (REAL_CLIPS, sample) if place.is_dir()), None)
    if root is None:
        raise PipelineError(f"no clips at {sample}: run `make sample`, or name a folder with --videos")
    return [(root / video).absolute() for video in find_videos(root).videos[:limit]]


def measure_offline(
    clips: Sequence[Path],
    bench: OfflineBench,
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> OfflineResult:
    """Run all contenders on the clips in turns.

    PipelineError where one of the clips cannot be decoded.
    """
    on_case("quality")
    with fresh_folder(work_dir) as folder:
        qualities = measure_qualities(clips[: bench.quality_clips], folder)
    quality = closest_quality(qualities)
    run_rounds(in_process_cases(clips[:1], quality), rounds=1, work_dir=work_dir)  # libraries get warm
    parts = [in_process_cases(clips[at : at + _PART], quality) for at in range(0, len(clips), _PART)]
    timings = run_rounds_of_parts(parts, rounds=rounds, work_dir=work_dir, on_case=on_case)
    whole = parallel_cases(clips, repeat=bench.repeat)
    timings |= run_rounds(whole, rounds=rounds, work_dir=work_dir, on_case=on_case)
    rows = [_row(name, timings.get(name, ()), timings["ours"][0].frames, quality) for name in WHAT]
    return OfflineResult(
        rows=rows, stages_us=_stages_us(timings), qualities=qualities, ffmpeg_quality=quality
    )


def in_process_cases(clips: Sequence[Path], ffmpeg_quality: int | None) -> list[Case]:
    """The contenders with one process each, in their order; ffmpeg's only where it is installed."""
    cases = [
        Case("ours", partial(run_ours, clips, one_thread=False)),
        Case("ours_1_thread", partial(run_ours, clips, one_thread=True)),
        Case("opencv_loop", partial(run_opencv, clips, one_thread=False)),
        Case("opencv_1_thread", partial(run_opencv, clips, one_thread=True)),
        Case("ceiling", partial(run_ceiling, clips)),
        Case("stages", partial(run_stages, clips)),
    ]
    if ffmpeg_quality is not None:
        command = partial(run_ffmpeg, clips, quality=ffmpeg_quality)
        cases.append(Case("ffmpeg", partial(command, one_thread=True)))
        cases.append(Case("ffmpeg_threads", partial(command, one_thread=False)))
    return cases


def parallel_cases(clips: Sequence[Path], *, repeat: int) -> list[Case]:
    """`extract_all` with one process and with two."""
    return [
        Case("start_up", partial(run_start_up, clips)),
        Case("one_process", partial(run_extract_all, [*clips] * repeat, jobs=1)),
        Case("two_processes", partial(run_extract_all, [*clips] * repeat, jobs=2)),
    ]


@contextmanager
def opencv_threads(count: int) -> Iterator[None]:
    """OpenCV with so many threads inside the block; as it was after it."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(count)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def run_ours(clips: Sequence[Path], folder: Path, *, one_thread: bool) -> dict[str, Timing]:
    """`extract_frames` as it is: a thread encodes while another decodes, as OpenCV decodes in several."""
    watch, frames = Stopwatch(), 0
    with opencv_threads(1), watch:
        for number, clip in enumerate(clips):
            try:
                made = extract_frames(
                    clip,
                    folder / str(number),
                    _SPEC,
                    scratch=folder / ".scratch",
                    threads=0 if one_thread else 1,
                )
            except VideoError as error:
                raise unusable(clip, str(error)) from error
            frames += made.num_frames
    return {"ours_1_thread" if one_thread else "ours": watch.timing(frames)}


def run_opencv(clips: Sequence[Path], folder: Path, *, one_thread: bool) -> dict[str, Timing]:
    """The loop that most scripts for raw frames hold."""
    watch, frames = Stopwatch(), 0
    options = [cv2.CAP_PROP_N_THREADS, 1] if one_thread else []
    with opencv_threads(1 if one_thread else cv2.getNumThreads()), watch:
        for number, clip in enumerate(clips):
            out = folder / str(number)
            out.mkdir()
            capture = cv2.VideoCapture(str(clip), cv2.CAP_ANY, options)
            count = 0
            while True:
                read, picture = capture.read()
                if not read:
                    break
                count += 1
                cv2.imwrite(f"{out}/{count:06d}.jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
            capture.release()
            frames += count
    return {"opencv_1_thread" if one_thread else "opencv_loop": watch.timing(frames)}


def run_ffmpeg(clips: Sequence[Path], folder: Path, *, quality: int, one_thread: bool) -> dict[str, Timing]:
    """The command that tools for raw frames call."""
    watch = Stopwatch()
    outs = [folder / str(number) for number in range(len(clips))]
    ffmpeg_no_twins()  # asked once, and not on the clock
    with watch:
        for clip, out in zip(clips, outs, strict=True):
            out.mkdir()
            call_ffmpeg(clip, out, quality=quality, one_thread=one_thread)
    frames = sum(1 for out in outs for _ in out.iterdir())
    return {"ffmpeg" if one_thread else "ffmpeg_threads": watch.timing(frames)}


def run_ceiling(clips: Sequence[Path], folder: Path) -> dict[str, Timing]:
    """Decoding, encoding and writing, each alone, and their sum."""
    decoding, encoding, writing, frames = Stopwatch(), Stopwatch(), Stopwatch(), 0
    with decoding:
        for clip in clips:
            with av.open(str(clip)) as container:
                container.streams.video[0].codec_context.thread_count = 1
                frames += sum(1 for _ in container.decode(video=0))
    with opencv_threads(1):
        for number, clip in enumerate(clips):
            out = folder / str(number)
            out.mkdir()
            for first, pictures in _prepared(clip):
                with encoding:
                    encoded = [encode(picture) for picture in pictures]
                with writing:
                    for index, data in enumerate(encoded, first):
                        _write(f"{out}/{frame_name(index, index)}", data)
    watches = {"decode_only": decoding, "encode_only": encoding, "write_only": writing}
    timings = {name: watch.timing(frames) for name, watch in watches.items()}
    return {"ceiling": sum_of(timings.values()), **timings}


def _prepared(clip: Path) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Pictures of a clip, uint8 BGR (H, W, 3), some at a time, each time with the index of the first."""
    pictures = (picture.copy() for picture in read_pictures(clip))
    first = 0
    while batch := list(islice(pictures, _BATCH)):
        yield first, batch
        first += len(batch)


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    os.write(descriptor, data)
    os.close(descriptor)


def run_stages(clips: Sequence[Path], folder: Path) -> dict[str, Timing]:
    """The loop of `extract_frames` once more, with a clock between its stages."""
    spent, frames = dict.fromkeys(STAGES, 0.0), 0
    with opencv_threads(1):
        for number, clip in enumerate(clips):
            out = folder / str(number)
            out.mkdir()
            frames += _time_stages(clip, out, spent)
    return {f"stage {name}": Timing(seconds=spent[name], cpu_s=0.0, frames=frames) for name in STAGES}


def _time_stages(clip: Path, out: Path, spent: dict[str, float]) -> int:
    """Add the seconds of each stage to `spent`; returns the number of frames."""
    clock, count = time.perf_counter, 0
    with open_video(clip) as (container, errors):
        stream = best_stream(container, errors)
        converter = BgrConverter(stream.codec_context.width, stream.codec_context.height)
        frames = decoded_frames(container, stream, errors)
        while True:
            begin = clock()
            frame = next(frames, None)
            decoded = clock()
            spent["decode"] += decoded - begin
            if frame is None:
                return count
            picture = converter.convert(frame)
            converted = clock()
            data = encode(picture)
            encoded = clock()
            _write(f"{out}/{frame_name(count, count)}", data)
            spent["write"] += clock() - encoded
            spent["encode"] += encoded - converted
            spent["convert"] += converted - decoded
            count += 1


def run_extract_all(
    clips: Sequence[Path], folder: Path, *, jobs: int, name: str | None = None
) -> dict[str, Timing]:
    """Processes of `extract_all`; a clip that comes twice gets another name each time."""
    videos, watch = folder / "videos", Stopwatch()
    videos.mkdir()
    names = [f"{number:05d}{clip.suffix}" for number, clip in enumerate(clips)]
    for each, clip in zip(names, clips, strict=True):
        (videos / each).symlink_to(clip)
    with watch:
        report = extract_all(names, videos, folder / "frames", _SPEC, RunSpec(jobs=jobs, threads=0))
    return {name or ("one_process" if jobs == 1 else "two_processes"): watch.timing(report.num_frames)}


def run_start_up(clips: Sequence[Path], folder: Path) -> dict[str, Timing]:
    """What a run of `extract_all` takes before it does much."""
    shortest = min(clips, key=lambda clip: clip.stat().st_size)
    return run_extract_all([shortest], folder, jobs=1, name="start_up")


def _row(name: str, timings: Sequence[Timing], frames: int, ffmpeg_quality: int | None) -> Row:
    notes = []
    if not timings:
        notes.append("not measured: ffmpeg is not installed")
    elif name.startswith("ffmpeg"):
        notes.append(f"-q:v {ffmpeg_quality}, the quality nearest to ours of {FFMPEG_QUALITIES}")
    if name == "two_processes" and joblib.cpu_count() < 2:
        notes.append("only 1 core may be used here, so nothing can be won")
    if timings and name not in _OTHER_CLIPS and timings[0].frames != frames:
        notes.append(f"{timings[0].frames:,} frames where ours finds {frames:,}")
    return make_row(name, WHAT[name], timings, "; ".join(notes))


def _stages_us(timings: Mapping[str, Sequence[Timing]]) -> dict[str, float]:
    frames = timings["ours"][0].frames
    stages = {
        name: median(timing.seconds for timing in timings[f"stage {name}"]) / frames * 1e6 for name in STAGES
    }
    all_us = median(timing.seconds for timing in timings["ours_1_thread"]) / frames * 1e6
    return stages | {"rest": all_us - sum(stages.values())}
