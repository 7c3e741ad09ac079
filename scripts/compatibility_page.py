"""Render docs/compatibility.md from docs/compatibility.json (`Row` in tests/compatibility.py)."""

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
"""Families and readers without a row -> reason; tests fail on a missing one."""

INTRO = """# What loads, and how exactly

Each row is a model that a test has written, or had a library write, and that Clocher has then run
beside a reference. **Difference** is the largest relative difference of logits over the models of
the row: RMS of the difference over RMS of the logits, activations and KV cache in fp32 unless the
row says otherwise. fp32 sums in another order differ by 1e-7 to 1e-5; a wrong scale, a swapped
nibble or a rotated head by 1e-2 and more. **Same ids**: models whose greedy ids were all those of
the reference, of those tried."""

FAMILIES_INTRO = """## Families

Random small models: other heads, head sizes, windows, RoPE, biases, experts in each; a prompt of 60
tokens, whole and in chunks, then 64 greedy ids."""

QUANTISED_INTRO = """## Quantised checkpoints of Hugging Face

Rows with the name and version of a library are files which that library wrote. "The test, as X":
packed by a test that follows the source of X, so they say that the layout is read as X's source
describes it, not that a release of X was tried. `v1`, `v2` are versions of the GPTQ layout; `g32`
is a scale for 32 columns, `row` one for all; `order` is activation order (`desc_act`, `actorder`).
"Here": the same back end of Clocher with the decoded values, so 0 says that the values are the same
and says nothing of the model, which the other tables do. llm-compressor rounds the values that it
decodes to bf16, and logits differ by 5e-3; one matrix was compared, and ours rounded so is its own
bit for bit."""

PAIRS_INTRO = """## Families in these formats

Every linear but routers and the head, packed by the tests in each layout; the reference is
`transformers` with the decoded values. A number is the difference, `-` is refused when the model is
opened."""

GGUF_INTRO = """## GGUF

Files of `llama-quantize` are made from the small trained model of `tests/data` and hold several
types: the one named and those that it gives to the head and to single layers. Their difference is
that of perplexities over 2048 tokens, ours and `llama-perplexity`'s on the same file expanded to
fp32 (llama.cpp rounds activations to 8 bits for quantised weights, so that is what fp32 activations
compare with); "same ids" are 48 greedy ids after each of 4 prompts. Rows compared with "weights"
are numbers of single tensors, bit for bit; their models are never run."""

MADE = """## How it was made

Rows are what the parity tests saw, on a CPU; the reference back end and the CUDA kernels are
compared with the same references by the same tests, without a row here. The test suite fails if a
family, a `quant_method` or a ggml type that Clocher reads has neither a row nor a reason below. The
rows themselves, each with its date, instruction set and command, are
[compatibility.json](compatibility.json). These commands make them again:"""

SAME = ("same ids", "compared with")

LAYOUTS_OF_TESTS = "the test, in the layout"


def render(rows: list[Row], table: Any) -> str:
    """Return the page; `table` makes a Markdown table of a head and rows."""
    floats = [row for row in rows if row["reader"] == "float"]
    ggml = [row for row in rows if row["reader"].startswith("gguf ")]
    pairs = [row for row in rows if row["writer"] == LAYOUTS_OF_TESTS]
    known = {id(row) for row in (*floats, *ggml, *pairs)}
    quantised = [row for row in rows if id(row) not in known]
    parts = [
        INTRO,
        FAMILIES_INTRO,
        table(
            ("family", "written by", "models", "difference", "same ids"),
            [(family(row), row["writer"], *numbers(row)) for row in floats],
        ),
        QUANTISED_INTRO,
        table(
            ("read as", "written by", "family", "formats", "models", "difference", *SAME),
            [
                (f"`{row['reader']}`", row["writer"], family(row), row["format"], *numbers(row))
                + (row["reference"],)
                for row in together(sorted(quantised, key=order))
            ],
        ),
        PAIRS_INTRO,
        pair_table(pairs, table),
        GGUF_INTRO,
        table(
            ("type", "written by", "family", "file", "models", "difference", *SAME),
            [
                (
                    f"`{row['reader'].removeprefix('gguf ')}`",
                    row["writer"],
                    family(row),
                    row["format"],
                    *numbers(row),
                    row["reference"],
                )
                for row in together(sorted(ggml, key=order))
            ],
        ),
        MADE,
        "\n".join(f"    {command}" for command in sorted({row["command"] for row in rows})),
        made_line(rows),
        "## Not covered",
        "\n".join(f"- {line}" for line in not_covered()),
    ]
    return "\n\n".join(parts) + "\n"


def together(rows: list[Row]) -> list[Row]:
    """Merge rows that differ only in the format, unless ids were compared."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in ("reader", "writer", "family", "reference"))
        if (old := found.get(key)) is None or row["same_ids"] is not None:
            found[(*key, row["format"]) if old else key] = dict(row)
            continue
        old["format"] += f", {row['format']}"
        old["models"] += row["models"]
        old["difference"] = max(old["difference"], row["difference"])
    return list(found.values())


def order(row: Row) -> tuple[str, ...]:
    """Return a row's sort key: files of libraries before those of tests."""
    by_test = str(row["writer"].startswith("the test"))
    return by_test, row["reader"], row["writer"], row["format"], row["family"]


def family(row: Row) -> str:
    """Return a family's short name, with the row's distinction."""
    name = row["family"].removesuffix("ForCausalLM")
    apart = row["format"].partition(", ")[2] if row["reader"] == "float" else ""
    return f"{name}, {apart}" if apart else name


def numbers(row: Row) -> tuple[str, str, str]:
    """Return the cells: count, difference, count with the same ids."""
    same = "not compared" if row["same_ids"] is None else f"{row['same_ids']} of {row['models']}"
    return str(row["models"]), difference(row), same


def difference(row: Row) -> str:
    """Return a difference with two digits, or that the model is refused."""
    value = row["difference"]
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-")


def pair_table(rows: list[Row], table: Any) -> str:
    """Return the table of families by layouts."""
    found = {(family(row), row["format"]): row for row in rows}
    layouts = list(dict.fromkeys(row["format"] for row in sorted(rows, key=order)))
    cells = [
        (name, *(difference(found[name, x]) if (name, x) in found else "" for x in layouts))
        for name in dict.fromkeys(family(row) for row in rows)
    ]
    said = dict.fromkeys(f'- {row["format"]}: "{row["refused"]}"' for row in rows if row["refused"])
    return "\n\n".join([table(("family", *layouts), cells), *(("\n".join(said),) if said else ())])


def made_line(rows: list[Row]) -> str:
    """Return the facts that all rows share."""
    dates = sorted({row["date"] for row in rows})
    kinds = ", ".join(f"`{name}`" for name in sorted({row["isa"] for row in rows}))
    return f"Made from {dates[0]} to {dates[-1]}, instruction sets {kinds}; {len(rows)} rows."


def not_covered() -> Iterable[str]:
    """Return what has no row, and why."""
    yield from (f"`{name}`: {reason}" for name, reason in sorted(NOT_TRIED.items()))
    yield (
        "Published checkpoints: the tests download nothing. Sizes, vocabularies and settings of "
        "real models are those of the configs that the families' defaults were read from."
    )
    yield (
        "Files that GPTQModel and AutoRound themselves wrote, and mixtures of experts by "
        "llm-compressor: tests/other_libraries.py could not make them here (two workers asked of "
        "one CPU, a data set of the Hub, other names of experts). AutoAWQ was not tried."
    )
    yield "Llama 4 with packed experts: its experts are floats in the table of families by formats."
    yield (
        "GGUF files of the new families have no row: tests/test_gguf_families.py compares them "
        "with the Hugging Face directory, bit for bit."
    )
    yield "torchao, bitsandbytes, EXL2, HQQ and the like: refused by name when a model is opened."
    yield "LoRA adapters: tests/test_lora.py compares them with transformers, without a row here."


def load(path: Path) -> list[Row]:
    """Read docs/compatibility.json."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows
