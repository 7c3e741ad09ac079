"""Answers cut into tokens, and what a reader makes of them."""

import json
from collections.abc import Iterable

from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.text.answers import AnswerReader, Delta, TextReader
from clocher_runtime.text.tokenizer import Tokenizer

_MODEL = embedded_model()
TOKENIZER = Tokenizer(
    _MODEL / "tokenizer.json",
    json.loads((_MODEL / "tokenizer_config.json").read_text(encoding="utf-8")),
)


def joined(deltas: Iterable[Delta]) -> list[tuple[str, str, int]]:
    """Return deltas with neighbours of the same part joined."""
    found: list[tuple[str, str, int]] = []
    for kind, text, index in deltas:
        assert text
        if found and kind != "tool_call" and found[-1][::2] == (kind, index):
            found[-1] = (kind, found[-1][1] + text, index)
        else:
            found.append((kind, text, index))
    return found


def read_tokens(reader: AnswerReader, tokens: Iterable[int]) -> list[tuple[str, str, int]]:
    """Return what a reader makes of tokens."""
    deltas = [delta for token in tokens for delta in reader.push(token)]
    return joined(deltas + reader.finish())


def read_pieces(reader: TextReader, pieces: Iterable[str]) -> list[tuple[str, str, int]]:
    """Return what a reader makes of pieces of text."""
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    return joined(deltas + reader.finish())
