"""`clocher ray`: the rows of a file through many actors, on one machine or a cluster."""

from pathlib import Path
from typing import Any

import click

from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, option, place, script
from clocher_runtime.command.parameters import COUNT
from clocher_runtime.config.engine import NUMERICS
from clocher_runtime.exit_codes import ExitCode


@script(
    "clocher ray",
    click.Argument(["task"], type=click.Choice(["generate", "score"]), metavar="generate|score"),
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
    examples=(
        ("texts, on all CPUs of this machine", "clocher ray generate prompts.jsonl out"),
        (
            "on a cluster, actors of 8 cores",
            "clocher ray generate prompts.jsonl out --address auto --model models/llama --cpus 8",
        ),
        ("how likely is each text", "clocher ray score texts.jsonl out --actors 2"),
    ),
    epilog='OUT_DIR/results.jsonl gets a line for each row, in order: {"row": 0, ...}, or '
    '{"row": 0, "error": ...} for one that cannot be used. Killed at any moment, the same line '
    "computes the tasks that are left; another model, setting or input is refused there. "
    "Results depend neither on the number of actors nor on --batch.",
    exit_codes={
        ExitCode.OK: "done: every row has its line, some perhaps with an error",
        ExitCode.USAGE: "a flag cannot be used, or OUT_DIR holds another job",
        ExitCode.DEVICE: "Ray is not there or gave up, or the output cannot be written",
    },
)
def ray(console: Console, task: str, out_dir: Path, address: str | None, **given: Any) -> None:
    r"""Send the rows of a file through many actors, each row exactly once.

    \b
    generate  generate from every row:
      {"prompt": "text, or token ids", "max_new": 32, "temperature": 0.7, "stop": ["\n"]}
      {"messages": [{"role": "user", "content": "Hello"}]}
    score     compute the log probability of every row, in nats:
      {"text": "a whole text, window by window if it is long"}
      {"context": "2 + 2 =", "continuation": " 4"}

    Ray (pip install '.[ray]' in a clone of Clocher) starts the actors, on this machine or a
    cluster; each has the model of its own. What was computed stays when an actor, a
    machine or this command dies; run the same line again to resume.
    """
    from clocher_runtime.ray.job import Job, run_job

    loaded = {key: given.pop(key) for key in ("context", *NUMERICS)}
    options = {key: value for key, value in loaded.items() if value is not None}
    job = Job(task, source=given.pop("in"), out=out_dir, options=options, **given)
    with console.counting() as tell:
        outcome = run_job(job, address, lambda done, total: tell("rows", done, total))
    if outcome.resumed:
        console.note(f"rows done before: {outcome.resumed}")
    if outcome.errors:
        console.note(f'rows that could not be used: {outcome.errors}; see their "error"')
    click.echo(f"{outcome.results}: {outcome.rows} rows")
