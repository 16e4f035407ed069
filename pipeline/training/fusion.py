"""Frames and readings in one model: a small network for both, and a loop that trains and judges it.

    batch.frames             -> small 3D-CNN        -> features -+
    batch.extras[source]     -> 1D convolutions     -> features -+-> one linear layer -> classes

The loop is the plainest one that there is, to be read and copied: one process, without checkpoints or
mixed precision, which `pipeline.training.trainer` has for models of frames alone.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeline.online.collate import ClipBatch
from pipeline.online.device import prefetch
from pipeline.online.loader import ClipLoader
from pipeline.online.samplers import EpochSampler
from pipeline.training.models import ModelError, small_cnn
from pipeline.training.ranks import seed_generators
from pipeline.training.recipe import TrainingError, TrainSpec, build_optimizer, learning_rate

_FEATURES = 32
"""What is known of a clip's readings. The small 3D-CNN has 128 of its frames."""


class FusionNet(nn.Module):
    """A small 3D-CNN for frames beside a few 1D convolutions for readings, joined by one linear layer.

    num_channels  C of the readings

    Called without readings, it has zeros in place of their features: the same network, the same weights to
    begin with, and nothing but the frames to go by.
    """

    def __init__(self, num_classes: int, num_channels: int, *, width: int = 16) -> None:
        super().__init__()
        self.pictures = small_cnn(num_classes, width=width)
        self.pictures.head = nn.Identity()
        self.normalize = nn.BatchNorm1d(num_channels)
        self.series = nn.Sequential(
            nn.Conv1d(num_channels, _FEATURES // 2, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.Conv1d(_FEATURES // 2, _FEATURES, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),  # whether there was a jolt of this kind, whenever it was
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width + _FEATURES, num_classes)

    def forward(self, frames: Tensor, readings: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Scores of each class, float (B, classes), not yet softmax.

        frames    float (B, 3, T, H, W), normalised
        readings  float (B, T, C), in any unit: each channel is normalised here
        mask      bool (B, T): False where readings are made up; they count as the channel's mean
        """
        seen = self.pictures(frames)
        if readings is None:
            told = seen.new_zeros(len(seen), _FEATURES)
        else:
            told = self._features(readings, mask)
        scores: Tensor = self.head(torch.cat([seen, told], dim=1))
        return scores

    def _features(self, readings: Tensor, mask: Tensor | None) -> Tensor:
        normal = self.normalize(readings.transpose(1, 2))  # (B, T, C) -> (B, C, T)
        if mask is not None:
            normal = normal * mask[:, None]
        features: Tensor = self.series(normal)
        return features


def build_fusion(num_classes: int, num_channels: int, *, width: int = 16, seed: int = 0) -> FusionNet:
    """A `FusionNet` with random weights; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = FusionNet(num_classes, num_channels, width=width)
    return model.to(memory_format=torch.channels_last_3d)


def score_clips(model: FusionNet, batch: ClipBatch, source: str | None) -> Tensor:
    """The model's scores of a prepared batch, float (B, classes); `source` None: by the frames alone.

    ModelError where the batch has no such source, or not its readings at the frames.
    """
    if source is None:
        return model(batch.frames)  # type: ignore[no-any-return]
    readings, (clips, _, frames, *_) = batch.extras.get(source), batch.frames.shape
    if readings is None or readings.shape[:2] != (clips, frames):
        found = ", ".join(f"{name} {tuple(part.shape)}" for name, part in batch.extras.items())
        raise ModelError(
            f"the model wants readings {source!r} at the frames, (B, T, C), and the batch has {found}: "
            f'give the dataset sources={{{source!r}: SeriesSource(...)}} with take="frames"'
        )
    return model(batch.frames, readings, batch.extras[f"{source}_mask"])  # type: ignore[no-any-return]


def fit_fusion(
    model: FusionNet,
    loader: ClipLoader,
    spec: TrainSpec,
    *,
    source: str | None,
    device: str | torch.device = "cpu",
) -> list[float]:
    """Train a model in place; returns the mean loss of each epoch.

    source  name of the readings in a batch's extras; None: by the frames alone

    TrainingError where the sampler has no epochs, or the loss is no longer a number. Torch's global
    generators are left as they were.
    """
    sampler, device = loader.sampler, torch.device(device)
    if not isinstance(sampler, EpochSampler):
        raise TrainingError(f"a {type(sampler).__name__} has no epochs: train with an EpochSampler")
    model.to(device).train()
    optimizer, losses = build_optimizer(model, spec), []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_generators(spec.seed, 0, rank=0, device=device)
        for epoch in range(spec.epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros((), device=device)
            for step, batch in enumerate(prefetch(loader, device)):
                progress = (epoch + (step + 0.5) / len(loader)) / spec.epochs
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(progress, spec)
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(score_clips(model, batch, source), batch.labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.detach() * len(batch.labels)
            losses.append(float(total) / len(sampler))
            if not math.isfinite(losses[-1]):
                raise TrainingError(f"the loss is {losses[-1]} in epoch {epoch + 1}: take a lower lr")
    return losses


def judge_fusion(
    model: FusionNet, loader: ClipLoader, *, source: str | None, device: str | torch.device = "cpu"
) -> float:
    """Top-1 in [0, 1]: the share of the loader's clips whose class has the highest score.

    With an `EvalSampler` of one view that is the share of videos. A clip's scores do not depend on the
    others of its batch, so that clips which are alike get the same.
    """
    was_training, device = model.training, torch.device(device)
    model.to(device).eval()
    right = count = 0
    with torch.no_grad():
        for batch in prefetch(loader, device):
            predicted = score_clips(model, batch, source).argmax(dim=1)
            right += int((predicted == batch.labels).sum())
            count += len(batch.labels)
    model.train(was_training)
    return right / count
