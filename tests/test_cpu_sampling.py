"""Sampling on the CPU: the reference's ids, and the distribution that was asked for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_run import compiled, kernel_cache
from masks import masks_of
from one_op import run

from clocher_kernels.ops.sampling import NO_TOKEN, NONE_ALLOWED
from cpu_fallback.lanes.language import boltzmann, store_f64
from cpu_fallback.lanes.memory import load_f32, read_f32

__all__ = ["kernel_cache"]

Settings = tuple[float, int, float]
LOWEST = np.finfo(np.float32).min


def drawn(
    logits: np.ndarray,
    chosen: Settings,
    seeds: np.ndarray,
    draws: np.ndarray,
    threads: int = 2,
    allowed: np.ndarray | None = None,
    edits: tuple[np.ndarray, np.ndarray] | None = None,
    min_p: float = 0,
) -> np.ndarray:
    """Return the ids drawn for the rows of logits [R, V], all with (temperature, top_k, top_p).

    `allowed`, bool [R, V], says which tokens; without it none of the masks, which allow nothing,
    is used. `edits` [N, 3] are of the tokens `edit_ids`, for every row but the first.
    """
    rows, v = logits.shape
    ids, edits = (np.zeros(0), np.zeros((0, 3))) if edits is None else edits
    temperature, top_k, top_p = chosen
    masked = np.zeros(rows) if allowed is None else np.arange(rows) + 1
    values = {
        "logits": logits.astype(np.float32),
        "allowed": masks_of(np.zeros((rows, v), bool) if allowed is None else allowed),
        "masked": masked.astype(np.int32),
        "edit_ids": np.append(ids, 0).astype(np.int32),
        "edits": np.append(edits, [[9, 9, 9]], axis=0).astype(np.float32),
        "edit_begin": np.zeros(rows, np.int32),
        "edit_end": np.where(np.arange(rows) > 0, len(ids), 0).astype(np.int32),
        "min_p": np.full(rows, min_p, np.float32),
        "temperature": np.full(rows, temperature, np.float32),
        "top_k": np.full(rows, top_k, np.int32),
        "top_p": np.full(rows, top_p, np.float32),
        "seeds": seeds.astype(np.uint64),
        "draws": draws.astype(np.int32),
    }
    return run("sample", {"R": rows, "V": v}, {}, values, threads)["ids"]


def _same(
    logits: np.ndarray,
    chosen: Settings,
    rng: np.random.Generator,
    allowed: np.ndarray | None = None,
    **more: Any,
) -> np.ndarray:
    seeds = rng.integers(0, 2**64, len(logits), dtype=np.uint64)
    draws = rng.integers(0, 5000, len(logits))
    got, expected = (
        drawn(logits, chosen, seeds, draws, threads, allowed, **more) for threads in (2, 0)
    )
    np.testing.assert_array_equal(got, expected)
    return got


@settings(max_examples=100)
@given(
    st.integers(1, 300),
    st.sampled_from([0, 0.3, 1.0, 2.5]),
    st.integers(0, 310),
    st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    st.sampled_from(["plain", "ties", "zeros", "masked", "wide"]),
    st.integers(0, 2**32),
)
def test_ids_are_those_of_the_reference(
    v: int, temperature: float, top_k: int, top_p: float, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((4, v)) * (300 if kind == "wide" else 2)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "zeros":
        logits = np.where(logits < 1, np.copysign(0, logits), logits)
    elif kind == "masked":
        logits[:, 1:][rng.random((4, v - 1)) < 0.5] = LOWEST
    _same(logits, (temperature, top_k, top_p), rng)


@settings(max_examples=100)
@given(
    st.integers(1, 300),
    st.sampled_from([0, 0.3, 1.0, 2.5]),
    st.integers(0, 310),
    st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]),
    st.integers(0, 2**32),
)
def test_only_allowed_tokens_are_drawn_as_the_reference_does(
    v: int, temperature: float, top_k: int, top_p: float, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((4, v)) * 4) / 2
    allowed = rng.random((4, v)) < share
    got = _same(logits, (temperature, top_k, top_p), rng, allowed)
    for row, token in enumerate(got):
        assert allowed[row, token] if allowed[row].any() else token == NONE_ALLOWED


@settings(max_examples=150)
@given(
    st.integers(1, 5000),
    st.sampled_from([0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 7, 40, 10_000]),
    st.sampled_from([1.0, 0.99, 0.5, 1e-6]),
    st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    st.sampled_from(["few", "all", "forbidden", "none"]),
    st.sampled_from([1.0, 0.3, 0.01]),
    st.integers(0, 2**32),
)
def test_penalties_biases_and_min_p_draw_as_the_reference_does(
    v: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    which: str,
    share: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((4, v)) * 4
    if seed % 3 == 0:
        logits = np.round(logits)
    ids = rng.permutation(v)[: v if which in ("all", "forbidden") else v // 10]
    edits = np.stack([np.exp(rng.standard_normal(len(ids))), *rng.standard_normal((2, len(ids)))])
    edits = edits.T
    edits[rng.random(len(ids)) < (1 if which == "forbidden" else 0.2), 2] = -np.inf
    if which == "none":
        edits[:] = 1, 0, 0
    allowed = None if share == 1 else rng.random((4, v)) < share
    more = {"edits": (ids, edits), "min_p": min_p}
    got = _same(logits, (temperature, top_k, top_p), rng, allowed, **more)
    if which == "forbidden":
        assert (got[1:] == NONE_ALLOWED).all()


def test_an_edit_outside_the_vocabulary_is_none_and_one_that_overflows_is_a_fault() -> None:
    logits, nothing = np.zeros((3, 40)), np.zeros(3)
    logits[:, 5] = 1
    for ids, edit, expected in (
        ([-1, 40, 1 << 30], [1, 0, 9], [5] * 3),
        ([7], [1, 0, np.inf], [5, NO_TOKEN, NO_TOKEN]),
        ([7], [1, 0, np.nan], [5, NO_TOKEN, NO_TOKEN]),
        ([7], [1, 0, -np.inf], [5] * 3),
        ([7], [1, 0, 3], [5, 7, 7]),
        ([5], [2, 0.5, 0], [5, 0, 0]),
    ):
        edits = np.array(ids), np.tile(edit, (len(ids), 1))
        for threads in (0, 2):
            got = drawn(logits, (0, 0, 1), nothing, nothing, threads, edits=edits)
            assert got.tolist() == expected, (ids, edit)


@pytest.mark.parametrize("chosen", [(0, 0, 1), (1, 0, 1), (1, 3, 1), (1, 0, 0.5)])
def test_a_draw_among_allowed_tokens_is_one_among_the_others_logits(chosen: Settings) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 500)).astype(np.float32) * 3
    some = np.sort(rng.permutation(500)[:90])
    allowed = np.zeros((6, 500), bool)
    allowed[:, some] = True
    seeds, draws = np.arange(6), np.arange(6)
    alone = drawn(logits[:, some], chosen, seeds, draws)
    np.testing.assert_array_equal(drawn(logits, chosen, seeds, draws, allowed=allowed), some[alone])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("v", [1, 31, 32, 33, 500])
def test_a_mask_that_allows_nothing_is_no_fault(temperature: float, v: int) -> None:
    logits, nothing = np.zeros((2, v)), np.zeros(2)
    logits[1, v - 1] = np.nan
    for threads in (0, 2):
        ids = drawn(logits, (temperature, 0, 1), nothing, nothing, threads, np.zeros((2, v), bool))
        assert ids.tolist() == [NONE_ALLOWED, NO_TOKEN]


@pytest.mark.parametrize("chosen", [(0, 0, 1), (1, 0, 1), (0.8, 50, 0.95), (1.2, 0, 0.9)], ids=str)
def test_a_real_vocabulary(chosen: Settings) -> None:
    rng = np.random.default_rng(21)
    logits = rng.standard_normal((3, 201_088)) * 3
    logits[1] = np.round(logits[1])
    _same(logits, chosen, rng)
    edits = rng.permutation(201_088)[:3000], rng.random((3000, 3)) + 0.5
    _same(logits, chosen, rng, edits=edits, min_p=0.01)


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [((1.0, 0, 1.0), 12), ((1.7, 0, 1.0), 12), ((1.0, 5, 1.0), 5), ((1.0, 0, 0.75), 5)],
    ids=["plain", "hot", "top-k", "top-p"],
)
def test_draws_have_the_distribution(chosen: Settings, kept: int) -> None:
    count, v = 20_000, 12
    logits = np.linspace(1.5, -1.5, v)
    expected = np.exp(logits / chosen[0])
    expected[kept:] = 0
    expected *= count / expected.sum()
    seeds = np.full(count, 1234567)
    ids = drawn(np.tile(logits, (count, 1)), chosen, seeds, np.arange(count))
    seen = np.bincount(ids, minlength=v)
    assert not seen[kept:].any()
    chi_square = ((seen - expected)[:kept] ** 2 / expected[:kept]).sum()
    # 99.9 % of draws from the right distribution are below; with 11 and 4 degrees of freedom.
    assert chi_square < {12: 31.3, 5: 18.5}[kept]


@pytest.mark.parametrize("kind", ["equal", "falling", "rising"])
def test_a_run_that_reaches_top_p_exactly_ends_there(kind: str) -> None:
    # So close that every probability is 1, but not equal, so that they have an order.
    logits = {"equal": 0.0, "falling": -1e-30, "rising": 1e-30}[kind] * np.arange(8)
    nothing = np.zeros(200)
    rows, draws = np.tile(logits, (200, 1)), np.arange(200)
    got, expected = (drawn(rows, (1, 0, 0.5), nothing, draws, threads) for threads in (2, 0))
    np.testing.assert_array_equal(got, expected)
    assert set(got) == set(range(4, 8) if kind == "rising" else range(4))


def test_greedy_takes_the_first_of_equals() -> None:
    v = 77
    logits = np.zeros((v, v))
    for row in range(v):
        logits[row, row:] = 5
    logits[-1] = LOWEST / 2
    nothing = np.zeros(v)
    ids = drawn(logits, (0, 0, 1), nothing, nothing)
    assert ids.tolist() == [*range(v - 1), 0]


@pytest.mark.parametrize("chosen", [(0, 0, 1), (1, 0, 1), (1, 3, 1), (1, 0, 0.5), (1, 9, 0.5)])
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("v", [40, 1000])
def test_odd_logits_give_no_token(chosen: Settings, odd: float, v: int) -> None:
    logits = np.zeros((6, v))
    logits[0], logits[1, 7], logits[2, 1:] = odd, odd, odd
    logits[3, v - 1], logits[4, v // 64 * 64 - 1] = odd, odd
    nothing = np.zeros(6)
    for threads in (0, 2):
        ids = drawn(logits, chosen, nothing, nothing, threads)
        assert ids[:5].tolist() == [NO_TOKEN] * 5 and 0 <= ids[5] < v


@pytest.mark.usefixtures("kernel_cache")
def test_probabilities_are_within_their_bound() -> None:
    def probabilities(x, settings, y, n):
        for i in range(0, n, 16):
            values = load_f32(x + 4 * i)
            store_f64(y + 8 * i, boltzmann(values, read_f32(settings), read_f32(settings + 4)))

    x = np.concatenate([np.linspace(-800, 0, 160_000), -np.geomspace(1e-30, 1, 16_000)])
    x = x.astype(np.float32)
    scale = np.array([0, 1], np.float32)
    y = np.full(len(x), np.nan)
    compiled(probabilities)(x.ctypes.data, scale.ctypes.data, y.ctypes.data, len(x))
    exact = np.exp(x.astype(np.longdouble))
    inside = x >= -708
    assert np.abs(y / exact - 1)[inside].max() <= 2 * np.finfo(np.float64).eps
    assert not y[~inside].any()
    assert y[x == 0].tolist() == [1.0] * int((x == 0).sum())
