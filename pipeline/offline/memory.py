"""What must not change when videos are added: the labels of the classes, and the sides of a random split.

Kept as dataset.json in the frames root, beside the frames that it goes with.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.errors import ManifestError
from pipeline.files import write_text
from pipeline.manifest import SIDES, Side, read_manifest
from pipeline.offline.annotate import Annotation
from pipeline.offline.lists import fold

DATASET_JSON = "dataset.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMemory:
    """What earlier builds of a manifest decided."""

    classes: tuple[str, ...] = ()
    """In the order of the labels."""
    seed: int | None = None
    """Of the random split; None where none was drawn yet."""
    test_fraction: float | None = None
    """Of each class's groups, 0 to 1; None where none was drawn yet."""
    sides: Mapping[str, Side] = field(default_factory=dict)
    """For each group that the random split has met."""


def read_memory(frames_root: Path) -> DatasetMemory:
    """What earlier builds decided; empty where there was none. ManifestError where it cannot be read."""
    path = frames_root / DATASET_JSON
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT_VERSION:
            raise ValueError(f"another format than {FORMAT_VERSION}")
        memory = DatasetMemory(**{**values, "classes": tuple(values["classes"])})
        if not set(memory.sides.values()) <= set(SIDES):
            raise ValueError("sides other than train and test")
    except FileNotFoundError:
        return DatasetMemory()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestError(
            f"{path} cannot be read ({error}): put a copy of it back, or delete it; "
            "labels then follow the manifest that is there, and a random split is drawn anew"
        ) from error
    return memory


def write_memory(frames_root: Path, memory: DatasetMemory) -> None:
    """Keep what was decided; a file that says so already is left alone. ManifestError where it cannot."""
    values = {"format": FORMAT_VERSION, **asdict(memory)}
    text = json.dumps(values, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    path = frames_root / DATASET_JSON
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    try:
        write_text(path, text)
    except OSError as error:
        raise ManifestError(
            f"{path} cannot be written ({error.strerror}), but it is what keeps labels the same later: "
            "make its folder writable"
        ) from error


def remembered_classes(memory: DatasetMemory, manifest_path: Path, *, dataset: str) -> tuple[str, ...]:
    """The class list so far: that of the dataset's manifest, then what only the frames root remembers."""
    if not manifest_path.exists():
        return memory.classes
    manifest = read_manifest(manifest_path)
    known = manifest.classes if manifest.dataset == dataset else ()
    return (*known, *(name for name in memory.classes if name not in known))


def order_classes(annotation: Annotation, remembered: Sequence[str]) -> tuple[str, ...]:
    """Names of all classes in the order of their labels.

    An official list goes first, in its own order. Then what is remembered, as it is, so that a
    label keeps its meaning; then, sorted, what is new. A class that lost its videos stays.
    """
    official = (annotation.classes or ()) if annotation.official else ()
    others = () if annotation.official else annotation.classes or ()
    spelt = {fold(name) for name in official}
    order = dict.fromkeys(official)
    order |= dict.fromkeys(name for name in remembered if fold(name) not in spelt)
    order |= dict.fromkeys(sorted({*others, *annotation.class_of.values()} - order.keys()))
    return tuple(order)


def draw_sides(
    groups: Iterable[tuple[str, str]],
    *,
    seed: int,
    test_fraction: float,
    keep: Mapping[str, Side] | None = None,
) -> dict[str, Side]:
    """A side of a random split for every group, out of (class name, group) pairs.

    Groups are drawn, never clips. Each class gives about `test_fraction` of its groups to the test
    side, and has one on each side where it has two; a class with one group trains. Groups of `keep`
    stay where they are and are handed on, so that a side outlives groups that come later. The same
    pairs in any order give the same sides.

    >>> sorted(draw_sides([("A", "A_g1"), ("A", "A_g2"), ("B", "B_g1")], seed=0, test_fraction=0.25).items())
    [('A_g1', 'train'), ('A_g2', 'test'), ('B_g1', 'train')]
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}")
    of_class: dict[str, set[str]] = {}
    for class_name, group in groups:
        of_class.setdefault(class_name, set()).add(group)
    sides = dict(keep or {})
    # Where classes share groups, those with few to choose from choose first.
    for class_name, names in sorted(of_class.items(), key=lambda item: (len(item[1]), item[0])):
        num_test = min(max(int(test_fraction * len(names) + 0.5), 1), len(names) - 1)
        num_test -= sum(sides.get(name) == "test" for name in names)
        new = sorted(names - sides.keys(), key=lambda name: _draw(seed, class_name, name))
        sides |= {name: "test" if place < num_test else "train" for place, name in enumerate(new)}
    return sides


def _draw(*key: object) -> bytes:
    # A hash and no generator: a group's draw depends on nothing but itself.
    return hashlib.sha256(json.dumps(key).encode()).digest()
