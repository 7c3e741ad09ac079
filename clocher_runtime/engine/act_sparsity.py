"""Lossy activation sparsity as in TEAL (arXiv 2408.14690): small inputs of matmuls are dropped.

What is dropped from a token depends only on it, so batches and drafts change nothing.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats.base import Format
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import read_instead
from clocher_kernels.ops.skip import skips_columns
from clocher_kernels.plan import Attr, Call, Executor, Plan
from clocher_runtime.config.values import shown
from clocher_runtime.engine.forwards import StepInputs
from clocher_runtime.engine.requests import OutputQueue, Request
from clocher_runtime.models.build import PAGE_CELLS
from clocher_runtime.models.spec import ModelSpec

THRESHOLD = "act.threshold."
KEPT = ".kept"
LEAST_TOKENS, MOST_TOKENS = 64, 2048
"""Calibration tokens: required, and used at most."""
_SEQUENCE = 256
"""Tokens per calibration forward; fixed, so that thresholds do not depend on the session."""
_ADAPTIVE: Mapping[str, Attr] = {"most": 1.0, "least": 0.5}
_KINDS = ("", "topk", "threshold")
_PLACES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ActSparsity:
    """Which inputs are dropped: a calibrated share `drop`, or below an absolute `threshold`.

    `attrs`: of `drop_small`, for thresholds per token.
    """

    drop: float | None = None
    threshold: float | None = None
    attrs: Mapping[str, Attr] = field(default_factory=dict)


def act_sparsity(text: object) -> ActSparsity:
    """Read "0.25", "topk:0.75", "threshold:0.1" or "adaptive". Raises UsageError."""
    kind, _, number = text.rpartition(":") if isinstance(text, str) else ("?", "", "")
    if text == "adaptive":
        return ActSparsity(attrs=_ADAPTIVE)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if kind not in _KINDS or not 0 < value < (inf if kind == "threshold" else 1):
        raise UsageError(
            f"act_sparsity: got {shown(text)}, expected the share of inputs to drop (0.25), "
            "topk:F with the share to keep (topk:0.75), threshold:T with an absolute threshold "
            "(threshold:0.1), or adaptive"
        )
    if kind == "topk":
        return ActSparsity(attrs={"most": value, "least": value})
    return ActSparsity(threshold=value) if kind else ActSparsity(drop=value)


def drop_inputs(
    plan: Plan, spec: ModelSpec, formats: Mapping[str, Format], wanted: ActSparsity
) -> Plan:
    """Return a Plan that drops small inputs of the matmuls in its layers. Raises UsageError."""
    if spec.moe is not None:
        raise UsageError(
            "act_sparsity on a model with experts: of these few are read anyway; leave it out"
        )
    chosen = {name for name in formats if any(f".{p}_proj." in name for p in _PLACES)}
    wrong = sorted(name for name in chosen if not skips_columns(formats[name]))
    if wrong or not chosen:
        stored = f"{wrong[0]} is {formats[wrong[0]].name}" if wrong else "it has no such matmuls"
        raise UsageError(
            f"act_sparsity on a model where {stored}; expected ternary weights, or symmetric int4 "
            "of 32, 64 or 128 columns per scale: --precision int4 makes it of float weights"
        )
    numbers = itertools.count()

    def skips(call: Call) -> bool:
        return call.op == "linear" and call.args["w"] in chosen

    # Ternary weights multiply codes: what is small is dropped before these are made, which leaves
    # their scale, that of the largest input, as it is.
    codes = {call.args["x"] for call in plan.calls if skips(call) and has_codes(call)}

    def kept(call: Call) -> Call | None:
        if has_codes(call) or not (skips(call) or call.args.get("q") in codes):
            return None
        args = {"x": call.args["x"], "y": call.args["x"] + KEPT}
        if not wanted.attrs:
            args["threshold"] = f"{THRESHOLD}{next(numbers)}"
        return Call("drop_small", args, wanted.attrs)

    plan, consts, calls = read_instead(plan, kept), dict(plan.consts), []
    for call in plan.calls:
        if "threshold" in call.args:
            consts[call.args["threshold"]] = np.full(1, wanted.threshold or 0, np.float32)
        calls.append(replace(call, op="skip_linear") if skips(call) else call)
    return replace(plan, consts=consts, calls=tuple(calls))


def calibrate(executor: Executor, ids: Sequence[int] | None, drop: float, longest: int) -> None:
    """Calibrate the Plan's thresholds to drop a share of each input. Raises UsageError."""
    if ids is None or len(ids) < LEAST_TOKENS:
        raise UsageError(
            f"act_sparsity {drop:g} needs a calibration text of at least {LEAST_TOKENS} tokens, "
            f"got {0 if ids is None else len(ids)}: give --act-calibration FILE, or use topk:F or "
            "adaptive, which need none"
        )
    text, longest = list(ids[:MOST_TOKENS]), min(_SEQUENCE, longest)
    counts: dict[str, np.ndarray] = {}
    inputs, blocks = StepInputs(executor), -(-longest // PAGE_CELLS)
    for name in {"pages", "window_pages"} & set(executor.plan.buffers):
        executor.array(name)[0, :blocks] = np.arange(blocks)
    for start in range(0, len(text), longest):
        request = Request(ids=text[start : start + longest], slot=0, queue=OutputQueue(1))
        while count := min(request.waiting_tokens, executor.plan.tokens):
            inputs.stage([(request, count)])
            for call in executor.walk(count, 1):
                if call.op == "drop_small":
                    bits = executor.peek(call.args["x"], count).view(np.uint32) & 0x7FFFFFFF
                    found = np.bincount((bits >> 16).reshape(-1), minlength=1 << 15)
                    name = call.args["threshold"]
                    counts[name] = counts.get(name, 0) + found
            request.cells += count
    for name, found in counts.items():
        place = int(np.searchsorted(np.cumsum(found), drop * found.sum()))
        executor.plan.consts[name].view(np.uint32)[0] = place << 16
