"""Write the generated pages of docs: ops, formats, compatibility."""

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from textwrap import indent
from typing import Any

import click

from clocher_kernels.formats import FAMILIES, parse_format
from clocher_kernels.ops import OPS, OpSpec
from clocher_kernels.ops.contract import EXACT, Param

Row = dict[str, Any]

DOCS = Path(__file__).parents[1] / "docs"
LAYOUTS_OF_TESTS = "the test, in the layout"

EXAMPLE_SHAPE = (256, 4096)

LEFT_OUT = ("Attributes:", "Encoding", "Symmetric encoding")
"""How paragraphs of a codec begin that its section leaves out."""


@click.command(help=__doc__)
@click.option(
    "--check", is_flag=True, help="Write nothing; exit with 1 if a page is not up to date."
)
@click.option("--docs", type=click.Path(path_type=Path), default=DOCS, help="Where the pages are.")
def main(check: bool, docs: Path) -> None:
    """Render the pages."""
    rows = json.loads((DOCS / "compatibility.json").read_text(encoding="utf-8"))
    found = {
        "ops.md": {"ops": "\n\n".join(map(render_op, OPS.values()))},
        "formats.md": {"formats": render_formats()},
        "compatibility.md": render_compatibility(rows),
    }
    pages = {
        docs / name: filled((DOCS / name).read_text(encoding="utf-8"), parts)
        for name, parts in found.items()
    }
    stale = [path for path in pages if not path.exists() or path.read_text() != pages[path]]
    if check and stale:
        names = ", ".join(path.name for path in stale)
        click.echo(f"not up to date: {names}; run scripts/render_docs.py", err=True)
        sys.exit(1)
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return a page, written by hand, with new parts between their names and "end"."""
    return re.sub(
        r"(<!-- (\w+) -->\n).*?(\n<!-- end -->)",
        lambda match: match[1] + parts[match[2]] + match[3],
        page,
        flags=re.S,
    )


def render_op(spec: OpSpec) -> str:
    """Return the section of one op: what it computes, its parameters and settings, its cases."""
    doc = inspect.cleandoc(spec.reference.__doc__ or "").split("\n\n")
    text = [each for each in doc if not each.startswith(("Args:", "Source:"))]
    stored = ", ".join(
        f"`{p.name}`{'?' if p.optional else ''} {p.kind} {shape(p)}" for p in spec.params
    )
    settings = ", ".join(f"`{name}`" for name in spec.attributes)
    tested = f"{stored}.{f' Settings: {settings}.' if settings else ''}"
    tested += f" Error: {error(spec)}. {len(spec.cases)} cases"
    formats = {
        name
        for case in spec.cases
        for param, name in case.formats.items()
        if spec.param(param).kind == "matrix"
    }
    tested += f", {len(formats)} formats." if formats else "."
    missing = Counter(why for case in spec.cases for why in case.missing.items())
    said = " ".join(f"No {b} kernel for {n}: {why}." for (b, why), n in missing.items())
    source = [each for each in doc if each.startswith("Source:")]
    return "\n\n".join([f"## {spec.name}", *text, tested, *filter(None, [said]), *source])


def shape(param: Param) -> str:
    """Return a parameter's element type and dimensions."""
    stored = " or ".join(param.dtypes)
    stored = stored or ("" if param.kind == "matrix" else "cache_dtype")
    return f"{stored}[{','.join(param.dims.split())}]"


def error(spec: OpSpec) -> str:
    """Return the tolerance of an op, and those of cases with their own."""
    limits = dict.fromkeys(spec.allowed(case) for case in spec.cases)
    spelled = ("exact" if each == EXACT else f"{each.rms:g} / {each.max:g}" for each in limits)
    return " or ".join(spelled)


def render_formats() -> str:
    """Return the table of the families of formats, and a section for each."""
    head = ("names", "what they hold", "example", "bits per weight")
    rows, sections = [], []
    for family in FAMILIES:
        name = family.examples[0]
        codec = parse_format(name)
        dense = not name.startswith("bsr_")
        bits = f"{8 * codec.nbytes(EXAMPLE_SHAPE) / prod(EXAMPLE_SHAPE):.3f}" if dense else ""
        spelling = f"`{family.spelling}`".replace("|", "\\|")
        rows.append((spelling, family.summary, f"`{name}`", bits))
        doc = inspect.cleandoc(type(codec).__doc__ or "").split("\n\n")
        kept = "\n\n".join(each for each in doc if not each.startswith(LEFT_OUT))
        sections += [f"## {type(codec).__name__}", indent(kept, "    ")]
    return "\n\n".join([table(head, rows), *sections])


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    first, *others = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def render_compatibility(rows: list[Row]) -> dict[str, str]:
    """Return the tables of docs/compatibility.md."""
    floats = [row for row in rows if row["reader"] == "float"]
    ggml = [row for row in rows if row["reader"].startswith("gguf ")]
    pairs = [row for row in rows if row["writer"] == LAYOUTS_OF_TESTS]
    known = {id(row) for row in (*floats, *ggml, *pairs)}
    quantised = [row for row in rows if id(row) not in known]
    layouts = sorted({row["format"] for row in pairs})
    writers = " and ".join(sorted({row["writer"] for row in floats}))
    dates = sorted({row["date"] for row in rows})
    kinds = ", ".join(f"`{name}`" for name in sorted({row["isa"] for row in rows}))
    return {
        "families": table(
            ("family", "difference", "same ids", "quantised"),
            [(family_name(row), *numbers(row), packed(row, pairs)) for row in floats],
        ),
        "layouts": f"Written by {writers}. {len(layouts)} layouts: {'; '.join(layouts)}.",
        "quantised": table(
            ("read as", "written by", "family: formats", "difference", "same ids", "reference"),
            [
                (f"`{row['reader']}`", row["writer"], f"{family_name(row)}: {row['format']}")
                + (*numbers(row), row["reference"])
                for row in together(sorted(quantised, key=order), "reader")
            ],
        ),
        "gguf": table(
            ("files", "written by", "difference", "same ids", "compared with"),
            [
                (f"{family_name(row)}: {row['format']}", row["writer"])
                + (*numbers(row), row["reference"])
                for row in together([file_of(row) for row in sorted(ggml, key=order)])
            ],
        ),
        "dates": f"Made {dates[0]} to {dates[-1]}, instruction sets {kinds}; {len(rows)} rows.",
    }


def file_of(row: Row) -> Row:
    """Return a row of GGUF with the type as its format, or the name of the file's mixture."""
    mixture, _, types = row["format"].partition(":")
    kind = mixture if types else row["reader"].removeprefix("gguf ").upper()
    return row | {"format": kind}


def packed(row: Row, pairs: list[Row]) -> str:
    """Return the largest difference of a family in the layouts, and which are refused."""
    same = [each for each in pairs if family_name(each) == family_name(row)]
    found = [each for each in same if each["difference"] is not None]
    refused = [f"{each['format']} refused: {each['refused']}" for each in same if each["refused"]]
    largest = max((each["difference"] for each in found), default=None)
    return "; ".join([*([difference({"difference": largest})] if found else []), *refused])


def together(rows: list[Row], *apart: str) -> list[Row]:
    """Return rows with those that differ only in family and format in one.

    Rows whose ids were not all the same, or not compared, are not mixed with others.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        ids = row["same_ids"] if row["same_ids"] is None else row["same_ids"] == row["models"]
        key = (*(row[name] for name in (*apart, "writer", "reference")), ids)
        groups.setdefault((*key, ids is False and row["format"]), []).append(row)
    return [_one(each) for each in groups.values()]


def _one(rows: list[Row]) -> Row:
    each = {name: [row[name] for row in rows] for name in rows[0]}
    same = None if each["same_ids"][0] is None else sum(each["same_ids"])
    texts = {name: ", ".join(dict.fromkeys(each[name])) for name in ("family", "format")}
    counts = {"models": sum(each["models"]), "same_ids": same}
    return {**rows[0], **texts, **counts, "difference": max(each["difference"])}


def order(row: Row) -> tuple[str, ...]:
    """Return where a row stands: files of libraries before those of tests."""
    by_test = str(row["writer"].startswith("the test"))
    return by_test, row["reader"], row["writer"], row["format"], row["family"]


def family_name(row: Row) -> str:
    """Return a family's short name, with what sets the row apart."""
    name = row["family"].replace("ForCausalLM", "")
    apart = row["format"].partition(", ")[2] if row["reader"] == "float" else ""
    return f"{name}, {apart}" if apart else name


def numbers(row: Row) -> tuple[str, str]:
    """Return the cells of how far, and how many with the same ids."""
    same = "" if row["same_ids"] is None else f"{row['same_ids']} of {row['models']}"
    return difference(row), same


def difference(row: Row) -> str:
    """Return a difference with two digits, or that the model is refused."""
    value = row["difference"]
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-")


if __name__ == "__main__":
    main()
