"""A small dataset in UCF101's shape, drawn here, whose classes only motion can tell apart.

A scene is one object, set several times like bricks in a wall so that every crop has some of it, on a
background that stands still. Its pose has four coordinates: x, y, angle and size. Each has a path
through the clip; a class plays the path of one and holds the others at a random moment of theirs, so
that single frames are the same in distribution for all classes. The opposite class plays the same path
backwards: the same pictures, in the other order.
"""

import hashlib
import io
import json
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import av
import cv2
import joblib
import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError
from pipeline.files import content_hash, free_bytes, is_hidden, replaced, write_text
from pipeline.seeds import generator

SAMPLE_JSON = "sample.json"  # beside `videos` and `splits`: the options, and each video's SHA-256
FORMAT_VERSION = 1  # goes up when the same options would draw other videos
WIDTH_PX, HEIGHT_PX, FPS, NUM_SPLITS = 320, 240, 25, 3

Pixels: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float64]
Rng: TypeAlias = np.random.Generator


class SampleError(PipelineError):
    """The sample cannot be written without touching what is not its own, or does not fit."""


class Motion(NamedTuple):
    """The one coordinate of a pose that a class moves, and which way along its path."""

    axis: int
    backwards: bool


X, Y, ANGLE, SIZE = range(4)
MOTIONS: Mapping[str, Motion] = {
    "Grow": Motion(SIZE, backwards=False),
    "MoveDown": Motion(Y, backwards=False),
    "MoveLeft": Motion(X, backwards=True),
    "MoveRight": Motion(X, backwards=False),
    "MoveUp": Motion(Y, backwards=True),
    "Shrink": Motion(SIZE, backwards=True),
    "TurnClockwise": Motion(ANGLE, backwards=False),
    "TurnCounterClockwise": Motion(ANGLE, backwards=True),
}
"""The classes, in the order of their labels."""

# Rates per frame, slowest and fastest. Scaled to 56 px, 16 frames move an object by 7 to 12 px.
_MOVE_PX, _TURN_DEG = (2.0, 3.5), (3.0, 6.0)
_GROW_LOG = (math.log(1.35) / 15, math.log(1.6) / 15)  # 1.35 to 1.6 fold over 16 frames
_RADII_PX = (24.0, 70.0)  # smallest and largest; the nearest objects are 144 px apart
_STEP_X_PX, _STEP_Y_PX = WIDTH_PX // 2, HEIGHT_PX // 2  # from object to object, and from row to row
_LONGEST = int(math.log(_RADII_PX[1] / _RADII_PX[0]) / _GROW_LOG[0]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """What the sample holds; the same spec draws the same bytes each time."""

    groups: int = 12
    """Groups of each class, each with its own background; no split has one on both sides."""
    clips: int = 3
    """Clips of each group of each class."""
    seed: int = 0
    """All chance: other seeds draw other scenes and paths."""
    min_frames: int = 32
    """Frames of the shortest clip, at 25 frames a second; at least 16."""
    max_frames: int = 52
    """Frames of the longest clip; at most 54, after which what grows visibly would outgrow its place."""

    def __post_init__(self) -> None:
        if not NUM_SPLITS <= self.groups <= 99 or not 1 <= self.clips <= 99 or self.seed < 0:
            raise ValueError(f"{NUM_SPLITS} <= groups <= 99, 1 <= clips <= 99, seed >= 0 must hold: {self}")
        if not 16 <= self.min_frames <= self.max_frames <= _LONGEST:
            raise ValueError(f"16 <= min_frames <= max_frames <= {_LONGEST} must hold: {self}")


class Clip(NamedTuple):
    """One video of the sample: its class, and its group and number, both from 1."""

    class_name: str
    group: int
    number: int

    @property
    def video(self) -> str:
        """Path below `videos`, POSIX: `MoveLeft/v_MoveLeft_g01_c02.avi`."""
        return f"{self.class_name}/v_{self.class_name}_g{self.group:02d}_c{self.number:02d}.avi"


def list_clips(spec: SampleSpec) -> list[Clip]:
    """Every clip of the sample, in the order of the official lists: by class, group and number."""
    groups, numbers = range(1, spec.groups + 1), range(1, spec.clips + 1)
    return [Clip(name, group, number) for name in MOTIONS for group in groups for number in numbers]


def draw_poses(motion: Motion, spec: SampleSpec, rng: Rng) -> Floats:
    """Where the object is, in each frame of a clip.

    float64 (T, 4): x to the right and y downwards in px, angle in degrees clockwise, radius in px.
    One coordinate changes steadily and never turns back. From the same draws, the opposite motion has
    the same poses in the opposite order. The wall repeats after half a width and after a height.
    """
    num_frames = int(rng.integers(spec.min_frames, spec.max_frames + 1))
    room = math.log(_RADII_PX[1] / _RADII_PX[0])
    slowest, fastest = np.transpose([_MOVE_PX, _MOVE_PX, _TURN_DEG, _GROW_LOG])
    fastest[SIZE] = min(fastest[SIZE], room / (num_frames - 1))
    rates = rng.uniform(slowest, fastest)
    # Sizes have an end, so a path starts where it stays inside; the others go round, and start anywhere.
    starts = rng.uniform(0, [_STEP_X_PX, HEIGHT_PX, 360, room - rates[SIZE] * (num_frames - 1)])
    times = np.tile(rng.uniform(0, num_frames - 1, size=4), (num_frames, 1))
    times[:, motion.axis] = np.arange(num_frames)
    poses: Floats = starts + rates * times
    poses[:, SIZE] = _RADII_PX[0] * np.exp(poses[:, SIZE])
    return poses[::-1] if motion.backwards else poses


def _soft(u: Floats, cells: float, rng: Rng) -> Floats:
    """Random shares that vary smoothly over a cell."""
    side = math.ceil(np.ptp(u) * cells) + 1
    coarse = cv2.resize(rng.random((side, side)), u.shape[::-1], interpolation=cv2.INTER_CUBIC)
    return np.clip(coarse.astype(np.float64) * 1.2 - 0.1, 0, 1)


# Shares of the second colour, 0 to 1, at coordinates (H, W) in cells; all but noise are textures, too.
_PATTERNS: tuple[Callable[[Floats, Floats, Rng], Floats], ...] = (
    lambda u, v, rng: np.divide(u - u.min(), np.ptp(u)),  # gradient
    lambda u, v, rng: 0.5 + 0.5 * np.tanh(3 * np.sin(np.pi * u)),  # stripes
    lambda u, v, rng: 0.5 + 0.5 * np.tanh(6 * np.sin(np.pi * u) * np.sin(np.pi * v)),  # checkers
    lambda u, v, rng: 0.5 + 0.5 * np.sin(np.pi * np.hypot(u, v)),  # rings
    lambda u, v, rng: _soft(u, 1, rng),  # blobs
    lambda u, v, rng: _soft(u, 8, rng),  # noise
)
# Corners (x, y), y downwards, of outlines that no turn but a whole one repeats.
_SHAPES = (
    "-4,-2 0,-2 0,-4 4,0 0,4 0,2 -4,2",  # arrow
    "-3,-4 0,-4 0,1 4,1 4,4 -3,4",  # L
    "-3,-4 4,-2 -1,1 -1,4 -3,4",  # flag
    "-4,-4 4,-4 4,-1 1.5,-1 1.5,4 -1.5,4 -1.5,-1 -4,-1",  # T
    "-4,3 -4,-3 5,3",  # set square
    "-4,3 -4,-1 -2,-1 -2,-4 2,-4 2,-1 4,3",  # boat
    "-4,4 0,-4 4,4 0,1.5",  # dart
)


def _paint(kind: int, shape: tuple[int, int], cell_px: float, lumas: Floats, rng: Rng) -> Pixels:
    """A pattern, turned and shifted at random, in two random hues of these lumas: uint8 (H, W, 3)."""
    chroma = rng.uniform(-1, 1, size=(2, 3))
    chroma -= chroma @ [[0.299], [0.587], [0.114]]
    first, second = np.clip(lumas[:, None] + 45 * chroma, 0, 255)
    angle = rng.uniform(0, 2 * np.pi)
    y, x = (np.indices(shape) - rng.uniform(0, shape)[:, None, None]) / cell_px
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    shares = _PATTERNS[kind](u, v, rng)[..., None]
    return np.asarray(np.rint(first * (1 - shares) + second * shares), np.uint8)


class Scene(NamedTuple):
    """What a clip shows; the same for all classes, so that it tells none of them."""

    background: Pixels
    """uint8 (H, W, 3), RGB; the same for all clips of a group."""
    sprites: list[Pixels]
    """The object, upright, whole and half as large: uint8 (S, S, 4), RGB times alpha, and alpha."""


def draw_scene(spec: SampleSpec, group: int, number: int) -> Scene:
    """Background of a group, and the object of one of its clips."""
    rng = generator(spec.seed, group, 0)
    # One of the two is dark and the other light, so that the object stands out whatever the hues.
    behind, ahead = rng.permutation([(40.0, 85.0), (175.0, 220.0)])
    background = _paint(group % 6, (HEIGHT_PX, WIDTH_PX), rng.uniform(20, 45), behind, rng)
    rng = generator(spec.seed, group, number, len(MOTIONS))
    side = 2 * math.ceil(_RADII_PX[1]) + 4
    texture = _paint((group + number) % 5, (side, side), rng.uniform(25, 40), ahead, rng)
    return Scene(background, _cut_sprites(_SHAPES[(group + 2 * number) % 7], texture))


def _cut_sprites(outline: str, texture: Pixels) -> list[Pixels]:
    side = texture.shape[0]
    corners = np.array([corner.split(",") for corner in outline.split()], np.float32)
    middle, radius = cv2.minEnclosingCircle(corners)
    corners = (corners - np.array(middle)) * (_RADII_PX[1] / radius) + (side - 1) / 2
    alpha = np.zeros((side, side), np.uint8)
    cv2.fillPoly(alpha, [np.rint(corners * 16).astype(np.int32)], (255,), cv2.LINE_AA, 4)
    scaled = (texture.astype(np.uint16) * alpha[..., None] + 127) // 255
    sprite = np.dstack([scaled.astype(np.uint8), alpha])
    return [sprite, cv2.resize(sprite, (side // 2, side // 2), interpolation=cv2.INTER_AREA).astype(np.uint8)]


def _turned(sprites: list[Pixels], pose: Floats, reach: int) -> Pixels:
    """The object turned and scaled: uint8 (2 reach + 1, 2 reach + 1, 4), its centre in the middle pixel."""
    scale = pose[SIZE] / _RADII_PX[1]
    # Never to less than a half, where bilinear would skip pixels.
    sprite, scale = (sprites[1], 2 * scale) if scale <= 0.5 else (sprites[0], scale)
    middle = (sprite.shape[0] - 1) / 2
    matrix = cv2.getRotationMatrix2D((middle, middle), -pose[ANGLE], scale)  # OpenCV counts counter-clockwise
    matrix[:, 2] += reach + pose[:ANGLE] % 1 - middle
    return np.asarray(cv2.warpAffine(sprite, matrix, (2 * reach + 1, 2 * reach + 1)), np.uint8)


def draw_frames(scene: Scene, poses: Floats) -> Iterator[Pixels]:
    """The pictures of a clip, one for each pose: uint8 (H, W, 3), RGB."""
    # Every other row stands half a step aside.
    wall = [(y * _STEP_Y_PX, (2 * x + y % 2) * _STEP_X_PX // 2) for y in range(-3, 3) for x in range(-2, 3)]
    for pose in poses:
        reach = math.ceil(pose[SIZE]) + 2
        patch = _turned(scene.sprites, pose, reach).astype(np.uint16)
        light, hidden = patch[..., :3], np.repeat(255 - patch[..., 3:], 3, axis=2)
        picture = scene.background.copy()
        for down, right in wall:
            top = int(pose[Y]) % HEIGHT_PX + down - reach
            left = int(pose[X]) % _STEP_X_PX + right - reach
            bottom, end = max(top + 2 * reach + 1, 0), max(left + 2 * reach + 1, 0)
            under = picture[max(top, 0) : bottom, max(left, 0) : end]
            rows = slice(max(-top, 0), max(-top, 0) + under.shape[0])
            columns = slice(max(-left, 0), max(-left, 0) + under.shape[1])
            under[:] = light[rows, columns] + (under * hidden[rows, columns] + 127) // 255
        yield picture


def draw_clip(spec: SampleSpec, clip: Clip) -> Iterator[Pixels]:
    """The pictures of one clip, in order: uint8 (H, W, 3), RGB."""
    motion = MOTIONS[clip.class_name]
    rng = generator(spec.seed, clip.group, clip.number, motion.axis)
    return draw_frames(draw_scene(spec, clip.group, clip.number), draw_poses(motion, spec, rng))


def encode_avi(frames: Iterable[Pixels]) -> bytes:
    """A video like UCF101's, of uint8 (240, 320, 3) RGB pictures; the same pictures give the same bytes.

    MPEG-4 part 2 with the tag XVID in AVI, 25 frames a second, no B-frames and one key frame, the first.
    """
    file = io.BytesIO()
    with av.open(file, "w", format="avi", container_options={"fflags": "+bitexact"}) as container:
        # The longest distance of key frames that MPEG-4 allows, and none where a scene seems to change.
        options = {"flags": "+qscale+bitexact", "g": "600", "bf": "0", "sc_threshold": "1000000000"}
        stream = container.add_stream("mpeg4", rate=FPS, options=options)
        stream.codec_context.codec_tag = "XVID"
        stream.codec_context.thread_count = 1  # threads slice the picture, so bytes would depend on the cores
        stream.codec_context.global_quality = 3 * 118  # 118: FFmpeg's lambda for each step of the quantiser
        stream.width, stream.height, stream.pix_fmt = WIDTH_PX, HEIGHT_PX, "yuv420p"
        for index, pixels in enumerate(frames):
            planes = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2YUV_I420), np.uint8)
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            frame.pts, frame.time_base = index, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def held_out_groups(spec: SampleSpec, split: int) -> range:
    """Groups that a split (from 1) tests: about a quarter, others in each split, as in UCF101."""
    size = (spec.groups + 2) // 4
    return range(1 + (split - 1) * size, 1 + split * size)


def split_lists(spec: SampleSpec) -> dict[str, str]:
    """Text of each official list by its file name: lines end in CR LF, labels count from 1."""
    labels = {name: label for label, name in enumerate(MOTIONS, start=1)}
    lists = {"classInd.txt": [f"{label} {name}" for name, label in labels.items()]}
    clips = list_clips(spec)
    for split in range(1, NUM_SPLITS + 1):
        tested = held_out_groups(spec, split)
        train = [clip for clip in clips if clip.group not in tested]
        lists[f"testlist{split:02d}.txt"] = [clip.video for clip in clips if clip.group in tested]
        lists[f"trainlist{split:02d}.txt"] = [f"{clip.video} {labels[clip.class_name]}" for clip in train]
    return {name: "".join(f"{line}\r\n" for line in lines) for name, lines in lists.items()}


class SampleVideo(NamedTuple):
    """One finished video: its path below `videos`, whether this run wrote it, SHA-256 of the file."""

    video: str
    written: bool
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """What a run did: how many videos it wrote, and how many were there and the same."""

    written: int
    kept: int


_ELSEWHERE = "move it away, or draw the sample into another folder"
_BYTES_PER_FRAME = 5_000  # the mean of the default sample is 3,400


def write_sample(
    root: Path,
    spec: SampleSpec = SampleSpec(),
    *,
    jobs: int = -1,
    on_video: Callable[[SampleVideo], object] | None = None,
) -> SampleReport:
    """Draw the dataset below `root`: `videos/<Class>/*.avi`, `splits/*.txt` and sample.json.

    What is there is kept where it is what would be drawn. No video or list is replaced or deleted:
    SampleError where another file has the place of one, or where `root` belongs to another dataset or to
    other options. Each file appears whole, so a run that was killed is finished by the next one.

    `jobs` counts processes, -1 is one on each core; `on_video` is called here, as videos get ready.
    """
    known = _claim(root, spec)
    clips = list_clips(spec)
    _check_space(root, spec, clips)
    for name, text in split_lists(spec).items():
        _put(root / "splits" / name, text.encode())
    _note(root, spec, known)
    tasks = [joblib.delayed(_write_video)(root, spec, clip, known.get(clip.video)) for clip in clips]
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
    videos: list[SampleVideo] = []
    with warnings.catch_warnings(), closing(cast("Generator[SampleVideo]", parallel(tasks))) as results:
        warnings.filterwarnings("ignore", r"\d+ tasks", UserWarning)  # the error that stops a run says it
        for video in results:
            videos.append(video)
            if on_video is not None:
                on_video(video)
    _note(root, spec, {video.video: video.sha256 for video in videos})
    written = sum(video.written for video in videos)
    return SampleReport(written=written, kept=len(videos) - written)


def _write_video(root: Path, spec: SampleSpec, clip: Clip, known: str | None) -> SampleVideo:
    """Write one video where it is missing; `known` is the SHA-256 that an earlier run noted for it."""
    path = root / "videos" / clip.video
    if known is not None and path.exists() and content_hash(path) == known:
        return SampleVideo(clip.video, False, known)
    content = encode_avi(draw_clip(spec, clip))
    return SampleVideo(clip.video, _put(path, content), hashlib.sha256(content).hexdigest())


def _put(path: Path, content: bytes) -> bool:
    """Write a file that is missing; False where it is there and the same, SampleError where another is."""
    if not path.exists():
        with replaced(path) as beside:
            beside.write_bytes(content)
        return True
    if path.read_bytes() != content:
        raise SampleError(f"{path} is there and is not the sample's own: {_ELSEWHERE}")
    return False


def _claim(root: Path, spec: SampleSpec) -> Mapping[str, str]:
    """SHA-256 by video as an earlier run noted; SampleError where `root` is not this sample's own."""
    path, videos = root / SAMPLE_JSON, root / "videos"
    try:
        record = json.loads(path.read_bytes())
        drawn, hashes = {"format": record["format"], **record["spec"]}, dict(record["sha256"])
        other = sorted({"format": FORMAT_VERSION, **asdict(spec)}.items() - drawn.items())
    except FileNotFoundError:
        found = sorted(path for path in videos.iterdir() if not is_hidden(path)) if videos.exists() else []
        foreign = [path for path in found if path.name not in MOTIONS]
        if foreign:
            raise SampleError(f"{root} holds another dataset ({foreign[0]}): {_ELSEWHERE}") from None
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise SampleError(f"{path} cannot be read ({error!r}): delete it and run again") from error
    if other:
        changed = ", ".join(f"{name} {drawn.get(name)} instead of {value}" for name, value in other)
        raise SampleError(f"{root} holds a sample with other options ({changed}): {_ELSEWHERE}")
    return hashes


def _note(root: Path, spec: SampleSpec, hashes: Mapping[str, str]) -> None:
    """Note the options and what is finished, unless that is noted already."""
    path = root / SAMPLE_JSON
    record = {"format": FORMAT_VERSION, "spec": asdict(spec), "sha256": dict(sorted(hashes.items()))}
    text = json.dumps(record, indent=1) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def _check_space(root: Path, spec: SampleSpec, clips: list[Clip]) -> None:
    missing = sum(not (root / "videos" / clip.video).exists() for clip in clips)
    needed = missing * spec.max_frames * _BYTES_PER_FRAME
    free = free_bytes(root)
    if free < needed:
        found = f"{free / 1e6:.1f} MB free, and needs up to {needed / 1e6:.1f} MB for {missing} videos"
        raise SampleError(f"{root} has {found}: make room, or ask for fewer groups or clips")
