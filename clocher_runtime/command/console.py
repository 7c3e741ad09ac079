"""What a person sees of a run: messages on standard error, texts where they are wanted.

Standard output belongs to the JSON line unless it is a terminal.
"""

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TextIO

from clocher_runtime.command.word_wrap import WordWrap

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

COMPILING = "compiling kernels (once)"
PACKING = "packing weights"
_QUARTERS = 4
_ECHOED_CHARS = 2000
_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"

# A completion may hold any bytes; a terminal must not obey them.
# Nor may it turn round what stands beside it: U+202A to U+202E and U+2066 to U+2069 do.
_TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CONTROL = {*range(32), *range(127, 160), *_TURNING} - {ord("\n"), ord("\t")}
_INERT = dict.fromkeys(_CONTROL, "\N{REPLACEMENT CHARACTER}")


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person sees what is written to a stream."""
    return stream is not None and stream.isatty()


def inert(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return text.translate(_INERT)


def dim(text: str) -> str:
    """Return a text as a terminal shows it dim, unless NO_COLOR or TERM=dumb forbid that."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"{_DIM}{text}{_BRIGHT}"


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keep what is typed from being shown, while a text is written to the same terminal.

    It is not lost: the next prompt, or the shell, gets it.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _amount(label: str, done: int, total: int) -> str:
    """Return how much is done: weights in the unit that fits all of them, others as a count."""
    if label != PACKING:
        return f"{done} of {total}"
    return f"{done} of {total} MiB" if total < 10_240 else f"{done >> 10} of {total >> 10} GiB"


class Console:
    """Writes to standard error, and stops quietly when nobody reads it any more.

    Use it as a context manager: leaving it ends an open progress bar.

    Args:
        stream: where to write; None: standard error.
        name: of the command, before its messages.
    """

    def __init__(self, stream: TextIO | None = None, name: str = "clocher-run") -> None:
        self._name = name
        self._stream = self._texts = sys.stderr if stream is None else stream
        # Python has no stream where the process was started with standard error closed.
        self._has_reader = self._stream is not None
        self._is_terminal = self._has_reader and self._stream.isatty()
        self._at_line_start = True
        self._wraps: dict[TextIO, WordWrap] = {}
        self._bar: tuple[Progress, TaskID] | None = None
        self._shown = ("", -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()
        self.end_line()

    def show_texts_on(self, stream: TextIO) -> None:
        """Write generated texts to another stream from now on."""
        self._texts = stream

    def note(self, text: str) -> None:
        """Write a message on a line of its own."""
        self.end_line()
        self._write(self._stream, f"{self._name}: {text}\n")

    def prompt(self, text: str) -> None:
        """Write the text that is gone on with, dim, where texts go to a terminal."""
        if is_terminal(self._texts):
            text = text if len(text) <= _ECHOED_CHARS else f"...{text[-_ECHOED_CHARS:]}"
            self._at_line_start = text.endswith("\n")
            self._write(self._texts, text, is_dim=True)

    def completion(self, text: str) -> None:
        """Write a piece of generated text, at once."""
        if text:
            self._at_line_start = text.endswith("\n")
            self._write(self._texts, text)

    def end_line(self) -> None:
        """Begin a new line unless one has just begun."""
        if not self._at_line_start:
            self.completion("\n")

    def compiling(self, done: int, total: int) -> None:
        """Show how far the compilation of kernels is: a bar on a terminal, else a few lines."""
        self._advance(COMPILING, done, total)

    def packing(self, done: int, total: int) -> None:
        """Show how far the packing of weights is."""
        self._advance(PACKING, done, total)

    def _advance(self, label: str, done: int, total: int) -> None:
        if self._is_terminal:
            if self._has_reader:
                self._guarded(lambda: self._advance_bar(label, done, total))
            return
        quarter = _QUARTERS * done // max(total, 1)
        if label != self._shown[0] or quarter > self._shown[1]:
            self._shown = label, quarter
            self.note(f"{label}: {_amount(label, done, total)}")

    def _advance_bar(self, label: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console as RichConsole
            from rich.progress import Progress

            progress = Progress(console=RichConsole(file=self._stream), transient=True)
            progress.start()
            self._bar = progress, progress.add_task(label, total=total)
        progress, task = self._bar
        progress.update(task, completed=done, total=total)
        if done >= total:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            (progress, _), self._bar = self._bar, None
            self._guarded(progress.stop)

    def _write(self, stream: TextIO, text: str, is_dim: bool = False) -> None:
        if self._has_reader:
            if is_terminal(stream):
                text = self._wraps.setdefault(stream, WordWrap(stream))(inert(text))
                text = dim(text) if is_dim else text
            self._guarded(lambda: self._put(stream, text))

    def _put(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()

    def _guarded(self, write: Callable[[], object]) -> None:
        """Write, unless nobody reads it: a terminal that is gone must not end a run."""
        try:
            write()
        except (OSError, ValueError):
            self._has_reader = False
