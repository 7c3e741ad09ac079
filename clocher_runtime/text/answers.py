"""An answer's tokens, read into the parts that a chat client gets."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from clocher_runtime.text.call_styles import STYLES, AnswerStyle

if TYPE_CHECKING:
    from clocher_runtime.text.tokenizer import Tokenizer

DeltaKind = Literal["content", "reasoning", "tool_call", "arguments"]


class Delta(NamedTuple):
    """A piece of an answer; the text is never empty.

    "tool_call" starts a call of the function `text`; "arguments" is a piece of its JSON arguments
    (not sent if there are none).
    """

    kind: DeltaKind
    text: str
    index: int = 0  # type: ignore[assignment]  # of the call, from 0; hides tuple.index


class AnswerReader(Protocol):
    """Reads an answer, token by token. It accepts any, and never raises."""

    def push(self, token: int, /) -> list[Delta]:
        """Return the deltas that a token completes."""
        ...

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last token."""
        ...


class TextReader:
    """Reads an answer by pieces of text, and never raises: this one, text without markup."""

    def __init__(self) -> None:
        self._held = ""  # not complete, or not known to be text

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        return self._read(self._held + text, ended=False)

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
        return self._read(self._held, ended=True)

    def _read(self, text: str, *, ended: bool) -> list[Delta]:
        """Return the deltas of what was held and a new piece; `ended`: nothing follows."""
        return [Delta("content", text)] if text else []


def open_length(text: str, strings: Collection[str]) -> int:
    """Return how many characters at the end of a text may begin one of some strings."""
    start = len(text)
    for string in strings:
        at = text.find(string[0], max(0, len(text) - len(string) + 1))
        while 0 <= at < start:
            if string.startswith(text[at:]):
                start = at
            at = text.find(string[0], at + 1)
    return len(text) - start


def split_at(text: str, *marks: str) -> tuple[str, str, str | None]:
    """Return the text before a mark, the mark with up to two line breaks before, the text after.

    Without any of the marks: the text, what may become one, None.
    """
    at, mark = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))
    if at < 0:
        starts = [f"{breaks}{each}" for each in marks for breaks in ("", "\n", "\n\n")]
        end = len(text) - open_length(text, starts)
        return text[:end], text[end:], None
    end, after = max(len(text[:at].rstrip("\n")), at - 2), at + len(mark)
    return text[:end], text[end:after], text[after:]


class StopStrings:
    """Cuts a text at the first stop string, `found`, and holds back partial ones."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may be the start of a stop string
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that cannot be part of a stop string; "" once one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        at, found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=(-1, None)
        )
        if found is not None:
            self.found, self._held = found, ""
            return text[:at]
        kept = open_length(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held


_OPENING, _CLOSING = "<think>", "</think>"
_BEGIN = re.compile(r"\s{0,16}")


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends with the opening reasoning mark."""
    return prompt.rstrip().endswith(_OPENING)


class Thinking(TextReader):
    """Reads `<think>...</think>` first (`opened`: in the prompt), then uses another reader."""

    def __init__(self, answer: TextReader, *, opened: bool) -> None:
        super().__init__()
        self._answer, self._opened = answer, opened
        self._state: Literal["begin", "first", "thoughts", "gap", "answer"] = "begin"

    def _read(self, text: str, *, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        self._held = ""
        while text and self._state != "answer":
            if self._state == "begin":
                space = _BEGIN.match(text)
                assert space is not None  # it matches the empty text
                body = text[space.end() :]
                if body.startswith(_OPENING):
                    text, self._state = body.removeprefix(_OPENING), "first"
                elif _OPENING.startswith(body) and not ended:
                    text, self._held = "", text
                elif self._opened:
                    self._state = "thoughts" if ended else "first"
                else:
                    self._state = "answer"
            elif self._state == "thoughts":
                thoughts, held, rest = split_at(text, _CLOSING)
                if rest is None:
                    text, self._held = "", "" if ended else held
                    thoughts += held if ended else ""
                else:
                    text, self._state = rest, "gap"
                found += [Delta("reasoning", thoughts)] if thoughts else []
            elif text := text.lstrip("\n"):
                self._state = "thoughts" if self._state == "first" else "answer"
        found += self._answer.push(text)
        return found + self._answer.finish() if ended else found


def message_of(deltas: Sequence[Delta], calls: Mapping[int, str]) -> dict[str, Any]:
    """Return a message of the conversation; `calls`: index of each call -> its id."""

    def joined(kind: DeltaKind, index: int = 0) -> str:
        return "".join(d.text for d in deltas if d.kind == kind and d.index == index)

    message: dict[str, Any] = {"role": "assistant", "content": joined("content")}
    if reasoning := joined("reasoning"):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call,
                "type": "function",
                "function": {"name": joined("tool_call", n), "arguments": joined("arguments", n)},
            }
            for n, call in calls.items()
        ]
    return message


def make_reader(
    tokenizer: "Tokenizer",
    style: AnswerStyle,
    *,
    tools: Sequence[Mapping[str, Any]] | bool,
    prompt_tail: str = "",
    ends: Collection[int] = (),
) -> AnswerReader:
    """Return a reader for one answer.

    `tools` are the functions that may be called, or True; without any, what looks like a call is
    text. `prompt_tail` is the end of the prompt, at least from the start of the answer's message;
    `ends` are ids that end generation and have no text.
    """
    # Late imports: most answers need neither.
    if style == "harmony":
        from clocher_runtime.text.harmony import HarmonyReader

        return HarmonyReader(tokenizer, tools=bool(tools), prompt_tail=prompt_tail, ends=ends)
    answer = TextReader()
    if tools:
        from clocher_runtime.text.tool_calls import LlamaCalls, MarkedCalls

        functions = () if isinstance(tools, bool) else tools
        answer = LlamaCalls() if style == "llama3" else MarkedCalls(STYLES[style], functions)
    thinking = Thinking(answer, opened=opens_thoughts(prompt_tail))
    return _AnswerInText(tokenizer, thinking, ends)


class _AnswerInText:
    """Reads an answer's text, independent of token boundaries."""

    def __init__(self, tokenizer: "Tokenizer", reader: TextReader, ends: Collection[int]) -> None:
        self._stream, self._reader = tokenizer.stream(), reader
        self._ends = frozenset(ends)

    def push(self, token: int) -> list[Delta]:
        if token in self._ends:
            return []
        return self._reader.push(self._stream.push(token))

    def finish(self) -> list[Delta]:
        return self._reader.push(self._stream.flush()) + self._reader.finish()
