"""The options of `train` that are no spec's own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pipeline.online import AugmentSpec, labels_named
from pipeline.online.device_augment import DeviceAugmentSpec
from pipeline.online.store import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is trained on what, and where it goes."""

    dataset: str = "sample"
    """The folder below DATA that holds `frames/` and, if it was packed, `pack/`."""
    data: Path = Path("data")
    """Root of the datasets."""
    manifests: Path = Path("manifests")
    """Where the manifest is, as DATASET.parquet."""
    model: str = "small"
    """`small`, which trains on a CPU, or one of torchvision's: r3d_18, mc3_18, r2plus1d_18, s3d, mvit_v1_b,
    mvit_v2_s, swin3d_t, swin3d_s, swin3d_b."""
    weights: Path | None = None
    """Weights to begin with: a checkpoint, or a file with a state dict. Nothing is ever downloaded."""
    split: str = "split01"
    """Column of the manifest that says which videos are trained on and which are held out."""
    side: Literal["train", "test"] = "test"
    """Side of the split to evaluate on."""
    out: Path | None = None
    """Folder of the checkpoints; without it runs/DATASET-MODEL."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run that is in OUT goes on, or one begins anew in its place."""
    cache: Cache = "auto"
    """Where frames are read from: `ram`, `disk` (the pack), `off` (the folders); `auto` chooses by size."""
    tuned: Literal["auto", "off"] = "auto"
    """`auto`: options of loading that are left as they come are taken from MANIFESTS/DATASET.tuned.toml,
    which `make tune` writes; one given with its usual value counts as left. `off`: from no such file."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one. Under torchrun each process takes the GPU of its own number."""
    views: int | None = None
    """Clips of each video in the last evaluation, whose scores are averaged; without it 3, for segments 1.
    Evaluations on the way take one."""
    crops: Literal[1, 3] = 1
    """Crops of each of those: the centre, or left, centre and right."""
    evaluate_only: bool = False
    """Only evaluate a checkpoint, with the model and the clips that it was trained with."""
    checkpoint: Path | None = None
    """Which one; without it the last one in OUT."""
    allow_seen: bool = False
    """Evaluate on videos that the model was trained on, too."""
    confusion: bool = False
    """Print which classes are taken for which."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's events; needs the package `tensorboard`."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the outcome as JSON, too."""

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self.out or Path("runs") / f"{self.dataset}-{self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """Which clips are drawn for training, and what is done to their pictures."""

    size_px: int | None = None
    """Height and width of the clips; without it what the model was designed for."""
    scale: tuple[float, float] = (0.5, 1.0)
    """Least and most share of a frame's area that a random crop takes."""
    flip_p: float = 0.5
    """Share of clips that are mirrored."""
    no_flip: tuple[str, ...] = ()
    """Classes that have a direction, like MoveLeft, whose clips are never mirrored."""
    reduce: bool = False
    """Decode pictures at 1/2, 1/4 or 1/8 where clips are so much smaller: faster, and a little less exact."""
    clips_per_video: int = 1
    """Clips of each video in an epoch."""
    balance: bool = False
    """Draw all classes equally often, however many videos they have."""
    on_bad: Literal["raise", "skip"] = "raise"
    """What a damaged frame does to training: stop it, or have another clip take its clip's place."""
    brightness: float = 0.0
    """Greatest change of brightness, as a share; the same for all frames of a clip, as all that follows."""
    contrast: float = 0.0
    """Greatest change of contrast, as a share."""
    saturation: float = 0.0
    """Greatest change of saturation, as a share."""
    hue: float = 0.0
    """Greatest turn of hue, as a share of the circle; at most 0.5."""
    randaugment_ops: int = 0
    """Operations of RandAugment that each clip goes through; 2 is usual."""
    randaugment_magnitude: int = 9
    """Their strength, 0 to 30."""
    erase_p: float = 0.0
    """Share of clips of which a box is erased."""
    mixup_alpha: float = 0.0
    """MixUp: clips are blended, with shares from Beta(this, this); 0 is off."""
    cutmix_alpha: float = 0.0
    """CutMix: boxes are exchanged, the same way."""

    def augment(self, size_px: int, classes: Sequence[str]) -> AugmentSpec:
        """What is done where clips are decoded; PipelineError for a class that there is not."""
        labels = labels_named(self.no_flip, classes)
        return AugmentSpec(
            size_px=size_px,
            scale=self.scale,
            flip_p=self.flip_p,
            no_flip_labels=labels,
            reduce=self.reduce,
        )

    def device_augment(self, num_classes: int) -> DeviceAugmentSpec:
        """What is done on the device."""
        return DeviceAugmentSpec(
            randaugment_ops=self.randaugment_ops,
            randaugment_magnitude=self.randaugment_magnitude,
            brightness=self.brightness,
            contrast=self.contrast,
            saturation=self.saturation,
            hue=self.hue,
            erase_p=self.erase_p,
            mixup_alpha=self.mixup_alpha,
            cutmix_alpha=self.cutmix_alpha,
            num_classes=num_classes,
        )

    def deciding(self) -> dict[str, Any]:
        """Those that decide the weights, as numbers and strings: a run goes on where they are equal."""
        options = asdict(self)
        del options["size_px"]  # what came of it is told by the size of the clips
        return {**options, "no_flip": sorted(set(self.no_flip))}
