"""Output of a run: texts and messages for people, and the line of JSON for programs.

Standard output is for that line unless it is a terminal; docs/json-line.md describes its keys.
"""

import errno
import json
import os
import sys
import termios
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

from clocher_kernels import __version__
from clocher_kernels.errors import ModelChanged
from clocher_runtime.exit_codes import ExitCode, Interrupt, Taken, as_refusal, exit_code, ignore

if TYPE_CHECKING:
    from rich.progress import Progress

Tell = Callable[[str, int, int], None]
"""Progress callback: label, done, total."""
T = TypeVar("T")
Line = Mapping[str, Any]
"""A run's line: keys in order; non-finite numbers become null."""
COMPILING = "compiling kernels (once)"
PACKING = "packing weights, MiB"
_FIRST_WORD_S, _LATER = 5.0, 1.5
_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"

# A completion may hold any bytes; a terminal must not interpret them.
# Nor may it reorder text by U+202A to U+202E and U+2066 to U+2069.
_TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CONTROL = {*range(32), *range(127, 160), *_TURNING} - {ord("\n"), ord("\t")}
_LOST = "\N{REPLACEMENT CHARACTER}"
_INERT = dict.fromkeys(_CONTROL, _LOST)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal."""
    return stream is not None and stream.isatty()


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Suppress the echo of typed keys while a text is written; they stay in the input buffer."""
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


class WordWrap:
    """Word wrap for streamed text; leaves the last column free, as terminals differ there."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._column, self._word = 0, ""  # the open word, of narrow characters

    def __call__(self, text: str) -> str:
        """Return the output for the next piece, which has no control characters."""
        if (edge := self._width() - 1) < 1:
            return text
        out: list[str] = []
        for char in text:
            cells = 8 - self._column % 8 if char == "\t" else 0 if char == "\n" else _cells(char)
            if char != "\n" and self._column + cells > edge:
                if char in " \t":
                    char = "\n"
                else:
                    out.append(self._next_line())
            if char == "\n":
                self._column, self._word = 0, ""
            else:
                self._column += cells
                # Wide characters may break anywhere.
                self._word = "" if cells > 1 or char in " \t" else self._word + char
            out.append(char)
        return "".join(out)

    def _next_line(self) -> str:
        cells = sum(map(_cells, self._word))
        if cells == self._column:  # it fills the line
            cells, self._word = 0, ""
        self._column = cells
        return f"\x1b[{cells}D\x1b[K\n{self._word}" if cells else "\n"

    def _width(self) -> int:
        if os.environ.get("TERM", "dumb") == "dumb":
            return 0
        try:
            return os.get_terminal_size(self._stream.fileno()).columns  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):  # no descriptor, or nothing like a terminal
            return 0


def _cells(char: str) -> int:
    if char < "\x7f":
        return 1
    from rich.cells import get_character_cell_size

    return get_character_cell_size(char)


class Screen:
    """An unbuffered stream. On a terminal, control characters of model text are made visible.

    `stream` None: the process has none. `may_be_lost`: then, and if its reader is gone, text is
    dropped; else OSError is raised.
    """

    def __init__(self, stream: TextIO | None, *, may_be_lost: bool = False) -> None:
        if stream is None and not may_be_lost:
            raise OSError(errno.EBADF, "closed")
        self.stream, self._may_be_lost = stream, may_be_lost
        self.is_terminal = is_terminal(stream)
        self._at_line_start = True
        self._wrap = WordWrap(stream)

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write text, dim only on a terminal; raises OSError."""
        if not text or self.stream is None:
            return
        self._at_line_start = text.endswith("\n")
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self.is_terminal:
            # Each piece resets its own style, so an abrupt exit leaves none.
            text = self._wrap(text.translate(_INERT))
            plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
            text = f"{_DIM}{text}{_BRIGHT}" if dim and not plain else text
        self.guarded(lambda stream: (stream.write(text), stream.flush()))

    def guarded(self, write: Callable[[TextIO], object]) -> None:
        """Write to the stream unless its reader is gone: a lost terminal must not end a run."""
        try:
            if self.stream is not None:
                write(self.stream)
        except OSError:
            if not self._may_be_lost:
                raise
            self.stream = None
        except ValueError:  # it is closed
            self.stream = None

    def line(self, text: str, *, dim: bool = False) -> None:
        """Write a line."""
        self.end_line()
        self.write(f"{text}\n", dim=dim)

    def end_line(self) -> None:
        """Start a new line unless at the start of one."""
        if not self._at_line_start:
            self.write("\n")


class Console:
    """Messages of a program on standard error (or `stream`); `texts` gets what a model writes.

    A context manager. `resumes`: what it does goes on when it is run again; `words`: those of the
    command; `taken`: the signals that it listens to. `echoes`: commands write to standard output
    themselves.
    """

    echoes = True

    def __init__(
        self,
        name: str = "clocher-run",
        stream: TextIO | None = None,
        *,
        resumes: bool = False,
        words: Sequence[str] = (),
        taken: Taken | None = None,
    ) -> None:
        self.name, self.words, self._resumes, self._taken = name, words, resumes, taken or []
        # Python has no stream if standard error was closed at the start.
        self._notes = Screen(sys.stderr if stream is None else stream, may_be_lost=True)
        self.texts = self._notes
        self._bar: Progress | None = None
        self._due = 0.0  # seconds of a job until it is shown, where there is no terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        self.texts.end_line()

    def say(self, text: str) -> None:
        """Write a line with the program's name."""
        self.texts.end_line()
        self._notes.line(f"{self.name}: {text}")

    def note(self, text: str) -> None:
        """Write a line without it; a bar of progress begins anew below."""
        self._stop()
        self._notes.line(text)

    def ended(self, raised: BaseException) -> tuple[BaseException, ExitCode]:
        """Write the error that ended a command; return the error to report, and the exit code."""
        error = as_refusal(raised)
        code = exit_code(error)
        if code == ExitCode.BUG:
            import traceback  # late: its import is slow

            self.say("".join(traceback.format_exception(error)).rstrip())
        elif isinstance(error, KeyboardInterrupt):
            how = "interrupted" if code == ExitCode.INTERRUPTED else f"ended by {error}"
            self.say(how + "; run it again to go on" * self._resumes)
        else:
            self.say(f"error: {error or type(error).__name__}")
        return error, code

    def lost(self, message: str) -> None:
        """Write the error of a process that ends because a model file is gone."""
        with self:
            self.say(f"error: {message}")

    def _load(self, what: str, done: int, total: int) -> None:
        self._tell(what, done, total)
        if done >= total:
            self._stop()

    compiling = partialmethod(_load, COMPILING)
    packing = partialmethod(_load, PACKING)

    def disk(self, source: Path | str, target: Path, nbytes: int) -> None:
        """Write how much disk space is needed."""
        from clocher_runtime.disk.output_file import check_free

        free = check_free(target, 0)
        self.note(f"{source} -> {target}: needs {size(nbytes)} of disk, {size(free)} free")

    def progress(self, total: int, work: Callable[[Callable[[int, str], None]], T]) -> T:
        """Show progress through `total` bytes; `work` gets a callback for (bytes done, name)."""
        with self.counting(in_bytes=True) as tell:
            result = work(lambda nbytes, name: tell(name, nbytes, total))
            tell("done", total, total)
        return result

    @contextmanager
    def counting(self, *, in_bytes: bool = False) -> Iterator[Tell]:
        """Show progress; yield a callback for (label, done, total)."""
        try:
            yield partial(self._tell, in_bytes=in_bytes)
        finally:
            self._stop()

    def _tell(self, what: str, done: int, total: int, *, in_bytes: bool = False) -> None:
        """Show a bar on a terminal; else write a line after some seconds, and ever fewer."""
        bar = self._bar = self._bar or self._begun(in_bytes)
        task = bar.tasks[0]
        self._notes.guarded(
            lambda _: bar.update(task.id, completed=done, total=total, description=what)
        )
        elapsed = task.elapsed or 0.0
        if bar.disable and elapsed >= self._due:
            share = f"{100 * done // max(total, 1)} %"
            part = f"{size(done)} of {size(total)}" if in_bytes else share
            self.say(f"{what}: {part} after {elapsed:.0f} s")
            self._due = _LATER * elapsed

    def _begun(self, in_bytes: bool) -> "Progress":
        from rich import console, progress

        bar = progress.Progress(
            progress.BarColumn(),
            progress.DownloadColumn() if in_bytes else progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}", markup=False),
            console=console.Console(file=self._notes.stream),
            speed_estimate_period=1e9,  # a layer may take minutes
            transient=True,
            disable=not self._notes.is_terminal,
        )
        self._notes.guarded(lambda _: bar.start())
        bar.add_task("", total=None)
        self._due = _FIRST_WORD_S
        return bar

    def _stop(self) -> None:
        if bar := self._bar:
            self._bar = None
            self._notes.guarded(lambda _: bar.stop())


class RunConsole(Console):
    """The console of a run, whose last word is its line of JSON, where a program reads it."""

    echoes = False

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(name, **more)
        self.as_json = "--json" in self.words or not is_terminal(sys.stdout)

    def finish(self, line: Line) -> None:
        """Write the line; raises OSError. From here on no signal changes the answer."""
        ignore(self._taken)
        self._emit(line)

    def _emit(self, line: Line) -> None:
        if self.as_json:
            if sys.stdout is None:
                raise OSError(errno.EBADF, "closed", STDOUT)
            try:
                sys.stdout.write(f"{to_json(line)}\n")
                sys.stdout.flush()
            except OSError as error:
                error.filename = STDOUT
                raise

    def ended(self, raised: BaseException) -> tuple[BaseException, ExitCode]:
        """Write the error to both streams."""
        error, code = super().ended(raised)
        self.finish(error_line(error))
        return error, code

    def lost(self, message: str) -> None:
        """Write the error to both streams."""
        super().lost(message)
        self._emit(error_line(ModelChanged(message)))  # in any thread, where no signal can be set


STDOUT = "standard output"


def in_words(error: OSError, echoes: bool = True) -> str:
    """Return the message of an error of the system: where, what, and what to do.

    `echoes`: without a name of a file it may be one of standard output.
    """
    nameless = echoes and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)
    where = str(error.filename or "") or (STDOUT if nameless else "")
    advice = "" if where == STDOUT else _ADVICE.get(error.errno or 0, "") if where else ""
    return f"{where}: {error.strerror}{advice}" if error.strerror and where else str(error)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space, or name another disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; check its permissions"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "; name a directory"),
}


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return rows as columns, some aligned `right`; control characters are made visible."""
    inert = [
        ["".join(c if c.isprintable() else _LOST for c in cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*inert, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in inert
    )
    return "\n".join(line.rstrip() for line in lines)


def size(nbytes: int) -> str:
    """Return a size in bytes in a fitting unit."""
    from rich.filesize import decimal

    return decimal(nbytes)


SCHEMA = "clocher.run/1"


def head(status: str) -> dict[str, Any]:
    """Return the first keys of every line."""
    return {"schema": SCHEMA, "status": status, "version": __version__}


def error_line(error: BaseException) -> dict[str, Any]:
    """Return the line of an error; of an interrupted run with what it has generated."""
    kind = type(error).__name__
    made = error.outputs if isinstance(error, Interrupt) else None
    message = ": ".join([str(error) or kind, *getattr(error, "__notes__", ())])
    line = {"code": int(exit_code(error)), "type": kind, "message": message}
    return head("error") | line | ({} if made is None else {"outputs": made})


def to_json(line: Line) -> str:
    """Return a line as ASCII JSON on one line, NaN and infinities as null."""
    from clocher_runtime.disk.strict_json import finite

    return json.dumps(finite(line), allow_nan=False)
