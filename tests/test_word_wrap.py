"""Text that is written piece by piece breaks between words, whatever the width of the terminal."""

import json
import os
import pty
import random
import re
import sys
import termios

import pytest
from commands import clocher
from terminal import Terminal
from weight_files import LLAMA

from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.console import WordWrap, quiet_keys

TEXT = (
    "The quick brown fox, jumping over a rather lazy dog; and then: supercalifragilistic "
    "expialidocious!\n    indented = code(with, arguments)\n\n\ttab\tstops\tare\there and a path "
    + "/a/very/long/path" * 9
    + " at the end. 漢字仮名交じり文は単語の間に空白がない。 Done."
)


class Screen:
    """What a terminal of some width shows of what is written to it."""

    def __init__(self, width: int) -> None:
        self.lines, self.column, self.width = [""], 0, width

    def write(self, text: str) -> None:
        for found in re.finditer(r"\x1b\[(\d*)([DK])|(.)|\n", text):
            count, move, char = found.groups()
            if move == "D":
                self.column -= int(count)
            elif move == "K":
                self.lines[-1] = self.lines[-1][: self.column]
            elif char is None:
                self.lines.append("")
                self.column = 0
            else:
                cells = 8 - self.column % 8 if char == "\t" else 2 if char > "\u2e80" else 1
                self.lines[-1] += char if cells < 3 and char != "\t" else " " * cells
                self.lines[-1] += "\0" * (char > "\u2e80")  # the other half of a wide one
                self.column += cells
                assert self.column < self.width, "the terminal breaks the line"


@pytest.mark.parametrize("width", [40, 47, 60, 80, 100])
@pytest.mark.parametrize("largest", [1, 3, 12, 1000])
def test_words_are_whole(width: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(WordWrap, "_width", lambda self: width)
    screen, rest, rng = Screen(width), TEXT, random.Random(width * largest)
    wrap = WordWrap(None)  # type: ignore[arg-type]
    while rest:
        size = rng.randint(1, largest)
        screen.write(wrap(rest[:size]))
        rest = rest[size:]
    shown = "\n".join(screen.lines).replace("\0", "")
    words = {word for word in TEXT.split() if word.isascii() and len(word) < width - 1}
    assert words <= set(shown.split())
    assert "".join(shown.split()) == "".join(TEXT.split())


@pytest.mark.parametrize(("term", "columns"), [("dumb", 60), ("xterm", 0)])
def test_a_terminal_that_tells_nothing_gets_the_text_as_it_is(
    term: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(
        "os.get_terminal_size", lambda _: __import__("os").terminal_size((columns, 0))
    )
    with open("/dev/null", "w") as stream:
        assert WordWrap(stream)(TEXT) == TEXT


def test_a_chat_on_a_terminal() -> None:
    with Terminal("clocher", "chat", "--temperature", "0", "--max-new", "60") as terminal:
        terminal.resize(24, 50)
        terminal.until(">>> ")
        terminal.type("def read_lines(path):\n")
        terminal.until("[60 tokens")
        terminal.type("/exit\n")
        code, shown = terminal.end()
    assert code == 0
    screen = Screen(50)
    screen.write(re.sub(r"\x1b\[[0-9;?]*[A-CE-JL-Za-z]|\r|\x07", "", shown.partition(">>> ")[2]))
    figures = re.search(r"\[60 tokens[^]]*\]", shown)
    assert figures and "\n" in figures[0] and "context" in figures[0]


def test_a_question_on_the_command_line_is_answered_once() -> None:
    flags = ["--temperature", "0", "--max-new", "8", "--no-stats"]
    model = str(embedded_model())
    code, out, err = clocher("chat", model, "def read_lines(path):", *flags)
    assert code == 0 and out.strip() and "error" not in err
    assert clocher("chat", model, *flags, input="def read_lines(path):")[1] == out


def test_a_completion_by_a_chat_model_says_that_no_template_is_applied() -> None:
    _, out, err = clocher("run", str(LLAMA), "--prompt", "a", "--max-new", "1")
    assert f'`clocher chat {LLAMA} "QUESTION"` does' in err and json.loads(out)["status"] == "ok"
    assert "QUESTION" not in clocher("run", "--prompt", "a", "--max-new", "1")[2]


def test_keys_are_not_shown_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(stdin)
        assert before[3] & termios.ECHO
        with pytest.raises(KeyboardInterrupt), quiet_keys():
            assert not termios.tcgetattr(stdin)[3] & termios.ECHO
            raise KeyboardInterrupt
        assert termios.tcgetattr(stdin) == before
