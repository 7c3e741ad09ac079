"""`clocher chat`: conversations in a terminal and in a pipe, commands, Ctrl-C, hostile models."""

import errno
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import clean_environment, python
from serving import model_with_template
from terminal import Terminal, plain

import clocher_runtime as clocher
from clocher_kernels.errors import UsageError
from clocher_runtime.api import LanguageModel
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.console import Screen
from clocher_runtime.config.commands import CONTINUED, ChatConfig, settle
from clocher_runtime.config.values import declared
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.models.build import PAGE_CELLS
from clocher_runtime.subcommands.chat import chat
from clocher_runtime.subcommands.chat_talk import Talk, Typed
from clocher_runtime.text.answers import Delta
from clocher_runtime.text.chat_turn import ChatModel

TEMPLATE = (
    "{%- for m in messages -%}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>"
    "{%- endfor -%}{{ reasoning_effort }}"
    "{%- if add_generation_prompt -%}<|start|>assistant<|message|>{%- endif -%}"
)
CHAT = (sys.executable, "-m", "clocher_runtime", "chat")
TABLE = declared(ChatConfig)
LONG = "Write a loop over the lines of a file, and then another one over its words. " * 6


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "talker"
    return model_with_template(directory, embedded_model(), TEMPLATE)


@pytest.fixture(scope="module")
def loaded(talker: Path) -> Iterator[LanguageModel]:
    with clocher.load(talker, threads=1, context=512) as model:
        yield model


@pytest.fixture
def chat_model(loaded: LanguageModel) -> ChatModel:
    return ChatModel(loaded.session, loaded.tokenizer, by_template=True)


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let terminals have colours, whatever the one of the tests has."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def decide(flags: dict[str, str], environ: dict[str, str]) -> ChatConfig:
    return settle(ChatConfig, flags, environ)


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Keys:
    """What somebody types, in place of a terminal."""

    def __init__(self, *lines: str | Typed) -> None:
        self._lines = list(lines)

    def read(self) -> Typed:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        return line if isinstance(line, Typed) else Typed(line, is_block=False)

    def has_begun(self) -> bool:
        return False


class Shown:
    """A conversation whose screens are texts."""

    def __init__(self, model: ChatModel, is_terminal: bool = True, **settings: object) -> None:
        kind = Tty if is_terminal else io.StringIO
        self.out, self.notes = kind(), Tty()
        config = ChatConfig(**{"temperature": 0.0, "max_new": 24, **settings})  # type: ignore[arg-type]
        answers = Screen(self.out)
        self.talk = Talk(model, config, "a model", answers, Screen(self.notes))

    def type(self, *lines: str | Typed) -> str:
        """Type some lines; return what the notes say of them."""
        before = len(self.notes.getvalue())
        assert self.talk.hold(Keys(*lines)) == ExitCode.OK  # type: ignore[arg-type]
        return plain(self.notes.getvalue()[before:])

    def said(self) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.talk.messages]


@pytest.fixture
def shown(chat_model: ChatModel) -> Shown:
    return Shown(chat_model)


# What is computed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_the_api(
    loaded: LanguageModel, chat_model: ChatModel, temperature: float
) -> None:
    messages = [{"role": "user", "content": "Write a loop."}]
    for _ in range(2):
        ours = chat_model.answer(messages, Sampling(temperature, seed=7), 32)
        assert list(ours.parts())
        theirs = loaded.chat(messages, max_new=32, temperature=temperature, seed=7)
        assert tuple(ours.ids) == theirs.ids
        assert ours.message["content"] == theirs.text
        messages += [ours.message, {"role": "user", "content": "And one more."}]


def test_a_second_turn_computes_what_is_new_and_no_whole_page_more(chat_model: ChatModel) -> None:
    messages = [{"role": "user", "content": LONG}]
    first = chat_model.answer(messages, Sampling(), 80)
    list(first.parts())
    assert first.numbers.computed == first.numbers.prompt_tokens > 64
    messages += [first.message, {"role": "user", "content": "And one more."}]
    second = chat_model.answer(messages, Sampling(), 8)
    list(second.parts())
    # The token that was made last was never computed.
    before = [*first.prompt, *first.ids[:-1]]
    pairs = zip(before, second.prompt, strict=False)
    same = next((at for at, (old, new) in enumerate(pairs) if old != new), len(before))
    assert same >= len(first.prompt)
    new = second.numbers.prompt_tokens - same
    assert new <= second.numbers.computed == len(second.prompt) - same // PAGE_CELLS * PAGE_CELLS
    assert second.numbers.computed < new + PAGE_CELLS < len(second.prompt) / 2


def test_numbers_of_an_answer(chat_model: ChatModel) -> None:
    answer = chat_model.answer([{"role": "user", "content": "x"}], Sampling(), 9)
    assert answer.numbers.first_ns == answer.numbers.tokens == 0
    list(answer.parts())
    numbers = answer.numbers
    assert (numbers.tokens, numbers.decode_tokens, answer.ending) == (9, 8, "length")
    assert min(numbers.first_ns, numbers.decode_ns) > 0


def test_an_answer_stops_between_two_steps_and_the_next_one_finds_its_tokens(
    chat_model: ChatModel,
) -> None:
    messages = [{"role": "user", "content": f"{LONG} Now."}]
    answer = chat_model.answer(messages, Sampling())
    parts = answer.parts(lambda: len(answer.ids) >= 20)
    assert "".join(part.text for part in parts) == answer.message["content"]
    assert (answer.ending, len(answer.ids)) == ("stopped", 20)
    again = chat_model.answer(messages, Sampling(), 1)
    list(again.parts())
    assert again.numbers.computed <= PAGE_CELLS < len(again.prompt)


def test_text_that_no_template_puts_together_is_continued(loaded: LanguageModel) -> None:
    model = ChatModel(loaded.session, loaded.tokenizer, by_template=False)
    said = [{"role": "user", "content": "not sent"}, {"role": "user", "content": "def f(n):"}]
    answer = model.answer(said, Sampling(), 16)
    text = "".join(part.text for part in answer.parts())
    assert text == loaded.generate("def f(n):", 16)


# What is shown


THOUGHT = (Delta("reasoning", "Hm"), Delta("reasoning", "m."), Delta("content", "Yes."))
CALL = (
    Delta("reasoning", "I look."),
    Delta("tool_call", "look"),
    Delta("arguments", '{"at":'),
    Delta("arguments", "1}"),
    Delta("content", "Done."),
)


@pytest.mark.parametrize(
    ("said", "settings", "expected"),
    [
        (THOUGHT, {}, "\x1b[2m(thinking)\n\x1b[22m\x1b[2mHm\x1b[22m\x1b[2mm.\x1b[22m\n\nYes.\n"),
        (THOUGHT, {"hide_thinking": True}, "\x1b[2m(thinking)\n\x1b[22mYes.\n"),
        (THOUGHT, {"is_terminal": False}, "Yes.\n"),
        ((Delta("tool_call", "a"), Delta("tool_call", "b", 1)), {}, "[calls a] \n[calls b] \n"),
        (CALL, {"is_terminal": False}, '[calls look] {"at":1}\nDone.\n'),
        (
            CALL,
            {"hide_thinking": True},
            '\x1b[2m(thinking)\n\x1b[22m[calls look] {"at":1}\nDone.\n',
        ),
    ],
)
def test_thoughts_are_dim_and_calls_are_lines(
    chat_model: ChatModel, said: Sequence[Delta], settings: Mapping[str, bool], expected: str
) -> None:
    shown = Shown(chat_model, **settings)
    shown.talk._write(said)
    assert shown.out.getvalue() == expected


def test_a_terminal_obeys_nothing_of_an_answer(chat_model: ChatModel) -> None:
    shown = Shown(chat_model)
    hostile = "\x1b]0;owned\x07 \x1b[2J \x9b31m \r\x08 \x00"
    shown.talk._write([Delta("content", hostile)])
    assert not {*map(ord, shown.out.getvalue())} & ({*range(32), *range(127, 160)} - {10})
    shown.talk._write([Delta("reasoning", hostile)])
    thought = shown.out.getvalue().replace("\x1b[2m", "").replace("\x1b[22m", "")
    assert "\x1b" not in thought


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_no_colours_where_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    stream = Tty()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    Screen(stream).line("x", dim=True)
    assert stream.getvalue() == "x\n"


def test_a_screen_writes_what_its_encoding_has() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Screen(stream).write("é\n")
    assert stream.buffer.getvalue() == b"?\n"  # type: ignore[attr-defined]


# Commands


def test_two_turns_are_one_conversation_until_reset(shown: Shown, loaded: LanguageModel) -> None:
    notes = shown.type("Write a loop.", "And one more.")
    said = shown.said()
    assert [role for role, _ in said] == ["user", "assistant"] * 2
    assert said[2] == ("user", "And one more.")
    messages = shown.talk.messages
    assert loaded.chat(messages[:3], max_new=24).text == messages[3]["content"]
    assert notes.count("[24 tokens | ") == 2
    assert "cut after 24 tokens" in notes
    for command in ("/reset", "/clear", "/new"):
        assert "new conversation" in shown.type("x", command)
        assert shown.said() == []
    shown.type("Write a loop.")
    assert shown.said() == said[:2]


def test_undo_and_retry(shown: Shown) -> None:
    assert "nothing has been said yet" in shown.type("/undo")
    assert "nothing has been said yet" in shown.type("/retry")
    shown.type("one", "two")
    said = shown.said()
    shown.type("/retry")
    assert shown.said() == said  # at temperature 0
    assert "2 messages left" in shown.type("/undo")
    assert shown.said() == said[:2]


def test_retry_draws_another_answer_and_the_seed_says_which(shown: Shown) -> None:
    shown.type("/set temperature 1", "/set seed 5", "one")
    first = shown.said()
    shown.type("/retry")
    second = shown.said()
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert "seed of the last answer: 6" in shown.type("/show")
    shown.type("/reset", "/set seed 6", "one")
    assert shown.said() == second
    shown.type("/reset", "/set seed 5", "one")
    assert shown.said() == first
    seeds = {shown.type("/set seed random", "/retry", "/show").split("answer: ")[1] for _ in "ab"}
    assert len(seeds) == 2


def test_settings_between_answers(shown: Shown) -> None:
    assert "max_new is 3" in shown.type("/set max-new 3", "one")
    assert "[3 tokens | " in shown.type("/retry")
    assert "max_new is 24" in shown.type("/set max_new default")
    assert "temperature 0.2" in shown.type("/set temperature 0.2", "/show")
    for wrong, told in (
        ("/set", "/set takes one of"),
        ("/set context 5", "/set takes one of"),
        ("/set top_p", "/set takes one of"),
        ("/set top_p 7", "/set top_p: got '7', expected a number from"),
        ("/set seed -1", "expected random or an integer"),
    ):
        notes = shown.type(wrong)
        assert told in notes
        assert notes.count("\n") == 2  # and the one of Ctrl-D


def test_the_system_message(chat_model: ChatModel, loaded: LanguageModel) -> None:
    shown = Shown(chat_model, system="Be brief.")
    shown.type("one")
    assert [role for role, _ in shown.said()] == ["system", "user", "assistant"]
    assert loaded.chat(shown.talk.messages[:2], max_new=24).text == shown.said()[2][1]
    shown.type("/system Be long.")
    assert shown.said()[0] == ("system", "Be long.")
    assert len(shown.said()) == 3
    assert "system: Be long." in shown.type("/show")
    shown.type("/reset")
    assert shown.said() == [("system", "Be long.")]
    shown.type("/system")
    assert shown.said() == []


def test_what_is_a_message_and_what_a_command(shown: Shown) -> None:
    notes = shown.type("", "   ", "/nix", "/ x", "/RESET", "/help")
    assert shown.said() == []
    assert notes.count("/help lists them") == 3
    for command in ("/retry", "/undo", "/exit", "Ctrl-C"):
        assert command in notes
    shown.type("//etc is a folder", Typed("/reset\nis a command", is_block=True))
    assert shown.said()[0] == ("user", "/etc is a folder")
    assert shown.said()[2] == ("user", "/reset\nis a command")


@pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
def test_leaving(shown: Shown, command: str) -> None:
    shown.type(command, "one")
    assert shown.said() == []


def test_a_full_context_says_so_and_loses_nothing(shown: Shown) -> None:
    shown.type("/set max_new default", "/set max_new 100000")
    notes = shown.type("Write a loop.")
    assert "the context is full: 512 tokens; /undo" in notes
    assert "raise --context (at most 4096)" in notes
    said = shown.said()
    assert len(said) == 2
    notes = shown.type("And one more.")
    assert "tokens with all that was said, and the context holds 512" in notes
    assert "/reset begins a new conversation" in notes
    assert shown.said() == said
    notes = shown.type("/reset", "x " * 600)
    assert "tokens with all that was said, and the context holds 512" in notes
    assert shown.said() == []
    assert "characters are too many" in shown.type("x" * 1_000_000)
    assert "[24 tokens" in shown.type("/set max_new default", "one")


def test_one_answer_is_advised_about_flags_alone(chat_model: ChatModel) -> None:
    for most, told in ((24, "--max-new N allows more"), (100_000, "shorten the text, or raise")):
        shown = Shown(chat_model, max_new=most)
        shown.talk.say("Write a loop.")
        notes = shown.notes.getvalue()
        assert told in notes and "/set" not in notes and "/undo" not in notes


def test_a_terminal_obeys_nothing_of_a_message(shown: Shown) -> None:
    shown.type("/system \x1b]0;owned\x07\x1b[2J", "/show", "/set \x1b[2J 1")
    raw = shown.notes.getvalue().replace("\x1b[2m", "").replace("\x1b[22m", "")
    assert "owned" in raw
    assert "\x1b" not in raw
    assert "\x07" not in raw


def test_a_model_that_continues_text_sends_one_text_at_a_time(loaded: LanguageModel) -> None:
    model = ChatModel(loaded.session, loaded.tokenizer, by_template=False)
    shown = Shown(model, max_new=None)
    shown.type("def f(n):", "class Stack:")
    assert shown.said()[3][1] == loaded.generate("class Stack:", CONTINUED)
    assert "\x1b[2mclass Stack:\x1b[22m" in shown.out.getvalue()
    assert "there is no system message" in shown.type("/system x")
    piped = Shown(model, is_terminal=False)
    piped.talk.say("class Stack:")
    assert piped.out.getvalue().rstrip("\n") == piped.said()[1][1].rstrip("\n")


# The command in a pipe


Pipe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Pipe:
    """Run the command in this process and an empty directory, with a message from a pipe.

    The function takes the message and flags, and variables by name; it returns (code, standard
    output, standard error).
    """
    monkeypatch.chdir(tmp_path)
    for variable in chat_variables():
        monkeypatch.delenv(variable, raising=False)

    def run(message: str | bytes, *flags: object, **env: str) -> tuple[int, str, str]:
        given = message.encode() if isinstance(message, str) else message
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
            for variable, value in env.items():
                patch.setenv(variable, value)
            code = chat.run(list(map(str, flags)))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def chat_variables() -> set[str]:
    return {variable for setting in TABLE.values() for variable in setting.env}


def test_a_pipe_gets_the_answer_and_nothing_else(
    pipe: Pipe, talker: Path, loaded: LanguageModel
) -> None:
    question = "Write a loop.\nIn two lines."
    code, out, err = pipe(f"{question}\n", "--max-new", 20, talker, "--temperature", 0)
    answer = loaded.chat([{"role": "user", "content": question}], max_new=20).text
    assert (code, out) == (0, answer if answer.endswith("\n") else f"{answer}\n")
    assert "[20 tokens | " in err
    assert "\x1b" not in err
    assert ">>>" not in err


def test_the_embedded_model_continues_text_and_says_so(pipe: Pipe) -> None:
    code, out, err = pipe("def f(n):", "--temperature", 0, "--no-stats")
    with clocher.load() as model:
        text = model.generate("def f(n):", CONTINUED)
    assert (code, out.rstrip("\n")) == (0, text.rstrip("\n"))
    lines = err.splitlines()
    assert len(lines) == 2
    assert "clocher chat MODEL" in lines[0]
    assert "clocher models" in lines[0]
    assert "was not trained to chat" in lines[1]


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_gives_the_answer_of_the_api(
    pipe: Pipe, talker: Path, loaded: LanguageModel, seed: int
) -> None:
    flags = ("--max-new", 16, "--temperature", 1, "--seed", seed, talker)
    _, out, _ = pipe("Write a loop.", *flags)
    said = [{"role": "user", "content": "Write a loop."}]
    answer = loaded.chat(said, max_new=16, temperature=1.0, seed=seed).text
    assert out.rstrip("\n") == answer.rstrip("\n")


@pytest.mark.parametrize(
    ("given", "flags", "code", "told"),
    [
        (b"", [], 2, "standard input has nothing"),
        (b" \n\n", [], 2, "standard input has nothing"),
        (b"x", ["--prompt", " "], 2, "the question has nothing"),
        (b"\xff", [], 2, "not UTF-8"),
        (b"x", ["--nix"], 2, "No such option"),
        (b"x", ["--temperature", "hot"], 2, "--temperature: got 'hot', expected a number"),
        (b"x", ["--seed", "-1"], 2, "--seed: got '-1'"),
        (b"x", ["--max-new", "0"], 2, "--max-new: got '0'"),
        (b"x", ["one", "two", "three"], 2, "unexpected extra argument"),
        (b"x", ["--reasoning-effort", "huge"], 2, "expected one of none, minimal, low, medium"),
        (b"x", ["no-such-directory"], 3, "no-such-directory"),
        (b"x", ["--config", "no-such-file"], 2, "no-such-file"),
        (
            *(b"x", ["--chat-template", "vicuna"], 2),
            "--chat-template vicuna: no such file; expected a Jinja file, or one of chatml, ",
        ),
    ],
)
def test_mistakes_are_one_line(
    pipe: Pipe, given: bytes, flags: list[str], code: int, told: str
) -> None:
    got, out, err = pipe(given, *flags)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("clocher chat: error: ")
    assert told in err


@pytest.mark.parametrize("flags", [["--system", "x"], ["--reasoning-effort", "low"]])
def test_settings_of_conversations_need_one(pipe: Pipe, flags: list[str]) -> None:
    code, out, err = pipe("x", *flags)
    assert (code, out) == (2, "")
    assert f"{flags[0]}: clocher-tiny-gptoss is no chat model" in err.splitlines()[-1]


def test_the_template_reads_the_reasoning_effort(pipe: Pipe, talker: Path, tmp_path: Path) -> None:
    with clocher.load(talker, threads=1) as model:
        messages = [{"role": "user", "content": "x"}]
        expected = model.chat(messages, max_new=8, reasoning_effort="high").text
    flags = ("--reasoning-effort", "high", "--temperature", 0, "--max-new", 8)
    assert pipe("x", talker, *flags)[1].rstrip("\n") == expected.rstrip("\n")
    most = (flags[0], "xhigh", *flags[2:])
    assert pipe("x", talker, *most)[1].rstrip("\n") == expected.rstrip("\n"), "the nearest"
    deaf = model_with_template(
        tmp_path / "deaf", talker, TEMPLATE.replace("reasoning_effort", "''")
    )
    code, out, err = pipe("x", deaf, *flags)
    assert (code, out) == (2, "")
    assert "'reasoning_effort' is neither" in err


def test_a_template_that_is_none_is_code_3(pipe: Pipe, talker: Path, tmp_path: Path) -> None:
    broken = model_with_template(tmp_path / "broken", talker, "{% for %}")
    code, out, err = pipe("x", broken)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "chat template" in err


def test_a_template_may_be_given(
    pipe: Pipe, talker: Path, loaded: LanguageModel, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    flags = ("--chat-template", tmp_path / "own.jinja", "--temperature", 0, "--max-new", 8)
    expected = loaded.generate("def f!", max_new=8).rstrip("\n")
    for model in (talker, "--no-stats"):  # the second one is the embedded model
        assert pipe("def f", model, *flags, CLOCHER_EMBEDDED="1")[1].rstrip("\n") == expected
    (tmp_path / "bad.jinja").write_text("{% for %}")
    code, out, err = pipe("x", talker, "--chat-template", tmp_path / "bad.jinja")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "bad.jinja: chat template: " in err and "; expected a Jinja file, or one of" in err
    assert "variable" not in pipe("x", talker, *flags[2:], CLOCHER_CHAT_TEMPLATE="chatml")[2]


def test_a_file_of_settings(pipe: Pipe, talker: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'max_new = 5\ntemperature = 0\nmodel_dir = "{talker}"\n')
    code, _, err = pipe("x", "--config", tmp_path / "c.toml")
    assert code == 0
    assert "[5 tokens" in err
    assert "[7 tokens" in pipe("x", talker, CLOCHER_MAX_NEW="7")[2]


def test_nobody_reads_the_answer() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        CHAT,
        input=b"def f(n):",
        stdout=writer,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        timeout=120,
    )
    os.close(writer)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2  # what the model is; no word of the pipe


@pytest.mark.parametrize(
    ("redirection", "told"), [(">/dev/full", os.strerror(errno.ENOSPC)), (">&-", "closed")]
)
def test_an_answer_that_cannot_be_written_is_code_1(redirection: str, told: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *CHAT, "--help"],
        input=b"",
        stderr=subprocess.PIPE,
        env=clean_environment(),
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.decode() == f"clocher chat: error: standard output: {told}\n"


def test_help_has_examples_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.run(["-h"]) == 0
    out, _ = capsys.readouterr()
    assert out.index("clocher chat MODEL") < out.index("--temperature")
    assert "default: 0.7" in out


def test_importing_the_command_is_cheap() -> None:
    probe = "import sys, clocher_runtime.subcommands.chat; print(*sys.modules)"
    loaded = set(python("-c", probe).stdout.split())
    assert not loaded & {"numpy", "numba", "huggingface_hub", "tokenizers", "jinja2", "readline"}


# The command at a terminal


def at_terminal(*flags: object, **options: Any) -> Terminal:
    return Terminal("clocher", "chat", *map(str, flags), **options)


def test_a_conversation_at_a_terminal(talker: Path, loaded: LanguageModel) -> None:
    flags = ("--temperature", 0, "--max-new", 16, talker)
    with at_terminal(*flags) as terminal:
        assert "/help lists commands" in terminal.until(">>> ")
        terminal.type("Write a loop.\n")
        first = terminal.until(">>> ")
        terminal.type("And one more.\n")
        second = terminal.until(">>> ")
        terminal.type("/reset\nWrite a loop.\n")
        terminal.until(">>> ")
        assert terminal.until(">>> ").split("\n[")[0] == first.split("\n[")[0]
        terminal.type('"""one\n')
        terminal.until("... ")
        terminal.type('two"""\n')
        terminal.until(">>> ")
        terminal.type("\x1b[A\x1b[A\n")  # the line before the last one: a history of lines
        assert terminal.until("... ").endswith('"""one\n')
        terminal.type('"""\n')
        terminal.until(">>> ")
        terminal.type("\x04")
        assert terminal.end()[0] == 0
        assert terminal.settings() == terminal.before
    said = [{"role": "user", "content": "Write a loop."}]
    answer = loaded.chat(said, max_new=16).text
    assert first.startswith(f"Write a loop.\n{answer.rstrip()}")
    said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And one more."}]
    assert second.startswith(f"And one more.\n{loaded.chat(said, max_new=16).text.rstrip()}")


def test_pasted_lines_are_one_message(talker: Path) -> None:
    with at_terminal("--temperature", 0, "--max-new", 4, talker) as terminal:
        terminal.until(">>> ")
        terminal.type("\x1b[200~one\ntwo\nthree\x1b[201~\n")
        terminal.until(" computed)")
        terminal.until(">>> ")
        terminal.type("/show\n")
        assert "2 messages" in terminal.until(">>> ")
        terminal.type("\x04")
        assert terminal.end()[0] == 0


def test_ctrl_c_stops_an_answer_and_then_leaves(talker: Path) -> None:
    with at_terminal("--temperature", 0, talker) as terminal:
        terminal.until(">>> ")
        terminal.type(f"{LONG}\n")
        terminal.until("self")
        terminal.type("\x03")
        shown = terminal.until(">>> ")
        assert "\nstopped\n[" in shown
        terminal.type("/set max_new 4\n")
        terminal.until(">>> ")
        terminal.type("And one more.\n")
        terminal.until("| prompt ")
        tokens, computed = map(int, terminal.until(" computed)").split(" ("))
        assert computed <= tokens - PAGE_CELLS  # what was computed before is still there
        terminal.until(">>> ")
        terminal.type("half a line")
        terminal.until("half a line")
        terminal.type("\x03")
        assert "leaves" not in terminal.until(">>> ")
        terminal.type("\x03")
        assert "Ctrl-C again, Ctrl-D or /exit leaves" in terminal.until(">>> ")
        terminal.type("/show\n")  # between the two: the first one is forgotten
        assert "4 messages" in terminal.until(">>> ")
        terminal.type("\x03")
        terminal.until(">>> ")
        terminal.type("\x03")
        assert terminal.end()[0] == 130
        assert terminal.settings() == terminal.before
        assert "Traceback" not in terminal.shown


def test_ctrl_c_pressed_twice_leaves(talker: Path) -> None:
    with at_terminal("--temperature", 0, talker) as terminal:
        terminal.until(">>> ")
        terminal.type(f"{LONG}\n")
        terminal.until("self")
        terminal.type("\x03")
        terminal.until(">>> ")  # the first one has stopped the answer
        terminal.type("\x03")
        assert terminal.end()[0] == 130
        assert "leaves" not in terminal.shown


@pytest.mark.parametrize("busy", [False, True], ids=["typing", "answering"])
def test_sigterm_leaves_with_its_code(talker: Path, busy: bool) -> None:
    with at_terminal("--temperature", 0, talker) as terminal:
        terminal.until(">>> ")
        if busy:
            terminal.type("Write a loop.\n")
            terminal.until("self")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end()[0] == 143
        assert terminal.settings() == terminal.before
        assert "Traceback" not in terminal.shown
        assert "ended by SIGTERM" in terminal.shown


def test_the_answer_goes_where_standard_output_goes(
    pipe: Pipe, talker: Path, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        flags = ("--temperature", 0, "--max-new", 16, talker)
        with at_terminal(*flags, stdout=out) as terminal:
            terminal.until(">>> ")
            terminal.type("Write a loop.\n")
            terminal.until(">>> ")
            terminal.type("/exit\n")
            assert terminal.end()[0] == 0
    written = (tmp_path / "out").read_text()
    assert written.rstrip("\n") == pipe("Write a loop.", *flags)[1].rstrip("\n")
    assert ">>>" not in written


def test_a_narrow_terminal_takes_a_long_line(talker: Path, tmp_path: Path) -> None:
    text = "Write a loop over the lines of a file, please, and be quick."
    flags = ("--temperature", 0, "--max-new", 8, talker)
    with at_terminal(*flags, cwd=tmp_path) as terminal:
        terminal.resize(8, 12)
        terminal.until(">>> ")
        terminal.type(f"{text}\n")
        terminal.until("[8")
        terminal.until(">>> ")
        terminal.type("/show\n")
        terminal.until("messages")
        terminal.type("/exit\n")
        assert terminal.end()[0] == 0


# Models that say what no model should


def model_that_says(directory: Path, source: Path, tokens: Sequence[int]) -> Path:
    """Return a copy of a model that, greedily, makes nothing but some tokens.

    They get rows of the output head in pairs, a row and its negative, and all others get zeros. One
    of a pair is above zero whatever the hidden state is.
    """
    shutil.copytree(source, directory)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + struct.unpack_from("<Q", data)[0]
    head = json.loads(data[8:start])["lm_head.weight"]
    rows, width = head["shape"]
    begin, end = (start + offset for offset in head["data_offsets"])
    weights = np.frombuffer(data, np.uint16, rows * width, begin).reshape(rows, width).copy()
    kept = weights[1000 : 1000 + len(tokens)].copy()
    weights[:] = 0
    for at, token in enumerate(tokens):
        weights[token] = kept[at - at % 2] ^ (0x8000 * (at % 2))
    data[begin:end] = weights.tobytes()
    file.write_bytes(data)
    return directory


def tokens_of_bytes(tokenizer: object, data: bytes) -> list[int]:
    """Return the token of each byte."""
    by_bytes = {tokenizer.token_bytes(token): token for token in range(9, 300)}  # type: ignore[attr-defined]
    return [by_bytes[bytes([byte])] for byte in data]


def test_a_terminal_obeys_no_model(
    pipe: Pipe, talker: Path, loaded: LanguageModel, tmp_path: Path
) -> None:
    tokens = tokens_of_bytes(loaded.tokenizer, b"\x1b[\x07\r2J\x08\x9b")
    hostile = model_that_says(tmp_path / "hostile", talker, tokens)
    flags = ("--temperature", 0, "--max-new", 60, "--no-stats", hostile)
    code, out, _ = pipe("x", *flags)
    assert code == 0
    assert {"\x1b", "\x07", "\r", "\x08"} & {*out}  # a pipe gets what the model made
    with at_terminal(*flags) as terminal:
        terminal.until(">>> ")
        terminal.type("x\n")
        terminal.until("x\n")
        terminal.until("cut after")
        terminal.until(">>> ")  # Ctrl-D before it would be the terminal's own
        terminal.type("\x04")
        assert terminal.end()[0] == 0
    raw = terminal.shown.partition(">>> x\n")[2].partition("cut after")[0]
    raw = raw.removeprefix("\x1b[?2004l\r")  # of the line editor
    assert "\N{REPLACEMENT CHARACTER}" in raw
    assert not {*map(ord, raw)} & ({*range(32), *range(127, 160)} - {10}), raw


def test_characters_in_several_tokens_come_whole(
    pipe: Pipe, talker: Path, loaded: LanguageModel, tmp_path: Path
) -> None:
    tokens = tokens_of_bytes(loaded.tokenizer, "é€é€😀".encode())
    source = model_that_says(tmp_path / "split", talker, tokens[:10])
    with clocher.load(source, threads=1) as model:
        answer = model.chat([{"role": "user", "content": "x"}], max_new=90)
        text = model.tokenizer.decode(answer.ids)
    assert max(map(ord, text)) > 127
    flags = ("--temperature", 0, "--max-new", 90, "--no-stats", source)
    assert pipe("x", *flags)[1] == f"{text}\n"
    with at_terminal(*flags) as terminal:
        terminal.until(">>> ")
        terminal.type("x\n")
        terminal.until("x\n")
        assert terminal.until("\ncut after") == text.translate(
            dict.fromkeys(range(127, 160), "\ufffd")
        )


def test_settings_that_a_chat_has_are_known_to_it() -> None:
    with pytest.raises(UsageError, match="temperature"):
        decide({"temperature": "x"}, {})
    config = decide({"seed": "random", "threads": "3"}, {})
    assert (config.seed, config.threads) == ("random", 3)
    assert not {"batch", "stub", "rounds", "trace_ids"} & set(TABLE)
