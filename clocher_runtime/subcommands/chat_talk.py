"""A conversation at a terminal: keys, messages, and commands with a slash."""

import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import FrameType
from typing import NamedTuple, Self

from clocher_kernels.errors import FormatError, NonFinite, UsageError, counted
from clocher_runtime.command.console import Screen, is_terminal, quiet_keys
from clocher_runtime.config.commands import CONTINUED, RANDOM, ChatConfig
from clocher_runtime.config.values import every
from clocher_runtime.engine import timing
from clocher_runtime.engine.arguments import NAMES, Sampling
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.text.answers import Delta, DeltaKind
from clocher_runtime.text.chat_template import Message
from clocher_runtime.text.chat_turn import Answer, ChatModel, NoRoom

MAKE_ROOM = "/undo takes the last turn back, /reset begins a new conversation"
CHANGEABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_new")
_COMMANDS = ("help", "reset", "system", "undo", "retry", "set", "show")
_ALIASES = {"/?": "/help", "/clear": "/reset", "/new": "/reset", "/quit": "/exit", "/bye": "/exit"}
_SETTINGS = dict(every(ChatConfig))
_SEEDS = 1 << 64
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
        if is_terminal(sys.stdin) and is_terminal(sys.stdout):
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
    """Ctrl-C that does not only stop an answer: it came "typing", "empty" or "stopping" one."""


class CtrlC:
    """The Ctrl-C handler of a chat: stops an answer, else raises `Interrupted`."""

    def __init__(self, has_begun: Callable[[], bool]) -> None:
        self._has_begun = has_begun
        self._answers = False
        self.stopped = False  # by the last key; the next one leaves

    @contextmanager
    def heard(self) -> Iterator[Self]:
        """Handle Ctrl-C, unless it is ignored."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._take)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        """Let Ctrl-C stop an answer between steps; yield a function that returns whether."""
        self._answers, self.stopped = True, False
        try:
            yield lambda: self.stopped
        finally:
            self._answers = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._answers and not self.stopped:
            self.stopped = True
        elif not self._answers and self._has_begun():
            self.stopped = False
            raise Interrupted("typing")
        else:
            raise Interrupted("stopping" if self.stopped else "empty")


class Talk:
    """A conversation; `answers` gets the model's text, `notes` all else, `about` is for /show."""

    def __init__(
        self, model: ChatModel, config: ChatConfig, about: str, answers: Screen, notes: Screen
    ) -> None:
        self._model, self._config, self._given = model, config, config
        self._about, self._answers, self._notes = about, answers, notes
        self.messages: list[Message] = []
        self._tries = 0  # number of discarded answers to the last message
        self._seed = 0  # of the last answer
        self._used = 0  # tokens of the context after it
        self._ctrl_c: CtrlC | None = None
        if config.system is not None:
            self._set_system(config.system)

    def hold(self, typing: Typing) -> ExitCode:
        """Answer typed messages until the user leaves; return the exit code."""
        warned = False
        with CtrlC(typing.has_begun).heard() as self._ctrl_c:
            while True:
                try:
                    text, is_block = typing.read()
                    warned = self._ctrl_c.stopped = False
                    if not self._take(text, is_block):
                        return ExitCode.OK
                except EOFError:  # Ctrl-D
                    self._notes.write("\n")
                    return ExitCode.OK
                except UnicodeDecodeError:
                    self._notes.line("that is not valid text in UTF-8; type it again")
                except KeyboardInterrupt as key:
                    self._answers.end_line()
                    self._notes.write("\n")
                    if not isinstance(key, Interrupted):  # SIGTERM
                        raise
                    when = str(key)
                    if when == "stopping" or (warned and when == "empty"):
                        return ExitCode.INTERRUPTED
                    if warned := when == "empty":
                        self._notes.line("Ctrl-C again, Ctrl-D or /exit leaves", dim=True)

    def say(self, text: str) -> None:
        """Answer a message, and keep both or neither; raises ClocherError."""
        self._tries = 0
        self._answer([*self.messages, {"role": "user", "content": text}])

    def _answer(self, messages: list[Message]) -> None:
        config = self._config
        self._seed = secrets.randbits(32) if config.seed == RANDOM else int(config.seed)
        seed = (self._seed + self._tries) % _SEEDS
        sampling = Sampling(seed=seed, **{name: getattr(config, name) for name in NAMES})
        longest = config.max_new or (None if self._model.by_template else CONTINUED)
        stopping = self._ctrl_c.stopping() if self._ctrl_c else nullcontext(lambda: False)
        with quiet_keys(), stopping as stopped:
            answer = self._model.answer(messages, sampling, longest)
            if not self._model.by_template and self._answers.is_terminal:
                self._answers.write(messages[-1]["content"], dim=True)
            self._write(answer.parts(stopped))
        if answer.ids:
            self.messages = [*messages, answer.message]
            self._used = len(answer.prompt) + len(answer.ids)
        self._tell(answer)

    # Output.

    def _write(self, parts: Iterable[Delta]) -> None:
        out, last = self._answers, None
        for delta in parts:
            if delta.kind == "reasoning":
                if out.is_terminal and last != "reasoning":
                    out.line("(thinking)", dim=True)
                if out.is_terminal and not self._given.hide_thinking:
                    out.write(delta.text, dim=True)
            else:
                if last is not None and (delta.kind != last or delta.kind == "tool_call"):
                    self._part(last, delta.kind)
                out.write(f"[calls {delta.text}] " if delta.kind == "tool_call" else delta.text)
            last = delta.kind
        out.end_line()

    def _part(self, before: DeltaKind, now: DeltaKind) -> None:
        if now == "arguments" or (before == "reasoning" and not self._answers.is_terminal):
            return
        self._answers.end_line()
        if before == "reasoning" and not self._given.hide_thinking:
            self._answers.write("\n")

    def _tell(self, answer: Answer) -> None:
        model, numbers = self._model, answer.numbers
        longest, made = model.session.longest, counted(numbers.tokens, "token")
        if answer.ending == "full":
            room = MAKE_ROOM if self._ctrl_c else "shorten the text"
            self._notes.line(f"the context is full: {longest} tokens; {room}{model.larger_context}")
        elif answer.ending == "length" and model.by_template:
            setting = "/set max_new" if self._ctrl_c else "--max-new"
            self._notes.line(f"cut after {made}; {setting} N allows more")
        elif answer.ending == "stopped":
            kept = "" if answer.ids else " before the first token; the message is not kept"
            self._notes.line(f"stopped{kept}", dim=True)
        if self._given.no_stats:
            return
        speed = timing.per_second(numbers.decode_tokens, numbers.decode_ns)
        shown = [
            made,
            f"{speed:.1f} tok/s" if numbers.decode_tokens else "- tok/s",
            *([f"{numbers.per_pass:.1f} a pass"] if numbers.per_pass > 1.05 else []),
            f"first token {numbers.first_ns / timing.NS_PER_MS:.0f} ms",
            f"prompt {numbers.prompt_tokens} ({numbers.computed} computed)",
            f"context {numbers.prompt_tokens + numbers.tokens} of {longest}",
        ]
        self._notes.line(f"[{' | '.join(shown)}]", dim=True)

    # Input.

    def _take(self, text: str, is_block: bool) -> bool:
        """Answer a message, or obey a command; return whether the conversation goes on."""
        try:
            if is_block or not text.startswith("/") or text.startswith("//"):
                text = text if is_block else text.removeprefix("/" if text[:2] == "//" else "")
                if text.strip():
                    self.say(text)
                return True
            name, _, rest = text.partition(" ")
            name = _ALIASES.get(name, name).removeprefix("/")
            if name == "exit":
                return False
            if name not in _COMMANDS:
                raise UsageError(f"no command /{name:.40}; /help lists them, // begins a message")
            getattr(self, f"_{name}")(rest.strip())
        except (UsageError, FormatError, NonFinite) as error:
            self._answers.end_line()
            more = f". {MAKE_ROOM}" if isinstance(error, NoRoom) and self.messages else ""
            self._notes.line(f"error: {error}{more}")
        return True

    def _retry(self, rest: str) -> None:
        at = self._last_question()
        self._tries += 1
        self._answer(self.messages[: at + 1])

    def _undo(self, rest: str) -> None:
        self.messages = self.messages[: self._last_question()]
        self._tries = self._used = 0
        self._notes.line(f"took the last turn back; {counted(len(self.messages), 'message')} left")

    def _last_question(self) -> int:
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                return at
        raise UsageError("nothing has been said yet")

    def _reset(self, rest: str) -> None:
        self.messages = self.messages[: self._has_system]
        self._used = 0
        self._notes.line("a new conversation" + ("; the system message stays" * self._has_system))

    @property
    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def _set_system(self, text: str) -> None:
        if not self._model.by_template:
            raise UsageError("this model continues text; there is no system message")
        rest = self.messages[self._has_system :]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def _system(self, rest: str) -> None:
        self._set_system(rest)
        self._notes.line("the system message is set" if rest else "no system message any more")

    def _set(self, rest: str) -> None:
        name, _, raw = rest.partition(" ")
        name, raw = name.removeprefix("--").replace("-", "_"), raw.strip()
        if name not in CHANGEABLE or not raw:
            raise UsageError(f"/set takes one of {', '.join(CHANGEABLE)}, and a value or default")
        value = getattr(self._given, name)
        if raw != "default":
            value = _SETTINGS[name].takes.read(f"/set {name}", raw)
        self._config = replace(self._config, **{name: value})
        self._tries = 0
        self._notes.line(f"{name} is {_shown(value)}")

    def _help(self, rest: str) -> None:
        self._notes.write(HELP)

    def _show(self, rest: str) -> None:
        values = {name: getattr(self._config, name) for name in CHANGEABLE}
        shown = [
            self._about,
            ", ".join(f"{name} {_shown(value)}" for name, value in values.items()),
            f"seed of the last answer: {self._seed + self._tries}",
            f"{counted(len(self.messages), 'message')}; "
            f"context {self._used} of {self._model.session.longest} tokens after the last answer",
        ]
        if self._has_system:
            shown.append(f"system: {self.messages[0]['content']}")
        for line in shown:
            self._notes.line(line)


def _shown(value: object) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


HELP = """\
/help                show this
/reset               begin a new conversation (also /clear, /new); the system message stays
/system TEXT         set the system message; no text: none
/undo                take back the last message and its answer
/retry               answer the last message again
/set NAME VALUE      temperature, top_p, top_k, min_p, repetition_penalty, seed or max_new;
                     the value "default" unsets
/show                the model, the settings, the context
/exit                leave (also /quit, /bye, Ctrl-D)
\"\"\"                  begins and ends a message of several lines
//                   begins a message that begins with a slash
Ctrl-C               stops an answer; what was written stays
"""
