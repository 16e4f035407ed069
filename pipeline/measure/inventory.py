"""What there is of a dataset: videos, frames, manifest and pack; what is stale, and what to do next."""

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import FolderError, ManifestError, StoreError
from pipeline.files import MEDIA_SUFFIXES, is_hidden
from pipeline.folder import FRAMES_JSON, FrameFolder, read_frames_json
from pipeline.manifest import Manifest, read_manifest
from pipeline.measure.checks import Check, Verdict, split_advice
from pipeline.measure.disk import Need
from pipeline.online.packfile import PackInfo, format_bytes
from pipeline.online.ram import FreeMemory, choose_cache
from pipeline.online.store import PackStore


class FoundVideos(NamedTuple):
    """Videos below a root."""

    names: tuple[str, ...]
    """Paths below the root, POSIX."""
    num_bytes: int
    is_all: bool
    """False where the time was up first: there are more."""


class FoundFolders(NamedTuple):
    """Finished folders of frames below a root."""

    folders: dict[str, int]
    """By their key (path below the root, POSIX): when frames.json was written, in ns."""
    is_all: bool


def list_videos(root: Path, *, limit_s: float = 1.0) -> FoundVideos:
    """What looks like a video by its name; none where the root is missing."""
    names: list[str] = []
    num_bytes, end = 0, time.perf_counter() + limit_s
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not is_hidden(Path(name))]
        prefix = f"{Path(folder).relative_to(root).as_posix()}/".removeprefix("./")
        for name in filter(_is_video, files):
            names.append(prefix + name)
            num_bytes += _size_of(Path(folder, name)) or 0
            if time.perf_counter() > end:
                return FoundVideos(tuple(names), num_bytes, is_all=False)
    return FoundVideos(tuple(names), num_bytes, is_all=True)


def _is_video(name: str) -> bool:
    is_utf8 = name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)
    return is_utf8 and Path(name).suffix.lower() in MEDIA_SUFFIXES and not is_hidden(Path(name))


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def list_folders(root: Path, *, limit_s: float = 0.5) -> FoundFolders:
    """Finished folders, as `folder.find_folders` finds them, until the time is up; none without a root."""
    found: dict[str, int] = {}
    todo, end = [""] if root.is_dir() else [], time.perf_counter() + limit_s
    while todo:
        above = todo.pop()
        with os.scandir(root / above) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
        for name in names:
            key = f"{above}/{name}" if above else name
            try:
                found[key] = (root / key / FRAMES_JSON).stat().st_mtime_ns
            except OSError:
                todo.append(key)
            if time.perf_counter() > end:
                return FoundFolders(found, is_all=False)
    return FoundFolders(found, is_all=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSample:
    """What frames.json says in some folders of a dataset, evenly spaced among all."""

    folders: dict[str, FrameFolder]
    """By key, those that can be read."""
    unreadable: tuple[str, ...]
    """What is wrong with each of the others."""

    @property
    def num_frames(self) -> int:
        """Frames of all folders looked at."""
        return sum(frames.num_frames for frames in self.folders.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of their JPEGs."""
        return sum(sum(frames.sizes) for frames in self.folders.values())

    @property
    def source_bytes(self) -> int:
        """Bytes of the videos that they were made from."""
        return sum(frames.source.bytes for frames in self.folders.values())


def sample_folders(root: Path, keys: list[str], *, num_folders: int = 64) -> FrameSample:
    """Read frames.json of some folders: 64 take 10 ms."""
    chosen = np.unique(np.linspace(0, len(keys) - 1, min(num_folders, len(keys))).round().astype(int))
    folders, unreadable = {}, []
    for key in (keys[index] for index in chosen):
        try:
            folders[key] = read_frames_json(root / key)
        except FolderError as error:
            unreadable.append(str(error))
    return FrameSample(folders=folders, unreadable=tuple(unreadable))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What there is of a dataset, as far as a second of looking tells."""

    name: str
    data: Path
    manifests: Path
    others: tuple[str, ...]
    """Datasets that lie beside it."""
    videos: FoundVideos
    frames: FoundFolders
    sample: FrameSample
    manifest: Manifest | None
    manifest_error: str | None
    """Why the manifest that is there cannot be read."""
    pack: PackInfo | None
    pack_error: str | None
    """Why the pack that is there cannot be used with this manifest and these frames."""
    num_left: int
    """Videos that nobody has tried to decode yet."""

    @property
    def root(self) -> Path:
        """The folder that holds it."""
        return self.data / self.name

    @property
    def manifest_path(self) -> Path:
        """Where its manifest belongs."""
        return self.manifests / f"{self.name}.parquet"

    def command(self, target: str, *more: str) -> str:
        """The command that makes something of this dataset, where it lies."""
        places = {"DATA": self.data, "MANIFESTS": self.manifests}
        moved = [f"{name}={path}" for name, path in places.items() if path != Path(name.lower())]
        return shlex.join(["make", target, f"DATASET={self.name}", *moved, *more])


def read_dataset(name: str, *, data: Path, manifests: Path) -> Dataset:
    """Look at a dataset; nothing has to be there."""
    frames = list_folders(data / name / "frames")
    sample = sample_folders(data / name / "frames", sorted(frames.folders))
    manifest, manifest_error = _read_manifest(manifests / f"{name}.parquet")
    pack, pack_error = _read_pack(data / name, manifest, sample)
    videos = list_videos(data / name / "videos")
    return Dataset(
        name=name,
        data=data,
        manifests=manifests,
        others=_other_datasets(data, name),
        videos=videos,
        frames=frames,
        sample=sample,
        manifest=manifest,
        manifest_error=manifest_error,
        pack=pack,
        pack_error=pack_error,
        num_left=_count_left(videos, frames, manifest),
    )


def _count_left(videos: FoundVideos, frames: FoundFolders, manifest: Manifest | None) -> int:
    """By the manifest, and by the folders that are not in it yet; it knows of those that failed, too."""
    if manifest is None:
        return max(len(videos.names) - len(frames.folders), 0) if frames.is_all else 0
    unlisted = frames.folders.keys() - set(manifest.column("frames").to_pylist())
    unknown = set(videos.names).difference(manifest.column("video").to_pylist())
    return max(len(unknown) - len(unlisted), 0)


def _other_datasets(data: Path, name: str) -> tuple[str, ...]:
    if not data.is_dir():
        return ()
    return tuple(sorted(path.name for path in data.iterdir() if path.is_dir() and path.name != name))


def _read_manifest(path: Path) -> tuple[Manifest | None, str | None]:
    if not path.exists():
        return None, None
    try:
        return read_manifest(path), None
    except ManifestError as error:
        return None, str(error)


def _read_pack(
    root: Path, manifest: Manifest | None, sample: FrameSample
) -> tuple[PackInfo | None, str | None]:
    """Held against all of the manifest, and against frames.json of the folders in the sample."""
    if not (root / "pack").exists():
        return None, None
    try:
        with PackStore(root / "pack") as pack:
            if manifest is not None:
                pack.check_against(manifest)
                sampled = manifest.select(frames=list(sample.folders))
                pack.check_against(sampled, frames_root=root / "frames")
            return pack.info, None
    except StoreError as error:
        return None, str(error)


# Of 55 clips of UCF101 at the default options: 102.8 MB of JPEGs in 6,606 frames from 17.2 MB of videos.
# From one clip to the next it is 3.6 to 9.3 times.
_BYTES_PER_SOURCE_BYTE = 6.0
_FRAMES_PER_SOURCE_BYTE = 385e-6


def estimate_need(dataset: Dataset, *, block_bytes: int) -> Need:
    """Bytes and files of the frames of videos that are not decoded yet, and of the pack if there is none.

    By what the frames that are there took, or by what those of UCF101 do.
    """
    sample, left = dataset.sample, dataset.num_left
    source = left * dataset.videos.num_bytes / max(len(dataset.videos.names), 1)
    growth, density = _BYTES_PER_SOURCE_BYTE, _FRAMES_PER_SOURCE_BYTE
    if sample.source_bytes and sample.num_bytes:
        growth, density = sample.num_bytes / sample.source_bytes, sample.num_frames / sample.source_bytes
    jpeg_bytes, num_files = source * growth, source * density + 2 * left  # each folder, and its frames.json
    num_bytes = jpeg_bytes + num_files * block_bytes / 2  # a file's last block is half empty in the mean
    what = [f"the frames of {left:,} videos"] if left else []
    folders = len(dataset.frames.folders)
    if (dataset.pack is None or left) and (folders or left):
        num_bytes += jpeg_bytes + sample.num_bytes / max(len(sample.folders), 1) * folders
        what.append("the pack")
    return Need(num_bytes, num_files, " and ".join(what))


def check_dataset(dataset: Dataset, free: FreeMemory | None) -> list[Check]:
    """Videos, frames, manifest and pack, in the order in which they are made; `free` None where unknown."""
    return [
        check_videos(dataset),
        check_frames(dataset),
        check_manifest(dataset),
        check_pack(dataset, free),
    ]


def check_videos(dataset: Dataset) -> Check:
    """Whether there is anything to begin with."""
    videos = dataset.videos
    if videos.names:
        at_least = "" if videos.is_all else "at least "
        return _say(
            "videos", "ok", f"{at_least}{len(videos.names):,} files, {format_bytes(videos.num_bytes)}"
        )
    if dataset.frames.folders or dataset.pack is not None:
        return _say("videos", "ok", "none, and none needed: the frames are there")
    place = dataset.root / "videos"
    found, advice = f"none in {place}", f"put some into {place}/<Class>/"
    if dataset.others:
        found, advice = (
            f"{found}; beside it there is {', '.join(dataset.others[:5])}",
            f"{advice}, or say DATASET=",
        )
    return _say("videos", "warning", found, f"{advice}, or draw some with `make sample`")


def check_frames(dataset: Dataset) -> Check:
    """Whether every video has its frames, and they are of the video that is there now."""
    num_folders, sample, make = len(dataset.frames.folders), dataset.sample, dataset.command("frames")
    if sample.unreadable:
        found, _ = split_advice(sample.unreadable[0])
        return _say("frames", "error", found, dataset.command("verify", "REPAIR=1"))
    if not num_folders:
        return _check_no_frames(dataset)
    at_least = "" if dataset.frames.is_all else "at least "
    mean = format_bytes(sample.num_bytes // max(sample.num_frames, 1))
    found = f"{at_least}{num_folders:,} folders, about {mean} a frame"
    if dataset.num_left and dataset.frames.is_all:
        return _say("frames", "warning", f"{found}; {dataset.num_left:,} videos have none yet", make)
    changed = _changed_sources(dataset)
    if changed:
        found += (
            f"; {len(changed)} of {len(sample.folders)} looked at are of another {changed[0]} than is there"
        )
        return _say("frames", "warning", found, make)
    return _say("frames", "ok", found)


def _check_no_frames(dataset: Dataset) -> Check:
    if dataset.pack is not None:
        return _say("frames", "ok", "none, and none needed: the pack has them")
    advice = dataset.command("frames") if dataset.videos.names else ""
    if dataset.manifest is not None and len(dataset.manifest.select()):
        return _say("frames", "error", f"none, though {dataset.manifest_path} speaks of some", advice)
    return _say("frames", "warning", "none yet", advice)


def _changed_sources(dataset: Dataset) -> list[str]:
    """Videos, of the sample, whose size is not what their frames were made from; those gone do not count."""
    videos = dataset.root / "videos"
    sources = [(frames.video, frames.source.bytes) for frames in dataset.sample.folders.values()]
    return [video for video, num_bytes in sources if _size_of(videos / video) not in (None, num_bytes)]


def check_manifest(dataset: Dataset) -> Check:
    """Whether there is a manifest, and it speaks of the frames that are there."""
    manifest, make = dataset.manifest, dataset.command("manifest")
    if dataset.manifest_error is not None:
        found, _ = split_advice(dataset.manifest_error)
        return _say("manifest", "error", found, f"move it away, then {make}")
    if manifest is None:
        advice = make if dataset.frames.folders else ""
        return _say("manifest", "warning", f"none yet at {dataset.manifest_path}", advice)
    verdict, stale = _staleness(dataset, manifest)
    if stale:
        return _say("manifest", verdict, f"stale: {stale}", make)
    return _check_statuses(dataset, manifest)


def _staleness(dataset: Dataset, manifest: Manifest) -> tuple[Verdict, str]:
    """How bad it is, and in what a manifest is not of the frames that are there; empty where in nothing."""
    folders, listed = dataset.frames.folders, set(manifest.select().column("frames").to_pylist())
    gone = sorted(listed - folders.keys()) if dataset.frames.is_all and folders else []
    if gone:
        return "error", f"{len(gone):,} of its videos have no frames now, first {gone[0]}"
    new = sorted(folders.keys() - listed)
    if new:
        return "warning", f"{len(new):,} folders of frames are not in it, first {new[0]}"
    written_ns = dataset.manifest_path.stat().st_mtime_ns
    newer = sorted(key for key, mtime_ns in folders.items() if mtime_ns > written_ns)
    if newer:
        return "warning", f"{len(newer):,} folders of frames are newer than it, first {newer[0]}"
    return "ok", ""


def _check_statuses(dataset: Dataset, manifest: Manifest) -> Check:
    """A manifest that is up to date: how much is in it, and how many videos failed."""
    num_partial, failed = len(manifest.select(status="partial")), manifest.select(status="failed")
    num_frames = int(manifest.column("num_frames").sum())
    splits = ", ".join(manifest.split_names) or "no split"
    found = f"{len(manifest):,} videos, {num_frames:,} frames, {len(manifest.classes)} classes, {splits}"
    found += f", {num_partial:,} partial" if num_partial else ""
    if not len(failed):
        return _say("manifest", "ok", found)
    found += f"; {len(failed):,} failed, first {failed[0].video} ({failed[0].error})"
    advice = f"see to what is named, or take it away, then {dataset.command('frames')}"
    return _say("manifest", "warning", found, advice)


def check_pack(dataset: Dataset, free: FreeMemory | None) -> Check:
    """Whether there is a pack, it is of these frames, and where training will hold it."""
    make, pack = dataset.command("pack"), dataset.pack
    if dataset.pack_error is not None:
        found, _ = split_advice(dataset.pack_error)
        return _say("pack", "error", found, make)
    if pack is None:
        advice = make if dataset.manifest is not None and dataset.frames.folders else ""
        found = "none yet: training opens a file for each frame, which is slower"
        return _say("pack", "warning", found, advice)
    found = f"{pack.num_videos:,} videos, {pack.num_frames:,} frames"
    if free is not None:
        cache, sum_in_words = choose_cache(pack.total_bytes, free)
        found += f"; for training {'in RAM' if cache == 'ram' else 'on disk'}: {sum_in_words}"
    return _say("pack", "ok", found)


def _say(name: str, verdict: Verdict, found: str, advice: str = "") -> Check:
    return Check(area="dataset", name=name, verdict=verdict, found=found, advice=advice)
