"""Charts as SVG: lines and points over two axes. The same data gives the same bytes.

No plotting library: pictures lie in the repository and inside reports, and a test compares them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_LEFT, _TOP, _BOTTOM = 70, 48, 56
_RIGHT, _HEIGHT = 570, 420
_LEGEND_MOST = 420
_FONT = 12
_CHAR = 6.6
_ROW = 18
_MARK = 4.0
_TICKS = 6
# Okabe and Ito's colours, which colour-blind people tell apart; marks differ as well.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#000000", "#8c8c00"),
)
_SHAPES = ("circle", "square", "diamond", "triangle")

# What may not stand in XML; a result file can hold any text.
_CONTROL = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF} - {10},
    "\N{REPLACEMENT CHARACTER}",
)

Point = tuple[float, float]


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
        log: logarithmic; every value must be above 0.
        zero: begins at 0 unless logarithmic.
        whole: ticks are whole numbers.
    """

    label: str
    log: bool = False
    zero: bool = False
    whole: bool = False

    def scaled(self, value: float) -> float:
        """Return where a value lies, before it is fitted to the picture."""
        return math.log10(value) if self.log else value

    def holds(self, value: float) -> bool:
        """Whether a value can be drawn."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, low: float, high: float) -> list[float]:
        """Return round values between two values."""
        if self.log:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 2, 5) if high / low < 1000 else (1,)
            every = [step * 10.0**power for power in decades for step in steps]
            return [tick for tick in every if low * 0.999 <= tick <= high * 1.001]
        step = _step((high - low) / _TICKS)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(low / step - 1e-9)
        return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """Where values lie in the picture."""

    def __init__(self, x: Axis, y: Axis, series: Sequence[Series]) -> None:
        points = [p for s in series for p in s.points if x.holds(p[0]) and y.holds(p[1])]
        ends = [
            (p[0], v) for s in series for p, e in zip(s.points, s.spans, strict=False) for v in e
        ]
        points += [p for p in ends if x.holds(p[0]) and y.holds(p[1])]
        self.x, self.y = x, y
        self.bottom = _HEIGHT - _BOTTOM
        self.xs = _bounds(x, [p[0] for p in points])
        self.ys = _bounds(y, [p[1] for p in points])

    def at(self, point: Point) -> Point | None:
        """Return the pixel of a point; None if it cannot be drawn."""
        if not (self.x.holds(point[0]) and self.y.holds(point[1])):
            return None
        across = _share(self.x, point[0], self.xs)
        up = _share(self.y, point[1], self.ys)
        return _LEFT + across * (_RIGHT - _LEFT), self.bottom - up * (self.bottom - _TOP)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Return a picture of some series.

    Values that an axis cannot show (not finite, or not above 0 on a logarithmic one) are left out.

    Args:
        title: above it.
        x: the horizontal axis.
        y: the vertical axis.
        series: drawn in this order.
    """
    frame = _Frame(x, y, series)
    longest = max((len(each.name) for each in series), default=0)
    width = _RIGHT + min(math.ceil(_CHAR * longest) + 48, _LEGEND_MOST)
    lines = _head(title, width, _HEIGHT)
    lines += _axes(frame)
    for number, each in enumerate(series):
        lines += _series(frame, each, number)
    lines += _legend(series)
    return "\n".join([*lines, "</svg>", ""])


def ratios(title: str, label: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Return a picture of ratios, a line for each, with its interval; 1 is where nobody wins.

    Args:
        title: above it.
        label: of the axis.
        rows: name, ratio, and the ends of its interval.
    """
    names = max((len(row[0]) for row in rows), default=0)
    left, right = math.ceil(_CHAR * names) + 24, math.ceil(_CHAR * names) + 444
    bottom = _TOP + 8 + 26 * len(rows)
    axis = Axis(label, log=True)
    ends = _bounds(axis, [1.0, *(end for row in rows for end in row[1:])])

    def at(value: float) -> float:
        return left + _share(axis, value, ends) * (right - left)

    lines = _head(title, right + 60, bottom + _BOTTOM)
    for tick in axis.ticks(*ends):
        lines.append(_line(at(tick), _TOP, at(tick), bottom, "#e3e3e3"))
        lines.append(_text(at(tick), bottom + 18, _number(tick), "middle"))
    lines.append(_line(at(1.0), _TOP, at(1.0), bottom, "#777777", 1.8))
    for number, (name, ratio, low, high) in enumerate(rows):
        y = _TOP + 21 + 26 * number
        lines.append(_text(left - 12, y + 4, name, "end"))
        lines.append(_line(at(low), y, at(high), y, _COLOURS[0], 1.8))
        lines.append(_mark(at(ratio), y, 0, _COLOURS[0]))
        lines.append(_text(right + 10, y + 4, f"{ratio:.2f}x", "start"))
    lines.append(_text((left + right) / 2, bottom + 40, label, "middle"))
    return "\n".join([*lines, "</svg>", ""])


def xml_text(text: str) -> str:
    """Return text that may stand between tags and inside quoted attributes."""
    return escape(text.translate(_CONTROL), {'"': "&quot;"})


def _head(title: str, width: int, height: int) -> list[str]:
    """Return the first lines of a picture: its size, its ground, its title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="{_FONT}" role="img">',
        f"<title>{xml_text(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" font-size="15">{xml_text(_cut(title, width - _LEFT, 7.6))}'
        "</text>",
    ]


def _axes(frame: _Frame) -> list[str]:
    lines = []
    for tick in frame.x.ticks(*frame.xs):
        at = frame.at((tick, frame.ys[0]))
        assert at is not None
        lines.append(_line(at[0], _TOP, at[0], frame.bottom, "#e3e3e3"))
        lines.append(_text(at[0], frame.bottom + 18, _number(tick), "middle"))
    for tick in frame.y.ticks(*frame.ys):
        at = frame.at((frame.xs[0], tick))
        assert at is not None
        lines.append(_line(_LEFT, at[1], _RIGHT, at[1], "#e3e3e3"))
        lines.append(_text(_LEFT - 8, at[1] + 4, _number(tick), "end"))
    lines.append(_line(_LEFT, frame.bottom, _RIGHT, frame.bottom, "#444444"))
    lines.append(_line(_LEFT, _TOP, _LEFT, frame.bottom, "#444444"))
    middle = (_LEFT + _RIGHT) / 2
    lines.append(_text(middle, _HEIGHT - 16, frame.x.label, "middle"))
    height = (_TOP + frame.bottom) / 2
    lines.append(
        f'<text x="18" y="{height:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 18 {height:.1f})">{xml_text(frame.y.label)}</text>'
    )
    return lines


def _series(frame: _Frame, series: Series, number: int) -> list[str]:
    colour = _colour(series, number)
    found = [frame.at(point) for point in series.points]
    pixels = [pixel for pixel in found if pixel is not None]
    lines = []
    for point, ends in zip(series.points, series.spans, strict=False):
        low, high = frame.at((point[0], ends[0])), frame.at((point[0], ends[1]))
        if low and high:
            lines.append(_line(low[0], low[1], high[0], high[1], colour, 1.2))
    if series.joined and len(pixels) > 1:
        path = " ".join(f"{px:.2f},{py:.2f}" for px, py in pixels)
        dash = ' stroke-dasharray="6 4"' if series.dashed else ""
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
        )
    if series.marked:
        lines += [_mark(px, py, number, colour) for px, py in pixels]
    return lines


def _legend(series: Sequence[Series]) -> list[str]:
    lines = []
    left = _RIGHT + 14
    for number, each in enumerate(series):
        y = _TOP + 8 + number * _ROW
        if y > _HEIGHT - _ROW:
            break
        colour = _colour(each, number)
        if each.joined:
            dash = ' stroke-dasharray="6 4"' if each.dashed else ""
            lines.append(
                f'<line x1="{left}" y1="{y}" x2="{left + 20}" y2="{y}" stroke="{colour}" '
                f'stroke-width="1.8"{dash}/>'
            )
        if each.marked:
            lines.append(_mark(left + 10, y, number, colour))
        lines.append(_text(left + 26, y + 4, _cut(each.name, _LEGEND_MOST - 44, _CHAR), "start"))
    return lines


def _mark(x: float, y: float, number: int, colour: str) -> str:
    r = _MARK
    shape = _SHAPES[(number // len(_COLOURS) + number) % len(_SHAPES)]
    if shape == "circle":
        return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{r}" fill="{colour}"/>'
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "diamond": ((0, -1.4 * r), (1.4 * r, 0), (0, 1.4 * r), (-1.4 * r, 0)),
        "triangle": ((0, -1.2 * r), (1.2 * r, r), (-1.2 * r, r)),
    }[shape]
    path = " ".join(f"{x + dx:.2f},{y + dy:.2f}" for dx, dy in corners)
    return f'<polygon points="{path}" fill="{colour}"/>'


def _colour(series: Series, number: int) -> str:
    return "#777777" if series.dashed else _COLOURS[number % len(_COLOURS)]


def _bounds(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: a little more than the values span."""
    if not values:
        return (1.0, 10.0) if axis.log else (0.0, 1.0)
    low, high = min(values), max(values)
    if axis.log:
        room = max((math.log10(high) - math.log10(low)) * 0.06, 0.04)
        return 10 ** (math.log10(low) - room), 10 ** (math.log10(high) + room)
    room = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    return (0.0 if axis.zero and low >= 0 else low - room), high + room


def _share(axis: Axis, value: float, ends: tuple[float, float]) -> float:
    low, high = axis.scaled(ends[0]), axis.scaled(ends[1])
    return (axis.scaled(value) - low) / (high - low)


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next((power * n for n in (1, 2, 5) if power * n >= least * 0.999), power * 10)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cut(text: str, room: float, char: float) -> str:
    most = max(int(room / char), 2)
    return text if len(text) <= most else text[: most - 1] + "…"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> str:
    return (
        f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{xml_text(text)}</text>'
