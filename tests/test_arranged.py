"""A model's tensors from those of its files: renamed, cut, stacked; values stay the same."""

import tracemalloc

import numpy as np
import pytest
from ggml_encode import encode
from weight_files import rng

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Ternary, parse_format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.arranged import arranged
from clocher_runtime.checkpoints.checkpoint import planes_of

HIDDEN, INNER, EXPERTS = 256, 192, 3
FORMATS = (
    "f32",
    "bf16",
    "int8_tensor_f32",
    "int8_row_f32",
    "int8_g32_f16",
    "int4_sym_g64_bf16",
    "int4_asym_g32_f16",
    "int4_sym_row_f32",
    "fp8_e4m3_tensor_f32",
    "fp8_e4m3_row_bf16",
    "fp8_e4m3_b128_f32",
    "mxfp4",
    "q4_k",
    "q6_k",
)
CUT = (*FORMATS, "ternary_f32")
"""Formats whose matrices can be cut; a ternary one is packed again."""
SIZES = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MOE = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
}
PHI = {**SIZES, "architectures": ["Phi3ForCausalLM"], "intermediate_size": INNER}
DEEPSEEK = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "intermediate_size": INNER,
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 32,
}
UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def drawn(name: str, shape: tuple[int, ...], fmt: str) -> QuantTensor:
    return encode(rng(name).standard_normal(shape, dtype=np.float32), parse_format(fmt))


def values(stored: QuantTensor) -> np.ndarray:
    planes = planes_of(stored)
    return QuantTensor(stored.shape, stored.format, dict(planes)).decode()


def experts(fmt: str) -> dict[str, QuantTensor]:
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    if fmt in ("q4_k", "q6_k"):
        shapes["down"] = (HIDDEN, 256)
    return {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": drawn(f"{part}{e}", shape, fmt)
        for e in range(EXPERTS)
        for part, shape in shapes.items()
    }


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_become_one_matrix(fmt: str) -> None:
    config = {**MOE, "moe_intermediate_size": 256} if fmt in ("q4_k", "q6_k") else MOE
    files = experts(fmt)
    if config is not MOE:
        for name in [n for n in files if "down" not in n]:
            files[name] = drawn(name, (256, HIDDEN), fmt)
    found, notes = arranged(files, config, "x")
    assert set(found) == {UP, DOWN} and notes == ()
    up, down = values(found[UP]), values(found[DOWN])
    for e in range(EXPERTS):
        part = {p: values(files[f"model.layers.0.mlp.experts.{e}.{p}_proj.weight"]) for p in PARTS}
        np.testing.assert_array_equal(up[e, 0::2], part["gate"])
        np.testing.assert_array_equal(up[e, 1::2], part["up"])
        np.testing.assert_array_equal(down[e], part["down"])


PARTS = ("gate", "up", "down")


@pytest.mark.parametrize("fmt", CUT)
def test_fused_projections_are_cut(fmt: str) -> None:
    files = {
        "model.layers.0.self_attn.qkv_proj.weight": drawn("qkv", (512, HIDDEN), fmt),
        "model.layers.0.mlp.gate_up_proj.weight": drawn("gu", (2 * INNER, HIDDEN), fmt),
    }
    found, _ = arranged(files, PHI, "x")
    fused, mlp = (values(tensor) for tensor in files.values())
    rows = {"q": (0, 256), "k": (256, 384), "v": (384, 512)}
    for name, (start, stop) in rows.items():
        cut = found[f"model.layers.0.self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(values(cut), fused[start:stop])
        assert isinstance(cut, QuantTensor)  # a view, or at most its scales are copied
        codes = max(cut.planes.values(), key=lambda plane: plane.nbytes)
        assert codes.base is not None or fmt == "ternary_f32"
    np.testing.assert_array_equal(values(found["model.layers.0.mlp.gate_proj.weight"]), mlp[:INNER])
    np.testing.assert_array_equal(values(found["model.layers.0.mlp.up_proj.weight"]), mlp[INNER:])


@pytest.mark.parametrize("fmt", CUT)
def test_rows_are_put_in_another_order(fmt: str) -> None:
    files = {
        "model.layers.0.self_attn.q_proj.weight": drawn("q", (4 * 32, HIDDEN), fmt),
        "model.layers.0.self_attn.kv_b_proj.weight": drawn("kv", (4 * 52, 256), fmt),
    }
    found, _ = arranged(files, DEEPSEEK, "x")
    q, kv = (values(tensor) for tensor in files.values())
    turned = [20 + i for i in (*range(0, 12, 2), *range(1, 12, 2))]
    for head in range(4):
        got = values(found["model.layers.0.self_attn.q_proj.weight"])[32 * head : 32 * head + 32]
        wanted = q[[32 * head + i for i in (*turned, *range(20))]]
        np.testing.assert_array_equal(got, wanted)
        got = values(found["model.layers.0.self_attn.v_b_proj.weight"])[32 * head : 32 * head + 32]
        np.testing.assert_array_equal(got, kv[52 * head + 20 : 52 * head + 52])


def test_names_of_models_of_more_than_text() -> None:
    table = drawn("t", (32, HIDDEN), "f32")
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**SIZES, "model_type": "gemma3_text"},
    }
    for begin in ("language_model.model.", "model.language_model."):
        files = {f"{begin}embed_tokens.weight": table, "vision_tower.x.weight": table}
        found, notes = arranged(files, config, "x")
        assert set(found) == {"model.embed_tokens.weight"}
        assert found["model.embed_tokens.weight"] is table
        assert notes == ("1 tensors of vision, audio or other non-text parts were left out",)
    bare = {"embed_tokens.weight": table, "layers.0.input_layernorm.weight": table}
    assert set(arranged(bare, {"architectures": ["LlamaModel"], **SIZES}, "x")[0]) == {
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    }


def test_parts_that_do_not_fit_are_refused() -> None:
    files = experts("bf16")
    first = next(iter(files))
    with pytest.raises(UnsupportedModel, match=r"its parts are \S+ int8_row_f32 and \S+ bf16"):
        arranged({**files, first: drawn("x", (INNER, HIDDEN), "int8_row_f32")}, MOE, "x")
    with pytest.raises(FormatError, match=r"has shape \[190, 256\]; config.json asks for \[192"):
        arranged({**files, first: drawn("x", (190, HIDDEN), "bf16")}, MOE, "x")
    ones = encode(np.ones((INNER, HIDDEN), np.float32), Ternary())
    ternary = {name: ones for name in files if "down" not in name}
    with pytest.raises(UnsupportedModel, match="scales of their own, and are packed"):
        arranged({**files, **ternary}, MOE, "x")


def test_a_config_that_promises_many_rows_makes_no_order_of_them() -> None:
    config = {**DEEPSEEK, "num_attention_heads": 4096, "num_key_value_heads": 4096}
    config |= {"qk_nope_head_dim": 4096, "qk_rope_head_dim": 4096}
    files = {"model.layers.0.self_attn.q_proj.weight": drawn("q", (8, HIDDEN), "f32")}
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"has 2048 elements; config\.json asks for 8589934592"):
        arranged(files, config, "x")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_config_that_promises_many_experts_costs_nothing() -> None:
    config = {**MOE, "num_experts": 4096, "num_hidden_layers": 1024}
    found, _ = arranged(experts("bf16"), config, "x")
    assert UP not in found
