import sys

import numpy as np
import pytest

from pipeline.errors import SourceError
from pipeline.online.bands import (
    choose_bands,
    choose_wavelengths,
    fit_mutual_information,
    fit_pca,
    read_band_choice,
    sample_spectra,
    write_band_choice,
)
from pipeline.online.hyperspectral import open_cube
from tests.test_envi import needs_spectral, write_envi

EXTRA = "wavelength = {400, 500, 600, 700, 800, 900}\nwavelength units = nm"


def cube_of(folder, name, values, *, extra=EXTRA, interleave="bil"):
    return open_cube(write_envi(folder / name, np.asarray(values), interleave=interleave, extra=extra))


@pytest.fixture
def cube(tmp_path):
    return cube_of(tmp_path, "x", np.arange(6 * 3 * 4, dtype=np.uint16).reshape(6, 3, 4))


@pytest.fixture
def labelled(tmp_path):
    """Eight cubes of two classes; band 4 tells them apart, and so does 3 a little; the rest is noise."""
    rng = np.random.default_rng(0)
    cubes = {}
    for number in range(8):
        values = rng.normal(size=(6, 10, 12))
        values[4] += 8 * (number % 2)
        values[3] += 2 * (number % 2)
        cubes[f"video{number}"] = cube_of(tmp_path, f"c{number}", values)
    return cubes, {video: number % 2 for number, video in enumerate(cubes)}


def needs_sklearn():
    pytest.importorskip("sklearn")


def test_bands_by_number_come_in_the_order_that_is_asked_for(cube):
    choice = choose_bands(cube, [5, 0, 2])
    np.testing.assert_array_equal(choice.read(cube), cube.read()[[5, 0, 2]])
    np.testing.assert_array_equal(
        choice.read(cube, lines=[1], samples=slice(0, 2)), cube.read()[[5, 0, 2], 1:2, :2]
    )
    assert choice.size == 3
    with pytest.raises(SourceError, match=r"bands 0 to 5, asked for 6"):
        choose_bands(cube, [6])


def test_bands_by_wavelength_are_the_nearest_within_the_tolerance(cube):
    assert choose_wavelengths(cube, [805, 449, 600], tolerance_nm=60).bands == (4, 0, 2)
    assert choose_wavelengths(cube, [450], tolerance_nm=50).bands == (0,)
    with pytest.raises(SourceError, match=r"no band within 4 nm of 805 nm: the nearest is band 4 at 800 nm"):
        choose_wavelengths(cube, [805], tolerance_nm=4)
    with pytest.raises(SourceError, match=r"one band, 1, for both 490 and 510 nm"):
        choose_wavelengths(cube, [490, 510], tolerance_nm=50)


def test_micrometres_are_chosen_in_nanometres(tmp_path):
    extra = "wavelength = {0.4, 0.5}\nwavelength units = Micrometers"
    cube = cube_of(tmp_path, "x", np.zeros((2, 1, 1), np.uint8), extra=extra)
    assert choose_wavelengths(cube, [499], tolerance_nm=2).bands == (1,)


def test_a_cube_without_wavelengths_says_so(tmp_path):
    cube = cube_of(tmp_path, "x", np.zeros((2, 1, 1), np.uint8), extra="")
    with pytest.raises(SourceError, match="choose bands by number"):
        choose_wavelengths(cube, [500], tolerance_nm=2)


def test_a_choice_is_not_used_on_a_cube_with_other_bands(cube, tmp_path):
    other = cube_of(tmp_path, "y", np.zeros((7, 3, 4), np.uint16), extra="")
    with pytest.raises(SourceError, match=r"has 7 bands, the choice by list is for 6"):
        choose_bands(cube, [0]).read(other)


def test_spectra_are_pixels_of_their_cubes_and_the_same_for_a_seed(labelled):
    cubes, _ = labelled
    spectra = sample_spectra(cubes, per_cube=20, seed=3)
    assert spectra.values.shape == (len(spectra.owners), 6)
    assert spectra.videos == tuple(sorted(cubes))
    for place, video in enumerate(spectra.videos):
        mine = spectra.values[spectra.owners == place]
        assert 20 <= len(mine) <= 30
        pixels = {tuple(pixel) for pixel in cubes[video].read().reshape(6, -1).T}
        assert {tuple(spectrum) for spectrum in mine} <= pixels
    again = sample_spectra(dict(reversed(cubes.items())), per_cube=20, seed=3)
    np.testing.assert_array_equal(again.values, spectra.values)
    assert not np.array_equal(sample_spectra(cubes, per_cube=20, seed=4).values, spectra.values)


def test_pixels_and_bands_that_hold_nothing_are_left_out(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 5, 5))
    values[1, 0, 0] = -9999
    values[3, 0, 1] = np.nan
    values[2] = np.nan  # a bad band
    extra = "bbl = {1, 1, 0, 1}\ndata ignore value = -9999"
    spectra = sample_spectra({"v": cube_of(tmp_path, "x", values, extra=extra)}, per_cube=25)
    assert spectra.bands.tolist() == [0, 1, 3]
    assert spectra.values.shape == (23, 3)
    assert spectra.num_bands == 4


def test_cubes_that_do_not_go_together_or_hold_nothing_are_an_error(cube, tmp_path):
    other = cube_of(tmp_path, "y", np.zeros((7, 3, 4), np.uint16), extra="")
    with pytest.raises(SourceError, match=r"y\.img has 7 bands, .*x\.img has 6"):
        sample_spectra({"a": cube, "b": other})
    empty = cube_of(tmp_path, "z", np.zeros((7, 3, 4), np.uint16), extra="data ignore value = 0")
    with pytest.raises(SourceError, match="no pixel with a value"):
        sample_spectra({"a": empty})
    with pytest.raises(SourceError, match="no cubes"):
        sample_spectra({})


def test_principal_components_are_those_of_the_covariance(labelled):
    needs_sklearn()
    cubes, _ = labelled
    spectra = sample_spectra(cubes, per_cube=40)
    choice = fit_pca(spectra, components=3)
    # The right value: eigenvectors of the covariance, whose signs are free.
    variances, vectors = np.linalg.eigh(np.cov(spectra.values.T))
    expected = vectors[:, ::-1][:, :3].T
    signs = np.sign((expected * choice.components).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(choice.components, signs * expected, atol=1e-8)
    np.testing.assert_allclose(choice.scores, variances[::-1][:3] / variances.sum())
    values = choice.read(cubes["video1"], lines=slice(0, 2))
    assert values.shape == (3, 2, 12)
    assert values.dtype == np.float32
    pixel = cubes["video1"].read()[:, 1, 5]
    by_hand = np.array(choice.components) @ (pixel - spectra.values.mean(axis=0))
    np.testing.assert_allclose(values[:, 1, 5], by_hand, rtol=1e-5)
    with pytest.raises(SourceError, match="from 1 to 6"):
        fit_pca(spectra, components=7)


@needs_spectral
def test_the_spectral_package_finds_the_same_components(labelled):
    needs_sklearn()
    from spectral import principal_components

    spectra = sample_spectra(labelled[0], per_cube=40)
    choice = fit_pca(spectra, components=2)
    second = principal_components(spectra.values[:, None, :])
    np.testing.assert_allclose(np.abs(choice.components), np.abs(second.eigenvectors[:, :2].T), atol=1e-8)


def test_mutual_information_finds_the_bands_that_tell_the_labels(labelled):
    needs_sklearn()
    cubes, labels = labelled
    spectra = sample_spectra(cubes, per_cube=100)
    choice = fit_mutual_information(spectra, labels, bands=2)
    assert choice.bands == (4, 3)
    assert choice.scores[0] == pytest.approx(np.log(2), abs=0.05)  # one bit, in nats
    assert 0.1 < choice.scores[1] < 0.6
    assert fit_mutual_information(spectra, labels, bands=2) == choice
    apart = fit_mutual_information(spectra, labels, bands=2, min_apart=2)
    assert apart.bands[0] == 4
    assert abs(apart.bands[1] - 4) >= 2
    np.testing.assert_array_equal(choice.read(cubes["video0"]), cubes["video0"].read()[[4, 3]])
    with pytest.raises(SourceError, match="only 2 fit"):
        fit_mutual_information(spectra, labels, bands=4, min_apart=3)
    with pytest.raises(SourceError, match="1 videos have no label, such as 'video7'"):
        fit_mutual_information(spectra, {k: v for k, v in labels.items() if k != "video7"}, bands=1)


def test_a_fitted_choice_keeps_the_videos_that_it_saw(labelled):
    needs_sklearn()
    cubes, _ = labelled
    train = [f"video{number}" for number in range(6)]
    choice = fit_pca(sample_spectra({video: cubes[video] for video in train}), components=1)
    assert choice.fitted_on == tuple(train)
    choice.check_fitted_within(train)
    leaked = fit_pca(sample_spectra(cubes), components=1)
    with pytest.raises(SourceError, match=r"2 of 8 videos that are not for training, such as 'video6'"):
        leaked.check_fitted_within(train)


def test_choices_come_back_from_their_file_as_they_were(labelled, cube, tmp_path):
    needs_sklearn()
    spectra = sample_spectra(labelled[0])
    choices = [
        choose_bands(cube, [3, 1]),
        choose_wavelengths(cube, [500], tolerance_nm=1),
        fit_pca(spectra, components=2),
        fit_mutual_information(spectra, labelled[1], bands=1),
    ]
    for choice in choices:
        write_band_choice(tmp_path / "bands.json", choice)
        assert read_band_choice(tmp_path / "bands.json") == choice


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"method": "pca"}'])
def test_a_file_that_holds_no_choice_is_an_error(tmp_path, text):
    (tmp_path / "bands.json").write_text(text)
    with pytest.raises(SourceError, match=r"bands\.json holds no choice of bands"):
        read_band_choice(tmp_path / "bands.json")
    with pytest.raises(SourceError, match=r"other\.json cannot be read"):
        read_band_choice(tmp_path / "other.json")


def test_without_scikit_learn_fitting_says_what_to_install(labelled, monkeypatch):
    spectra = sample_spectra(labelled[0])
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SourceError, match=r"pip install 'clipfeed\[spectral\]'"):
        fit_pca(spectra, components=1)
