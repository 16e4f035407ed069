"""The clips of one epoch after another, for what measures a loader."""

import copy
from collections.abc import Iterator
from itertools import count
from typing import Any

from torch.utils.data import Sampler

from pipeline.errors import PipelineError
from pipeline.online.samplers import ClipRef


class EndlessSampler(Sampler[ClipRef]):
    """Epoch after epoch, so that a small dataset does not stop between them; the sampler stays as it is.

    PipelineError where an epoch has no clips.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = copy.copy(sampler)

    def __iter__(self) -> Iterator[ClipRef]:
        for epoch in count(getattr(self._sampler, "epoch", 0)):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            is_empty = True
            for ref in self._sampler:
                is_empty = False
                yield ref
            if is_empty:
                raise PipelineError("the loader's sampler gives no clips: see which rows it was made of")
