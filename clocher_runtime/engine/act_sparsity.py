"""Activation thresholds: which small inputs of products are dropped. A lossy variant of a model.

Thresholds come from the distribution of each input over a calibration text, in the manner of TEAL
(arXiv 2408.14690), the same share for every matrix; or from each token itself. What of a token is
dropped depends on nothing but the token, so prompts, batches and guesses give the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats.base import Format
from clocher_kernels.ops.skip import skips_columns
from clocher_kernels.plan import Attr, Buffer, Call, Plan
from clocher_runtime.config.values import shown
from clocher_runtime.models.build import PAGE_CELLS, page_table
from clocher_runtime.models.spec import ModelSpec

THRESHOLD = "act.threshold."
"""How the names of thresholds begin."""
KEPT = ".kept"
LEAST_TOKENS, MOST_TOKENS = 64, 2048
"""Tokens of a calibration text that are needed, and that are looked at."""
_SEQUENCE = 256
"""Tokens of a piece, whatever the chunk of a session is, so that thresholds are the same."""
_ADAPTIVE: Mapping[str, Attr] = {"most": 1.0, "least": 0.5}
_PLACES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ActSparsity:
    """How inputs are chosen.

    Attributes:
        drop: share of each input below its threshold, or None if each token has its own.
        attrs: of `drop_small`, if each token has.
    """

    drop: float | None
    attrs: Mapping[str, Attr]


def act_sparsity(text: object) -> ActSparsity:
    """Read "0.25" (thresholds), "topk:0.75" (share that is kept) or "adaptive".

    Raises:
        UsageError: it is something else, or a share is not above 0 and below 1.
    """
    kind, _, number = text.rpartition(":") if isinstance(text, str) else ("?", "", "")
    if text == "adaptive":
        return ActSparsity(None, _ADAPTIVE)
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if kind not in ("", "topk") or not 0 < share < 1:
        raise UsageError(
            f"act_sparsity is {shown(text)}; expected the share of inputs to drop (0.25), "
            "topk:F with the share to keep (topk:0.75), or adaptive"
        )
    return ActSparsity(None, {"most": share, "least": share}) if kind else ActSparsity(share, {})


def drop_inputs(
    plan: Plan, spec: ModelSpec, formats: Mapping[str, Format], wanted: ActSparsity
) -> Plan:
    """Return a Plan that drops small inputs of the products in its layers.

    Raises:
        UsageError: there is a product in them that cannot skip what is dropped.
    """
    if spec.moe is not None:
        raise UsageError(
            "act_sparsity on a model with experts: of these few are read anyway; leave it out"
        )
    chosen = {name for name in formats if any(f".{p}_proj." in name for p in _PLACES)}
    wrong = sorted(name for name in chosen if not skips_columns(formats[name]))
    if wrong or not chosen:
        stored = f"{wrong[0]} is {formats[wrong[0]].name}" if wrong else "it has no such products"
        raise UsageError(
            f"act_sparsity on a model where {stored}; it pays with symmetric int4 of 32, 64 or 128 "
            "columns per scale alone: --precision int4 makes it of float weights"
        )
    buffers, consts, calls = dict(plan.buffers), dict(plan.consts), []
    current: set[str] = set()
    for call in plan.calls:
        if call.op == "linear" and call.args["w"] in chosen:
            x = call.args["x"]
            kept = x + KEPT
            if x not in current:
                buffers[kept] = Buffer(buffers[x].shape, "f32", buffers[x].rows)
                args = {"x": x, "y": kept}
                if wanted.drop is not None:
                    args["threshold"] = f"{THRESHOLD}{len(consts)}"
                    consts[args["threshold"]] = np.zeros(1, np.float32)
                calls.append(Call("drop_small", args, wanted.attrs))
                current.add(x)
            call = Call("skip_linear", {**call.args, "x": kept}, call.attrs)
        calls.append(call)
        current -= {call.args[p] for p in ("y", "x") if p in call.args and _writes(call, p)}
    return replace(plan, buffers=buffers, consts=consts, calls=tuple(calls))


def _writes(call: Call, param: str) -> bool:
    from clocher_kernels.ops import OPS

    return OPS[call.op].param(param).kind in ("out", "inout")


class Walker(Protocol):
    """An executor that can be watched."""

    plan: Plan

    def array(self, name: str) -> np.ndarray:
        """Return a live buffer."""

    def walk(self, tokens: int, rows: int) -> Any:
        """Execute a step call by call."""

    def peek(self, name: str, count: int) -> np.ndarray:
        """Return rows of a buffer."""


def calibrate(executor: Walker, ids: Sequence[int] | None, drop: float, longest: int) -> None:
    """Set the thresholds of a Plan so that a share of each input over a text is below them.

    Args:
        executor: bound to the Plan of `drop_inputs`, before its first step.
        ids: the text's tokens; pieces of it are computed, each from position 0.
        drop: the share.
        longest: tokens that its KV cache has room for.

    Raises:
        UsageError: there are too few tokens, or no such ones.
    """
    if ids is None or len(ids) < LEAST_TOKENS:
        raise UsageError(
            f"act_sparsity {drop:g} needs a calibration text of at least {LEAST_TOKENS} tokens, "
            f"got {0 if ids is None else len(ids)}: give --act-calibration FILE, or use topk:F or "
            "adaptive, which need none"
        )
    text = np.asarray(ids[:MOST_TOKENS], np.int32)
    longest, chunk = min(_SEQUENCE, longest), executor.plan.tokens
    counts: dict[str, np.ndarray] = {}
    pieces = [text[at : at + longest] for at in range(0, len(text), longest)]
    parts = [(at, piece[at : at + chunk]) for piece in pieces for at in range(0, len(piece), chunk)]
    for first, part in parts:
        _stage(executor, first, part, longest)
        for call in executor.walk(len(part), 1):
            if call.op == "drop_small":
                bits = executor.peek(call.args["x"], len(part)).view(np.uint32) & 0x7FFFFFFF
                found = np.bincount((bits >> 16).reshape(-1), minlength=1 << 15)
                name = call.args["threshold"]
                counts[name] = counts.get(name, 0) + found
    for name, found in counts.items():
        place = int(np.searchsorted(np.cumsum(found), drop * found.sum()))
        executor.plan.consts[name].view(np.uint32)[0] = place << 16


def _stage(executor: Walker, first: int, part: np.ndarray, longest: int) -> None:
    """Write the inputs of the tokens of a text from its token `first`."""
    places = np.arange(first, first + len(part), dtype=np.int32)
    executor.array("ids")[: len(part)] = part
    executor.array("positions")[: len(part)] = places
    executor.array("ends")[: len(part)] = places + 1
    for name in ("slots", "ancestors", "rows", "masked", "temperature"):
        executor.array(name)[...] = 0
    blocks = -(-longest // PAGE_CELLS)
    for name in ("pages", "window_pages"):
        if name in executor.plan.buffers:
            executor.array(name)[0, :blocks] = page_table(1, blocks)[0]
