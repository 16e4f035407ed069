"""The online half: clips out of stored frames, to the device. These are the names that users need."""

from pipeline.online.augment import AugmentSpec, labels_named
from pipeline.online.collate import Clip, ClipBatch
from pipeline.online.concat import ConcatStore, concat_manifests, source_ids
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Normalize, prefetch
from pipeline.online.device_augment import DeviceAugment, DeviceAugmentSpec
from pipeline.online.distribution import report_distribution
from pipeline.online.loader import LoaderSpec, build_loader
from pipeline.online.quotas import balanced_order, balanced_weights, quota_order
from pipeline.online.samplers import ClipRef, EpochSampler, EvalSampler
from pipeline.online.store import FolderStore, PackStore, open_store
from pipeline.online.windows import WindowSpec

__all__ = [
    "AugmentSpec",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipRef",
    "ConcatStore",
    "DeviceAugment",
    "DeviceAugmentSpec",
    "EpochSampler",
    "EvalSampler",
    "FolderStore",
    "LoaderSpec",
    "Normalize",
    "PackStore",
    "WindowSpec",
    "balanced_order",
    "balanced_weights",
    "build_loader",
    "concat_manifests",
    "labels_named",
    "open_store",
    "prefetch",
    "quota_order",
    "report_distribution",
    "source_ids",
]
