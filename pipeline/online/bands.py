"""Which bands of a cube a model gets: by number, by wavelength, by principal components, by what they tell
of the labels.

A choice that is fitted sees the spectra of the training videos alone; it keeps their names, and is stored
as JSON, so that evaluation uses the same one and can make sure that it was not fitted on its own videos.
"""

import importlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from pipeline.errors import SourceError
from pipeline.files import write_text
from pipeline.online.hyperspectral import Cube, Pick
from pipeline.seeds import generator

Method: TypeAlias = Literal["list", "wavelength", "pca", "mutual_information"]

_SPECTRA_STREAM = 11
"""Second number of the key of the generator that draws pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandChoice:
    """Some bands of a cube, or principal components made of them."""

    method: Method
    num_bands: int
    """Bands of the cubes that it is for."""
    bands: tuple[int, ...]
    """What is read: the chosen bands, in the order in which they are given out; or, for principal
    components, all that these are made of."""
    scores: tuple[float, ...] = ()
    """One for each number that comes out: mutual information (nats), or share of the variance."""
    mean: tuple[float, ...] = ()
    """Principal components only: of each band, taken off first."""
    components: tuple[tuple[float, ...], ...] = ()
    """Principal components only: (K, len(bands)), orthonormal rows."""
    fitted_on: tuple[str, ...] = ()
    """The videos whose spectra it was fitted on, sorted; empty where it was not fitted."""
    num_spectra: int = 0
    """Spectra that it was fitted on."""

    @property
    def size(self) -> int:
        """Numbers for each pixel (K)."""
        return len(self.components) or len(self.bands)

    def read(self, cube: Cube, *, lines: Pick = None, samples: Pick = None) -> np.ndarray:
        """(K, lines, samples): the chosen bands as stored, or principal components as float32.

        SourceError for a cube with another number of bands than it was made for.
        """
        if cube.shape[0] != self.num_bands:
            raise SourceError(
                f"{cube.path} has {cube.shape[0]} bands, the choice by {self.method} is for {self.num_bands}"
            )
        values = cube.read(bands=self.bands, lines=lines, samples=samples)
        if self.method != "pca":
            return values
        centred = values - np.array(self.mean)[:, None, None]
        return np.tensordot(np.array(self.components), centred, axes=1).astype(np.float32)

    def check_fitted_within(self, videos: Collection[str]) -> None:
        """SourceError where it was fitted on a video that is not among these, the training ones."""
        foreign = sorted(set(self.fitted_on) - set(videos))
        if foreign:
            raise SourceError(
                f"the choice of bands was fitted on {len(foreign)} of {len(self.fitted_on)} videos that are "
                f"not for training, such as {foreign[0]!r}: fit it on the training videos alone"
            )


def choose_bands(cube: Cube, bands: Sequence[int]) -> BandChoice:
    """Bands by their numbers from 0, in this order; SourceError for one that the cube does not have."""
    for band in bands:
        if not 0 <= band < cube.shape[0]:
            raise SourceError(f"{cube.path} has bands 0 to {cube.shape[0] - 1}, asked for {band}")
    return BandChoice(method="list", num_bands=cube.shape[0], bands=tuple(map(int, bands)))


def choose_wavelengths(cube: Cube, wavelengths_nm: Sequence[float], *, tolerance_nm: float) -> BandChoice:
    """For each wavelength the band whose centre is nearest (of two equally near the first).

    SourceError where none is within the tolerance, two wavelengths have the same one, or the cube does not
    say its bands' wavelengths.
    """
    centres = cube.wavelengths_nm()
    bands: list[int] = []
    for wanted in wavelengths_nm:
        distances = np.abs(centres - wanted)
        band = int(np.argmin(distances))
        if not distances[band] <= tolerance_nm:
            raise SourceError(
                f"{cube.path} has no band within {tolerance_nm:g} nm of {wanted:g} nm: "
                f"the nearest is band {band} at {centres[band]:g} nm"
            )
        if band in bands:
            twin = wavelengths_nm[bands.index(band)]
            raise SourceError(f"{cube.path} has one band, {band}, for both {twin:g} and {wanted:g} nm")
        bands.append(band)
    return BandChoice(method="wavelength", num_bands=cube.shape[0], bands=tuple(bands))


class Spectra(NamedTuple):
    """Pixels of several cubes, to fit a choice on."""

    values: np.ndarray
    """float64 (N, len(bands))"""
    bands: np.ndarray
    """int64: the bands, which are those that no cube calls bad."""
    num_bands: int
    """Bands of each cube, bad ones too."""
    videos: tuple[str, ...]
    """The cubes' videos, sorted."""
    owners: np.ndarray
    """int64 (N,): place in `videos` of each spectrum's."""


def sample_spectra(cubes: Mapping[str, Cube], *, per_cube: int = 64, seed: int = 0) -> Spectra:
    """Spectra drawn from each cube, of the videos that the keys name: give it training videos alone.

    About `per_cube` of each, at the crossings of lines and samples drawn at random; the draw depends on the
    seed and on the video's place in the sorted order. Pixels without a value in any band (NaN, or the
    file's own mark) are left out. SourceError where cubes differ in their bands, or nothing is left.
    """
    if not cubes:
        raise SourceError("no cubes to draw spectra from: is the list of training videos empty?")
    videos = tuple(sorted(cubes))
    first = cubes[videos[0]]
    bands = np.flatnonzero(_good_bands(list(cubes.values())))
    drawn = []
    for place, video in enumerate(videos):
        cube = cubes[video]
        if cube.shape[0] != first.shape[0]:
            raise SourceError(f"{cube.path} has {cube.shape[0]} bands, {first.path} has {first.shape[0]}")
        drawn.append(_drawn(cube, bands, per_cube, generator(seed, _SPECTRA_STREAM, place)))
    owners = np.repeat(np.arange(len(videos)), [len(spectra) for spectra in drawn])
    if len(owners) == 0 or len(bands) == 0:
        raise SourceError(f"{len(cubes)} cubes have no pixel with a value in each good band")
    return Spectra(np.concatenate(drawn), bands, first.shape[0], videos, owners)


def _good_bands(cubes: Sequence[Cube]) -> np.ndarray:
    """bool (bands,): True where no cube calls the band bad. Cubes of another length are told of later."""
    good = np.ones(cubes[0].shape[0], bool)
    for cube in cubes:
        if cube.good_bands is not None and cube.good_bands.shape == good.shape:
            good &= cube.good_bands
    return good


def _drawn(cube: Cube, bands: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """float64 (n, len(bands)) of one cube."""
    _, lines, samples = cube.shape
    num_lines = min(lines, max(math.isqrt(count), -(-count // samples)))
    num_samples = min(samples, -(-count // num_lines))
    picked_lines = np.sort(rng.choice(lines, num_lines, replace=False))
    picked_samples = np.sort(rng.choice(samples, num_samples, replace=False))
    values = cube.read(bands=bands, lines=picked_lines, samples=picked_samples).astype(np.float64)
    spectra = values.reshape(len(bands), -1).T  # (bands, lines, samples) -> (n, bands)
    is_known = np.isfinite(spectra).all(axis=1)
    if cube.ignore_value is not None:
        is_known &= (spectra != cube.ignore_value).all(axis=1)
    return spectra[is_known]


def fit_pca(spectra: Spectra, *, components: int) -> BandChoice:
    """The directions in which the spectra differ most, by scikit-learn's exact (full) decomposition."""
    limit = min(spectra.values.shape)
    if not 1 <= components <= limit:
        raise SourceError(f"{components} components of {spectra.values.shape} spectra: from 1 to {limit}")
    pca = _sklearn("decomposition").PCA(components, svd_solver="full").fit(spectra.values)
    return BandChoice(
        method="pca",
        num_bands=spectra.num_bands,
        bands=tuple(spectra.bands.tolist()),
        scores=tuple(pca.explained_variance_ratio_.tolist()),
        mean=tuple(pca.mean_.tolist()),
        components=tuple(map(tuple, pca.components_.tolist())),
        fitted_on=spectra.videos,
        num_spectra=len(spectra.values),
    )


def fit_mutual_information(
    spectra: Spectra, labels: Mapping[str, int], *, bands: int, min_apart: int = 1, seed: int = 0
) -> BandChoice:
    """The bands that tell most of the labels, best first, each on its own (scikit-learn's estimate).

    labels     of each video that the spectra are from
    bands      how many
    min_apart  how far a band must be from those chosen before it: neighbours tell nearly the same
    """
    unlabelled = [video for video in spectra.videos if video not in labels]
    if unlabelled:
        raise SourceError(f"{len(unlabelled)} videos have no label, such as {unlabelled[0]!r}")
    classes = np.array([labels[video] for video in spectra.videos])[spectra.owners]
    estimate = _sklearn("feature_selection").mutual_info_classif
    scores = estimate(spectra.values, classes, discrete_features=False, random_state=seed)
    chosen: list[int] = []
    for place in np.argsort(-scores, kind="stable").tolist():
        band = spectra.bands[place]
        if len(chosen) < bands and all(abs(band - spectra.bands[other]) >= min_apart for other in chosen):
            chosen.append(place)
    if len(chosen) < bands or bands < 1:
        raise SourceError(f"{bands} bands {min_apart} apart of {len(scores)}: only {len(chosen)} fit")
    return BandChoice(
        method="mutual_information",
        num_bands=spectra.num_bands,
        bands=tuple(spectra.bands[chosen].tolist()),
        scores=tuple(scores[chosen].tolist()),
        fitted_on=spectra.videos,
        num_spectra=len(spectra.values),
    )


def write_band_choice(path: Path, choice: BandChoice) -> None:
    """Store a choice as JSON, whole or not at all."""
    write_text(path, json.dumps(asdict(choice), ensure_ascii=False) + "\n")


def read_band_choice(path: Path) -> BandChoice:
    """A stored choice; SourceError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in fields(BandChoice)]
        return BandChoice(**{name: _tuples(values[name]) for name in names})
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}: fit and write a choice first") from error
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(f"{path} holds no choice of bands ({error!r}): fit and write it again") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _sklearn(module: str) -> Any:
    """A part of scikit-learn, which is loaded only where a choice is fitted."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise SourceError(
            "fitting a choice of bands needs scikit-learn: pip install 'clipfeed[spectral]'"
        ) from error
