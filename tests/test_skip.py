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
from clocher_runtime.convert.synthetic import Synthesis
from clocher_runtime.engine.footprint import footprint
from clocher_runtime.engine.load import Destined, Model, load_model
from cpu_fallback.tiles.columns import columns_of, packed
from tests.one_op import run

BITNET_DIR = Path(__file__).parent / "data" / "clocher-tiny-bitnet"
DENSE = "woh"  # of --pretranspose, where nothing is skipped
TERNARY = parse_format("ternary")
INT4 = parse_format("int4_sym_g64_bf16")


def ternary(n: int, k: int, seed: int = 0) -> QuantTensor:
    return encode(np.random.default_rng(seed).standard_normal((n, k), np.float32), TERNARY)


def codes_of(tensor: QuantTensor) -> np.ndarray:
    """Undo `columns` as its text says it: codes [K, N]."""
    own, (n, k) = columns_of(tensor), tensor.shape
    cells = packed(tensor).reshape(own.panels, own.blocks, own.record)[..., own.head :]
    found = np.zeros((own.blocks * own.block, own.panels * own.wide), np.uint8)
    width = 8 // own.per
    for panel, block, column, at in np.ndindex(own.panels, own.blocks, own.block, 64 * own.chunks):
        byte, chunk = cells[panel, block, 64 * own.chunks * column + at], at // 64
        for p in range(own.per):
            channel = 64 * p + 16 * (at >> 2 & 3) + 4 * (at >> 4 & 3) + (at & 3)
            place = panel * own.wide + 64 * own.per * chunk + channel
            found[block * own.block + column, place] = byte >> width * p & (1 << width) - 1
    return found[:k, :n]


@pytest.mark.parametrize(("n", "k"), [(64, 256), (132, 100), (148, 600), (64, 40), (512, 700)])
def test_columns_hold_every_digit(n: int, k: int) -> None:
    weight = ternary(n, k)
    codes = TERNARY.codes(weight.planes, weight.shape) + 1
    assert packed(weight).nbytes == columns_of(weight).nbytes
    assert np.array_equal(codes_of(weight), codes.T)


@pytest.mark.parametrize(("n", "k"), [(37, 100), (300, 640)])
def test_columns_hold_every_code_and_scale(n: int, k: int) -> None:
    weight = encode(np.random.default_rng(n).standard_normal((n, k), np.float32), INT4)
    pairs = weight.planes["codes"]
    codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(n, -1)[:, :k]
    assert np.array_equal(codes_of(weight), codes.T)
    own = columns_of(weight)
    cells = packed(weight).reshape(own.panels, own.blocks, own.record)[..., : own.head]
    scales = cells.copy().view(weight.planes["scales"].dtype).swapaxes(1, 2)
    assert np.array_equal(scales.reshape(-1, own.blocks)[:n], weight.planes["scales"])


def test_other_formats_are_refused() -> None:
    weight = encode(np.ones((16, 32), np.float32), parse_format("int8_row_f32"))
    sizes = {"M": 1, "N": 16, "K": 32, "B": 1}
    x = codes(np.ones((1, 32), np.float32))
    with pytest.raises(UnsupportedOp, match="ternary"):
        run("skip_linear", sizes, {"group": 0}, {**x, "w": weight})


def codes(values: np.ndarray) -> dict[str, np.ndarray]:
    q, scale = np.empty(values.shape, np.int8), np.empty((len(values), 1), np.float32)
    quantize(x=values, q=q, scale=scale, group=0, **BITNET)
    return {"x": q, "x_scale": scale}


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("living", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_what_is_left_out_changes_no_bit(
    tokens: int, living: float, threads: int, factor: float
) -> None:
    rng = np.random.default_rng(int(10 * living) + tokens)
    n, k = 300, 1003
    hidden = rng.standard_normal((tokens, k), np.float32)
    hidden[rng.random((tokens, k)) >= living] = 0
    down = encode(rng.standard_normal((n, k), np.float32), parse_format("ternary_f32"))
    down.planes["scale"][:] *= np.float32(factor)
    values = {**codes(hidden), "w": down, "residual": np.ones((tokens, n), np.float32)}
    sizes = {"M": tokens, "N": n, "K": k, "B": 1}
    dense = run("linear", sizes, {"group": 0}, values)["y"]
    assert np.array_equal(run("skip_linear", sizes, {"group": 0}, values, threads)["y"], dense)


@cache
def trained() -> Model:
    return load_model(open_checkpoint(BITNET_DIR))


@pytest.fixture(scope="module")
def leaning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    out = tmp_path_factory.mktemp("leaning")
    Synthesis("tiny-bitnet", "native", out).run()
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
    for zeros in shares:
        assert zeros > 0.65


def test_which_calls_skip() -> None:
    model = trained()
    layers = model.spec.num_layers
    with closing(make_session(model, context=64)) as session:
        plan = session.executor.plan
    skipping = [call.args["w"] for call in plan.calls if call.op == "skip_linear"]
    assert len(skipping) == layers and all("mlp.down_proj" in name for name in skipping)
    for scope in ("none", DENSE):
        with closing(make_session(model, context=64, pretranspose=scope)) as session:
            assert "skip_linear" not in {call.op for call in session.executor.plan.calls}
            dense = session.executor.plan
    assert skip_zeros(dense, {}, frozenset()) == dense


def test_the_second_layout_is_promised() -> None:
    model = trained()
    weights = {
        name: Destined(w.format if isinstance(w, QuantTensor) else None, w.nbytes, made=False)
        for name, w in model.weights.items()
    }
    twice = sum(w.nbytes for name, w in weights.items() if name.endswith("mlp.down_proj.weight"))
    silu = replace(model.spec, act="silu")
    assert footprint(model.spec, weights).packed - footprint(silu, weights).packed == twice > 0
