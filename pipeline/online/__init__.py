"""The online half: clips out of stored frames, to the device. These are the names that users need."""

from pipeline.online.augment import AugmentSpec, labels_named
from pipeline.online.collate import Clip, ClipBatch
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Normalize, prefetch
from pipeline.online.device_augment import DeviceAugment, DeviceAugmentSpec
from pipeline.online.loader import LoaderSpec, build_loader
from pipeline.online.samplers import ClipRef, EpochSampler, EvalSampler
from pipeline.online.store import FolderStore, PackStore, open_store
from pipeline.online.windows import WindowSpec

__all__ = [
    "AugmentSpec",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipRef",
    "DeviceAugment",
    "DeviceAugmentSpec",
    "EpochSampler",
    "EvalSampler",
    "FolderStore",
    "LoaderSpec",
    "Normalize",
    "PackStore",
    "WindowSpec",
    "build_loader",
    "labels_named",
    "open_store",
    "prefetch",
]
