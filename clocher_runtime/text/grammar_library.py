"""The llguidance library: rules to constraints.

Deep schemas overflow its stack, some patterns never end; `grammar` tries rules with limits first.
"""

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from clocher_kernels.errors import ConstraintFailed, UsageError
from clocher_kernels.ops.sampling import WORD_BITS, words_for
from clocher_runtime.text import Refused
from clocher_runtime.text.tokenizer_library import tried

_LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # messages must not quote generated text
)
_MESSAGE_CHARS = 200
_IN_REGEX = re.compile(r"regex parse error:.*^error: ([^\n]*)", re.DOTALL | re.MULTILINE)


class LibraryGrammars:
    """Makes constraints with a plain tokenizer.json (its text); raises UsageError.

    `known`: how many of the `vocab_size` ids it has tokens for.
    """

    def __init__(self, text: str, vocab_size: int, known: int, eos_ids: Sequence[int]) -> None:
        try:
            self._tokenizer = tried(LLTokenizer, text, n_vocab=vocab_size, eos_token=list(eos_ids))
        except Refused as error:
            raise UsageError(
                f"structured output is not possible with this tokenizer: {error}"
            ) from None
        bits = np.zeros(WORD_BITS * words_for(vocab_size), np.uint8)
        bits[:known] = 1
        self._known = np.packbits(bits, bitorder="little").view("<u4")

    def follow(self, rules: str) -> "GrammarConstraint":
        """Return the constraint of one text; raises UsageError for bad rules."""
        matcher = LLMatcher(self._tokenizer, rules, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            reason = _short(matcher.get_error())
            if not reason or reason.startswith("NoExtension"):
                reason = "no text obeys it"
            raise UsageError(f"this structure is not possible: {reason}")
        return GrammarConstraint(matcher, self._known)


class GrammarConstraint:
    """The allowed tokens, stop tokens included. `known`: mask, [W] u32.

    Raises UsageError if a limit is reached, ConstraintFailed for a token that is not allowed.
    """

    def __init__(self, matcher: LLMatcher, known: np.ndarray) -> None:
        self._matcher, self._known = matcher, known

    def fill(self, mask: np.ndarray) -> None:
        """Write the mask of allowed tokens, [W] u32."""
        bits = self._matcher.compute_bitmask()
        self._check()
        # The library's mask may have one more word.
        np.bitwise_and(np.frombuffer(bits, "<u4", mask.size), self._known, out=mask)

    def take(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)
        self._check()

    def undo(self, count: int) -> None:
        """Take back the last tokens."""
        if count:
            self._matcher.rollback(count)
            self._check()

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _short(self._matcher.get_error())
            if "doesn't satisfy the grammar" in reason:
                raise ConstraintFailed(f"the grammar rejected a sampled token: {reason}")
            raise UsageError(f"the text cannot go on as its structure wants: {reason}")


def lark_of(gbnf: str) -> str:
    """Convert a GBNF grammar to Lark's notation; raises UsageError."""
    try:
        text: str = gbnf_to_lark(gbnf)
    except Exception as error:  # library errors, and results of hostile input
        raise UsageError(f"the grammar is no GBNF: {_short(str(error))}") from None
    return text


def _short(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else ""
    if found := _IN_REGEX.search(message):
        line = f"{line.split(' (in regex)')[0]:.80}: {found[1]}"
    return line if len(line) <= _MESSAGE_CHARS else f"{line[:_MESSAGE_CHARS]}..."
