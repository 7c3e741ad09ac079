"""How a session decodes a model that denoises blocks of masks."""

from collections.abc import Sequence
from dataclasses import dataclass

from clocher_kernels.errors import UsageError
from clocher_runtime.diffusion.asked import RULES, WORDS
from clocher_runtime.diffusion.canvas import Canvas
from clocher_runtime.diffusion.rules import Rule, rule_of
from clocher_runtime.engine.requests import Request
from clocher_runtime.models.spec import BlockDiffusion, ModelSpec

MODES = (*WORDS, *RULES)
"""What may be asked for; a rule may have its numbers behind a colon."""
_USUAL_RULE = "threshold:0.9"
_WHOLE_BLOCKS = b"\xff"  # no text has such a salt


@dataclass(frozen=True, slots=True)
class Diffusing:
    """How blocks are decoded.

    Attributes:
        blocks: of the model.
        vocabulary: ids of the model.
        rule: what a pass commits; None: a pass guesses a block and verifies the one before.
    """

    blocks: BlockDiffusion
    vocabulary: int
    rule: Rule | None

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return "lossless" if self.rule is None else self.rule.text

    def canvas(self, seed: int) -> Canvas:
        """Return the empty canvas of a new text, with a seed for noise."""
        assert self.rule is not None
        blocks = self.blocks
        return Canvas(
            blocks.block,
            blocks.mask,
            self.rule,
            whole_blocks=blocks.context == "block",
            shift=blocks.shift,
            part=blocks.part,
            vocabulary=self.vocabulary,
            seed=seed,
        )


def width_of(blocks: Diffusing | None) -> int:
    """Return the tokens and output rows that a sequence may take in a pass: two blocks, or 0."""
    return 0 if blocks is None else 2 * blocks.blocks.block


def usual_width(spec: ModelSpec) -> int:
    """Return the same of a session that is asked for nothing in particular."""
    return width_of(diffusing(spec, "auto", "auto"))


def longest_text(blocks: Diffusing | None, cells: int) -> int:
    """Return the longest text in a context of so many cells: of whole blocks under a rule."""
    if blocks is None or blocks.rule is None:
        return cells
    return cells // blocks.blocks.block * blocks.blocks.block


def prepare(blocks: Diffusing | None, requests: Sequence[Request], longest: int) -> None:
    """Let the requests of a call be decoded like this.

    Args:
        blocks: how; None: one token after the other.
        requests: of the call.
        longest: tokens of the longest text.

    Raises:
        UsageError: one is bound by a constraint, which a rule does not follow, or its prompt
            leaves no room for a block.
    """
    if blocks is None:
        return
    for request in requests:
        constraint = request.constraint
        if blocks.rule is None:
            if constraint is None or hasattr(constraint, "undo"):
                request.ahead = blocks.blocks
            continue
        if constraint is not None:
            raise UsageError(
                f"a constraint with diffusion={blocks.name}: tokens are not made in their order; "
                "use diffusion=lossless or off"
            )
        if len(request.ids) >= longest_text(blocks, longest):
            raise UsageError(
                f"{len(request.ids)} tokens leave no room for a block in a context of "
                f"{longest}; shorten the prompt or raise --context"
            )
        request.budget = min(request.budget, longest_text(blocks, longest) - len(request.ids))
        if blocks.blocks.context == "block":  # a text that is scored has other keys
            request.salt = _WHOLE_BLOCKS + request.salt
        request.canvas = blocks.canvas(request.sampling.seed)
        request.begin_block()


def of_call(session: Diffusing | None, asked: str | None) -> Diffusing | None:
    """Return how the blocks of a call are decoded; None: it makes one token after the other.

    Args:
        session: what its session does otherwise.
        asked: one of `MODES`; None: the same.

    Raises:
        UsageError: there is no such mode, or the session or its model does not have it.
    """
    if asked is None or (session is None and asked in ("auto", "off")):
        return session
    if session is None:
        raise UsageError(
            f"diffusion {asked}: this session decodes no blocks; load the model with diffusion=auto"
        )
    return among(session.blocks, session.vocabulary, asked)


def diffusing(spec: ModelSpec, asked: str, speculate: str) -> Diffusing | None:
    """Return how a session decodes blocks; None: it makes one token after the other.

    Args:
        spec: of the model.
        asked: one of `MODES`.
        speculate: as `Session` takes it.

    Raises:
        UsageError: there is no such mode, or the model does not have it.
    """
    blocks = spec.diffusion
    if blocks is None:
        if asked in ("auto", "off"):
            return None
        if asked != "lossless":
            rule_of(asked)
        raise UsageError(
            f"diffusion {asked}: this model does not denoise blocks (its config.json has no "
            "block_diffusion); use auto"
        )
    found = among(blocks, spec.vocab_size, asked)
    if found is not None and speculate not in ("auto", "off"):
        raise UsageError(
            f"speculate {speculate} with diffusion {asked}: blocks are guessed by the model "
            "itself; use diffusion=off, or speculate=auto"
        )
    return found


def among(blocks: BlockDiffusion, vocabulary: int, asked: str) -> Diffusing | None:
    """Return how blocks are decoded as one of `MODES` says; None: not at all.

    Args:
        blocks: of the model.
        vocabulary: its ids.
        asked: one of `MODES`.

    Raises:
        UsageError: there is no such mode, or the model does not have it.
    """
    causal = blocks.context == "causal"
    if asked in ("off", "lossless") and not causal:
        raise UsageError(
            f"diffusion {asked}: the tokens of this model's blocks see each other, so it has no "
            f"next token to verify with; use auto, which is {_USUAL_RULE}"
        )
    if asked == "off":
        return None
    if asked == "auto" and not causal:
        asked = _USUAL_RULE
    rule = None if asked in ("auto", "lossless") else rule_of(asked)
    return Diffusing(blocks, vocabulary, rule)
