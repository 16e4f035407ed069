import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ManifestError
from pipeline.offline.annotate import Annotation
from pipeline.offline.memory import (
    DATASET_JSON,
    DatasetMemory,
    draw_sides,
    order_classes,
    read_memory,
    write_memory,
)

seeds = st.integers(0, 2**32)
fractions = st.floats(0.05, 0.95)
own_groups = st.dictionaries(st.sampled_from("ABCDE"), st.integers(1, 30), min_size=1).map(
    lambda counts: [(name, f"{name}_g{k}") for name, count in counts.items() for k in range(count)]
)


def by_class(pairs) -> dict[str, list[str]]:
    names = defaultdict(list)
    for class_name, group in pairs:
        names[class_name].append(group)
    return names


@given(pairs=own_groups, seed=seeds, fraction=fractions)
def test_each_class_with_two_groups_has_both_sides_in_about_the_share_asked_for(pairs, seed, fraction):
    sides = draw_sides(pairs, seed=seed, test_fraction=fraction)
    assert sides.keys() == {group for _, group in pairs}
    for groups in by_class(pairs).values():
        num_test = sum(sides[group] == "test" for group in groups)
        if len(groups) == 1:
            assert num_test == 0
        else:
            assert 1 <= num_test <= len(groups) - 1
            assert abs(num_test - fraction * len(groups)) <= 1


@given(pairs=own_groups, seed=seeds, rng=st.randoms())
def test_the_order_of_the_groups_does_not_matter(pairs, seed, rng):
    shuffled = rng.sample(pairs, len(pairs))
    assert draw_sides(pairs, seed=seed, test_fraction=0.25) == draw_sides(
        shuffled, seed=seed, test_fraction=0.25
    )


@given(pairs=own_groups, seed=seeds, data=st.data())
def test_groups_that_come_later_move_no_side(pairs, seed, data):
    first = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    before = draw_sides(first, seed=seed, test_fraction=0.25)
    after = draw_sides(pairs, seed=seed, test_fraction=0.25, keep=before)
    assert {group: after[group] for group in before} == before
    for groups in by_class(pairs).values():
        if len(groups) > 1:
            assert {after[group] for group in groups} == {"train", "test"}


def test_another_seed_draws_other_groups():
    pairs = [("A", f"A_g{k:02d}") for k in range(25)]
    drawn = {tuple(sorted(draw_sides(pairs, seed=seed, test_fraction=0.25).items())) for seed in range(5)}
    assert len(drawn) == 5


def test_a_group_that_several_classes_share_is_on_one_side_of_all():
    pairs = [(name, f"person{k}") for name in ("Run", "Walk", "Sit") for k in range(8)]
    sides = draw_sides(pairs, seed=0, test_fraction=0.25)
    assert sorted(sides) == [f"person{k}" for k in range(8)]
    assert sum(side == "test" for side in sides.values()) == 2


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 25.0])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(ValueError, match="test_fraction must lie between 0 and 1"):
        draw_sides([("A", "g")], seed=0, test_fraction=fraction)


def annotation(class_names, classes=None, *, official=False) -> Annotation:
    return Annotation(
        layout="folders",
        classes=classes,
        official=official,
        class_of={f"{name}/x.avi": name for name in class_names},
        group_of={},
        splits={},
        leaks_stand=False,
        missing=(),
        unlisted=(),
        unclassed=(),
        warnings=(),
    )


def test_a_class_added_later_comes_after_those_that_have_labels():
    first = order_classes(annotation("CA"), ())
    assert first == ("A", "C")
    assert order_classes(annotation("ABC"), first) == ("A", "C", "B")


def test_a_class_that_lost_its_videos_keeps_its_label():
    assert order_classes(annotation("CD"), ("A", "C")) == ("A", "C", "D")


def test_an_official_list_goes_first_and_in_its_order():
    official = annotation("AX", ("B", "A"), official=True)
    assert order_classes(official, ()) == ("B", "A", "X")
    assert order_classes(official, ("X", "W", "b")) == ("B", "A", "X", "W")


def test_classes_that_a_list_names_without_an_order_follow_what_is_remembered():
    listed = annotation("D", ("A", "B", "D"))
    assert order_classes(listed, ()) == ("A", "B", "D")
    assert order_classes(listed, ("D",)) == ("D", "A", "B")


def test_memory_comes_back_as_it_was_written(tmp_path):
    assert read_memory(tmp_path) == DatasetMemory()
    memory = DatasetMemory(classes=("Ä b", "A"), seed=3, test_fraction=0.5, sides={"g": "test"})
    write_memory(tmp_path, memory)
    assert read_memory(tmp_path) == memory


def test_memory_that_says_so_already_is_not_written_again(tmp_path):
    memory = DatasetMemory(classes=("A",))
    write_memory(tmp_path, memory)
    path = tmp_path / DATASET_JSON
    before = path.stat()
    write_memory(tmp_path, memory)
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "classes": []}',
        '{"format": 1, "classes": [], "colour": 1}',
        json.dumps({"format": 1, "classes": [], "sides": {"g": "val"}}),
    ],
)
def test_memory_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / DATASET_JSON).write_text(text)
    with pytest.raises(ManifestError, match=r"dataset\.json cannot be read .*delete it"):
        read_memory(tmp_path)
