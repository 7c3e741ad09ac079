"""An answer in the parts that a client of a chat reads."""

from typing import Literal, NamedTuple, Protocol

DeltaKind = Literal["content", "reasoning", "tool_call", "arguments"]


class Delta(NamedTuple):
    """A further piece of an answer.

    Attributes:
        kind: "content": what the user reads. "reasoning": what the model thinks before it answers.
            "tool_call": a call begins, of the function that `text` names. "arguments": more of the
            JSON text of its arguments.
        text: never empty. A call whose arguments are left out altogether has no "arguments".
        index: which call of the answer it belongs to, from 0.
    """

    kind: DeltaKind
    text: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs


class AnswerReader(Protocol):
    """Reads an answer token by token. It takes whatever a model makes, and never raises."""

    def push(self, token: int) -> list[Delta]:
        """Return what a token makes certain."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back, after the last token."""
        ...


class TextReader(Protocol):
    """Reads an answer piece by piece of its text. It takes any text, and never raises."""

    def push(self, text: str) -> list[Delta]:
        """Return what a piece makes certain."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back, after the last piece."""
        ...


class PlainText:
    """Text that is for the user as it stands."""

    def push(self, text: str) -> list[Delta]:
        """Return a piece."""
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        """Return nothing: nothing was held back."""
        return []
