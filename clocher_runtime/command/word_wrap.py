"""Text on a terminal, as it is made, without words broken at the right edge."""

import os
from typing import TextIO


class WordWrap:
    """Breaks lines between words. A word that reaches the edge moves to the next line.

    The last column stays free: a terminal that has filled it is in no known state.

    Args:
        stream: where the text goes. A terminal that does not tell its width, or cannot move its
            cursor (TERM=dumb), gets the text as it is.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._column = 0
        self._word, self._cells = "", 0  # of the word that is being written, and its width

    def __call__(self, text: str) -> str:
        """Return what to write for the next piece of a text without control characters."""
        edge = self._width() - 1
        if edge < 1:
            return text
        out: list[str] = []
        for char in text:
            if char == "\n":
                self._begin_line()
            elif char in " \t":
                cells = 1 if char == " " else 8 - self._column % 8
                if self._column + cells > edge:
                    char, cells = "\n", 0
                    self._begin_line()
                self._column += cells
                self._word, self._cells = "", 0
            else:
                cells = _cells(char)
                if self._column + cells > edge:
                    out.append(self._next_line())
                self._column += cells
                # Wide characters are words of their own.
                self._word = "" if cells > 1 else self._word + char
                self._cells = 0 if cells > 1 else self._cells + cells
            out.append(char)
        return "".join(out)

    def _begin_line(self) -> None:
        self._column, self._word, self._cells = 0, "", 0

    def _next_line(self) -> str:
        """Return what takes the word that has been begun to the next line, if it fits there."""
        word, cells = self._word, self._cells
        if cells == self._column:  # it fills the line
            self._begin_line()
            return "\n"
        self._column = cells
        return f"\x1b[{cells}D\x1b[K\n{word}" if cells else "\n"

    def _width(self) -> int:
        if os.environ.get("TERM", "dumb") == "dumb":
            return 0
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError, AttributeError):  # no descriptor, or nothing like a terminal
            return 0


def _cells(char: str) -> int:
    """Return how many columns a character takes."""
    if char < "\x7f":
        return 1
    from rich.cells import get_character_cell_size

    return get_character_cell_size(char)
