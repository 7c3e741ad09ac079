"""gpt-oss: MXFP4 experts, attention sinks, alternating window, YaRN, clamped SwiGLU."""

from math import log

from clocher_runtime.models.families.dense import LAYER_TYPES, layer_windows, sizes
from clocher_runtime.models.fields import Fields
from clocher_runtime.models.spec import ModelSpec, MoeSpec, RopeSpec

_PUBLISHED_ROPE = RopeSpec(
    150000.0,
    "yarn",
    32.0,
    4096,
    truncate=False,
    attention_factor=0.1 * log(32.0) + 1.0,
)


def spec(fields: Fields) -> ModelSpec:
    """Read a GptOssForCausalLM config; defaults are those of the published 120b.

    The count of experts is spelled `num_local_experts` (Hugging Face) or `num_experts` (OpenAI),
    that of active ones `num_experts_per_tok` or `experts_per_token`.
    """
    fields.choice("hidden_act", "silu", ("silu",))
    base = sizes(
        fields,
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        layers=36,
        heads=64,
        kv_heads=8,
        head_dim=64,
        positions=131072,
        eps=1e-5,
        theta=150000.0,
        tied=False,
        rope=_PUBLISHED_ROPE,
    )
    layers, bias = base.pop("layers"), fields.flag("attention_bias", True)
    window = fields.integer("sliding_window", 0 if fields.has("sliding_window") else 128) or None
    pattern = tuple(LAYER_TYPES[i % 2] for i in range(layers))
    experts = fields.integer("num_local_experts", fields.integer("num_experts", 128), most=65536)
    active = fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4))
    return ModelSpec(
        family="gpt_oss",
        windows=layer_windows(fields, layers, window, pattern),
        moe=MoeSpec(
            experts,
            min(active, experts),
            fields.number("swiglu_limit", 7.0, 1e-3, 1e6),
            fields.number("swiglu_alpha", 1.702, 1e-3, 1e3),
        ),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        **base,
    )
