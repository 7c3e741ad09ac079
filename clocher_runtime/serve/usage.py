"""What every answer carries: its name, when it began, the tokens it took."""

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clocher_runtime.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Answer:
    """What is common to all parts of an answer.

    Attributes:
        id: begins with what kind of answer it is.
        model: as clients call it.
        prompt_tokens: tokens of all prompts.
        made: tokens that were made, of all choices.
        created: seconds since 1970.
    """

    kind: str
    model: str
    prompt_tokens: int
    made: int = 0
    id: str = ""
    created: int = field(default_factory=lambda: now_s())

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.kind}-{secrets.token_hex(12)}"

    def usage(self) -> dict[str, Any]:
        """Return the tokens it took so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
        }


def now_s() -> int:
    """Return the time of the day, in seconds since 1970: for clients, not for measurements."""
    return int(datetime.datetime.now(datetime.UTC).timestamp())


class TokenTexts:
    """What single tokens are called where log probabilities are told.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of a token alone; bytes of an unfinished character become U+FFFD."""
        return self._tokenizer.decode([token])

    def named(self, token: int, logprob: float) -> dict[str, Any]:
        """Return a token as chats tell of it."""
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": self.text(token),
            "logprob": finite(logprob),
            "bytes": None if raw is None else list(raw),
        }

    def table(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens as completions tell of them; of equal texts the likeliest."""
        table: dict[str, float] = {}
        for token, logprob in top:
            table.setdefault(self.text(token), finite(logprob))
        return table


def finite(logprob: float) -> float:
    """Return a log probability that JSON has a number for; OpenAI's stands for what never comes."""
    return max(logprob, -9999.0)
