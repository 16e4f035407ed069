"""The online benches' arithmetic and shape; never a speed, which is the machine's and not the code's."""

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.online import AugmentSpec, ClipDataset, EpochSampler, WindowSpec
from scripts import bench, bench_memory, bench_online, bench_peers, run
from scripts.bench_clips import link_videos, make_long_videos, store_frames
from scripts.bench_common import Row, judge, make_row
from scripts.bench_memory import MemoryBench, MemoryRow
from scripts.bench_online import Contender, compare, make_plan
from scripts.bench_online_report import Likeness, OnlineBench, make_ratios, make_targets
from scripts.bench_scale import ScaleBench, ScaleRow
from tests.test_bench import timing

TINY = OnlineBench(clips_per_round=6, batch_size=2, clip_frames=4, size_px=16)


def write_moving(path: Path, *, frames: int, size: int = 64) -> Path:
    """A smooth pattern that moves to the right, lossless: each frame differs from its neighbours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    across = np.arange(size)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = size, size, "bgr0"
        for k in range(frames):
            row = 128 + 90 * np.sin(2 * np.pi * (across - 3 * k) / 32)
            picture = np.broadcast_to(row.astype(np.uint8)[None, :, None], (size, size, 3))
            video_frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="bgr24")
            container.mux(stream.encode(video_frame.reformat(format="bgr0")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    return [
        write_moving(folder / name / f"v_{name}_g01_c01.mkv", frames=n) for name, n in (("A", 9), ("B", 7))
    ]


@pytest.fixture(scope="module")
def stored(clips, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    link_videos(clips, folder / "videos")
    return store_frames(folder / "videos", folder / "native", quality=90)


@pytest.fixture
def plan(stored, tmp_path):
    return make_plan(stored, bench_online.draw_refs(stored.manifest, TINY), TINY, tmp_path)


def own_clips(stored) -> np.ndarray:
    """The clips of the plan by the dataset itself, one after the other."""
    dataset = ClipDataset(
        stored.manifest, stored.store, WindowSpec(frames=4), augment=bench_online.augment_spec(TINY)
    )
    return np.stack([dataset[ref].frames.numpy() for ref in bench_online.draw_refs(stored.manifest, TINY)])


def test_the_plan_speaks_of_the_clips_that_the_dataset_makes(stored, plan):
    sampler = EpochSampler(stored.manifest, WindowSpec(frames=4), seed=0)
    refs = [ref for epoch in range(3) for ref in sampler.refs_at(np.arange(2), epoch=epoch)]
    assert [clip.key for clip in plan.clips] == [stored.manifest[ref.video].frames for ref in refs]
    assert [clip.indices for clip in plan.clips] == [tuple(range(r.start, r.start + 4)) for r in refs]
    for clip in plan.clips:
        top, left, height, width = clip.box
        assert 0 <= top <= top + height <= 64
        assert 0 <= left <= left + width <= 64
        assert len(list(Path(clip.folder).iterdir())) == clip.num_frames
        first = Path(clip.folder, "img_00000.jpg").read_bytes()
        assert first == bytes(stored.store.read(clip.key, [0])[0])


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(
    "peer", bench_peers.FRAME_PEERS + bench_peers.VIDEO_PEERS, ids=lambda peer: peer.name
)
def test_every_peer_that_is_installed_makes_the_clips_of_the_plan(stored, plan, peer):
    if peer.pixels is None or bench_peers.why_absent(peer):
        pytest.skip("not to be seen here")
    dataset = peer.make(plan)
    batch = peer.collate(plan)([dataset[place] for place in range(len(dataset))])
    found = compare(peer.pixels(batch), own_clips(stored))
    assert found.other_clips == 0
    assert found.clips == 6
    assert found.psnr_db > 30


def test_the_ceiling_decodes_each_frame_once(plan):
    peer = next(peer for peer in bench_peers.FRAME_PEERS if peer.name == "ceiling")
    dataset = peer.make(plan)
    assert [dataset[place] for place in range(len(dataset))] == [4] * 6


def test_clips_of_other_frames_are_counted():
    rng = np.random.default_rng(0)
    long = rng.integers(0, 256, (3, 6, 8, 8, 3), dtype=np.uint8)
    reference = long[:, 1:5]
    assert compare(reference, reference) == Likeness(psnr_db=float("inf"), other_clips=0, clips=3)
    assert compare(long[:, 0:4], reference).other_clips == 3
    assert compare(long[:, 2:6], reference).other_clips == 3
    assert compare(np.concatenate([long[:1, 2:6], reference[1:]]), reference).other_clips == 1


@given(st.integers(1, 40))
def test_psnr_is_that_of_its_definition(difference):
    reference = np.full((1, 4, 8, 8, 3), 100, np.uint8)
    found = compare(reference + np.uint8(difference), reference)
    assert found.psnr_db == pytest.approx(20 * np.log10(255 / difference))


def test_a_contender_that_cuts_elsewhere_ends_the_run():
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 256, (2, 4, 8, 8, 3), dtype=np.uint8) for _ in range(2))
    contenders = [
        Contender("torchvision", lambda: [one], lambda batch: batch),
        Contender("pil", lambda: [other], lambda batch: batch),
    ]
    with pytest.raises(PipelineError, match="pil does not make the clips of the plan"):
        bench_online.warm_up(contenders, lambda name: None)


def test_others_that_go_by_wrong_timestamps_are_only_noted():
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 256, (2, 4, 8, 8, 3), dtype=np.uint8) for _ in range(2))
    contenders = [
        Contender("torchvision", lambda: [one], lambda batch: batch),
        Contender("decord", lambda: [other], lambda batch: batch),
    ]
    assert bench_online.warm_up(contenders, lambda name: None)["decord"].psnr_db < 25


def rows_of(**clips_per_s: float) -> list[Row]:
    return [make_row(name, "", [timing(16 / speed, 16)]) for name, speed in clips_per_s.items()]


def test_the_best_of_a_kind_is_what_counts():
    rows = rows_of(ours=200, mmaction2_cv2=90, mmaction2_turbojpeg=100, mmaction2_pillow=60, pil=50)
    targets = {target.peer: target for target in make_targets(rows, OnlineBench())}
    assert targets["mmaction2_best"].theirs == "mmaction2_turbojpeg"
    ratios = make_ratios(rows, list(targets.values()))
    assert ratios["mmaction2_best"] == pytest.approx(2)
    assert ratios["mmaction2_cv2"] == pytest.approx(200 / 90)
    assert ratios["pil"] == pytest.approx(4)
    assert ratios["torchcodec"] is None
    assert judge(targets["pil"], ratios["pil"]) == "ours / pil >= 3.00: met, 4.00"


def test_smaller_frames_and_long_videos_have_targets_of_their_own():
    rows = rows_of(ours=200, ours_128=500, torchcodec=150, decord=160)
    small = {target.peer: target for target in make_targets(rows, OnlineBench(short_side_px=128))}
    assert (small["torchcodec_128"].ours, small["torchcodec_128"].at_least) == ("ours_128", 2.2)
    assert (small["native_128"].theirs, small["native_128"].at_least) == ("ours", 2.0)
    (target,) = make_targets(rows, OnlineBench(long_gop=True))
    assert (target.ours, target.theirs, target.at_least) == ("ours", "decord", 3.0)


def test_a_peer_that_is_not_installed_says_how_to_get_it():
    peer = bench_peers.Peer(
        name="x", what="", needs=("no_such_module",), extra="bench-x", make=lambda plan: plan, pixels=None
    )
    reason = bench_peers.why_absent(peer)
    assert reason is not None
    assert reason.startswith("not measured: no_such_module is not there")
    assert reason.endswith("pip install '.[bench-x]'")


def test_long_videos_have_one_key_frame_in_250(clips, tmp_path):
    make_long_videos(clips, tmp_path)
    (path,) = tmp_path.rglob("*.mp4")
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 16
    assert (frames[0].width, frames[0].height) == (640, 480)
    assert [frame.key_frame for frame in frames] == [True] + 15 * [False]


def run_bench(folder: Path, clips: list[Path], *options: str) -> dict:
    with pytest.raises(SystemExit, match="0"):
        run(
            bench.main,
            [
                *(*options, "--videos", str(clips[0].parents[1]), "--rounds", "1"),
                *("--work-dir", str(folder / "work"), "--json", str(folder / "bench.json")),
            ],
        )
    assert list((folder / "work").iterdir()) == []
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")  # of torchvision's own function
def test_a_run_measures_this_loader_and_all_that_is_installed(tmp_path, clips, capsys):
    options = ("--clips-per-round", "4", "--batch-size", "2", "--workers", "1", "--clip-frames", "4")
    report = run_bench(tmp_path, clips, "online", *options, "--size-px", "16", "--short-side-px", "32")
    rows = {row["name"]: row for row in report["rows"]}
    peers = {peer.name for peer in bench_peers.FRAME_PEERS + bench_peers.VIDEO_PEERS}
    own = {"ours", "ours_float", "ours_folder", "ours_plain", "ours_32", "ours_32_float"}
    assert set(rows) == own | peers
    assert peers <= set(report["ratios"])
    for name, row in rows.items():
        if row["note"].startswith("not measured"):
            assert report["ratios"][name] is None
        else:
            assert row["frames"] == 16
            assert row["clips_per_s"] == pytest.approx(row["frames_per_s"] / 4)
    for name in ("ours", "ours_float", "ours_folder"):
        assert rows[name]["psnr_db"] is None or rows[name]["psnr_db"] > 45
    assert report["ratios"]["pil"] == pytest.approx(rows["ours"]["clips_per_s"] / rows["pil"]["clips_per_s"])
    printed = capsys.readouterr().out
    assert "ours / pil >= 3.00: " in printed
    assert all(name in printed for name in rows)


@pytest.mark.slow
def test_memory_of_all_processes_is_looked_at(tmp_path, clips, capsys):
    options = ("--memory-workers", "1", "--memory-ranks", "1", "--memory-epochs", "1")
    report = run_bench(tmp_path, clips, "memory", *options)
    assert [row["kind"] for row in report["rows"]] == list(bench_memory.KINDS)
    assert all(row["worker_mb"] > 0 for row in report["rows"])
    assert all(row["private_mb"] > row["worker_mb"] for row in report["rows"])
    assert set(report["ratios"]) == {"list_fork", "list_spawn"}
    assert "a worker" in capsys.readouterr().out


@pytest.mark.slow
def test_the_cost_of_a_clip_is_measured_as_videos_grow(tmp_path, clips, capsys):
    options = ("--scale-videos", "40", "400", "--scale-clips", "32", "--scale-workers", "1")
    report = run_bench(tmp_path, clips, "scale", *options)
    assert [row["videos"] for row in report["rows"]] == [40, 400]
    for row in report["rows"]:
        assert min(row["clips_per_s"], row["clip_us"], row["worker_mb"], row["first_batch_s"]) > 0
        assert row["pickle_kb"] < 100
    assert report["ratios"]["clip_cost_growth"] > 0
    assert "a clip of 400 videos / of 40: " in capsys.readouterr().out


def test_growth_is_between_the_smallest_and_the_largest():
    rows = [
        ScaleRow(
            videos=n,
            start_up_s=0.1,
            first_batch_s=1,
            clips_per_s=9,
            clip_us=us,
            worker_mb=1,
            pickle_kb=2,
        )
        for n, us in ((10, 100.0), (20, 300.0), (30, 150.0))
    ]
    assert bench.scale_json(rows)["ratios"] == {"clip_cost_growth": 1.5}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ours", "PackStore"),
        ("ours_fork", "PackStore"),
        ("list_fork", "ListStore"),
        ("list_spawn", "ListStore"),
    ],
)
def test_only_the_pattern_that_keeps_a_list_has_one(stored, kind, expected):
    store = bench_memory.open_store_of(kind, stored.store.path, stored.manifest)
    assert type(store).__name__ == expected
    key = stored.manifest[0].frames
    assert list(map(bytes, store.read(key, [2, 1]))) == list(map(bytes, stored.store.read(key, [2, 1])))


def test_memory_is_compared_at_the_most_ranks_and_workers():
    rows = [
        MemoryRow(kind=kind, ranks=1, workers=n, worker_mb=1, private_mb=n * mb, shared_mb=1, file_mb=1)
        for n in (1, 8)
        for kind, mb in (("ours", 10), ("ours_fork", 5), ("list_fork", 20), ("list_spawn", 40))
    ]
    assert bench.memory_json(rows)["ratios"] == {"list_fork": 0.5, "list_spawn": 0.25}


@pytest.mark.parametrize("make", [OnlineBench, MemoryBench, ScaleBench])
def test_numbers_that_make_no_sense_are_refused(make):
    wrong = {OnlineBench: {"workers": 0}, MemoryBench: {"memory_ranks": ()}, ScaleBench: {"scale_videos": ()}}
    with pytest.raises(ValueError, match="must be 1 or more"):
        make(**wrong[make])


def test_a_mirrored_clip_is_never_asked_of_the_others():
    assert bench_online.augment_spec(OnlineBench()).flip_p == 0
    assert isinstance(bench_online.augment_spec(OnlineBench()), AugmentSpec)
