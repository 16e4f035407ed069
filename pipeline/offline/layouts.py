"""Where a dataset keeps its videos, classes, groups and official lists: one small function each.

A layout reads the files below `splits/` into a `SplitLists`. A new layout is one such function, and
a row in `LAYOUTS`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipeline.errors import ManifestError, PipelineError
from pipeline.files import MEDIA_SUFFIXES
from pipeline.offline.lists import (
    Entry,
    Match,
    Matches,
    Part,
    list_path,
    match_paths,
    match_stems,
    parse_part,
    part_of_folder,
    read_header,
    read_json,
    read_lines,
    read_rows,
    spell_class,
    split_label,
    stem_path,
    walk_files,
)

_CLASS_INDEX = re.compile(r"classind\.txt", re.IGNORECASE)
_UCF_LIST = re.compile(r"(train|test)list_?(\d+)\.txt", re.IGNORECASE)
_UCF_PART: dict[str, Part] = {"train": "train", "test": "test"}
_UCF_NAME = re.compile(r"v_.+_g(\d+)_c\d+", re.IGNORECASE)
_HMDB_LIST = re.compile(r"(.+)_test_split(\d+)\.txt")
_HMDB_PART: dict[str, Part | None] = {"0": None, "1": "train", "2": "test"}
_SSV2_LABELS = re.compile(r".*labels.*\.json", re.IGNORECASE)

Group = Callable[[str, str], str]
"""(video, its class) -> its group."""


def group_by_name(video: str, class_name: str) -> str:
    """The group that a name like UCF101's says, else the video's own path without its suffix.

    >>> group_by_name("Punch/v_Punch_g01_c03.avi", "Punch"), group_by_name("Punch/one.mp4", "Punch")
    ('Punch_g01', 'Punch/one')
    """
    match = _UCF_NAME.fullmatch(PurePosixPath(video).stem)
    return f"{class_name}_g{match[1]}" if match else stem_path(video)


class FoundFiles(NamedTuple):
    """What lies below a root of videos; paths relative to it, POSIX, sorted."""

    videos: list[str]
    ignored: list[str]
    """Files that do not look like videos, or whose names are no UTF-8 and cannot be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLists:
    """What a dataset's lists say, before they are held against its videos."""

    entries: Sequence[Entry] = ()
    classes: Sequence[str] | None = None
    """Names of all classes; in the order of the labels where that is `official`."""
    official: bool = False
    """Whether the order of the classes is the dataset's own, which no class that comes later moves."""
    list_decides_class: bool = False
    """Whether a list's class goes before the folder's."""
    any_folder_is_class: bool = True
    """Whether a folder that the list of classes does not know is a class all the same."""
    leaks_stand: bool = False
    """Whether a group on both sides is the choice of the dataset's authors, and no mistake."""
    match: Match = match_paths
    group: Group = group_by_name
    warnings: Sequence[str] = ()


def find_dataset(data: Path, dataset: str) -> Path:
    """The folder of a dataset below the root of data; PipelineError names those that exist."""
    folder = data / dataset
    if dataset in ("", ".", "..") or Path(dataset).name != dataset or not folder.is_dir():
        there = sorted(path.name for path in data.iterdir() if path.is_dir()) if data.is_dir() else []
        raise PipelineError(
            f"no dataset {dataset!r}: {folder} is no folder, below {data} there is "
            f"{', '.join(there) or 'none'}; videos are expected as {folder}/videos/<Class>/<video>.avi"
        )
    return folder


def find_videos(root: Path) -> FoundFiles:
    """Everything below a root of videos, through linked folders too; hidden litter is left out.

    What is a candidate its suffix decides, in any case. PipelineError says where videos are
    expected where the folder is missing or holds none.
    """
    expected = f"videos are expected as {root}/<Class>/<video>.avi"
    if not root.is_dir():
        raise PipelineError(f"{root} is no folder: {expected}")
    videos: list[str] = []
    ignored: list[str] = []
    for file in walk_files(root):
        is_video = file.suffix.lower() in MEDIA_SUFFIXES and _is_utf8(str(file))
        (videos if is_video else ignored).append(str(file))
    if not videos:
        raise PipelineError(f"no video below {root} ({len(ignored)} other files): {expected}")
    return FoundFiles(sorted(videos), sorted(ignored))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _each(lists: Sequence[Path], pattern: re.Pattern[str]) -> Iterator[tuple[tuple[str, ...], Path]]:
    """What a pattern finds in the lists' names, and the list; of equal copies in several folders, one."""
    found: dict[tuple[str, ...], Path] = {}
    for path in lists:
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        first = found.setdefault(match.groups(), path)
        if path != first and read_lines(path) != read_lines(first):
            raise ManifestError(f"{first} and {path} are different lists of one name: keep one of them")
    yield from sorted(found.items())


def _first(what: str, places: Sequence[str]) -> list[str]:
    return [f"{len(places)} {what}; first: {places[0]}"] if places else []


def read_ucf101(lists: Sequence[Path], videos: Sequence[str]) -> SplitLists:
    """`classInd.txt`, `trainlist01.txt`, `testlist01.txt`, ...; lists name `<Class>/<video>.avi [label]`."""
    classes = next((_read_class_index(path) for _, path in _each(lists, _CLASS_INDEX)), None)
    numbers = {name: number for number, name in enumerate(classes or (), start=1)}
    entries, contradicting = [], []
    for (part, number), path in _each(lists, _UCF_LIST):
        for line, text in read_lines(path):
            video, label = split_label(text)
            class_name = video.split("/")[-2] if "/" in video else None
            entry = Entry(path, line, video, f"split{int(number):02d}", _UCF_PART[part.lower()], class_name)
            entries.append(entry)
            if label is not None and numbers.get(class_name or "", label) != label:
                contradicting.append(f"{entry.place} gives {video!r} label {label}")
    return SplitLists(
        entries=entries,
        classes=classes,
        official=classes is not None,
        warnings=_first("labels do not agree with classInd.txt; the folder decides", contradicting),
    )


def _read_class_index(path: Path) -> list[str]:
    """Names by their number, which counts from 1, or from 0, without a gap."""
    names: dict[int, str] = {}
    for line, text in read_lines(path):
        match = re.fullmatch(r"(\d+)[\s,:]+(.+)", text)
        if match is None or int(match[1]) in names or match[2] in names.values():
            raise ManifestError(
                f"{path}, line {line}: {text!r}, expected `<number> <class>` with each number and class once"
            )
        names[int(match[1])] = match[2]
    numbers = sorted(names)
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] > 1:
        raise ManifestError(f"{path}: numbers {numbers[:3]}... have a gap, expected 1, 2, 3 and so on")
    return [names[number] for number in numbers]


def read_hmdb51(lists: Sequence[Path], videos: Sequence[str]) -> SplitLists:
    """`<class>_test_split[1-3].txt`, whose lines are `<video> <id>`: 1 train, 2 test, 0 unused."""
    entries = []
    for (class_name, number), path in _each(lists, _HMDB_LIST):
        for line, text in read_lines(path):
            match = re.fullmatch(r"(.*\S)\s+([012])", text)
            if match is None:
                raise ManifestError(f"{path}, line {line}: {text!r}, expected `<video> <0, 1 or 2>`")
            video, split = f"{class_name}/{list_path(match[1])}", f"split{int(number):02d}"
            entries.append(Entry(path, line, video, split, _HMDB_PART[match[2]], class_name))
    return SplitLists(
        entries=entries,
        classes=sorted({entry.class_name for entry in entries if entry.class_name}),
        official=True,
        leaks_stand=True,
        group=_film,
    )


def _film(video: str, class_name: str) -> str:
    # <film>_<class>_<body part>_<camera>_<people>_<view>_<quality>_<number>.avi
    stem = PurePosixPath(video).stem
    end = stem.lower().rfind(f"_{class_name.lower()}_")
    return stem[:end] if end > 0 else group_by_name(video, class_name)


def read_kinetics(lists: Sequence[Path], videos: Sequence[str]) -> SplitLists:
    """CSV files `label,youtube_id,time_start,time_end,split`; clips of one film are one group."""
    entries = []
    for path in lists:
        for line, row in read_rows(path):
            try:
                start, end = (int(float(row[name])) for name in ("time_start", "time_end"))
            except (KeyError, ValueError) as error:
                raise ManifestError(
                    f"{path}, line {line}: no whole seconds ({error}), "
                    "expected label,youtube_id,time_start,time_end,split"
                ) from error
            film = row["youtube_id"]
            part = parse_part(row.get("split", ""), f"{path}, line {line}") or _part_in_name(path)
            clip, class_name = f"{film}_{start:06d}_{end:06d}", row.get("label") or None
            # A test part without labels is listed, and on no side: nothing can be measured on it.
            part = part if class_name else None
            entries.append(Entry(path, line, clip, "split01", part, class_name, film))
    return SplitLists(
        entries=entries,
        classes=sorted({entry.class_name for entry in entries if entry.class_name}),
        any_folder_is_class=False,
        leaks_stand=True,
        match=_match_films,
    )


def _match_films(entries: Sequence[Entry], videos: Sequence[str]) -> Matches:
    """Files named `<id>_<start>_<end>` or `<id>`, in any folder. Never without case: in an id it counts."""
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        for name in {entry.video, entry.group or entry.video}:
            by_name.setdefault(name, []).append(entry)
    pairs, unclear = [], []
    for video in videos:
        *_, folder, name = ("", *video.split("/"))
        fitting = by_name.get(stem_path(name), [])
        if len(fitting) > 1:
            in_folder = [entry for entry in fitting if spell_class(folder, [entry.class_name or ""])]
            fitting = in_folder or fitting
        if len({(entry.class_name, entry.part) for entry in fitting}) > 1:
            unclear.append(f"{video!r} may be {fitting[0].video} or {fitting[1].video}")
        else:
            pairs += [(entry, video) for entry in fitting]
    met = {entry.video for entry, _ in pairs}
    missing = dict.fromkeys(entry.video for entry in entries if entry.video not in met)
    return Matches(pairs, list(missing), _first("videos may be several clips: add the seconds", unclear))


def read_something_something_v2(lists: Sequence[Path], videos: Sequence[str]) -> SplitLists:
    """A JSON file of labels, and for each part one of `{"id": ..., "template": ...}`."""
    classes = next((_read_class_numbers(path) for _, path in _each(lists, _SSV2_LABELS)), None)
    if classes is None:
        raise ManifestError(f"no labels beside {lists[0]}: expected something-something-v2-labels.json")
    entries = []
    for path in lists:
        if _SSV2_LABELS.fullmatch(path.name):
            continue
        for place, item in enumerate(read_json(path, list), start=1):
            if not isinstance(item, dict) or "id" not in item:
                raise ManifestError(
                    f'{path}, entry {place}: {item!r}, expected {{"id": ..., "template": ...}}'
                )
            class_name = re.sub(r"[\[\]]", "", item.get("template") or "") or None
            part = _part_in_name(path) if class_name else None  # the test part has no labels
            entries.append(Entry(path, place, str(item["id"]), "split01", part, class_name))
    return SplitLists(
        entries=entries,
        classes=classes,
        official=True,
        any_folder_is_class=False,
        leaks_stand=True,
        match=match_stems,
    )


def _read_class_numbers(path: Path) -> list[str]:
    """Names by their number, which is text in the official file and counts from 0."""
    numbers = read_json(path, dict)
    try:
        names = sorted(numbers, key=lambda name: int(numbers[name]))
        is_whole = [int(numbers[name]) for name in names] == list(range(len(names)))
    except (TypeError, ValueError) as error:
        raise ManifestError(f'{path}: expected {{"<class>": "<number>", ...}} ({error})') from error
    if not is_whole:
        raise ManifestError(f"{path}: numbers have a gap or stand twice, expected 0, 1, 2 and so on")
    return names


def read_csv(lists: Sequence[Path], videos: Sequence[str]) -> SplitLists:
    """A table with a header: `video`, and any of `class`, `group`, `split` (or `split01`, `split02`, ...)."""
    entries = []
    for path in lists:
        columns = [name for name in read_header(path) if re.fullmatch(r"split\d*", name)]
        for line, row in read_rows(path):
            if not row["video"]:
                raise ManifestError(f"{path}, line {line}: no video, expected its path")
            for column in columns or [""]:
                part = parse_part(row.get(column, ""), f"{path}, line {line}")
                split = f"split{int(column[5:] or 1):02d}"
                video, class_name, group = list_path(row["video"]), row.get("class"), row.get("group")
                entries.append(Entry(path, line, video, split, part, class_name or None, group or None))
    classes = sorted({entry.class_name for entry in entries if entry.class_name})
    return SplitLists(
        entries=entries,
        classes=classes or None,
        list_decides_class=True,
        any_folder_is_class=not classes,
    )


def read_folders(lists: Sequence[Path], videos: Sequence[str]) -> SplitLists:
    """No lists: `<Class>/<video>`, or `train/<Class>/<video>` and `test/<Class>/<video>`."""
    entries = []
    for place, video in enumerate(videos, start=1):
        top, *below = video.split("/")
        part = part_of_folder(top) if len(below) > 1 else None
        if part is None:
            return SplitLists()
        entries.append(Entry(Path(top), place, video, part=part))
    parts = {entry.part for entry in entries}
    return SplitLists(entries=entries if "train" in parts and len(parts) > 1 else ())


def _part_in_name(path: Path) -> Part | None:
    parts = map(part_of_folder, re.split(r"[\W_]+", path.stem))
    return next((part for part in parts if part), None)


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _is_json_part(path: Path) -> bool:
    return path.suffix.lower() == ".json" and _part_in_name(path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How to know a dataset's lists, and how to read them."""

    is_list: Callable[[Path], bool]
    read: Callable[[Sequence[Path], Sequence[str]], SplitLists]
    """(its lists, the videos that are there) -> what the lists say."""
    expects: str
    """Its lists in words."""


LAYOUTS: dict[str, Layout] = {
    "ucf101": Layout(
        is_list=lambda path: bool(_CLASS_INDEX.fullmatch(path.name) or _UCF_LIST.fullmatch(path.name)),
        read=read_ucf101,
        expects="classInd.txt, trainlist01.txt, testlist01.txt",
    ),
    "hmdb51": Layout(
        is_list=lambda path: bool(_HMDB_LIST.fullmatch(path.name)),
        read=read_hmdb51,
        expects="<class>_test_split1.txt",
    ),
    "kinetics": Layout(
        is_list=lambda path: _is_csv(path) and "youtube_id" in read_header(path),
        read=read_kinetics,
        expects="CSV files with label,youtube_id,time_start,time_end,split",
    ),
    "something_something_v2": Layout(
        is_list=lambda path: bool(_SSV2_LABELS.fullmatch(path.name)) or _is_json_part(path),
        read=read_something_something_v2,
        expects="something-something-v2-labels.json, -train.json, -validation.json",
    ),
    "csv": Layout(
        is_list=lambda path: _is_csv(path) and "video" in read_header(path),
        read=read_csv,
        expects="a CSV file with the header video,class[,split][,group]",
    ),
    "folders": Layout(is_list=lambda path: False, read=read_folders, expects="no lists"),
}
"""The layouts by the name of their option; `auto` chooses by the lists that are there."""
