"""An answer's tokens, read into the parts that a chat client gets."""

from collections.abc import Collection
from typing import Literal

from clocher_runtime.text.deltas import (
    AnswerReader,
    Delta,
    DeltaKind,
    PlainText,
    TextReader,
    Thinking,
    opens_thoughts,
)
from clocher_runtime.text.harmony import HarmonyReader, Tokens
from clocher_runtime.text.tool_calls import HermesCalls, LlamaCalls

__all__ = ["AnswerReader", "AnswerStyle", "Delta", "DeltaKind", "answer_style", "make_reader"]

AnswerStyle = Literal["harmony", "hermes", "llama3", "plain"]

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


def answer_style(tokenizer: Tokens, template: str) -> AnswerStyle:
    """Return how a model marks up its answers, by its tokens and chat template."""
    if all(tokenizer.token_id(name) is not None for name in _HARMONY):
        return "harmony"
    # Qwen3-Coder writes <function=NAME> between the same marks, which is not JSON.
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if tokenizer.token_id("<|python_tag|>") is not None and '"parameters"' in template:
        return "llama3"
    return "plain"


def make_reader(
    tokenizer: Tokens,
    style: AnswerStyle,
    *,
    tools: bool,
    prompt_tail: str = "",
    ends: Collection[int] = (),
) -> AnswerReader:
    """Return a reader for one answer.

    Without `tools`, what looks like a call is text. `prompt_tail` is the end of the prompt, at
    least from the start of the answer's message; `ends` are ids that end generation and have no
    text.
    """
    if style == "harmony":
        return HarmonyReader(tokenizer, tools=tools, prompt_tail=prompt_tail, ends=ends)
    answer: TextReader = PlainText()
    if tools and style != "plain":
        answer = HermesCalls() if style == "hermes" else LlamaCalls()
    thinking = Thinking(answer, opened=opens_thoughts(prompt_tail))
    return _AnswerInText(tokenizer, thinking, ends)


class _AnswerInText:
    """Reads an answer's text, independent of token boundaries."""

    def __init__(self, tokenizer: Tokens, reader: TextReader, ends: Collection[int]) -> None:
        self._stream, self._reader = tokenizer.stream(), reader
        self._ends = frozenset(ends)

    def push(self, token: int) -> list[Delta]:
        if token in self._ends:
            return []
        return self._reader.push(self._stream.push(token))

    def finish(self) -> list[Delta]:
        return self._reader.push(self._stream.flush()) + self._reader.finish()
