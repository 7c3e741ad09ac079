"""Activation thresholds: a lossy mode whose kernels are exact."""

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import here
from sessions import make_session
from weight_files import BITNET, LLAMA

import clocher_runtime
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
    with pytest.raises(UsageError, match="act_sparsity: got"):
        make_session(MODEL, act_sparsity=rule, calibration=TEXT)


def test_what_cannot_skip_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a calibration text"):
        make_session(MODEL, act_sparsity="0.25")
    with pytest.raises(UsageError, match="int8 and all"):
        make_session(MODEL, act_sparsity="adaptive", act_prec="fp32")
    with pytest.raises(UsageError, match="symmetric int4"):
        make_session(load_model(CHECKPOINT, "int8w"), act_sparsity="adaptive")


def ternary(rule: str | None, **options: Any) -> np.ndarray:
    """Return the logits of a text by a ternary model."""
    model = load_model(open_checkpoint(BITNET))
    with closing(
        make_session(
            model,
            context=128,
            all_logits=True,
            kv_dtype="f32",
            act_sparsity=rule,
            **options,
        )
    ) as session:
        return session.logits(IDS)


IDS = [int(each) for each in np.random.default_rng(5).integers(3, 500, 48)]


@pytest.mark.parametrize("rule", ["topk:0.5", "threshold:0.5", "adaptive"])
def test_ternary_weights_give_the_logits_of_the_reference(rule: str) -> None:
    found = ternary(rule, chunk=16, act_prec="int8")
    expected = ternary(rule, backend="reference", act_prec="int8")
    # A sum that differs in the last bit can round to another code, which later tokens then read:
    # on one instruction set or another that happens to one of the first nine, never to two.
    apart = np.abs(found - expected).max(axis=1)[:9]
    assert (apart <= 1e-5 * np.abs(expected).max()).sum() >= 8
    assert np.abs(found - ternary(None)).max() > 1e-2  # something was dropped


def test_what_is_dropped_is_the_input_of_ternary_linears() -> None:
    assert np.array_equal(ternary("threshold:1e-30"), ternary(None))  # nothing is that small
    nothing = ternary("threshold:1e30")  # layers add nothing: a token's logits are its own alone
    for token in set(IDS):
        rows = nothing[[at for at, each in enumerate(IDS) if each == token]]
        assert (rows == rows[0]).all()


def test_what_stays_refused_ends_with_2_everywhere(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import os\n" * 99, encoding="utf-8")
    rule = ["--act-sparsity", "topk:0.5", "--precision", "int8w"]
    text = ["--text", str(tmp_path / "text.txt"), "--window", "16"]
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for words in (["run"], ["serve", "--port", "0"], ["perplexity", *text], ["bench", "-p", "0"]):
        code, _, err = here(*words, "--model-dir", str(LLAMA), *rule)
        assert code == 2 and "Traceback" not in err, (words, err)
        assert "act_sparsity" in err and "expected ternary weights, or symmetric int4" in err
        # A server left "end at once" to whatever ran after it in the process.
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == signals
    with pytest.raises(UsageError, match="expected ternary weights"):
        clocher_runtime.load(LLAMA, precision="int8w", act_sparsity="topk:0.5")


def test_the_commands_take_it_with_ternary_weights(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import os\n" * 99, encoding="utf-8")
    text = ["--text", str(tmp_path / "text.txt"), "--window", "16", "--limit", "1"]
    rule = ["--act-sparsity", "threshold:0.1"]
    code, out, err = here("run", str(BITNET), *rule, "--max-new", "4")
    assert (code, json.loads(out)["act_sparsity"]) == (0, "threshold:0.1"), err
    share = ["--act-sparsity", "0.25", "--act-calibration", text[1]]
    assert here("perplexity", str(BITNET), *text, *share)[0] == 0
    with clocher_runtime.load(BITNET, act_sparsity="topk:0.7") as model:
        assert model.session.config.act_sparsity == "topk:0.7" and model.generate(
            "import", max_new=4
        )
