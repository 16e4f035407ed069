"""JPEGs that workers only move, decoded where the model is: the clips of `ClipDataset`, to a level or two."""

import gc
import os
import weakref
from contextlib import contextmanager
from itertools import pairwise

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError, StoreError
from pipeline.online import (
    AugmentSpec,
    ClipRef,
    EpochSampler,
    EvalSampler,
    FolderStore,
    LoaderSpec,
    PackStore,
    WindowSpec,
    build_loader,
    prefetch,
)
from pipeline.online import device_decode as module
from pipeline.online.augment import apply_augment, draw_augment
from pipeline.online.collate import ClipBatch
from pipeline.online.device_decode import (
    DecodedBatches,
    DecodeLimits,
    Run,
    decode_by_torchcodec,
    decode_by_torchvision,
    resize_frames,
    split_groups,
)
from pipeline.online.encoded import (
    EncodedClip,
)
from tests.encoded_clips import (
    AUGMENT,
    EVALUATION,
    MODES,
    REFS,
    WINDOW,
    Scenes,
    cmyk_jpeg,
    damaged_pair,
    decode_refs,
    frame_of,
    make_pair,
    opened,
    replace_frame,
    write_scenes,
)
from tests.folders import LENGTHS, write_dataset, write_tiny_manifest
from tests.manifests import manifest_of

pytestmark = pytest.mark.filterwarnings("ignore:.*TorchVision.*:DeprecationWarning")

CPU = torch.device("cpu")


@pytest.fixture
def gpu():
    """A CUDA device; a run that is meant to have one does not pass without it."""
    if not torch.cuda.is_available():
        missing = "needs a CUDA device"
        pytest.fail(missing) if os.environ.get("REQUIRE_GPU") == "1" else pytest.skip(missing)
    return torch.device("cuda", torch.cuda.current_device())


# The same clips.


def assert_alike(decoded, expected, *, mean=0.3, most=2):
    """The same batch, but for frames that may differ a little."""
    assert type(decoded) is ClipBatch
    assert decoded.frames.shape == expected.frames.shape
    assert decoded.frames.dtype == torch.uint8
    for ours, theirs in zip(decoded[1:5], expected[1:5], strict=True):
        assert torch.equal(ours.cpu(), theirs)
        assert ours.dtype == theirs.dtype
    assert decoded.extras.keys() == expected.extras.keys()
    assert torch.equal(decoded.extras["seed"], expected.extras["seed"])
    differences = (decoded.frames.cpu().int() - expected.frames.int()).abs()
    assert float(differences.float().mean()) < mean
    assert int(differences.max()) <= most


@pytest.mark.parametrize("mode", MODES)
def test_clips_are_those_of_the_dataset_that_decodes_in_workers(mode):
    pixels, encoded = make_pair(MODES[mode])
    refs = [ClipRef(video % 6, video % 30, seed) for seed, video in enumerate(range(24), 1)]
    decoded = decode_refs(encoded, refs)
    assert_alike(decoded, pixels.__getitems__(refs))
    flips = [draw_augment(MODES[mode], ref.seed, height=120, width=160).flip for ref in refs]
    assert 0 < sum(flips) < len(flips)
    assert decoded.frames.is_contiguous()


@pytest.mark.parametrize("mode", EVALUATION)
@pytest.mark.parametrize("crop", [0, 1, 2])
def test_evaluation_crops_are_the_same(mode, crop):
    pixels, encoded = make_pair(EVALUATION[mode])
    refs = [ClipRef(video, 5, 0, crop) for video in range(6)]
    assert_alike(decode_refs(encoded, refs), pixels.__getitems__(refs))


@pytest.mark.parametrize("short", ["loop", "hold"])
def test_a_short_video_is_decoded_once_and_shown_as_often_as_its_policy_says(tmp_path, short):
    data = write_dataset(tmp_path)
    manifest = write_tiny_manifest(tmp_path / "m.parquet", LENGTHS)
    window = WindowSpec(frames=6, short=short)
    pixels, encoded = make_pair(AUGMENT, store=PackStore(data / "pack"), manifest=manifest, window=window)
    refs = [ClipRef(0, 0, 1), ClipRef(2, 9, 2), ClipRef(1, 0, 3)]
    batches = opened(encoded)
    assert_alike(batches.decoded(encoded.__getitems__(refs)), pixels.__getitems__(refs))
    assert batches.counters().jpegs == 4 + 6 + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_workers_gives_the_same_epoch_and_counts_it(tmp_path, workers):
    manifest = write_scenes(tmp_path / "m.parquet", 10)
    pixels, encoded = make_pair(AUGMENT, manifest=manifest)
    sampler = EpochSampler(manifest, WINDOW, seed=7)
    refs = list(sampler)
    loader = build_loader(encoded, sampler, LoaderSpec(batch_size=4, workers=workers, persistent=False))
    batches = DecodedBatches(loader, "cpu")
    made = []
    for batch in batches:
        made.append(batch)
        if len(made) == 1:
            assert sampler.state_dict()["delivered"] == 4
    assert [len(batch.labels) for batch in made] == [4, 4, 2]
    assert len(batches) == 3
    for number, batch in enumerate(made):
        assert_alike(batch, pixels.__getitems__(refs[4 * number : 4 * number + 4]))


def test_prefetch_takes_them_like_any_loader():
    pixels, encoded = make_pair(AUGMENT)
    theirs = prefetch(build_loader(pixels, REFS, LoaderSpec(batch_size=3, workers=0)), "cpu")
    ours = prefetch(opened(encoded, refs=REFS, batch_size=3), "cpu")
    for decoded, expected in zip(ours, theirs, strict=True):
        assert decoded.frames.stride() == expected.frames.stride()
        assert float((decoded.frames - expected.frames).abs().max()) < 2 / 255 / 0.2


def test_an_evaluation_is_the_same(tmp_path):
    augment = EVALUATION["centre"]
    pixels, encoded = make_pair(augment)
    sampler = EvalSampler(manifest_of([40] * 6), WINDOW, views=2)
    ours = list(opened(encoded, refs=list(sampler)))
    theirs = list(build_loader(pixels, list(sampler), LoaderSpec(batch_size=4, workers=0)))
    for decoded, expected in zip(ours, theirs, strict=True):
        assert_alike(decoded, expected)


@pytest.mark.parametrize(
    "limits", [DecodeLimits(jpegs=1), DecodeLimits(jpegs=5), DecodeLimits(pixel_bytes=1)]
)
def test_how_much_is_decoded_at_once_changes_nothing(limits):
    _, encoded = make_pair(AUGMENT)
    calls = []

    def decode(jpegs, device):
        calls.append(len(jpegs))
        return decode_by_torchvision(jpegs, device)

    one = decode_refs(encoded, REFS)
    other = decode_refs(encoded, REFS, decode=decode, limits=limits)
    assert torch.equal(one.frames, other.frames)
    assert max(calls) <= limits.jpegs
    assert sum(calls) == 1 + 24  # the first is the probe


def test_what_else_there_is_of_a_row_comes_along():
    _, encoded = make_pair(AUGMENT, row_extras={"source_id": np.arange(6) * 10})
    decoded = decode_refs(encoded, REFS)
    assert decoded.extras["source_id"].tolist() == [0, 10, 20, 30, 40, 50]
    assert decoded.extras.keys() == {"seed", "source_id"}
    with pytest.raises(ValueError, match="rename 'jpeg_ends'"):
        make_pair(AUGMENT, row_extras={"jpeg_ends": np.arange(6)})


def test_what_was_decoded_is_counted():
    _, encoded = make_pair(AUGMENT)
    batch, batches = encoded.__getitems__(REFS), opened(encoded)
    for _ in range(2):
        batches.decoded(batch)
    assert batches.counters() == (2, 48, 2 * len(batch.frames), 0)


def test_torchcodec_decodes_to_the_same_pixels():
    pytest.importorskip("torchcodec.decoders", exc_type=ImportError)
    _, encoded = make_pair(AUGMENT)
    one, other = (
        decode_refs(encoded, REFS, decode=decode) for decode in (decode_by_torchvision, decode_by_torchcodec)
    )
    assert torch.equal(one.frames, other.frames)


@given(
    counts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=8),
    limits=st.builds(DecodeLimits, jpegs=st.integers(1, 12), pixel_bytes=st.integers(1, 400)),
)
def test_groups_hold_every_jpeg_once_in_order_and_keep_to_the_limits(counts, limits):
    nothing = draw_augment(AUGMENT, 1, height=4, width=4)
    clips = [EncodedClip(0, [torch.empty(1)] * n, [0] * n, (side, side), nothing) for n, side in counts]
    groups = list(split_groups(clips, limits))
    places = [(run.clip, k) for group in groups for run in group for k in range(run.start, run.stop)]
    assert places == [(clip, k) for clip, (n, _) in enumerate(counts) for k in range(n)]

    def cost(runs):
        sides = [counts[run.clip][1] for run in runs for _ in range(run.start, run.stop)]
        return len(sides), sum(3 * side * side for side in sides)

    for group in groups:
        jpegs, size = cost(group)
        assert jpegs == 1 or (jpegs <= limits.jpegs and size <= limits.pixel_bytes)
    for group, after in pairwise(groups):  # none could have taken the next JPEG, too
        jpegs, size = cost([*group, Run(after[0].clip, after[0].start, after[0].start + 1)])
        assert jpegs > limits.jpegs or size > limits.pixel_bytes


@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from([*MODES.values(), *EVALUATION.values()]))
def test_resizing_on_a_device_is_that_of_the_cpu_to_a_level(seed, mode):
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(20, 130, 2))
    frames = rng.integers(0, 256, (2, height, width, 3), np.uint8)
    drawn = draw_augment(mode, seed, height=height, width=width)
    expected = apply_augment(frames, drawn)
    made = resize_frames(torch.from_numpy(frames).permute(0, 3, 1, 2), drawn).numpy()
    assert made.shape == expected.shape
    assert np.abs(made.astype(int) - expected).max() <= 2


# What is bad.


@pytest.fixture
def damaged(tmp_path):
    return write_dataset(tmp_path)


def test_bytes_behind_the_end_of_an_image_mean_nothing(damaged):
    replace_frame(damaged, frame_of(damaged) + b"padding")
    assert decode_refs(damaged_pair(damaged), [ClipRef(0, 0, 1)]).frames.shape == (1, 4, 32, 32, 3)


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_damage_that_only_the_decoder_sees_raises_with_frame_and_video(damaged, on_bad):
    jpeg = bytearray(frame_of(damaged))
    tables = jpeg.index(b"\xff\xc4")
    jpeg[tables + 5 : tables + 21] = b"\xff" * 16  # more Huffman codes than there can be
    replace_frame(damaged, bytes(jpeg))
    encoded = damaged_pair(damaged, on_bad=on_bad)
    batch = encoded.__getitems__([ClipRef(2, 0, 2), ClipRef(0, 0, 1)])
    with pytest.raises(StoreError, match=r"frame 2 of 'A/one' in FolderStore.*damaged JPEG") as caught:
        opened(encoded).decoded(batch)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_gives_another_size_is_noticed():
    _, encoded = make_pair(AUGMENT)

    def decode(jpegs, device):
        return [pixels[:, 1:] for pixels in decode_by_torchvision(jpegs, device)]

    with pytest.raises(StoreError, match=r"frame 0 of 'A/v_0000000.avi'.*decoded to"):
        decode_refs(encoded, REFS, decode=decode)


def test_what_only_the_host_can_decode_is_decoded_there_and_counted():
    pixels, encoded = make_pair(AUGMENT)
    batch = encoded.__getitems__(REFS)
    strange = batch.clips()[1].jpegs[2].numpy().tobytes()

    def decode(jpegs, device):
        if any(jpeg.numpy().tobytes() == strange for jpeg in jpegs):
            raise RuntimeError("Error while decoding JPEG images: unknown chroma subsampling")
        return decode_by_torchvision(jpegs, device)

    batches = opened(encoded, decode=decode)
    assert_alike(batches.decoded(batch), pixels.__getitems__(REFS))
    assert batches.counters().on_host == 1


def test_no_memory_on_the_device_is_not_taken_for_damage():
    _, encoded = make_pair(AUGMENT)
    calls = []

    def decode(jpegs, device):
        calls.append(len(jpegs))
        if len(calls) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return decode_by_torchvision(jpegs, device)

    batches = opened(encoded, decode=decode)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        batches.decoded(encoded.__getitems__(REFS))
    assert calls == [1, 24]


@pytest.mark.parametrize("kind", ["grey", "CMYK"])
def test_other_colours_are_frames_like_any_other(damaged, kind):
    picture = np.full((48, 64), 90, np.uint8)
    replace_frame(damaged, cv2.imencode(".jpg", picture)[1].tobytes() if kind == "grey" else cmyk_jpeg())
    frames = decode_refs(damaged_pair(damaged), [ClipRef(0, 0, 1)]).frames
    assert frames.shape == (1, 4, 32, 32, 3)
    assert int((frames[0, 2].int() - 90).abs().max()) <= 2


# What is refused.


def test_a_device_that_cannot_decode_is_refused_at_once():
    def decode(jpegs, device):
        raise RuntimeError("not compiled with nvJPEG support\nmore")

    with pytest.raises(PipelineError, match=r"device cpu: decode cannot decode .*nvJPEG support\); use Clip"):
        opened(make_pair(AUGMENT)[1], decode=decode)


def test_cuda_without_a_gpu_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PipelineError, match="device cuda: torch sees no CUDA GPU"):
        opened(make_pair(AUGMENT)[1], "cuda")


def test_a_loader_of_pixels_is_refused():
    with pytest.raises(ValueError, match="must be an EncodedClipDataset"):
        opened(make_pair(AUGMENT)[0])


def test_a_batch_that_was_not_decoded_is_not_normalised():
    loader = build_loader(make_pair(AUGMENT)[1], REFS, LoaderSpec(batch_size=2, workers=0))
    with pytest.raises(ValueError, match="frames must be uint8"):
        next(prefetch(loader, "cpu"))


@pytest.mark.parametrize("options", [{"jpegs": 0}, {"pixel_bytes": 0}])
def test_limits_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="must be >= 1"):
        DecodeLimits(**options)


def test_a_batch_that_its_user_lets_go_of_is_freed_at_once():
    batches = iter(opened(make_pair(AUGMENT)[1], refs=REFS, batch_size=2))
    for _ in range(3):
        batch = next(batches)
        held = weakref.ref(batch.frames)
        del batch
        assert held() is None


# The order of work on two streams, on streams that only write down what is asked of them.


class LoggedStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append(("wait", event, self.name))

    def record_event(self):
        self.log.append(("event", self.name))
        return f"event of {self.name}"

    def synchronize(self):
        self.log.append(("drained", self.name))


def test_nothing_is_queued_where_the_decoder_writes_and_the_user_waits_for_what_it_wrote(monkeypatch):
    """Both known faults are of a decoder that is given memory which queued work still reads."""
    log, current = [], ["user"]

    @contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    def decode(jpegs, device):
        log.append(("decode", len(jpegs), current[-1]))
        return decode_by_torchvision(jpegs, device)

    _, encoded = make_pair(AUGMENT)
    batches = opened(encoded, decode=decode, limits=DecodeLimits(jpegs=9))
    log.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: LoggedStream(log, current[-1]))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: log.append(("keep", stream.name))
    )
    monkeypatch.setattr(batches, "_drain", lambda: torch.cuda.current_stream(CPU).synchronize())
    batches._decoded_beside(encoded.__getitems__(REFS), LoggedStream(log, "side"))
    groups = [entry for n in (9, 9, 6) for entry in (("drained", "side"), ("decode", n, "side"))]
    assert log == [*groups, ("event", "side"), ("wait", "event of side", "user"), ("keep", "user")]


# On a GPU.


def near(decoded, expected):
    """nvJPEG repeats chroma where libjpeg interpolates it."""
    return assert_alike(decoded, expected, mean=3, most=255)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [*MODES, *EVALUATION])
def test_a_gpu_gives_the_clips_of_the_cpu_within_a_few_levels(gpu, mode):
    pixels, encoded = make_pair({**MODES, **EVALUATION}[mode])
    seeds = [0] * 6 if mode in EVALUATION else range(1, 7)
    refs = [ClipRef(video, 4, seed) for video, seed in enumerate(seeds)]
    batches = opened(encoded, gpu)
    decoded = batches.decoded(encoded.__getitems__(refs))
    assert decoded.frames.device == gpu
    near(decoded, pixels.__getitems__(refs))
    assert batches.counters().on_host == 0


@pytest.mark.gpu
def test_resizing_is_that_of_the_cpu_on_a_gpu(gpu):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (3, 100, 130, 3), np.uint8)
    for spec in (*MODES.values(), *EVALUATION.values()):
        drawn = draw_augment(spec, 5, height=100, width=130)
        made = resize_frames(torch.from_numpy(frames).permute(0, 3, 1, 2).to(gpu), drawn).cpu().numpy()
        assert np.abs(made.astype(int) - apply_augment(frames, drawn)).max() <= 2


@pytest.mark.gpu
def test_real_frames_are_near_on_a_gpu(gpu, shared, tmp_path):
    from pipeline.offline.frames import FrameSpec, extract_frames

    video = next((shared / "data" / "videos" / "ucf101").rglob("*.avi"))
    found = extract_frames(video, tmp_path / "A" / "x", FrameSpec(max_frames=40))
    manifest = write_tiny_manifest(tmp_path / "m.parquet", {"A/x": found.num_frames})
    pixels, encoded = make_pair(AugmentSpec(size_px=112), store=FolderStore(tmp_path), manifest=manifest)
    refs = [ClipRef(0, seed, seed) for seed in range(1, 9)]
    near(decode_refs(encoded, refs, gpu), pixels.__getitems__(refs))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["as stored", "progressive"])
@pytest.mark.parametrize("stream", ["the user's", "the decoder's"])
def test_memory_that_queued_work_still_reads_is_not_written_to(gpu, kind, stream):
    """Fill, queue slow work and then sums, let go, decode: the sums must be of what was there.

    Memory let go of on a stream is given out again on that stream, so it is the decoder's that is in danger.
    """
    store = Scenes()
    if kind == "progressive":  # decoded by nvJPEG's other path
        store.jpegs = [[progressive(jpeg) for jpeg in jpegs] for jpegs in store.jpegs]
    _, encoded = make_pair(AUGMENT, store=store)
    batch, batches = encoded.__getitems__(REFS), opened(encoded, gpu)
    expected = batches.decoded(batch).frames.cpu()
    used = torch.cuda.current_stream(gpu) if stream == "the user's" else module._decode_stream(gpu)
    for _ in range(30):
        with torch.cuda.stream(used):
            blocks = [torch.full((3, 120, 160), k + 1, dtype=torch.uint8, device=gpu) for k in range(24)]
            torch.cuda.synchronize(gpu)
            torch.cuda._sleep(20_000_000)
            sums = [block.sum(dtype=torch.int64) for block in blocks]
            del blocks
        frames = batches.decoded(batch).frames.clone()
        torch.cuda.synchronize(gpu)
        assert [int(one) for one in sums] == [(k + 1) * 3 * 120 * 160 for k in range(24)]
        assert torch.equal(frames.cpu(), expected)


def progressive(jpeg):
    picture = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()


@pytest.mark.gpu
def test_batches_are_right_under_random_delays_of_both_streams(gpu):
    _, encoded = make_pair(AUGMENT)
    refs = [ClipRef(k % 6, k % 30, k + 1) for k in range(120)]
    expected = [batch.frames.long().sum().item() for batch in opened(encoded, gpu, refs=refs)]
    chance = torch.Generator().manual_seed(0)

    def delay():
        torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=chance)))

    def prepare(batch):
        delay()
        return batch._replace(frames=batch.frames.to(torch.float64))

    sums = []
    for batch in prefetch(opened(encoded, gpu, refs=refs), gpu, prepare=prepare, depth=2):
        delay()
        sums.append(batch.frames.sum())
        del batch
    assert [round(one.item()) for one in sums] == expected


@pytest.mark.gpu
def test_epochs_do_not_take_more_and_more_of_a_gpus_memory(gpu):
    _, encoded = make_pair(AUGMENT)
    batches = opened(encoded, gpu, refs=REFS * 8)

    def epoch():
        for batch in batches:
            batch.frames.sum().item()
        gc.collect()
        torch.cuda.synchronize(gpu)
        return torch.cuda.mem_get_info(gpu)[0]

    for _ in range(3):
        epoch()
    free = epoch()
    assert [epoch() for _ in range(5)][-1] >= free - (4 << 20)


@pytest.mark.gpu
def test_what_is_decoded_at_once_bounds_a_gpus_memory(gpu):
    _, encoded = make_pair(AugmentSpec(size_px=8))
    batch = encoded.__getitems__([ClipRef(k % 6, 0, k + 1) for k in range(60)])
    limits = DecodeLimits(pixel_bytes=1 << 20)
    batches = opened(encoded, gpu, limits=limits)
    torch.cuda.synchronize(gpu)
    before = torch.cuda.memory_allocated(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    frames = batches.decoded(batch).frames
    peak = torch.cuda.max_memory_allocated(gpu) - before
    assert peak < 7 * limits.pixel_bytes + frames.numel() + (4 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["grey", "CMYK"])
def test_other_colours_come_out_as_rgb_on_a_gpu(gpu, damaged, kind):
    picture = np.full((48, 64), 90, np.uint8)
    replace_frame(damaged, cv2.imencode(".jpg", picture)[1].tobytes() if kind == "grey" else cmyk_jpeg())
    frames = decode_refs(damaged_pair(damaged), [ClipRef(0, 0, 1)], gpu).frames
    assert int((frames[0, 2].int() - 90).abs().max()) <= 3


@pytest.mark.gpu
def test_damage_is_named_on_a_gpu_and_the_next_batch_is_right(gpu, damaged):
    jpeg = bytearray(frame_of(damaged))
    tables = jpeg.index(b"\xff\xc4")
    jpeg[tables + 5 : tables + 21] = b"\xff" * 16
    replace_frame(damaged, bytes(jpeg))
    encoded = damaged_pair(damaged)
    batches = opened(encoded, gpu)
    with pytest.raises(StoreError, match=r"frame 2 of 'A/one'"):
        batches.decoded(encoded.__getitems__([ClipRef(2, 0, 2), ClipRef(0, 0, 1)]))
    good = encoded.__getitems__([ClipRef(2, 0, 2)])
    assert batches.decoded(good).frames.shape == (1, 4, 32, 32, 3)
