"""Runs of calls in one launch: what they compute, in Triton's interpreter, and how many are left.

A model of one layer whose rows are as long as those of real ones, so that matmuls make them.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cuda_cases import INTERPRETER, aot_report, meta, meta_device, meta_weight

from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.rewrite import runs
from clocher_kernels.plan import Executor, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert.synthetic import preset_config
from clocher_runtime.models.build import Sizes, build_plan
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.models.spec import ModelSpec

HIDDEN, VOCAB, SLOTS = 1024, 64, 2
SMALL = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMALL |= {"intermediate_size": 64}

MODELS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    # preset, changes to its config, formats of linears and experts, dtype of the cache
    "int4": ("llama-8b", {}, "int4_sym_g128_f16", "", "bf16"),
    "int8": ("llama-8b", {"model_type": "qwen3", "attention_bias": True}, "int8_g64_f16", "", "i8"),
    "experts": ("gpt-oss-20b", {"num_local_experts": 8}, "bf16", "mxfp4", "e4m3"),
    "ternary": ("bitnet-2b", {"intermediate_size": HIDDEN}, "ternary", "", "f16"),
    "trellis": ("llama-8b", {}, "tcq3", "", "bf16"),
}


def shape(name: str) -> tuple[ModelSpec, str, str, str]:
    preset, changes, linear, experts, cache_dtype = MODELS[name]
    config = preset_config(preset, 1) | SMALL | changes
    return spec_from_config(config), linear, experts, cache_dtype


def format_of(need: Any, linear: str, experts: str) -> str:
    inner = experts if len(need.shape) == 3 else linear
    return inner if need.kind == "linear" else "bf16"


@cache
def model(name: str) -> tuple[Plan, dict[str, Any]]:
    spec, linear, experts, cache_dtype = shape(name)
    rng, weights = np.random.default_rng(5), dict[str, Any]()
    for tensor, need in inventory(spec).items():
        values = rng.standard_normal(need.shape, dtype=np.float32)
        if need.kind == "vector":
            weights[tensor] = values * np.float32(0.1) + np.float32("norm" in tensor)
        else:
            values *= np.float32(need.shape[-1] ** -0.5)
            weights[tensor] = encode(values, parse_format(format_of(need, linear, experts)))
    formats = {n: w.format for n, w in weights.items() if isinstance(w, QuantTensor)}
    sizes = Sizes(tokens=SLOTS, rows=SLOTS, slots=SLOTS, context=64, cache_dtype=cache_dtype)
    return build_plan(spec, formats, sizes), weights


def logits(executor: Executor, slots: list[int], position: int) -> np.ndarray:
    """Make a step of one token of each of some slots."""
    count = len(slots)
    for name, value in {
        "ids": [(7 * s + 5 * position + 1) % VOCAB for s in slots],
        "slots": slots,
        "positions": [position] * count,
        "ends": [position + 1] * count,
        "rows": list(range(count)),
    }.items():
        executor.array(name)[:count] = value
    executor.array("pages")[:] = np.arange(SLOTS)[:, None]
    executor.upload()
    executor.step(count, count)
    return executor.fetch("logits", count).copy()


def on_cuda(name: str, activations: str = "f32") -> CudaExecutor:
    plan, weights = model(name)
    return CudaExecutor(plan, weights, activations=activations, device=INTERPRETER)


@pytest.mark.parametrize(
    ("name", "activations", "limit"),
    [
        ("int4", "f32", 1e-5),
        pytest.param("int8", "f32", 1e-5, marks=pytest.mark.slow),
        ("experts", "f32", 1e-3),
        ("ternary", "f16", 2e-2),
        ("trellis", "f16", 1e-2),
    ],
)
def test_equals_the_reference_and_is_the_same_in_a_batch(
    name: str, activations: str, limit: float
) -> None:
    """The cache is empty before the position, which rotates queries and keys."""
    plan, weights = model(name)
    want = logits(ReferenceExecutor(plan, weights), [0, 1], 3)
    executor = on_cuda(name, activations)
    alone = logits(executor, [0], 3)
    assert np.sqrt(np.mean((alone - want[:1]) ** 2) / np.mean(want**2)) < limit
    both = logits(executor, [0, 1], 3)
    np.testing.assert_array_equal(both[:1], alone)
    assert np.sqrt(np.mean((both - want) ** 2) / np.mean(want**2)) < limit
    kinds = Counter(run.kind for run in runs(plan))
    assert kinds["heads"] == 1 and kinds["router"] == (name == "experts")


SHAPES = (
    # preset, formats of linears and experts, layers, launches of one token and of sixteen
    ("gpt-oss-20b", "bf16", "mxfp4", 24, 198, 222),
    ("llama-8b", "int4_sym_g128_f16", "", 32, 230, 262),
    ("bitnet-2b", "ternary", "", 30, 276, 306),
    ("llama-8b", "tcq3", "", 32, 358, 390),
)


def lowered(preset: str, linear: str, experts: str, layers: int, tokens: int) -> list[Launch]:
    """Return the launches of a greedy step of the first layers of a published model."""
    spec = spec_from_config(preset_config(preset, layers))
    formats, weights = {}, dict[str, Any]()
    for name, need in inventory(spec).items():
        if need.kind == "vector":
            weights[name] = meta(need.shape, torch.float32)
            continue
        weights[name] = meta_weight(format_of(need, linear, experts), *need.shape)
        formats[name] = weights[name].format
    sizes = Sizes(tokens=16, rows=16, slots=16, context=1024, cache_dtype="bf16")
    executor = CudaExecutor(build_plan(spec, formats, sizes), weights, device=meta_device(90))
    return executor.lower((tokens, tokens, 1024), True)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape[1] for shape in SHAPES])
def test_launches_of_a_step(shape: tuple[str, str, str, int, int, int]) -> None:
    """Counted on two layers and four: every layer has the same."""
    *given, layers, alone, sixteen = shape
    for tokens, most in ((1, alone), (16, sixteen)):
        two, four = (len(lowered(*given, count, tokens)) for count in (2, 4))
        assert two + (layers - 2) * (four - two) // 2 == most


@pytest.mark.slow
def test_machine_code() -> None:
    """No kernel spills; the sum of a norm has one order, in every kernel."""
    sums: dict[tuple[str, int], set[str]] = {}
    for name, used in aot_report("cuda_aot_fused.py").items():
        # Gate and up take every register (see test_cuda_few_tokens), and pointers more.
        assert used["local"] <= (64 if " m16 _few n28672" in name else 0), (name, used)
        for length, *parts in used.get("sums", ()):
            sums.setdefault((name.split()[0], length), set()).add(str(parts))
    assert len(sums) >= 4 and all(len(orders) == 1 for orders in sums.values()), sums


def test_every_op_of_a_run_has_a_contract() -> None:
    def names(plan: Plan) -> Mapping[str, int]:
        return Counter(call.op for run in runs(plan) for call in run.calls)

    for name in MODELS:
        plan = model(name)[0]
        assert names(plan) == Counter(call.op for call in plan.calls)
        assert names(plan).keys() <= OPS.keys()
