"""What `bench caching` counts; never a speed, which is the machine's and not the code's."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.online import PackStore
from scripts import bench, run
from scripts.bench_caching import CachingBench, CachingRow, SlowStore, caching_json, format_caching
from tests.folders import write_dataset
from tests.videos import write_video

SPEEDS = {
    "decode each time": 10.0,
    "raw bytes": 20.0,
    "slow, as it is": 5.0,
    "slow, read ahead": 15.0,
    "fast, read ahead": 19.0,
}


def test_ratios_are_to_the_same_store_without_readers():
    rows = [
        CachingRow(name=name, what="", clips_per_s=speed, held_mb=1.0, distinct=0.5)
        for name, speed in SPEEDS.items()
    ]
    ratios = caching_json(rows)["ratios"]
    assert (ratios["read_ahead_slow"], ratios["read_ahead_fast"], ratios["raw bytes"]) == (3.0, 0.95, 2.0)
    line = format_caching(rows, CachingBench()).splitlines()[3]
    assert line.split() == ["raw", "bytes", "20.0", "2.00", "1.0", "50%"]


def test_a_slow_store_gives_the_bytes_of_the_one_behind_it(tmp_path):
    store = PackStore(write_dataset(tmp_path) / "pack")
    slow = SlowStore(store, 0.0)
    assert [*slow.read("A/one", [0, 2])] == store.read("A/one", [0, 2])
    np.testing.assert_array_equal(slow.times_us("A/one"), store.times_us("A/one"))


def test_the_diversity_that_each_way_leaves_is_counted(tmp_path):
    for number in range(2):
        write_video(tmp_path / "videos" / "A" / f"v_A_g{number:02d}_c01.avi", frames=31)
    options = ["--caching-workers", "0", "--caching-clips", "4", "--caching-readers", "2"]
    place = ["--videos", tmp_path / "videos", "--work-dir", tmp_path, "--json", tmp_path / "caching.json"]
    given = ["caching", *options, "--caching-latency-ms", "0", "--rounds", "1", *map(str, place)]
    with pytest.raises(SystemExit) as ended:
        run(bench.main, given)
    assert ended.value.code == 0
    rows = {row["name"]: row for row in json.loads(Path(tmp_path / "caching.json").read_text())["rows"]}
    distinct = {name: row["distinct"] for name, row in rows.items()}
    assert distinct.pop("augmented, 2") == 0.5
    assert distinct.pop("augmented, 4") == 0.25
    assert set(distinct.values()) == {1.0}
    kept = rows["augmented, 2"]["held_mb"] - rows["raw bytes"]["held_mb"]
    assert kept == pytest.approx(4 * 16 * 112 * 112 * 3 / 1e6, rel=0.01)


@pytest.mark.parametrize("wrong", [{"caching_epochs": 0}, {"caching_reuse": (0,)}, {"caching_workers": -1}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="all numbers"):
        CachingBench(**wrong)
