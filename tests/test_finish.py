"""What follows the sums of a product on the CPU, beyond the op table's cases."""

import numpy as np
import pytest
from one_op import run

from clocher_kernels.errors import ClocherError
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.elementwise import ACTIVATIONS, activate
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import encode


def activated(x: np.ndarray, activation: str, **attrs: Attr) -> np.ndarray:
    """Return an activation of values [K], as a product with a column of them: y = x 1."""
    values = {"x": np.ones((1, 1), np.float32), "w": encode(x[:, None], parse_format("f32"))}
    sizes = {"M": 1, "N": len(x), "K": 1}
    return run("linear", sizes, {"activation": activation, **attrs}, values)["y"][0]


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
def test_silu_and_sigmoid_over_their_range(act: str) -> None:
    x = np.linspace(-100, 100, 200_001, dtype=np.float32)
    got = activated(x, act).astype(np.float64)
    exact = activate(act, x.astype(np.float64))
    inside = x > -87
    np.testing.assert_allclose(got[inside], exact[inside], rtol=4e-7)
    assert np.abs(got - exact)[~inside].max() <= 1e-35


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_gelu_over_its_range(act: str) -> None:
    x = np.linspace(-40, 40, 100_000, dtype=np.float32)
    got = activated(x, act).astype(np.float64)
    exact = activate(act, x.astype(np.float64))
    np.testing.assert_allclose(got[x > -2], exact[x > -2], rtol=2e-6)
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=1e-12)


def test_capped_values_of_any_size() -> None:
    sizes = np.geomspace(1e-30, 3e38, 50_001, dtype=np.float32)
    x = np.concatenate([sizes, -sizes, np.zeros(1, np.float32)])
    got = activated(x, "tanh", cap=30.0).astype(np.float64)
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=6e-7, atol=0)
    assert np.abs(got).max() == 30


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_what_is_not_finite_stays_so(act: str) -> None:
    got = activated(np.float32([np.inf, -np.inf, np.nan, 0]), act)
    assert not np.isfinite(got[:3]).any() and np.isfinite(got[3])


def test_what_is_multiplied_by_may_be_written_to() -> None:
    """As a gated MLP has it: the gate is written where its linear partner was."""
    rng = np.random.default_rng(0)
    x, up = (rng.standard_normal((3, k), dtype=np.float32) for k in (40, 50))
    w = encode(rng.standard_normal((50, 40), dtype=np.float32), parse_format("f32"))
    values = {"x": x, "w": w, "times": up}
    sizes, attrs = {"M": 3, "N": 50, "K": 40, "F": 50}, {"activation": "silu"}
    apart = run("linear", sizes, attrs, values)["y"]
    plain = run("linear", sizes, {}, {"x": x, "w": w})["y"].astype(np.float64)
    np.testing.assert_allclose(apart, activate("silu", plain) * up, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("sizes", "attrs", "message"),
    [
        ({"F": 1}, {"activation": "swish"}, "no activation 'swish'; there are silu, gelu"),
        ({"F": 3}, {}, "'times' has 3 values for a token; expected 8"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: dict, attrs: dict, message: str) -> None:
    x, times = np.zeros((2, 4), np.float32), np.zeros((2, sizes["F"]), np.float32)
    values = {
        "x": x,
        "times": times,
        "w": encode(np.zeros((8, 4), np.float32), parse_format("f32")),
    }
    with pytest.raises(ClocherError, match=message):
        run("linear", {"M": 2, "N": 8, "K": 4, **sizes}, attrs, values)
