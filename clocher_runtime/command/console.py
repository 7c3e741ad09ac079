"""What a person sees of a run, on standard error. Standard output belongs to the JSON line."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

COMPILING = "compiling kernels (once)"
PACKING = "packing weights, MiB"
_QUARTERS = 4

# A completion may hold any bytes; a terminal must not obey them.
_CONTROL = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
_INERT = dict.fromkeys(_CONTROL, "\N{REPLACEMENT CHARACTER}")


class Console:
    """Writes to standard error, and stops quietly when nobody reads it any more.

    Use it as a context manager: leaving it ends an open progress bar.

    Args:
        stream: where to write; None: standard error.
        name: of the command, before its messages.
    """

    def __init__(self, stream: TextIO | None = None, name: str = "clocher-run") -> None:
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        # Python has no stream where the process was started with standard error closed.
        self._has_reader = self._stream is not None
        self._is_terminal = self._has_reader and self._stream.isatty()
        self._at_line_start = True
        self._bar: tuple[Progress, TaskID] | None = None
        self._shown = ("", -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_bar()
        self.end_line()

    def note(self, text: str) -> None:
        """Write a message on a line of its own."""
        self.end_line()
        self.completion(f"{self._name}: {text}\n")

    def completion(self, text: str) -> None:
        """Write a piece of generated text, at once."""
        if text:
            self._at_line_start = text.endswith("\n")
            self._write(text.translate(_INERT) if self._is_terminal else text)

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
            self.note(f"{label}: {done} of {total}")

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

    def _write(self, text: str) -> None:
        if self._has_reader:
            self._guarded(lambda: self._put(text))

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _guarded(self, write: Callable[[], object]) -> None:
        """Write, unless nobody reads it: a terminal that is gone must not end a run."""
        try:
            write()
        except (OSError, ValueError):
            self._has_reader = False
