"""The few columns of a manifest that a worker needs, in memory that all workers share."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pipeline.manifest import Manifest


class SharedColumns:
    """Labels, lengths, rates and folder names of a manifest's rows.

    Arrow's own table would be copied to each worker by spawn: 100 MB for 1,000,000 rows. These lie in
    shared memory and are handed on as file descriptors, 35 MB once for the machine.
    """

    def __init__(self, manifest: Manifest) -> None:
        names = [name.encode() for name in manifest.column("frames").to_pylist()]
        ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self._columns = {name: _shared(manifest.column(name)) for name in ("label", "num_frames", "fps")}
        self._ends = _shared(ends)
        self._text = _shared(np.frombuffer(b"".join(names), np.uint8))
        self._map()

    def _map(self) -> None:
        """Plain views of the shared memory: reading a number out of a tensor takes twenty times as long."""
        self._ends_view, self._text_view = self._ends.numpy(), self._text.numpy()
        self._views = {name: tensor.numpy() for name, tensor in self._columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"_columns": self._columns, "_ends": self._ends, "_text": self._text}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def column(self, name: str) -> Any:
        """A numeric column as numpy (N,), on the shared memory."""
        return self._views[name]

    def label(self, row: int) -> int:
        """The label of a row."""
        return int(self._views["label"][row])

    def frames(self, row: int) -> str:
        """The folder of a row's frames below the frames root: the store's key for it."""
        start, stop = self._ends_view[row : row + 2].tolist()
        return bytes(self._text_view[start:stop]).decode()


def shared(values: Tensor) -> Tensor:
    """The same values in memory that other processes get by a file descriptor."""
    return cast(Tensor, values.share_memory_())  # type: ignore[no-untyped-call]


def _shared(values: np.ndarray) -> Tensor:
    return shared(torch.from_numpy(np.array(values)))
