"""The processes `clocher` and `clocher-run`. Signal handlers precede any slow import."""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from clocher_runtime.exit_codes import cause_of, exit_code, listen, restore

_COLLECT_AFTER = 50_000
"""Objects made before a garbage collection."""


def clocher(argv: Sequence[str] | None = None) -> int:
    """Run `clocher NAME ...` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    return _process(words, argv is None, " ".join(["clocher", *words[:1]]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `clocher-run` and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return _process(["run", *words], argv is None, "clocher-run")


def _process(words: Sequence[str], owns_process: bool, program: str) -> int:
    before, is_run = listen(), words[:1] == ["run"]
    if owns_process:
        if is_run:
            # Modules stay: collecting among them takes 0.05 s of a start. `run` enables it.
            gc.disable()
            gc.set_threshold(_COLLECT_AFTER)
        _open_standard_streams()
    try:
        try:
            # Most of a short run: a signal may well arrive here.
            if is_run:
                from clocher_runtime.command.clocher_run import clocher_run

                return clocher_run.named(program).run(words[1:], before)
            from clocher_runtime.subcommands import table

            shell = "_CLOCHER_COMPLETE" in os.environ
            return table.answer_shell() if shell else table.dispatch(words)
        except BaseException as error:  # a signal, which C code may have replaced
            signal = cause_of(error)
            if not isinstance(signal, KeyboardInterrupt):
                raise
            if is_run:
                from clocher_runtime.command.console import RunConsole, error_line

                RunConsole(program, words=words, taken=before).finish(error_line(signal))
            return int(exit_code(signal))
    except OSError as error:  # of standard output: commands report all others themselves
        _stdout_failed(error, program)
        return 1
    finally:
        if owns_process:
            _flush()
        else:
            restore(before)


def _stdout_failed(error: OSError, name: str) -> None:
    if sys.stdout is not None:  # Python flushes it again at exit, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # whose reader wants no more
        return
    with suppress(OSError, AttributeError):  # standard error may be gone too
        sys.stderr.write(f"{name}: error: standard output: {error.strerror}\n")


def _flush() -> None:
    """Discard output for a closed stream, for which Python would change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    sys.exit(main())
