"""Histograms and bars as shapes on a plane, in the units of an SVG's view box: no drawing, only where."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.measure.dataset_stats import Bar, Histogram

WIDTH, HEIGHT = 400, 190
"""Of a chart's view box."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 26
_MAX_X_TICKS = 6
_Y_TICKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a histogram."""

    x: float
    y: float
    width: float
    height: float
    title: str
    """What it counts, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A number beside an axis."""

    at: float
    """Where it stands: x for the horizontal axis, y for the vertical one."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A histogram laid out."""

    columns: tuple[Column, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left: float
    right: float
    bottom: float
    is_open: bool
    """Whether the last column also stands for values beyond it."""


def lay_out(histogram: Histogram, unit: str) -> Chart:
    """Columns and ticks of a histogram; `unit` is what its values count, for the titles."""
    edges, counts = histogram.edges, histogram.counts
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    wide, high = (right - _LEFT) / max(len(counts), 1), bottom - _TOP
    top = round_up(max(counts, default=1))
    columns = [
        Column(
            x=round(_LEFT + place * wide + 0.5, 2),
            y=round(bottom - high * count / top, 2),
            width=round(max(wide - 1, 0.5), 2),
            height=round(high * count / top, 2),
            title=f"{_range(histogram, place)} {unit}: {_count(count)}",
        )
        for place, count in enumerate(counts)
    ]
    step = -(-len(edges) // _MAX_X_TICKS)
    x_ticks = [
        Tick(at=round(_LEFT + place * wide, 2), text=format_number(edges[place]))
        for place in range(0, len(edges), max(step, 1))
    ]
    y_ticks = [
        Tick(at=round(bottom - high * number / _Y_TICKS, 2), text=format_number(top * number / _Y_TICKS))
        for number in range(_Y_TICKS + 1)
    ]
    return Chart(
        columns=tuple(columns),
        x_ticks=tuple(x_ticks),
        y_ticks=tuple(y_ticks),
        left=_LEFT,
        right=right,
        bottom=bottom,
        is_open=histogram.is_open,
    )


def round_up(count: int) -> int:
    """The least of 3, 6, 15, 30, 60, 150 ... that is not below `count`: a third of it is a round number.

    >>> [round_up(count) for count in (0, 3, 7, 101, 9537)]
    [3, 3, 15, 150, 15000]
    """
    candidates = (factor * int(10**exponent) for exponent in itertools.count() for factor in (3, 6, 15))
    return next(candidate for candidate in candidates if count <= candidate)


def shares(bars: Sequence[Bar]) -> list[tuple[Bar, float]]:
    """Each bar with its length, as a percentage of the longest one's.

    >>> [share for _, share in shares([Bar(name="a", count=4), Bar(name="b", count=1)])]
    [100.0, 25.0]
    """
    most = max((bar.count for bar in bars), default=0) or 1
    return [(bar, round(100 * bar.count / most, 2)) for bar in bars]


def _range(histogram: Histogram, place: int) -> str:
    low, high = histogram.edges[place], histogram.edges[place + 1]
    if histogram.is_open and place == len(histogram.counts) - 1:
        return f"{format_number(low)} and more"
    if histogram.is_whole:
        return format_number(low) if high == low + 1 else f"{format_number(low)} to {format_number(high - 1)}"
    return f"{format_number(low)} to below {format_number(high)}"


def format_number(value: float) -> str:
    """A number without zeros that say nothing.

    >>> [format_number(value) for value in (1_000_000.0, 0.30000001, 29.97)]
    ['1,000,000', '0.3', '29.97']
    """
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def _count(count: int) -> str:
    return f"{count:,} video{'' if count == 1 else 's'}"
