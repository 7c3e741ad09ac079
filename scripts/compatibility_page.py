"""The page docs/compatibility.md: what docs/compatibility.json has, as tables.

The rows are written by the parity tests, see `Row` in tests/compatibility.py.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NOT_TRIED: dict[str, str] = dict.fromkeys(
    ("SDARForCausalLM", "Fast_dLLM_QwenForCausalLM", "LLaDA2MoeModelLM"),
    "no library that is installed here has it; tests/test_block_families.py compares random models "
    "with a forward written out",
)
"""Families and readers without a row, each with the reason; tests fail on one that is missing."""

INTRO = """# What loads, and how exactly

Each row is a model that a test wrote, or had a library write, and that Clocher ran beside a
reference. **Difference** is the largest relative difference of logits over the models of the row:
RMS of the difference over RMS of the logits, with fp32 activations and KV cache unless the row says
otherwise. fp32 sums in another order differ by 1e-7 to 1e-5; a wrong scale, a swapped nibble or a
rotated head by 1e-2 and more. **Same ids**: models whose greedy ids were all those of the
reference, of those tried; empty: not compared."""

FAMILIES_INTRO = """## Families

Random small models (other heads, head sizes, windows, RoPE, biases, experts in each), written by
{writers} and compared with it: a prompt of 60 tokens, whole and in chunks, then 64 greedy ids.
**Quantised**: the largest difference over the {layouts} layouts below, in which the tests packed
every linear but routers and the head; the reference is `transformers` with the decoded values."""

QUANTISED_INTRO = """## Quantised checkpoints of Hugging Face

A library with its version wrote the files itself. "The test, as X": packed by a test that follows
the source of X, so the layout is read as that source describes it; no release of X was tried. `v1`,
`v2` are versions of the GPTQ layout; `g32` is a scale for 32 columns, `row` one per row; `order` is
activation order (`desc_act`, `actorder`). "Here": the same back end with the decoded values, so 0
means equal values. llm-compressor rounds decoded values to bf16, so logits differ by 5e-3; one
matrix was compared, and ours rounded so is its own bit for bit."""

GGUF_INTRO = """## GGUF

Files of `llama-quantize` are made from the small trained model of `tests/data`; each holds several
types: the one named, and those that it gives to the head and to single layers. Their difference is
that of perplexities over 2048 tokens, ours and `llama-perplexity`'s on the same file expanded to
fp32 (llama.cpp rounds activations to 8 bits for quantised weights); "same ids" are 48 greedy ids
after each of 4 prompts. Rows compared with "weights" are values of single tensors, bit for bit."""

MADE = """## How it was made

Rows are what the parity tests saw on a CPU; the same tests compare the reference back end and the
CUDA kernels, without a row here. The test suite fails if a family, a `quant_method` or a ggml type
that Clocher reads has neither a row nor a reason below. Each row with its date, instruction set and
the command that makes it again is in [compatibility.json](compatibility.json)."""

LAYOUTS_OF_TESTS = "the test, in the layout"


def render(rows: list[Row], table: Any) -> str:
    """Return the page.

    Args:
        rows: docs/compatibility.json.
        table: makes a Markdown table of a head and rows.
    """
    floats = [row for row in rows if row["reader"] == "float"]
    ggml = [row for row in rows if row["reader"].startswith("gguf ")]
    pairs = [row for row in rows if row["writer"] == LAYOUTS_OF_TESTS]
    known = {id(row) for row in (*floats, *ggml, *pairs)}
    quantised = [row for row in rows if id(row) not in known]
    layouts = sorted({row["format"] for row in pairs})
    writers = " and ".join(sorted({row["writer"] for row in floats}))
    parts = [
        INTRO,
        FAMILIES_INTRO.format(writers=writers, layouts=len(layouts)),
        table(
            ("family", "difference", "same ids", "quantised"),
            [(family(row), *numbers(row), packed(row, pairs)) for row in floats],
        ),
        f"Layouts: {'; '.join(layouts)}.",
        QUANTISED_INTRO,
        table(
            ("read as", "written by", "family: formats", "difference", "same ids", "reference"),
            [
                (f"`{row['reader']}`", row["writer"], f"{family(row)}: {row['format']}")
                + (*numbers(row), row["reference"])
                for row in together(sorted(quantised, key=order), "reader")
            ],
        ),
        GGUF_INTRO,
        table(
            ("files", "written by", "difference", "same ids", "compared with"),
            [
                (f"{family(row)}: {row['format']}", row["writer"], *numbers(row), row["reference"])
                for row in together([file_of(row) for row in sorted(ggml, key=order)])
            ],
        ),
        MADE,
        made_line(rows),
        "## Not covered",
        "\n".join(f"- {line}" for line in not_covered()),
    ]
    return "\n\n".join(parts) + "\n"


def file_of(row: Row) -> Row:
    """Return a row of GGUF with the type as its format, or the name of the file's mixture."""
    mixture, _, types = row["format"].partition(":")
    kind = mixture if types else row["reader"].removeprefix("gguf ").upper()
    return row | {"format": kind}


def packed(row: Row, pairs: list[Row]) -> str:
    """Return the largest difference of a family in the layouts, and which are refused."""
    same = [each for each in pairs if family(each) == family(row)]
    found = [each for each in same if each["difference"] is not None]
    refused = [f"{each['format']} refused: {each['refused']}" for each in same if each["refused"]]
    largest = max((each["difference"] for each in found), default=None)
    return "; ".join([*([difference({"difference": largest})] if found else []), *refused])


def together(rows: list[Row], *apart: str) -> list[Row]:
    """Return rows with those that differ only in family and format in one.

    Rows whose ids were not all the same, or not compared, are not mixed with others.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        ids = row["same_ids"] if row["same_ids"] is None else row["same_ids"] == row["models"]
        key = (*(row[name] for name in (*apart, "writer", "reference")), ids)
        if ids is False or ((old := found.get(key)) is None):
            found[(*key, row["format"]) if ids is False else key] = dict(row)
            continue
        for name in ("family", "format"):
            if row[name] not in old[name].split(", "):
                old[name] += f", {row[name]}"
        old["models"] += row["models"]
        old["same_ids"] = None if ids is None else old["same_ids"] + row["same_ids"]
        old["difference"] = max(old["difference"], row["difference"])
    return list(found.values())


def order(row: Row) -> tuple[str, ...]:
    """Return where a row stands: files of libraries before those of tests."""
    by_test = str(row["writer"].startswith("the test"))
    return by_test, row["reader"], row["writer"], row["format"], row["family"]


def family(row: Row) -> str:
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


def made_line(rows: list[Row]) -> str:
    """Return what the rows have in common."""
    dates = sorted({row["date"] for row in rows})
    kinds = ", ".join(f"`{name}`" for name in sorted({row["isa"] for row in rows}))
    return f"Made from {dates[0]} to {dates[-1]}, instruction sets {kinds}; {len(rows)} rows."


def not_covered() -> Iterable[str]:
    """Return what has no row, and why."""
    for reason in dict.fromkeys(NOT_TRIED.values()):
        names = ", ".join(f"`{name}`" for name in sorted(NOT_TRIED) if NOT_TRIED[name] == reason)
        yield f"{names}: {reason}"
    yield (
        "Published checkpoints: the tests download nothing. Sizes, vocabularies and settings of "
        "real models are those of the configs that the families' defaults were read from."
    )
    yield (
        "Files that GPTQModel and AutoRound wrote, and mixtures of experts by llm-compressor: "
        "tests/other_libraries.py could not make them here. AutoAWQ was not tried."
    )
    yield "Llama 4 with packed experts: its experts are floats in the column of layouts."
    yield "GGUF of newer families: tests/test_gguf_families.py compares them bit for bit."
    yield "torchao, bitsandbytes, EXL2, HQQ and similar: refused by name when a model is opened."
    yield "LoRA adapters: tests/test_lora.py compares them with transformers."


def load(path: Path) -> list[Row]:
    """Read docs/compatibility.json."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows
