import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import PipelineError
from scripts import bench, run
from scripts.bench_plot import write_plot
from scripts.bench_storage import StorageBench
from tests.test_bench_online import write_moving

SPEEDS = {"offline": "frames_per_s", "online": "clips_per_s"}


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    write_moving(folder / "A" / "v_A_g01_c01.mkv", frames=20)
    return folder


@pytest.mark.slow
def test_every_way_of_storing_frames_is_measured_and_drawn(tmp_path, clips, capsys):
    options = ["--storage-sides", "32", "500", "--storage-qualities", "60", "95", "--storage-workers", "1"]
    files = ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    with pytest.raises(SystemExit, match="0"):
        run(
            bench.main,
            [
                *("storage", "--rounds", "1", "--videos", str(clips), "--work-dir", str(tmp_path / "work")),
                *("--storage-clips", "4", "--storage-size-px", "16", *options, *files),
            ],
        )
    assert list((tmp_path / "work").iterdir()) == []
    report = json.loads((tmp_path / "s.json").read_text())
    kinds = [(row["side"], row["quality"]) for row in report["rows"]]
    assert kinds == [(None, 60), (None, 95), (32, 60), (32, 95)]
    by_kind = dict(zip(kinds, report["rows"], strict=True))
    for side in (None, 32):
        low, high = by_kind[side, 60], by_kind[side, 95]
        assert low["bytes_per_frame"] < high["bytes_per_frame"]
        assert low["psnr_db"] < high["psnr_db"]
    assert by_kind[32, 95]["bytes_per_frame"] < by_kind[None, 95]["bytes_per_frame"]
    assert report["ratios"]["native_q95"] == 1
    printed = capsys.readouterr().out
    assert "Short side 500: the videos are no larger, so as native." in printed
    with Image.open(tmp_path / "s.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10


def test_a_panel_is_drawn_for_every_bench(tmp_path):
    reports = [
        {"bench": bench, "rows": [{"name": "ours", key: 20.0}, {"name": "decord", key: 0.0}]}
        for bench, key in SPEEDS.items()
    ]
    reports += [
        {"bench": "memory", "rows": [{"kind": "ours", "ranks": 1, "workers": 2, "private_mb": 300.0}]},
        {"bench": "scale", "rows": [{"videos": 10**n, "clip_us": 5000.0} for n in (3, 4)]},
    ]
    write_plot(tmp_path / "all.svg", reports)
    text = (tmp_path / "all.svg").read_text()
    assert text.count("<!-- offline: frames/s -->") == 1
    assert "<!-- not measured -->" in text


def test_a_kind_of_picture_that_is_not_known_is_said_in_a_line(tmp_path):
    with pytest.raises(PipelineError, match=r"no plot at .*bench\.xyz"):
        write_plot(tmp_path / "bench.xyz", [{"bench": "scale", "rows": [{"videos": 1, "clip_us": 1.0}]}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"storage_workers": 0}, {"storage_qualities": (0,)}, {"storage_sides": (0,)}]
)
def test_numbers_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        StorageBench(**options)
