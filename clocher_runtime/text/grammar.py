"""Structured output: constraints by a JSON schema, a regular expression or a grammar."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clocher_kernels.errors import UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.engine.arguments import Constraint
from clocher_runtime.text.grammar_rules import rules_of
from clocher_runtime.text.text_process import Refused, TextProcess
from clocher_runtime.text.tokenizer_library import loading_limits
from clocher_runtime.text.tokenizer_limits import MAX_FILE_BYTES, inspect

if TYPE_CHECKING:
    from clocher_runtime.text.grammar_library import LibraryGrammars

CHECK_SECONDS, CHECK_BYTES = 2.0, 512 << 20
"""Limits of trying rules: CPU seconds, bytes."""
_PROCESS = TextProcess()
"""Separate from the prompts' process: hostile rules must not delay prompts."""
_turn = threading.Lock()


class GrammarMaker:
    """Makes constraints for the texts of a model, by specs of `grammar_rules`; thread-safe.

    A server checks specs in one process and compiles them in another. Raises FormatError, or
    UsageError if llguidance is missing or cannot load the tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if find_spec("llguidance") is None:
            raise UsageError(
                "structured output needs llguidance: pip install '.[serve]' in a clone of Clocher, "
                "or leave it out"
            )
        if not eos_ids or not inspect(tokenizer_json.encode(), "tokenizer.json").plain:
            raise UsageError(
                "structured output needs a token that ends a text, and a tokenizer whose steps are "
                "all known; this model has no such; leave it out"
            )
        self._text, self._vocab_size, self._eos_ids = tokenizer_json, vocab_size, list(eos_ids)
        added: list[dict[str, Any]] = json.loads(tokenizer_json).get("added_tokens") or []
        self._special = frozenset(t["content"] for t in added if t.get("special") is True)
        self._checked = ""

    @classmethod
    def read(cls, source: Path | bytes, vocab_size: int, eos_ids: Sequence[int]) -> Self:
        """Return the maker for a model, by its tokenizer.json or the contents."""
        data = read_bytes(source, MAX_FILE_BYTES) if isinstance(source, Path) else source
        return cls(data.decode("utf-8"), vocab_size, eos_ids)

    def check(self, spec: Mapping[str, Any]) -> None:
        """Try a spec in a process with limits; raises UsageError if invalid or too complex."""
        rules = rules_of(spec, self._special)
        if rules == self._checked:
            return
        library: dict[str, Any] = {"vocab_size": self._vocab_size, "eos_ids": self._eos_ids}
        name = sha256(f"{library} {self._text}".encode()).hexdigest()
        limits = loading_limits(self._text)
        try:
            with _turn:
                _PROCESS.ask("load_grammars", *limits, ((name, self._text), limits), **library)
                _PROCESS.ask("check_rules", CHECK_SECONDS, CHECK_BYTES, rules=rules)
        except Refused as error:
            if error.kind == "refused":
                raise UsageError(str(error)) from None
            raise UsageError(f"this structure is too complex: {error}; make it smaller") from None
        self._checked = rules

    def compile(self, spec: Mapping[str, Any]) -> Constraint:
        """Return the constraint of one text of a checked spec (others may end this process)."""
        return self._library.follow(rules_of(spec, self._special))

    @cached_property
    def _library(self) -> "LibraryGrammars":
        from clocher_runtime.text.grammar_library import LibraryGrammars

        return LibraryGrammars(self._text, self._vocab_size, self._eos_ids)
