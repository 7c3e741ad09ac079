"""How a session decodes a block-diffusion model, and the requests that do so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import NO_TOKEN
from clocher_runtime.diffusion.canvas import Canvas, Draw, Rule, rule_of
from clocher_runtime.engine.requests import Request, Snapshot, Token
from clocher_runtime.models.spec import BlockDiffusion
from clocher_runtime.speculation.draft import Draft

_USUAL_RULE = "threshold:0.9"
_WHOLE_BLOCKS = b"\xff"  # no sequence has such a salt


@dataclass(slots=True, eq=False, kw_only=True)
class LookAhead(Request):
    """Decodes a block model losslessly: a forward drafts a block and verifies the previous one."""

    looks_ahead: ClassVar[bool] = True

    blocks: BlockDiffusion
    drafted: Sequence[int] = ()

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.forwards, self.drafted)

    def look_ahead(self, room: int) -> None:
        """Queue the last forward's draft for verification, and masks to draft from."""
        room = min(room, 2 * self.blocks.block - 1)
        most = min(room, self.budget - self.made - 1)
        drafted = list(self.drafted[: max(0, most)])
        self.draft = Draft(drafted, [0] * len(drafted))
        block = min(self.blocks.block, room - len(drafted), most - len(drafted))
        self.masks = [self.blocks.mask] * block if block > 1 else ()

    def advance(self, sampled: Sequence[int], logits: np.ndarray | None) -> list[Token]:
        """Verify the draft; keep what was chosen for the masks only if all of it was accepted."""
        made = Request.advance(self, sampled, logits)
        if made:
            # The first mask stands at the sequence's own next position, and has to agree with it.
            ahead = sampled[len(sampled) - len(self.masks) :]
            whole = self.kept == len(self.draft.tokens)
            right = whole and bool(ahead) and ahead[0] == self.ids[-1]
            self.drafted = [token for token in ahead[1:] if token >= 0] if right else ()
        return made

    def committed(self) -> None:
        Request.committed(self)
        self.masks = ()

    def leave(self) -> None:
        Request.leave(self)
        self.drafted = ()


@dataclass(slots=True, eq=False, kw_only=True)
class Denoise(Request):
    """Denoises blocks by a rule; `canvas` is the active block."""

    denoises: ClassVar[bool] = True

    canvas: Canvas

    @property
    def text_end(self) -> int:
        """Tokens before the active block."""
        return len(self.ids) // self.canvas.size * self.canvas.size

    @property
    def waiting_tokens(self) -> int:
        return self.text_end - self.cells

    @property
    def decodes(self) -> bool:
        return self.forwards > 0 and self.waiting_tokens <= self.canvas.size

    @property
    def wants_logits(self) -> bool:
        return True

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.forwards, self.canvas.ids[self.canvas.fixed :])

    def rows(self, count: int) -> int:
        return (len(self.masks) or 1) if count == self.waiting_tokens else 0

    def begin_block(self) -> None:
        self.canvas.begin(self.ids[self.text_end :])
        self.masks = self.canvas.shown

    def advance(self, sampled: Sequence[int], logits: np.ndarray | None) -> list[Token]:
        """Write the tokens that the rule commits; return those that are now final.

        `logits`: [B, V] fp32, or [1, V] of the last token before the block, to draw its first.
        """
        self.is_faulty = NO_TOKEN in sampled
        canvas, made = self.canvas, list[Token]()
        if self.is_faulty:
            return made
        assert logits is not None
        try:
            canvas.see(logits, self._draw(), self.queue.logits)
            for token in canvas.sure():
                made.append(self.take(token, canvas.logits.pop(len(self.ids) % canvas.size, None)))
                if made[-1].last:
                    break
        except Exception as error:
            self.queue.error = error
        self.begin_block()
        return made

    def _draw(self) -> Draw | None:
        sampling = self.sampling
        first = self.text_end - len(self.ids) + self.made  # a position is drawn with its own number
        if not (sampling.temperature or self.edits or sampling.on_host):
            return None
        return lambda row, at: self.draw(row, max(first + at, 0))


@dataclass(frozen=True, slots=True)
class Diffusing:
    """How blocks are decoded; `rule` None: lossless, a forward drafts a block and verifies one."""

    blocks: BlockDiffusion
    rule: Rule | None

    @property
    def name(self) -> str:
        """Name in reports."""
        return "lossless" if self.rule is None else self.rule.text

    def longest(self, cells: int) -> int:
        """Return the longest sequence for a context of `cells`; whole blocks under a rule."""
        return cells if self.rule is None else cells // self.blocks.block * self.blocks.block

    def request(self, longest: int, **fields: Any) -> Request:
        """Return a request with the fields of `Request`. Raises UsageError."""
        constraint, ids = fields["constraint"], fields["ids"]
        if self.rule is None:
            if constraint is None or hasattr(constraint, "undo"):
                return LookAhead(blocks=self.blocks, **fields)
            return Request(**fields)
        if constraint is not None:
            raise UsageError(
                f"a constraint with diffusion={self.name}: tokens are not made in their order; "
                "use diffusion=lossless or off"
            )
        if (room := self.longest(longest) - len(ids)) <= 0:
            raise UsageError(
                f"{len(ids)} tokens leave no room for a block in a context of "
                f"{longest}; shorten the prompt or raise --context"
            )
        fields["budget"] = min(fields["budget"], room)
        whole, size = self.blocks.context == "block", self.blocks.block
        if whole:  # a sequence that is scored has other keys
            fields["salt"] = _WHOLE_BLOCKS + fields["salt"]
        canvas = Canvas(self.blocks, self.rule)
        made = Denoise(canvas=canvas, block=size, whole_blocks=whole, **fields)
        made.begin_block()
        return made


def of_call(session: Diffusing | None, asked: str | None) -> Diffusing | None:
    """Return how a call decodes blocks, if unlike its session; else None. Raises UsageError."""
    if asked is None or (session is None and asked in ("auto", "off")):
        return session
    if session is None:
        raise UsageError(
            f"diffusion {asked}: this session decodes no blocks; load the model with diffusion=auto"
        )
    return among(session.blocks, asked)


def among(blocks: BlockDiffusion | None, asked: str) -> Diffusing | None:
    """Return the decoding that `--diffusion` names; None: autoregressively. Raises UsageError."""
    if blocks is None:
        raise UsageError(
            f"diffusion {asked}: this model does not denoise blocks (its config.json has no "
            "block_diffusion); use auto"
        )
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
    return Diffusing(blocks, rule)
