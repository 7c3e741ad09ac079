"""Trellis-coded weights in models and single calls: what is rotated meets what is rotated."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sessions import make_session
from weight_files import GPTOSS, LLAMA

from clocher_kernels import linear, quantize
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Float, Tcq
from clocher_kernels.formats.base import turn
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.locate import locate
from clocher_runtime.engine.load import load_model

IDS = [(37 * i * i + 11 * i) % 250 for i in range(40)]


def with_tensors(checkpoint: Checkpoint, **tensors: QuantTensor) -> Checkpoint:
    return replace(checkpoint, tensors={**checkpoint.tensors, **tensors})


def logits(checkpoint: Checkpoint, act_prec: str) -> np.ndarray:
    session = make_session(
        load_model(checkpoint), context=64, chunk=23, all_logits=True, act_prec=act_prec
    )
    try:
        return session.logits(IDS).copy()
    finally:
        session.close()


@pytest.mark.parametrize("folder", [LLAMA, GPTOSS], ids=["llama", "experts"])
def test_a_model_computes_what_its_decoded_weights_do(folder: Path) -> None:
    checkpoint = open_checkpoint(locate(folder, "MODEL"))
    matrices = [n for n in checkpoint.names if len(checkpoint.shape(n)) > 1]
    coded, plain = {}, {}
    chosen = [n for n in matrices if "router" not in n and not n.endswith("bias")]
    for turn_, name in enumerate(chosen):
        shape, fmt = checkpoint.shape(name), Tcq(3 + turn_ % 2)
        if shape[-1] % 64 == 0:
            planes = fmt.drawn(shape, np.random.default_rng(turn_), shape[-1] ** -0.5)
            coded[name] = QuantTensor(shape, fmt, planes)
            plain[name] = encode(coded[name].decode(), Float("f32"))
    assert len(coded) > 10 and any("embed" in name for name in coded)
    expected = logits(with_tensors(checkpoint, **plain), "fp32")
    got = logits(with_tensors(checkpoint, **coded), "fp32")
    spread = expected.std()
    assert (got - expected).std() < 2e-4 * spread
    rounded = logits(with_tensors(checkpoint, **coded), "int8")
    assert (rounded - expected).std() < 0.1 * spread


def test_numpy_multiplies_by_them() -> None:
    rng = np.random.default_rng(0)
    weight = quantize(rng.standard_normal((48, 128), np.float32), "tcq4")
    x = rng.standard_normal((3, 128), np.float32)
    np.testing.assert_allclose(
        linear(x, weight, act_prec="fp32"), x @ weight.decode().T, rtol=1e-4, atol=1e-4
    )


def test_a_rotation_is_its_own_inverse() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 192), np.float32)
    turned = turn(x, 64)
    np.testing.assert_allclose(turn(turned, 64), x, atol=1e-5)
    assert np.linalg.norm(turned[0, 0, :64]) == pytest.approx(np.linalg.norm(x[0, 0, :64]))
    assert turned[0, 0, 0] == pytest.approx(x[0, 0, :64].sum() / 8, rel=1e-4)


@pytest.mark.parametrize(("code", "message"), [(0x7F80, "inf"), (0xBF80, "negative")])
def test_damaged_numbers_of_rows_are_refused(code: int, message: str) -> None:
    tensor = encode(np.ones((4, 64), np.float32), Tcq(3))
    tensor.check()
    tensor.planes["rows"][2] = code
    with pytest.raises(FormatError, match=message):
        tensor.check()
