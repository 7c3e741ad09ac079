"""Dead neurons of a squared ReLU: that what is not read changes no bit of what is computed."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from dead_neurons import planted, zeros_by_layer
from sessions import make_session

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.quantize import BITNET, quantize
from clocher_kernels.ops.rewrite import skip_zeros
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert.synthetic import plan_synthesis
from clocher_runtime.engine.footprint import footprint
from clocher_runtime.engine.load import Destined, Model, load_model
from cpu_fallback.tiles.neurons import lines_of, nbytes_of, pack
from tests.one_op import run

BITNET_DIR = Path(__file__).parent / "data" / "clocher-tiny-bitnet"
DENSE = "woh"  # of --pretranspose, where nothing is skipped
TERNARY = parse_format("ternary")
OPS_THAT_SKIP = {"relu2_gate_up", "skip_linear"}


def ternary(n: int, k: int, seed: int = 0) -> QuantTensor:
    return encode(np.random.default_rng(seed).standard_normal((n, k), np.float32), TERNARY)


def digits_of(lines: np.ndarray, columns: bool) -> np.ndarray:
    """Undo `neurons` as its text says it."""
    found = np.zeros((len(lines), 4 * lines.shape[1]), np.int8)
    for at in range(lines.shape[1]):
        line, byte = divmod(at, 64)
        for p in range(4):
            if columns:
                place = 64 * (byte >> 2 & 3) + 16 * p + 4 * (byte >> 4) + (byte & 3)
            else:
                place = 16 * (byte >> 2) + 4 * p + (byte & 3)
            found[:, 256 * line + place] = (lines[:, at] >> 2 * p) & 3
    return found


@pytest.mark.parametrize(("n", "k"), [(64, 256), (132, 100), (148, 600), (64, 40), (512, 700)])
def test_lines_hold_every_digit(n: int, k: int) -> None:
    weight = ternary(n, k)
    codes = TERNARY.codes(weight.planes, weight.shape) + 1
    rows, columns = pack(weight, columns=False), pack(weight, columns=True)
    assert (rows.nbytes, columns.nbytes) == (nbytes_of((n, k), False), nbytes_of((n, k), True))
    assert np.array_equal(digits_of(rows, False)[:, :k], codes)
    assert np.array_equal(digits_of(columns, True)[:, :n], codes.T)
    assert not digits_of(rows, False)[:, k:].any() and not digits_of(columns, True)[:, n:].any()


def test_other_formats_are_refused() -> None:
    weight = encode(np.ones((16, 32), np.float32), parse_format("int8_row_f32"))
    with pytest.raises(UnsupportedOp, match="ternary"):
        lines_of("skip_linear", weight, columns=True)


def codes(values: np.ndarray) -> dict[str, np.ndarray]:
    q, scale = np.empty(values.shape, np.int8), np.empty((len(values), 1), np.float32)
    quantize(x=values, q=q, scale=scale, group=0, **BITNET)
    return {"x": q, "x_scale": scale}


def dense_hidden(x: dict[str, np.ndarray], gate: QuantTensor, up: QuantTensor) -> np.ndarray:
    """Compute the hidden layer with the ops of a Plan that skips nothing."""
    n, k = gate.shape
    sizes, attrs = {"M": len(x["x"]), "N": n, "K": k, "B": 1, "F": n}, {"group": 0}
    linear = run("linear", sizes, attrs, {**x, "w": up})["y"]
    gated = {**x, "w": gate, "times": linear}
    return run("linear", sizes, {**attrs, "activation": "relu2"}, gated)["y"]


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("living", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("threads", [1, 2])
def test_hidden_layer_is_to_the_bit_what_two_products_make(
    tokens: int, living: float, threads: int
) -> None:
    rng = np.random.default_rng(int(10 * living) + tokens)
    inner, k = 1000, 300
    lives = np.where(rng.random((inner, 1)) < living, 1, -1).astype(np.float32)
    gate = encode(rng.standard_normal((inner, k), np.float32) + lives, TERNARY)
    up = ternary(inner, k, 1)
    x = codes(0.5 + rng.standard_normal((tokens, k), np.float32))
    want = dense_hidden(x, gate, up)
    assert abs(np.mean(want != 0) - living) < 0.1
    sizes = {"M": tokens, "I": inner, "K": k, "B": 1}
    values = {**x, "gate": gate, "w": up}
    got = run("relu2_gate_up", sizes, {"group": 0}, values, threads)["y"]
    assert np.array_equal(got, want)
    down = ternary(300, inner - inner % 4, 2)
    hidden = codes(want)
    values = {**hidden, "w": down, "residual": np.ones((tokens, 300), np.float32)}
    sizes = {"M": tokens, "N": 300, "K": inner, "B": 1}
    dense = run("linear", sizes, {"group": 0}, values)["y"]
    assert np.array_equal(run("skip_linear", sizes, {"group": 0}, values, threads)["y"], dense)


@pytest.mark.parametrize("scale", [np.nan, 1e35, 3e38])
def test_what_overflows_is_seen_though_its_gate_is_closed(scale: float) -> None:
    gate, up = ternary(64, 256), ternary(64, 256, 1)
    big = np.float32(1e6)
    for weight in (gate, up):
        weight.planes["scale"][:] = np.array([big.view(np.uint32) >> 16], np.uint16).view(
            weight.planes["scale"].dtype
        )
    x = codes(np.random.default_rng(0).standard_normal((1, 256), np.float32))
    x["x_scale"][:] = scale
    with np.errstate(all="ignore"):
        want = dense_hidden(x, gate, up)
        sizes, values = {"M": 1, "I": 64, "K": 256, "B": 1}, {**x, "gate": gate, "w": up}
        got = run("relu2_gate_up", sizes, {"group": 0}, values)["y"]
    assert np.isnan(want).all() and np.array_equal(got, want, equal_nan=True)


@cache
def trained() -> Model:
    return load_model(open_checkpoint(BITNET_DIR))


@pytest.fixture(scope="module")
def leaning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    out = tmp_path_factory.mktemp("leaning")
    plan_synthesis("tiny-bitnet", "native", out).run()
    return planted(load_model(open_checkpoint(out)), 80)


def ids(model: Model, prompts: list[list[int]], **more) -> list[list[int]]:
    with closing(make_session(model, context=128, chunk=16, batch=len(prompts), **more)) as session:
        found: list[list[int]] = [[] for _ in prompts]
        for token in session.generate(prompts, 40, stop_ids=frozenset()):
            found[token.sequence].append(token.id)
    return found


PROMPTS = [[1, 5, 7, 9, 33], [2, 40, 41], [3, 3, 8, 3, 3, 8, 3]]


@pytest.mark.parametrize("which", ["trained", "planted"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ids_are_the_same_with_and_without(which: str, count: int, leaning: Model) -> None:
    model = trained() if which == "trained" else leaning
    want = ids(model, PROMPTS[:count], pretranspose=DENSE)
    assert ids(model, PROMPTS[:count]) == want
    assert ids(model, PROMPTS[:count], threads=1) == want
    assert ids(model, PROMPTS[:count], speculate="suffix") == want


def test_logits_are_the_same_to_the_bit(leaning: Model) -> None:
    found = []
    for scope in (None, DENSE):
        with closing(make_session(leaning, context=64, chunk=8, pretranspose=scope)) as session:
            tokens = session.generate([PROMPTS[0]], 20, stop_ids=frozenset(), logits=True)
            found.append(np.stack([token.logits for token in tokens]))
    assert np.array_equal(*found)


def test_zeros_are_counted_as_they_were_planted(leaning: Model) -> None:
    with closing(make_session(leaning, context=64, chunk=32)) as session:
        shares = zeros_by_layer(session, 16)
    assert len(shares) == leaning.spec.num_layers
    for gates, zeros in shares:
        assert 0.65 < gates < 0.95 and zeros >= gates


def test_which_calls_skip() -> None:
    model = trained()
    layers = model.spec.num_layers
    with closing(make_session(model, context=64)) as session:
        plan = session.executor.plan
    assert [c.op for c in plan.calls if c.op in OPS_THAT_SKIP] == [*sorted(OPS_THAT_SKIP)] * layers
    assert not any("activation" in call.attrs for call in plan.calls)
    for scope in ("none", DENSE):
        with closing(make_session(model, context=64, pretranspose=scope)) as session:
            assert not OPS_THAT_SKIP & {call.op for call in session.executor.plan.calls}
            dense = session.executor.plan
    assert skip_zeros(dense, {}, frozenset()) == dense


def test_the_second_layout_is_promised() -> None:
    model = trained()
    weights = {
        name: Destined(w.format if isinstance(w, QuantTensor) else None, w.nbytes, made=False)
        for name, w in model.weights.items()
    }
    twice = sum(
        w.nbytes
        for name, w in weights.items()
        if name.endswith(("mlp.up_proj.weight", "mlp.down_proj.weight"))
    )
    silu = replace(model.spec, act="silu")
    assert footprint(model.spec, weights).packed - footprint(silu, weights).packed == twice > 0
