"""Ternary models whose squared ReLU is mostly zero, and what is counted of their zeros."""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.formats import Ternary
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.inventory import EMBED, layer_name

_PROMPT = 16
_SMALL = np.float32(2**-12)


def planted(model: Model, percent: float, seed: int = 0) -> Model:
    """Return a model of whose gates so many per cent are zero.

    A tenth of the channels of the stream becomes a constant, which rows of the gates lean against,
    and what the layers add to the stream becomes small.
    """
    spec, rng = model.spec, np.random.default_rng(seed)
    weights = dict(model.weights)
    constant = rng.choice(spec.hidden_size, spec.hidden_size // 10, replace=False)
    table = weights[EMBED]
    values = table.decode()
    values[:, constant] = np.sqrt(np.square(values).mean())
    weights[EMBED] = encode(values, table.format)
    for layer in range(spec.num_layers):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            name = layer_name(layer, name)
            weights[name] = _scaled(weights[name], _SMALL)
        name = layer_name(layer, "mlp.gate_proj.weight")
        weights[name] = _leaning(weights[name], constant, percent, rng)
    return replace(model, weights=weights)


def _scaled(weight: QuantTensor, factor: np.float32) -> QuantTensor:
    assert isinstance(weight.format, Ternary)
    dtype = weight.format.scale_dtype
    factor = 1 / factor if weight.format.inverse else factor
    scale = from_f32(to_f32(weight.planes["scale"], dtype) * factor, dtype)
    return replace(weight, planes={"codes": weight.planes["codes"].copy(), "scale": scale})


def _leaning(
    weight: QuantTensor, constant: np.ndarray, percent: float, rng: np.random.Generator
) -> QuantTensor:
    """Return gates whose weights of the constant channels have a mean below zero."""
    assert isinstance(weight.format, Ternary)
    digits = weight.format.codes(weight.planes, weight.shape)
    often = float(np.mean(digits != 0))
    spread = (weight.shape[1] * often) ** 0.5
    lean = NormalDist().inv_cdf(percent / 100) * spread / len(constant)
    chances = [(often + lean) / 2, 1 - often, (often - lean) / 2]
    shape = (len(digits), len(constant))
    digits[:, constant] = rng.choice(np.array([-1, 0, 1], np.int8), shape, p=chances)
    rows = (digits + 1).astype(np.uint8).reshape(4, -1, weight.shape[1])
    codes = rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6
    return replace(weight, planes={"codes": codes, "scale": weight.planes["scale"].copy()})


def zeros_by_layer(session: Session, tokens: int) -> list[float]:
    """Return for each layer the share of the codes of its hidden neurons that are zero."""
    executor: Any = session.executor
    prompt = np.random.default_rng(0).integers(session.model.spec.vocab_size, size=_PROMPT)
    for _ in session.generate([prompt.tolist()], 1, stop_ids=frozenset()):
        pass
    seen = []
    for _ in range(tokens):
        found = []
        for call in executor.walk(1, 1):
            if call.op == "skip_linear":
                found.append(float(np.mean(executor.array(call.args["x"])[0] == 0)))
        seen.append(found)
    shares: list[float] = np.mean(seen, axis=0).tolist()
    return shares
