"""The command `clocher-run`: arguments and environment in, one JSON line and an exit code out."""

import os
import sys
from collections.abc import Callable, Sequence

from clocher_kernels.errors import ModelChanged
from clocher_runtime.command.console import Console, Line, Screen, error_line, is_terminal, to_json
from clocher_runtime.command.flags import Command
from clocher_runtime.config.commands import RunConfig, resolve, warnings
from clocher_runtime.exit_codes import ExitCode, cause_of

NAME = "clocher-run"

ABOUT = """Complete text with a language model and report how fast it went.

On a terminal it shows the text. Where standard output is a file or a pipe, or with --json, it gets
exactly one line of JSON, also when the run fails, and the text goes to standard error."""

EXAMPLES = (
    ("SmolLM2-135M-Instruct, fetched once (93 MB), tells a story", "clocher-run"),
    ("another prompt, 100 tokens", 'clocher-run "The best thing about rain" --max-new 100'),
    (
        "your model: a Hugging Face directory, a GGUF file, or owner/name once it is pulled",
        'clocher-run MODEL "Once upon a time"',
    ),
    ("a file as the prompt", "clocher-run MODEL < FILE"),
    ("float weights quantised to 4 bits at load", "clocher-run MODEL --precision int4w"),
    ("every line of a file, four at a time", "clocher-run --prompts-file FILE --batch 4"),
    ("only the numbers, one per line", "clocher-run 2>/dev/null | python3 -m json.tool"),
    ("walk over 64 MB of the weights per token", "IE_BYTES_PER_TOKEN=64000000 clocher-run"),
)

PRECEDENCE = """A flag is stronger than a variable, a variable is stronger than the file of
--config, and the file is stronger than the default."""

COMMAND = Command(
    name=NAME,
    about=ABOUT,
    kind=RunConfig,
    epilog=f"""{PRECEDENCE}

A hint is checked and accepted; this version does not act on it. The JSON line lists it under
hints_ignored unless it asks for what happens anyway.""",
    examples=EXAMPLES,
)


def command(
    argv: Sequence[str], emit: Callable[[str], object], name: str = NAME
) -> tuple[str | None, int]:
    """Run the command; returns the JSON line and the exit code."""
    line: Line
    as_json = "--json" in argv or not is_terminal(sys.stdout)
    with Console(name=name) as console:
        try:
            shown: list[str] = []
            flags = COMMAND.named(name).parse(argv, shown.append)
            if flags is None:
                return "\n".join(shown), ExitCode.OK
            config = resolve(flags, os.environ)
            as_json = as_json or config.json
            if not as_json:
                console.texts = Screen(sys.stdout, may_be_lost=True)
            for message in warnings(config, os.environ):
                console.say(message)
            # NumPy and its users are imported after the flags are checked.
            from clocher_runtime.command.fetching import with_model
            from clocher_runtime.disk.files import ending_on_lost_pages

            config = with_model(config, console)

            def lost(message: str) -> None:
                console.lost(message)
                if as_json:
                    emit(to_json(error_line(ModelChanged(message))))

            with ending_on_lost_pages(lost):
                from clocher_runtime.command.completions import summary
                from clocher_runtime.command.run import run

                line, code = run(config, console), ExitCode.OK
                console.say(summary(line))
        except (Exception, KeyboardInterrupt) as raised:
            error, code = console.ended(cause_of(raised))
            line = error_line(error)
    return to_json(line) if as_json else None, code
