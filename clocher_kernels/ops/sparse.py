"""Small activations are dropped, so that products can skip their channels (`ops.skip`)."""

import numpy as np

from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Param, Real, Value

Array = np.ndarray

_LANES = 16
_NOT_ON = {"cuda": "only CPU matmuls skip the channels that it drops"}


def drop_small(
    *, x: Array, y: Array, threshold: Array | None = None, most: float = 1.0, least: float = 1.0
) -> None:
    """Set the activations of a token to zero that are small.

    With a threshold, those below it. Without one it is the token's own: that which keeps the
    largest ceil(K f). f is `least` where all weight is in one channel, and `most` where it is in
    all alike: f = least + (most - least) (sum |x|)^2 / (K sum x^2), the inverse participation
    ratio, an entropy (of order 2) without a logarithm. As many as share the last place are kept.

    Args:
        x: [M, K] fp32. NaN and infinity are kept.
        y: [M, K] fp32, written.
        threshold: [T] fp32, T = 1.
        most: largest share of channels to keep.
        least: smallest one; that of `most` for the same share in every token.

    Source: TEAL (arXiv 2408.14690) for thresholds; Q-Sparse (arXiv 2407.10969) for the largest K.
    """
    size = np.abs(x)
    if threshold is not None:
        y[...] = np.where(size < threshold[0], np.float32(0), x)
        return
    for row, out, values in zip(size, y, x, strict=True):
        bits = row.view(np.int32)
        count = _kept(row, np.float32(most), np.float32(least))
        out[...] = np.where(bits < np.sort(bits)[len(row) - count], np.float32(0), values)


def _kept(size: Array, most: np.float32, least: np.float32) -> int:
    """Return how many of a token's channels are kept; every step is rounded to fp32."""
    k = np.float32(len(size))
    with np.errstate(all="ignore"):
        total, squares = _lane_sum(size), _lane_sum(size * size)
        even = total * total / (k * squares)
    if not even <= 1:
        even = np.float32(1)
    wanted = (least + (most - least) * even) * k
    return int(max(1, min(np.ceil(wanted), len(size))))


def _lane_sum(values: Array) -> np.float32:
    """Return the sum as 16 lanes make it, then the tree 16 -> 8 -> 4 -> 2 -> 1."""
    cells = np.zeros((-(-len(values) // _LANES), _LANES), np.float32)
    cells.reshape(-1)[: len(values)] = values
    sums = np.zeros(_LANES, np.float32)
    for row in cells:
        sums += row
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return np.float32(sums[0])


def _make_activations(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    x = rng.standard_normal([case.sizes[d] for d in "MK"], dtype=np.float32)
    x[-1] **= 3
    x[..., -3:] = 0
    x[..., 1] = x[..., 2]  # a tie
    found: dict[str, Value] = {"x": x}
    if "T" in case.sizes:
        found["threshold"] = np.full(1, 0.4, np.float32)
    return found


_SHARES = {"topk": (0.6, 0.6), "adaptive": (1.0, 0.5)}


def _dropping(name: str, m: int, k: int) -> Case:
    sizes = {"M": m, "K": k, **({"T": 1} if name == "threshold" else {})}
    most, least = _SHARES.get(name, (1.0, 1.0))
    return Case(
        f"{name}-m{m}-k{k}",
        sizes,
        {} if name == "threshold" else {"most": most, "least": least},
        options={"threshold": True} if name == "threshold" else {},
        missing=_NOT_ON,
    )


SPECS = (
    OpSpec(
        "drop_small",
        "activations with the small ones set to zero, by a threshold or by the token's own",
        (
            Param("x", "in", "M K"),
            Param("threshold", "vector", "T", optional=True),
            Param("y", "out", "M K"),
        ),
        drop_small,
        tuple(
            _dropping(name, m, k)
            for name in ("threshold", "topk", "adaptive")
            for m, k in ((1, 256), (5, 100), (3, 37))
        ),
        EXACT,
        (Real("*-m1-*", {"M": 1, "K": 8192}),),
        make=_make_activations,
    ),
)
