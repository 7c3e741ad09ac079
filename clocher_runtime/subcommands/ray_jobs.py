"""`clocher ray`: the rows of a file through many actors, on one machine or a cluster."""

from typing import Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, option, place, script
from clocher_runtime.command.parameters import COUNT
from clocher_runtime.config.engine import NUMERICS
from clocher_runtime.exit_codes import ExitCode

_COMMON: tuple[click.Parameter, ...] = (
    *place("IN.jsonl", "--in", "the rows, a JSON object a line"),
    *place("OUT_DIR", "--out-dir", "where the results go"),
    option(
        "--model",
        str,
        "directory, GGUF file or owner/name, alike on every machine; default: the embedded model",
    ),
    option("--actors", COUNT, "default: as many as the cluster has CPUs for"),
    option("--cpus", COUNT, "CPUs that Ray counts for each actor, and its threads", default=1),
    option("--batch", COUNT, "rows that an actor computes side by side", default=8),
    option("--task-rows", COUNT, "rows that an actor is given at a time", default=32),
    option("--context", COUNT, "tokens of the longest row; default: the model's, at most 4096"),
    *engine_options(*NUMERICS, envvar=None),
    option("--address", str, "of a Ray cluster; default: a local one", envvar="RAY_ADDRESS"),
)
_SHARED: dict[str, Any] = {
    "epilog": 'OUT_DIR/results.jsonl gets a line for each row, in order: {"row": 0, ...}, or '
    '{"row": 0, "error": ...} for one that cannot be used. Killed at any moment, the same line '
    "computes the tasks that are left; another model, setting or input is refused there. "
    "Results depend neither on the number of actors nor on --batch.",
    "exit_codes": {
        ExitCode.OK: "done: every row has its line, some perhaps with an error",
        ExitCode.USAGE: "a flag cannot be used, or OUT_DIR holds another job",
        ExitCode.DEVICE: "Ray is not there or gave up, or the output cannot be written",
    },
}


@script(
    "clocher ray generate",
    *_COMMON,
    option("--max-new", COUNT, "tokens of a row that does not say", default=64),
    option("--temperature", click.FloatRange(0), "of a row that does not say"),
    option("--top-p", click.FloatRange(0, 1), "of a row that does not say"),
    option("--seed", click.IntRange(0), "plus the row's number: its seed", default=0),
    examples=(
        ("texts, on all CPUs of this machine", "clocher ray generate prompts.jsonl out"),
        (
            "on a cluster, actors of 8 cores",
            "clocher ray generate prompts.jsonl out --address auto --model models/llama --cpus 8",
        ),
    ),
    **_SHARED,
)
def generate(console: Console, **given: Any) -> None:
    r"""Generate from every row of a file.

    \b
    A row is one of
      {"prompt": "text, or token ids", "max_new": 32, "temperature": 0.7, "stop": ["\n"]}
      {"messages": [{"role": "user", "content": "Hello"}]}
    """
    sampling = {key: given.pop(key) for key in ("max_new", "temperature", "top_p", "seed")}
    said = {key: value for key, value in sampling.items() if value is not None}
    _run(console, "generate", {"sampling": said}, given)


@script(
    "clocher ray score",
    *_COMMON,
    examples=(("how likely is each text", "clocher ray score texts.jsonl out --actors 2"),),
    **_SHARED,
)
def score(console: Console, **given: Any) -> None:
    r"""Compute the log probability of every row of a file, in nats.

    \b
    A row is one of
      {"text": "a whole text, window by window if it is long"}
      {"context": "2 + 2 =", "continuation": " 4"}
    """
    _run(console, "score", {}, given)


def _run(console: Console, task: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    from clocher_runtime.ray.job import Job, run_job

    loaded = {key: given.pop(key) for key in ("context", *NUMERICS)}
    options |= {key: value for key, value in loaded.items() if value is not None}
    address, source, out = given.pop("address"), given.pop("in"), given.pop("out_dir")
    job = Job(task, source=source, out=out, options=options, **given)
    with console.counting() as tell:
        outcome = run_job(job, address, lambda done, total: tell("rows", done, total))
    if outcome.resumed:
        console.note(f"{outcome.resumed} rows were done before")
    if outcome.errors:
        console.note(f'{outcome.errors} rows could not be used: see their "error"')
    click.echo(f"{outcome.results}: {outcome.rows} rows")


@script(
    "clocher ray",
    click.Argument(["task"], metavar="generate|score", required=False),
    inner={"generate": "subcommands.ray_jobs:generate", "score": "subcommands.ray_jobs:score"},
    examples=(
        ("texts, on all CPUs of this machine", "clocher ray generate prompts.jsonl out"),
        ("log probabilities, by actors of 8 CPUs", "clocher ray score texts.jsonl out --cpus 8"),
        ("what a row looks like, and every flag", "clocher ray generate --help"),
    ),
)
def ray(console: Console, task: str | None) -> None:
    r"""Send the rows of a file through many actors, each row exactly once.

    \b
    generate  generate from every row
    score     compute the log probability of every row, in nats

    Ray (pip install '.[ray]' in a clone of Clocher) starts the actors, on this machine or a
    cluster; each has the model of its own. What was computed stays when an actor, a
    machine or this command dies; run the same line again to resume.
    """
    if task is not None:
        raise UsageError(f"{task!r} is no task; expected generate or score")
    click.echo(click.get_current_context().get_help())
