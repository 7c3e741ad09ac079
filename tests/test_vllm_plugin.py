"""The plug-in for vLLM, on stubs of what it touches of vLLM: names, calls, loaders, results."""

import tomllib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import vllm_stubs as vllm
from weight_files import ROOT

from clocher_kernels.errors import FormatError, ShapeError, UsageError
from clocher_kernels.library.arrays import quantize
from clocher_kernels.torch import QuantLinear

PROJECT = tomllib.loads((ROOT / "plugins/clocher_vllm/pyproject.toml").read_text(encoding="utf-8"))
RNG = np.random.default_rng(24)


@pytest.fixture(scope="module", autouse=True)
def stubs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        vllm.install(patch)
        yield


@pytest.fixture
def config_of(stubs: None) -> type[Any]:
    return import_module("clocher_vllm.config").ClocherConfig


def values(*shape: int) -> torch.Tensor:
    """Return floats that bf16 holds, so that no copy rounds them."""
    return torch.from_numpy(RNG.standard_normal(shape, np.float32)).bfloat16()


def rounded(weight: torch.Tensor, fmt: str) -> QuantLinear:
    return QuantLinear.from_weight(quantize(weight.float().numpy(), fmt))


def test_the_entry_point_registers_the_method_once() -> None:
    (entry,) = PROJECT["project"]["entry-points"]["vllm.general_plugins"].items()
    assert entry[0] == "clocher"
    module, _, function = entry[1].partition(":")
    register = getattr(import_module(module), function)
    for _ in range(3):  # vLLM calls it in each process, and may do so again
        register()
    assert vllm.QUANTIZATION_METHODS.count("clocher") == vllm.CALLS.count("clocher") == 1
    made = vllm.REGISTERED["clocher"].from_config({"quant_method": "clocher", "fmt": "int8"})
    assert made.get_name() == "clocher" and made.get_config_filenames() == []
    assert torch.bfloat16 in made.get_supported_act_dtypes() and made.get_min_capability() == 80


@pytest.mark.parametrize("fmt", ["int4_g128", "int8", "mxfp4"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_floats_of_joined_layers_are_rounded_when_they_are_loaded(
    config_of: type[Any], fmt: str, ranks: int
) -> None:
    sizes, parts = [64, 32, 32], [values(64, 256), values(32, 256), values(32, 256)]
    x, bias = values(3, 2, 256), values(128)
    found = []
    for rank in range(ranks):
        layer = vllm.LinearBase(config_of(fmt), 256, sizes, rank=rank, ranks=ranks)
        for shard, part in enumerate(parts):
            layer.load("weight", part, shard)
        own = bias[: 128 // ranks]
        out = layer.ready()(x, own)
        assert out.dtype == torch.bfloat16 and not hasattr(layer, "weight")
        assert not any(p.requires_grad for p in layer.parameters())
        layer.ready()  # once more, as after a reload that changed nothing
        assert torch.equal(layer(x, own), out)
        cut = [part.chunk(ranks)[rank] for part in parts]
        expected = rounded(torch.cat(cut), fmt)
        expected.bias = own.float()
        assert torch.equal(out, expected(x))
        found.append(out)
    assert sum(each.shape[-1] for each in found) == 128


@pytest.mark.parametrize("fmt", ["int4_g64", "int8", "mxfp4"])
def test_stored_planes_are_loaded_by_name(config_of: type[Any], fmt: str) -> None:
    config = config_of.from_config({"quant_method": "clocher", "fmt": fmt, "act_prec": "fp32"})
    parts = [rounded(values(64, 256), fmt), rounded(values(32, 256), fmt)]
    x = values(5, 256)
    for each in parts:
        each.act_prec = "fp32"
    expected = torch.cat([part(x) for part in parts], -1)
    layer = vllm.LinearBase(config, 256, [64, 32])
    for shard, part in enumerate(parts):
        for name, plane in part.state_dict().items():
            layer.load(name, plane, shard)
    assert torch.equal(layer.ready()(x), expected)
    halves = []
    for rank in range(2):  # cut by inputs: sums of the ranks are the whole
        layer = vllm.LinearBase(config, 256, [64], rank=rank, ranks=2, by_inputs=True)
        for name, plane in parts[0].state_dict().items():
            layer.load(name, plane)
        halves.append(layer.ready()(x.float()[:, 128 * rank : 128 * (rank + 1)]))
    assert torch.allclose(sum(halves), parts[0](x.float()), rtol=1e-5, atol=1e-4)


def test_planes_that_cannot_be_cut_or_joined_are_refused(config_of: type[Any]) -> None:
    stored = config_of("int4_g128", stored="planes")
    with pytest.raises(ShapeError, match="take fewer GPUs"):
        vllm.LinearBase(stored, 256, [64], ranks=4, by_inputs=True)
    with pytest.raises(ShapeError, match="no row for each output"):
        vllm.LinearBase(config_of("int8_tensor_f32", stored="planes"), 256, [64, 32])


@torch._dynamo.config.patch(disable=False)  # which other tests switch on
def test_a_layer_compiles_whole(config_of: type[Any]) -> None:
    layer = vllm.LinearBase(config_of("int8"), 128, [32])
    layer.load("weight", values(32, 128), 0)
    layer.ready()
    x = values(4, 128)
    compiled = torch.compile(lambda x: torch.relu(layer(x)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torch.relu(layer(x)))


def gated(gate: np.ndarray, up: np.ndarray, limit: float | None) -> np.ndarray:
    if limit is None:
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


class Experts:
    """Weights of experts as fp64, and what they make of tokens by the definition."""

    def __init__(self, w1: Any, w3: Any, w2: Any, biases: Any = None) -> None:
        self.w1, self.w3, self.w2 = (np.asarray(w, np.float64) for w in (w1, w3, w2))
        self.b1, self.b3, self.b2 = biases if biases is not None else [np.zeros(len(w1))] * 3

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *,
        limit: float | None = None,
        on_input: bool = False,
    ) -> np.ndarray:
        out = np.zeros((len(x), self.w2.shape[1]))
        for m, row in enumerate(x.double().numpy()):
            for weight, e in zip(weights[m].double().numpy(), ids[m].tolist(), strict=True):
                if e < 0:
                    continue
                token = row * weight if on_input else row
                gate = self.w1[e] @ token + self.b1[e]
                hidden = gated(gate, self.w3[e] @ token + self.b3[e], limit)
                out[m] += (self.w2[e] @ hidden + self.b2[e]) * (1 if on_input else weight)
        return out


def of_format(weight: torch.Tensor, fmt: str) -> np.ndarray:
    return np.stack([quantize(each.float().numpy(), fmt).decode() for each in weight])


def tokens(experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(5)])
    return values(5, 64).float(), torch.rand(5, 2), ids


@pytest.mark.parametrize("case", ["plain", "on_input", "clamped", "map", "map_on_input"])
@pytest.mark.parametrize("fmt", ["int4_g32", "mxfp4"])
def test_experts_of_floats_are_rounded_and_summed(
    config_of: type[Any], fmt: str, case: str
) -> None:
    torch.manual_seed(24)
    w1, w3, w2 = values(4, 32, 64), values(4, 32, 64), values(4, 64, 32)
    on_input, limit = case.endswith("on_input"), 7.0 if case == "clamped" else None
    activation = vllm.MoEActivation.SILU
    if limit is not None:
        activation = vllm.MoEActivation.SWIGLUOAI_UNINTERLEAVE
    kept, where = [0, 1, 2, 3], None
    if case.startswith("map"):
        kept, where = [3, 1], torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    layer = vllm.RoutedExperts(
        config_of(fmt, "fp32"),
        len(kept),
        64,
        32,
        activation,
        expert_map=where,
        on_input=on_input,
        limit=limit,
    )
    for place, expert in enumerate(kept):
        layer.load("w13_weight", w1[expert], "w1", place)
        layer.load("w13_weight", w3[expert], "w3", place)
        layer.load("w2_weight", w2[expert], "w2", place)
    x, weights, ids = tokens(4)
    found = layer.ready()(x, weights, ids)
    local = ids if where is None else where[ids]
    whole = Experts(*(of_format(w[kept], fmt) for w in (w1, w3, w2)))
    expected = whole(x, weights, local, limit=limit, on_input=on_input)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-4, atol=2e-4)
    assert not hasattr(layer, "w13_weight")
    layer.ready()
    assert torch.equal(layer(x, weights, ids), found)


def test_experts_of_gpt_oss_are_taken_as_stored(config_of: type[Any]) -> None:
    torch.manual_seed(24)
    facts = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = config_of.from_config(facts)
    inner = 48  # of a rank: not whole blocks, so vLLM's sizes are rounded up
    layer = vllm.RoutedExperts(config, 3, 64, inner, vllm.MoEActivation.SWIGLUOAI, has_bias=True)
    assert layer.quant_method.weight_dtype == "gpt_oss_mxfp4" and layer.inner == 64
    gate_up, down = values(3, 2 * inner, 64), values(3, 64, 64)
    down[..., inner:] = 0
    biases = {"w13_bias": values(3, 2 * inner), "w2_bias": values(3, 64)}
    stored = {}
    for name, weight in (("w13", gate_up), ("w2", down)):
        q = quantize(weight.float().numpy(), "mxfp4")
        blocks = torch.from_numpy(np.array(q.planes["blocks"]))
        stored[f"{name}_weight"] = blocks.flatten(2)
        stored[f"{name}_weight_scale"] = torch.from_numpy(np.array(q.planes["scales"]))
    for name, tensor in {**stored, **biases}.items():
        layer.load(name, tensor, None, None)  # all experts at once
    x, weights, ids = tokens(3)
    found = layer.ready()(x, weights, ids)
    turns, bias = of_format(gate_up, "mxfp4"), biases["w13_bias"].double().numpy()
    whole = Experts(
        turns[:, 0::2],
        turns[:, 1::2],
        of_format(down, "mxfp4")[..., :inner],
        (bias[:, 0::2], bias[:, 1::2], biases["w2_bias"].double().numpy()),
    )
    expected = whole(x, weights, ids, limit=7.0)
    # Activations are int8 here: the whole is near.
    assert np.linalg.norm(found.numpy() - expected) < 0.03 * np.linalg.norm(expected)
    layer.quant_method.act_prec = "fp32"
    np.testing.assert_allclose(layer(x, weights, ids).numpy(), expected, rtol=2e-4, atol=2e-4)
    linear = config.get_quant_method(vllm.LinearBase.__new__(vllm.LinearBase), "qkv_proj")
    assert type(linear) is vllm.UnquantizedLinearMethod


def test_layers_that_are_named_keep_their_floats(config_of: type[Any]) -> None:
    config = config_of(
        "int8", "", ["lm_head", "layers.0.mlp", "q_proj", "k_proj", "layers.1.experts"]
    )
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "qk": ["q_proj", "k_proj"],
    }
    layer = vllm.LinearBase.__new__(vllm.LinearBase)
    kinds = {
        name: type(config.get_quant_method(layer, name)).__name__
        for name in ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "layers.3.qk", "lm_head")
    }
    kept, taken = "UnquantizedLinearMethod", "ClocherLinearMethod"
    assert list(kinds.values()) == [kept, taken, kept, kept]
    with pytest.raises(UsageError, match="name all of them or none"):
        config.get_quant_method(layer, "layers.3.self_attn.qkv_proj")
    experts = vllm.RoutedExperts.__new__(vllm.RoutedExperts)
    assert config.get_quant_method(experts, "layers.1.experts") is None
    assert config_of(stored="planes").get_quant_method(experts, "layers.0.experts") is None
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "embed") is None


def test_what_cannot_be_is_refused(config_of: type[Any]) -> None:
    with pytest.raises(UsageError, match="'bits'"):
        config_of.from_config({"quant_method": "clocher", "bits": 4})
    with pytest.raises(FormatError, match="int3"):
        config_of("int3")
    with pytest.raises(UsageError, match="act_prec"):
        config_of("int8", "int4")
    with pytest.raises(UsageError, match="'gelu'"):
        vllm.RoutedExperts(config_of(), 2, 64, 32, vllm.MoEActivation.GELU)
    layer = vllm.RoutedExperts(config_of("int8"), 2, 64, 32, vllm.MoEActivation.SILU, limit=7.0)
    with pytest.raises(UsageError, match="without a limit"):
        layer.ready()


def test_gpt_oss_is_taken_over_only_when_asked(config_of: type[Any]) -> None:
    class GptOss:
        model_type = "gpt_oss"

    override = config_of.override_quantization_method
    assert override({"quant_method": "mxfp4"}, "clocher", hf_config=GptOss) == "clocher"
    assert override({"quant_method": "gpt_oss_mxfp4"}, "clocher", hf_config=GptOss) == "clocher"
    assert override({"quant_method": "mxfp4"}, None, hf_config=GptOss) is None
    assert override({"quant_method": "mxfp4"}, "clocher", hf_config=None) is None
    assert override({"quant_method": "fp8"}, "clocher", hf_config=GptOss) is None
