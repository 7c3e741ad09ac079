"""Mistral, Mixtral and Ministral 3."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from clocher_runtime.disk.strict_json import given, read_as
from clocher_runtime.models.config import Decoder, read_config
from clocher_runtime.models.config_fields import WHERE, Epsilon, Experts, Heads, Layers, Size, Theta
from clocher_runtime.models.family import Config, Family, From, each_expert
from clocher_runtime.models.spec import ModelSpec, MoeSpec, QueryGrowth


class _Mistral(Decoder, kw_only=True):
    """Attention linears never have a bias, whatever `attention_bias` says."""

    intermediate_size: Size = 14336
    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: Size | None = 4096

    def mistral(self, family: str, **more: Any) -> ModelSpec:
        windows = (self.sliding_window or 0,) * self.num_hidden_layers
        return self.spec(family, windows, qkv_bias=False, o_bias=False, **more)


def mistral(config: Config) -> ModelSpec:
    """Mistral: Llama with a sliding window on every layer, none if `sliding_window` is null."""
    return read_config(config, _Mistral).mistral("mistral")


class _Mixtral(_Mistral, kw_only=True):
    sliding_window: Size | None = None
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 1000000.0
    num_local_experts: Experts = 8
    num_experts_per_tok: Experts = 2


def mixtral(config: Config) -> ModelSpec:
    """Mixtral (arXiv 2401.04088): experts weighted by the softmax over the chosen ones."""
    read = read_config(config, _Mixtral)
    experts = read.num_local_experts
    return read.mistral(
        "mixtral",
        moe=MoeSpec(
            experts=experts,
            active=min(read.num_experts_per_tok, experts),
            inner=read.intermediate_size,
        ),
    )


class _Ministral3(_Mistral, kw_only=True):
    vocab_size: Size = 131072
    num_hidden_layers: Layers = 34
    head_dim: Heads | None = 128
    max_position_embeddings: Size = 262144
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = None


class _Growth(Struct):
    llama_4_scaling_beta: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    original_max_position_embeddings: Size = 16384


_YARN = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The published scaling, where a config has none."""


def ministral3(config: Config) -> ModelSpec:
    """Ministral 3: Mistral with YaRN, and queries that grow beyond the training context."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": _YARN}
    read = read_config(config, _Ministral3)
    rope: dict[str, Any] = read.rope_parameters or read.rope_scaling or {}
    growth = read_as(given(rope), _Growth, f"{WHERE}: rope_parameters")
    beta, every = growth.llama_4_scaling_beta, growth.original_max_position_embeddings
    return read.mistral("ministral3", query_growth=QueryGrowth(beta, every) if beta else None)


MISTRAL = Family(mistral)
MINISTRAL3 = Family(ministral3)
MIXTRAL = Family(
    mixtral,
    {
        "mlp.router": (From("block_sparse_moe.gate"),),
        **each_expert(*(f"block_sparse_moe.experts.{{e}}.{name}" for name in ("w1", "w3", "w2"))),
    },
)
