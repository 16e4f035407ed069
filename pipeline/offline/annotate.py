"""What lists and folders say about the videos that are there: class, group and side of each."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ManifestError
from pipeline.manifest import Side
from pipeline.offline.layouts import LAYOUTS, SplitLists
from pipeline.offline.lists import Entry, Part, find_lists, fold, spell_class


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """What lists and folders say about a dataset's videos."""

    layout: str
    classes: tuple[str, ...] | None
    """All classes that the lists name, in order; None where they name none."""
    official: bool
    """Whether `classes` is the dataset's own order of labels, which no other list changes."""
    class_of: Mapping[str, str]
    """Class of each video; a video without one has no place in a manifest."""
    group_of: Mapping[str, str]
    """Group of each video that has a class."""
    splits: Mapping[str, Mapping[str, Side]]
    """For each column, like `split01`, the side of each video that its lists name."""
    leaks_stand: bool
    """Whether a group on both sides is the choice of the dataset's authors, and no mistake."""
    missing: tuple[str, ...]
    """Listed, but not there: as the lists name them, each once."""
    unlisted: tuple[str, ...]
    """There, but in no list; empty where there are no lists."""
    unclassed: tuple[str, ...]
    """Videos that neither a list nor a folder gives a class."""
    warnings: tuple[str, ...]


def annotate(videos: Sequence[str], splits_root: Path, *, layout: str = "auto") -> Annotation:
    """Hold the lists below `splits_root` against the videos, by the layout named or found.

    Which class a video has: its folder's, where the lists know the folder's name or name no
    classes; else the one that the lists give the video; else its folder's after all. A user's CSV
    goes before the folder. A name is spelt as in the list of classes, so that a folder and a list
    that are spelt apart mean one class. ManifestError for lists that cannot be read or contradict
    each other.
    """
    name, lists, unread = choose_layout(splits_root, layout)
    said = LAYOUTS[name].read(lists, videos)
    matches = said.match(said.entries, videos)
    speller = _Speller(said.classes)
    listed = _listed_classes(matches.pairs, speller)
    class_of = {video: _class_of(video, listed.get(video), said, speller) for video in videos}
    classed = {video: class_name for video, class_name in class_of.items() if class_name is not None}
    groups = {video: entry.group for entry, video in matches.pairs if entry.group is not None}
    return Annotation(
        layout=name,
        classes=None if said.classes is None else tuple(said.classes),
        official=said.official,
        class_of=classed,
        group_of={video: groups.get(video) or said.group(video, classed[video]) for video in classed},
        splits=_splits(said.entries, matches.pairs),
        leaks_stand=said.leaks_stand,
        missing=tuple(matches.missing),
        unlisted=tuple(video for video in videos if said.entries and video not in listed),
        unclassed=tuple(video for video in videos if video not in classed),
        warnings=(
            *(
                [f"{len(unread)} files are no lists of {name} and not read, first {unread[0]}"]
                if unread
                else []
            ),
            *said.warnings,
            *matches.warnings,
            *_class_warnings(classed, listed, said.classes, speller),
            *_one_sided(said.entries),
        ),
    )


def choose_layout(splits_root: Path, layout: str = "auto") -> tuple[str, list[Path], list[Path]]:
    """A layout's name, its lists below `splits_root`, and the lists there that are not its.

    `auto` takes the one layout that knows lists that are there, and `folders` where there are none;
    ManifestError where several do, or none does, since a random split in place of one that was
    meant would go unseen.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise ManifestError(f"no layout {layout!r}: expected auto, {', '.join(LAYOUTS)}")
    there = find_lists(splits_root)
    known = {name: [path for path in there if LAYOUTS[name].is_list(path)] for name in LAYOUTS}
    if layout == "auto":
        layout = _only_layout([name for name, lists in known.items() if lists], there, splits_root)
    elif layout != "folders" and not known[layout]:
        raise ManifestError(
            f"no list of layout {layout} below {splits_root}: expected {LAYOUTS[layout].expects}"
        )
    return layout, known[layout], [path for path in there if path not in known[layout]]


def _only_layout(fitting: list[str], there: list[Path], splits_root: Path) -> str:
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and not there:
        return "folders"
    found = f"lists of {' and '.join(fitting)}" if fitting else f"no list that is known, but {there[0].name}"
    known = "; ".join(f"{name}: {layout.expects}" for name, layout in LAYOUTS.items())
    raise ManifestError(f"{splits_root} holds {found}: name one with --layout ({known})")


class _Speller:
    """The class of a list that a name means, asked once for each name."""

    def __init__(self, classes: Sequence[str] | None) -> None:
        self._classes = classes or ()
        self._known: dict[str, str | None] = {}

    def __call__(self, name: str) -> str | None:
        if name not in self._known:
            self._known[name] = spell_class(name, self._classes)
        return self._known[name]


def _listed_classes(pairs: Iterable[tuple[Entry, str]], speller: _Speller) -> dict[str, str | None]:
    """For each video that is listed, the class that the lists give it; None where they give none."""
    listed: dict[str, str | None] = {}
    first: dict[str, Entry] = {}
    for entry, video in pairs:
        known = listed.setdefault(video, None)
        if entry.class_name is None:
            continue
        name = speller(entry.class_name) or entry.class_name
        if known is None:
            listed[video], first[video] = name, entry
        elif fold(known) != fold(name):
            raise ManifestError(
                f"{entry.place}: {video!r} is of class {name!r}, but of {known!r} in {first[video].place}: "
                "keep one"
            )
    return listed


def _class_of(video: str, listed: str | None, said: SplitLists, speller: _Speller) -> str | None:
    folders = video.split("/")[-2::-1]  # from the nearest outwards
    known = next((name for folder in folders if (name := speller(folder)) is not None), None)
    own = folders[0] if folders else None
    if said.classes is None:
        return own or listed
    names = (listed, known) if said.list_decides_class else (known, listed)
    return names[0] or names[1] or (own if said.any_folder_is_class else None)


def _splits(entries: Iterable[Entry], pairs: Iterable[tuple[Entry, str]]) -> dict[str, dict[str, Side]]:
    """The columns of the lists: `val` is the test side, as published results use it.

    Where a split has both, `test` gets a further column with the same train side. Columns depend
    on the lists alone, not on which videos are there.
    """
    parts: dict[str, set[Part]] = {}
    for entry in entries:
        if entry.part is not None:
            parts.setdefault(entry.split, set()).add(entry.part)
    of_split = _parts_by_split(pairs)
    columns: dict[str, dict[str, Side]] = {}
    further = max((int(split[5:]) for split in parts), default=0)
    for split, kinds in sorted(parts.items()):
        columns[split] = _side(of_split[split], "val" if "val" in kinds else "test")
        if {"val", "test"} <= kinds:
            further += 1
            columns[f"split{further:02d}"] = _side(of_split[split], "test")
    return columns


def _side(of_video: Mapping[str, Part], held_out: Part) -> dict[str, Side]:
    sides: dict[Part, Side] = {"train": "train", held_out: "test"}
    return {video: sides[part] for video, part in of_video.items() if part in sides}


def _parts_by_split(pairs: Iterable[tuple[Entry, str]]) -> dict[str, dict[str, Part]]:
    of_split: dict[str, dict[str, Part]] = defaultdict(dict)
    first: dict[tuple[str, str], Entry] = {}
    for entry, video in pairs:
        if entry.part is None:
            continue
        if of_split[entry.split].setdefault(video, entry.part) != entry.part:
            other = first[entry.split, video]
            raise ManifestError(
                f"{entry.place}: {video!r} is {entry.part}, but {other.part} in {other.place}: keep one"
            )
        first.setdefault((entry.split, video), entry)
    return of_split


def _class_warnings(
    class_of: Mapping[str, str],
    listed: Mapping[str, str | None],
    classes: Sequence[str] | None,
    speller: _Speller,
) -> list[str]:
    if classes is None:
        return []
    warnings = []
    folders = {video: video.split("/")[-2] for video in class_of if "/" in video}
    respelt = {folder: name for folder in folders.values() if (name := speller(folder)) not in (None, folder)}
    if respelt:
        folder = min(respelt)
        warnings.append(
            f"{len(respelt)} folders are spelt apart from their class in the lists, which counts, "
            f"first {folder!r} for {respelt[folder]!r}"
        )
    unknown = sorted(set(class_of.values()) - set(classes))
    if unknown:
        warnings.append(
            f"{len(unknown)} classes are in no list and follow after those that are, first {unknown[0]!r}"
        )
    moved = [video for video, name in class_of.items() if listed.get(video) not in (None, name)]
    if moved:
        warnings.append(
            f"{len(moved)} videos lie in the folder of another class than the lists say, first {moved[0]!r} "
            f"({listed[moved[0]]!r}): the folder decides"
        )
    return warnings


def _one_sided(entries: Iterable[Entry]) -> list[str]:
    parts: dict[str, set[Part | None]] = defaultdict(set)
    for entry in entries:
        parts[entry.split].add(entry.part)
    warnings = []
    for split, kinds in sorted(parts.items()):
        if kinds - {None} and "train" not in kinds:
            warnings.append(f"{split}: no list names a video to train on")
        if "train" in kinds and not kinds & {"val", "test"}:
            warnings.append(f"{split}: no list names a video to test on")
    return warnings
