"""The processes `clocher` and `clocher-run`. Signal handlers precede any slow import."""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from clocher_runtime.exit_codes import cause_of, exit_code, ignore, listen, restore

_COLLECT_AFTER = 50_000
"""Objects made before a garbage collection."""


def clocher(argv: Sequence[str] | None = None) -> int:
    """Run `clocher NAME ...` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if words[:1] == ["run"]:
        return _run(words[1:], "clocher run", owns_process=argv is None)
    if argv is None:
        _open_standard_streams()
    try:
        if "_CLOCHER_COMPLETE" in os.environ:
            from clocher_runtime.subcommands.table import answer_shell

            return answer_shell()
        from clocher_runtime.subcommands.table import dispatch

        return dispatch(words)
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of standard output: subcommands report all others themselves
        _stdout_failed(error, "clocher")
        return 1
    finally:
        if argv is None:
            _flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `clocher-run` and return its exit code."""
    return _run(sys.argv[1:] if argv is None else argv, "clocher-run", owns_process=argv is None)


def _run(words: Sequence[str], name: str, owns_process: bool) -> int:
    before = listen()
    if owns_process:
        # Modules stay: collecting among them takes 0.05 s of a start. `run` enables it.
        gc.disable()
        gc.set_threshold(_COLLECT_AFTER)
        _open_standard_streams()
    try:
        try:
            # Most of a short run: a signal may well arrive here.
            from clocher_runtime.command.clocher_run import command

            text, code = command(words, _emit, name)
            ignore(before)  # from here on nothing changes the answer
        except BaseException as error:  # a signal, which C code may have replaced
            signal = cause_of(error)
            if not isinstance(signal, KeyboardInterrupt):
                raise
            from clocher_runtime.command.console import error_line, to_json

            shown = sys.stdout is not None and sys.stdout.isatty() and "--json" not in sys.argv
            text, code = None if shown else to_json(error_line(signal)), int(exit_code(signal))
            ignore(before)
        return code if text is None or _emit(text, name) else 1
    finally:
        if owns_process:
            _flush()
        else:
            restore(before)


def _emit(text: str, name: str = "clocher-run") -> bool:
    if sys.stdout is None:
        return False
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        _stdout_failed(error, name)
        return False
    return True


def _stdout_failed(error: OSError, name: str) -> None:
    # Python flushes again when it exits, and must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
