"""What an answer has to follow: tried in the server, compiled in the engine. Both ends are here."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clocher_runtime.engine.constraint import Constraint
from clocher_runtime.text.grammar import GrammarMaker
from clocher_runtime.text.thinking import opens_thoughts

Spec = Mapping[str, Any]
"""A constraint as `GrammarMaker` takes it."""


def spec_of(
    asked: Mapping[str, Any] | None,
    style: str,
    functions: Sequence[Mapping[str, Any]] = (),
    must_call: bool = False,
    tail: str = "",
) -> Spec | None:
    """Return the constraint of an answer, None for a free one.

    Args:
        asked: what the answer has to follow, of `GenerationFields.constraint`.
        style: how the model marks reasoning and calls.
        functions: that the model may call.
        must_call: whether it has to call one of them.
        tail: how the prompt ends: it may have begun a thought.
    """
    if must_call:
        kind, value = "tools", [each["function"] for each in functions]
    elif asked is not None:
        ((kind, value),) = asked.items()
    else:
        return None
    return {"kind": kind, "value": value, "style": style, "opened": opens_thoughts(tail)}


class Grammars:
    """The grammars of a model, made in a thread: nobody waits for a difficult one but who asked.

    Args:
        source: the model's tokenizer.json, read when the first grammar is wanted; or its contents.
        vocab_size: tokens of the model.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, source: Path | bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._of = source, vocab_size, eos_ids
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._maker: GrammarMaker | None = None

    def close(self) -> None:
        """Take no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def checked(self, spec: Spec) -> Future[None]:
        """Try a constraint.

        Raises:
            UsageError: from the future: it cannot be had.
        """
        return self._thread.submit(lambda: self._made().check(spec))

    def compiled(self, spec: Spec) -> Future[Constraint]:
        """Return the constraint of one text, of a spec that was checked.

        Raises:
            UsageError: from the future: it cannot be had.
        """
        return self._thread.submit(lambda: self._made().compile(spec))

    def _made(self) -> GrammarMaker:
        if self._maker is None:
            self._maker = GrammarMaker.read(*self._of)
        return self._maker
