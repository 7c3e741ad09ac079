"""A report as Markdown and as one HTML file, and its chart."""

import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.record import MARKS, Table, is_figure
from clocher_kernels.errors import UsageError

_CLASSES = {mark: status for status, mark in MARKS.items()}
# Characters not allowed in XML; a result file can hold any text.
_CONTROL = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF} - {10},
    "\N{REPLACEMENT CHARACTER}",
)
_RC = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9}
_COLOUR, _LIMIT = "#0072b2", "#777777"

Bar = tuple[str, float, float, float]
"""Name, ratio, ends of its interval."""


class Section(NamedTuple):
    """Heading, paragraphs, tables; in text, `...` is code."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    level: int = 2


def markdown(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """Return a report as Markdown; the intro is Markdown already."""
    parts = [f"# {_line(title)}", *intro]
    for section in sections:
        parts += [f"{'#' * section.level} {_line(section.title)}", *map(_line, section.text)]
        parts += [_markdown_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def html(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """Return a report as one self-contained HTML file, also well-formed XML."""
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    jinja.globals |= {"clean": _clean, "kind": _kind}
    return jinja.get_template("page.html").render(title=title, intro=intro, sections=sections)


def chart(title: str, label: str, bars: Sequence[Bar]) -> str:
    """Return ratios as SVG bars, with digests of data and SVG; UsageError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
    except ImportError:
        raise UsageError(
            "plots are drawn with matplotlib, which is not installed; pip install '.[bench]' in a "
            "clone of Clocher"
        ) from None
    file, seal = io.StringIO(), _seal(title, label, list(bars))
    with matplotlib.rc_context({**_RC, "svg.hashsalt": seal}):
        figure = Figure(figsize=(5.6, 0.9 + 0.27 * len(bars)))
        axes = figure.add_subplot()
        for place, (_, value, low, high) in enumerate(bars):
            axes.hlines(place, low, high, color=_COLOUR, linewidth=1.8)
            axes.plot([value], [place], color=_COLOUR, marker="o", markersize=5)
            at = (1.02, place)
            axes.annotate(f"{value:.2f}x", at, xycoords=axes.get_yaxis_transform(), va="center")
        axes.axvline(1.0, color=_LIMIT, linewidth=1.8)
        axes.set_yticks(range(len(bars)), [_clean(name) for name, *_ in bars])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 1.5, 2, 3, 4, 6, 8, 10]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_title(_clean(title), loc="left", fontsize=11)
        axes.set_xlabel(_clean(label))
        about = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", bbox_inches="tight", metadata=about)
    drawn = file.getvalue().rstrip()
    return f"{drawn}\n<!-- {seal} {_seal(drawn)} -->\n"


def is_current(picture: str, title: str, label: str, bars: Sequence[Bar]) -> bool:
    """Return whether a picture is the unmodified chart of these data."""
    drawn, _, end = picture.rpartition("\n<!-- ")
    return end == f"{_seal(title, label, list(bars))} {_seal(drawn)} -->\n"


def _seal(*data: object) -> str:
    return hashlib.sha256(repr(data).encode("utf-8", "replace")).hexdigest()


def _clean(text: str) -> str:
    return text.translate(_CONTROL)


def _kind(cell: str) -> str:
    return _CLASSES.get(cell) or ("number" if is_figure(cell) else "")


def _markdown_table(table: Table) -> str:
    lines = [table.head, ("---",) * len(table.head), *table.rows]
    cells = [[_line(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _line(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([<>*_\[\]\\])", _escaped, part)
        for part in parts
    )


def _escaped(match: re.Match[str]) -> str:
    found = match[1]
    # Brackets are common in intervals, and a link only before a parenthesis.
    if found in "[]":
        after = match.string[match.end() : match.end() + 1]
        return f"\\{found}" if after == "(" else found
    return f"\\{found}"
