"""One video to one folder of JPEGs, named by frame number and time."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import av.container
import cv2
import numpy as np
from av.video.stream import VideoStream

from pipeline.errors import VideoError
from pipeline.files import content_hash
from pipeline.folder import (
    FORMAT_VERSION,
    FrameFolder,
    SourceFile,
    TimeSource,
    frame_name,
    write_frames_json,
)
from pipeline.jpeg import restart_mcus
from pipeline.offline.decode import (
    TIME_SOURCES,
    BgrConverter,
    Clock,
    DecodeErrors,
    TimesError,
    Upright,
    best_stream,
    decoded_frames,
    first_source,
    open_video,
    read_upright,
)
from pipeline.offline.jpeg_folder import JpegFolder

SCRATCH = ".scratch"
"""Folder beside finished ones where unfinished ones grow; whatever is left in it can be deleted."""

_ALMOST_SQUARE = 0.01
"""Pixels that are wider than high by less than this share stay as they are: 4096:4083 on real UCF101."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSpec:
    """Which frames of a video are stored, and how: every option that changes a pixel or a name."""

    short_side_px: int | None = None
    """Pixels of the shorter side; None keeps the video's own. Smaller videos stay as they are."""
    enlarge: bool = False
    """Whether videos smaller than the short side are enlarged to it."""
    square_pixels: bool = False
    """Whether the width is stretched where the stream says that its pixels are not square."""
    fps: float | None = None
    """At most so many frames a second: by timestamps the first frame in each 1 / fps; none is made up."""
    every: int = 1
    """Every k-th frame, beginning with the first."""
    max_frames: int | None = None
    """At most so many frames, from the start of the video."""
    quality: int = 90
    """Quality of the JPEGs, 1 to 100 as libjpeg counts; chroma is stored 4:2:0."""

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be 1 to 100, got {self.quality}")
        if self.every < 1:
            raise ValueError(f"every must be 1 or more, got {self.every}")
        for name in ("short_side_px", "fps", "max_frames"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        if self.enlarge and self.short_side_px is None:
            raise ValueError("enlarge needs short_side_px: the size to enlarge to")

    def as_json(self) -> dict[str, Any]:
        """What frames.json and the manifest keep, so that another spec is noticed."""
        return {"format": FORMAT_VERSION, **asdict(self), "subsampling": "4:2:0"}


def extract_frames(
    video: Path,
    folder: Path,
    spec: FrameSpec = FrameSpec(),
    *,
    name: str | None = None,
    scratch: Path | None = None,
    threads: int = 1,
    on_frame: Callable[[], None] = lambda: None,
) -> FrameFolder:
    """Decode one video to a folder of JPEGs that appears, or is replaced, by one rename.

    `name` is what the folder calls its video (the file's name if None), `scratch` a folder of the
    same file system to grow in (`.scratch` beside the folder if None). `threads` encode and write
    frames while the next ones are decoded; 0 for none, where other videos have the cores. `on_frame`
    is called after each stored frame. Memory is bounded by a few frames, not by the video.

    Raises VideoError where not a single frame can be had; OSError where the disk is full or the
    folder cannot be written. Nothing is left behind then, and what stood there stands.
    """
    source = _read_source(video)
    growing = (scratch or folder.parent / SCRATCH) / uuid.uuid4().hex
    growing.mkdir(parents=True)
    try:
        store = JpegFolder(growing, spec.quality, threads, on_frame)
        frames = _write_frames(video, store, spec, name or video.name, source)
        write_frames_json(growing, frames)
        _put_in_place(growing, folder)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
        if scratch is None:
            with suppress(OSError):  # somebody else may be at work in it
                growing.parent.rmdir()
    return frames


def _read_source(video: Path) -> SourceFile:
    try:
        stat = video.stat()
        return SourceFile(bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=content_hash(video))
    except OSError as error:
        raise VideoError("open", f"{error.strerror}: {video}") from error


def _put_in_place(growing: Path, folder: Path) -> None:
    """Rename; a folder that stands there is moved away first, since no rename replaces it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = growing.with_suffix(".old")
    with suppress(FileNotFoundError):
        folder.rename(old)
    growing.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_frames(
    video: Path, store: JpegFolder, spec: FrameSpec, name: str, source: SourceFile
) -> FrameFolder:
    for time_source in TIME_SOURCES:
        try:
            with open_video(video) as (container, errors), store:
                stream = best_stream(container, errors)
                writer = _Writer(store, spec, stream.sample_aspect_ratio or Fraction(1))
                frames = decoded_frames(container, stream, errors)
                clock = _store_all(frames, stream, time_source, writer)
                store.finish()
                errors.take_logs()
                if not writer.times_us:
                    raise VideoError("decode", f"no frame decodes, {errors}" if errors.count else "no frames")
                return _describe(container, stream, errors, writer, clock, name, source)
        except TimesError:
            # Rare, and known within a few frames: decoding again keeps names right from the start,
            # and memory flat.
            store.clear()
    raise AssertionError("the rate always gives times")


def _store_all(
    frames: Iterator[av.VideoFrame], stream: VideoStream, time_source: TimeSource, writer: "_Writer"
) -> Clock:
    """Store what is wanted of the frames; the clock that gave their times, of that source or a later one."""
    wanted = _Wanted(writer.spec)
    clock = None
    for frame in frames:
        if clock is None:
            clock = Clock(stream, first_source(frame, time_source))
        time_us = clock.time_us(frame)
        if wanted.takes(time_us):
            writer.write(frame, time_us)
        if wanted.is_full:
            break
    return clock or Clock(stream, time_source)


def _describe(
    container: av.container.InputContainer,
    stream: VideoStream,
    errors: DecodeErrors,
    writer: "_Writer",
    clock: Clock,
    name: str,
    source: SourceFile,
) -> FrameFolder:
    # The first stored frame is the first that decoded, whatever is left out after it, so its time is 0.
    gaps = len(writer.times_us) - 1
    mean_s = writer.times_us[-1] / gaps / 1e6 if gaps else float(1 / clock.rate)
    return FrameFolder(
        video=name,
        status="partial" if errors.count else "ok",
        error=str(errors) if errors.count else None,
        note=_note(container, stream, writer),
        times_us=writer.times_us,
        sizes=writer.store.sizes,
        crc32=writer.store.crc32,
        start_us=clock.start_us,
        time_source=clock.source,
        width=writer.width,
        height=writer.height,
        fps=1 / mean_s,
        duration_s=mean_s * (gaps + 1),
        rotation=writer.rotation,
        mirrored=writer.upright.mirrored,
        sample_aspect_ratio=f"{writer.sample_aspect.numerator}:{writer.sample_aspect.denominator}",
        stream=stream.index,
        codec=stream.codec_context.name,
        pixel_format=writer.pixel_format,
        restart_mcus=writer.restart_mcus,
        source=source,
        spec=writer.spec.as_json(),
    )


def _note(container: av.container.InputContainer, stream: VideoStream, writer: "_Writer") -> str | None:
    notes = []
    if writer.resized_at is not None:
        size = f"{writer.width}x{writer.height}"
        notes.append(f"the picture changes size at frame {writer.resized_at}: all are scaled to {size}")
    others = [each.index for each in container.streams.video if each.index != stream.index]
    if others:
        notes.append(f"stream {stream.index} of several video streams (others: {others})")
    if writer.spec.max_frames == len(writer.times_us):
        notes.append(f"stopped at the limit of {len(writer.times_us)} frames")
    return "; ".join(notes) or None


class _Wanted:
    """Which of the decoded frames are stored, asked in their order."""

    def __init__(self, spec: FrameSpec) -> None:
        self._spec = spec
        self._fps = None if spec.fps is None else Fraction(spec.fps).limit_denominator(1_000_000)
        self._seen = -1
        self._slot = -1
        self._taken = 0

    def takes(self, time_us: int) -> bool:
        """Whether the frame at this time is stored."""
        self._seen += 1
        if self._seen % self._spec.every:
            return False
        if self._fps is not None:
            # A microsecond more: times in a file are rounded, and a frame that is due belongs in.
            slot = int((time_us + 1) * self._fps / 1_000_000)
            if slot == self._slot:
                return False
            self._slot = slot
        self._taken += 1
        return True

    @property
    def is_full(self) -> bool:
        """Whether no further frame is wanted."""
        return self._spec.max_frames is not None and self._taken >= self._spec.max_frames


class _Writer:
    """Decoded frames to pictures of one size, upright."""

    def __init__(self, store: JpegFolder, spec: FrameSpec, sample_aspect: Fraction) -> None:
        self.store = store
        self.spec = spec
        self.sample_aspect = sample_aspect
        self.times_us: list[int] = []
        self.width = self.height = 0
        self.rotation = 0
        self.upright = Upright()
        self.pixel_format = ""
        self.resized_at: int | None = None

    def write(self, frame: av.VideoFrame, time_us: int) -> None:
        """Convert and turn one frame, and store it."""
        if not self.times_us:
            self._begin(frame)
        width, height = frame.width, frame.height
        if (width, height) != self._decoded and self.resized_at is None:
            self.resized_at = len(self.times_us)
        name = frame_name(len(self.times_us), time_us)
        held = 3 * width * height  # bytes, about: the frame waits as it was decoded
        self.store.add(name, partial(self._picture, frame), held, self.restart_mcus)
        self.times_us.append(time_us)

    def _picture(self, frame: av.VideoFrame) -> np.ndarray:
        """uint8 (H, W, 3), blue first, upright; called in the thread that encodes."""
        return _turn(self._converter.convert(frame), self.upright)

    def _begin(self, frame: av.VideoFrame) -> None:
        """The first frame decides on the size of all."""
        self._decoded = frame.width, frame.height
        self.upright = read_upright(frame)
        self.rotation = frame.rotation
        self.pixel_format = frame.format.name
        width, height = stored_size(frame.width, frame.height, self.sample_aspect, self.spec)
        self._converter = BgrConverter(width, height)
        self.width, self.height = (height, width) if self.upright.transpose else (width, height)
        self.restart_mcus = restart_mcus(self.width)


def stored_size(width: int, height: int, sample_aspect: Fraction, spec: FrameSpec) -> tuple[int, int]:
    """Width and height (px) of the stored frame, before it is turned, for one as decoded.

    >>> stored_size(320, 240, Fraction(1), FrameSpec(short_side_px=128))
    (171, 128)
    >>> stored_size(340, 256, Fraction(64, 51), FrameSpec(square_pixels=True))
    (427, 256)
    """
    exact_width = Fraction(width)
    if spec.square_pixels and abs(sample_aspect - 1) > _ALMOST_SQUARE:
        exact_width *= sample_aspect
    scale = Fraction(1)
    if spec.short_side_px is not None:
        scale = spec.short_side_px / min(exact_width, Fraction(height))
        if not spec.enlarge:
            scale = min(scale, Fraction(1))
    return max(round(exact_width * scale), 1), max(round(height * scale), 1)


def _turn(bgr: np.ndarray, upright: Upright) -> np.ndarray:
    if upright.transpose:
        bgr = cv2.transpose(bgr)
    if upright.flip_x or upright.flip_y:
        code = -1 if upright.flip_x and upright.flip_y else int(upright.flip_x)
        bgr = cv2.flip(bgr, code)
    return bgr
