"""Memory for batches that is used again, shared by the main process and the workers of one loader.

New shared memory costs a page fault for every 4 kB of every batch: 4 to 9 % of all processor time that a clip
takes (16 x 112 x 112, two workers). Here a worker decodes into a place that an earlier batch has left.

A place is free when nobody can see it any more: no tensor of its worker lies in it, and none of the main
process. Both are told by the array under all such tensors, as it goes; a view of one frame keeps the whole
place. Who keeps many batches gets new memory for further ones, as without all this.
"""

import math
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LENDERS: "weakref.WeakValueDictionary[str, BatchMemory]" = weakref.WeakValueDictionary()
"""Those of loaders of this process, and in a worker its loader's."""
_PAGE_BYTES = 4096


class BatchMemory:
    """Places for batches: `slots` for each of `workers`, of `slot_bytes` each. Pickles as file descriptors.

    Pages that are not written to yet take no memory.
    """

    def __init__(self, *, workers: int, slots: int, slot_bytes: int) -> None:
        if min(workers, slots, slot_bytes) < 1:
            raise ValueError(f"workers, slots and bytes must be >= 1, got {workers}, {slots}, {slot_bytes}")
        self.workers, self.slots = workers, slots
        self.slot_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._id = uuid.uuid4().hex
        self._bytes = _new_shared(workers * slots * self.slot_bytes)
        self._received = _new_shared(workers * slots).zero_()
        """1 where the main process has, or is being sent, a batch."""
        self._register()

    def _register(self) -> None:
        self._is_received = self._received.numpy()
        self._own: set[int] = set()
        """Places in which tensors of this process lie that have not come from another one."""
        _LENDERS[self._id] = self

    def __getstate__(self) -> dict[str, Any]:
        local = ("_is_received", "_own")
        return {name: value for name, value in self.__dict__.items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def take(self, worker: int, shape: Sequence[int]) -> Tensor | None:
        """uint8 of a shape, without a value; None where no place of this worker is free or large enough."""
        if math.prod(shape) > self.slot_bytes:
            return None
        for place in range(worker * self.slots, (worker + 1) * self.slots):
            if place not in self._own and not self._is_received[place]:
                self._own.add(place)
                array = self._array(place, shape)
                weakref.finalize(array, self._own.discard, place).atexit = False
                return _Lent.at(torch.from_numpy(array), self, place)
        return None

    def send(self, place: int) -> str:
        """Note that a place goes to the main process; what finds this memory there."""
        self._is_received[place] = 1
        return self._id

    def receive(self, place: int, shape: Sequence[int]) -> Tensor:
        """In the main process: what a worker has put into a place, which is free again when it is gone."""
        array = self._array(place, shape)
        weakref.finalize(array, self._is_received.__setitem__, place, 0).atexit = False
        return torch.from_numpy(array)

    def _array(self, place: int, shape: Sequence[int]) -> np.ndarray:
        begin = place * self.slot_bytes
        return self._bytes.numpy()[begin : begin + math.prod(shape)].reshape(shape)


class _Lent(Tensor):
    """Goes to the main process as the number of its place. What is made of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    memory: BatchMemory
    place: int

    @classmethod
    def at(cls, tensor: Tensor, memory: BatchMemory, place: int) -> "_Lent":
        lent = tensor.as_subclass(cls)
        lent.memory, lent.place = memory, place
        return lent

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _receive, (self.memory.send(self.place), self.place, tuple(self.shape))


def _receive(memory: str, place: int, shape: Sequence[int]) -> Tensor:
    return _LENDERS[memory].receive(place, shape)


_BY_VALUE_BYTES = 64 << 10


class _ByValue(Tensor):
    """Goes to the main process in the message itself. What is made of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.from_numpy, (self.numpy(),)


def sent_by_value(tensor: Tensor) -> Tensor:
    """In a worker: the same tensor, and a small one goes to the main process within the batch's message.

    Otherwise it is new shared memory, whose file descriptor the main process fetches through a connection of
    its own: in batches of 32 clips that took 85 us of its time for each clip, where this takes 29.
    """
    if type(tensor) is not Tensor or tensor.dtype == torch.bfloat16:  # which numpy lacks
        return tensor
    return tensor.as_subclass(_ByValue) if tensor.nbytes <= _BY_VALUE_BYTES else tensor


def _new_shared(size: int) -> Tensor:
    """uint8 (size,) in shared memory of which no page is touched yet."""
    storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Lender:
    """A worker process's own, once `use_memory` has been called in it."""

    memory: BatchMemory | None = None
    worker = 0


def use_memory(memory: BatchMemory, worker: int) -> None:
    """Have the batches of this process, which is a worker, made in the places of a loader."""
    _Lender.memory, _Lender.worker = memory, worker


def lent_memory(shape: Sequence[int]) -> Tensor | None:
    """uint8 of a shape in this worker's memory; None where there is none, or none that is free."""
    return None if _Lender.memory is None else _Lender.memory.take(_Lender.worker, shape)
