import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from pipeline.online import LoaderSpec, build_loader
from pipeline.online.lending import BatchMemory
from tests.streams import open_loader, write_textured_dataset

SHAPE = (2, 3)


def hand_over(tensor):
    """As a queue between two processes does."""
    return pickle.loads(bytes(ForkingPickler.dumps(tensor)))


def test_a_place_is_free_again_when_both_processes_have_let_go():
    memory = BatchMemory(workers=2, slots=1, slot_bytes=6)
    sent = memory.take(1, SHAPE)
    sent.copy_(torch.arange(6).reshape(SHAPE))
    assert memory.take(1, SHAPE) is None
    received = hand_over(sent)
    assert type(received) is torch.Tensor
    assert received.data_ptr() == sent.data_ptr()
    assert received.tolist() == [[0, 1, 2], [3, 4, 5]]
    del sent
    assert memory.take(1, SHAPE) is None
    del received
    assert memory.take(1, SHAPE) is not None


def test_what_a_worker_keeps_of_a_batch_keeps_its_place():
    memory = BatchMemory(workers=1, slots=1, slot_bytes=6)
    sent = memory.take(0, SHAPE)
    kept = sent[1]
    hand_over(sent)
    del sent
    assert memory.take(0, SHAPE) is None
    del kept
    assert memory.take(0, SHAPE) is not None


@pytest.mark.parametrize("keep", [lambda t: t[1, :1], lambda t: t.numpy(), lambda t: t.view(-1)])
def test_any_view_of_what_was_received_keeps_its_place(keep):
    memory = BatchMemory(workers=1, slots=1, slot_bytes=6)
    kept = keep(hand_over(memory.take(0, SHAPE)))
    assert memory.take(0, SHAPE) is None
    del kept
    assert memory.take(0, SHAPE) is not None


def test_a_batch_that_was_never_sent_leaves_its_place():
    memory = BatchMemory(workers=1, slots=1, slot_bytes=6)
    memory.take(0, SHAPE)
    assert memory.take(0, SHAPE) is not None


def test_what_is_too_large_has_no_place():
    memory = BatchMemory(workers=1, slots=2, slot_bytes=6)
    assert memory.take(0, (4096,)) is not None  # whole pages
    assert memory.take(0, (4097,)) is None


def test_what_is_made_of_a_lent_tensor_is_sent_with_its_values():
    memory = BatchMemory(workers=1, slots=1, slot_bytes=6)
    lent = memory.take(0, SHAPE).fill_(7)
    for made in (lent[1], lent.float(), lent.flip(0)):
        assert type(made) is torch.Tensor
        assert hand_over(made).tolist() == made.tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_textured_dataset(tmp_path_factory.mktemp("lending"))


def epochs_of(loader, keep):
    """What is kept of each batch of three epochs."""
    kept = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        kept += [keep(batch.frames) for batch in loader]
    return kept


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("keep", [lambda frames: frames, lambda frames: frames[1, 2]])
def test_batches_that_are_kept_are_never_written_to_again(root, keep, start_method):
    expected = epochs_of(open_loader(root, LoaderSpec(batch_size=3, workers=0)), keep)
    loader = open_loader(root, LoaderSpec(batch_size=3, workers=2, start_method=start_method))
    kept = epochs_of(loader, keep)
    assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))


def test_batches_that_are_let_go_lie_in_few_places(root):
    loader = open_loader(root, LoaderSpec(batch_size=3, workers=2, prefetch=2))
    places = epochs_of(loader, lambda frames: frames.data_ptr())
    assert len(places) == 24
    assert len(set(places)) <= 6


def test_two_loaders_of_one_dataset_have_places_of_their_own(root):
    first = open_loader(root, LoaderSpec(batch_size=3, workers=1))
    spec = LoaderSpec(batch_size=3, workers=1)
    second = build_loader(first.dataset, first.sampler, spec)
    of_first, of_second = iter(first.batches()), iter(second.batches())
    for one, other in zip(of_first, of_second, strict=True):
        assert one.frames.data_ptr() != other.frames.data_ptr()
        assert torch.equal(one.frames, other.frames)


def test_an_epoch_that_was_left_half_way_costs_no_place_for_good(root):
    loader = open_loader(root, LoaderSpec(batch_size=3, workers=2, prefetch=1))
    expected = epochs_of(open_loader(root, LoaderSpec(batch_size=3, workers=0)), torch.clone)
    for _ in range(4):
        next(iter(loader.batches()))
    places = epochs_of(loader, lambda frames: frames.data_ptr())
    assert len(set(places)) <= 4
    got = epochs_of(loader, torch.clone)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_workers_of_a_single_epoch_have_no_such_memory(root):
    assert open_loader(root, LoaderSpec(workers=2, persistent=False)).slot_bytes == 0
