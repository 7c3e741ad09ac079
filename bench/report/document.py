"""A report as sections, tables and pictures, and its two forms: Markdown and one HTML file."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.report.charts import Chart, Ratios, clean
from bench.report.columns import MARKS, Table, is_figure

_KINDS = {mark: status for status, mark in MARKS.items()}


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture.

    Attributes:
        name: of its file, without a suffix.
        chart: what is drawn.
        caption: one sentence.
    """

    name: str
    chart: Chart | Ratios
    caption: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report, under its own heading.

    Attributes:
        title: the heading.
        text: paragraphs, in which `...` is code.
        tables: after them.
        plots: after the tables.
        level: of its heading, 2 or 3.
    """

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    level: int = 2


def markdown(
    title: str, intro: Sequence[str], sections: Sequence[Section], plots: str = "plots"
) -> str:
    """Return a report as Markdown.

    Args:
        title: of the page.
        intro: paragraphs below it.
        sections: in order.
        plots: directory of the pictures, as links see it.
    """
    parts = [f"# {_line(title)}", *intro]
    for section in sections:
        parts += [f"{'#' * section.level} {_line(section.title)}", *map(_line, section.text)]
        parts += [_markdown_table(table) for table in section.tables]
        parts += [f"![{_line(p.caption)}]({plots}/{p.name}.svg)" for p in section.plots]
    return "\n\n".join(parts) + "\n"


def html(
    title: str,
    intro: Sequence[str],
    sections: Sequence[Section],
    pictures: Mapping[str, str],
) -> str:
    """Return a report as one HTML file that loads nothing: style and pictures are inside.

    It is well-formed XML as well.

    Args:
        title: of the page.
        intro: paragraphs below it, in which `...` is code.
        sections: in order.
        pictures: name of a plot -> its SVG.
    """
    folder = Path(__file__).parent
    jinja = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    jinja.globals |= {"clean": clean, "kind": _kind}
    inside = {name: b64encode(svg.encode()).decode() for name, svg in pictures.items()}
    page = jinja.get_template("page.html")
    return page.render(title=title, intro=intro, sections=sections, pictures=inside)


def _kind(cell: str) -> str:
    """Return the class of a cell: a mark, a number, or nothing."""
    return _KINDS.get(cell) or ("number" if is_figure(cell) else "")


def _markdown_table(table: Table) -> str:
    lines = [table.head, ("---",) * len(table.head), *table.rows]
    cells = [[_line(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _line(text: str) -> str:
    """Return one line of Markdown: what looks like HTML, a link or emphasis is text."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([<>*_\[\]\\])", _escaped, part)
        for part in parts
    )


def _escaped(match: re.Match[str]) -> str:
    found = match[1]
    # Brackets are common in intervals, and are a link only before a parenthesis.
    if found in "[]":
        after = match.string[match.end() : match.end() + 1]
        return f"\\{found}" if after == "(" else found
    return f"\\{found}"
