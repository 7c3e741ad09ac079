"""Qwen2 (biases on q, k, v) and Qwen3 (norms on query and key heads)."""

from typing import Any

from clocher_runtime.models.families.dense import LAYER_TYPES, layer_windows, sizes
from clocher_runtime.models.fields import Fields
from clocher_runtime.models.spec import ModelSpec


def qwen2(fields: Fields) -> ModelSpec:
    """Read a Qwen2ForCausalLM config; defaults are those of transformers' Qwen2Config."""
    return ModelSpec(family="qwen2", qkv_bias=True, **_base(fields, head_dim=None))


def qwen3(fields: Fields) -> ModelSpec:
    """Read a Qwen3ForCausalLM config; defaults are those of transformers' Qwen3Config."""
    bias = fields.flag("attention_bias", False)
    base = _base(fields, head_dim=128)
    return ModelSpec(family="qwen3", qk_norm=True, qkv_bias=bias, o_bias=bias, **base)


def _base(fields: Fields, head_dim: int | None) -> dict[str, Any]:
    fields.choice("hidden_act", "silu", ("silu",))
    base = sizes(
        fields,
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=head_dim,
        positions=32768,
        eps=1e-6,
        theta=10000.0,
        tied=False,
    )
    layers = base.pop("layers")
    window = None
    if fields.flag("use_sliding_window", False):
        absent = 0 if fields.has("sliding_window") else 4096
        window = fields.integer("sliding_window", absent) or None
    full = fields.integer("max_window_layers", 28, 0) if window else layers
    pattern = tuple(LAYER_TYPES[i < full] for i in range(layers))
    return {**base, "windows": layer_windows(fields, layers, window, pattern)}
