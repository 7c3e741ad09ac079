"""`clocher bench`: measured speed of a model, and its ratio to the memory limit."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import UsageError, counted
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, option, place, script, switch
from clocher_runtime.command.parameters import FILE, MOST, Listed, numbers, whole
from clocher_runtime.config.commands import settle
from clocher_runtime.config.engine import NUMERICS, EngineConfig
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.quality.speed import Case
    from clocher_runtime.subcommands.bench_measure import Row

_MOST_CASES = 64
_MOST_ROUNDS = 1000

_ABOUT = """Measure how fast a model reads prompts and generates, in the tests of llama-bench.

Every test runs once to warm up and then -r times, in turns with the others. Beside "tg" tests a
loop reads memory with the same threads: "% of read" says how much of that rate the weights and keys
of a token reach. Every row is checked: all repetitions make the same tokens, and so does another
way to compute them. Without MODEL it is the one in the current directory, else the default one."""

_EXAMPLES = (
    ("the default model", "clocher bench"),
    ("a model, beside the rows of llama-bench", "clocher bench models/llama.gguf -p 512 -n 128"),
    ("generation only, after 0 and 4096 tokens", "clocher bench MODEL -p 0 -n 128 -d 0,4096"),
    ("how it scales: threads, sequences side by side", "clocher bench MODEL -t 1,2,4 -b 1,8"),
    ("a prompt and its answer in one", "clocher bench MODEL -pg 512,128"),
    (
        "the gain of draft tokens, continuing a text of 512 tokens",
        "clocher bench MODEL --speculate auto --text FILE -d 512 -p 0 -n 128",
    ),
    ("keep every sample", "clocher bench MODEL -o json > samples.json"),
    ("not how fast, but how good", "clocher bench quality --task mmlu --data DIR"),
)

_NOTES = """Variables of clocher run (IE_...) hold, and those that act are named in the output.
Standard output gets the result, standard error the progress and warnings."""

_WINDOW = """\
Timed: the steps of the engine, with sampling, which llama-bench leaves out. Not timed: loading,
packing, compiling, tokenising, and what comes before a test: its depth, the first token of tg.
Prompts are random ids, or --text. Draft tokens only with --speculate."""


_PAIR = Listed(
    partial(whole, 1, MOST),
    f"two numbers from 1 to {MOST}, such as 512,128",
    lambda pair: len(pair) == 2,
    once=False,
)
_TOKENS = numbers(0, MOST, "128,512")
_THREADS, _SEQUENCES = numbers(1, 1024, "1,2"), numbers(1, 1023, "1,8")
_WORDS = (
    *(*NUMERICS, "device", "speculate", "draft_model"),
    *("attn", "act_sparsity", "act_calibration", "lora"),
)


@script(
    "clocher bench",
    *place(
        "MODEL", "--model-dir", "directory, GGUF file or Hub name", str, needed=False, short="-m"
    ),
    option("--n-prompt", _TOKENS, "pp: prompts to read; 0: none", short="-p", default="512"),
    option("--n-gen", _TOKENS, "tg: tokens to make; 0: none", short="-n", default="128"),
    option(
        "-pg",
        _PAIR,
        "a prompt, then tokens; may be repeated",
        name="pairs",
        metavar="P,G",
        multiple=True,
    ),
    option("--n-depth", _TOKENS, "tokens before each test", short="-d", default="0"),
    option("--threads", _THREADS, "[default: as many as a run has]", short="-t", default=()),
    option("--batch", _SEQUENCES, "sequences side by side, in tg", short="-b", default="1"),
    option(
        "--repetitions",
        click.IntRange(1, _MOST_ROUNDS),
        "that count; one more comes first",
        short="-r",
        metavar="N",
        default=5,
    ),
    *engine_options(*_WORDS, reads=False, envvar=None),
    option("--text", FILE, "of prompts  [default: random ids]"),
    option(
        "--output",
        click.Choice(["md", "json", "jsonl", "csv"]),
        "json and jsonl keep every sample",
        short="-o",
        default="md",
    ),
    switch("--yes", "fetch a model of the Hub that is not here without a question"),
    switch("--no-check", "do not compute tokens in another way"),
    examples=_EXAMPLES,
    exit_codes={ExitCode.MISMATCH: "tokens differ, or a figure is above what the memory gives"},
    help=_ABOUT,
    epilog=_NOTES,
)
def bench(console: Console, **given: Any) -> int:
    """Measure, write the rows, and return the exit code."""
    from clocher_runtime.command.fetching import with_model
    from clocher_runtime.subcommands.bench_measure import doubts, markdown, measure

    words = {name: given[name] for name in (*_WORDS, "model_dir") if given[name] is not None}
    config = settle(EngineConfig, {"speculate": "off", **words}, os.environ)
    config = with_model(replace(config, yes=given["yes"]), console)
    cases = _cases(given)
    with console.counting() as tell:
        rows = measure(config, cases, given, tell)
    if given["output"] == "md":
        click.echo(f"{markdown(rows)}\n\n{_WINDOW}\n{_machine(rows)}")
    else:
        click.echo(_as_text(rows, given["output"]))
    for warning in doubts(rows):
        console.say(f"warning: {warning}")
    good = all(row["correct"] is not False and row["valid"] for row in rows)
    return ExitCode.OK if good else ExitCode.MISMATCH


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as CSV, with a column for every key."""
    text = io.StringIO()
    writer = csv.DictWriter(text, {name: None for row in rows for name in row}, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _as_text(rows: Sequence["Row"], form: str) -> str:
    """Return rows as JSON, JSON lines or, without their lists, CSV."""
    from clocher_runtime.disk.strict_json import finite

    if form == "csv":
        flat = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in rows]
        return as_csv([*map(finite, flat)]).rstrip("\n")
    lines = [json.dumps(finite(row)) for row in rows]
    return "\n".join(lines) if form == "jsonl" else "[\n" + ",\n".join(lines) + "\n]"


def _cases(given: dict[str, Any]) -> "tuple[Case, ...]":
    """Return the tests, in the order of llama-bench: pp, tg, pg of each depth."""
    from clocher_runtime.quality.speed import Case

    cases = []
    for depth in given["n_depth"]:
        cases += [Case(prompt, 0, depth) for prompt in given["n_prompt"] if prompt]
        cases += [
            Case(0, tokens, depth, batch)
            for tokens in given["n_gen"]
            if tokens
            for batch in given["batch"]
        ]
        cases += [Case(prompt, tokens, depth) for prompt, tokens in given["pairs"]]
    if not cases:
        raise UsageError("-p 0 and -n 0 leave nothing to measure; give one of them, or -pg")
    if len(cases) > _MOST_CASES:
        raise UsageError(f"{len(cases)} tests; expected at most {_MOST_CASES}: give shorter lists")
    return tuple(dict.fromkeys(cases))


def _machine(rows: "Sequence[Row]") -> str:
    row = rows[0]
    reads = {row["n_threads"]: row["read_gbps"] for row in rows if row["read_gbps"]}
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    parts = [row["gpu_info"] or row["cpu_info"], counted(row["cpus"], "CPU"), row["isa"]]
    parts += [f"activations {row['act_prec']}", f"KV cache {row['type_k']}"]
    parts += [f"memory read at {gbps:.1f} GB/s by -t {threads}" for threads, gbps in reads.items()]
    lines = [", ".join(parts)]
    lines.append(f"load {row['load1']:.1f} at the start, {row['test_time']}, {versions}")
    for said, key in (("set by variables", "settings"), ("not acted on", "hints_ignored")):
        if row[key]:
            lines.append(f"{said}: {', '.join(row[key])}")
    return "\n".join(lines)
