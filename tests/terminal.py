"""A command in a terminal of its own, as a person runs it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import Any, Self

from commands import clean_environment

ENTRY = "import sys; from clocher_runtime.cli import {}; sys.exit({}())"
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def plain(text: str) -> str:
    """Return a text without the sequences that a terminal obeys."""
    return _SEQUENCE.sub("", text)


class Terminal:
    """A process whose three standard streams are one terminal. Use it as a context manager.

    Keys such as Ctrl-C reach it as signals.

    Args:
        words: `clocher`, or `clocher-run`, and its arguments.
        cwd: where it runs.
        stdout: its standard output, if that is not the terminal.
        env: variables that it gets besides those of the tests.

    Attributes:
        shown: everything that the terminal got so far.
    """

    def __init__(self, *words: str, cwd: object = None, stdout: Any = None, **env: str) -> None:
        entry = {"clocher": "clocher", "clocher-run": "main"}[words[0]]
        command = [sys.executable, "-c", ENTRY.format(entry, entry), *words[1:]]
        self._own, theirs = pty.openpty()
        self.shown, self._past = "", 0
        self.before = self.settings()
        environment = clean_environment(**{"TERM": "xterm", **env})
        environment.pop("NO_COLOR", None) if "NO_COLOR" not in env else None
        self.process = subprocess.Popen(
            command,
            cwd=str(cwd) if cwd else None,
            env=environment,
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)

    def type(self, text: str) -> None:
        """Type a text; a line ends with a line feed."""
        os.write(self._own, text.encode())

    def settings(self) -> list[Any]:
        """Return how the terminal is set now."""
        return termios.tcgetattr(self._own)

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str, timeout: float = 120.0) -> str:
        """Return what a person sees up to a text, since what was waited for before."""
        limit = time.monotonic() + timeout
        while (found := plain(self.shown).find(text, self._past)) < 0:
            rest = plain(self.shown)[self._past :]
            assert time.monotonic() < limit, f"no {text!r} in {rest!r}"
            assert self._read(limit), f"it ended without {text!r}: {rest!r}"
        begin, self._past = self._past, found + len(text)
        return plain(self.shown)[begin:found]

    def end(self, timeout: float = 120.0) -> tuple[int, str]:
        """Return the exit code, and all that was shown."""
        limit = time.monotonic() + timeout
        while self._read(limit):
            assert time.monotonic() < limit, f"it does not end: {self.shown[-500:]!r}"
        return self.process.wait(timeout), self.shown

    def _read(self, limit: float) -> bool:
        """Take what there is; False at the end."""
        if not select.select([self._own], [], [], max(limit - time.monotonic(), 0))[0]:
            return True
        try:
            piece = os.read(self._own, 1 << 16)
        except OSError:  # EIO: the other end is closed
            return False
        self.shown += piece.decode(errors="replace").replace("\r\n", "\n")
        return bool(piece)


def in_terminal(*words: str, **more: str) -> tuple[int, str]:
    """Run a command to its end in a terminal: its exit code and what was shown."""
    with Terminal(*words, **more) as terminal:
        return terminal.end()
