"""A report as sections, tables and pictures, and its two forms: Markdown and one HTML file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report_charts import xml_text

_STYLE = """
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c1c1c; background: #ffffff;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #d5d5d5; }
h3 { font-size: 1rem; margin: 1.4rem 0 .2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e5e5e5; text-align: left;
  vertical-align: top; }
th { background: #f4f4f4; font-weight: 600; }
td.number { text-align: right; white-space: nowrap; }
td code { overflow-wrap: normal; }
code { background: #f4f4f4; padding: 0 .25rem; font-size: .92em; overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow-x: auto; }
figcaption { color: #555555; }
svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
.pass { color: #1a7f37; } .fail { color: #b3261e; } .undecided { color: #8a6d00; }
""".strip()
_MARKS = {"✓": "pass", "✗": "fail", "?": "undecided"}
_FIGURE = re.compile(r"[-(+]?[0-9]")


@dataclass(frozen=True, slots=True)
class Table:
    """A table; a cell is text in which `...` is code."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture.

    Attributes:
        name: of its file, without a suffix.
        svg: what is drawn.
        caption: one sentence.
    """

    name: str
    svg: str
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


def code(text: str) -> str:
    """Return text that is shown as it is, in a cell or a paragraph."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def plain(text: str) -> str:
    """Return text of a result file without anything that a cell would take for markup."""
    return " ".join(text.replace("`", "'").split())


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


def html(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """Return a report as one HTML file that loads nothing: style and pictures are inside.

    It is well-formed XML as well.

    Args:
        title: of the page.
        intro: paragraphs below it, as text with `...` as code.
        sections: in order.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>",
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{xml_text(title)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{_inline(title)}</h1>",
        *(f"<p>{_inline(text)}</p>" for text in intro),
    ]
    for section in sections:
        parts.append(f"<h{section.level}>{_inline(section.title)}</h{section.level}>")
        parts += [f"<p>{_inline(text)}</p>" for text in section.text]
        parts += [_html_table(table) for table in section.tables]
        for plot in section.plots:
            caption = f"<figcaption>{_inline(plot.caption)}</figcaption>"
            parts.append(f"<figure>{plot.svg.strip()}{caption}</figure>")
    return "\n".join([*parts, "</body></html>", ""])


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


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in table.head)
    rows = "\n".join(f"<tr>{''.join(_html_cell(cell) for cell in row)}</tr>" for row in table.rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'


def _html_cell(cell: str) -> str:
    kind = _MARKS.get(cell) or ("number" if _FIGURE.match(cell) else "")
    return f'<td class="{kind}">{_inline(cell)}</td>' if kind else f"<td>{_inline(cell)}</td>"


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", xml_text(text))
