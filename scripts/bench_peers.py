"""The others that `bench online` measures: each gives the clips of one plan, made its own way.

Frames, crop boxes and sizes are drawn beforehand, by this project's sampler and augmentation, and handed to
everyone as plain numbers. All are map-style datasets over the places of the plan, so that one `DataLoader`
with the same settings runs them all.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as v1
from torchvision.transforms.v2 import functional as v2

from pipeline.errors import PipelineError
from pipeline.jpeg import decode_jpeg as decode_whole
from pipeline.online import Normalize
from pipeline.online.store import Store

FRAME_TEMPLATE = "img_{:05}.jpg"
"""Names of frames as MMAction2 wants them: its own default."""
_NORMALIZE = Normalize()
_MEAN, _STD = list(_NORMALIZE.mean), list(_NORMALIZE.std)
_BILINEAR = InterpolationMode.BILINEAR


class PlannedClip(NamedTuple):
    """One clip in plain numbers."""

    video: str
    """Path of the video's file."""
    key: str
    """Folder of its frames, below the roots of frames."""
    folder: str
    """The same frames under the names of `FRAME_TEMPLATE`."""
    num_frames: int
    indices: tuple[int, ...]
    """Frames of the clip (T,), ascending."""
    fps: float
    box: tuple[int, int, int, int]
    """Top, left, height, width, in pixels of the frames as the video has them."""
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One of the others."""

    name: str
    what: str
    needs: tuple[str, ...] = ()
    """Modules that must be there, or `module:name` for what must be in one."""
    extra: str = ""
    """The optional extra of this project that brings them."""
    make: Callable[["Plan"], Dataset[Any]]
    collate: Callable[["Plan"], Callable[[list[Any]], Any]] = lambda plan: default_collate
    pixels: Callable[[Any], np.ndarray] | None
    """A batch as uint8 (B, T, H, W, 3), to compare; None where nobody sees a clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What everyone makes."""

    clips: tuple[PlannedClip, ...]
    size_px: int
    """Height and width of what comes out."""
    store: Store
    """The whole JPEGs, for who only decodes them."""
    work_dir: Path


class PilClips(Dataset[tuple[Tensor, int]]):
    """The textbook's pattern: open each file, crop and resize the picture, to float, normalise, stack."""

    def __init__(self, plan: Plan) -> None:
        self.clips, self.size_hw = plan.clips, [plan.size_px, plan.size_px]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        """float32 (C, T, H, W), normalised, and the label."""
        clip = self.clips[place]
        frames = []
        for path in _frame_paths(clip):
            with Image.open(path) as picture:
                cut = v1.resized_crop(picture.convert("RGB"), *clip.box, self.size_hw, _BILINEAR)
            frames.append(v1.normalize(v1.to_tensor(cut), _MEAN, _STD))
        return torch.stack(frames, dim=1), clip.label


class TorchvisionClips(Dataset[tuple[Tensor, int]]):
    """The same with torchvision's own decoder, and its v2 transforms once for the whole clip."""

    def __init__(self, plan: Plan) -> None:
        self.clips, self.size_hw = plan.clips, [plan.size_px, plan.size_px]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        """float32 (C, T, H, W), normalised, and the label."""
        from torchvision.io import ImageReadMode, decode_jpeg, read_file  # which may not stay there

        clip = self.clips[place]
        frames = [decode_jpeg(read_file(path), mode=ImageReadMode.RGB) for path in _frame_paths(clip)]
        cut = resized(torch.stack(frames), clip.box, self.size_hw)
        normal = v2.normalize(v2.to_dtype(cut, torch.float32, scale=True), _MEAN, _STD)
        return normal.transpose(0, 1), clip.label  # (T, C, H, W) -> (C, T, H, W)


class WholeFrames(Dataset[int]):
    """No loader at all: each JPEG of the clips decoded once, whole, into memory that is there already."""

    def __init__(self, plan: Plan) -> None:
        self.clips, self.store = plan.clips, plan.store
        self._memory: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, place: int) -> int:
        """The number of frames that were decoded; the pixels are dropped."""
        clip = self.clips[place]
        jpegs = self.store.read(clip.key, clip.indices)
        if self._memory is None:
            self._memory = np.empty(max(decode_whole(jpegs[0]).size, 16 << 20), np.uint8)
        for jpeg in jpegs:
            decode_whole(jpeg, self._memory)
        return len(jpegs)


class MmactionClips(Dataset[Any]):
    """MMAction2's `RawframeDataset` and transforms, with one of its backends.

    Only its draws are replaced: `SampleFrames` by the plan's frames, and the box of its `RandomResizedCrop`.
    """

    def __init__(self, plan: Plan, *, backend: str) -> None:
        self.clips, self.size_px, self.backend = plan.clips, plan.size_px, backend
        self.list_file = plan.work_dir / "mmaction.txt"
        lines = [f"{clip.folder} {clip.num_frames} {clip.label}\n" for clip in plan.clips]
        self.list_file.write_text("".join(lines))
        self._made: Any = None

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, place: int) -> Any:
        """`inputs` uint8 (1, C, T, H, W) and `data_samples`, as its own dataset gives them."""
        if self._made is None:  # in the worker: its transforms do not travel
            self._made = _rawframe_dataset(self.list_file, self.size_px, self.backend)
        clip = self.clips[place]
        info = self._made.get_data_info(place)
        info |= {"frame_inds": np.array(clip.indices), "clip_len": len(clip.indices), "num_clips": 1}
        return self._made.pipeline({**info, "frame_interval": 1, "box": clip.box})


def _rawframe_dataset(list_file: Path, size_px: int, backend: str) -> Any:
    from mmaction.datasets import RawframeDataset
    from mmaction.datasets.transforms import RandomResizedCrop
    from mmengine.logging import MMLogger
    from mmengine.registry import DefaultScope

    class GivenCrop(RandomResizedCrop):  # type: ignore[misc]
        """Its own crop, at the box that the plan has."""

        def transform(self, results: dict[str, Any]) -> dict[str, Any]:
            top, left, height, width = results["box"]
            self.edges = left, top, left + width, top + height
            done: dict[str, Any] = super().transform(results)
            return done

        def get_crop_bbox(self, *_: Any) -> tuple[int, int, int, int]:
            return self.edges

    MMLogger.get_current_instance().setLevel("ERROR")  # it warns of its own functions, in every worker
    if not DefaultScope.check_instance_created("bench"):
        DefaultScope.get_instance("bench", scope_name="mmaction")
    pipeline = [
        {"type": "RawFrameDecode", "decoding_backend": backend},
        GivenCrop(),
        {"type": "Resize", "scale": (size_px, size_px), "keep_ratio": False},
        {"type": "FormatShape", "input_format": "NCTHW"},
        {"type": "PackActionInputs"},
    ]
    return RawframeDataset(str(list_file), pipeline, filename_tmpl=FRAME_TEMPLATE, start_index=0)


class VideoClips(Dataset[tuple[Tensor, int]]):
    """Straight from the video's file, with `read(clip)` giving uint8 (T, H, W, C) of the whole frames."""

    def __init__(self, plan: Plan, *, read: Callable[[PlannedClip], Tensor]) -> None:
        self.clips, self.size_hw, self.read = plan.clips, [plan.size_px, plan.size_px], read

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        """uint8 (T, C, H, W), and the label."""
        clip = self.clips[place]
        # (T, H, W, C) -> (T, C, H, W), in the memory layout for which torchvision's resize is fastest
        return resized(self.read(clip).permute(0, 3, 1, 2), clip.box, self.size_hw), clip.label


def read_torchcodec(clip: PlannedClip) -> Tensor:
    """With torchcodec, in the mode that does not scan the file first."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(clip.video, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate")
    frames: Tensor = decoder.get_frames_at(list(clip.indices)).data
    return frames


def read_decord(clip: PlannedClip) -> Tensor:
    """With decord, or the fork of it that goes by the same name."""
    from decord import VideoReader

    return torch.from_numpy(VideoReader(clip.video, num_threads=1).get_batch(clip.indices).asnumpy())


def read_pyav(clip: PlannedClip) -> Tensor:
    """With PyAV: to the key frame before the clip, then on to it, by the timestamps."""
    frames: list[np.ndarray] = []
    with av.open(clip.video) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        if stream.time_base is None:
            raise PipelineError(f"{clip.video} has no time base: leave it out of --videos")
        # Half a frame early, since timestamps are rounded.
        first = (stream.start_time or 0) + float((clip.indices[0] - 0.5) / clip.fps / stream.time_base)
        container.seek(max(math.floor(first), 0), stream=stream)
        for frame in container.decode(stream):
            if frame.pts is None or frame.pts >= first:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == len(clip.indices):
                break
    frames += frames[-1:] * (len(clip.indices) - len(frames))
    return torch.from_numpy(np.stack(frames))


def resized(frames: Tensor, box: Sequence[int], size_hw: list[int]) -> Tensor:
    """A box of uint8 frames (T, C, H, W) at the output size, with torchvision's antialiased bilinear."""
    top, left, height, width = box
    cut: Tensor = v2.resized_crop(
        frames, top, left, height, width, size_hw, interpolation=_BILINEAR, antialias=True
    )
    return cut


def _frame_paths(clip: PlannedClip) -> list[str]:
    return [f"{clip.folder}/{FRAME_TEMPLATE.format(index)}" for index in clip.indices]


# A batch of each as pixels.


def pixels_of_floats(batch: tuple[Tensor, Tensor]) -> np.ndarray:
    """Normalised float (B, C, T, H, W) -> uint8 (B, T, H, W, C)."""
    return denormalized(batch[0])


def denormalized(frames: Tensor) -> np.ndarray:
    """Normalised float (B, C, T, H, W) -> uint8 (B, T, H, W, C)."""
    values = frames.permute(0, 2, 3, 4, 1) * torch.tensor(_STD) + torch.tensor(_MEAN)
    return (values * 255).round().clamp(0, 255).to(torch.uint8).numpy()


def pixels_of_mmaction(batch: dict[str, Any]) -> np.ndarray:
    """Its list of (1, C, T, H, W) -> uint8 (B, T, H, W, C)."""
    return torch.cat(list(batch["inputs"])).permute(0, 2, 3, 4, 1).numpy()


def pixels_of_videos(batch: tuple[Tensor, Tensor]) -> np.ndarray:
    """uint8 (B, T, C, H, W) -> (B, T, H, W, C)."""
    return batch[0].permute(0, 1, 3, 4, 2).numpy()


def _mmaction_collate(plan: Plan) -> Callable[[list[Any]], Any]:
    from mmengine.dataset import pseudo_collate

    collate: Callable[[list[Any]], Any] = pseudo_collate
    return collate


def _mmaction(backend: str, *needs: str) -> Peer:
    return Peer(
        name=f"mmaction2_{backend}",
        what=f"MMAction2's RawframeDataset and transforms, backend {backend}: uint8, one tensor a clip",
        needs=("mmaction.datasets", *needs),
        extra="bench-mmaction2",
        make=partial(MmactionClips, backend=backend),
        collate=_mmaction_collate,
        pixels=pixels_of_mmaction,
    )


def _from_video(name: str, what: str, read: Callable[[PlannedClip], Tensor], needs: str, extra: str) -> Peer:
    return Peer(
        name=name,
        what=f"straight from the videos with {what}, 1 thread; torchvision's resize: uint8",
        needs=(needs,),
        extra=extra,
        make=partial(VideoClips, read=read),
        pixels=pixels_of_videos,
    )


FRAME_PEERS = (
    Peer(
        name="torchvision",
        what="torchvision's decode_jpeg, v2 transforms of the clip, default_collate: float32, normalised",
        needs=("torchvision.io:decode_jpeg",),
        make=TorchvisionClips,
        pixels=pixels_of_floats,
    ),
    Peer(
        name="pil",
        what="PIL, crop, resize, ToTensor, Normalize of each frame, default_collate: float32, normalised",
        make=PilClips,
        pixels=pixels_of_floats,
    ),
    Peer(
        name="ceiling",
        what="the same JPEGs decoded whole to RGB, each once, by simplejpeg, and nothing else",
        make=WholeFrames,
        pixels=None,
    ),
    _mmaction("cv2"),
    _mmaction("turbojpeg", "turbojpeg"),
    _mmaction("pillow"),
)
VIDEO_PEERS = (
    _from_video("torchcodec", "torchcodec", read_torchcodec, "torchcodec.decoders", "bench-torchcodec"),
    _from_video("decord", "decord", read_decord, "decord", "bench-decord"),
    _from_video("pyav", "PyAV: seek, decode, to_ndarray", read_pyav, "av", ""),
)


def why_absent(peer: Peer) -> str | None:
    """Why a peer cannot be measured here, and what to do; None where it can."""
    for needed in peer.needs:
        reason = _why_not_there(needed)
        if reason is not None:
            return f"not measured: {reason}" + (f": pip install '.[{peer.extra}]'" if peer.extra else "")
    return None


@cache
def _why_not_there(needed: str) -> str | None:
    module, _, name = needed.partition(":")
    try:
        found = importlib.import_module(module)
        if name:
            getattr(found, name)
        if module == "turbojpeg":
            found.TurboJPEG()  # which needs the system's libturbojpeg, too
    except (ImportError, AttributeError, OSError, RuntimeError, AssertionError) as error:
        return f"{needed} is not there ({str(error).splitlines()[0][:80]})"
    return None
