"""Batches on their device: normalised as torchvision does it, in order, counted, and never overwritten."""

import os
import time
import weakref
from contextlib import contextmanager
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.video import R3D_18_Weights
from torchvision.transforms.v2 import functional as tv

from pipeline.errors import PipelineError
from pipeline.online import device as device_module
from pipeline.online.collate import ClipBatch
from pipeline.online.device import CountedBatches, Normalize, normalize_frames, prefetch, to_device

CPU = torch.device("cpu")
LEVELS = Normalize(mean=(0.0,) * 3, std=(1 / 255,) * 3)
"""Leaves the numbers 0 to 255 as they are."""


@pytest.fixture
def gpu():
    """A CUDA device; a run that is meant to have one does not pass without it."""
    if not torch.cuda.is_available():
        missing = "needs a CUDA device"
        pytest.fail(missing) if os.environ.get("REQUIRE_GPU") == "1" else pytest.skip(missing)
    return torch.device("cuda", torch.cuda.current_device())


def make_batch(number=0, clips=3, frames=4, height=6, width=5, *, pin=False):
    generator = torch.Generator().manual_seed(number)
    shape = (clips, frames, height, width, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    ids = number * clips + torch.arange(clips)
    batch = ClipBatch(
        frames=pixels.pin_memory() if pin else pixels,
        labels=ids % 7,
        videos=ids,
        starts=ids * 2,
        times_s=torch.rand(clips, frames, dtype=torch.float64, generator=generator),
        extras={"seed": ids * 1_000_003, "inertial": torch.rand(clips, frames, 6, generator=generator)},
    )
    return batch._replace(labels=batch.labels.pin_memory()) if pin else batch


def make_batches(count, **options):
    return [make_batch(number, **options) for number in range(count)]


def tensors_of(batch):
    return (*batch[:5], *batch.extras.values())


def assert_same(one, other):
    for a, b in zip(tensors_of(one), tensors_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Counter:
    """As a loader that counts: what was read, and what its user was given."""

    def __init__(self, batches):
        self.made = batches
        self.read = 0
        self.closed = False
        self.delivered = []

    def batches(self):
        try:
            for batch in self.made:
                self.read += 1
                yield batch
        finally:
            self.closed = True

    def mark_delivered(self, batch):
        self.delivered.append(batch)


# Normalisation.


def by_torchvision(frames, spec):
    video = tv.to_dtype(frames.permute(0, 1, 4, 2, 3), torch.float32, scale=True)
    return tv.normalize(video, list(spec.mean), list(spec.std)).transpose(1, 2)  # (B, C, T, H, W)


def test_the_default_is_what_torchvisions_video_models_were_trained_with():
    theirs = R3D_18_Weights.KINETICS400_V1.transforms()
    assert (list(Normalize().mean), list(Normalize().std)) == (theirs.mean, theirs.std)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 1000),
    mean=st.tuples(*[st.floats(0, 1)] * 3),
    std=st.tuples(*[st.floats(0.05, 1)] * 3),
)
def test_normalised_frames_agree_with_torchvision(shape, seed, mean, std):
    frames = make_batch(seed, *shape).frames
    spec = Normalize(mean=mean, std=std)
    torch.testing.assert_close(
        normalize_frames(frames, spec), by_torchvision(frames, spec), rtol=0, atol=2e-5
    )


def test_every_level_of_every_channel_is_right_to_a_millionth():
    levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 4, 4, 1).expand(-1, -1, -1, -1, 3)
    normal = normalize_frames(levels, Normalize())
    for channel, (mean, std) in enumerate(zip(Normalize().mean, Normalize().std, strict=True)):
        expected = torch.tensor([(level / 255 - mean) / std for level in range(256)])
        torch.testing.assert_close(normal[0, channel].flatten(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_frames_come_out_channels_last_and_the_batch_given_stays_as_it_is(dtype):
    batch, before = make_batch(clips=2, frames=4, height=6, width=5), make_batch(clips=2)
    normal = Normalize(dtype=dtype)(batch).frames
    assert (normal.dtype, tuple(normal.shape)) == (dtype, (2, 3, 4, 6, 5))
    assert normal.stride() == (4 * 6 * 5 * 3, 1, 6 * 5 * 3, 5 * 3, 3)
    assert normal.is_contiguous(memory_format=torch.channels_last_3d)
    assert_same(batch, before)


class Writes(TorchDispatchMode):
    """Which operations write tensors, and how many bytes in memory that was not there before."""

    def __init__(self):
        super().__init__()
        self.new_bytes, self.seen, self.operations = 0, set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        self.operations.append(function.overloadpacket.__name__)
        storage = result.untyped_storage()
        if storage.data_ptr() not in known | self.seen:
            self.seen.add(storage.data_ptr())
            self.new_bytes += storage.nbytes()
        return result


def test_normalising_makes_one_float_tensor_and_no_hidden_copy():
    frames = make_batch(clips=2, frames=8, height=32, width=32).frames
    normalize_frames(frames, Normalize())  # makes the constants
    with Writes() as writes:
        normal = normalize_frames(frames, Normalize())
    assert writes.new_bytes == 4 * frames.numel()
    assert writes.operations == ["_to_copy", "view", "addcmul", "permute"]
    assert normal.untyped_storage().nbytes() == 4 * frames.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_float_result_rounded_once(dtype):
    frames = make_batch().frames
    exact = normalize_frames(frames, Normalize())
    assert torch.equal(normalize_frames(frames, Normalize(dtype=dtype)), exact.to(dtype))


def test_a_view_of_frames_is_normalised_like_a_copy_of_it():
    frames = make_batch(frames=8).frames[:, ::2, :, 1:4]
    assert torch.equal(normalize_frames(frames, Normalize()), normalize_frames(frames.clone(), Normalize()))


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(1, 2, 4, 4, 3),
        torch.zeros(2, 4, 4, 3, dtype=torch.uint8),
        torch.zeros(1, 2, 4, 4, 1, dtype=torch.uint8),
    ],
)
def test_other_frames_are_refused_with_what_was_found(frames):
    with pytest.raises(ValueError, match=r"uint8 \(B, T, H, W, 3\), got torch"):
        normalize_frames(frames, Normalize())


@pytest.mark.parametrize(
    "options", [{"std": (1.0, 0.0, 1.0)}, {"mean": (0.5,)}, {"mean": (), "std": ()}, {"dtype": torch.uint8}]
)
def test_a_normalisation_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Normalize(**options)


# Prefetching.


def test_batches_come_in_order_normalised_and_with_all_that_belongs_to_them():
    made = make_batches(5)
    given_out = list(prefetch(made, "cpu"))
    assert len(given_out) == 5
    for before, after in zip(made, given_out, strict=True):
        assert_same(after, Normalize()(before))


def test_what_is_computed_with_moves_and_what_tells_of_clips_stays():
    there = to_device(make_batch(), torch.device("meta"))
    moved = {there.frames.device.type, there.labels.device.type, there.extras["inertial"].device.type}
    stayed = {part.device.type for part in (there.videos, there.starts, there.times_s, there.extras["seed"])}
    assert (moved, stayed) == ({"meta"}, {"cpu"})


def test_what_lies_inside_of_extras_moves_too():
    batch = make_batch()
    batch.extras["imu"] = {"values": torch.zeros(2, 3), "mask": {"kept": torch.ones(2, dtype=torch.bool)}}
    there = to_device(batch, torch.device("meta"))
    imu = there.extras["imu"]
    assert {imu["values"].device.type, imu["mask"]["kept"].device.type} == {"meta"}
    assert list(there.extras) == list(batch.extras)


def test_prepare_is_given_uint8_batches_and_has_the_last_word():
    shapes = []

    def prepare(batch):
        shapes.append((batch.frames.dtype, tuple(batch.frames.shape)))
        return batch._replace(frames=batch.frames[:, ::2])

    (batch,) = prefetch(make_batches(1), "cpu", prepare=prepare)
    assert shapes == [(torch.uint8, (3, 4, 6, 5, 3))]
    assert tuple(batch.frames.shape) == (3, 2, 6, 5, 3)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_the_depth_changes_nothing_in_the_batches(depth):
    for one, other in zip(
        prefetch(make_batches(3), "cpu", depth=depth), prefetch(make_batches(3), "cpu"), strict=True
    ):
        assert_same(one, other)


def test_the_count_is_exact_at_every_yield():
    loader = Counter(make_batches(4))
    assert isinstance(loader, CountedBatches)
    batches = prefetch(loader, "cpu")
    assert loader.read == 0
    for number, _ in enumerate(batches):
        assert [id(one) for one in loader.delivered] == [id(one) for one in loader.made[: number + 1]]
        assert loader.read == number + 1
    assert len(loader.delivered) == 4


def test_an_empty_loader_gives_nothing():
    assert list(prefetch([], "cpu")) == []


def test_closing_half_way_closes_the_loader_and_frees_what_was_held():
    loader = Counter(make_batches(4))
    batches = prefetch(loader, "cpu")
    held = weakref.ref(next(batches).frames)
    batches.close()
    assert loader.closed
    assert held() is None
    assert len(loader.delivered) == 1


def test_a_batch_that_its_user_lets_go_of_is_freed_at_once():
    for batch in prefetch((make_batch(number) for number in range(3)), "cpu"):
        held = weakref.ref(batch.frames)
        del batch
        assert held() is None


def test_an_error_of_the_preparation_reaches_the_user_and_its_batch_is_not_counted():
    def prepare(batch):
        if batch.videos[0] == 3:
            raise PipelineError("bad batch")
        return batch

    loader = Counter(make_batches(3))
    batches = prefetch(loader, "cpu", prepare=prepare)
    next(batches)
    with pytest.raises(PipelineError, match="bad batch"):
        next(batches)
    assert len(loader.delivered) == 1


def test_nothing_is_pinned_without_cuda(monkeypatch):
    def pin(*_):
        raise AssertionError("pinned")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    assert not any(
        part.is_pinned() for batch in prefetch(make_batches(2), "cpu") for part in tensors_of(batch)
    )


def test_cuda_without_a_gpu_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PipelineError, match="device cuda: torch sees no CUDA GPU"):
        prefetch([], "cuda")


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="depth must be >= 0, got -1"):
        prefetch([], "cpu", depth=-1)


# The order of work on two streams, on streams that only write down what is asked of them.


class Log:
    """Streams, events and `record_stream` without a GPU: a list of what was asked, and on which stream."""

    def __init__(self, monkeypatch):
        self.lines = []
        self.stream = "user"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: LoggedStream(self, self.stream))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(device_module, "_side_stream", lambda device: LoggedStream(self, "side"))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *one: self.kept(*one))

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    def kept(self, tensor, stream):
        self.lines.append(("keep", tensor.data_ptr(), stream.name))

    def prepare(self, batch):
        number = int(batch.videos[0]) // len(batch.videos)
        self.lines.append(("prepare", number, self.stream))
        return Normalize()(batch)


class LoggedStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.lines.append(("wait_stream", self.name, other.name))

    def wait_event(self, event):
        self.log.lines.append(("wait", event, self.name))

    def record_event(self):
        event = len([line for line in self.log.lines if line[0] == "event"])
        self.log.lines.append(("event", event, self.name))
        return event


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_batch_is_prepared_beside_and_awaited_before_it_is_yielded(monkeypatch, depth):
    log, loader = Log(monkeypatch), Counter(make_batches(5))
    # The host's own memory stands in for the device's, and what lies there already for what was moved.
    for number, batch in enumerate(device_module._ahead(loader, CPU, log.prepare, depth)):
        assert log.stream == "user"
        assert log.lines.index(("prepare", number, "side")) < log.lines.index(("event", number, "side"))
        waited = log.lines.index(("wait", number, "user"))
        assert log.lines.index(("event", number, "side")) < waited
        kept = {line[1] for line in log.lines[waited:] if line[0] == "keep" and line[2] == "user"}
        assert kept >= {part.data_ptr() for part in tensors_of(batch)}
        assert sum(line[0] == "prepare" for line in log.lines) == min(number + 1 + depth, 5)
        assert [id(one) for one in loader.delivered] == [id(one) for one in loader.made[: number + 1]]
        assert_same(batch, Normalize()(loader.made[number]))
    assert len(loader.delivered) == 5


def test_what_is_on_the_device_already_is_awaited_and_kept_for_the_side_stream(monkeypatch):
    log, made = Log(monkeypatch), make_batch()
    next(device_module._ahead(iter([made]), CPU, log.prepare, 1))
    prepared = log.lines.index(("prepare", 0, "side"))
    assert ("wait_stream", "side", "user") in log.lines[1:prepared]
    kept = {line[1] for line in log.lines[prepared:] if line[0] == "keep" and line[2] == "side"}
    assert kept == {part.data_ptr() for part in tensors_of(made)}


def test_closing_half_way_drops_what_was_read_ahead_and_does_not_count_it(monkeypatch):
    log, loader = Log(monkeypatch), Counter(make_batches(5))
    prepared = []

    def prepare(batch):
        batch = log.prepare(batch)
        prepared.append(weakref.ref(batch.frames))
        return batch

    batches = device_module._ahead(loader, CPU, prepare, 2)
    next(batches)
    assert (loader.read, len(prepared)) == (3, 3)
    batches.close()
    assert loader.closed
    assert [held() for held in prepared] == [None] * 3
    assert len(loader.delivered) == 1


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pin", [False, True])
def test_the_gpu_gives_what_the_cpu_gives(gpu, dtype, pin):
    prepare = Normalize(dtype=dtype)
    on_gpu = prefetch(make_batches(4, pin=pin), gpu, prepare=prepare)
    for there, here in zip(on_gpu, prefetch(make_batches(4), "cpu", prepare=prepare), strict=True):
        assert {there.frames.device, there.labels.device, there.extras["inertial"].device} == {gpu}
        assert there.videos.device == there.times_s.device == there.extras["seed"].device == CPU
        assert there.frames.stride() == here.frames.stride()
        assert there.frames.dtype == dtype
        atol = 2e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(there.frames.cpu(), here.frames, rtol=0, atol=atol)
        assert torch.equal(there.labels.cpu(), here.labels)
        assert torch.equal(there.extras["inertial"].cpu(), here.extras["inertial"])


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("pin", [False, True])
def test_memory_is_never_reused_too_early_under_random_delays(gpu, depth, pin):
    """Each stream is at times far behind the other, and a batch is let go of before its step has run."""
    chance = torch.Generator().manual_seed(depth)

    def delay():
        torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=chance)))  # to about a millisecond

    def prepare(batch):
        delay()
        batch = LEVELS(batch)
        delay()
        return batch

    def made():  # each lives no longer than `prefetch` holds on to it
        return (make_batch(number, frames=8, height=56, width=56, pin=pin) for number in range(80))

    expected = [(batch.frames.long().sum().item(), batch.labels.tolist()) for batch in made()]
    sums, labels = [], []
    for batch in prefetch(made(), gpu, prepare=prepare, depth=depth):
        delay()
        sums.append(batch.frames.double().sum())
        labels.append(batch.labels + 0)
        delay()
        del batch
    found = [(round(one.item()), two.tolist()) for one, two in zip(sums, labels, strict=True)]
    assert found == expected


@pytest.mark.gpu
def test_preparation_overlaps_with_the_step(gpu):
    def work(batch):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        return batch

    def seconds(prepare, in_step):
        torch.cuda.synchronize(gpu)
        begin = time.perf_counter()
        for batch in prefetch(make_batches(12, pin=True), gpu, prepare=prepare):
            in_step(batch)
        torch.cuda.synchronize(gpu)
        return time.perf_counter() - begin

    seconds(work, work)
    alone = seconds(lambda batch: batch, work)
    assert seconds(work, work) < 1.6 * alone  # twice as much work; 13/12 of the time where it overlaps


@pytest.mark.gpu
def test_a_batch_that_was_made_on_the_gpu_is_awaited(gpu):
    def made():
        for number in range(20):
            batch = to_device(make_batch(number), gpu)
            frames = torch.zeros_like(batch.frames)
            torch.cuda._sleep(2_000_000)
            frames.copy_(batch.frames)
            yield batch._replace(frames=frames)

    sums = [batch.frames.double().sum() for batch in prefetch(made(), gpu, prepare=LEVELS)]
    expected = [make_batch(number).frames.long().sum().item() for number in range(20)]
    assert [round(one.item()) for one in sums] == expected


@pytest.mark.gpu
def test_epochs_do_not_take_more_and_more_of_the_gpus_memory(gpu):
    def epoch():
        for batch in prefetch(make_batches(4, height=112, width=112, pin=True), gpu):
            batch.frames.sum().item()
        torch.cuda.synchronize(gpu)
        return torch.cuda.memory_reserved(gpu)

    epoch()
    second = epoch()
    assert [epoch() for _ in range(5)] == [second] * 5


@pytest.mark.gpu
def test_the_count_is_exact_at_every_yield_on_a_gpu(gpu):
    loader = Counter(make_batches(5, pin=True))
    for number, _ in enumerate(prefetch(loader, gpu, depth=2)):
        assert len(loader.delivered) == number + 1
        assert loader.read == min(number + 3, 5)


@pytest.mark.gpu
def test_closing_half_way_frees_the_gpus_memory(gpu):
    torch.cuda.synchronize(gpu)
    batches = prefetch((make_batch(number, height=112, width=112) for number in range(9)), gpu, depth=3)
    list(islice(batches, 1))
    held = torch.cuda.memory_allocated(gpu)
    batches.close()
    assert torch.cuda.memory_allocated(gpu) <= held - 4 * 3 * (3 * 4 * 112 * 112 * 3)
