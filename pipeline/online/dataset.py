"""A `ClipRef` to a clip, many to a batch: a pure function of manifest, specs and refs."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from pipeline.errors import PipelineError, StoreError
from pipeline.jpeg import JpegError, decode_crop, decode_jpegs, jpeg_size
from pipeline.manifest import Manifest
from pipeline.online.augment import (
    AugmentSpec,
    DrawnAugment,
    apply_augment,
    apply_user_transform,
    draw_augment,
)
from pipeline.online.collate import Clip, ClipBatch, empty_frames
from pipeline.online.columns import SharedColumns, shared
from pipeline.online.extras import Extras
from pipeline.online.local import Local
from pipeline.online.planar import apply_to_planes, fits_planes
from pipeline.online.readahead import reading_ahead, reading_together, touch
from pipeline.online.reuse import Kept, ReuseSpec, open_cache
from pipeline.online.samplers import ClipRef, EpochSampler
from pipeline.online.sources import Source, SourceSample
from pipeline.online.store import Jpeg, Store
from pipeline.online.windows import WindowSpec, draw_start, frame_indices
from pipeline.planes import decode_planes
from pipeline.seeds import generator

_REPLACEMENT_STREAM = 6
"""Second number of a generator's key; the picture's and the device's draws have 1 to 5."""
_MAX_ATTEMPTS = 8
_MAX_PROCESSES = 1024


class _Read(NamedTuple):
    """What there is of a clip before its frames are decoded."""

    ref: ClipRef
    key: str
    indices: np.ndarray
    jpegs: Sequence[Jpeg]
    times_s: np.ndarray
    label: int
    height: int
    width: int
    drawn: DrawnAugment | None
    """How it is cut; None where it is left whole."""


_Ahead: TypeAlias = Callable[[], _Read | None] | None
"""Gives what a reader has fetched of a clip, or raises; None where none was asked to."""
_Made = TypeVar("_Made")


class ClipDataset(Dataset[Clip]):
    """The clips of a manifest's videos.

    manifest   rows that have frames, as those of `manifest.select(...)`
    store      where their bytes come from; keyed by the manifest's `frames`
    augment    how a clip is cut; None leaves frames whole, and they must then be of one size
    transform  a torchvision v2 transform that follows, called with the clip as uint8 (T, C, H, W) and seeded
               from the ref; it must give uint8
    on_bad     a frame that cannot be had: `raise` names it; `skip` takes another clip in its place, drawn
               from the ref's seed (of the same source, if row_extras have `source_id`), and counts it in
               `replaced`. Evaluation (refs of seed 0) always raises
    max_skips  clips that may be replaced before `skip` raises, too
    threads    clips decoded at the same time in one process; decoding and resizing let go of the GIL
    readers    threads in one process that fetch the bytes of a batch's next clips meanwhile; 0: none. For
               storage that keeps one waiting
    sources    what else there is of a clip, by the name that it gets in `extras` (`pipeline.online.extras`).
               A source that cannot be read always raises SourceError
    row_extras   a number for each row, (rows,), by the name that it gets in `extras`
    reuse_cache  where clips are kept, for a sampler whose `reuse` gives the same ones in several epochs

    `dataset[ref]` is a pure function of the ref, and `dataset[i]` the clip at position i of epoch 0 of
    `EpochSampler(manifest, window)`. Workers are sent paths and file descriptors only.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        window: WindowSpec,
        *,
        augment: AugmentSpec | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_bad: Literal["raise", "skip"] = "raise",
        max_skips: int = 100,
        threads: int = 1,
        readers: int = 0,
        sources: Mapping[str, Source] | None = None,
        row_extras: Mapping[str, np.ndarray] | None = None,
        reuse_cache: ReuseSpec | None = None,
    ) -> None:
        if on_bad not in ("raise", "skip"):
            raise ValueError(f"on_bad is raise or skip, got {on_bad!r}")
        if threads < 1 or max_skips < 0 or readers < 0:
            found = f"got {threads}, {max_skips} and {readers}"
            raise ValueError(f"threads must be >= 1, max_skips and readers >= 0, {found}")
        self.manifest: Manifest | None = manifest
        """What the dataset was made of; None in a worker that was spawned."""
        self.store = store
        self.window = window
        self.augment = augment
        self.transform = transform
        self.on_bad = on_bad
        self.max_skips = max_skips
        self.threads = threads
        self.readers = readers
        self.columns = SharedColumns(manifest)
        self.clip_bytes = window.frames * 3 * _pixels(manifest, augment)
        """Bytes of the largest clip, before a transform."""
        self.extras = Extras(manifest, sources or {}, row_extras or {})
        self.cache = None if reuse_cache is None else open_cache(reuse_cache, self, manifest)
        """Clips of epochs before; None where none are kept."""
        # One place for each process, so that none waits for another: itself, then worker 0, 1, ...
        self._replaced = shared(torch.zeros(_MAX_PROCESSES, dtype=torch.int64))
        self._local = Local()
        self.stage: Callable[[str], AbstractContextManager[object]] = _untimed
        """Entered for the time of each stage of the work, by its name: `read`, `decode`, `augment` and, of
        further sources, `sources` for each clip; `batch` for what is done once for all of them. A profiler
        puts its clock here."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "manifest": None}

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def replaced(self) -> int:
        """Clips that `on_bad="skip"` has replaced so far, in all processes."""
        return int(self._replaced.sum())

    @property
    def has_size(self) -> bool:
        """Whether all clips are of one size that is known before any is made."""
        return self.augment is not None and self.transform is None

    def __getitem__(self, ref: ClipRef | int) -> Clip:
        batch = self.__getitems__([ref])
        return Clip(
            frames=batch.frames[0],
            label=int(batch.labels[0]),
            video=int(batch.videos[0]),
            start=int(batch.starts[0]),
            times_s=batch.times_s[0],
            extras={name: values[0] for name, values in batch.extras.items()},
        )

    def __getitems__(self, refs: Sequence[ClipRef | int]) -> ClipBatch:
        """A batch, decoded straight into the memory that the main process will get."""
        asked = [ref if isinstance(ref, tuple) else self._ref_at(ref) for ref in refs]
        with self._fetched(asked) as fetched:
            if self.augment is not None and self.has_size:
                with self.stage("batch"):
                    frames = empty_frames(len(asked), self.window.frames, *self.augment.size_hw)
                clips = self._map(self._fill, asked, fetched, frames.numpy())
            else:
                made = self._map(self._make, asked, fetched)
                clips = [clip for clip, _ in made]
                frames = _stacked([pictures for _, pictures in made], [clip.key for clip in clips])
        return ClipBatch(frames, **self._beside(clips))

    def _beside(self, clips: Sequence[_Read]) -> dict[str, Any]:
        """All of a batch but its frames, by name."""
        return {
            "labels": torch.tensor([clip.label for clip in clips]),
            "videos": torch.tensor([clip.ref.video for clip in clips]),
            "starts": torch.tensor([int(clip.indices[0]) for clip in clips]),
            "times_s": torch.from_numpy(np.stack([clip.times_s for clip in clips])),
            "extras": {"seed": torch.tensor([clip.ref.seed for clip in clips]), **self._extras(clips)},
        }

    def _map(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """In threads where there are some."""
        if self.threads == 1 or len(args[0]) == 1:
            return list(map(function, *args))
        return list(self._local.pool("decoders", self.threads).map(function, *args))

    def _ref_at(self, position: int) -> ClipRef:
        # The columns are all that a sampler needs of a manifest to say what stands where.
        sampler = EpochSampler(cast(Manifest, self.columns), self.window)
        return sampler.refs_at(np.array([range(len(self))[position]]), epoch=0)[0]

    @contextmanager
    def _fetched(self, refs: Sequence[ClipRef]) -> Iterator[Sequence[_Ahead]]:
        """For each ref what waits for its bytes, where there are readers to fetch them."""
        if not self.readers:
            yield [None] * len(refs) if self.threads > 1 else reading_together(self._read_unless_kept, refs)
            return
        pace = self._local.pace
        read = partial(pace.timed, self._read_unless_kept)
        if pace.is_slow:
            pool = self._local.pool("readers", self.readers)
            with reading_ahead(pool, read, refs, ahead=2 * self.readers) as fetched:
                yield fetched
        else:
            yield [partial(read, ref) for ref in refs]
        pace.settle()

    def _read_unless_kept(self, ref: ClipRef) -> _Read | None:
        return None if self.cache is not None and self.cache.has(ref) else self._read(ref)

    def _fill(self, ref: ClipRef, ahead: _Ahead, out: np.ndarray) -> _Read:
        """A clip, its pictures in `out`, uint8 (T, H, W, 3)."""
        return self._kept_or_made(ref, ahead, partial(self._decode_into, out=out), out)[0]

    def _make(self, ref: ClipRef, ahead: _Ahead) -> tuple[_Read, np.ndarray]:
        """A clip and its pictures, uint8 (T, H, W, 3), of a size that only they know."""
        return self._kept_or_made(ref, ahead, self._decode_whole)

    def _kept_or_made(
        self,
        ref: ClipRef,
        ahead: _Ahead,
        decode: Callable[[_Read], np.ndarray],
        out: np.ndarray | None = None,
    ) -> tuple[_Read, np.ndarray]:
        if self.cache is None:
            return self._or_replaced(ref, decode, ahead)
        with self.stage("read"):
            found = self.cache.get(ref, out)
        if found is not None:
            kept, pictures = found
            hw = kept.height, kept.width
            key, label = self.columns.frames(ref.video), self.columns.label(ref.video)
            drawn = self._drawn(ref, label, *hw)
            return _Read(ref, key, kept.indices, (), kept.times_s, label, *hw, drawn), pictures
        clip, pictures = self._or_replaced(ref, decode, ahead)
        if clip.ref == ref:  # what was replaced is counted each time
            self.cache.put(ref, Kept(clip.indices, clip.times_s, clip.height, clip.width), pictures)
        return clip, pictures

    def _or_replaced(
        self, ref: ClipRef, decode: Callable[[_Read], _Made], ahead: _Ahead = None
    ) -> tuple[_Read, _Made]:
        """A clip and what is made of it; what is bad is replaced where that is allowed."""
        for attempt in range(_MAX_ATTEMPTS + 1):
            candidate = ref if attempt == 0 else self._replacement(ref, attempt)
            try:
                with self.stage("read"):
                    clip = (ahead() if ahead and attempt == 0 else None) or self._read(candidate)
                return clip, decode(clip)
            except StoreError:
                if self.on_bad == "raise" or not ref.seed or attempt == _MAX_ATTEMPTS:
                    raise
                if self.replaced >= self.max_skips:
                    raise
                self._count_replaced()
        raise AssertionError("the last attempt returns or raises")

    def _replacement(self, ref: ClipRef, attempt: int) -> ClipRef:
        """Another clip, from the ref's own seed: the same on any topology."""
        rng = generator(ref.seed, _REPLACEMENT_STREAM, attempt)
        row = self.extras.draw_row_like(ref.video, len(self), rng)
        num_frames, fps = (self.columns.column(name)[row] for name in ("num_frames", "fps"))
        return ClipRef(row, draw_start(int(num_frames), self.window, rng, video_fps=float(fps)), ref.seed)

    def _count_replaced(self) -> None:
        worker = get_worker_info()
        place = 0 if worker is None else 1 + worker.id % (_MAX_PROCESSES - 1)
        with self._local.lock:
            self._replaced[place] += 1

    def _read(self, ref: ClipRef) -> _Read:
        key = self.columns.frames(ref.video)
        times_us = self.store.times_us(key)
        if ref.start >= len(times_us):
            raise PipelineError(
                f"{key!r} has {len(times_us)} frames in {self.store!r}, and a clip of it begins at frame "
                f"{ref.start}: manifest and store are of different frames, run `make frames` and `make pack`"
            )
        indices = frame_indices(
            ref.start, len(times_us), self.window, times_us=times_us, seed=ref.seed, video=key
        )
        jpegs = self.store.read(key, indices)
        if self.readers:
            touch(jpegs)
        try:
            height, width = jpeg_size(jpegs[0])
        except JpegError as error:
            raise self._bad_frame(key, int(indices[0]), error) from error
        label = self.columns.label(ref.video)
        drawn = self._drawn(ref, label, height, width)
        return _Read(ref, key, indices, jpegs, times_us[indices] / 1e6, label, height, width, drawn)

    def _drawn(self, ref: ClipRef, label: int, height: int, width: int) -> DrawnAugment | None:
        if self.augment is None:
            return None
        return draw_augment(self.augment, ref.seed, height=height, width=width, label=label, crop=ref.crop)

    def _extras(self, clips: Sequence[_Read]) -> dict[str, Tensor]:
        if not self.extras:
            return {}
        names = [f"{clip.key} from frame {clip.indices[0]}" for clip in clips]
        samples = self._map(self._read_sources, clips)
        return self.extras.collate(samples, [clip.ref.video for clip in clips], names)

    def _read_sources(self, clip: _Read) -> dict[str, SourceSample]:
        with self.stage("sources"):
            flipped = clip.drawn is not None and clip.drawn.flip
            return self.extras.read(clip.ref.video, clip.key, clip.times_s, flipped=flipped)

    def _decode_whole(self, clip: _Read) -> np.ndarray:
        """uint8 (T, H, W, 3), after the transform."""
        height, width = self.augment.size_hw if self.augment else (clip.height, clip.width)
        out = self._decode_into(clip, np.empty((len(clip.indices), height, width, 3), np.uint8))
        if self.transform is None:
            return out
        with self.stage("augment"):
            return apply_user_transform(self.transform, out, clip.ref.seed)

    def _decode_into(self, clip: _Read, out: np.ndarray) -> np.ndarray:
        """Decode each frame once, though a short video may show it more often; cut, resize and mirror."""
        indices = clip.indices.tolist()
        if all(map(operator.lt, indices, indices[1:])):
            self._decode(clip, clip.indices, clip.jpegs, out)
            return out
        shown, first, places = np.unique(clip.indices, return_index=True, return_inverse=True)
        distinct = np.empty((len(shown), *out.shape[1:]), np.uint8)
        self._decode(clip, shown, [clip.jpegs[place] for place in first], distinct)
        return np.take(distinct, places, axis=0, out=out)

    def _decode(self, clip: _Read, indices: np.ndarray, jpegs: Sequence[Jpeg], out: np.ndarray) -> None:
        """Only the part of each frame that the crop needs, all frames at once, then one resize."""
        drawn = clip.drawn
        if drawn is not None and self._resize_planes(clip, drawn, jpegs, out):
            return
        try:
            with self.stage("decode"):
                if drawn is None:
                    decode_jpegs(jpegs, out)
                    return
                factor = drawn.reduction if self.augment and self.augment.reduce else 1
                part = decode_crop(jpegs, *drawn.box, memory=self._local.scratch, reduce=factor)
        except JpegError as error:
            raise self._bad_frame(clip.key, int(indices[error.place]), error) from error
        drawn = drawn.shifted(part.top, part.left)
        if factor > 1:
            drawn = drawn.reduced(factor, *part.pixels.shape[1:3])
        with self.stage("augment"):
            apply_augment(part.pixels, drawn, out)

    def _resize_planes(
        self, clip: _Read, drawn: DrawnAugment, jpegs: Sequence[Jpeg], out: np.ndarray
    ) -> bool:
        """The same in planes of luma and chroma, where clip and settings allow it; whether `out` is done."""
        spec = cast(AugmentSpec, self.augment)
        reduces = spec.reduce and drawn.reduction > 1
        if spec.resize_in != "planes" or reduces or not fits_planes(drawn, clip.height, clip.width):
            return False
        with self.stage("decode"):
            try:
                planes = decode_planes(jpegs, *drawn.box)
            except JpegError:
                return False  # the other way tells which frame it is
        if planes is None:
            return False
        with self.stage("augment"):
            apply_to_planes(planes, drawn, out)
        return True

    def _bad_frame(self, key: str, index: int, error: Exception) -> StoreError:
        return StoreError(f"frame {index} of {key!r} in {self.store!r}: {error}; run `make verify REPAIR=1`")


def _untimed(name: str) -> AbstractContextManager[object]:
    return _NOT_TIMED


_NOT_TIMED = nullcontext()


def _pixels(manifest: Manifest, augment: AugmentSpec | None) -> int:
    """Pixels of the largest frame that a clip can have."""
    if augment is not None:
        return augment.size_hw[0] * augment.size_hw[1]
    return int((manifest.column("width").astype(np.int64) * manifest.column("height")).max(initial=0))


def _stacked(pictures: list[np.ndarray], keys: list[str]) -> Tensor:
    shapes: dict[tuple[int, ...], str] = {}
    for key, each in zip(keys, pictures, strict=True):
        shapes.setdefault(each.shape, key)
    if len(shapes) > 1:
        found = ", ".join(f"{key!r} has {shape}" for shape, key in list(shapes.items())[:2])
        raise StoreError(
            f"clips of one batch differ in shape: {found}; give augment= to cut them to one size"
        )
    frames = empty_frames(len(pictures), *pictures[0].shape[:3])
    np.stack(pictures, out=frames.numpy())
    return frames
