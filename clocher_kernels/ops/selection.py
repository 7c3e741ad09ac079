"""Which pages of a cache a token attends to: bounds of the keys of a page, scores, the choice.

A page is numbered as the token sees it: page b holds the token's cells b T .. b T + T - 1. Its
score is an upper bound of the logits of its cells, made of the least and the largest value of each
of the D columns of its keys. The last two pages are always read, so only pages that are full and
committed are ever scored, whatever else the step computes: what a token reads depends on nothing
but its query and the keys before it.

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, 2024
(arXiv 2406.10774); Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023
(arXiv 2309.17453).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.ops.attention import (
    Ancestors,
    Pages,
    Positions,
    Slots,
    own_cells,
    within_table,
)
from clocher_kernels.ops.contract import (
    EXACT,
    Case,
    Cost,
    In,
    InOut,
    OpSpec,
    Out,
    Real,
    Value,
    nearest,
    paged_case,
    planes,
    tokens,
)
from clocher_kernels.plan import Attr

Array = np.ndarray

LAST_PAGES = 2
"""Pages at the end of a sequence that are read at least: the keys of older ones are final."""
WORD = 64
"""Pages of a word of a list."""
_LARGEST = np.finfo(np.float32).max


def page_bounds(
    *,
    slots: Slots,
    positions: Positions,
    ends: Positions,
    ancestors: Ancestors,
    pages: Pages,
    k_cache: Annotated[Array, In("P H T D", "")],
    k_scale: Annotated[Array | None, In("P H T")] = None,
    bounds: Annotated[Array, InOut("P H 2 D")],
    cache_dtype: str,
) -> None:
    """Write the bounds of the keys of each page that a token of the step is the last cell of.

    Bounds are of the keys as they are stored: no key of the page is outside, and each is one of
    them. Where a key is not finite both are NaN. A page that is written again has new bounds.

    Args:
        bounds: [P, H, 2, D] fp32, updated: the largest value of each column, and the least.
        cache_dtype: storage of the cache.
        k_scale: [P, H, T] fp32, i8 only.
    """
    size = k_cache.shape[2]
    for _, page, offset in own_cells(slots, positions, ends, ancestors, pages, k_cache):
        if offset != size - 1:
            continue
        keys = to_f32(k_cache[page], cache_dtype)
        if k_scale is not None:
            keys = keys * k_scale[page][..., None]
        odd = ~np.isfinite(keys).all(axis=1)
        for place, bound in enumerate((keys.max(axis=1), keys.min(axis=1))):
            bounds[page, :, place] = np.where(odd, np.float32(np.nan), bound)


def select_pages(
    *,
    q: Annotated[Array, In("M F", std=2.0)],
    slots: Slots,
    positions: Positions,
    ends: Positions,
    ancestors: Ancestors,
    pages: Pages,
    bounds: Annotated[Array | None, In("P H 2 D")] = None,
    listed: Annotated[Array, Out("M H W", "u64")],
    counts: Annotated[Array, InOut("M H 2", "i64")],
    cells: int,
    scale: float,
    first: int = 1,
    last: int = LAST_PAGES,
    budget: int = 0,
    margin: float = 0.0,
    mass: float = 0.0,
) -> None:
    """List the pages that each token reads for each key/value head.

    The first and the last pages that it sees are always listed. One of `budget`, `margin` and
    `mass` says what else is; with none of them nothing is. The score of a page is the largest of
    its bounds over the query heads of the key/value head; one that is not finite is the largest
    number.

    Args:
        q: [M, F] fp32, F = query heads * D.
        listed: [M, H, W] u64, written: bit b % 64 of word b // 64 is page b.
        counts: [M, H, 2] i64, updated: pages listed, and pages seen, are added.
        cells: T, cells of a page.
        scale: factor of the dot product.
        first: pages at the beginning.
        last: pages at the end, at least 2.
        budget: pages in all: of those between the ones of highest score, of equal ones the first.
        margin: those whose score is at most so much below the highest, that of first ones included.
        mass: the fewest of highest score, first ones included, whose e^score is this share of all.
        bounds: [P, H, 2, D] fp32; not needed where only first and last pages are listed.
    """
    heads = listed.shape[1]
    listed[...] = 0
    for m in range(len(q)):
        _, end, tree = within_table(
            int(positions[m]), int(ends[m]), int(ancestors[m]), pages.shape[1] * cells
        )
        seen = -(-(end + tree.bit_count()) // cells)
        counts[m, :, 1] += seen
        old = max(seen - last, 0)
        for head in range(heads):
            chosen = np.zeros(seen, bool)
            chosen[:first] = chosen[old:] = True
            if bounds is not None and old > first:
                table = nearest(pages[nearest(slots[m], len(pages))], len(bounds))
                group = q[m].reshape(heads, -1, bounds.shape[3])[head] * np.float32(scale)
                score = page_scores(group, bounds[table[:old], head])
                chosen[:old] |= _choice(score, first, budget - first - last, margin, mass)
            counts[m, head, 0] += chosen.sum()
            words = np.packbits(chosen, bitorder="little")
            listed[m, head].view(np.uint8)[: len(words)] = words


def page_scores(q: Array, bounds: Array) -> Array:
    """Return the scores of pages, fp32 [B], which no logit of their cells is above.

    `q` are a group's scaled queries, fp32 [G, D]; `bounds` fp32 [B, 2, D].
    """
    high, low = bounds[None, :, 0].astype(np.float64), bounds[None, :, 1].astype(np.float64)
    query = q[:, None].astype(np.float64)
    scores = np.maximum(query * high, query * low).sum(axis=-1).max(axis=0)
    scores = np.where(np.isfinite(scores), scores, _LARGEST)
    return np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32)


def _choice(score: Array, first: int, count: int, margin: float, mass: float) -> Array:
    """Return which pages are listed for their score."""
    chosen = np.zeros(len(score), bool)
    if count > 0:
        order = np.argsort(-score[first:], kind="stable")
        chosen[first:][order[:count]] = True
    elif margin:
        chosen = score >= score.max() - np.float32(margin)
    elif mass:
        weights = np.exp((score - score.max()).astype(np.float64))
        falling = np.sort(score)[::-1]
        sums = np.array([weights[score >= cut].sum() for cut in falling])
        chosen = score >= falling[int((sums >= mass * weights.sum()).argmax())]
    return chosen


def _make_bounds(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    made: dict[str, Any] = {**tokens(case, rng), **planes(case, rng)}
    del made["v_cache"]
    made.pop("v_scale", None)
    shape = tuple(case.sizes[d] for d in "PH") + (2, case.sizes["D"])
    # Of several tokens that end pages: the last cell of a page of each slot.
    ends, size = made["ends"], case.sizes["T"]
    if case.options["tokens"] == "decode":
        ends[...] = np.arange(1, len(ends) + 1) % case.sizes["B"] * size + size
        made["positions"][...] = ends - 1
    return {**made, "bounds": np.full(shape, 7, np.float32)}


def _make_selection(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    sizes = case.sizes
    made: dict[str, Value] = dict(tokens(case, rng))
    made["counts"] = rng.integers(0, 99, (sizes["M"], sizes["H"], 2))
    if case.options["bounds"]:
        ends = rng.standard_normal((sizes["P"], sizes["H"], 2, sizes["D"]), dtype=np.float32)
        made["bounds"] = np.sort(ends, axis=2)[:, :, ::-1].copy()
    return made


def _selection_cost(values: Mapping[str, Any], attrs: Mapping[str, Attr]) -> Cost:
    q, ends, bounds = values["q"], values["ends"], values.get("bounds")
    if bounds is None:
        return Cost(q.nbytes, 0)
    pages = int(np.clip(ends // int(attrs["cells"]), 0, None).sum())
    return Cost(q.nbytes + pages * bounds.nbytes // len(bounds), 4 * pages * q.shape[1])


def _bounds_cost(values: Mapping[str, Any], attrs: Mapping[str, Attr]) -> Cost:
    cache, ends = values["k_cache"], values["ends"]
    full = int((ends % cache.shape[2] == 0).sum())
    page = cache.nbytes // len(cache)
    return Cost(full * page, 2 * full * page // cache.itemsize)


def _bounds_case(kv: str, m: int, kind: str, d: int) -> Case:
    case = paged_case("bounds", kv, m, kind, 2, 2, d)
    sizes = {letter: size for letter, size in case.sizes.items() if letter not in "NF"}
    name = f"{kind}-{kv}-m{m}-d{d}"
    return Case(name, sizes, {"cache_dtype": kv}, {}, case.options)


def _selection_case(
    name: str, m: int, kind: str, n: int, h: int, d: int, blocks: int, **attrs: Attr
) -> Case:
    case = paged_case(name, "f32", m, kind, n, h, d, blocks=blocks, listed=True)
    scored = bool({"budget", "margin", "mass"} & attrs.keys())
    sizes = {letter: size for letter, size in case.sizes.items() if letter != "N"}
    attrs = {"cells": case.sizes["T"], "scale": d**-0.5, **attrs}
    name = f"{name}-{kind}-m{m}-n{n}-h{h}-d{d}"
    options = {**case.options, "bounds": scored}
    return Case(name, sizes, attrs, {}, options)


_REAL = {"M": 1, "F": 2048, "H": 8, "D": 64, "S": 1, "B": 512, "P": 512, "T": 64, "W": 8}

SPECS = (
    OpSpec(
        page_bounds,
        (
            *(_bounds_case(kv, 3, "decode", 20) for kv in ("f32", "bf16", "f16", "e4m3", "e5m2")),
            _bounds_case("i8", 3, "decode", 32),
            _bounds_case("f16", 37, "prefill", 64),
            _bounds_case("i8", 40, "tree", 32),
        ),
        EXACT,
        make=_make_bounds,
        cost=_bounds_cost,
    ),
    OpSpec(
        select_pages,
        (
            _selection_case("topk", 3, "decode", 6, 2, 20, 70, budget=9),
            _selection_case("topk", 37, "prefill", 8, 2, 64, 40, budget=6, first=2, last=3),
            _selection_case("topk", 1, "decode", 8, 8, 128, 300, budget=40),
            _selection_case("topk", 3, "decode", 4, 2, 16, 9, budget=100),
            _selection_case("threshold", 3, "decode", 8, 2, 64, 130, margin=4.0),
            _selection_case("dynamic", 3, "decode", 8, 2, 64, 130, mass=0.9),
            _selection_case("dynamic", 20, "tree", 4, 1, 32, 30, mass=0.5),
            _selection_case("window", 5, "decode", 4, 2, 16, 130, first=2, last=5),
            _selection_case("window", 20, "prefill", 4, 2, 16, 3),
        ),
        EXACT,
        (Real("topk-decode-m1-*", _REAL),),
        make=_make_selection,
        cost=_selection_cost,
    ),
)
