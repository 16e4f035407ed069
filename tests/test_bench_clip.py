import json
from pathlib import Path

import cv2
import pytest
import torch

from scripts import bench, run
from scripts.bench_clip import ClipBench, VariantRow, format_clip
from tests.test_bench_online import write_moving


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")  # of torchvision's own function
def test_every_part_of_the_work_is_timed_against_what_else_was_tried(tmp_path, capsys):
    write_moving(tmp_path / "videos" / "A" / "v_A_g01_c01.mkv", frames=20)
    threads = torch.get_num_threads(), cv2.getNumThreads()
    given = ("--rounds", "1", "--videos", str(tmp_path / "videos"), "--work-dir", str(tmp_path / "work"))
    options = ("--different-clips", "2", "--stored-short-side-px", "32")
    with pytest.raises(SystemExit, match="0"):
        run(bench.main, ["clip", *given, *options, "--json", str(tmp_path / "c.json")])
    assert (torch.get_num_threads(), cv2.getNumThreads()) == threads
    assert list(Path(tmp_path / "work").iterdir()) == []
    report = json.loads((tmp_path / "c.json").read_text())
    firsts = {row["part"]: row for row in reversed(report["rows"])}
    assert len(firsts) == 5
    assert all(row["ratio"] == 1 and row["us_per_clip"] > 0 for row in firsts.values())
    assert report["ratios"]["ceiling"] > 0
    assert "a clip of the dataset\n    whole frames, decoded, and no more" in capsys.readouterr().out


def test_a_part_is_named_once_above_its_variants():
    rows = [
        VariantRow(part=part, name=name, us_per_clip=1500.0, ratio=0.5)
        for part, name in (("resize", "one"), ("resize", "two"), ("decode", "one"))
    ]
    lines = [line.split() for line in format_clip(rows).splitlines()[2:]]
    figures = ["1,500", "0.50"]
    assert lines == [["resize"], ["one", *figures], ["two", *figures], ["decode"], ["one", *figures]]


def test_a_number_of_clips_below_one_is_refused():
    with pytest.raises(ValueError):
        ClipBench(different_clips=0)
