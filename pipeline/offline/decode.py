"""Frames out of a video file as FFmpeg gives them: in order, with every error counted.

Never seeks. PyAV hands out the decoder's frames in presentation order; what it says of their
times is another matter, see `Clock`.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, cast

import av
import av.container
import av.logging
import numpy as np
from av.buffer import Buffer
from av.container.core import Flags
from av.stream import Disposition
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter
from av.video.stream import VideoStream

from pipeline.errors import VideoError
from pipeline.folder import TimeSource

TIME_SOURCES: tuple[TimeSource, ...] = ("pts", "dts", "rate")
"""Where times come from, best first."""

# As plain numbers: PyAV asks an enum for its value, which takes 3 us each time.
_FULL_RANGE = int(ColorRange.JPEG)
_BICUBIC = int(Interpolation.BICUBIC)


@dataclass
class DecodeErrors:
    """What went wrong while decoding. FFmpeg conceals most of it and only logs."""

    count: int = 0
    first: str | None = None
    ignored: frozenset[str] = frozenset()
    """Names of loggers that have no say: the decoders of other streams, the scaler."""
    logs: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Count one error."""
        self.count += 1
        if self.first is None:
            self.first = " ".join(message.split())

    def take_logs(self) -> int:
        """Move what FFmpeg has logged since the last call into the count; returns how many that were."""
        before = self.count
        for level, name, message in self.logs:
            if level <= av.logging.ERROR and name not in self.ignored:
                self.add(f"[{name}] {message}")
        self.logs.clear()  # a damaged file may log more than it has frames
        return self.count - before

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 error: {self.first}"
        return f"{self.count} errors, the first: {self.first}"


@contextmanager
def open_video(path: Path) -> Iterator[tuple[av.container.InputContainer, DecodeErrors]]:
    """A video file opened by its content, whatever its name says, with FFmpeg's errors collected.

    Raises VideoError (stage `open`) where it cannot be opened.
    """
    level, skipping = av.logging.get_level(), av.logging.get_skip_repeated()
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)  # repeated errors count, too
    try:
        with av.logging.Capture() as logs:
            errors = DecodeErrors(logs=logs)
            with _open(path, errors) as container:
                # With generated pts AVI with B-frames comes out as 1, 2, 4, 3, 5, 7, 6; without
                # them those pts are None, and dts are right.
                container.flags &= ~cast(int, Flags.gen_pts.value)
                yield container, errors
    finally:
        av.logging.set_level(level)
        av.logging.set_skip_repeated(skipping)


def _open(path: Path, errors: DecodeErrors) -> av.container.InputContainer:
    try:
        # Absolute, so that a name like `-x.avi` or `a:b.avi` is never an option or a protocol;
        # `replace`, since real titles are cut in the middle of a character.
        return av.open(str(path.absolute()), metadata_errors="replace")
    except av.FFmpegError as error:
        errors.take_logs()
        raise VideoError("open", errors.first or error.strerror or str(error)) from error


def best_stream(container: av.container.InputContainer, errors: DecodeErrors) -> VideoStream:
    """The video stream that FFmpeg calls best, never a cover picture.

    Raises VideoError (stage `stream`) where there is none, or no decoder for it.
    """
    stream = container.streams.best("video")
    if stream is None:
        raise VideoError("stream", "no video stream")
    if not isinstance(stream, VideoStream) or stream.disposition & Disposition.attached_pic:
        raise VideoError("stream", "no video stream, only a cover picture")
    context = stream.codec_context
    if context is None:
        raise VideoError("stream", "no decoder for its codec")
    # One thread: videos run beside each other, and errors are logged in the thread that decodes.
    context.thread_count = 1
    errors.ignored = _other_names(container, stream)
    return stream


def _other_names(container: av.container.InputContainer, stream: VideoStream) -> frozenset[str]:
    others = {each.codec_context.name for each in container.streams if each.codec_context is not None}
    return frozenset(others - {stream.codec_context.name} | {"swscaler", "SWR"})


def decoded_frames(
    container: av.container.InputContainer, stream: VideoStream, errors: DecodeErrors
) -> Iterator[av.VideoFrame]:
    """Every frame that decodes, in presentation order; what does not is counted and passed over."""
    for packet in _packets(container, stream, errors):
        try:
            frames = stream.codec_context.decode(packet)
        except av.FFmpegError as error:
            _count(errors, error.strerror or str(error))
            continue
        noted = errors.take_logs()
        if packet is not None and packet.is_corrupt and not noted:
            errors.add("a packet that is cut short")
        for frame in frames:
            if frame.is_corrupt and errors.count == 0:
                errors.add("a frame that the decoder marks as damaged")
            yield frame


def _packets(
    container: av.container.InputContainer, stream: VideoStream, errors: DecodeErrors
) -> "Iterator[av.Packet[VideoStream] | None]":
    """Packets of the stream, then None, which makes the decoder hand out what it still holds."""
    try:
        for packet in container.demux(stream):
            if packet.size or packet.pts is not None or packet.dts is not None:
                yield packet
    except av.FFmpegError as error:
        _count(errors, f"reading stopped: {error.strerror or error}")
    yield None


def _count(errors: DecodeErrors, message: str) -> None:
    if not errors.take_logs():  # the log says the same, and more of it
        errors.add(message)


class TimesError(Exception):
    """The times of this source do not increase: take the next one, from the start."""


def first_source(frame: av.VideoFrame, source: TimeSource) -> TimeSource:
    """The best source, from `source` on, of which the first frame of a video has a time.

    On AVI with B-frames that is `dts`, and it is known before anything is stored.
    """
    for each in TIME_SOURCES[TIME_SOURCES.index(source) :]:
        if each == "rate" or getattr(frame, each) is not None:
            return each
    raise AssertionError("the rate comes last")


class Clock:
    """Times of frames in the order in which they are decoded.

    `pts` counts where every frame has one and they increase. On AVI with B-frames and on raw
    streams they do not; there `dts` of the frames increases and is what ffprobe calls the
    best-effort timestamp; the last frames, which come when the packets have ended, have none and
    are one frame's duration apart. Where neither increases, frames are `1 / rate` apart.
    """

    def __init__(self, stream: VideoStream, source: TimeSource) -> None:
        self.source = source
        self.rate = stream_rate(stream)
        self._tick = Fraction(1) / self.rate if source == "rate" else Fraction(stream.time_base or 1)
        self._first = 0
        self._last: int | None = None
        self._last_us = -1
        self._count = 0

    @property
    def start_us(self) -> int:
        """The first frame's own timestamp, in microseconds."""
        return _microseconds(self._first, self._tick)

    def time_us(self, frame: av.VideoFrame) -> int:
        """Microseconds since the first frame. Raises TimesError where they do not increase."""
        stamp = self._stamp(frame)
        if self._last is None:
            self._first = stamp
        elif stamp <= self._last:
            raise TimesError(f"{self.source} {stamp} comes after {self._last}")
        time_us = _microseconds(stamp - self._first, self._tick)
        if time_us <= self._last_us:
            raise TimesError(f"two frames within a microsecond, at {time_us} us")
        self._last, self._last_us = stamp, time_us
        self._count += 1
        return time_us

    def _stamp(self, frame: av.VideoFrame) -> int:
        if self.source == "rate":
            return self._count
        stamp = frame.pts if self.source == "pts" else frame.dts
        if stamp is None and self.source == "dts" and self._last is not None:
            per_frame = round(1 / self.rate / self._tick)
            stamp = self._last + max(frame.duration or per_frame, 1)
        if stamp is None:
            raise TimesError(f"a frame without {self.source}")
        return int(stamp)


def _microseconds(ticks: int, tick_s: Fraction) -> int:
    """Rounded to even as `round` does, in whole numbers: a Fraction takes 5 us, a third of our own work."""
    whole, rest = divmod(ticks * tick_s.numerator * 1_000_000, tick_s.denominator)
    over = 2 * rest - tick_s.denominator
    return whole + (over > 0 or (over == 0 and whole % 2 == 1))


def stream_rate(stream: VideoStream) -> Fraction:
    """Frames per second as the header has it: a hint, since headers say 90000, 1/0 or nothing.

    25 where nothing between 0 and 1000 is said.
    """
    context = stream.codec_context
    for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate, context.framerate):
        if rate is not None and 0 < rate <= 1000:
            return Fraction(rate)
    return Fraction(25)


class Upright(NamedTuple):
    """How a decoded picture is brought upright: first transposed, then flipped."""

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False

    @property
    def mirrored(self) -> bool:
        """Whether it is a mirror image, besides being turned."""
        return self.transpose ^ self.flip_x ^ self.flip_y


def read_upright(frame: av.VideoFrame) -> Upright:
    """What the display matrix of a frame asks for, to the nearest quarter turn.

    The matrix takes a decoded pixel (x, y) to (a x + c y, b x + d y); its order in memory is
    a b u, c d v, x y w (ISO/IEC 14496-12, 8.2.2.3).
    """
    try:
        side_data = cast(Mapping[str, Buffer], frame.side_data)
        matrix = np.frombuffer(bytes(side_data["DISPLAYMATRIX"]), np.int32)
    except KeyError:
        return Upright()
    a, b, _, c, d = (int(value) for value in matrix[:5])
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Upright(transpose=True, flip_x=c < 0, flip_y=b < 0)
    return Upright(flip_x=a < 0, flip_y=d < 0)


class BgrConverter:
    """Decoded frames to BGR of one size, with the frame's own matrix and range.

    One swscale context for a whole video and thread: made anew for each frame, as
    `VideoFrame.to_ndarray` does, it takes 1,147 us for 320x240 instead of 40 us.
    """

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._of_thread = threading.local()

    def convert(self, frame: av.VideoFrame) -> np.ndarray:
        """uint8 (H, W, 3), blue first; its memory is its own. Several threads may convert at a time."""
        width, height = self._size
        scaler: VideoReformatter | None = getattr(self._of_thread, "scaler", None)
        if scaler is None:
            scaler = self._of_thread.scaler = VideoReformatter()
        bgr = scaler.reformat(
            frame,
            width,
            height,
            format="bgr24",
            dst_color_range=_FULL_RANGE,
            interpolation=_BICUBIC,
            threads=1,
        )
        plane = bgr.planes[0]  # which the array keeps alive
        rows = np.frombuffer(cast(Any, plane), np.uint8).reshape(height, plane.line_size)
        return rows[:, : 3 * width].reshape(height, width, 3)
