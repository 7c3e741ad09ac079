"""Charts: what is drawn, as data, and matplotlib that draws it as SVG.

A picture ends with two digests, of its data and of itself, by which whoever has it knows whether it
is current: what else is in it depends on the version of matplotlib.
"""

import hashlib
import io
import math
from dataclasses import dataclass
from typing import Any

from clocher_kernels.errors import UsageError

Point = tuple[float, float]

_STYLE = 1
"""Counted up when the same data shall look different."""

_RC = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
}
# Okabe and Ito's colours, which colour-blind people tell apart; marks differ as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c00")
_MARKERS = "osD^v<>P"
_LIMIT = "#777777"
_SIZE = (5.6, 4.0)
_LONGEST = 60
_END = "</svg>"
# What may not stand in XML; a result file can hold any text.
_CONTROL = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF} - {10},
    "\N{REPLACEMENT CHARACTER}",
)


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one thing.

    Attributes:
        name: in the legend.
        points: (x, y).
        spans: lower and upper end of each y, or nothing.
        joined: draw a line through the points.
        marked: draw the points.
        dashed: the line is a limit, not a measurement.
    """

    name: str
    points: tuple[Point, ...]
    spans: tuple[Point, ...] = ()
    joined: bool = True
    marked: bool = True
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One of the two axes.

    Attributes:
        label: what it shows, with its unit.
        log: logarithmic; only values above 0 are drawn.
        zero: begins at 0 unless logarithmic.
        whole: ticks are whole numbers.
    """

    label: str
    log: bool = False
    zero: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over two axes; values that an axis cannot show are left out."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios, a line for each, with its interval; 1 is where nobody wins.

    Attributes:
        title: above it.
        label: of the axis.
        rows: name, ratio, and the ends of its interval.
    """

    title: str
    label: str
    rows: tuple[tuple[str, float, float, float], ...]


def is_current(picture: str, chart: Chart | Ratios) -> bool:
    """Whether a picture is one of these data, and nobody has changed it."""
    drawn, end, _ = picture.partition(_END)
    return picture == f"{drawn}{end}{_seal(drawn, chart)}"


def svg(chart: Chart | Ratios) -> str:
    """Return the picture; the same data gives the same bytes.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plots are drawn with matplotlib, which is not installed; pip install '.[bench]' in a "
            "clone of Clocher"
        ) from None
    file = io.StringIO()
    with matplotlib.rc_context({**_RC, "svg.hashsalt": _sha256(repr(chart))}):
        figure = Figure(figsize=_SIZE)
        axes = figure.add_subplot()
        axes.set_title(clean(chart.title))
        _draw_ratios(axes, chart) if isinstance(chart, Ratios) else _draw(axes, chart)
        about = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", bbox_inches="tight", metadata=about)
    drawn, end, _ = file.getvalue().partition(_END)
    return f"{drawn}{end}{_seal(drawn, chart)}"


def clean(text: str) -> str:
    """Return text that may stand in XML once it is escaped."""
    return text.translate(_CONTROL)


def _seal(drawn: str, chart: Chart | Ratios) -> str:
    return f"\n<!-- {_sha256(f'{_STYLE} {chart!r}')} {_sha256(drawn)} -->\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _draw(axes: Any, chart: Chart) -> None:
    handles = []
    for number, series in enumerate(chart.series):
        kept = [i for i, point in enumerate(series.points) if _drawn(chart, point)]
        colour = _LIMIT if series.dashed else _COLOURS[number % len(_COLOURS)]
        line = ("--" if series.dashed else "-") if series.joined else "none"
        marker = _MARKERS[(number // len(_COLOURS) + number) % len(_MARKERS)]
        drawn = axes.plot(
            [series.points[i][0] for i in kept],
            [series.points[i][1] for i in kept],
            color=colour,
            linestyle=line,
            marker=marker if series.marked else None,
            markersize=5,
        )
        handles += drawn
        for i in kept if series.spans else ():
            axes.vlines(series.points[i][0], *series.spans[i], color=colour, linewidth=1.2)
    for axis, side in ((chart.x, axes.xaxis), (chart.y, axes.yaxis)):
        _set_up(axis, side)
    axes.set_xlabel(clean(chart.x.label))
    axes.set_ylabel(clean(chart.y.label))
    # A name that begins with a line is left out of a legend; a blank before it is not seen.
    names = [f" {_cut(series.name)}" for series in chart.series]
    axes.legend(handles, names, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _draw_ratios(axes: Any, chart: Ratios) -> None:
    axes.figure.set_size_inches(_SIZE[0], 0.9 + 0.27 * len(chart.rows))
    places = range(len(chart.rows))
    for place, (_, value, low, high) in zip(places, chart.rows, strict=True):
        axes.hlines(place, low, high, color=_COLOURS[0], linewidth=1.8)
        axes.plot([value], [place], color=_COLOURS[0], marker="o", markersize=5)
        axes.annotate(
            f"{value:.2f}x", (1.02, place), xycoords=axes.get_yaxis_transform(), va="center"
        )
    axes.axvline(1.0, color=_LIMIT, linewidth=1.8)
    axes.set_yticks(places, [_cut(name) for name, *_ in chart.rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.invert_yaxis()
    _set_up(Axis(chart.label, log=True), axes.xaxis)
    axes.set_xlabel(clean(chart.label))


def _set_up(axis: Axis, side: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if axis.log:
        if not math.isfinite(side.get_minpos()):  # nothing to draw
            side.axes.set(**{f"{side.axis_name}lim": (1.0, 10.0)})
        side.axes.set(**{f"{side.axis_name}scale": "log"})
        low, high = side.get_view_interval()
        side.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        side.set_minor_locator(NullLocator())
    else:
        side.set_major_locator(MaxNLocator(6, integer=axis.whole))
        low, high = side.get_data_interval()
        if axis.zero and low >= 0:
            side.axes.set(**{f"{side.axis_name}lim": (0.0, None)})
    side.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))


def _drawn(chart: Chart, point: Point) -> bool:
    return all(
        math.isfinite(value) and (value > 0 or not axis.log)
        for axis, value in zip((chart.x, chart.y), point, strict=True)
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cut(text: str) -> str:
    shown = clean(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
