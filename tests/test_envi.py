import gc
import importlib.util
import os
import pickle
import random
import warnings

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.online.envi import parse_envi
from pipeline.online.hyperspectral import open_cube

CODES = {
    1: "u1",
    2: "i2",
    3: "i4",
    4: "f4",
    5: "f8",
    12: "u2",
    13: "u4",
    14: "i8",
    15: "u8",
    6: "c8",
    9: "c16",
}
"""ENVI's data types, from its documentation."""
AXES = {"bsq": (0, 1, 2), "bil": (1, 0, 2), "bip": (1, 2, 0)}
"""Order of (bands, lines, samples) in the file, outermost first."""

needs_spectral = pytest.mark.skipif(
    importlib.util.find_spec("spectral") is None, reason="needs the spectral package as a second opinion"
)


def write_envi(stem, cube, *, interleave="bsq", order=0, offset=0, extra="", suffix=".img", drop=()):
    """A cube (bands, lines, samples) as ENVI; the path of its header."""
    code = next(code for code, name in CODES.items() if np.dtype(name) == cube.dtype.newbyteorder("="))
    stem.parent.mkdir(parents=True, exist_ok=True)
    stored = cube.transpose(AXES[interleave]).astype(cube.dtype.newbyteorder("<>"[order]))
    stem.with_name(stem.name + suffix).write_bytes(b"\xee" * offset + stored.tobytes())
    fields = {
        **{"samples": cube.shape[2], "lines": cube.shape[1], "bands": cube.shape[0]},
        **{"header offset": offset, "data type": code, "interleave": interleave, "byte order": order},
    }
    lines = [f"{key} = {value}" for key, value in fields.items() if key not in drop]
    header = stem.with_name(stem.name + ".hdr")
    header.write_text("\n".join(["ENVI", *lines, extra]) + "\n")
    return header


def pixels(dtype, shape=(4, 3, 5)):
    """Values that use all bytes of a type."""
    rng = np.random.default_rng(7)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    return (rng.normal(size=shape) * (1 + 2j if np.dtype(dtype).kind == "c" else 1)).astype(dtype)


@pytest.mark.parametrize("interleave", AXES)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("offset", [0, 37])
@pytest.mark.parametrize("code", CODES)
def test_a_cube_is_bands_lines_samples_however_it_is_stored(tmp_path, interleave, order, offset, code):
    cube = pixels(CODES[code])
    path = write_envi(tmp_path / "x", cube, interleave=interleave, order=order, offset=offset)
    opened = open_cube(path)
    values = opened.read()
    np.testing.assert_array_equal(values, cube)
    assert opened.shape == (4, 3, 5)
    assert values.dtype.isnative
    assert values.dtype == np.dtype(CODES[code])
    assert values.flags.owndata
    assert values.flags.writeable


@needs_spectral
@pytest.mark.parametrize("interleave", AXES)
@pytest.mark.parametrize("order", [0, 1])
def test_the_spectral_package_reads_the_same(tmp_path, interleave, order):
    extra = "wavelength = {400, 500.5,\n 600, 700}\nwavelength units = Nanometers"
    for code in (1, 2, 3, 4, 5, 12, 13, 14, 15):
        cube = pixels(CODES[code])
        path = write_envi(
            tmp_path / f"x{code}", cube, interleave=interleave, order=order, offset=11, extra=extra
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from spectral.io import envi

            image = envi.open(str(path))
            second = np.asarray(image.open_memmap(interleave="bsq"))
            centres = image.bands.centers
        first = open_cube(path)
        np.testing.assert_array_equal(first.read(), second)
        assert first.wavelengths.tolist() == centres


def picks(length):
    """Slices, lists in any order with repeats, bool masks, and all."""
    numbers = st.lists(st.integers(0, length - 1), max_size=length + 2)
    edges = st.one_of(st.none(), st.integers(-length - 1, length + 1))
    steps = st.sampled_from([None, 1, 2, -1, -2])
    masks = st.lists(st.booleans(), min_size=length, max_size=length)
    return st.one_of(
        st.none(),
        numbers,
        st.builds(slice, edges, edges, steps),
        masks.map(lambda mask: np.array(mask, bool)),
    )


@given(data=st.data(), interleave=st.sampled_from(list(AXES)), order=st.sampled_from([0, 1]))
def test_any_part_is_what_numpy_picks_from_the_whole(tmp_path_factory, data, interleave, order):
    cube = pixels("i2")
    path = write_envi(tmp_path_factory.mktemp("e") / "x", cube, interleave=interleave, order=order)
    chosen = {
        name: data.draw(picks(length))
        for name, length in zip(("bands", "lines", "samples"), cube.shape, strict=True)
    }
    expected = cube
    for axis, pick in enumerate(chosen.values()):
        numbers = np.arange(cube.shape[axis])[slice(None) if pick is None else pick]
        expected = np.take(expected, numbers.astype(int), axis=axis)
    values = open_cube(path).read(**chosen)
    np.testing.assert_array_equal(values, expected)
    assert values.shape == expected.shape


@pytest.mark.parametrize("wrong", [[4], [-1], [0, 99]])
def test_bands_that_are_not_there_are_an_error_that_names_the_file(tmp_path, wrong):
    cube = open_cube(write_envi(tmp_path / "x", pixels("u1")))
    with pytest.raises(SourceError, match=r"x\.img has bands 0 to 3, asked for"):
        cube.read(bands=wrong)
    with pytest.raises(SourceError, match="chosen by whole numbers"):
        cube.read(lines=[0.5])


@pytest.mark.parametrize("key", ["samples", "lines", "bands", "data type", "interleave", "byte order"])
def test_a_missing_key_is_named(tmp_path, key):
    path = write_envi(tmp_path / "x", pixels("u2"), drop=(key,))
    with pytest.raises(SourceError, match=rf"x\.hdr: the header lacks '{key}'"):
        open_cube(path)


def test_all_missing_keys_are_named_at_once_and_the_offset_may_be_missing(tmp_path):
    path = write_envi(tmp_path / "x", pixels("u2"), drop=("samples", "byte order"))
    with pytest.raises(SourceError, match="'samples', 'byte order'"):
        open_cube(path)
    cube = pixels("u2")
    path = write_envi(tmp_path / "y", cube, drop=("header offset",))
    np.testing.assert_array_equal(open_cube(path).read(), cube)


def test_upper_case_comments_lists_over_lines_and_latin_1(tmp_path):
    path = write_envi(tmp_path / "x", pixels("i2"))
    header = (
        "ENVI\r\n"
        "; made by a camera = yes\r\n"
        "DESCRIPTION = {\r\n  Probe bei 20 \xb0C, im Labor = innen }\r\n"
        "SAMPLES   = 5\r\nLines=3\r\nBands =  4\r\nData  Type = 2\r\n"
        "INTERLEAVE = BSQ\r\nbyte order = 0\r\nsensor type = \r\n"
        "Wavelength = {\r\n  0.4 ,0.5\r\n; two more\r\n,  0.6,\r\n0.7}\r\n"
        "wavelength units = Micrometers\r\n"
        "bbl = {1, 1, 0, 1}\r\nband names = {a, b,\r\n c, d}\r\ndata ignore value = -9999\r\n"
    )
    path.write_bytes(header.encode("latin-1"))
    cube = open_cube(path)
    np.testing.assert_array_equal(cube.read(), pixels("i2"))
    assert cube.wavelengths.tolist() == [0.4, 0.5, 0.6, 0.7]
    np.testing.assert_allclose(cube.wavelengths_nm(), [400, 500, 600, 700])
    assert cube.good_bands.tolist() == [True, True, False, True]
    assert cube.ignore_value == -9999
    assert cube.metadata["description"] == "Probe bei 20 °C, im Labor = innen"
    assert cube.metadata["band names"] == ["a", "b", "c", "d"]
    assert cube.metadata["sensor type"] == ""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "first line must be ENVI"),
        ("ENVIRONMENT\nsamples = 1", "first line must be ENVI"),
        ("ENVI\nwavelength = {1, 2", "the brace of 'wavelength' is never closed"),
    ],
)
def test_text_that_is_no_header_is_an_error(tmp_path, text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_envi(text)
    path = write_envi(tmp_path / "x", pixels("u1"))
    path.write_text(text)
    with pytest.raises(SourceError, match=rf"x\.hdr: .*{fault}"):
        open_cube(path)


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ("bands = four", "'bands' must be a whole number >= 1, found 'four'"),
        ("lines = 0", "'lines' must be a whole number >= 1"),
        ("header offset = -1", "'header offset'"),
        ("data type = 7", "data type 7"),
        ("byte order = 2", "byte order 2"),
        ("interleave = bsp", "bsq, bil or bip, found 'bsp'"),
        ("wavelength = {1, 2, 3}", "'wavelength' lists 3 numbers for 4 bands"),
        ("wavelength = {1, 2, x, 4}", "'wavelength' must list numbers"),
        ("data ignore value = none", "'data ignore value'"),
        ("file type = ENVI Spectral Library", "spectral library"),
        ("file compression = 1", "compressed"),
        ("major frame offsets = {0, 128}", "'major frame offsets'"),
        ("lines = 4", r"has 60 bytes, but \(4, 4, 5\) uint8 from byte 0 on takes 80: cut short"),
    ],
)
def test_headers_that_would_be_misread_are_refused(tmp_path, extra, fault):
    path = write_envi(tmp_path / "x", pixels("u1"), extra=extra)
    with pytest.raises(SourceError, match=fault) as caught:
        open_cube(path)
    assert str(tmp_path / "x.") in str(caught.value)


def test_frame_offsets_of_zero_and_an_empty_list_are_no_fault(tmp_path):
    path = write_envi(tmp_path / "x", pixels("u1"), extra="major frame offsets = {0, 0}\nwavelength = {}")
    assert open_cube(path).wavelengths is None
    with pytest.raises(SourceError, match="does not say its bands' wavelengths"):
        open_cube(path).wavelengths_nm()


def test_a_unit_that_is_no_length_is_not_taken_for_one(tmp_path):
    extra = "wavelength = {1, 2, 3, 4}\nwavelength units = Wavenumber"
    with pytest.raises(SourceError, match="'Wavenumber'"):
        open_cube(write_envi(tmp_path / "x", pixels("u1"), extra=extra)).wavelengths_nm()


@pytest.mark.parametrize("suffix", ["", ".img", ".raw", ".DAT", ".bil"])
def test_the_data_is_found_beside_its_header_and_the_header_beside_its_data(tmp_path, suffix):
    cube = pixels("u2")
    path = write_envi(tmp_path / "v 1.2", cube, suffix=suffix)
    np.testing.assert_array_equal(open_cube(path).read(), cube)
    np.testing.assert_array_equal(open_cube(tmp_path / f"v 1.2{suffix}").read(), cube)


def test_a_header_named_after_the_whole_data_file(tmp_path):
    path = write_envi(tmp_path / "x.raw", pixels("u2"), suffix="")
    assert path.name == "x.raw.hdr"
    np.testing.assert_array_equal(open_cube(path).read(), pixels("u2"))
    np.testing.assert_array_equal(open_cube(tmp_path / "x.raw").read(), pixels("u2"))


def test_missing_and_ambiguous_files_are_named(tmp_path):
    path = write_envi(tmp_path / "x", pixels("u2"))
    (tmp_path / "x.raw").write_bytes(bytes(1000))
    with pytest.raises(SourceError, match=r"2 files \(x\.img, x\.raw\).*by its own name"):
        open_cube(path)
    np.testing.assert_array_equal(open_cube(tmp_path / "x.img").read(), pixels("u2"))
    (tmp_path / "x.img").unlink()
    (tmp_path / "x.raw").unlink()
    with pytest.raises(SourceError, match=r"x\.hdr has no file of data beside it"):
        open_cube(path)
    with pytest.raises(SourceError, match=r"y\.img has no file beside it: expected y\.img\.hdr or y\.hdr"):
        open_cube(tmp_path / "y.img")


def test_a_file_that_became_shorter_is_an_error_and_not_the_end_of_the_process(tmp_path):
    cube = open_cube(write_envi(tmp_path / "x", pixels("f8")))
    os.truncate(cube.path, 100)
    with pytest.raises(SourceError, match="has 100 bytes"):
        cube.read(bands=[0])
    os.truncate(cube.path, 0)
    with pytest.raises(SourceError, match=r"x\.img"):
        cube.read()
    cube.path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        cube.read()


def test_a_cube_pickles(tmp_path):
    cube = open_cube(write_envi(tmp_path / "x", pixels("i2"), extra="wavelength = {1, 2, 3, 4}"))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(cube)).read(), cube.read())


def test_100000_reads_over_100_files_keep_open_files_and_memory_flat(tmp_path):
    shape = (6, 8, 8)
    cubes = [
        open_cube(write_envi(tmp_path / f"{i}", np.full(shape, i, np.int16), interleave=list(AXES)[i % 3]))
        for i in range(100)
    ]
    process, rng = psutil.Process(), random.Random(0)

    def read(count):
        for turn in range(count):
            number = rng.randrange(100)
            bands = slice(1, 6, 4) if turn % 16 else [5, 0]
            assert cubes[number].read(bands=bands)[1, 1, 0] == number

    read(2_000)
    gc.collect()
    files, maps, memory = process.num_fds(), len(process.memory_maps()), process.memory_info().rss
    read(98_000)
    assert process.num_fds() == files
    assert len(process.memory_maps()) <= maps + 5
    assert process.memory_info().rss - memory < 8 << 20


def resident_bytes(path):
    """How much of a file is in memory; None where the system does not tell."""
    import mmap

    from pipeline.online.pages import MappedPages

    with path.open("rb") as file:
        share = MappedPages(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), is_own=True
        ).resident_share()
    return share * path.stat().st_size


SPARSE = (300, 256, 320)
"""49 MB of uint16."""


@pytest.mark.parametrize("interleave", ["bsq", "bil"])
@pytest.mark.parametrize("bands", [range(100, 130), range(0, 300, 10)])
def test_30_of_300_bands_touch_little_more_than_their_own_bytes(tmp_path, interleave, bands):
    path = write_envi(tmp_path / "x", np.zeros((300, 1, 1), np.uint16), interleave=interleave)
    path.write_text(
        path.read_text()
        .replace("lines = 1", f"lines = {SPARSE[1]}")
        .replace("samples = 1", f"samples = {SPARSE[2]}")
    )
    data = tmp_path / "x.img"
    os.truncate(data, 0)
    os.truncate(data, int(np.prod(SPARSE)) * 2)
    if resident_bytes(data) != 0:
        pytest.skip("this file system keeps its files in memory")
    values = open_cube(path).read(bands=bands)
    assert values.shape == (30, *SPARSE[1:])
    touched = resident_bytes(data) / values.nbytes
    # Of single bands of single lines, 640 bytes each, whole pages of 4096 must be read.
    assert 0.99 < touched < (8.0 if interleave == "bil" and bands.step > 1 else 1.25)
