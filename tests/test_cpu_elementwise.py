"""Element-wise kernels of the CPU beyond the op table's cases."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import run


def test_silu_over_its_range() -> None:
    gate = np.linspace(-100, 100, 200_000, dtype=np.float32)[None]
    sizes, ones = {"M": 1, "I": gate.shape[1]}, np.ones_like(gate)
    got = run("glu", sizes, {"act": "silu"}, {"gate": gate, "up": ones})["y"].astype(np.float64)
    x = gate.astype(np.float64)
    exact = x / (1 + np.exp(-x))
    inside = gate > -87
    assert np.abs(got / exact - 1)[inside & (gate != 0)].max() <= 4e-7
    assert np.abs(got - exact)[~inside].max() <= 1e-35


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.one_of(st.integers(1, 200), st.just(2880)),
    st.sampled_from([1e-4, 1.0, 1e4]),
    st.integers(0, 2**32),
)
def test_norm_of_any_shape(m: int, heads: int, d: int, size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, heads * d)) * size).astype(np.float32)
    values = {"x": x, "weight": rng.standard_normal(d, dtype=np.float32)}
    sizes, attrs = {"M": m, "F": heads * d, "D": d}, {"eps": 1e-6}
    got, expected = (run("rms_norm", sizes, attrs, values, n)["y"] for n in (2, 0))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)


def test_router_ranks_equal_logits_by_expert() -> None:
    logits = np.array([[1, 3, 3, -np.inf, 3, 2], [0, -0.0, 0, -0.0, 0, 0]], np.float32)
    sizes = {"M": 2, "E": 6, "A": 5}
    got, expected = (run("topk_softmax", sizes, {}, {"logits": logits}, n) for n in (2, 0))
    np.testing.assert_array_equal(got["ids"], expected["ids"])
    np.testing.assert_allclose(got["weights"], expected["weights"], rtol=1e-6)


def test_router_stays_in_range_on_nan() -> None:
    logits = np.full((1, 6), np.nan, np.float32)
    logits[0, 4] = 1
    got = run("topk_softmax", {"M": 1, "E": 6, "A": 3}, {}, {"logits": logits})
    assert got["ids"][0, 0] == 4
    assert ((got["ids"] >= 0) & (got["ids"] < 6)).all()
