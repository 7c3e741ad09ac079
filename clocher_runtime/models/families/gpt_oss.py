"""gpt-oss."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clocher_runtime.models.config import LAYER_TYPES, Decoder, layer_windows, read_config
from clocher_runtime.models.config_fields import (
    Epsilon,
    Experts,
    Heads,
    Layers,
    Size,
    Theta,
    magnitude,
)
from clocher_runtime.models.family import Config, Family
from clocher_runtime.models.spec import ModelSpec, MoeSpec, RopeSpec


class _GptOss(Decoder, kw_only=True):
    ROPE: ClassVar[RopeSpec | None] = RopeSpec(
        150000.0, "yarn", 32.0, 4096, truncate=False, attention_factor=magnitude(32.0)
    )

    vocab_size: Size = 201088
    hidden_size: Size = 2880
    intermediate_size: Size = 2880
    num_hidden_layers: Layers = 36
    num_attention_heads: Heads = 64
    num_key_value_heads: Heads | None = 8
    head_dim: Heads | None = 64
    max_position_embeddings: Size = 131072
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 150000.0
    attention_bias: bool = True
    sliding_window: Size | None = 128
    layer_types: list[Any] | None = None
    num_local_experts: Experts | None = None
    num_experts: Experts = 128
    num_experts_per_tok: Experts | None = None
    experts_per_token: Experts = 4
    swiglu_limit: Annotated[float, Meta(ge=1e-3, le=1e6)] = 7.0
    swiglu_alpha: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.702


def gpt_oss(config: Config) -> ModelSpec:
    """gpt-oss: MXFP4 experts, attention sinks, alternating window, YaRN, clamped SwiGLU."""
    read = read_config(config, _GptOss)
    layers = read.num_hidden_layers
    pattern = tuple(LAYER_TYPES[i % 2] for i in range(layers))
    experts = read.num_local_experts or read.num_experts
    active = read.num_experts_per_tok or read.experts_per_token
    return read.spec(
        "gpt_oss",
        layer_windows(read.layer_types, layers, read.sliding_window, pattern),
        moe=MoeSpec(
            experts=experts,
            active=min(active, experts),
            inner=read.intermediate_size,
            act="clamped",
            limit=read.swiglu_limit,
            alpha=read.swiglu_alpha,
            router_bias=True,
            expert_bias=True,
        ),
        sinks=True,
    )


GPT_OSS = Family(gpt_oss)
