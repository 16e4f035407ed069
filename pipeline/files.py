"""Files that appear whole: written beside their place, then renamed into it."""

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What FFmpeg may open, and audio that people take for video: that fails with a row, not in silence.
_SUFFIXES = (
    ".avi .mp4 .m4v .mov .mkv .webm .flv .f4v .wmv .asf .mpg .mpeg .m1v .m2v .vob .ts .mts .m2ts .3gp .3g2 "
    ".ogv .ogg .ivf .gif .apng .rm .rmvb .mjpeg .mjpg .h264 .264 .h265 .265 .hevc .dv .mxf .y4m .nut .divx "
    ".vc1 .obu .mp3 .m4a .wma .wav .aac"
)
MEDIA_SUFFIXES = frozenset(_SUFFIXES.split())
"""What a file's name ends with, in any case, that is taken for a video; what it is its content decides."""


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place when the block ends well.

    Where the block raises, what was written is removed and `path` is as it was.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replaced(target) as beside:
    ...     _ = beside.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, or leave what was there."""
    with replaced(path) as beside:
        beside.write_text(text, encoding="utf-8")


def content_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; read in pieces, so memory stays small."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_hidden(path: Path) -> bool:
    """Whether a name is a system's litter and not a user's: `.DS_Store`, `._v_x.avi`, `Thumbs.db`.

    >>> [is_hidden(Path(name)) for name in ("._v_x.avi", "v_x.avi", "Thumbs.db")]
    [True, False, True]
    """
    return path.name.startswith(".") or path.name.lower() in {"thumbs.db", "desktop.ini", "__macosx"}


def free_bytes(folder: Path) -> int:
    """Bytes that a user without privileges may still write below `folder` (or its nearest parent)."""
    while not folder.exists():
        folder = folder.parent
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
