"""Spectral cubes through a memory map: ENVI (`.hdr` beside its data) and SPE (2.x and 3.0).

A cube is (bands, lines, samples) whatever the order in its file. Nothing stays open between two reads:
a `Cube` is a record of where its pixels lie, so it pickles, and any number of them may be held.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from pipeline.errors import SourceError
from pipeline.online.envi import read_envi
from pipeline.online.sources import ClipSpan, Missing, Recent, SourceSample, check_pattern, path_for
from pipeline.online.spe import SpeFile, read_spe

Pick: TypeAlias = slice | Sequence[int] | np.ndarray | None
"""What is read along an axis: a slice, numbers from 0 in any order, a bool for each, or None for all."""
SpectralAxis: TypeAlias = Literal["auto", "frames", "x"]

_SMALL_FILE_BYTES = 1 << 20
"""A file up to this size may be read as the system likes."""
_REQUEST_BYTES = 128 << 10
"""As much is asked for at once: Linux quietly reads less of a larger request."""
_NANOMETRES = {
    **dict.fromkeys(("nanometers", "nanometres", "nanometer", "nm"), 1.0),
    **dict.fromkeys(("micrometers", "micrometres", "micrometer", "microns", "um", "μm", "µm"), 1e3),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cube:
    """Where the pixels of a cube lie in its file."""

    path: Path
    """The file that holds the pixels."""
    shape: tuple[int, int, int]
    """(bands, lines, samples)"""
    dtype: np.dtype
    """As stored, with its byte order."""
    offset: int
    """Bytes before the first pixel."""
    strides: tuple[int, int, int]
    """Bytes from one band, line and sample to the next."""
    wavelengths: np.ndarray | None
    """float64 (bands,): centre of each, in `wavelength_units`."""
    wavelength_units: str | None
    good_bands: np.ndarray | None
    """bool (bands,): False for the bands that the file itself calls bad."""
    ignore_value: float | None
    """Pixels of this value hold nothing."""
    metadata: Mapping[str, Any]
    """All else that the file says of itself."""

    def wavelengths_nm(self) -> np.ndarray:
        """float64 (bands,); SourceError where they are not known. No unit is taken for nanometres."""
        if self.wavelengths is None:
            raise SourceError(f"{self.path} does not say its bands' wavelengths: choose bands by number")
        scale = _NANOMETRES.get((self.wavelength_units or "nm").strip().lower())
        if scale is None:
            raise SourceError(f"{self.path} has its bands in {self.wavelength_units!r}: choose by number")
        return self.wavelengths * scale

    def read(self, *, bands: Pick = None, lines: Pick = None, samples: Pick = None) -> np.ndarray:
        """The chosen part, (bands, lines, samples): an array of its own, in this machine's byte order.

        Only the pages that hold it are read from disk. SourceError for what is not in the cube, or where
        the file has become shorter. (A file that is cut while it is read kills the process, as with any
        memory map.)
        """
        asked = zip(("band", "line", "sample"), (bands, lines, samples), self.shape, strict=True)
        picks = [_picked(self.path, name, pick, length) for name, pick, length in asked]
        out = np.empty([_count(pick) for pick in picks], self.dtype.newbyteorder("="))
        if out.size == 0:
            return out
        try:
            with (
                self.path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
            ):
                _check_length(self, len(mapping))
                _advise(mapping, self, picks)
                _copy(mapping, self, picks, out)
        except (OSError, ValueError) as error:  # mmap has ValueError for a file of no bytes
            raise SourceError(f"{self.path} cannot be read: {error}") from error
        return out


def open_cube(path: Path | str, *, spectral_axis: SpectralAxis = "auto", region: int | None = None) -> Cube:
    """The cube of an ENVI header, of ENVI data with its header beside it, or of an SPE file.

    spectral_axis  which axis of an SPE file's frames is the spectrum's. `frames`: one frame a band, and its
                   rows and columns are lines and samples. `x`: the columns of a frame are bands (a
                   spectrograph), each frame is a line, and its rows are samples. `auto`: `x` where the
                   file says the wavelengths of its columns, else `frames`
    region         which region of interest, where an SPE file has several

    SourceError where the file is missing, cut short, or not what it says.
    """
    path = Path(path)
    if path.suffix.lower() == ".spe":
        cube = _from_spe(read_spe(path, region=region), spectral_axis)
    else:
        cube = _from_envi(path)
    try:
        _check_length(cube, cube.path.stat().st_size)
    except OSError as error:
        raise SourceError(f"{cube.path} cannot be read: {error.strerror}") from error
    return cube


def _from_envi(path: Path) -> Cube:
    header = read_envi(path)
    return Cube(
        path=header.data_path,
        shape=(header.bands, header.lines, header.samples),
        dtype=header.dtype,
        offset=header.offset,
        strides=header.strides(),
        wavelengths=header.wavelengths,
        wavelength_units=header.wavelength_units,
        good_bands=header.good_bands,
        ignore_value=header.ignore_value,
        metadata=header.fields,
    )


def _from_spe(spe: SpeFile, spectral_axis: SpectralAxis) -> Cube:
    row, pixel = spe.width * spe.dtype.itemsize, spe.dtype.itemsize
    is_dispersed = spectral_axis == "x" or (spectral_axis == "auto" and spe.wavelengths is not None)
    if is_dispersed:
        shape, strides = (spe.width, spe.num_frames, spe.height), (pixel, spe.frame_stride, row)
    else:
        shape, strides = (spe.num_frames, spe.height, spe.width), (spe.frame_stride, row, pixel)
    return Cube(
        path=spe.path,
        shape=shape,
        dtype=spe.dtype,
        offset=spe.offset,
        strides=strides,
        wavelengths=spe.wavelengths if is_dispersed else None,
        wavelength_units=spe.wavelength_units if is_dispersed else None,
        good_bands=None,
        ignore_value=None,
        metadata={"version": spe.version, "num_regions": spe.num_regions, **spe.metadata},
    )


def _check_length(cube: Cube, file_bytes: int) -> None:
    steps = zip(cube.shape, cube.strides, strict=True)
    needed = cube.offset + sum((length - 1) * stride for length, stride in steps) + cube.dtype.itemsize
    if file_bytes < needed:
        raise SourceError(
            f"{cube.path} has {file_bytes} bytes, but {cube.shape} {cube.dtype.name} from byte {cube.offset} "
            f"on takes {needed}: cut short, or the header is another file's?"
        )


def _picked(path: Path, name: str, pick: Pick, length: int) -> slice | np.ndarray:
    """A slice with a positive step, or else an int64 array."""
    if pick is None:
        return slice(0, length, 1)
    if isinstance(pick, slice):
        numbers = range(*pick.indices(length))
        if numbers.step > 0:
            return slice(numbers.start, max(numbers.start, numbers.stop), numbers.step)
        return np.array(numbers, dtype=np.int64)
    chosen = np.asarray(pick)
    if chosen.dtype == bool and chosen.shape == (length,):
        return np.flatnonzero(chosen)
    if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and chosen.size):
        raise SourceError(f"{path}: {name}s are chosen by whole numbers, got {chosen.dtype} {chosen.shape}")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < length:
        raise SourceError(f"{path} has {name}s 0 to {length - 1}, asked for {chosen.min()} to {chosen.max()}")
    chosen = chosen.astype(np.int64)
    step = int(chosen[1] - chosen[0]) if chosen.size > 1 else 1
    if chosen.size and step > 0 and (chosen[1:] - chosen[:-1] == step).all():
        return slice(int(chosen[0]), int(chosen[-1]) + 1, step)  # which is copied at once
    return chosen


def _count(pick: slice | np.ndarray) -> int:
    return len(_numbers(pick))


def _numbers(pick: slice | np.ndarray) -> range | np.ndarray:
    return range(pick.start, pick.stop, pick.step) if isinstance(pick, slice) else pick


def _copy(mapping: mmap.mmap, cube: Cube, picks: Sequence[slice | np.ndarray], out: np.ndarray) -> None:
    """In the order of the file, plane by plane along the axis that is outermost there.

    All at once, numpy goes through a file that has its bands innermost once for each band: 30 of 300
    bands then took 2.7 times as long, in memory.
    """
    view = np.ndarray(cube.shape, cube.dtype, mapping, cube.offset, cube.strides)
    outer = int(np.argmax(cube.strides))
    if outer == 0 and all(isinstance(pick, slice) for pick in picks):
        out[...] = view[tuple(picks)]
        return
    inner: Any = tuple(pick for axis, pick in enumerate(picks) if axis != outer)
    if not any(isinstance(pick, slice) for pick in inner):
        inner = np.ix_(*inner)
    planes = np.moveaxis(view, outer, 0)
    for plane, number in zip(np.moveaxis(out, outer, 0), _numbers(picks[outer]), strict=True):
        plane[...] = planes[number][inner]


def _advise(mapping: mmap.mmap, cube: Cube, picks: Sequence[slice | np.ndarray]) -> None:
    """Have the system read what is needed, all at once, and nothing around it.

    Left alone, the first touch of a page reads its neighbours too, up to megabytes of them: of a cube with
    bands of 160 kB, 30 of 300 cost five to ten times their own bytes.
    """
    if len(mapping) <= _SMALL_FILE_BYTES:
        return
    mapping.madvise(mmap.MADV_RANDOM)
    for first, end in _stretches(cube, picks):
        for start in range(first // mmap.PAGESIZE * mmap.PAGESIZE, end, _REQUEST_BYTES):
            mapping.madvise(mmap.MADV_WILLNEED, start, min(_REQUEST_BYTES, end - start))


def _stretches(cube: Cube, picks: Sequence[slice | np.ndarray]) -> Iterator[tuple[int, int]]:
    """First byte, and the one after the last, of what is read, ascending; no two less than a page apart."""
    firsts, ends = np.array([cube.offset]), np.array([cube.offset + cube.dtype.itemsize])
    for axis in sorted(range(3), key=lambda axis: cube.strides[axis]):  # what lies together, from within
        steps = np.unique(np.asarray(_numbers(picks[axis]))) * cube.strides[axis]
        firsts, ends = np.add.outer(steps, firsts).ravel(), np.add.outer(steps, ends).ravel()
        breaks = np.flatnonzero(firsts[1:] - ends[:-1] > mmap.PAGESIZE)
        firsts, ends = firsts[np.append(0, breaks + 1)], ends[np.append(breaks, -1)]
    return zip(firsts.tolist(), ends.tolist(), strict=True)


class BandReader(Protocol):
    """What takes the place of all bands: a choice of some, or numbers made of them."""

    def read(self, cube: Cube, *, lines: Pick = None, samples: Pick = None) -> np.ndarray:
        """(K, lines, samples)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CubeSpec:
    """Where the cube of a video is, and what a clip gets of it."""

    pattern: str
    """File below the root: `cubes/{video}.hdr`. `{video}` is the manifest's `frames`, `{name}` its end."""
    lines: tuple[int, int] | None = None
    """First line, and the one after the last; None: all."""
    samples: tuple[int, int] | None = None
    """First sample, and the one after the last; None: all."""
    mirror: bool = True
    """Whether samples run the other way when a clip is mirrored: right for a cube that looks as the video."""
    missing: Missing = "error"
    shape: tuple[int, int, int] | None = None
    """(bands, lines, samples) of what a clip gets; any other raises. Needed for `missing="mask"`."""
    spectral_axis: SpectralAxis = "auto"
    region: int | None = None
    """Of an SPE file: see `open_cube`."""

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if self.missing not in ("error", "mask") or self.spectral_axis not in ("auto", "frames", "x"):
            raise ValueError(f"missing is error or mask; spectral_axis is auto, frames or x; got {self}")
        if self.missing == "mask" and self.shape is None:
            raise ValueError('missing="mask" needs shape= to know what to put there')


class CubeSource:
    """A cube beside each video of a dataset, the same for all its clips: a `Source`.

    root    folder that the pattern's files are below
    choice  which bands, or what is made of them; None: all. See `pipeline.online.bands`
    """

    ragged = False

    def __init__(self, root: Path | str, spec: CubeSpec, *, choice: BandReader | None = None) -> None:
        self.root = Path(root)
        self.spec = spec
        self.choice = choice
        self._recent: Recent[Cube] = Recent(16 << 20)

    def has(self, video: str) -> bool:
        """Whether the video has a file."""
        return path_for(self.root, self.spec.pattern, video).is_file()

    def open(self, video: str) -> Cube:
        """The cube of a video; headers are read once."""
        path = path_for(self.root, self.spec.pattern, video)
        return self._recent.get(
            video,
            lambda: open_cube(path, spectral_axis=self.spec.spectral_axis, region=self.spec.region),
            lambda cube: 4096 + len(repr(cube.metadata)),
        )

    def read(self, clip: ClipSpan) -> SourceSample:
        """float32 (bands, lines, samples), and a mask () that is False where the video has no cube."""
        if self.spec.missing == "mask" and not self.has(clip.video):
            return SourceSample(np.zeros(self.spec.shape or (), np.float32), np.array(False))
        cube = self.open(clip.video)
        if cube.dtype.kind == "c":
            raise SourceError(f"{cube.path} holds complex numbers, which have no one value for a clip")
        read = cube.read if self.choice is None else partial(self.choice.read, cube)
        lines, samples = (pick and range(*pick) for pick in (self.spec.lines, self.spec.samples))
        values = read(lines=lines, samples=samples)
        if self.spec.shape not in (None, values.shape):
            raise SourceError(f"{cube.path} gives {values.shape}, expected {self.spec.shape}")
        if clip.flipped and self.spec.mirror:
            values = values[:, :, ::-1]
        return SourceSample(np.ascontiguousarray(values, np.float32), np.array(True))
