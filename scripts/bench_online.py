"""`bench online`: this loader beside the others, on the same clips, crops and sizes, in one run.

Real videos are extracted and packed into a temporary folder; clips and crop boxes are drawn once, and every
contender makes the same ones, in as many worker processes. All workers are started, and all files read once,
before anything is timed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Sampler

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.online import (
    AugmentSpec,
    ClipDataset,
    ClipRef,
    EpochSampler,
    FolderStore,
    LoaderSpec,
    WindowSpec,
    build_loader,
    prefetch,
)
from pipeline.online.augment import draw_augment
from pipeline.online.collate import ClipBatch
from pipeline.online.device_decode import DecodedBatches
from pipeline.online.encoded import EncodedClipDataset
from pipeline.online.loader import ClipLoader, init_worker
from pipeline.online.store import Store
from pipeline.online.windows import frame_indices
from scripts.bench_clips import Stored, link_videos, make_long_videos, store_frames
from scripts.bench_common import Case, Timing, fresh_folder, make_row, run_rounds
from scripts.bench_online_report import (
    Likeness,
    OnlineBench,
    OnlineResult,
    descriptions,
    make_ratios,
    make_targets,
    small_name,
)
from scripts.bench_peers import (
    FRAME_PEERS,
    FRAME_TEMPLATE,
    VIDEO_PEERS,
    Peer,
    Plan,
    PlannedClip,
    denormalized,
    why_absent,
)

_COMPARED_BATCHES = 2
_LEAST_PSNR_DB = 25.0
"""Below it a contender on the same JPEGs has cut another part: resizing without a filter still gives 30 dB,
a crop that is 2 px off 24 dB (UCF101)."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class Contender:
    """Something whose batches are counted against the clock."""

    name: str
    batches: Callable[[], Iterable[Any]]
    """One epoch; workers stay from one to the next."""
    pixels: Callable[[Any], np.ndarray] | None
    """A batch as uint8 (B, T, H, W, 3)."""
    reference: Callable[[], np.ndarray] | None = None
    """What the first batches should be: uint8 (N, T, H, W, 3); None: what torchvision makes of the plan."""


class GivenClips(Sampler[ClipRef]):
    """Refs that were drawn before, in their order."""

    def __init__(self, refs: Sequence[ClipRef]) -> None:
        self.refs = refs

    def __len__(self) -> int:
        return len(self.refs)

    def __iter__(self) -> Iterator[ClipRef]:
        return iter(self.refs)


def measure_online(
    clips: Sequence[Path],
    bench: OnlineBench,
    *,
    rounds: int,
    work_dir: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> OnlineResult:
    """Extract, pack, warm everything up, check that all make the same clips, then run them in turns.

    PipelineError where a video cannot be used, or a contender on the same frames shows something else.
    """
    start_worker_server()
    with fresh_folder(work_dir) as folder:
        on_case("frames")
        native, small = _store(clips, folder, bench)
        contenders, absent = _all_contenders(native, small, bench, folder)
        likeness = warm_up(contenders, on_case)
        cases = [Case(each.name, partial(run_epoch, each, bench)) for each in contenders]
        timings = run_rounds(cases, rounds=rounds, work_dir=work_dir, on_case=on_case)
        videos = native.describe()
    rows = [
        make_row(name, what, timings.get(name, ()), absent.get(name, ""))
        for name, what in descriptions(bench).items()
    ]
    targets = make_targets(rows, bench)
    return OnlineResult(
        rows=rows,
        likeness=likeness,
        targets=targets,
        ratios=make_ratios(rows, targets),
        videos=videos,
        clip_frames=bench.clip_frames,
    )


def _store(clips: Sequence[Path], folder: Path, bench: OnlineBench) -> tuple[Stored, Stored | None]:
    """The videos' frames as they are and, if asked for, smaller."""
    videos = folder / "videos"
    if bench.long_gop:
        make_long_videos(clips, videos)
    else:
        link_videos(clips, videos)
    native = store_frames(videos, folder / "native", quality=bench.frame_quality)
    if bench.short_side_px is None:
        return native, None
    return native, store_frames(
        videos, folder / "small", quality=bench.frame_quality, short_side_px=bench.short_side_px
    )


def _all_contenders(
    native: Stored, small: Stored | None, bench: OnlineBench, folder: Path
) -> tuple[list["Contender"], dict[str, str]]:
    """Who is measured, and why some are not, by name."""
    refs = draw_refs(native.manifest, bench)
    plan = make_plan(native, refs, bench, folder)
    contenders = own_contenders(native, refs, bench)
    if small is not None:
        contenders += small_contenders(small, refs, bench, folder)
    absent: dict[str, str] = {}
    for peer in FRAME_PEERS + VIDEO_PEERS:
        reason = why_absent(peer)
        if reason is None:
            contenders.append(peer_contender(peer, plan, bench))
        else:
            absent[peer.name] = reason
    return contenders, absent


def start_worker_server() -> None:
    """Have the server that forks workers import what any contender needs, once for all of them."""
    get_context("forkserver").set_forkserver_preload(["scripts.bench_peers", "pipeline.online.loader"])
    forkserver.ensure_running()


# What is made.


def draw_refs(manifest: Manifest, bench: OnlineBench) -> list[ClipRef]:
    """The clips of a round: shuffled epochs, one after the other, as training has them."""
    sampler = EpochSampler(manifest, WindowSpec(frames=bench.clip_frames), seed=_SEED)
    refs: list[ClipRef] = []
    for epoch in range(-(-bench.clips_per_round // len(sampler))):
        refs += sampler.refs_at(np.arange(len(sampler)), epoch=epoch)
    return refs[: bench.clips_per_round]


def augment_spec(bench: OnlineBench, *, antialias: bool = True) -> AugmentSpec:
    """A random resized crop that is not mirrored, since not all of the others can be told to."""
    return AugmentSpec(size_px=bench.size_px, scale=(0.25, 1.0), flip_p=0.0, antialias=antialias)


def make_plan(stored: Stored, refs: Sequence[ClipRef], bench: OnlineBench, folder: Path) -> Plan:
    """The same clips as plain numbers, and the frames under names that others can read."""
    window, spec = WindowSpec(frames=bench.clip_frames), augment_spec(bench)
    folders = {row: _link_frames(stored, row, folder / "links") for row in {ref.video for ref in refs}}
    clips = []
    for ref in refs:
        record = stored.manifest[ref.video]
        drawn = draw_augment(spec, ref.seed, height=record.height, width=record.width, label=record.label)
        times_us = stored.store.times_us(record.frames)
        indices = frame_indices(ref.start, record.num_frames, window, times_us=times_us)
        clips.append(
            PlannedClip(
                video=str(stored.videos_root / record.video),
                key=record.frames,
                folder=folders[ref.video],
                num_frames=record.num_frames,
                indices=tuple(indices.tolist()),
                fps=record.fps,
                box=drawn.box,
                label=record.label,
            )
        )
    return Plan(clips=tuple(clips), size_px=bench.size_px, store=stored.store, work_dir=folder)


def _link_frames(stored: Stored, row: int, root: Path) -> str:
    """The frames of a video once more, named by their number alone."""
    target = root / f"{row:06d}"
    target.mkdir(parents=True)
    for index, path in enumerate(sorted((stored.frames_root / stored.manifest[row].frames).glob("*.jpg"))):
        (target / FRAME_TEMPLATE.format(index)).hardlink_to(path)
    return str(target)


# Who makes it.


def own_contenders(stored: Stored, refs: Sequence[ClipRef], bench: OnlineBench) -> list[Contender]:
    """This loader, in its variants."""
    loader = own_loader(stored, stored.store, refs, bench)
    folders = own_loader(stored, FolderStore(stored.frames_root), refs, bench)
    plain = own_loader(stored, stored.store, refs, bench, antialias=False)
    contenders = [
        Contender("ours", lambda: loader, _own_pixels),
        Contender("ours_float", lambda: prefetch(loader, "cpu"), _float_pixels),
        Contender("ours_folder", lambda: folders, _own_pixels),
        Contender("ours_plain", lambda: plain, _own_pixels),
    ]
    if torch.cuda.is_available():
        decoded = DecodedBatches(
            own_loader(stored, stored.store, refs, bench, dataset=EncodedClipDataset), "cuda"
        )
        contenders.append(Contender("ours_nvjpeg", lambda: decoded, _own_pixels))
    return contenders


def small_contenders(
    stored: Stored, refs: Sequence[ClipRef], bench: OnlineBench, folder: Path
) -> list[Contender]:
    """This loader on frames that were stored smaller; boxes are the same shares of the frame.

    To whole pairs of pixels, of which there are fewer: so they are held against what torchvision makes of
    the same boxes in the same small frames.
    """
    loader = own_loader(stored, stored.store, refs, bench)
    name = small_name(bench)
    first = refs[: _COMPARED_BATCHES * bench.batch_size]
    reference = cache(lambda: torchvision_clips(make_plan(stored, first, bench, folder / "small")))
    return [
        Contender(name, lambda: loader, _own_pixels, reference),
        Contender(f"{name}_float", lambda: prefetch(loader, "cpu"), _float_pixels, reference),
    ]


def torchvision_clips(plan: Plan) -> np.ndarray:
    """All clips of a plan as torchvision makes them: uint8 (N, T, H, W, 3)."""
    peer = next(peer for peer in FRAME_PEERS if peer.name == "torchvision")
    dataset = peer.make(plan)
    made = peer.collate(plan)([dataset[place] for place in range(len(plan.clips))])
    return cast(Callable[[Any], np.ndarray], peer.pixels)(made)


def own_loader(
    stored: Stored,
    store: Store,
    refs: Sequence[ClipRef],
    bench: OnlineBench,
    *,
    antialias: bool = True,
    dataset: type[ClipDataset] = ClipDataset,
) -> ClipLoader:
    """The loader as users build it."""
    clips = dataset(
        stored.manifest,
        store,
        WindowSpec(frames=bench.clip_frames),
        augment=augment_spec(bench, antialias=antialias),
    )
    spec = LoaderSpec(batch_size=bench.batch_size, workers=bench.workers)
    return build_loader(clips, GivenClips(refs), spec)


def peer_contender(peer: Peer, plan: Plan, bench: OnlineBench) -> Contender:
    """One of the others, in torch's own loader with the settings that this one has."""
    loader: DataLoader[Any] = DataLoader(
        peer.make(plan),
        batch_size=bench.batch_size,
        num_workers=bench.workers,
        collate_fn=peer.collate(plan),
        worker_init_fn=init_worker,
        multiprocessing_context="forkserver",
        persistent_workers=True,
        prefetch_factor=2,
    )
    return Contender(peer.name, lambda: loader, peer.pixels)


def _own_pixels(batch: ClipBatch) -> np.ndarray:
    return batch.frames.cpu().numpy()


def _float_pixels(batch: ClipBatch) -> np.ndarray:
    return denormalized(batch.frames)


# Rounds.


def warm_up(contenders: Sequence[Contender], on_case: Callable[[str], None]) -> dict[str, Likeness]:
    """Start all workers and run an epoch of each; how alike the clips of the first batches are.

    PipelineError where a contender on the same JPEGs shows something else than torchvision does.
    """
    seen: dict[str, np.ndarray] = {}
    for contender in contenders:
        on_case(f"start of {contender.name}")
        first: list[np.ndarray] = []
        for batch in contender.batches():
            if contender.pixels is not None and len(first) < _COMPARED_BATCHES:
                first.append(contender.pixels(batch).copy())
        if first:
            seen[contender.name] = np.concatenate(first)
    references = {each.name: each.reference for each in contenders}
    likeness = {}
    for name, made in seen.items():
        reference = references[name]
        likeness[name] = compare(made, seen["torchvision"] if reference is None else reference())
    from_videos = {peer.name for peer in VIDEO_PEERS}
    for name, found in likeness.items():
        if name not in from_videos and (
            found.psnr_db < _LEAST_PSNR_DB or found.other_clips * 10 > found.clips
        ):
            raise PipelineError(
                f"{name} does not make the clips of the plan: {found.psnr_db:.1f} dB against torchvision's, "
                f"{found.other_clips} of {found.clips} clips show other frames"
            )
    return likeness


def compare(made: np.ndarray, reference: np.ndarray) -> Likeness:
    """Clips against those of a reference: both uint8 (N, T, H, W, 3)."""
    errors = [_errors(one, other) for one, other in zip(made, reference, strict=True)]
    return Likeness(
        psnr_db=float(np.median([_psnr_db(same) for same, _ in errors])),
        other_clips=sum(shifted < same for same, shifted in errors),
        clips=len(errors),
    )


def _errors(made: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Mean squared difference of a clip's inner frames, and the least of it against their neighbours."""
    if len(made) < 3:
        return _squared(made, reference), np.inf
    inner = made[1:-1]
    same, earlier, later = (_squared(inner, reference[at : at + len(inner)]) for at in (1, 0, 2))
    return same, min(earlier, later)


def _squared(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(one.astype(np.float32) - other.astype(np.float32)).mean())


def _psnr_db(squared: float) -> float:
    return float(10 * np.log10(255**2 / squared)) if squared else float("inf")


def run_epoch(contender: Contender, bench: OnlineBench, folder: Path) -> dict[str, Timing]:
    """One epoch against the clock, with the processor's time of all processes of this run."""
    with whole_cpu_time() as cpu_s:
        begin = time.perf_counter()
        for batch in contender.batches():
            del batch  # or two would be alive at a time
        seconds = time.perf_counter() - begin
    frames = bench.clips_per_round * bench.clip_frames
    return {contender.name: Timing(seconds=seconds, cpu_s=cpu_s(), frames=frames)}


@contextmanager
def whole_cpu_time() -> Iterator[Callable[[], float]]:
    """Asked after the block: seconds that this process and all below it have computed in it."""
    before = _tree_cpu_s()
    yield lambda: _tree_cpu_s() - before


def _tree_cpu_s() -> float:
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
