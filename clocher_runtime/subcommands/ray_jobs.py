"""`clocher ray`: the rows of a file through many actors, on one machine or a cluster."""

from collections.abc import Sequence
from typing import Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.flags import HELP_WIDTH, write_examples
from clocher_runtime.command.script_run import (
    COUNT,
    Report,
    Script,
    Wrap,
    engine_options,
    option,
    place,
    script,
)
from clocher_runtime.config.engine import NUMERICS
from clocher_runtime.exit_codes import ExitCode

NAME = "clocher ray"

_CODES = (
    (ExitCode.OK, "done: every row has its line, some perhaps with an error"),
    (ExitCode.USAGE, "a flag cannot be used, or OUT_DIR holds another job"),
    (ExitCode.MODEL, "the model or the input is missing or damaged"),
    (ExitCode.DEVICE, "Ray is not there or gave up, or the output cannot be written"),
    (ExitCode.MEMORY, "out of memory"),
    (ExitCode.INTERRUPTED, "interrupted; run it again to go on"),
)
_EXAMPLES = (
    ("texts, on all CPUs of this machine", "clocher ray generate prompts.jsonl out"),
    ("log probabilities, by actors of 8 CPUs", "clocher ray score texts.jsonl out --cpus 8"),
    ("what a row looks like, and every flag", "clocher ray generate --help"),
)
_EPILOG = (
    'OUT_DIR/results.jsonl gets a line for each row, in order: {"row": 0, ...}, or {"row": 0, '
    '"error": ...} for one that cannot be used. Killed at any moment, the same line resumes with '
    "the rows that are left; another model, setting or input is refused there. Results depend "
    "neither on the number of actors nor on --batch."
)
_FLAGS: tuple[Wrap, ...] = (
    option(
        "--model",
        str,
        "directory, GGUF file or owner/name, alike on every machine; default: the embedded model",
    ),
    option("--actors", COUNT, "default: as many as the cluster has CPUs for"),
    option("--cpus", COUNT, "CPUs of each actor, its own, and its threads", default=1),
    option("--batch", COUNT, "rows that an actor computes side by side", default=8),
    option("--task-rows", COUNT, "rows that an actor is given at a time", default=32),
    option("--context", COUNT, "tokens of the longest row; default: the model's, at most 4096"),
    *engine_options(*NUMERICS, envvar=None),
    option(
        "--address",
        str,
        "of a Ray cluster; default: one on this machine for this job",
        envvar="RAY_ADDRESS",
    ),
)
_PLACES = (
    place("IN.jsonl", "--in", "the rows, a JSON object a line"),
    place("OUT_DIR", "--out-dir", "where the results go"),
)


@script(
    "clocher ray generate",
    *_PLACES,
    *_FLAGS,
    option("--max-new", COUNT, "tokens of a row that does not say", default=64),
    option("--temperature", click.FloatRange(0), "of a row that does not say"),
    option("--top-p", click.FloatRange(0, 1), "of a row that does not say"),
    option("--seed", click.IntRange(0), "plus the row's number: its seed", default=0),
    examples=(
        ("on this machine, an actor for each CPU", "clocher ray generate prompts.jsonl out"),
        (
            "on a cluster, actors of 8 cores",
            "clocher ray generate prompts.jsonl out --address auto --model models/llama --cpus 8",
        ),
    ),
    epilog=_EPILOG,
    exit_codes=_CODES,
)
def generate(
    report: Report,
    max_new: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    **job: Any,
) -> None:
    r"""Go on with the text of every row of a file.

    \b
    A row is one of
      {"prompt": "text, or token ids", "max_new": 32, "temperature": 0.7, "stop": ["\n"]}
      {"messages": [{"role": "user", "content": "Hello"}]}
    """
    sampling = {"max_new": max_new, "temperature": temperature, "top_p": top_p, "seed": seed}
    given = {key: value for key, value in sampling.items() if value is not None}
    _run(report, "generate", {"sampling": given}, **job)


@script(
    "clocher ray score",
    *_PLACES,
    *_FLAGS,
    examples=(("how likely is each text", "clocher ray score texts.jsonl out --actors 2"),),
    epilog=_EPILOG,
    exit_codes=_CODES,
)
def score(report: Report, **job: Any) -> None:
    r"""Tell the log probability of every row of a file, in nats.

    \b
    A row is one of
      {"text": "a whole text, window by window if it is long"}
      {"context": "2 + 2 =", "continuation": " 4"}
    """
    _run(report, "score", {}, **job)


def _run(report: Report, task: str, options: dict[str, Any], **given: Any) -> None:
    from clocher_runtime.ray.job import Job, run_job

    for key in ("context", *NUMERICS):
        if given[key] is not None:
            options[key] = given[key]
    job = Job(
        task,
        given["model"],
        given["in"],
        given["out_dir"],
        options,
        cpus=given["cpus"],
        actors=given["actors"],
        batch=given["batch"],
        task_rows=given["task_rows"],
    )
    with report.counting() as tell:
        outcome = run_job(job, given["address"], lambda done, total: tell("rows", done, total))
    if outcome.resumed:
        report.note(f"{outcome.resumed} rows were done before")
    if outcome.errors:
        report.note(f'{outcome.errors} rows could not be used: see their "error"')
    click.echo(f"{outcome.results}: {outcome.rows} rows")


_TASKS: dict[str, Script] = {"generate": generate, "score": score}


class _Tasks(click.Group):
    """What has examples on top of its help, as the tasks have."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what it does, and the examples."""
        super().format_help_text(ctx, formatter)
        write_examples(formatter, _EXAMPLES)


COMMAND = _Tasks(
    NAME,
    commands=dict(_TASKS),
    context_settings={"max_content_width": HELP_WIDTH, "help_option_names": ["-h", "--help"]},
    help="""Send the rows of a file through many actors, each row exactly once.

    Ray (pip install '.[ray]' in a clone of Clocher) starts the actors, on this machine or a
    cluster; each has the model and CPUs of its own. What was computed stays when an actor, a
    machine or this command dies; run the same line again to resume.""",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the first word names, and return the exit code."""
    words = list(argv or ())
    if words[:1] in ([], ["-h"], ["--help"]):
        click.echo(
            COMMAND.get_help(click.Context(COMMAND, info_name=NAME, **COMMAND.context_settings))
        )
        return ExitCode.OK
    if words[0] not in _TASKS:
        error = UsageError(f"{words[0]!r} is no task; expected one of {', '.join(_TASKS)}")
        return Report(NAME).failed(error)
    return _TASKS[words[0]].run(words[1:])
