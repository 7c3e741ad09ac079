"""GPTQ: the codes it chooses, the layer test's anchors, few tokens, Hessians without a factor."""

import numpy as np
import pytest
from weight_files import rng as rng_of

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.convert.imx import search
from clocher_runtime.quantize import gptq
from clocher_runtime.quantize.gptq import InputStats, make_inputs, solve_matrix

K, N = 512, 96
SYM = parse_format("int4_sym_g128_f16")
ASYM = parse_format("int4_asym_g128_f16")


def mixing(rng: np.random.Generator) -> np.ndarray:
    """Draw A [K, K], so that x = A z has a power-law covariance and a few outlier channels."""
    basis = np.linalg.qr(rng.standard_normal((K, K)))[0]
    gains = rng.lognormal(0, 0.5, K)
    gains[rng.choice(K, 6, replace=False)] *= 10
    mixed = gains[:, None] * basis * np.arange(1, K + 1.0) ** -0.5
    return mixed.astype(np.float32)


class Layer:
    """A linear and its inputs."""

    def __init__(self, name: str) -> None:
        self.rng = rng_of(name)
        self.mix = mixing(self.rng)
        self.weight = (self.rng.standard_t(5, (N, K)) * K**-0.5).astype(np.float32)
        self.held = self.inputs(2048)

    def inputs(self, tokens: int) -> np.ndarray:
        return self.rng.standard_normal((tokens, K), dtype=np.float32) @ self.mix.T

    def error(self, tensor: QuantTensor) -> float:
        wrong = self.held @ (tensor.decode() - self.weight).T
        return float(np.square(wrong, dtype=np.float64).sum())

    def absmax(self, group: int) -> float:
        """Return the error of rounding with scales 2 absmax / 15: the anchors' denominator."""
        cells = self.weight.reshape(N, -1, group)
        step = np.abs(cells).max(axis=-1, keepdims=True) * 2 / 15
        rounded = (np.clip(np.rint(cells / step), -8, 7) * step).reshape(N, K)
        return float(np.square(self.held @ (rounded - self.weight).T, dtype=np.float64).sum())


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer("layer")


def hessian_of(x: np.ndarray) -> np.ndarray:
    return (2 / len(x)) * (x.T @ x)


@pytest.mark.parametrize("name", ["int4_sym_g32_f16", "int4_asym_row_f32", "int8_g128_f16"])
@pytest.mark.parametrize("columns", [128, 200, 333])
def test_columns_are_rounded_one_by_one_and_later_ones_corrected(name, columns):
    rng = rng_of(f"{name}{columns}")
    values = rng.standard_normal((24, columns))
    x = rng.standard_normal((50, columns)) @ rng.standard_normal((columns, columns))
    hessian = hessian_of(x)
    factor = gptq.factorise(hessian, dtype=np.float64)
    assert factor is not None
    grid = search(values.astype(np.float32), parse_format(name), np.diag(hessian))
    solved = gptq.solve(values, grid, factor)
    size = columns if grid.format.group == "row" else grid.format.group
    steps = to_f32(grid.planes["scales"], grid.format.scale_dtype).reshape(24, -1)
    low, high = (-127, 127) if name.startswith("int8") else (-8, 7)
    if "zeros" in grid.planes:
        zeros = grid.planes["zeros"].reshape(24, -1).astype(int)
        low, high = -zeros, 15 - zeros
    # As published: each column's error goes to all after it, one column at a time.
    rest, loss = values.copy(), 0.0
    for i, column in enumerate(factor.order):
        group = column // size
        ends = (each if isinstance(each, int) else each[:, group] for each in (low, high))
        made = np.clip(np.rint(rest[:, column] / steps[:, group]), *ends) * steps[:, group]
        assert np.allclose(solved.decode()[:, column], made, rtol=1e-6, atol=1e-7)
        error = (rest[:, column] - made) / factor.upper[i, i]
        rest[:, factor.order[i:]] -= np.outer(error, factor.upper[i, i:])
        loss += float(np.square(error).sum())
    damped = hessian + factor.damp * np.mean(np.diag(hessian)) * np.eye(columns)
    wrong = values - solved.decode()
    assert loss == pytest.approx(np.einsum("ij,jk,ik->", wrong, damped, wrong), rel=1e-6)


def test_the_factor_is_that_of_the_inverse():
    x = rng_of("factor").standard_normal((700, 300))
    hessian = hessian_of(x)
    factor = gptq.factorise(hessian, dtype=np.float64)
    damped = hessian + 0.05 * np.mean(np.diag(hessian)) * np.eye(300)
    inverse = np.linalg.inv(damped[np.ix_(factor.order, factor.order)])
    assert np.allclose(factor.upper.T @ factor.upper, inverse, rtol=0, atol=1e-12)
    assert not np.tril(factor.upper, -1).any()
    assert (np.diff(np.diag(hessian)[factor.order]) <= 0).all()


@pytest.mark.parametrize("group", [128, 32])
def test_the_layer_test_reaches_its_anchors(layer, group):
    base = layer.absmax(group)
    x = layer.inputs(6144)
    hessian, importance = hessian_of(x), np.square(x).mean(axis=0)
    factor = gptq.factorise(hessian)
    for kind, searched, corrected in (("sym", 0.55, 0.22), ("asym", 0.45, 0.18)):
        fmt = parse_format(f"int4_{kind}_g{group}_f16")
        grid = search(layer.weight, fmt, importance)
        assert layer.error(grid) <= searched * base
        assert layer.error(gptq.solve(layer.weight, grid, factor)) <= corrected * base


def test_few_tokens_are_helped_by_the_pooled_hessian():
    layer = Layer("few")
    pooled_mix = mixing(rng_of("pool"))
    own = layer.mix
    layer.mix = np.hstack([own, pooled_mix]) * np.float32(0.5**0.5)

    def draw(tokens: int) -> np.ndarray:
        return layer.rng.standard_normal((tokens, 2 * K), dtype=np.float32) @ layer.mix.T

    layer.held = draw(2048)
    pool = layer.rng.standard_normal((2048, K), dtype=np.float32) @ pooled_mix.T
    base = layer.absmax(128)
    x = draw(K // 8)
    grid = search(layer.weight, SYM, np.square(x).mean(axis=0))
    plain = gptq.factorise(hessian_of(x))
    shrunk = gptq.factorise(gptq.shrink(hessian_of(x), len(x), hessian_of(pool)))
    errors = [layer.error(gptq.solve(layer.weight, grid, f)) / base for f in (plain, shrunk)]
    assert errors[1] <= 0.45
    assert errors[1] < 0.95 * errors[0]


def test_shrinkage_is_a_weighted_mean():
    own, pooled = np.full((8, 8), 3.0, np.float32), np.full((8, 8), 1.0, np.float32)
    assert gptq.shrink(own, 0, pooled) == pytest.approx(1)
    assert gptq.shrink(own, 2, pooled) == pytest.approx(2)  # K / 4 = 2 tokens weigh as much
    assert gptq.shrink(own, 2000, pooled) == pytest.approx(3, rel=1e-2)


def test_columns_that_were_never_active_are_not_pruned():
    rng = rng_of("dead")
    values = rng.standard_normal((16, 128), dtype=np.float32)
    x = rng.standard_normal((256, 128), dtype=np.float32)
    x[:, 64:] = 0
    grid = search(values, ASYM, np.square(x).mean(axis=0))
    result = gptq.solve(values, grid, gptq.factorise(hessian_of(x))).decode()
    assert np.array_equal(result[:, 64:], grid.decode()[:, 64:])
    assert np.abs(result[:, 64:]).max() > 1


def test_damping_grows_until_the_hessian_can_be_factorised():
    rng = rng_of("indefinite")
    good = hessian_of(rng.standard_normal((300, 64)))
    assert gptq.factorise(good).damp == gptq.DAMP
    basis = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    bad = (basis * np.where(np.arange(64) < 60, 1.0, -0.12)) @ basis.T
    factor = gptq.factorise(bad)
    assert gptq.DAMP < factor.damp <= 20 * gptq.DAMP


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
def test_a_hessian_without_a_factor_is_said(value):
    assert gptq.factorise(np.full((8, 8), value)) is None


def test_gptq_is_taken_only_where_it_wins_on_held_out_inputs(layer):
    stats = InputStats(K, hessian=True)
    x = layer.inputs(4096)
    held = np.arange(len(x)) % 16 == 0
    stats.add(x, held)
    good = solve_matrix(layer.weight, SYM, "gptq", make_inputs(stats, None, hessian=True))
    assert good.fallback is None
    assert good.nmse < 0.4 * good.nmse_rtn

    # Fitted to inputs that have nothing to do with the held-out ones.
    other = rng_of("other").standard_normal((32, K), dtype=np.float32)
    other[:, K // 8 :] *= 1e-3
    stats = InputStats(K, hessian=True)
    stats.add(other, np.zeros(32, bool))
    stats.add(x, np.ones(len(x), bool))
    bad = solve_matrix(layer.weight, SYM, "gptq", make_inputs(stats, None, hessian=True))
    assert bad.fallback in ("imx:held_out", "rtn:do_no_harm")
    assert bad.nmse <= 1.02 * bad.nmse_rtn


def test_without_tokens_gptq_falls_back_and_says_so(layer):
    stats = InputStats(K, hessian=True)
    stats.add(layer.inputs(8), np.ones(8, bool))
    outcome = solve_matrix(layer.weight, SYM, "gptq", make_inputs(stats, None, hessian=True))
    assert outcome.fallback == "imx:no_hessian"


def test_an_expert_with_few_tokens_uses_its_layers_statistics_alone(layer):
    own, pooled = (InputStats(K, hessian=True) for _ in range(2))
    x = layer.inputs(2048)
    pooled.add(x, np.arange(2048) % 16 == 0)
    own.add(layer.inputs(63) * 5, np.zeros(63, bool))
    inputs = make_inputs(own, pooled, hessian=True)
    assert np.array_equal(inputs.importance, pooled.importance)
    assert np.array_equal(inputs.held, pooled.held)
    own.add(layer.inputs(1), np.zeros(1, bool))
    inputs = make_inputs(own, pooled, hessian=True)
    assert np.array_equal(inputs.importance, own.importance)


def test_statistics_are_those_of_the_inputs_that_fit(layer):
    x, held = layer.inputs(300), np.arange(300) % 10 == 0
    weights = layer.rng.random(300).astype(np.float32)
    stats = InputStats(K, hessian=True)
    for start in (0, 100, 200):
        part = slice(start, start + 100)
        stats.add(x[part], held[part], weights[part])
    fit = (x * weights[:, None])[~held].astype(np.float64)
    assert stats.tokens == 270
    assert np.allclose(stats.importance, np.square(fit).mean(axis=0), rtol=1e-5)
    assert np.allclose(stats.hessian, 2 / 270 * fit.T @ fit, rtol=1e-3, atol=1e-4)
    assert np.array_equal(stats.held, (x * weights[:, None])[held])
