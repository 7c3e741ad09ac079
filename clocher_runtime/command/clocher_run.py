"""The command `clocher-run`: arguments and environment in, a line and an exit code out.

Its flags and its help text are made from the table of settings.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

from clocher_kernels.errors import ModelChanged
from clocher_runtime.command.console import Console
from clocher_runtime.command.env import resolve
from clocher_runtime.command.flags import Command
from clocher_runtime.command.jsonline import (
    ErrorLine,
    RunLine,
    TuneLine,
    error_line,
    to_json,
)
from clocher_runtime.command.settings import ALL, RunConfig
from clocher_runtime.exit_codes import ExitCode, exit_code, told
from clocher_runtime.signals import cause_of

NAME = "clocher-run"

ABOUT = """Complete text with a language model and report how fast it went.

Generated text goes to standard error as it is produced. Standard output gets exactly one line of
JSON, also when the run fails."""

EXAMPLES = (
    ("the model that ships with Clocher completes a Python function", "clocher-run"),
    ("another prompt, 100 tokens", 'clocher-run --prompt "class Stack:" --max-new 100'),
    ("your model: a Hugging Face directory or an IEBIN pair", "clocher-run --model-dir DIR"),
    ("float weights quantised to 4 bits at load", "clocher-run --precision int4w"),
    ("every line of a file, four at a time", "clocher-run --prompts-file FILE --batch 4"),
    ("only the numbers, one per line", "clocher-run 2>/dev/null | python3 -m json.tool"),
    ("walk over 64 MB of the weights per token", "IE_BYTES_PER_TOKEN=64000000 clocher-run"),
)

EXIT_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.BUG, "unexpected: a defect of Clocher, or standard output cannot be written"),
    (ExitCode.USAGE, "bad flag, environment variable or prompt"),
    (ExitCode.MODEL, "model missing, invalid or not supported"),
    (ExitCode.DEVICE, "device or engine not available"),
    (ExitCode.MEMORY, "out of memory"),
    (ExitCode.INTERRUPTED, "interrupted (Ctrl-C)"),
    (ExitCode.TERMINATED, "terminated (SIGTERM)"),
)

PRECEDENCE = """A flag is stronger than a variable, a variable is stronger than the file of
--config, and the file is stronger than the default."""

COMMAND = Command(
    name=NAME,
    about=ABOUT,
    table=ALL,
    defaults={field.name: field.default for field in fields(RunConfig)},
    notes=(
        PRECEDENCE,
        """A hint is checked and accepted; this version does not act on it. The JSON line lists
it under hints_ignored unless it asks for what happens anyway.""",
    ),
    examples=EXAMPLES,
    exit_codes=EXIT_CODES,
)


def command(argv: Sequence[str], emit: Callable[[str], object]) -> tuple[str, int]:
    """Run the command.

    Args:
        argv: arguments after its name.
        emit: writes a line to standard output, for a run that cannot come back.

    Returns:
        What standard output gets, and the exit code.

    Raises:
        KeyboardInterrupt: a signal arrived before there was a console to tell it.
    """
    line: RunLine | TuneLine | ErrorLine
    with Console() as console:
        try:
            shown: list[str] = []
            flags = COMMAND.parse(argv, shown.append)
            if flags is None:
                return "\n".join(shown), ExitCode.OK
            config = resolve(flags, os.environ)
            # NumPy and all that needs it is imported after the flags have been checked.
            from clocher_runtime.disk.files import ending_on_lost_pages

            with ending_on_lost_pages(partial(_lost, console, emit)):
                if config.tune:
                    from clocher_runtime.command.tile_tuning import tune

                    line, code = tune(config, console), ExitCode.OK
                else:
                    from clocher_runtime.command.run import run, summary

                    line, code = run(config, console), ExitCode.OK
                    console.note(summary(line))
        except (Exception, KeyboardInterrupt) as raised:
            error = told(cause_of(raised))
            line, code = error_line(error), exit_code(error)
            if code == ExitCode.BUG:
                console.note("".join(traceback.format_exception(error)).rstrip())
            else:
                console.note(f"error: {line.message}")
    return to_json(line), code


def _lost(console: Console, emit: Callable[[str], object], message: str) -> None:
    """Write the line of a run that ends at once, because a model file is gone."""
    line = error_line(ModelChanged(message))
    with console:
        console.note(f"error: {message}")
    emit(to_json(line))
