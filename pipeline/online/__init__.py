"""The online half: clips out of stored frames, to the device. These are the names that users need."""

from pipeline.online.augment import AugmentSpec, labels_named
from pipeline.online.collate import Clip, ClipBatch
from pipeline.online.concat import ConcatStore, concat_manifests, source_ids
from pipeline.online.dataset import ClipDataset
from pipeline.online.device import Normalize, prefetch
from pipeline.online.device_augment import DeviceAugment, DeviceAugmentSpec
from pipeline.online.device_decode import DecodedBatches
from pipeline.online.distribution import report_distribution
from pipeline.online.encoded import EncodedClipDataset
from pipeline.online.extras import leave_out_missing
from pipeline.online.hyperspectral import CubeSource
from pipeline.online.loader import LoaderSpec, build_loader
from pipeline.online.quotas import balanced_order, balanced_weights, quota_order
from pipeline.online.reuse import ReuseSpec
from pipeline.online.samplers import ClipRef, EpochSampler, EvalSampler
from pipeline.online.series import ClockSpec, SeriesSource, SeriesSpec
from pipeline.online.store import FolderStore, PackStore, open_store
from pipeline.online.windows import WindowSpec

__all__ = [
    "AugmentSpec",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipRef",
    "ClockSpec",
    "ConcatStore",
    "CubeSource",
    "DecodedBatches",
    "DeviceAugment",
    "DeviceAugmentSpec",
    "EncodedClipDataset",
    "EpochSampler",
    "EvalSampler",
    "FolderStore",
    "LoaderSpec",
    "Normalize",
    "PackStore",
    "ReuseSpec",
    "SeriesSource",
    "SeriesSpec",
    "WindowSpec",
    "balanced_order",
    "balanced_weights",
    "build_loader",
    "concat_manifests",
    "labels_named",
    "leave_out_missing",
    "open_store",
    "prefetch",
    "quota_order",
    "report_distribution",
    "source_ids",
]
