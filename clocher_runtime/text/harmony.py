"""The format of gpt-oss: an answer is several messages with headers.

A message is `<|start|>assistant[ to=RECIPIENT]<|channel|>CHANNEL[ to=RECIPIENT]
[<|constrain|>TYPE]<|message|>BODY`, then `<|end|>`, `<|call|>` or `<|return|>`. The prompt ends
after `<|start|>assistant`. Sources: docs/format.md of openai/harmony, and its parser (non-strict).
"""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, NamedTuple

from clocher_runtime.text.answers import Delta, DeltaKind

if TYPE_CHECKING:
    from clocher_runtime.text.tokenizer import Tokenizer

Mark = Literal["start", "channel", "constrain", "message", "end"]
MARKS: dict[str, Mark] = {
    "<|start|>": "start",
    "<|channel|>": "channel",
    "<|constrain|>": "constrain",
    "<|message|>": "message",
    "<|end|>": "end",
    "<|return|>": "end",
    "<|call|>": "end",
}
"""Special tokens -> roles; three of them end a message."""

_STOPS = ("<|return|>", "<|call|>")
_CHANNELS = ("analysis", "commentary", "final")
_ROLES = ("assistant", "user", "system", "developer", "tool")
_FUNCTION = re.compile(r"functions\.([A-Za-z0-9_.-]+)")
_SPLIT = re.compile(f"({'|'.join(map(re.escape, MARKS))})")

_TO = r"to=(?P<to>[^\s{<]{0,256})"
_NAME = r"[\w./-]{0,128}"


class _Part(NamedTuple):
    """A header part, which begins at a mark."""

    whole: re.Pattern[str]  # text that is such a part, or may become one
    known: re.Pattern[str]  # what is surely not yet the body, at the start of one that is not


_ROLE = _Part(
    re.compile(rf"\s?(?P<word>{_NAME}?)(?:\s?{_TO}|\sto?)?\s?"),
    re.compile(rf"\s?(?:{'|'.join(_ROLES)})(?![\w./-])(?:\s?{_TO})?\s?"),
)
_AFTER_ROLE = _Part(
    re.compile(rf"(?P<word>)\s?(?:{_TO}\s?|to?)?"), re.compile(rf"(?:\s?{_TO}\s?)?")
)
_CHANNEL = _Part(
    re.compile(rf"\s?(?P<word>{_NAME}?)(?:\s?{_TO})?(?:\s{_NAME})?\s?"),
    re.compile(rf"\s?(?:{'|'.join(_CHANNELS)})(?![\w./-])(?:\s?{_TO}(?:\sjson\b)?)?\s?"),
)
_TYPE = _Part(_CHANNEL.whole, re.compile(rf"\s?{_NAME}(?:\s?{_TO})?\s?"))


def harmony_marks(tokenizer: "Tokenizer") -> dict[int, Mark]:
    """Return token id -> role of the format's special tokens."""
    found = {tokenizer.token_id(name): mark for name, mark in MARKS.items()}
    return {token: mark for token, mark in found.items() if token is not None}


def harmony_stop_ids(tokenizer: "Tokenizer") -> frozenset[int]:
    """Return the ids that end an answer; `<|end|>` only ends a message."""
    found = map(tokenizer.token_id, _STOPS)
    return frozenset(token for token in found if token is not None)


class HarmonyReader:
    """Reads an answer in the format, or in none; see `AnswerReader`.

    `content`: the channels "final", "commentary" without a recipient and unknown ones, and messages
    without a header. A message to a function is a call (without `tools`, `reasoning`) whatever its
    channel; all else is `reasoning`. Headers that end with `<|message|>` are dropped; of an
    incomplete one only the parts that the format knows are, and the rest is body. `prompt_tail` is
    the end of the prompt, at least from its last `<|start|>`; `ends` are further ids that end a
    message.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        tools: bool = True,
        prompt_tail: str = "<|start|>assistant",
        ends: Collection[int] = (),
    ) -> None:
        end: Mark = "end"
        self._marks = dict.fromkeys(ends, end) | harmony_marks(tokenizer)
        self._stream = tokenizer.stream()
        self._tools = tools
        self._calls = 0
        self._kind: DeltaKind = "content"  # of the body
        self._index = 0
        self._header: _Header | None = _Header(_AFTER_ROLE)
        self._begun = self._go_on_from(prompt_tail)

    def push(self, token: int) -> list[Delta]:
        mark = self._marks.get(token)
        if mark is None:
            found = self._text(self._stream.push(token))
        else:
            found = self._text(self._stream.flush()) + self._mark(mark)
        if self._begun:
            found, self._begun = self._begun + found, []
        return found

    def finish(self) -> list[Delta]:
        found = self._begun + self._text(self._stream.flush()) + self._give_up()
        self._begun = []
        return found

    def _go_on_from(self, prompt: str) -> list[Delta]:
        at = prompt.rfind("<|start|>")
        if at < 0:
            return []
        begun = []
        for piece in _SPLIT.split(prompt[at:]):
            mark = MARKS.get(piece)
            begun += self._text(piece) if mark is None else self._mark(mark)
        if self._header is not None:
            self._header.belongs_to_prompt()
        return [delta for delta in begun if delta.kind == "tool_call"]

    def _text(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._header is None:
            return [Delta(self._kind, text, self._index)]
        if self._header.push(text):
            return []
        return self._give_up()

    def _mark(self, mark: Mark) -> list[Delta]:
        if mark == "start" or mark == "end":
            found = self._give_up()
            self._header = _Header(_ROLE)
            return found
        if mark == "channel" and self._header is None:
            self._header = _Header(_ROLE)
        if self._header is not None:
            if mark == "message":
                return self._begin_body()
            self._header.begin(_CHANNEL if mark == "channel" else _TYPE)
        return []  # a stray mark in a body is ignored

    def _give_up(self) -> list[Delta]:
        """Turn an incomplete header into body."""
        if self._header is None:
            return []
        rest = self._header.give_up()
        if not rest:
            return []
        return self._begin_body() + self._text(rest)

    def _begin_body(self) -> list[Delta]:
        assert self._header is not None
        header, self._header = self._header, None
        header.close()
        function = _FUNCTION.match(header.recipient) if self._tools else None
        if function is not None:
            self._kind, self._index = "arguments", self._calls
            self._calls += 1
            return [Delta("tool_call", function[1], self._index)]
        hidden = header.recipient or header.channel == "analysis" or header.role != "assistant"
        self._kind, self._index = "reasoning" if hidden else "content", 0
        return []


class _Header:
    """A header, read in parts."""

    def __init__(self, part: _Part) -> None:
        self._part, self._piece = part, ""
        self._made = ""  # the part that is not of the prompt
        self.role, self.channel, self.recipient = "assistant", "", ""
        self._known = True

    def belongs_to_prompt(self) -> None:
        if self._part is _ROLE and self._piece:
            self.begin(_AFTER_ROLE)
        self._made = ""

    def push(self, text: str) -> bool:
        self._piece += text
        self._made += text
        return self._part.whole.fullmatch(self._piece) is not None

    def begin(self, part: _Part) -> None:
        self.close()
        self._part, self._piece = part, ""

    def close(self) -> None:
        found = self._part.whole.fullmatch(self._piece)
        assert found is not None  # `push` drops text that cannot match
        self._known &= not self._piece or self._part.known.fullmatch(self._piece) is not None
        self.recipient = self.recipient or found["to"] or ""
        if self._part is _ROLE:
            self.role = found["word"] or self.role
        elif self._part is _CHANNEL:
            self.channel = found["word"]

    def give_up(self) -> str:
        """Return the text that is body after all; keep the header parts before it."""
        found = self._part.known.match(self._piece)
        if found is None or not self._known:
            self.role, self.channel, self.recipient = "assistant", "", ""
            self._part, self._piece = _AFTER_ROLE, ""
            return self._made
        body = self._piece[found.end() :]
        self._piece = found[0]
        return body
