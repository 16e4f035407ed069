"""A small 3D-CNN for a CPU, torchvision's video models, and whether a model fits clips and classes."""

import difflib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import PipelineError


class ModelError(PipelineError):
    """A model does not fit the clips, the classes, or the weights that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is known of a model before it is built."""

    size_px: int
    """Height and width of the clips that it was designed for."""
    head: str
    """Name of the module whose outputs are the classes."""
    min_frames: int = 1
    min_px: int = 1
    """The least that it can take of frames, and of height and width."""
    is_fixed: bool = False
    """Whether it takes 16 frames of its own size and nothing else, by its embedding of positions."""


MODELS: Mapping[str, ModelInfo] = {
    "small": ModelInfo(size_px=56, head="head"),
    "r3d_18": ModelInfo(size_px=112, head="fc"),
    "mc3_18": ModelInfo(size_px=112, head="fc"),
    "r2plus1d_18": ModelInfo(size_px=112, head="fc"),
    "s3d": ModelInfo(size_px=224, head="classifier.1", min_frames=13, min_px=209),
    "mvit_v1_b": ModelInfo(size_px=224, head="head.1", is_fixed=True),
    "mvit_v2_s": ModelInfo(size_px=224, head="head.1", is_fixed=True),
    "swin3d_t": ModelInfo(size_px=224, head="head"),
    "swin3d_s": ModelInfo(size_px=224, head="head"),
    "swin3d_b": ModelInfo(size_px=224, head="head"),
}
"""The models that there are, by name."""


def find_model(name: str) -> ModelInfo:
    """What is known of a model; ModelError names those that there are."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ModelError(f"no model is named {name!r}: {hint}There are {', '.join(MODELS)}")
    return MODELS[name]


def build_model(name: str, num_classes: int, *, seed: int = 0) -> nn.Module:
    """A model with random weights: float (B, 3, T, H, W) -> float (B, num_classes), not yet softmax.

    seed  of the weights; torch's global generator is left as it was

    Its memory is channels-last, as that of the clips; parameters are the same in either order.
    """
    find_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA's for good
        model = small_cnn(num_classes) if name == "small" else _torchvision_model(name, num_classes)
    return model.to(memory_format=torch.channels_last_3d)


def check_clip(name: str, *, frames: int, size_hw: tuple[int, int]) -> None:
    """ModelError where a model cannot take clips of this many frames of this height and width (pixels)."""
    info, found = find_model(name), f"{frames} frames of {size_hw[0]}x{size_hw[1]} px"
    if info.is_fixed and (frames, *size_hw) != (16, info.size_px, info.size_px):
        raise ModelError(f"{name} takes 16 frames of {info.size_px}x{info.size_px} px alone, not {found}")
    if frames < info.min_frames or min(size_hw) < info.min_px:
        raise ModelError(
            f"{name} takes {info.min_frames} or more frames of {info.min_px} px or more, not {found}"
        )


def small_cnn(num_classes: int, *, width: int = 16, dropout: float = 0.2) -> nn.Sequential:
    """Four 3D convolutions and a linear layer: 0.3 M parameters, 0.05 G multiply-adds for 16 frames of 56 px.

    Time is halved three times and space goes down to a sixteenth, so any clip is large enough. The
    first convolutions make steps of 4 px: with steps of 2 all would cost four times as much.
    """
    return nn.Sequential(
        OrderedDict(
            stem=SmallStem(width),
            layer1=_block(width, 2 * width, stride=(2, 1, 1)),
            layer2=_block(2 * width, 4 * width, stride=(2, 2, 2)),
            layer3=_block(4 * width, 8 * width, stride=(2, 2, 2)),
            pool=nn.AdaptiveAvgPool3d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(dropout),
            head=nn.Linear(8 * width, num_classes),
        )
    )


class SmallStem(nn.Module):
    """Half of the features are of what is seen, half of what moves: to a quarter of height and width.

    What moves is how a pixel differs from its mean over the clip, normalised apart, since it is faint
    beside what stands still. On the sample's motions 15 epochs then came to 99 % of its held-out videos,
    and to 83 % with one convolution of the same size over what is seen.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.still = _block(3, width - width // 2, kernel=(1, 7, 7), stride=(1, 4, 4))
        self.moving = _block(3, width // 2, kernel=(3, 7, 7), stride=(1, 4, 4))

    def forward(self, frames: Tensor) -> Tensor:
        """float (B, 3, T, H, W), normalised -> (B, width, T, ceil(H / 4), ceil(W / 4))"""
        motion = frames - frames.mean(dim=2, keepdim=True)
        return torch.cat([self.still(frames), self.moving(motion)], dim=1)


def _block(
    inputs: int, outputs: int, *, kernel: tuple[int, int, int] = (3, 3, 3), stride: tuple[int, int, int]
) -> nn.Sequential:
    padding = tuple(size // 2 for size in kernel)
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False),  # type: ignore[arg-type]
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
    )


def _torchvision_model(name: str, num_classes: int) -> nn.Module:
    from torchvision.models import video  # takes a second, and the small model does without

    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name == "s3d":
        # Its own momentum, 0.001, is for the statistics of weights that come trained: after 1,000 steps
        # 37 % of what evaluation would normalise by would still be what it began with.
        options["norm_layer"] = partial(nn.BatchNorm3d, eps=1e-3)
    model: nn.Module = getattr(video, name)(**options)
    return model


def load_weights(model: nn.Module, state: Mapping[str, Tensor], *, head: str, place: str) -> list[str]:
    """Give a model the weights of another training; returns the names that stay as they were.

    Those are the head's, where it has other classes there. ModelError, beginning with `place`, for
    weights of another model.
    """
    ours = model.state_dict()
    theirs = {name.removeprefix("module."): values for name, values in state.items()}
    foreign = sorted(theirs.keys() - ours.keys())
    missing = [name for name in ours if name not in theirs]
    if foreign or any(not name.startswith(f"{head}.") for name in missing):
        lacks = next((name for name in missing if not name.startswith(f"{head}.")), "nothing")
        raise ModelError(
            f"{place}: weights of another model: it has {foreign[0] if foreign else 'nothing'} that this "
            f"model lacks, and lacks {lacks}; build the model that they are of"
        )
    fresh = [*missing]
    for name, values in theirs.items():
        if values.shape == ours[name].shape:
            continue
        if not name.startswith(f"{head}."):
            found, expected = tuple(values.shape), tuple(ours[name].shape)
            raise ModelError(f"{place}: {name} has shape {found}, this model has {expected}")
        fresh.append(name)
    model.load_state_dict({**ours, **{name: theirs[name] for name in theirs if name not in fresh}})
    return fresh


# Whether a model fits.


def count_outputs(model: nn.Module, shape: tuple[int, ...], *, device: torch.device) -> int:
    """Classes that a model tells apart, found by giving it one black clip; nothing of it changes.

    shape  (C, T, H, W) of a clip

    ModelError where it cannot take such clips, or does not give one row for each.
    """
    clip = torch.zeros(1, *shape, device=device).to(memory_format=torch.channels_last_3d)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(clip)
    except (RuntimeError, ValueError, AssertionError) as error:  # what torch raises for a wrong shape
        found = f"(C, T, H, W) = {tuple(shape)}"
        raise ModelError(f"the model cannot take clips of {found}: {_first_line(error)}") from error
    finally:
        model.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != 1:
        what = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(f"the model must give (B, classes) for B clips, it gave {what} for one")
    return outputs.shape[1]


def check_labels(labels: np.ndarray, classes: Sequence[str], outputs: int) -> None:
    """ModelError where the model's outputs are not the dataset's classes, or a label is none of them."""
    if outputs != len(classes):
        raise ModelError(
            f"the model has {outputs} outputs and the dataset {len(classes)} classes: "
            f"build it with num_classes={len(classes)}"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= outputs))
    if wrong.size:
        raise ModelError(
            f"{wrong.size} of {len(labels)} videos have a label outside of [0, {outputs}), first "
            f"{labels[wrong[0]]} in row {wrong[0]}: labels count from 0; run `make manifest` again"
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
