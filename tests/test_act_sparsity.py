"""Activation thresholds: a lossy mode whose kernels are exact."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sessions import make_session

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import locate
from clocher_runtime.engine.load import load_model
from tests.one_op import run


@pytest.mark.parametrize("fmt", ["int4_sym_g32_f16", "int4_sym_g64_bf16", "int4_sym_g128_f32"])
@pytest.mark.parametrize("zeros", [0.0, 0.4, 1.0])
def test_skipping_gives_the_bits_of_the_dense_product(fmt: str, zeros: float) -> None:
    rng = np.random.default_rng(int(10 * zeros))
    n, k = 676, 1120
    values = rng.standard_normal((n, k), dtype=np.float32)
    x = rng.integers(-127, 128, (5, k)).astype(np.int8)
    x[rng.random(x.shape) < zeros] = 0
    scale = rng.random((5, -(-k // 128)), dtype=np.float32)
    weight = encode(values, parse_format(fmt))
    found = {}
    for op, m in (("linear", 1), ("skip_linear", 1), ("skip_linear", 2), ("skip_linear", 5)):
        sizes = {"M": m, "N": n, "K": k, "B": scale.shape[1]}
        args = {"x": x[:m], "x_scale": scale[:m], "w": weight}
        for threads in (1, 2):
            found[op, m, threads] = run(op, sizes, {"group": 128}, args, threads)["y"]
    dense = found["linear", 1, 1]
    for y in found.values():
        assert np.array_equal(y[:1].view(np.int32), dense.view(np.int32))
    two, five = found["skip_linear", 2, 2], found["skip_linear", 5, 1]
    assert np.array_equal(two.view(np.int32), five[:2].view(np.int32))


TEXT = [(37 * i * i + 11 * i) % 250 for i in range(200)]
FOLDER = Path(__file__).parent / "data" / "clocher-tiny-llama"
CHECKPOINT = open_checkpoint(locate(FOLDER, "MODEL"))
MODEL = load_model(CHECKPOINT, "int4")


def logits(rule: str | None, **options: int) -> np.ndarray:
    session = make_session(MODEL, context=256, act_sparsity=rule, calibration=TEXT, all_logits=True,
                      **options)  # fmt: skip
    with closing(session):
        return session.logits(TEXT[:40]).copy().view(np.int32)


@pytest.mark.parametrize("rule", ["0.4", "topk:0.6", "adaptive"])
def test_logits_do_not_depend_on_how_a_text_is_computed(rule: str) -> None:
    whole = logits(rule, chunk=64, threads=1)
    assert np.array_equal(whole, logits(rule, chunk=1, threads=2))
    assert np.array_equal(whole, logits(rule, chunk=7, threads=2))
    assert not np.array_equal(whole, logits(None))


@pytest.mark.parametrize("rule", ["0.4", "topk:0.6"])
def test_guessing_and_company_change_no_id(rule: str) -> None:
    found = []
    for options in ({"speculate": "off"}, {"speculate": "auto"}, {"batch": 3}):
        session = make_session(MODEL, context=256, act_sparsity=rule, calibration=TEXT, **options)
        with closing(session):
            prompts = [TEXT[:30], TEXT[5:50], TEXT[:9]][: options.get("batch", 1)]
            ids = []
            for token in session.generate(prompts, 24, stop_ids=frozenset()):
                if token.sequence == 0:
                    ids.append(token.id)
            found.append(ids)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 24


@pytest.mark.parametrize("rule", ["0", "1", "nan", "topk:2", "top:0.5", "adaptive:1", ""])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(UsageError, match="act_sparsity is"):
        make_session(MODEL, act_sparsity=rule, calibration=TEXT)


def test_what_cannot_skip_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a calibration text"):
        make_session(MODEL, act_sparsity="0.25")
    with pytest.raises(UsageError, match="int8 and all"):
        make_session(MODEL, act_sparsity="adaptive", act_prec="fp32")
    with pytest.raises(UsageError, match="symmetric int4"):
        make_session(load_model(CHECKPOINT, "int8w"), act_sparsity="adaptive")
