"""Hold folders of frames against their frames.json, and make anew those that do not agree."""

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import simplejpeg
from joblib import Parallel, delayed

from pipeline.errors import FolderError
from pipeline.files import MEDIA_SUFFIXES, is_hidden
from pipeline.folder import (
    FRAMES_JSON,
    FrameFolder,
    find_folders,
    parse_frame_name,
    read_frames_json,
)
from pipeline.offline.extract import RunSpec, VideoDone, extract_all
from pipeline.offline.failures import read_failures
from pipeline.offline.frames import FrameSpec
from pipeline.offline.plan import make_plan
from pipeline.seeds import generator

_SHOWN = 3
"""Files that a problem names before it says how many more there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec:
    """How closely frames are looked at. Names, sizes and CRC-32 of all of them are compared in any case."""

    decode: Literal["all", "sample", "none"] = "sample"
    """Which frames are decoded, too: what a CRC-32 cannot tell is whether the right bytes were noted."""
    sample_frames: int = 4
    """Frames that are decoded of each folder where `decode` is `sample`."""
    seed: int = 0
    """Which frames a sample takes; the same ones again for the same seed, wherever the folder is."""
    jobs: int = -1
    """Folders at the same time, one process each; -1 for as many as there are cores to use."""

    def __post_init__(self) -> None:
        if self.sample_frames < 1:
            raise ValueError(f"sample_frames must be 1 or more, got {self.sample_frames}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")
        if self.jobs == 0 or self.jobs < -1:
            raise ValueError(f"jobs must be 1 or more, or -1 for all cores, got {self.jobs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderVerdict:
    """What one folder holds, against what it should hold."""

    folder: Path
    video: str | None = None
    """The video that frames.json names; None where it cannot be read."""
    spec: FrameSpec | None = None
    """The options that frames.json says its frames were made with; None where it cannot be read."""
    problems: tuple[str, ...] = ()
    """One line for each kind of damage, with the number of files and the first few; empty if all is well."""
    frames_checked: int = 0
    """Files that were compared with frames.json: all that are there under their right names."""
    frames_decoded: int = 0
    """Of those, the frames that were decoded, too, unless their bytes were other ones already."""


@dataclass(kw_only=True)
class VerifyReport:
    """What a whole root of frames holds; only of damaged folders more than a count is kept."""

    spec: VerifySpec
    num_folders: int = 0
    num_frames: int = 0
    """Frames that were compared with frames.json."""
    num_decoded: int = 0
    damaged: list[FolderVerdict] = field(default_factory=list)
    """Folders with problems, sorted by path."""
    options: Counter[FrameSpec] = field(default_factory=Counter)
    """How many folders were made with which options."""

    def add(self, verdict: FolderVerdict) -> None:
        """Count one folder."""
        self.num_folders += 1
        self.num_frames += verdict.frames_checked
        self.num_decoded += verdict.frames_decoded
        if verdict.spec is not None:
            self.options[verdict.spec] += 1
        if verdict.problems:
            self.damaged.append(verdict)


def verify_folder(folder: Path, spec: VerifySpec = VerifySpec()) -> FolderVerdict:
    """Compare one folder with its frames.json: names, times, sizes, CRC-32, and whether JPEGs decode.

    Whatever is wrong is a problem in the verdict, and nothing raises. Each frame counts once, with the
    first thing that is wrong with it. Only JPEGs matter; a system's litter beside them does not.
    """
    try:
        frames = read_frames_json(folder)
        found = _list_jpegs(folder)
    except FolderError as error:
        return FolderVerdict(folder=folder, problems=(str(error),))
    except OSError as error:
        return FolderVerdict(folder=folder, problems=(f"cannot be looked into: {error.strerror or error}",))
    verdict = FolderVerdict(folder=folder, video=frames.video, spec=read_spec(frames))
    contradiction = _find_contradiction(frames)
    if contradiction is not None:
        return replace(verdict, problems=(contradiction,))
    names = frames.frame_names()
    drawn = _drawn(frames, spec)
    there = [index for index, name in enumerate(names) if name in found]
    checked = (_check_frame(folder / names[at], at, frames, decode=at in drawn) for at in there)
    findings = [*_check_names(names, found), *filter(None, checked)]
    return replace(
        verdict,
        problems=_in_words(findings, len(names)),
        frames_checked=len(there),
        frames_decoded=len(drawn.intersection(there)),
    )


def _list_jpegs(folder: Path) -> set[str]:
    # `scandir` knows what is a file without asking again: 0.7 us a frame, with `iterdir` 5.1 us.
    with os.scandir(folder) as entries:
        jpegs = [entry for entry in entries if entry.name.lower().endswith((".jpg", ".jpeg"))]
        return {entry.name for entry in jpegs if entry.is_file() and not is_hidden(Path(entry.name))}


def read_spec(frames: FrameFolder) -> FrameSpec | None:
    """The options that frames.json keeps, as `FrameSpec.as_json` wrote them; None where they are none."""
    known = {field.name for field in fields(FrameSpec)}
    try:
        spec = FrameSpec(**{name: value for name, value in frames.spec.items() if name in known})
        hash(spec)  # a list in place of a number cannot be counted
    except (AttributeError, TypeError, ValueError):
        return None
    return spec


def _find_contradiction(frames: FrameFolder) -> str | None:
    """What frames.json says that cannot be true, before any file is looked at."""
    times_us, count = frames.times_us, frames.num_frames
    if count == 0:
        return f"{FRAMES_JSON} names no frame"
    for name, column in {"times_us": times_us, "sizes": frames.sizes, "crc32": frames.crc32}.items():
        is_whole = isinstance(column, list) and len(column) == count
        if not is_whole or not all(type(value) is int and value >= 0 for value in column):
            return f"{FRAMES_JSON} is not whole: {name} is no list of {count} counts"
    if times_us[0] != 0:
        return f"{FRAMES_JSON}: the first frame is at {times_us[0]:,} us, and should be at 0"
    wrong = [index for index in range(1, count) if times_us[index] <= times_us[index - 1]]
    if wrong:
        at = wrong[0]
        later = f"{times_us[at]:,} us after {times_us[at - 1]:,} us"
        return f"{FRAMES_JSON}: {len(wrong)} of {count} times do not rise, first at frame {at}: {later}"
    return None


def _drawn(frames: FrameFolder, spec: VerifySpec) -> frozenset[int]:
    """Numbers of the frames to decode; by the video's name, so that a moved folder gives the same ones."""
    if spec.decode == "none":
        return frozenset()
    count = frames.num_frames
    if spec.decode == "all" or count <= spec.sample_frames:
        return frozenset(range(count))
    rng = generator(spec.seed, zlib.crc32(frames.video.encode(errors="surrogatepass")))
    return frozenset(rng.choice(count, spec.sample_frames, replace=False).tolist())


class _Finding(NamedTuple):
    """One thing that is wrong with one file."""

    kind: str
    text: str


_TOO_MANY = "too many, which frames.json does not name"


def _check_names(names: Sequence[str], found: set[str]) -> Iterator[_Finding]:
    """Missing, misnamed (the number of a missing frame with another time) and surplus files."""
    surplus = sorted(found.difference(names))
    misnamed: dict[int, str] = {}
    for name in surplus:
        index = _frame_index(name)
        if index is not None and index < len(names) and names[index] not in found:
            misnamed.setdefault(index, name)
    for index, name in enumerate(names):
        if index in misnamed:
            yield _Finding("misnamed", f"{misnamed[index]} instead of {name}")
        elif name not in found:
            yield _Finding("missing", name)
    taken = set(misnamed.values())
    yield from (_Finding(_TOO_MANY, name) for name in surplus if name not in taken)


def _frame_index(name: str) -> int | None:
    try:
        return parse_frame_name(name)[0]
    except FolderError:
        return None


def _check_frame(path: Path, index: int, frames: FrameFolder, *, decode: bool) -> _Finding | None:
    """The first thing that is wrong with a file; one of another size is not even read."""
    try:
        with path.open("rb", buffering=0) as file:
            found, size = os.fstat(file.fileno()).st_size, frames.sizes[index]
            if found != size:
                return _Finding("of another size", f"{path.name} ({found:,} bytes instead of {size:,})")
            data = file.read()
    except OSError as error:
        return _Finding("unreadable", f"{path.name} ({error.strerror or error})")
    if zlib.crc32(data) != frames.crc32[index]:
        return _Finding("with other bytes (CRC-32)", path.name)
    return _check_picture(data, path.name, frames) if decode else None


def _check_picture(data: bytes, name: str, frames: FrameFolder) -> _Finding | None:
    """Whether a JPEG decodes without so much as a warning, to a picture of the size that is noted."""
    try:
        # Grey takes a fifth less time, and reads colour's part of the data all the same.
        height, width, _ = simplejpeg.decode_jpeg(data, colorspace="GRAY", strict=True).shape
    except ValueError as error:
        return _Finding("not to be decoded", f"{name} ({error})")
    found, noted = f"{width}x{height}", f"{frames.width}x{frames.height}"
    if found != noted:
        return _Finding("of another picture size", f"{name} ({found} instead of {noted})")
    return None


def _in_words(findings: Iterable[_Finding], num_frames: int) -> tuple[str, ...]:
    """One line for each kind of finding, in the order in which they first come."""
    kinds: dict[str, list[str]] = {}
    for kind, text in findings:
        kinds.setdefault(kind, []).append(text)
    lines = []
    for kind, texts in kinds.items():
        more = f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
        whole = "" if kind == _TOO_MANY else f" of {num_frames:,} frames"
        lines.append(f"{len(texts):,}{whole} {kind}: {', '.join(texts[:_SHOWN])}{more}")
    return tuple(lines)


def find_frame_folders(frames_root: Path) -> list[Path]:
    """Folders to verify, sorted: those with frames.json; with frames, but without it; that cannot be read."""
    finished = find_folders(frames_root)
    known = set(finished)
    others: list[Path] = []
    walk = os.walk(frames_root, onerror=lambda error: others.append(Path(error.filename)))
    for folder, names, files in walk:
        # Finished folders are not listed a second time: they hold nearly all there is.
        names[:] = [name for name in names if not name.startswith(".") and Path(folder, name) not in known]
        if Path(folder) not in known and any(_frame_index(name) is not None for name in files):
            others.append(Path(folder))
    return sorted(finished + others)


def verify_all(
    frames_root: Path,
    spec: VerifySpec = VerifySpec(),
    *,
    on_plan: Callable[[int], None] = lambda num_folders: None,
    on_folder: Callable[[FolderVerdict], None] = lambda verdict: None,
) -> VerifyReport:
    """Verify every folder below a root, in parallel; the report is in the order of their paths.

    `on_plan` is told how many folders there are, `on_folder` of each one, in order. FolderError where
    the root is missing.
    """
    if not frames_root.is_dir():
        raise FolderError(f"{frames_root} is missing: there are no frames yet, run `make frames`")
    folders = find_frame_folders(frames_root)
    on_plan(len(folders))
    report = VerifyReport(spec=spec)
    # Processes: reading and CRC-32 of so small files leave the interpreter's lock too seldom for threads.
    # 12,820 frames of UCF101, a sample decoded: two processes 0.45 s, two threads 0.66 s, one 0.62 s.
    runner = Parallel(n_jobs=spec.jobs, prefer="processes", return_as="generator")
    for verdict in runner(delayed(verify_folder)(folder, spec) for folder in folders):
        report.add(verdict)
        on_folder(verdict)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What became of the damaged folders."""

    repaired: list[FolderVerdict]
    """Folders that were made anew and are as they should be."""
    left: list[FolderVerdict]
    """Folders that are not, with what is wrong, and why nothing could be done about it."""
    num_tried: int
    """Videos that were decoded again; with none, not a file has changed."""


class _Cure(NamedTuple):
    """How a damaged folder is made anew."""

    video: str
    spec: FrameSpec


def repair(
    report: VerifyReport,
    videos_root: Path,
    frames_root: Path,
    run: RunSpec = RunSpec(),
    *,
    on_plan: Callable[[int], None] = lambda num_folders: None,
    on_frames: Callable[[int], None] = lambda count: None,
    on_video: Callable[[VideoDone], None] = lambda done: None,
) -> RepairReport:
    """Decode the videos of damaged folders again, and verify what comes out.

    Each with the options that its frames.json names; where that cannot be read, with those that most
    other folders have. A folder whose video is gone stays as it is; no other folder is touched. Where
    a video does not decode any more its folder goes, as in any run of `extract_all`, which also says
    what raises.
    """
    cures, reasons = _find_cures(report, videos_root, frames_root)
    on_plan(len(cures))
    for spec in dict.fromkeys(cure.spec for cure in cures.values()):
        videos = [cure.video for cure in cures.values() if cure.spec == spec]
        extracted = extract_all(
            videos, videos_root, frames_root, spec, run, redo=videos, on_frames=on_frames, on_video=on_video
        )
        for failed in extracted.failures:
            why = f"its video does not decode ({failed.stage}: {failed.error}), the old frames are removed"
            reasons[frames_root / failed.frames] = why
    verdicts = [
        replace(verdict, problems=(*verdict.problems, f"cannot be repaired: {reasons[verdict.folder]}"))
        if verdict.folder in reasons
        else verify_folder(verdict.folder, report.spec)
        for verdict in report.damaged
    ]
    return RepairReport(
        repaired=[verdict for verdict in verdicts if not verdict.problems],
        left=[verdict for verdict in verdicts if verdict.problems],
        num_tried=len(cures),
    )


def _find_cures(
    report: VerifyReport, videos_root: Path, frames_root: Path
) -> tuple[dict[Path, _Cure], dict[Path, str]]:
    """For each damaged folder how to make it anew, or else why that cannot be done."""
    common = report.options.most_common(1)
    usual = common[0][0] if common else FrameSpec()
    cures: dict[Path, _Cure] = {}
    reasons: dict[Path, str] = {}
    for verdict in report.damaged:
        try:
            video = verdict.video or _find_video(verdict.folder.relative_to(frames_root), videos_root)
            _check_readable(videos_root / video)
        except FolderError as error:
            reasons[verdict.folder] = str(error)
        else:
            cures[verdict.folder] = _Cure(video, verdict.spec or usual)
    # Where the extraction would put a video decides: two folders may claim the same one.
    videos = list(dict.fromkeys(cure.video for cure in cures.values()))
    failures = read_failures(frames_root)
    plan = make_plan(videos, videos_root, frames_root, usual, failures, redo=videos)
    places = {task.video: frames_root / task.frames for task in plan.tasks}
    for folder, cure in list(cures.items()):
        if places[cure.video] != folder:
            reasons[folder] = f"{places[cure.video]} is for the frames of {cure.video}, delete this folder"
            del cures[folder]
    return cures, reasons


def _find_video(folder: Path, videos_root: Path) -> str:
    """The one video that has the place of a folder, with any suffix; FolderError where none or several do."""
    parent = videos_root / folder.parent
    names = sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []
    files = [Path(name) for name in names if Path(name).suffix.lower() in MEDIA_SUFFIXES]
    fitting = [file.name for file in files if folder.name in (file.stem, file.name) and not is_hidden(file)]
    if not fitting:
        raise FolderError(f"video missing at {videos_root / folder}.*")
    if len(fitting) > 1:
        raise FolderError(f"it may be of {' or '.join(fitting)}, delete the folder and run `make frames`")
    return (folder.parent / fitting[0]).as_posix()


def _check_readable(video: Path) -> None:
    """FolderError where a video cannot be read: that must not cost the frames that are still good."""
    try:
        with video.open("rb") as file:
            file.read(1)
    except FileNotFoundError as error:
        raise FolderError(f"video missing at {video}") from error
    except OSError as error:
        raise FolderError(f"video cannot be read at {video} ({error.strerror or error})") from error
