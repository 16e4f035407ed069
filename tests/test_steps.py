"""The timer of a user's loop: the same batches, and lines that tell the share of waiting."""

import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeline.measure import steps as module
from pipeline.measure import timed
from pipeline.online import LoaderSpec, prefetch
from pipeline.timing import StageClock, StepMarks, Timer, cuda_timer, stage_cost_s, wall_timer
from tests.streams import open_loader, samples, write_textured_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_textured_dataset(tmp_path_factory.mktemp("steps"))


def slow(count, seconds):
    for number in range(count):
        time.sleep(seconds)
        yield number


def shares(lines):
    return [int(re.search(r"waiting (\d+) %", line)[1]) for line in lines]


def test_two_lines_suffice_and_the_terminal_gets_a_line(capsys):
    for _ in timed([1, 2, 3], every=2):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("steps 2-3: ")
    assert "the first batch came after 0.0 s" in lines[0]


def test_batches_and_length_are_those_of_the_loader_and_a_second_epoch_comes(root):
    loader = open_loader(root, LoaderSpec(batch_size=5, workers=0))
    lines = []
    batches = timed(loader, every=2, report=lines.append)
    assert len(batches) == len(loader) == 5
    assert list(samples(batches)) == list(samples(loader))
    assert [line.split(":")[0] for line in lines] == ["steps 2-3", "steps 4-5"]
    loader.sampler.set_epoch(1)
    again = list(samples(batches))
    loader.sampler.set_epoch(1)
    assert again == list(samples(loader))
    assert len(lines) == 4


def test_a_generator_has_no_length():
    with pytest.raises(TypeError):
        len(timed(iter([1])))
    assert list(timed(iter([1, 2]), report=lambda line: None)) == [1, 2]


def test_a_slow_loader_is_waiting_and_a_slow_step_is_not():
    lines = []
    for _ in timed(slow(4, 0.05), report=lines.append):
        pass
    for _ in timed(range(4), report=lines.append):
        time.sleep(0.05)
    waiting, none = shares(lines)
    assert waiting > 80
    assert none < 20
    assert "`make profile` says what to change" in lines[0]


def test_the_first_batch_is_counted_apart():
    def source():
        time.sleep(0.3)
        yield 0
        yield from range(3)

    lines = []
    for _ in timed(source(), report=lines.append):
        time.sleep(0.02)
    assert shares(lines)[0] < 50
    assert "the first batch came after 0.3 s" in lines[0]


def test_lines_come_every_so_many_steps_and_for_the_rest():
    lines = []
    list(timed(range(8), every=3, report=lines.append))
    assert [line.split(":")[0] for line in lines] == ["steps 2-4", "steps 5-7", "steps 8-8"]
    assert sum("first batch" in line for line in lines) == 1


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_said_of_no_steps(count):
    lines = []
    assert len(list(timed(range(count), report=lines.append))) == count
    assert lines == []


def test_a_loop_that_is_left_closes_what_it_read_from():
    closed = []

    def source():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    batches = iter(timed(source()))
    next(batches)
    batches.close()
    assert closed == [True]


def test_errors_pass_through():
    def source():
        yield 1
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        list(timed(source()))
    with pytest.raises(ValueError, match="every must be >= 1"):
        timed([], every=0)


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_was_delivered_is_counted_inside_and_around_prefetch(root, is_inside):
    loader = open_loader(root, LoaderSpec(batch_size=5, workers=0))
    lines = []
    if is_inside:
        batches = prefetch(timed(loader, report=lines.append), "cpu")
    else:
        batches = timed(prefetch(loader, "cpu"), report=lines.append)
    for number, batch in enumerate(batches, 1):
        assert loader.sampler.delivered == min(5 * number, 24)
        assert batch.frames.dtype == torch.float32
    assert len(lines) == 1


class FakeGpu:
    """A GPU that is slower than its host: what is queued is done later."""

    def __init__(self):
        self.now = self.done = 0.0

    def queue(self, seconds):
        self.done = max(self.done, self.now) + seconds

    def timer(self):
        return Timer(lambda: max(self.done, self.now), lambda begin, end: end - begin, lambda: None)


@pytest.mark.parametrize(("loading_s", "share"), [(0.5, 0), (2.0, 50)])
def test_on_a_gpu_its_own_waiting_counts_and_not_the_hosts(monkeypatch, loading_s, share):
    gpu = FakeGpu()

    def source():
        for number in range(21):
            gpu.now += loading_s
            yield number

    lines = []
    monkeypatch.setattr(module, "_timer", gpu.timer)
    for _ in timed(source(), every=20, report=lines.append):
        gpu.queue(1.0)  # the host is free at once
    assert shares(lines) == [share]


def test_without_a_gpu_in_use_it_is_the_hosts_clock(monkeypatch):
    monkeypatch.setattr(module, "_uses_cuda", lambda: False)
    begin = module._timer().mark()
    assert 0 <= time.perf_counter() - begin < 60


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream = stream

    def elapsed_time(self, end):
        assert self.stream == end.stream == "current of 0"
        return 1500.0


def test_marks_on_a_gpu_are_events_on_its_current_stream(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    marks = StepMarks(cuda_timer(0))
    marks.begin()
    marks.end()
    assert waited == []
    assert marks.take() == [(1.5, 1.5)]
    assert waited == [0]


def test_steps_and_the_waits_between_them_fill_the_time():
    marks = StepMarks(wall_timer())
    begin = time.perf_counter()
    for _ in range(5):
        marks.begin()
        time.sleep(0.002)
        marks.end()
    took_s = time.perf_counter() - begin
    assert len(marks) == 5
    pairs = marks.take()
    assert sum(map(sum, pairs)) == pytest.approx(took_s, abs=0.05)
    assert all(used >= 0.002 for _, used in pairs)
    assert (len(marks), marks.take()) == (0, [])


def test_a_clock_adds_up_over_threads_and_begins_anew_in_a_copy():
    clock = StageClock()

    def work(_):
        with clock("read"):
            time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    copied = pickle.loads(pickle.dumps(clock))
    assert copied.take() == {}
    total = clock.take()["read"]
    assert total.entries == 8
    assert total.seconds >= 0.08
    assert total.cpu_s < total.seconds
    assert clock.take() == {}


def test_a_stage_that_raises_counts_too():
    clock = StageClock()
    with pytest.raises(KeyError), clock("read"):
        raise KeyError
    assert clock.take()["read"].entries == 1


def test_a_stage_costs_next_to_nothing():
    assert 0 < stage_cost_s(rounds=2, entries=50) < 1
