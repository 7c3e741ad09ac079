"""Choose the next tokens, and step the token inputs on, so that a decode step needs no host."""

from typing import Annotated

import numpy as np

from clocher_kernels.ops.contract import EXACT, Case, In, InOut, OpSpec, Out, Real, Value, nearest

Array = np.ndarray

NO_TOKEN = -1
"""What is sampled from logits that are not all finite: the step went wrong."""
NONE_ALLOWED = -2
"""What is sampled from finite logits if masks and edits allow no token."""
FORBIDDEN = float(np.finfo(np.float32).min)
"""A logit that no token is drawn by."""
WORD_BITS = 32
"""Tokens of a word of a mask."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def uniform(seed: int, draw: int) -> float:
    """Return the draw-th number in [0, 1) of a seed: SplitMix64 of seed + (draw + 1) * golden.

    Counter based, so a sequence draws the same numbers whatever batch it is in.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    z = (seed + (draw + 1) * _GOLDEN) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return float((z >> 11) * 2.0**-53)


def words_for(vocabulary: int) -> int:
    """Return the words of a mask of so many tokens."""
    return -(-vocabulary // WORD_BITS)


def tokens_of(mask: Array, vocabulary: int) -> Array:
    """Return the tokens that a mask, [W] u32, allows, ascending."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), count=vocabulary, bitorder="little")
    return np.flatnonzero(bits)


def allows(mask: Array, token: int) -> bool:
    """Return whether a mask, [W] u32, allows a token."""
    return bool(mask[token // WORD_BITS] >> np.uint32(token % WORD_BITS) & np.uint32(1))


def edited(row: Array, ids: Array, edits: Array) -> Array:
    """Return logits, [V] fp32, after the edits, [N, 3] fp32, of the tokens `ids`, each once.

    An edit is (strength, minus, plus): a logit above 0 is divided by the strength and another one
    multiplied, then the others are subtracted and added, each step rounded to fp32. What gets below
    `FORBIDDEN` is that. An id out of range changes nothing.
    """
    row, inside = row.copy(), (ids >= 0) & (ids < len(row))
    ids, (strength, minus, plus) = ids[inside], edits[inside].T
    x = row[ids]
    x = np.where(x > 0, x / strength, x * strength) - minus + plus
    row[ids] = np.maximum(x, np.float32(FORBIDDEN))
    return row


def sample(
    *,
    logits: Annotated[Array, InOut("R V")],
    allowed: Annotated[Array, In("C W", "u32")],
    masked: Annotated[Array, In("R", "i32")],
    edit_ids: Annotated[Array, In("E", "i32", below="V")],
    edits: Annotated[Array, In("E 3")],
    edit_begin: Annotated[Array, In("R", "i32", below="E")],
    edit_end: Annotated[Array, In("R", "i32")],
    temperature: Annotated[Array, In("R")],
    top_k: Annotated[Array, In("R", "i32")],
    top_p: Annotated[Array, In("R")],
    min_p: Annotated[Array, In("R")],
    seeds: Annotated[Array, In("R", "u64")],
    draws: Annotated[Array, In("R", "i32")],
    ids: Annotated[Array, Out("R", "i32")],
) -> None:
    """Draw one token per row; greedy where temperature is 0.

    In this order: edit the logits (penalties and biases); drop the tokens that the row's mask does
    not allow; scale by 1 / temperature; keep the tokens that have min_p of the largest probability;
    of those the top_k largest (0: all); of those the shortest descending run whose probability
    reaches top_p, at least one; draw by the inverse distribution function, walking kept tokens by
    ascending id. Equal logits rank by ascending id. A row with a logit that is NaN or infinite,
    allowed or not, before or after edits, gets `NO_TOKEN`; another one without a token that is
    allowed and above `FORBIDDEN` gets `NONE_ALLOWED`.

    Args:
        logits: [R, V] fp32, edited in place.
        allowed: [C, W] u32, masks, W = ceil(V / 32): bit i of word w is token 32 w + i. Bits beyond
            V mean nothing.
        masked: [R] i32, a row's mask is number `masked - 1`; 0 or less: all tokens are allowed.
        edits: [E, 3] fp32, of the tokens `edit_ids`, see `edited`.
        edit_begin: [R] i32; a row's edits end before `edit_end`, V of them at most.
        temperature: [R] fp32, >= 0.
        top_p: [R] fp32, in (0, 1].
        min_p: [R] fp32, in [0, 1].
        draws: [R] i32, how many tokens the sequence has drawn.
    """
    for r, row in enumerate(logits):
        begin = int(np.clip(edit_begin[r], 0, len(edits)))
        few = slice(begin, max(begin, min(int(edit_end[r]), begin + len(row))))
        mask = allowed[nearest(masked[r] - 1, len(allowed))] if masked[r] > 0 else None
        settings = temperature[r], top_k[r], top_p[r], min_p[r], int(seeds[r]), int(draws[r])
        is_finite = np.isfinite(row).all()
        row[...] = edited(row, edit_ids[few], edits[few])
        ids[r] = choose(row, mask, *settings) if is_finite else NO_TOKEN


def choose(
    row: Array,
    mask: Array | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    draw: int,
) -> int:
    """Return the token that `sample` draws by edited logits; -inf is `FORBIDDEN`."""
    row = np.maximum(row, np.float32(FORBIDDEN))
    if not np.isfinite(row).all():
        return NO_TOKEN
    among = np.flatnonzero(row > FORBIDDEN)
    if mask is not None:
        among = np.intersect1d(among, tokens_of(mask, len(row)))
    if not among.size:
        return NONE_ALLOWED
    row = row[among]
    if temperature == 0:
        return int(among[np.argmax(row)])
    probability = np.exp((row.astype(np.float64) - row.max()) / np.float64(temperature))
    order = np.argsort(-row, kind="stable")
    order = order[probability[order] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(probability[order])
        order = order[: int(np.searchsorted(mass, np.float64(top_p) * mass[-1])) + 1]
    kept = np.sort(order)
    mass = np.cumsum(probability[kept])
    found = int(np.searchsorted(mass, uniform(seed, draw) * mass[-1], side="right"))
    return int(among[kept[min(found, len(kept) - 1)]])


def advance(
    *,
    sampled: Annotated[Array, In("R", "i32")],
    rows: Annotated[Array, In("R", "i32", below="M")],
    ids: Annotated[Array, InOut("M", "i32")],
    positions: Annotated[Array, InOut("M", "i32")],
    ends: Annotated[Array, InOut("M", "i32")],
    draws: Annotated[Array, InOut("R", "i32")],
) -> None:
    """Make the sampled tokens the next step's tokens, one position on.

    Args:
        sampled: [R] i32; what is no token goes on as token 0, which every table has.
        rows: [R] i32, the token each row came from.
    """
    inside = (rows >= 0) & (rows < len(ids))
    tokens = rows[inside]
    ids[tokens] = np.maximum(sampled[inside], 0)
    positions[tokens] += 1
    ends[tokens] += 1
    draws += 1


_MORE = ("masked", "edited", "min_p")


def _make_sample(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    r, v = case.sizes["R"], case.sizes["V"]
    logits = rng.standard_normal((r, v), dtype=np.float32) * np.float32(3)
    logits[0, v // 2 :] = np.round(logits[0, v // 2 :])  # ties
    c, w, e = (case.sizes[letter] for letter in "CWE")
    allowed = rng.integers(0, 1 << WORD_BITS, (c, w), np.uint32)
    allowed[:, 0] |= 1 << 7  # some token
    masked, edited, min_p = (name in case.options["more"] for name in _MORE)
    begin = np.arange(r) % (e // 2 + 1)
    edits = rng.random((e, 3), np.float32) + np.float32(0.5)
    edits[::5, 2] = -np.inf
    return {
        "logits": logits,
        "allowed": allowed,
        "masked": (masked * np.arange(r) % (c + 1)).astype(np.int32),
        "edit_ids": rng.permutation(v)[:e].astype(np.int32),
        "edits": edits,
        "edit_begin": begin.astype(np.int32),
        "edit_end": (begin + edited * (e - begin)).astype(np.int32),
        "temperature": np.full(r, case.options["temperature"], np.float32),
        "top_k": np.full(r, case.options["top_k"], np.int32),
        "top_p": np.full(r, case.options["top_p"], np.float32),
        "min_p": np.full(r, 0.1 * min_p, np.float32),
        "seeds": rng.integers(0, 2**63, r).astype(np.uint64),
        "draws": rng.integers(0, 1000, r).astype(np.int32),
    }


def _make_advance(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    m, r = case.sizes["M"], case.sizes["R"]
    positions = rng.integers(0, 100, m).astype(np.int32)
    return {
        "sampled": rng.integers(NO_TOKEN, 1000, r).astype(np.int32),
        "rows": rng.permutation(m)[:r].astype(np.int32),
        "ids": rng.integers(0, 1000, m).astype(np.int32),
        "positions": positions,
        "ends": positions + 1,
        "draws": rng.integers(0, 9, r).astype(np.int32),
    }


SPECS = (
    OpSpec(
        sample,
        tuple(
            Case(
                f"t{temperature}-k{k}-p{p}-r{r}-v{v}{''.join(f'-{what}' for what in more)}",
                {"R": r, "V": v, "C": 3, "W": words_for(v), "E": min(v, 64)},
                options={"temperature": temperature, "top_k": k, "top_p": p, "more": more},
            )
            for r, v, more in ((1, 1024, ()), (5, 37, ()), (5, 100, _MORE[:1]), (3, 1100, _MORE))
            for temperature, k, p in (
                (0, 0, 1),
                (1, 0, 1),
                (0.7, 20, 1),
                (1.3, 0, 0.9),
                (1, 8, 0.5),
            )
        ),
        EXACT,
        (Real("*-r1-*", {"R": 1, "V": 201088, "C": 1, "W": words_for(201088), "E": 64}),),
        make=_make_sample,
    ),
    OpSpec(
        advance,
        (Case("r1-m1", {"M": 1, "R": 1}), Case("r3-m7", {"M": 7, "R": 3})),
        EXACT,
        (Real("*", {"M": 32, "R": 32}),),
        make=_make_advance,
        flops=3,
    ),
)
