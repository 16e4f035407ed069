"""Videos that gave no frames: one small file each below the frames root, so that a manifest
built from the folders alone still names them.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import FolderError
from pipeline.files import write_text

FAILURES = ".failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedVideo:
    """One video that could not be made into frames, and why."""

    video: str
    """Path below the root of videos, POSIX, with its suffix."""
    frames: str
    """The folder that it would have had below the frames root, kept for it."""
    stage: str
    """How far it came: `open`, `stream`, `decode`, `encode` or `worker`."""
    error: str
    spec: dict[str, Any]


def write_failure(frames_root: Path, failed: FailedVideo) -> None:
    """Keep a failure, in place of an older one of the same video."""
    text = json.dumps(asdict(failed), ensure_ascii=False, indent=1)
    write_text(_path(frames_root, failed.video), text + "\n")


def clear_failure(frames_root: Path, video: str) -> None:
    """Forget a failure, if there was one: the video has frames now."""
    _path(frames_root, video).unlink(missing_ok=True)


def read_failures(frames_root: Path) -> list[FailedVideo]:
    """All failures that are kept, sorted by video; FolderError names a file that cannot be read."""
    found = []
    for path in (frames_root / FAILURES).glob("*.json"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found.append(FailedVideo(**values))
        except (ValueError, TypeError) as error:
            raise FolderError(f"{path} cannot be read ({error}): delete it and run `make frames`") from error
    return sorted(found, key=lambda failed: failed.video)


def _path(frames_root: Path, video: str) -> Path:
    # A hash, since a video's name may already be as long as a file system allows.
    return frames_root / FAILURES / f"{hashlib.sha256(video.encode()).hexdigest()[:32]}.json"
