"""Llama 2/3 and Mistral: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from clocher_runtime.models.families.dense import bitnet_settings, sizes
from clocher_runtime.models.fields import Fields
from clocher_runtime.models.spec import ModelSpec


def llama(fields: Fields) -> ModelSpec:
    """Read a LlamaForCausalLM config; defaults are those of transformers' LlamaConfig."""
    fields.choice("hidden_act", "silu", ("silu",))
    base = sizes(
        fields,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        head_dim=None,
        positions=2048,
        eps=1e-6,
        theta=10000.0,
        tied=False,
    )
    layers, bias = base.pop("layers"), fields.flag("attention_bias", False)
    return ModelSpec(
        family="llama",
        windows=(0,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        **base,
        **bitnet_settings(fields),
    )


def mistral(fields: Fields) -> ModelSpec:
    """Read a MistralForCausalLM config: Llama with a sliding window on every layer.

    A config that leaves `sliding_window` out gets the published 4096; null means none.
    """
    fields.choice("hidden_act", "silu", ("silu",))
    base = sizes(
        fields,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=None,
        positions=131072,
        eps=1e-6,
        theta=10000.0,
        tied=False,
    )
    layers = base.pop("layers")
    window = fields.integer("sliding_window", 0 if fields.has("sliding_window") else 4096)
    return ModelSpec(family="mistral", windows=(window,) * layers, **base)
