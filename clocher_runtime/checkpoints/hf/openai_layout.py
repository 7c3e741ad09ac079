"""gpt-oss as OpenAI publishes it in `original/`: other config keys and tensor names, same bytes.

Source: github.com/openai/gpt-oss, gpt_oss/torch/model.py (ModelConfig, AttentionBlock), weights.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.hf.shards import Arrays
from clocher_runtime.disk.strict_json import read_as

_Size = Annotated[int, Meta(ge=1, le=1 << 30)]
_Positive = Annotated[float, Meta(gt=0, le=1e12)]

_EPS = 1e-5
_HARMONY_VOCABULARY = 201_088
_HARMONY_ENDS = [200002, 199999, 200012]
"""<|return|>, <|endoftext|>, <|call|>; the published files have no such list."""

_WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.weight": "lm_head.weight",
    "norm.scale": "model.norm.weight",
}
_OF_LAYER = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "attn.sinks": "self_attn.sinks",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}
_SAME = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window", "swiglu_limit"),
)
_BLOCK = re.compile(r"block\.([0-9]{1,4})\.(.+)", re.ASCII)
_QKV = re.compile(r"attn\.qkv\.(weight|bias)", re.ASCII)


class _Config(Struct):
    num_hidden_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_experts: _Size
    experts_per_token: _Size
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    head_dim: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    sliding_window: _Size
    initial_context_length: _Size
    swiglu_limit: _Positive = 7.0
    rope_theta: _Positive = 150000.0
    rope_scaling_factor: Annotated[float, Meta(ge=1, le=1 << 20)] = 32.0
    rope_ntk_alpha: _Positive = 1.0
    rope_ntk_beta: _Positive = 32.0


def canonical_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return OpenAI's config.json with transformers' keys; raises FormatError."""
    own = read_as(config, _Config, where)
    kinds = ("sliding_attention", "full_attention")
    rope: dict[str, Any] = {"rope_theta": own.rope_theta, "rope_type": "default"}
    if own.rope_scaling_factor > 1:
        rope |= {
            "rope_type": "yarn",
            "factor": own.rope_scaling_factor,
            "beta_fast": own.rope_ntk_beta,
            "beta_slow": own.rope_ntk_alpha,
            "original_max_position_embeddings": own.initial_context_length,
            "truncate": False,
        }
    found = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "layer_types": [kinds[layer % 2] for layer in range(own.num_hidden_layers)],
        "num_local_experts": own.num_experts,
        "num_experts_per_tok": own.experts_per_token,
        **{name: getattr(own, name) for name in _SAME},
        "hidden_act": "silu",
        "attention_bias": True,
        "rms_norm_eps": _EPS,
        "tie_word_embeddings": False,
        "max_position_embeddings": int(own.initial_context_length * own.rope_scaling_factor),
        "rope_parameters": rope,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    if own.vocab_size == _HARMONY_VOCABULARY:
        found["eos_token_id"] = _HARMONY_ENDS
    return found


def canonical_arrays(arrays: Arrays, config: Mapping[str, Any]) -> Arrays:
    """Return OpenAI's arrays under transformers' names; unknown names stay."""
    found: Arrays = {}
    q, kv = (
        config[f"num_{heads}_heads"] * config["head_dim"] for heads in ("attention", "key_value")
    )
    for name, stored in arrays.items():
        block = _BLOCK.fullmatch(name)
        layer, inner = block.groups() if block else ("", "")
        if fused := _QKV.fullmatch(inner):
            if stored.array.ndim < 1 or stored.array.shape[0] != q + 2 * kv:
                raise FormatError(
                    f"{stored.where}: shape {list(stored.array.shape)}, expected {q} + {kv} + {kv} "
                    "rows"
                )
            for part, start, count in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
                rows = replace(stored, array=stored.array[start : start + count])
                found[f"model.layers.{layer}.self_attn.{part}_proj.{fused[1]}"] = rows
        elif inner in _OF_LAYER:
            found[f"model.layers.{layer}.{_OF_LAYER[inner]}"] = stored
        else:
            found[_WHOLE.get(name, name)] = stored
    return found
