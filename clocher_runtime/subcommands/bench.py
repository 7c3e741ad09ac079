"""`clocher bench`: measured speed of a model, and its ratio to the memory limit."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.script_run import PATH, Report, Wrap, script
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.setting import declared
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.quality.speed import Case
    from clocher_runtime.subcommands.bench_rows import Row

NAME = "clocher bench"

_MOST = 1 << 24
_MOST_VALUES = 16
_MOST_CASES = 64
_MOST_ROUNDS = 1000

_ABOUT = """Measure how fast a model reads prompts and generates, in the tests of llama-bench.

Every test runs once to warm up and then -r times, in turns with the others. Beside "tg" tests a
loop reads memory with the same threads: "% of read" says how much of that rate the weights and keys
of a token reach. Every row is checked: all repetitions make the same tokens, and so does another
way to compute them. Without MODEL it is the one in the current directory, else the embedded one."""

_EXAMPLES = (
    ("the embedded model", "clocher bench"),
    ("a model, beside the rows of llama-bench", "clocher bench models/llama.gguf -p 512 -n 128"),
    ("generation only, after 0 and 4096 tokens", "clocher bench MODEL -p 0 -n 128 -d 0,4096"),
    ("how it scales: threads, sequences side by side", "clocher bench MODEL -t 1,2,4 -b 1,8"),
    ("a prompt and its answer in one", "clocher bench MODEL -pg 512,128"),
    (
        "the gain of draft tokens, continuing a text of 512 tokens",
        "clocher bench MODEL --speculate auto --text FILE -d 512 -p 0 -n 128",
    ),
    ("keep the samples, and compare with a later run", "clocher bench MODEL -o json > before.json"),
    ("", "clocher bench compare before.json after.json --fail-below 0.95"),
    ("not how fast, but how good: questions and texts", "clocher bench quality --task FILE"),
)

_NOTES = """Variables of clocher run (IE_...) hold, and those that act are named in the output.
Standard output gets the result, standard error the progress and warnings."""

_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag or list cannot be used, or the context is too short"),
    (ExitCode.MODEL, "the model is missing, invalid or not supported"),
    (ExitCode.DEVICE, "the device is not available"),
    (ExitCode.MEMORY, "out of memory"),
    (ExitCode.MISMATCH, "tokens differ, or a figure is above what the memory gives"),
    (ExitCode.INTERRUPTED, "interrupted (Ctrl-C)"),
)

_WINDOW = """\
Timed: the steps of the engine, with sampling, which llama-bench leaves out. Not timed: loading,
packing, compiling, tokenising, and what comes before a test: its depth, the first token of tg.
Prompts are random ids, or --text. Draft tokens only with --speculate."""


_Callback = Callable[[click.Context, click.Parameter, Any], Any]


def _numbers(least: int) -> _Callback:
    expected = f"at most {_MOST_VALUES} numbers from {least} to {_MOST}, such as 128,512"

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
        if text is None:
            return ()
        numbers = tuple(dict.fromkeys(_integers(text)))
        fit = numbers and all(least <= number <= _MOST for number in numbers)
        if not fit or len(numbers) > _MOST_VALUES:
            raise click.BadParameter(f"{text!r:.80}; expected {expected}.")
        return numbers

    return read


def _pairs(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    pairs = tuple(map(_integers, texts))
    for text, pair in zip(texts, pairs, strict=True):
        if len(pair) != 2 or not all(1 <= number <= _MOST for number in pair):
            expected = f"two numbers from 1 to {_MOST}, such as 512,128"
            raise click.BadParameter(f"{text!r:.80}; expected {expected}.")
    return pairs


def _integers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    good = all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts)
    return tuple(map(int, parts)) if good else ()


def _not_here(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"{param.opts[0]}: keys and values are stored alike here; give --kv-dtype, "
            "such as f16 or i8."
        )


_WORDS = ("precision", "kv_dtype", "device", "speculate", "attn", "act_sparsity")
_KNOWN = {name: each.takes.metavar.split("|") for name, each in declared(EngineConfig).items()}
_LIST: Mapping[str, Any] = {"metavar": "LIST", "callback": _numbers(0), "show_default": True}
_SOME: Mapping[str, Any] = {"metavar": "LIST", "callback": _numbers(1), "show_default": True}


def _choice(flag: str, setting: str, help: str) -> Wrap:
    return click.option(flag, type=click.Choice(_KNOWN[setting]), help=help)


def _foreign(flag: str) -> Wrap:
    return click.option(flag, hidden=True, expose_value=False, callback=_not_here)


@script(
    NAME,
    click.argument("model", required=False),
    click.option("-m", "--model-dir", metavar="MODEL", help="directory, GGUF file or Hub name"),
    click.option("-p", "--n-prompt", default="512", help="pp: prompts to read; 0: none", **_LIST),
    click.option("-n", "--n-gen", default="128", help="tg: tokens to make; 0: none", **_LIST),
    click.option(
        "-pg",
        "pairs",
        metavar="P,G",
        multiple=True,
        callback=_pairs,
        help="a prompt, then tokens; may be repeated",
    ),
    click.option("-d", "--n-depth", default="0", help="tokens before each test", **_LIST),
    click.option("-t", "--threads", help="[default: as many as a run has]", **_SOME),
    click.option("-b", "--batch", default="1", help="sequences side by side, in tg", **_SOME),
    click.option(
        "-r",
        "--repetitions",
        type=click.IntRange(1, _MOST_ROUNDS),
        metavar="N",
        default=5,
        show_default=True,
        help="that count; one more comes first",
    ),
    click.option("--lora", metavar="DIR", help="LoRA adapter to add to the weights"),
    _choice("--precision", "precision", "[default: as stored]"),
    _choice("--kv-dtype", "kv_dtype", "of the KV cache"),
    _choice("--device", "device", "[default: auto]"),
    _choice("--speculate", "speculate", "draft tokens in tg and pg  [default: off]"),
    click.option("--draft-model", metavar="MODEL", help="drafts with --speculate auto or draft"),
    click.option("--attn", metavar="KIND:N", help="read part of the KV cache  [default: dense]"),
    click.option("--act-sparsity", metavar="RULE", help="drop small activations  [default: no]"),
    click.option("--act-calibration", metavar="FILE", help="text for --act-sparsity 0.25"),
    click.option("--text", type=PATH, metavar="FILE", help="of prompts  [default: random ids]"),
    click.option(
        "-o",
        "--output",
        type=click.Choice(["md", "json", "jsonl", "csv"]),
        default="md",
        show_default=True,
        help="json and jsonl keep every sample",
    ),
    click.option("--no-check", is_flag=True, help="do not compute tokens in another way"),
    _foreign("-ctk"),
    _foreign("-ctv"),
    examples=_EXAMPLES,
    exit_codes=_CODES,
    help=_ABOUT,
    epilog=_NOTES,
)
def bench(report: Report, **given: Any) -> int:
    """Measure, write the rows, and return the exit code."""
    from clocher_runtime.subcommands.bench_measure import Plan, measure
    from clocher_runtime.subcommands.bench_rows import WRITERS, doubts

    plan = Plan(
        flags=_flags(given),
        threads=given["threads"],
        cases=_cases(given),
        rounds=given["repetitions"],
        check=not given["no_check"],
        text=given["text"],
    )
    with report.counting() as tell:
        rows = measure(plan, tell)
    click.echo(WRITERS[given["output"]](rows))
    if given["output"] == "md":
        click.echo(f"\n{_WINDOW}\n{_machine(rows)}")
    for warning in doubts(rows):
        report.done(f"warning: {warning}")
    good = all(row["correct"] is not False and row["valid"] for row in rows)
    return ExitCode.OK if good else ExitCode.MISMATCH


COMMAND = bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run `clocher bench` or a subcommand of it; return the exit code."""
    words = list(argv or ())
    if words[:1] == ["quality"]:
        from clocher_runtime.subcommands.bench_quality import main as quality

        return quality(words[1:])
    if words[:1] == ["compare"]:
        from clocher_runtime.subcommands.bench_compare import main as compare

        return compare(words[1:])
    return bench.run(words)


def _flags(given: dict[str, Any]) -> dict[str, str]:
    if given["model"] and given["model_dir"]:
        raise UsageError(
            f"MODEL {given['model']!r} and -m {given['model_dir']!r}: give one of them"
        )
    flags = {name: given[name] for name in ("lora", "draft_model", "act_calibration", *_WORDS)}
    flags["model_dir"] = given["model"] or given["model_dir"]
    return {name: value for name, value in flags.items() if value is not None}


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
    parts = [row["gpu_info"] or row["cpu_info"], f"{row['cpus']} CPUs", row["isa"]]
    parts += [f"activations {row['act_prec']}", f"KV cache {row['type_k']}"]
    parts += [f"memory read at {gbps:.1f} GB/s by -t {threads}" for threads, gbps in reads.items()]
    lines = [", ".join(parts)]
    lines.append(f"load {row['load1']:.1f} at the start, {row['test_time']}, {versions}")
    for said, key in (("set by variables", "settings"), ("not acted on", "hints_ignored")):
        if row[key]:
            lines.append(f"{said}: {', '.join(row[key])}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
