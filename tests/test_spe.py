import os
import pickle
import struct

import numpy as np
import pytest

from pipeline.errors import SourceError
from pipeline.online.hyperspectral import open_cube
from pipeline.online.spe import read_frame_metadata, read_spe

CODES = {0: "f4", 1: "i4", 2: "i2", 3: "u2", 5: "f8", 6: "u1", 8: "u4"}
"""Data types of the binary header, from the SPE 3.0 file format specification."""
FORMATS = {"u2": "MonochromeUnsigned16", "u4": "MonochromeUnsigned32", "f4": "MonochromeFloating32"}
NAMESPACE = "http://www.princetoninstruments.com/spe/2009"


def header_of(frames, *, version, code, num_frames=None, xml_offset=0, fields=()):
    """The 4100 bytes before the frames (F, H, W); `fields`: (offset, format, values) of others."""
    header = bytearray(4100)
    count, height, width = frames.shape
    basic = [
        *[(42, "<H", width), (656, "<H", height), (108, "<h", code), (1992, "<f", version)],
        *[(1446, "<i", count if num_frames is None else num_frames), (678, "<Q", xml_offset)],
    ]
    for offset, fmt, *values in [*basic, *fields]:
        struct.pack_into(fmt, header, offset, *values)
    return bytes(header)


def write_spe2(path, frames, *, version=2.5, num_frames=None, fields=()):
    code = next(code for code, name in CODES.items() if np.dtype(name) == frames.dtype)
    header = header_of(frames, version=version, code=code, num_frames=num_frames, fields=fields)
    path.write_bytes(header + frames.astype(frames.dtype.newbyteorder("<")).tobytes())
    return path


def block(kind, inside="", **attributes):
    text = " ".join(f'{name}="{value}"' for name, value in attributes.items())
    return f"<{kind} {text}>{inside}</{kind}>"


STAMPS = (
    block("TimeStamp", event="ExposureStarted", type="Int64", bitDepth=64, resolution=1000)
    + block("TimeStamp", event="ExposureEnded", type="Int64", bitDepth=64, resolution=1000)
    + block("FrameTrackingNumber", type="Int64", bitDepth=64)
)


def write_spe3(path, regions, *, metadata=False, calibrations="", num_frames=None, namespace=NAMESPACE):
    """Regions are (F, H, W) each, one behind the other in a frame, and behind them time stamps."""
    count = len(regions[0])
    name = next(name for name in FORMATS if np.dtype(name) == regions[0].dtype)
    sizes = [region[0].nbytes for region in regions]
    described = "".join(
        block(
            *("DataBlock", ""),
            **{"type": "Region", "count": 1, "width": region.shape[2], "height": region.shape[1]},
            **{"size": size, "stride": size, "calibrations": f"1,{3 + place}"},
        )
        for place, (region, size) in enumerate(zip(regions, sizes, strict=True))
    )
    stride = sum(sizes) + (24 if metadata else 0)
    frame = block(
        *("DataBlock", described),
        **{"type": "Frame", "count": num_frames or count, "pixelFormat": FORMATS[name]},
        **{"size": sum(sizes), "stride": stride, **({"metaFormat": 1} if metadata else {})},
    )
    data = b""
    for number in range(count):
        data += b"".join(region[number].tobytes() for region in regions)
        if metadata:
            data += struct.pack("<3q", 100 * number, 100 * number + 40, number + 1)
    xml = block(
        *("SpeFormat", f"<DataFormat>{frame}</DataFormat>"),
        **{"version": "3.0", "xmlns": namespace},
    ).replace(
        "</SpeFormat>",
        f"<MetaFormat>{block('MetaBlock', STAMPS, id=1)}</MetaFormat>"
        f"<Calibrations>{calibrations}</Calibrations></SpeFormat>",
    )
    header = header_of(
        regions[0], version=3.0, code={"u2": 3, "u4": 8, "f4": 0}[name], xml_offset=4100 + len(data)
    )
    path.write_bytes(header + data + b"\xef\xbb\xbf" + xml.encode() + b"\r\n\0")
    return path


def frames_of(dtype, shape=(5, 3, 4)):
    return np.random.default_rng(3).integers(0, 60000, shape).astype(dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_twins_of_2_5_and_3_0_have_the_same_pixels(tmp_path, dtype):
    frames = frames_of(dtype)
    old = open_cube(write_spe2(tmp_path / "old.spe", frames))
    new = open_cube(write_spe3(tmp_path / "new.SPE", [frames]))
    stamped = open_cube(write_spe3(tmp_path / "stamped.spe", [frames], metadata=True))
    for cube in (old, new, stamped):
        assert cube.shape == (5, 3, 4)
        values = cube.read()
        np.testing.assert_array_equal(values, frames)
        assert values.dtype == np.dtype(dtype)
        assert values.flags.owndata
    assert [round(cube.metadata["version"], 1) for cube in (old, new, stamped)] == [2.5, 3.0, 3.0]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("version", [0.0, 1.6, 2.2])
def test_all_types_of_older_headers(tmp_path, code, version):
    frames = frames_of(CODES[code])
    cube = open_cube(write_spe2(tmp_path / "x.spe", frames, version=version))
    np.testing.assert_array_equal(cube.read(), frames)


def test_what_lies_between_frames_is_no_pixel_and_can_be_read(tmp_path):
    frames = frames_of("u2")
    spe = read_spe(write_spe3(tmp_path / "x.spe", [frames], metadata=True))
    kept = read_frame_metadata(spe)
    np.testing.assert_allclose(kept["ExposureStarted"], [0.0, 0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(kept["ExposureEnded"] - kept["ExposureStarted"], 0.04)
    assert kept["FrameTrackingNumber"].tolist() == [1, 2, 3, 4, 5]
    assert read_frame_metadata(read_spe(write_spe2(tmp_path / "y.spe", frames))) == {}


def test_one_of_several_regions_is_chosen(tmp_path):
    first, second = frames_of("u2", (5, 3, 4)), frames_of("u2", (5, 2, 6)) + 1
    path = write_spe3(tmp_path / "x.spe", [first, second], metadata=True)
    np.testing.assert_array_equal(open_cube(path, region=0).read(), first)
    np.testing.assert_array_equal(open_cube(path, region=1).read(), second)
    with pytest.raises(SourceError, match="a frame has 2 regions: choose one by region="):
        open_cube(path)
    with pytest.raises(SourceError, match="there is no region 2"):
        open_cube(path, region=2)
    with pytest.raises(SourceError, match="there is no region 1"):
        open_cube(write_spe2(tmp_path / "y.spe", first), region=1)


def wavelengths_xml(text):
    return block("WavelengthMapping", block("Wavelength", text), id=1)


def test_a_calibrated_x_axis_is_the_spectrum(tmp_path):
    frames = frames_of("u2")
    path = write_spe3(tmp_path / "x.spe", [frames], calibrations=wavelengths_xml("500,510.5,\n520,530"))
    cube = open_cube(path)
    assert cube.shape == (4, 5, 3)  # columns are bands, frames are lines, rows are samples
    assert cube.wavelengths.tolist() == [500, 510.5, 520, 530]
    assert cube.wavelengths_nm().tolist() == [500, 510.5, 520, 530]
    np.testing.assert_array_equal(cube.read(), frames.transpose(2, 0, 1))
    np.testing.assert_array_equal(
        cube.read(bands=[3, 1], lines=[4]), frames[4:, :, [3, 1]].transpose(2, 0, 1)
    )
    as_frames = open_cube(path, spectral_axis="frames")
    assert as_frames.wavelengths is None
    np.testing.assert_array_equal(as_frames.read(), frames)


def test_an_uncalibrated_x_axis_is_the_spectrum_where_one_says_so(tmp_path):
    frames = frames_of("u2")
    cube = open_cube(write_spe2(tmp_path / "x.spe", frames), spectral_axis="x")
    np.testing.assert_array_equal(cube.read(), frames.transpose(2, 0, 1))
    with pytest.raises(SourceError, match="does not say its bands' wavelengths"):
        cube.wavelengths_nm()


def test_wavelengths_of_the_sensor_are_those_of_the_regions_own_columns(tmp_path):
    sensor = block("SensorMapping", id=3, x=2, y=0, width=8, height=3, xBinning=2, yBinning=1)
    whole = wavelengths_xml(",".join(str(500 + column) for column in range(12)))
    path = write_spe3(tmp_path / "x.spe", [frames_of("u2")], calibrations=whole + sensor)
    assert open_cube(path).wavelengths.tolist() == [502.5, 504.5, 506.5, 508.5]
    path = write_spe3(tmp_path / "y.spe", [frames_of("u2")], calibrations=whole)
    assert open_cube(path).wavelengths is None


def test_wavelengths_may_come_with_their_errors(tmp_path):
    pairs = block("WavelengthMapping", block("WavelengthError", "500,0.1 501,0.1 502,0.2 503,0"), id=1)
    path = write_spe3(tmp_path / "x.spe", [frames_of("u2")], calibrations=pairs)
    assert open_cube(path).wavelengths.tolist() == [500, 501, 502, 503]


def test_the_polynomial_of_an_older_header_counts_pixels_from_1(tmp_path):
    polynomial = [(3098, "<b", 1), (3101, "<b", 2), (3263, "<6d", 400.0, 10.0, 1.0, 99.0, 99.0, 99.0)]
    path = write_spe2(tmp_path / "x.spe", frames_of("u2"), fields=[*polynomial, (3100, "<b", 4)])
    cube = open_cube(path)
    assert cube.wavelengths.tolist() == [411, 424, 439, 456]
    assert cube.wavelength_units == "nm"
    path = write_spe2(tmp_path / "x.spe", frames_of("u2"), fields=[*polynomial, (3100, "<b", 1)])
    assert open_cube(path).wavelengths is None  # calibrated, but in pixels
    path = write_spe2(tmp_path / "x.spe", frames_of("u2"), fields=polynomial[1:])
    assert open_cube(path).wavelengths is None  # the calibration is not marked as valid


def test_what_an_older_header_says_of_the_exposure(tmp_path):
    fields = [
        (10, "<f", 0.25),
        (20, "<10s", b"21Jan2014"),
        (200, "<400s", b"20 \xb0C"),
        (688, "<16s", b"2.5.25"),
    ]
    cube = open_cube(write_spe2(tmp_path / "x.spe", frames_of("u2"), fields=fields))
    assert cube.metadata["exposure_s"] == 0.25
    assert cube.metadata["date"] == "21Jan2014"
    assert cube.metadata["comments"] == "20 °C"
    assert cube.metadata["software"] == "2.5.25"


def test_a_footer_is_kept_whole_and_its_namespace_does_not_matter(tmp_path):
    path = write_spe3(tmp_path / "x.spe", [frames_of("u2")], namespace="http://www.teledyne.com/spe")
    cube = open_cube(path)
    np.testing.assert_array_equal(cube.read(), frames_of("u2"))
    assert "teledyne" in cube.metadata["xml"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(cube)).read(), cube.read())


@pytest.mark.parametrize("told", [0, -1])
def test_a_header_that_was_never_finished_counts_as_many_frames_as_there_are(tmp_path, told):
    frames = frames_of("u2")
    np.testing.assert_array_equal(
        open_cube(write_spe2(tmp_path / "x.spe", frames, num_frames=told)).read(), frames
    )


def test_fewer_frames_than_the_file_holds_are_what_the_header_says(tmp_path):
    frames = frames_of("u2")
    cube = open_cube(write_spe2(tmp_path / "x.spe", frames, num_frames=3))
    np.testing.assert_array_equal(cube.read(), frames[:3])


def test_files_cut_short_are_errors_that_say_how_much_is_there(tmp_path):
    frames = frames_of("u2")
    path = write_spe2(tmp_path / "x.spe", frames)
    os.truncate(path, 4100 + 3 * 24 + 5)
    with pytest.raises(SourceError, match="holds 3 whole frames of 5"):
        open_cube(path)
    os.truncate(path, 4000)
    with pytest.raises(SourceError, match="4000 bytes are less than a header of 4100"):
        open_cube(path)
    with pytest.raises(SourceError, match="holds 5 whole frames of 9"):
        open_cube(write_spe3(tmp_path / "y.spe", [frames], num_frames=9))
    path = write_spe3(tmp_path / "z.spe", [frames])
    os.truncate(path, path.stat().st_size - 30)
    with pytest.raises(SourceError, match="its footer is no XML"):
        open_cube(path)
    os.truncate(path, 4150)
    with pytest.raises(SourceError, match="its footer should be at byte 4220 of 4150"):
        open_cube(path)
    with pytest.raises(SourceError, match=r"gone\.spe cannot be read: No such file"):
        open_cube(tmp_path / "gone.spe")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ([(108, "<h", 4)], "pixels of type 4"),
        ([(42, "<H", 0)], "0 x 3 pixels"),
    ],
)
def test_headers_that_make_no_sense_are_refused(tmp_path, fields, fault):
    with pytest.raises(SourceError, match=fault):
        open_cube(write_spe2(tmp_path / "x.spe", frames_of("u2"), fields=fields))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('pixelFormat="MonochromeUnsigned16"', 'pixelFormat="MonochromeUnsigned61"', "MonochromeUnsigned61"),
        ('type="Frame"', 'type="Fames"', "describes no frames"),
        ('width="4"', 'width="9"', "in a frame of 24 bytes"),
        ('width="4"', 'width="x"', "cannot be understood"),
        ('stride="48"', 'stride="40"', "24 bytes behind it"),
        ('type="Region" count="1"', 'type="Region" count="2"', "'count': '2'"),
        ('metaFormat="1"', 'metaFormat="7"', "cannot be understood: '7'"),
        ('bitDepth="64"', 'bitDepth="32"', "cannot be understood"),
    ],
)
def test_footers_that_would_be_misread_are_refused(tmp_path, old, new, fault):
    path = write_spe3(tmp_path / "x.spe", [frames_of("u2")], metadata=True)
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode()))
    with pytest.raises(SourceError, match=fault):
        open_cube(path)
