import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.online.bands import choose_bands
from pipeline.online.hyperspectral import CubeSource, CubeSpec
from pipeline.online.series import SeriesSource, SeriesSpec
from pipeline.online.sources import ClipSpan, Recent, Source, pad_ragged, path_for, rows_without
from tests.test_envi import write_envi

CUBE = np.arange(3 * 4 * 5, dtype=np.int16).reshape(3, 4, 5)
CLIP = ClipSpan("Jump/v", np.array([0.0, 0.5]))


def cube_source(root, *, choice=None, **spec):
    write_envi(root / "cubes" / "Jump" / "v", CUBE)
    return CubeSource(root, CubeSpec(pattern="cubes/{video}.hdr", **spec), choice=choice)


def test_both_kinds_are_sources(tmp_path):
    sources: list[Source] = [
        SeriesSource(tmp_path, SeriesSpec(pattern="{video}.csv")),
        CubeSource(tmp_path, CubeSpec(pattern="{video}.hdr")),
    ]
    assert [source.ragged for source in sources] == [False, False]


def test_videos_that_a_source_has_nothing_for_are_found_beforehand(tmp_path):
    cubes = cube_source(tmp_path)
    series = SeriesSource(tmp_path, SeriesSpec(pattern="imu/{name}.csv"))
    (tmp_path / "imu").mkdir()
    (tmp_path / "imu" / "w.csv").write_text("t,a\n0.0,1\n")
    found = rows_without({"cube": cubes, "imu": series}, ["Jump/v", "Jump/w", "Run/w"])
    assert found == {"cube": [1, 2], "imu": [0]}


def test_the_names_of_videos_are_never_taken_for_patterns():
    assert path_for(Path("r"), "{video}/{name}.csv", "{name}/100% {video}") == Path(
        "r/{name}/100% {video}/100% {video}.csv"
    )


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    channels=st.integers(1, 3),
    fill=st.sampled_from([0.0, -1.0]),
)
def test_padded_windows_come_back_by_their_lengths(lengths, channels, fill):
    rng = np.random.default_rng(0)
    windows = [rng.normal(size=(length, channels)).astype(np.float32) for length in lengths]
    padded = pad_ragged(windows, fill=fill)
    assert padded.values.shape == (len(lengths), max(lengths), channels)
    assert padded.values.dtype == np.float32
    assert padded.lengths.dtype == np.int64
    assert padded.lengths.tolist() == lengths
    assert padded.mask.dtype == bool
    for window, values, mask in zip(windows, padded.values, padded.mask, strict=True):
        np.testing.assert_array_equal(values[mask], window)
        assert mask.tolist() == [True] * len(window) + [False] * (max(lengths) - len(window))
        assert (values[~mask] == fill).all()


def test_windows_that_do_not_fit_are_named_by_their_place():
    with pytest.raises(SourceError, match=r"window 1 is \(2, 3\), expected \(L, 2\)"):
        pad_ragged([np.zeros((1, 2)), np.zeros((2, 3))])
    with pytest.raises(ValueError, match="no windows"):
        pad_ragged([])


def test_what_was_asked_for_last_is_kept_and_never_more_than_the_limit():
    made = []
    recent: Recent[str] = Recent(10)

    def get(key, size=4):
        return recent.get(key, lambda: made.append(key) or key, lambda _: size)

    for key in "abac":  # c takes the place of b
        assert get(key) == key
    assert (len(recent), recent.bytes) == (2, 8)
    get("a")
    get("b")
    assert made == ["a", "b", "c", "b"]
    get("large", size=11)
    assert recent.bytes == 8


def test_a_copy_and_a_forked_child_start_with_nothing_kept():
    recent: Recent[int] = Recent(10)
    recent.get("a", lambda: 1, lambda _: 1)
    assert len(pickle.loads(pickle.dumps(recent))) == 0
    recent._lock.acquire()  # as if another thread held it at the moment of the fork
    child = os.fork()
    if child == 0:
        os._exit(recent.get("a", lambda: 7, lambda _: 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    recent._lock.release()
    assert recent.get("a", lambda: 2, lambda _: 1) == 1


def test_a_clip_gets_the_cube_of_its_video(tmp_path):
    sample = cube_source(tmp_path).read(CLIP)
    np.testing.assert_array_equal(sample.values, CUBE)
    assert sample.values.dtype == np.float32
    assert sample.mask.shape == ()
    assert sample.mask


def test_a_cube_is_mirrored_with_its_clip_unless_it_looks_another_way(tmp_path):
    clip = CLIP._replace(flipped=True)
    np.testing.assert_array_equal(cube_source(tmp_path).read(clip).values, CUBE[:, :, ::-1])
    np.testing.assert_array_equal(cube_source(tmp_path, mirror=False).read(clip).values, CUBE)


def test_a_clip_gets_the_part_and_the_bands_that_are_asked_for(tmp_path):
    cube = cube_source(tmp_path).open("Jump/v")
    source = cube_source(tmp_path, lines=(1, 3), samples=(0, 5), choice=choose_bands(cube, [2, 0]))
    np.testing.assert_array_equal(source.read(CLIP).values, CUBE[[2, 0], 1:3])
    with pytest.raises(SourceError, match=r"has lines 0 to 3, asked for 2 to 5"):
        cube_source(tmp_path, lines=(2, 6)).read(CLIP)


def test_a_missing_cube_raises_or_is_masked(tmp_path):
    with pytest.raises(SourceError, match=r"gone\.hdr"):
        cube_source(tmp_path).read(CLIP._replace(video="gone"))
    source = cube_source(tmp_path, missing="mask", shape=(3, 4, 5))
    sample = source.read(CLIP._replace(video="gone"))
    assert sample.values.shape == (3, 4, 5)
    assert not sample.values.any()
    assert not sample.mask
    assert source.read(CLIP).mask


def test_a_cube_of_another_shape_than_promised_is_an_error(tmp_path):
    with pytest.raises(SourceError, match=r"gives \(3, 4, 5\), expected \(3, 4, 6\)"):
        cube_source(tmp_path, shape=(3, 4, 6)).read(CLIP)


def test_complex_cubes_are_no_source(tmp_path):
    source = cube_source(tmp_path)
    write_envi(tmp_path / "cubes" / "Jump" / "v", CUBE.astype(np.complex64))
    with pytest.raises(SourceError, match="complex"):
        source.read(CLIP)


@pytest.mark.parametrize("wrong", [{"missing": "mask"}, {"missing": "skip"}, {"spectral_axis": "y"}])
def test_a_cube_spec_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValueError):
        CubeSpec(pattern="{video}.hdr", **wrong)


def test_a_cube_source_pickles_small_and_reads_the_same(tmp_path):
    source = cube_source(tmp_path)
    before = source.read(CLIP).values
    copied = pickle.dumps(source)
    assert len(copied) < 2000
    np.testing.assert_array_equal(pickle.loads(copied).read(CLIP).values, before)
