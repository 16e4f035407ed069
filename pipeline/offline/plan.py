"""What is left to do: which videos are new or changed, and which folder belongs to which video."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from pipeline.errors import FolderError
from pipeline.files import content_hash
from pipeline.folder import FrameFolder, find_folders, read_frames_json, write_frames_json
from pipeline.offline.failures import FailedVideo
from pipeline.offline.frames import FrameSpec

Reason = Literal["new", "failed before", "changed video", "other options", "repair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One video to decode."""

    video: str
    """Path below the root of videos."""
    frames: str
    """Folder below the root of frames."""
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run has to do, and what it finds done."""

    tasks: list[Task]
    kept: dict[str, FrameFolder]
    """Finished folders that are as they should be, by video."""


def make_plan(
    videos: Sequence[str],
    videos_root: Path,
    frames_root: Path,
    spec: FrameSpec,
    failures: Iterable[FailedVideo],
    *,
    redo: Collection[str] = (),
) -> Plan:
    """Compare videos with what stands: only what is new, changed or failed becomes a task.

    A video is unchanged where size and time of change are as they were, or else its content hash is;
    a mere `touch` is noted in frames.json, so that the next run needs no hash. Videos in `redo`
    are made anew in any case. Order as in `videos`.
    """
    standing = _read_standing(frames_root)
    failed = {failure.video: failure.frames for failure in failures}
    claims = {stands.video: folder for folder, stands in standing.items()} | failed
    folders = place_videos(videos, claims)
    plan = Plan(tasks=[], kept={})
    for video in videos:
        folder = folders[video]
        reason: Reason | None
        if video in redo:
            reason = "repair"
        elif folder not in standing:
            reason = "failed before" if video in failed else "new"
        else:
            stands, reason = _changed(standing[folder], videos_root / video, frames_root / folder, spec)
            if reason is None:
                plan.kept[video] = stands
        if reason is not None:
            plan.tasks.append(Task(video=video, frames=folder, reason=reason))
    return plan


def _read_standing(frames_root: Path) -> dict[str, FrameFolder]:
    standing = {}
    for folder in find_folders(frames_root):
        try:
            standing[folder.relative_to(frames_root).as_posix()] = read_frames_json(folder)
        except FolderError:
            continue  # not readable: made anew, under the same name if it is its video's turn
    return standing


def _changed(
    stands: FrameFolder, video: Path, folder: Path, spec: FrameSpec
) -> tuple[FrameFolder, Reason | None]:
    try:
        stat = video.stat()
    except OSError:
        return stands, "changed video"  # the task says what is wrong with it
    source = stands.source
    if stat.st_size != source.bytes:
        return stands, "changed video"
    if stat.st_mtime_ns != source.mtime_ns:
        if content_hash(video) != source.sha256:
            return stands, "changed video"
        stands = replace(stands, source=replace(source, mtime_ns=stat.st_mtime_ns))
        write_frames_json(folder, stands)
    return stands, None if stands.spec == spec.as_json() else "other options"


def place_videos(videos: Iterable[str], claims: Mapping[str, str]) -> dict[str, str]:
    """A folder of frames for each video; what is claimed already stays where it is.

    `A/clip.avi` gets `A/clip`. Where that is another video's, or a folder that holds videos, it
    gets `A/clip.avi`, then `A/clip.avi~2` and so on: two videos never share a folder, and one that
    comes later moves nothing.

    >>> place_videos(["A/clip.avi", "A/clip.mp4", "B/clip.avi"], {})
    {'A/clip.avi': 'A/clip', 'A/clip.mp4': 'A/clip.mp4', 'B/clip.avi': 'B/clip'}
    """
    videos = list(videos)
    placed = {video: claims[video] for video in videos if video in claims}
    taken = set(claims.values())
    above = {str(parent) for folder in (*videos, *taken) for parent in PurePosixPath(folder).parents}
    for video in videos:
        if video not in placed:
            folder = next(each for each in _candidates(video) if _is_free(each, taken, above))
            placed[video] = folder
            taken.add(folder)
            above.update(str(parent) for parent in PurePosixPath(folder).parents)
    return placed


def _candidates(video: str) -> Iterator[str]:
    path = PurePosixPath(video)
    yield str(path.with_suffix(""))
    yield video
    number = 2
    while True:
        yield f"{video}~{number}"
        # Where a folder above is itself one of frames, only another folder above helps.
        yield str(PurePosixPath(f"{path.parent}~{number}") / path.name)
        number += 1


def _is_free(folder: str, taken: set[str], above: set[str]) -> bool:
    parents = {str(parent) for parent in PurePosixPath(folder).parents}
    return folder not in taken and folder not in above and not parents & taken
