"""The tokens that a row of logits ranks first: what speculation keeps of a pass for later ones."""

import numpy as np

from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Param, Real, Value
from clocher_kernels.ops.sampling import NO_TOKEN

Array = np.ndarray


def top_tokens(*, logits: Array, candidates: Array) -> None:
    """Write the tokens of the largest logits of each row, in descending order.

    Equal logits rank by ascending id. A row with a logit that is NaN or infinite has `NO_TOKEN` in
    every place; so have the places of tokens that there are not.

    Args:
        logits: [R, V] fp32.
        candidates: [R, K] i32, written.
    """
    for row, kept in zip(logits, candidates, strict=True):
        kept[:] = NO_TOKEN
        if np.isfinite(row).all():
            first = np.argsort(-row, kind="stable")[: len(kept)]
            kept[: len(first)] = first


def _make(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    logits = rng.standard_normal((case.sizes["R"], case.sizes["V"]), dtype=np.float32)
    logits[-1] = np.round(logits[-1])  # ties
    return {"logits": logits}


SPECS = (
    OpSpec(
        "top_tokens",
        "tokens of the K largest logits",
        (Param("logits", "in", "R V"), Param("candidates", "out", "R K", "i32")),
        top_tokens,
        tuple(
            Case(f"r{r}-v{v}-k{k}", {"R": r, "V": v, "K": k})
            for r, v, k in ((1, 1024, 4), (5, 37, 4), (3, 2500, 8), (2, 3, 4), (1, 100, 1))
        ),
        EXACT,
        (Real("r1-v1024-k4", {"R": 1, "V": 201088, "K": 4}),),
        make=_make,
        flops=1,
    ),
)
