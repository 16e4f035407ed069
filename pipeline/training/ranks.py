"""The processes that train together: which one this is, what they agree upon, and the chance of each."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.seeds import generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of the processes that train together this one is.

    Where there are more than one, `torch.distributed` must have been set up, with gloo for tensors on
    the CPU: what is agreed upon, and what is counted, never goes through a GPU.
    """

    rank: int = 0
    """In [0, world)."""
    world: int = 1
    """Processes on all machines."""
    local_rank: int = 0
    """In [0, local_world): the number of this process's GPU."""
    local_world: int = 1
    """Processes on this machine."""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world and 0 <= self.local_rank < self.local_world <= self.world):
            raise ValueError(f"ranks must count from 0 to below their worlds, got {self}")
        if self.world > 1 and not dist.is_initialized():
            raise ValueError(f"torch.distributed is not set up for {self.world} ranks: start with torchrun")

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def highest(self, value: int) -> int:
        """The highest value that a rank gave; all ranks must ask."""
        if self.world == 1:
            return value
        shared = torch.tensor([int(value)])
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def gathered(self, part: Tensor) -> Tensor:
        """The parts of all ranks, in their order: (...) on the CPU, all of one shape -> (world, ...)."""
        if self.world == 1:
            return part[None]
        parts = [torch.empty_like(part) for _ in range(self.world)]
        dist.all_gather(parts, part)
        return torch.stack(parts)


ALONE = Ranks()
"""The only process."""


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the first one's running statistics: each has its own since its last step."""
    if ranks.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


# Torch's generators, from which a model draws.


def seed_generators(seed: int, step: int, *, rank: int, device: torch.device) -> None:
    """Set the global ones, of the CPU and of the device, by what is given and nothing else."""
    mixed = int(generator(seed, step, rank).integers(2**63))
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed would seed those of all GPUs
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed)


def generator_states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Those of all ranks, uint8 (world, bytes): `cpu`, and `cuda` where the device is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: ranks.gathered(state) for name, state in states.items()}


def restore_generators(states: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> bool:
    """Go on with this rank's; False where they are of another number of ranks, or another kind of device."""
    kinds = {"cpu", "cuda"} if device.type == "cuda" else {"cpu"}
    if states.keys() != kinds or len(states["cpu"]) != ranks.world:
        return False
    # Copies, since torch (2.14) ends the process when it is given a row of a larger tensor.
    torch.set_rng_state(states["cpu"][ranks.rank].clone())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][ranks.rank].clone(), device)
    return True
