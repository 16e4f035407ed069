"""The figures of a bench as a picture: a panel for each bench, bars or curves, with the others beside."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import replaced

_OURS, _THEIRS = "#0072B2", "#B0B0B0"
"""A blue of Okabe and Ito's, which people who cannot tell red from green can tell apart, and grey."""
_BAR_INCHES = 0.3

Report = Mapping[str, Any]


def write_plot(path: Path, reports: Sequence[Report]) -> None:
    """Draw the reports of one or more benches, as their JSON has them, to a PNG or whatever `path` ends in.

    PipelineError where matplotlib is not installed, or does not know the kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PipelineError("a plot needs matplotlib: pip install 'clipfeed[plots]'") from error
    heights = [_height(report) for report in reports]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    panels = figure.subplots(len(reports), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, report in zip(panels, reports, strict=True):
        _DRAWN[report["bench"]](axes, report)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        with replaced(path) as beside:
            figure.savefig(beside, format=path.suffix.lstrip(".") or "png", dpi=120)
    except ValueError as error:
        raise PipelineError(f"no plot at {path}: {error}") from error


def _height(report: Report) -> float:
    bars = 0 if report["bench"] in ("scale", "storage") else len(report["rows"])
    return max(1.2 + _BAR_INCHES * bars, 3.5)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    """Longest first as they come from the table, top to bottom, each with its figure; a missing one is 0."""
    colours = [_OURS if name.startswith("ours") else _THEIRS for name in names]
    drawn = axes.barh(range(len(names)), values, color=colours)
    axes.bar_label(drawn, [f"{value:,.0f}" if value else "not measured" for value in values], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.margins(x=0.12)


def _speeds(key: str, title: str) -> Callable[[Any, Report], None]:
    def draw(axes: Any, report: Report) -> None:
        rows = sorted(report["rows"], key=lambda row: -row[key])
        _bars(axes, [row["name"] for row in rows], [row[key] for row in rows], title)

    return draw


def _memory(axes: Any, report: Report) -> None:
    names = [f"{row['kind']}, {row['ranks']} x {row['workers']}" for row in report["rows"]]
    title = "memory: private MB of all processes (ranks x workers)"
    _bars(axes, names, [row["private_mb"] for row in report["rows"]], title)


def _caching(axes: Any, report: Report) -> None:
    rows = report["rows"]
    key = next(key for key in rows[0] if key.endswith("clips_per_s"))
    _bars(
        axes, [str(next(iter(row.values()))) for row in rows], [row[key] for row in rows], "caching: clips/s"
    )


def _clip(axes: Any, report: Report) -> None:
    names = [f"{row['part']}: {row['name']}" for row in report["rows"]]
    _bars(axes, names, [row["us_per_clip"] for row in report["rows"]], "clip: CPU us per clip")


def _scale(axes: Any, report: Report) -> None:
    videos = [row["videos"] for row in report["rows"]]
    axes.plot(videos, [row["clip_us"] / 1e3 for row in report["rows"]], "o-", color=_OURS)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("videos")
    axes.set_title("scale: CPU ms per clip", loc="left")


def _storage(axes: Any, report: Report) -> None:
    """A curve for each short side through its qualities: further left is smaller, higher is faster."""
    sides = dict.fromkeys(row["side"] for row in report["rows"])
    for side in sides:
        rows = [row for row in report["rows"] if row["side"] == side]
        label = "native" if side is None else f"short side {side}"
        places = [row["bytes_per_frame"] / 1e3 for row in rows]
        axes.plot(places, [row["clips_per_s"] for row in rows], "o-", label=label)
        for row, place in zip(rows, places, strict=True):
            where = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(f"q{row['quality']}", (place, row["clips_per_s"]), **where)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("kB per frame")
    axes.legend(frameon=False)
    axes.set_title("storage: clips/s", loc="left")


_DRAWN: Mapping[str, Callable[[Any, Report], None]] = {
    "offline": _speeds("frames_per_s", "offline: frames/s"),
    "online": _speeds("clips_per_s", "online: clips/s"),
    "memory": _memory,
    "scale": _scale,
    "caching": _caching,
    "storage": _storage,
    "clip": _clip,
}
