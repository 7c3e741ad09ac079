"""Output constraints: checked in the server, compiled in the engine."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from clocher_runtime.engine.constraint import Constraint
from clocher_runtime.text.grammar import GrammarMaker


class Grammars:
    """The grammars of a model, made in a thread: only who asked for a difficult one waits for it.

    `source`: the model's tokenizer.json, read when the first grammar is wanted; or its contents.
    `vocab_size`: tokens of the model. `eos_ids`: tokens that end an answer.
    """

    def __init__(self, source: Path | bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._of = source, vocab_size, eos_ids
        self._thread = ThreadPoolExecutor(1, "grammar")

    @cached_property
    def _maker(self) -> GrammarMaker:
        return GrammarMaker.read(*self._of)

    def close(self) -> None:
        """Take no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def checked(self, spec: Mapping[str, Any]) -> Future[None]:
        """Try a constraint; the future raises UsageError if it cannot be obeyed."""
        return self._thread.submit(lambda: self._maker.check(spec))

    def compiled(self, spec: Mapping[str, Any]) -> Future[Constraint]:
        """Return the constraint of one text, of a spec that was checked."""
        return self._thread.submit(lambda: self._maker.compile(spec))
