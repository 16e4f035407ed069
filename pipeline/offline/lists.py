"""Split lists as they are met in the wild: read tolerantly, and held against the videos that are there."""

import csv
import io
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from pipeline.errors import ManifestError
from pipeline.files import MEDIA_SUFFIXES, is_hidden

Part = Literal["train", "val", "test"]

_LIST_SUFFIXES = frozenset({".txt", ".csv", ".json"})
_ABOUT = frozenset({"readme", "license", "licence"})
_PARTS: dict[str, Part] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validate", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class Entry(NamedTuple):
    """One line of a list: what it says about one video."""

    path: Path
    """The list."""
    line: int
    """Line of the list, from 1; in JSON, the place in its array."""
    video: str
    """The video as the list names it, POSIX."""
    split: str = "split01"
    part: Part | None = None
    """None where the list names a video and leaves it out."""
    class_name: str | None = None
    group: str | None = None

    @property
    def place(self) -> str:
        """File and line, for a message."""
        return f"{self.path}, line {self.line}"


def walk_files(root: Path) -> Iterator[PurePosixPath]:
    """Files below a folder, relative to it, through linked folders too; nothing hidden.

    A link back to a folder that it lies in is not followed, so that a circle of links ends.
    """
    yield from _walk(root, PurePosixPath(), frozenset())


def _walk(
    folder: Path, relative: PurePosixPath, above: frozenset[tuple[int, int]]
) -> Iterator[PurePosixPath]:
    stat = folder.stat()
    inside = above | {(stat.st_dev, stat.st_ino)}
    if len(inside) == len(above):
        return
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not is_hidden(Path(entry.name))]
    for entry in sorted(shown, key=lambda entry: entry.name):
        if Path(entry.path).is_dir():  # False too for a link to itself, where entry.is_dir() raises
            yield from _walk(Path(entry.path), relative / entry.name, inside)
        elif entry.is_symlink() or entry.is_file():  # a link that leads nowhere is a failure to be seen
            yield relative / entry.name


def find_lists(root: Path) -> list[Path]:
    """Text, CSV and JSON files anywhere below a folder of lists, sorted; none where it is missing."""
    if not root.is_dir():
        return []
    files = [file for file in walk_files(root) if file.suffix.lower() in _LIST_SUFFIXES]
    return sorted(root / file for file in files if file.stem.lower() not in _ABOUT)


def read_text(path: Path) -> str:
    """A whole list, of any encoding that says what it is, or UTF-8; ManifestError names the line else."""
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ManifestError(f"{path}, line {line}: not {encoding} text, save the list as UTF-8") from error


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Lines that hold something, with their number from 1, without blanks at their ends."""
    # Not splitlines: it also breaks at characters that may stand in a file's name.
    lines = enumerate(re.split(r"\r\n|\r|\n", read_text(path)), start=1)
    return [(number, text.strip()) for number, text in lines if text.strip()]


def read_header(path: Path) -> list[str]:
    """Column names of a CSV file, in small letters; empty where the file is."""
    first = _first_line(path)
    return [name.strip().lower() for name in next(csv.reader([first], delimiter=_delimiter(first)), [])]


def read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Rows of a CSV file with a header, by column in small letters, with the line each ends on.

    Separated by commas, semicolons or tabs. ManifestError for a row shorter than the header.
    """
    header = read_header(path)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=_delimiter(_first_line(path)))
    rows = [(reader.line_num, [value.strip() for value in row]) for row in reader if any(map(str.strip, row))]
    for line, row in rows[1:]:
        if len(row) < len(header):
            raise ManifestError(
                f"{path}, line {line}: {len(row)} values, expected {len(header)}: {','.join(header)}"
            )
    return [(line, dict(zip(header, row, strict=False))) for line, row in rows[1:]]


def _first_line(path: Path) -> str:
    return next((text for _, text in read_lines(path)), "")


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def read_json(path: Path, kind: type) -> Any:
    """A JSON file that holds a `list` or a `dict`; ManifestError names the line of what is wrong."""
    try:
        values = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ManifestError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(values, kind):
        raise ManifestError(f"{path}: holds a {type(values).__name__}, expected a {kind.__name__}")
    return values


def list_path(text: str) -> str:
    r"""A path as a list writes it, in POSIX form and relative.

    >>> list_path(r".\Archery\v_Archery_g01_c01.avi")
    'Archery/v_Archery_g01_c01.avi'
    """
    parts = PurePosixPath(text.strip().replace("\\", "/")).parts
    return "/".join(part for part in parts if part not in ("/", "//"))


def split_label(text: str) -> tuple[str, int | None]:
    """Path and label of a line `path [label]`, where the path may hold blanks.

    The last word is a label only if it is an integer and what stands before it is a path.

    >>> split_label("Archery/my clip 2.avi 3"), split_label("Archery/my clip 2.avi")
    (('Archery/my clip 2.avi', 3), ('Archery/my clip 2.avi', None))
    """
    match = re.fullmatch(r"(.*\S)\s+(\d+)", text)
    if match is None or not ("/" in match[1] or "\\" in match[1] or _suffix(match[1])):
        return list_path(text), None
    return list_path(match[1]), int(match[2])


def parse_part(text: str, place: str) -> Part | None:
    """`train`, `val` or `test` from any of their common names; None for an empty field."""
    if text and text.lower() not in _PARTS:
        raise ManifestError(f"{place}: {text!r} is no part of a split, expected train, val or test")
    return _PARTS.get(text.lower())


def part_of_folder(name: str) -> Part | None:
    """The part of a split that a folder's name stands for, if it is one."""
    return _PARTS.get(name.lower())


def stem_path(video: str) -> str:
    """A video's path without its suffix."""
    return str(PurePosixPath(video).with_suffix(""))


def _suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in MEDIA_SUFFIXES else ""


def fold(text: str) -> str:
    """The same for names that differ only in case, or in how a system writes accents."""
    return unicodedata.normalize("NFC", text).casefold()


def _fold_stem(text: str) -> str:
    return fold(text[: len(text) - len(_suffix(text))])


@dataclass(frozen=True, slots=True)
class Matches:
    """Which video each entry of the lists means."""

    pairs: list[tuple[Entry, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Videos as the lists name them that are not there, each once."""
    warnings: list[str] = field(default_factory=list)


Match = Callable[[Sequence[Entry], Sequence[str]], Matches]

_SPELLINGS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("", str),
    ("in case or accents", fold),
    ("in their suffix", _fold_stem),
)
"""How two spellings may differ and still mean one video, the strictest first."""


def match_paths(entries: Sequence[Entry], videos: Sequence[str]) -> Matches:
    """Match entries `folder/name` by the last two parts of the videos' paths.

    Exactly first; what then is left on both sides without case, then without suffix, with a
    warning. A video outside any folder, and an entry without one, match by the name alone.
    ManifestError where several videos fit equally well.
    """
    of_entry: dict[int, str] = {}
    warnings = []
    for difference, spell in _SPELLINGS:
        left = [place for place in range(len(entries)) if place not in of_entry]
        if not left:
            break
        by_key = _by_key(videos, spell)
        taken = {(entries[place].split, video) for place, video in of_entry.items()}
        found = {place: _look_up(entries[place], by_key, spell, taken) for place in left}
        new = {place: video for place, video in found.items() if video is not None}
        of_entry |= new
        if new and difference:
            warnings.append(_say_loose(difference, [(entries[place], video) for place, video in new.items()]))
    missing = dict.fromkeys(entry.video for place, entry in enumerate(entries) if place not in of_entry)
    return Matches([(entries[place], of_entry[place]) for place in sorted(of_entry)], list(missing), warnings)


def _by_key(videos: Sequence[str], spell: Callable[[str], str]) -> dict[str, list[str]]:
    by_key: dict[str, list[str]] = {}
    for video in videos:
        *_, name = parts = video.split("/")
        for key in {video, "/".join(parts[-2:]), f"*/{name}"}:
            by_key.setdefault(spell(key), []).append(video)
    return by_key


def _look_up(
    entry: Entry, by_key: dict[str, list[str]], spell: Callable[[str], str], taken: set[tuple[str, str]]
) -> str | None:
    *folders, name = entry.video.split("/")
    keys = [entry.video, "/".join((*folders, name)[-2:]), name] if folders else [name, f"*/{name}"]
    for key in keys:
        fitting = [video for video in by_key.get(spell(key), []) if (entry.split, video) not in taken]
        if len(fitting) > 1:
            raise ManifestError(
                f"{entry.place}: {entry.video!r} may mean {' or '.join(map(repr, fitting[:3]))}: "
                "spell it as one of them is spelt"
            )
        if fitting:
            return fitting[0]
    return None


def _say_loose(difference: str, pairs: list[tuple[Entry, str]]) -> str:
    entry, video = pairs[0]
    return (
        f"{len(pairs)} entries and their videos differ {difference}, "
        f"first {entry.video!r} ({entry.place}) for {video!r}"
    )


def match_stems(entries: Sequence[Entry], videos: Sequence[str]) -> Matches:
    """Match entries that are identifiers: the video's name without suffix, in any folder, exactly."""
    by_stem: dict[str, list[str]] = {}
    for video in videos:
        by_stem.setdefault(PurePosixPath(video).stem, []).append(video)
    pairs = [(entry, video) for entry in entries for video in by_stem.get(entry.video, [])]
    missing = dict.fromkeys(entry.video for entry in entries if entry.video not in by_stem)
    return Matches(pairs, list(missing))


def spell_class(name: str, classes: Iterable[str]) -> str | None:
    """The class of a list that a folder's name means: exactly, else the only one that differs
    in case, else the only one that differs in blanks and signs; None where there is none.

    ManifestError where several fit equally well.

    >>> spell_class("hurling_sport", ["hurling (sport)", "surfing"])
    'hurling (sport)'
    """
    for spell in (str, fold, _letters):
        fitting = [known for known in classes if spell(known) == spell(name)]
        if len(fitting) > 1:
            raise ManifestError(
                f"class {name!r} may mean {' or '.join(map(repr, fitting))}: rename its folder"
            )
        if fitting:
            return fitting[0]
    return None


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", fold(text))
