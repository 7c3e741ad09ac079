"""The process `clocher-run`: streams, signals, one JSON line and an exit code.

Nothing slow is imported before somebody listens for signals.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from clocher_runtime.signals import cause_of, ignore, listen, restore


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: arguments after the name of the command. None: those of the process, which then ends
            with what this returns.
    """
    before = listen()
    if argv is None:
        _open_standard_streams()
    try:
        try:
            line, code = _answer(sys.argv[1:] if argv is None else argv)
            ignore(before)
        except KeyboardInterrupt as signal:  # after the answer, and before nothing can change it
            line, code = _interrupted(signal)
            ignore(before)
        return code if _emit(line) else 1
    finally:
        if argv is not None:
            restore(before)
        else:
            _flush_errors()


def _answer(argv: Sequence[str]) -> tuple[str, int]:
    """Do what the arguments say; return what standard output gets, and the code."""
    try:
        # Most of a short run: a signal may well arrive here.
        from clocher_runtime.command.clocher_run import command

        return command(argv, _emit)
    except BaseException as error:
        if not isinstance(cause_of(error), KeyboardInterrupt):
            raise
        return _interrupted(cause_of(error))


def _interrupted(signal: BaseException) -> tuple[str, int]:
    """Return the line and the code of a run that a signal ended."""
    from clocher_runtime.command.jsonline import error_line, to_json
    from clocher_runtime.exit_codes import exit_code

    return to_json(error_line(signal)), int(exit_code(signal))


def _emit(text: str) -> bool:
    """Write a line to standard output; say whether it could be written."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        # Python flushes again when it exits, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with suppress(OSError, AttributeError):  # standard error may be gone too
            sys.stderr.write(f"clocher-run: error: standard output: {error.strerror}\n")
        return False
    return True


def _flush_errors() -> None:
    """Leave nothing for a standard error that is gone: Python would exit with a code of its own."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _open_standard_streams() -> None:
    """Put the null device where a standard stream is closed.

    Otherwise the next file that is opened gets its number, and what a library writes to standard
    error ends up in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    sys.exit(main())
