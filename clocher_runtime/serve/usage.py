"""What every answer carries: its name, when it began, the tokens it took."""

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clocher_runtime.serve.json_text import to_json
from clocher_runtime.serve.messages import Made
from clocher_runtime.serve.sse import DONE
from clocher_runtime.text.tokenizer import Tokenizer


def now_s() -> int:
    """Return the time of the day, in seconds since 1970: for clients, not for measurements."""
    return int(datetime.datetime.now(datetime.UTC).timestamp())


@dataclass(slots=True)
class Answer:
    """What is common to all parts of an answer.

    Attributes:
        id: begins with what kind of answer it is.
        model: as clients call it.
        prompt_tokens: tokens of all prompts.
        made: tokens that were made, of all choices.
        cached: of `prompt_tokens`, those that were found in the cache.
        guessed: of `made`, those that took no pass of their own.
        nfe: passes of texts whose blocks are denoised (number of function evaluations).
        created: seconds since 1970.
    """

    kind: str
    model: str
    prompt_tokens: int
    made: int = 0
    cached: int = 0
    guessed: int = 0
    nfe: int = 0
    id: str = field(init=False)
    created: int = field(default_factory=now_s)

    def __post_init__(self) -> None:
        self.id = f"{self.kind}-{secrets.token_hex(12)}"

    def count(self, made: Made, is_first: bool) -> None:
        """Count a token.

        Args:
            made: the token.
            is_first: whether it is of the first choice of its prompt; others find the prompt there.
        """
        self.made += 1
        self.guessed += made.guessed
        self.nfe += made.passes
        if is_first:
            self.cached += made.cached

    def usage(self) -> dict[str, Any]:
        """Return the tokens it took so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **self.denoised(),
        }

    def denoised(self) -> dict[str, Any]:
        """Return what usage tells of denoised blocks; nothing if there were none."""
        if not self.nfe:
            return {}
        return {"nfe": self.nfe, "tokens_per_nfe": self.made / self.nfe}


class Chunks:
    """The events of an answer that is streamed.

    Args:
        answer: what is common to them.
        object: what clients call one.
        include_usage: tell the usage in a last one without choices.
        continuous: and in every one.
    """

    def __init__(self, answer: Answer, object: str, include_usage: bool, continuous: bool) -> None:
        self._answer, self._include_usage, self._continuous = answer, include_usage, continuous
        self._head = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[' % (
            to_json(answer.id),
            to_json(object),
            answer.created,
            to_json(answer.model),
        )
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, choice: bytes) -> bytes:
        """Return the event of one choice, which is JSON."""
        return self._head + choice + (self._usage() if self._continuous else self._end)

    def last(self) -> bytes:
        """Return what comes after all choices."""
        return self._head + self._usage() + DONE if self._include_usage else DONE

    def _usage(self) -> bytes:
        usage = self._answer.usage()
        if self._continuous:  # who watches the speed; other answers are the same however they came
            guessed = {"accepted_prediction_tokens": self._answer.guessed}
            usage["completion_tokens_details"] = guessed
        return b'],"usage":' + to_json(usage) + b"}\n\n"


def canvas(texts: list[str | None] | None) -> bytes:
    """Return the field of a choice that shows what is not sure yet; None: it has none."""
    return b"" if texts is None else b',"canvas":' + to_json(texts)


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

    def unsure(self, tokens: Sequence[int | None]) -> list[str | None]:
        """Return the texts of tokens that stand behind an answer; None for a mask."""
        return [None if token is None else self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        """Return the text of a token with the space before it, which `decode` may leave out."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def table(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens as completions tell of them; of equal texts the likeliest."""
        table: dict[str, float] = {}
        for token, logprob in top:
            table.setdefault(self.text(token), finite(logprob))
        return table


def finite(logprob: float) -> float:
    """Return a log probability that JSON has a number for; OpenAI's stands for what never comes."""
    return max(logprob, -9999.0)
