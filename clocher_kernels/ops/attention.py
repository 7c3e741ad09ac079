"""KV cache append and attention over a paged cache.

The cache of a layer is two planes [P, H, T, D]: P pages of T cells for H key/value heads of D
values. `pages` [S, B] maps block b of slot s to a page, so cell c of slot s is cell c % T of page
pages[s, c // T]. With KV dtype i8 each (page, head, cell) has an fp32 scale.

A token whose slot, cell or page there is not writes nothing. Cells beyond the page table are not
seen.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np

from clocher_kernels.dtypes import LARGEST, STORAGE, from_f32, to_f32
from clocher_kernels.ops.contract import (
    EXACT,
    Case,
    Cost,
    In,
    InOut,
    OpSpec,
    Out,
    Real,
    Tolerance,
    Value,
    Vector,
    nearest,
    paged_case,
    planes,
    tokens,
)
from clocher_kernels.plan import Attr

Array = np.ndarray

# What ops know of each token, and the page table.
Slots = Annotated[Array, In("M", "i32", below="S")]
Positions = Annotated[Array, In("M", "i32")]
Ancestors = Annotated[Array, In("M", "u64")]
Pages = Annotated[Array, In("S B", "i32", below="P")]

KV_DTYPES = ("f32", "bf16", "f16", "e4m3", "e5m2", "i8")


def own_cells(
    slots: Array, positions: Array, ends: Array, ancestors: Array, pages: Array, cache: Array
) -> Iterator[tuple[int, int, int]]:
    """Yield tokens whose own cell exists: token, page, cell of the page.

    It is the cell of the position; of a tree node, that of its highest bit after `end`.
    """
    size = cache.shape[2]
    for m, slot in enumerate(slots):
        tree = int(ancestors[m])
        cell = int(ends[m]) + tree.bit_length() - 1 if tree else int(positions[m])
        if 0 <= slot < len(pages) and 0 <= cell < pages.shape[1] * size:
            page = pages[slot, cell // size]
            if 0 <= page < len(cache):
                yield m, page, cell % size


def visible_cells(
    position: int, end: int, ancestors: int, window: int, chunk: int = 0
) -> list[int]:
    """Return the cells a token sees, in the order they are summed.

    `window` is the number of visible keys, the query's own included (0: no limit). With `chunk` a
    token sees no key before the last position that is a multiple of it and not its future, its
    chunk's first; Llama 4 has such layers. Committed cells
    0 .. end-1 hold their own positions. The ancestors of a tree node are a chain that ends at the
    node, so the position of one is that of the node minus the number of later bits.
    """
    if chunk:
        window = min(window or chunk, position % chunk + 1)
    first = max(0, position - window + 1) if window else 0
    cells = list(range(first, end))
    for bit in range(64):
        if ancestors >> bit & 1:
            behind = (ancestors >> (bit + 1)).bit_count()
            if not window or behind < window:
                cells.append(end + bit)
    return cells


def bits_of(words: Array) -> Array:
    """Return the bits of words [..., W] u64 as booleans [..., 64 W], the lowest first."""
    return np.unpackbits(words.astype("<u8").view(np.uint8), axis=-1, bitorder="little") > 0


def within_table(position: int, end: int, ancestors: int, cells: int) -> tuple[int, int, int]:
    """Return a token's position, end and ancestors without what is beyond the page table."""
    end = min(max(end, 0), cells)
    return min(max(position, 0), cells - 1), end, ancestors & ((1 << (cells - end)) - 1)


def kv_append(
    *,
    k: Annotated[Array, In("M F")],
    v: Annotated[Array, In("M F")],
    slots: Slots,
    positions: Positions,
    ends: Positions,
    ancestors: Ancestors,
    pages: Pages,
    k_cache: Annotated[Array, InOut("P H T D", "")],
    v_cache: Annotated[Array, InOut("P H T D", "")],
    k_scale: Annotated[Array | None, InOut("P H T")] = None,
    v_scale: Annotated[Array | None, InOut("P H T")] = None,
    cache_dtype: str,
) -> None:
    """Write the keys and values of this step's tokens into the cache.

    Args:
        k: [M, F] fp32, F = H * D.
        cache_dtype: f32, bf16, f16, e4m3, e5m2 (round to nearest even; those below 32 bits
            saturate, and NaN and infinity become NaN), or i8: codes clamp(rint(x / scale), -127,
            127) with scale = absmax / 127 of the head, 1 if all are zero, NaN if one is not finite.
        k_scale: [P, H, T] fp32, updated; i8 only.
        v_scale: [P, H, T] fp32, updated; i8 only.
    """
    heads, _, dim = k_cache.shape[1:]
    for m, page, offset in own_cells(slots, positions, ends, ancestors, pages, k_cache):
        for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            row = x[m].reshape(heads, dim)
            if scale is None:
                cache[page, :, offset] = from_f32(_saturated(row, cache_dtype), cache_dtype)
            else:
                finite = np.isfinite(row)
                row = np.where(finite, row, np.float32(0))
                absmax = np.abs(row).max(axis=1)
                step = np.where(absmax > 0, absmax / np.float32(127), np.float32(1))
                scale[page, :, offset] = np.where(finite.all(axis=1), step, np.float32(np.nan))
                cache[page, :, offset] = np.clip(np.rint(row / step[:, None]), -127, 127)


def _saturated(values: Array, dtype: str) -> Array:
    if dtype == "f32":
        return values
    largest = np.float32(LARGEST[dtype])
    return np.where(np.isfinite(values), np.clip(values, -largest, largest), np.float32(np.nan))


def attention(
    *,
    q: Annotated[Array, In("M F", std=2.0)],
    slots: Slots,
    positions: Positions,
    ends: Positions,
    ancestors: Ancestors,
    pages: Pages,
    k_cache: Annotated[Array, In("P H T D", "")],
    v_cache: Annotated[Array, In("P H T D", "")],
    k_scale: Annotated[Array | None, In("P H T")] = None,
    v_scale: Annotated[Array | None, In("P H T")] = None,
    sinks: Annotated[Array | None, Vector("N")] = None,
    listed: Annotated[Array | None, In("M H W", "u64")] = None,
    y: Annotated[Array, Out("M F", narrow=True)],
    cache_dtype: str,
    scale: float,
    window: int,
    chunk: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend from each token to the visible cells of its slot.

    y = softmax([q k * scale, sink])[:-1] v for each query head; query head h reads key/value head
    h // (heads of q / H). A sink enlarges the denominator and has no value. A token that sees
    nothing gets zeros.

    Args:
        q: [M, F] fp32, F = query heads * D.
        ends: [M] i32, committed keys that the token may see.
        ancestors: [M] u64, see `plan`.
        cache_dtype: storage of the cache.
        scale: factor of the dot product, usually D^-0.5.
        window: visible keys, the query included; 0 for all.
        chunk: positions of a chunk, beyond whose first nothing is seen; 0 for one chunk.
        softcap: scaled logits become softcap * tanh(logit / softcap) (Gemma 2); 0 for none.
        k_scale: [P, H, T] fp32, i8 only.
        v_scale: [P, H, T] fp32, i8 only.
        sinks: [N] fp32, one logit per query head.
        listed: [M, H, W] u64, the pages that are read, see `selection.select_pages`; None: all.

    Source: gpt-oss (sinks, alternating window); transformers GptOssAttention.
    """
    kv_heads, size, dim = k_cache.shape[1:]
    heads = q.shape[1] // dim
    group = heads // kv_heads
    for m in range(len(q)):
        sight = within_table(
            int(positions[m]), int(ends[m]), int(ancestors[m]), pages.shape[1] * size
        )
        cells = np.array(visible_cells(*sight, window, chunk), np.int64)
        if not len(cells):
            y[m] = 0
            continue
        table = pages[nearest(slots[m], len(pages))]
        page, offset = nearest(table[cells // size], len(k_cache)), cells % size
        shown = np.ones((len(cells), heads), bool)
        if listed is not None:
            numbers = np.arange(len(cells)) + sight[1] + sight[2].bit_count() - len(cells)
            shown = bits_of(listed[m])[:, numbers // size].repeat(group, axis=0).T
        stored = []
        for cache, step in ((k_cache, k_scale), (v_cache, v_scale)):
            plane = to_f32(cache[page, :, offset], cache_dtype).astype(np.float64)  # [S, H, D]
            if step is not None:
                plane *= step[page, :, offset][..., None]
            stored.append(np.where(shown[..., None], plane.repeat(group, axis=1), 0))
        keys, values = stored
        query = q[m].reshape(heads, dim).astype(np.float64)
        logits = np.einsum("hd,shd->hs", query, keys) * scale
        if softcap:
            logits = softcap * np.tanh(np.where(np.isfinite(logits), logits, np.nan) / softcap)
        logits[~shown.T] = -np.inf
        top = np.maximum(logits.max(axis=1), np.finfo(np.float32).min)
        if sinks is not None:
            top = np.maximum(top, sinks)
        weights = np.exp(logits - top[:, None])
        total = weights.sum(axis=1)
        if sinks is not None:
            total += np.exp(sinks - top)
        total[~shown.any(axis=0) & (total == 0)] = 1
        y[m] = (np.einsum("hs,shd->hd", weights, values) / total[:, None]).reshape(-1)


def _make_append(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    m, f = case.sizes["M"], case.sizes["H"] * case.sizes["D"]
    k, v = (rng.standard_normal((m, f), dtype=np.float32) * np.float32(9) for _ in "kv")
    k[0] = 0
    return {"k": k, "v": v, **tokens(case, rng), **planes(case, rng)}


def _make_attention(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    made = {**tokens(case, rng), **planes(case, rng)}
    if case.options.get("listed"):
        shape = tuple(case.sizes[d] for d in "MHW")
        made["listed"] = rng.integers(0, 1 << 64, shape, np.uint64)
    return made


def _append_cost(values: Mapping[str, Any], attrs: Mapping[str, Attr]) -> Cost:
    k, item = values["k"], STORAGE[str(attrs["cache_dtype"])].itemsize
    return Cost(2 * k.size * (4 + item), 2 * k.size)


def _attention_cost(values: Mapping[str, Any], attrs: Mapping[str, Attr]) -> Cost:
    q, cache, positions, ends = (values[n] for n in ("q", "k_cache", "positions", "ends"))
    window, chunk = int(attrs["window"]), int(attrs.get("chunk", 0))
    rows = zip(positions, ends, strict=True)
    keys = sum(len(visible_cells(int(p), int(e), 0, window, chunk)) for p, e in rows)
    cell = cache.shape[1] * cache.shape[3] * cache.itemsize
    return Cost(2 * keys * cell + 2 * q.nbytes, 4 * keys * q.shape[1])


_ATTENTION_CASES = (
    *(paged_case("decode", kv, 1, "decode", 8, 2, 32, sinks=True) for kv in KV_DTYPES),
    *(paged_case("batch-window", kv, 5, "decode", 6, 2, 20, window=17) for kv in KV_DTYPES),
    paged_case("prefill", "bf16", 37, "prefill", 4, 4, 64, sinks=True),
    paged_case("prefill-window", "f32", 33, "prefill", 4, 1, 32, window=8),
    paged_case("block", "bf16", 8, "block", 4, 2, 32),
    paged_case("block-window", "f16", 8, "block", 4, 2, 32, window=20),
    paged_case("tree", "bf16", 15, "tree", 4, 2, 32, sinks=True),
    paged_case("tree-window", "f32", 31, "tree", 4, 2, 16, window=4),
    paged_case("window-one", "f32", 3, "decode", 4, 2, 16, window=1),
    paged_case("long", "bf16", 2, "decode", 4, 2, 128, blocks=40),
    paged_case("softcap", "f32", 5, "decode", 6, 2, 32, softcap=1.5),
    paged_case("softcap-window", "bf16", 37, "prefill", 8, 2, 64, softcap=0.7, window=9),
    paged_case("chunk", "f32", 5, "decode", 6, 2, 20, chunk=24),
    paged_case("chunk-prefill", "bf16", 37, "prefill", 4, 2, 32, chunk=13),
    paged_case("chunk-tree", "f16", 15, "tree", 4, 2, 32, chunk=50),
    *(
        paged_case(f"listed-{kind}", kv, m, kind, 6, 2, 36, size=64, blocks=10, listed=True)
        for kind, kv, m in (("decode", "f16", 3), ("prefill", "i8", 37), ("tree", "f32", 6))
    ),
    paged_case("listed-sinks", "bf16", 2, "decode", 8, 2, 64, size=64, listed=True, sinks=True),
)


def _append_case(name: str, kv: str, m: int, kind: str, d: int) -> Case:
    case = paged_case(name, kv, m, kind, 2, 2, d)
    return Case(case.id, case.sizes, {"cache_dtype": kv}, {}, case.options)


_APPEND_CASES = (
    *(_append_case("append", kv, 3, "decode", 20) for kv in KV_DTYPES),
    _append_case("append-tree", "bf16", 7, "tree", 32),
    _append_case("append-chunk", "bf16", 33, "prefill", 32),
)

_CACHE = {"H": 8, "D": 64, "S": 1, "B": 128}

SPECS = (
    OpSpec(
        kv_append,
        _APPEND_CASES,
        EXACT,
        (
            Real("append-*-m3-*", {"M": 1, "N": 8, **_CACHE}),
            Real("append-chunk-*", {"M": 64, "N": 8, **_CACHE}),
        ),
        make=_make_append,
        cost=_append_cost,
    ),
    OpSpec(
        attention,
        _ATTENTION_CASES,
        Tolerance(5e-6, 5e-5),
        (
            Real("decode-*", {"M": 1, "N": 64, **_CACHE}),
            Real("prefill-bf16-*", {"M": 64, "N": 64, **_CACHE}),
        ),
        rounds=True,
        make=_make_attention,
        cost=_attention_cost,
    ),
)
