"""Output constraints: checked in the server, compiled in the engine."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from clocher_runtime.engine.arguments import Constraint
from clocher_runtime.text.grammar import GrammarMaker


class Grammars:
    """A model's grammars, made in a thread: a difficult one delays only its own request."""

    def __init__(self, source: Path | bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._of = source, vocab_size, eos_ids
        self._thread = ThreadPoolExecutor(1, "grammar")

    @cached_property
    def _maker(self) -> GrammarMaker:
        return GrammarMaker.read(*self._of)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def checked(self, spec: Mapping[str, Any]) -> Future[None]:
        """Check a constraint; the future raises UsageError if it is invalid."""
        return self._thread.submit(lambda: self._maker.check(spec))

    def compiled(self, spec: Mapping[str, Any]) -> Future[Constraint]:
        """Return the constraint of one sequence, from a checked spec."""
        return self._thread.submit(lambda: self._maker.compile(spec))
