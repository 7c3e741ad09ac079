"""Structured output with other tokenizers: user-defined tokens, large vocabularies."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clocher_kernels.ops.sampling import tokens_of, words_for
from clocher_runtime.text import grammar, text_process
from clocher_runtime.text.grammar import GrammarMaker
from clocher_runtime.text.text_process import TextProcess
from clocher_runtime.text.tokenizer_library import LibraryTokenizer

TOKENIZER = Path(__file__).parent / "data" / "clocher-tiny-llama" / "tokenizer.json"
VOCABULARY = 4098
MARKS = ("<tool_call>", "</tool_call>")


def with_marks() -> str:
    """Return a tokenizer.json in which the marks are added tokens, but not special, as Qwen's."""
    document = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    document["added_tokens"] += [
        {"id": VOCABULARY - 2 + index, "content": mark, **added} for index, mark in enumerate(MARKS)
    ]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("kind", "value", "style", "text"),
    [
        (
            "tools",
            [{"name": "now"}],
            "hermes",
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ),
        ("choice", ["a </tool_call>"], "plain", "a </tool_call>"),
        ("json_schema", {"const": "</tool_call>"}, "plain", '"</tool_call>"'),
    ],
)
def test_every_allowed_token_can_be_taken(kind: str, value: Any, style: str, text: str) -> None:
    source = with_marks()
    spec = {"kind": kind, "value": value, "style": style}
    maker, tokenizer = GrammarMaker(source.encode(), VOCABULARY, [0]), LibraryTokenizer(source)
    maker.check(spec)
    constraint, mask = maker.compile(spec), np.zeros(words_for(VOCABULARY), np.uint32)
    made: list[int] = []
    while not constraint.is_over and (rest := text[len(tokenizer.decode(made, False)) :]):
        constraint.fill(mask)
        # The longest one: a mark, wherever the mask allows its token.
        allowed = [tokenizer.decode([int(token)], False) for token in tokens_of(mask, VOCABULARY)]
        best = max(range(len(allowed)), key=lambda i: len(allowed[i]) * rest.startswith(allowed[i]))
        made.append(int(tokens_of(mask, VOCABULARY)[best]))
        constraint.take(made[-1])
    assert tokenizer.decode(made, False) == text
    is_mark = np.isin(made, (VOCABULARY - 2, VOCABULARY - 1))
    assert is_mark.sum() == (2 if kind == "tools" else 0)


def test_a_process_that_a_large_vocabulary_fills_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end between loading the grammars and using them."""
    process = TextProcess()
    monkeypatch.setattr(grammar, "_PROCESS", process)
    monkeypatch.setattr(text_process, "MAX_IDLE_BYTES", 16 << 20)
    try:
        maker = GrammarMaker(TOKENIZER, 4096, [0])
        maker.check({"kind": "json_object", "value": True})
        first = process._process
        maker.check({"kind": "choice", "value": ["a"]})
        assert process._process is first is not None
    finally:
        process.close()
