"""Element-wise kernels of the CPU beyond the op table's cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import run

from clocher_kernels.errors import ClocherError
from clocher_kernels.ops import OPS
from clocher_kernels.ops.cases import inputs
from clocher_kernels.ops.contract import Case


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
    got, expected = (run("route", sizes, {}, {"logits": logits}, n) for n in (2, 0))
    np.testing.assert_array_equal(got["ids"], expected["ids"])
    np.testing.assert_allclose(got["weights"], expected["weights"], rtol=1e-6)


def test_router_stays_in_range_on_nan() -> None:
    logits = np.full((1, 6), np.nan, np.float32)
    logits[0, 4] = 1
    got = run("route", {"M": 1, "E": 6, "A": 3}, {}, {"logits": logits})
    assert got["ids"][0, 0] == 4
    assert ((got["ids"] >= 0) & (got["ids"] < 6)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"score": "softmax"},
        {"score": "softmax", "normalise": True, "factor": 0.5},
        {"score": "sigmoid", "normalise": True, "groups": 8, "group_top": 4, "group_best": 2},
        {"score": "chosen", "groups": 4, "group_top": 1, "group_best": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(512, 32), (48, 8), (256, 9)])
def test_router_of_many_experts(
    experts: int, chosen: int, biased: bool, attrs: dict, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = {"logits": rng.standard_normal((3, experts), dtype=np.float32)}
    if biased:
        values["bias"] = rng.standard_normal(experts, dtype=np.float32)
    sizes = {"M": 3, "E": experts, "A": chosen}
    got, expected = (run("route", sizes, attrs, values, n) for n in (2, 0))
    np.testing.assert_array_equal(got["ids"], expected["ids"])
    np.testing.assert_allclose(got["weights"], expected["weights"], rtol=3e-6)


@pytest.mark.parametrize("score", ["chosen", "softmax", "sigmoid"])
def test_router_weighs_nothing_by_what_is_no_number(score: str) -> None:
    logits = np.zeros((4, 20), np.float32)
    logits[1, 17], logits[2, 3], logits[3, 2] = np.nan, np.inf, -np.inf
    sizes, attrs = {"M": 4, "E": 20, "A": 3}, {"score": score}
    for threads in (0, 2):
        with np.errstate(invalid="ignore"):
            got = run("route", sizes, attrs, {"logits": logits}, threads)["weights"]
        assert np.isnan(got).all(axis=1).tolist() == [False, True, True, False]
        assert np.isfinite(got[[0, 3]]).all()
        bias = np.zeros(20, np.float32)
        bias[19] = np.nan
        values = {"logits": logits, "bias": bias}
        with np.errstate(invalid="ignore"):
            assert np.isnan(run("route", sizes, attrs, values, threads)["weights"]).all()


@pytest.mark.parametrize(
    ("op", "sizes", "attrs", "message"),
    [
        ("route", {"M": 1, "E": 8, "A": 9}, {}, "9 experts of 8"),
        ("route", {"M": 1, "E": 8, "A": 2}, {"groups": 3, "group_top": 1}, "one size"),
        ("route", {"M": 1, "E": 8, "A": 2}, {"groups": 2, "group_top": 3}, "no more than"),
        ("route", {"M": 1, "E": 8, "A": 2}, {"score": "best"}, "score='best'"),
        ("rope", {"M": 1, "F": 60, "P": 12, "C": 4}, {"head": 20}, "rotate 24"),
        ("rope", {"M": 1, "F": 60, "P": 5, "C": 4}, {"head": 16}, "not a multiple of 16"),
        ("join_heads", {"M": 1, "F": 5, "G": 8, "Y": 16}, {"heads": 2}, "expected 4"),
        ("join_heads", {"M": 1, "F": 4, "G": 8, "Y": 16}, {"heads": 0}, "at least one"),
        ("join_heads", {"M": 1, "F": 9, "Y": 8}, {"heads": 2}, "not a multiple of 2"),
    ],
)
def test_what_does_not_fit_is_refused(op: str, sizes: dict, attrs: dict, message: str) -> None:
    case = Case("own", sizes, attrs, options={"second": "G" in sizes})
    with pytest.raises(ClocherError, match=message):
        run(op, sizes, attrs, inputs(OPS[op], case, np.random.default_rng(0)))
