"""How a model is trained: the options, and what follows from them alone."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pipeline.errors import PipelineError

Amp = Literal["auto", "off", "bf16", "fp16"]


class TrainingError(PipelineError):
    """A run cannot begin, or has come to where going on is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How a model is trained."""

    epochs: int = 20
    """Times that the training videos are gone through."""
    lr: float = 3e-3
    """Highest learning rate. Of a step, which is a batch of all ranks: it is not scaled by their number. As
    it stands it is for the small model; begin lower with larger ones."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """`sgd` is with Nesterov's momentum, and wants an lr about ten times as high."""
    momentum: float = 0.9
    """Of `sgd` alone."""
    weight_decay: float = 0.05
    """Of weights, not of biases and of what normalises. For `sgd` 1e-4 is usual."""
    schedule: Literal["cosine", "step"] = "cosine"
    """How the lr falls after the warm-up: to 0, or in steps."""
    warmup: float = 0.1
    """Share of the run in which the lr rises from 0, evenly."""
    step_at: tuple[float, ...] = (0.5, 0.75)
    """Shares of the run after which `step` lowers the lr."""
    step_factor: float = 0.1
    """By how much it does so."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over all classes."""
    clip_grad: float | None = None
    """Longest gradient (L2 norm over all parameters); a longer one is scaled down. None: any."""
    amp: Amp = "auto"
    """Precision of the forward pass. `auto`: bf16 on a GPU that has it, else fp16; off on the CPU."""
    seed: int = 0
    """Of what chance there is in the model, as in dropout; the clips have the sampler's seed."""
    eval_every: int = 1
    """Epochs from one evaluation to the next; the last epoch always has one."""
    checkpoint_every: int = 500
    """Steps from one checkpoint to the next within an epoch; 0: only at its end. One of r3d_18 with AdamW
    (400 MB) took 0.7 to 1.1 s."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.eval_every < 1 or self.checkpoint_every < 0 or self.seed < 0:
            raise ValueError(
                f"epochs and eval_every must be >= 1, checkpoint_every and seed >= 0, got {self}"
            )
        if not (self.lr > 0 and self.weight_decay >= 0 and 0 <= self.momentum < 1 and self.step_factor > 0):
            raise ValueError(
                "lr and step_factor must be > 0, weight_decay >= 0 and momentum in [0, 1), "
                f"got {self.lr}, {self.step_factor}, {self.weight_decay} and {self.momentum}"
            )
        if not (0 <= self.warmup < 1 and all(0 < at < 1 for at in self.step_at)):
            raise ValueError(
                f"warmup must be in [0, 1) and step_at in (0, 1), got {self.warmup} and {self.step_at}"
            )
        if not 0 <= self.label_smoothing < 1 or (self.clip_grad is not None and self.clip_grad <= 0):
            raise ValueError(
                "label_smoothing must be in [0, 1) and clip_grad > 0 or None, "
                f"got {self.label_smoothing} and {self.clip_grad}"
            )


def learning_rate(progress: float, spec: TrainSpec) -> float:
    """The lr at a share of the whole run, in [0, 1].

    Of the share, and not of a step's number, so that a run resumed on other ranks keeps to its curve.

    >>> [learning_rate(at, TrainSpec(lr=1.0, warmup=0.2)) for at in (0.1, 0.2, 0.6, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < spec.warmup:
        return spec.lr * progress / spec.warmup
    if spec.schedule == "step":
        return spec.lr * spec.step_factor ** sum(progress >= at for at in spec.step_at)
    return spec.lr * (1 + math.cos(math.pi * (progress - spec.warmup) / (1 - spec.warmup))) / 2


def autocast_dtype(amp: Amp, device: torch.device) -> torch.dtype | None:
    """What a model computes in on a device; None is float32, without autocast.

    TrainingError for fp16 on the CPU, which has no scaled gradients.
    """
    if amp == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if amp == "fp16" and device.type != "cuda":
        raise TrainingError(f"amp fp16 is for CUDA, and this is {device}: take bf16, or off")
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]


def build_optimizer(model: nn.Module, spec: TrainSpec) -> torch.optim.Optimizer:
    """The spec's optimizer; parameters of one dimension or none, biases and norms, do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if spec.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0)
    return torch.optim.AdamW(groups, lr=spec.lr)
