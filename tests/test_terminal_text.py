"""Text on a terminal and in a pipe, and the keys that are typed meanwhile."""

import json
import os
import pty
import sys
import termios

import pytest
from commands import clocher
from weight_files import LLAMA

from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.console import quiet_keys


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
