"""Keyboard input of a chat, and Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

from clocher_runtime.command.console import Screen

_PATIENCE_S = 0.2
_FENCE = '"""'


class Typed(NamedTuple):
    """Typed text; `is_block`: it stood between marks, so it is no command."""

    text: str
    is_block: bool


class Typing:
    r"""Reads a line, or several between two \"\"\"; `prompts` gets prompts without line editing."""

    def __init__(self, prompts: Screen) -> None:
        self._prompts = prompts
        self._edits = False
        if sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty():
            with suppress(ImportError):  # Python built without it
                import readline  # its import gives input() line editing

                # Pasted text is one message, whatever lines it has.
                readline.parse_and_bind("set enable-bracketed-paste on")
                self._edits = True

    def read(self) -> Typed:
        """Return the next message or command; raises EOFError, UnicodeDecodeError."""
        first = self._line(">>> ")
        begun = first.lstrip()
        if not begun.startswith(_FENCE):
            return Typed(first, is_block=False)
        lines = [begun.removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            lines.append(self._line("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        # A line with only a mark is not part of the message.
        if len(lines) > 1:
            lines = lines[not lines[0] : len(lines) - (not lines[-1])]
        return Typed("\n".join(lines), is_block=True)

    def has_begun(self) -> bool:
        """Return whether the current line has text."""
        if not self._edits:
            return False
        import readline

        return bool(readline.get_line_buffer())

    def _line(self, prompt: str) -> str:
        try:
            with _heeding_signals():
                if self._edits:
                    return input(prompt)
                self._prompts.write(prompt)
                line = sys.stdin.readline()
        except OSError:  # the terminal hung up
            raise EOFError from None
        if not line:
            raise EOFError
        return line.removesuffix("\n")


@contextmanager
def _heeding_signals() -> Iterator[None]:
    """Handle a signal that arrives just before the wait for a key."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S, _PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C that does not only stop an answer; `when` is "typing", "empty" or "stopping" it."""

    def __init__(self, when: Literal["typing", "empty", "stopping"]) -> None:
        super().__init__("SIGINT")
        self.when = when


class CtrlC:
    """The Ctrl-C handler of a chat: stops an answer, else raises `Interrupted`."""

    def __init__(self, has_begun: Callable[[], bool]) -> None:
        self._has_begun = has_begun
        self._answers = self._stops = False
        self._before: Any = signal.SIG_IGN

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        """Let Ctrl-C stop an answer between steps; yield a function that returns whether."""
        self._answers, self._stops = True, False
        try:
            yield lambda: self._stops
        finally:
            self._answers = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._answers:
            raise Interrupted("typing" if self._has_begun() else "empty")
        if self._stops:
            raise Interrupted("stopping")
        self._stops = True
