"""Llama 4, text only."""

from typing import Annotated, Any

from msgspec import Meta

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.strict_json import shown, unknown
from clocher_runtime.models.config import Decoder, read_config
from clocher_runtime.models.config_fields import (
    WHERE,
    Epsilon,
    Experts,
    Heads,
    LayerNumber,
    Layers,
    Size,
    Theta,
)
from clocher_runtime.models.families.llama import unrotated
from clocher_runtime.models.family import Config, Family, From
from clocher_runtime.models.spec import ModelSpec, MoeSpec, QueryGrowth

_TYPES = ("chunked_attention", "full_attention")


class _Llama4(Decoder, kw_only=True):
    vocab_size: Size = 202048
    hidden_size: Size = 5120
    intermediate_size: Size = 8192
    intermediate_size_mlp: Size = 16384
    num_hidden_layers: Layers = 48
    num_attention_heads: Heads = 40
    num_key_value_heads: Heads | None = 8
    head_dim: Heads | None = 128
    max_position_embeddings: Size = 131072
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 500000.0
    num_experts_per_tok: Experts = 1
    num_local_experts: Experts = 16
    moe_layers: list[LayerNumber] | None = None
    interleave_moe_layer_step: Annotated[int, Meta(ge=1, le=1024)] = 1
    use_qk_norm: bool = True
    no_rope_layers: list[bool | int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1, le=1024)] = 4
    attention_chunk_size: Size | None = 8192
    layer_types: list[Any] | None = None
    attn_temperature_tuning: bool = True
    floor_scale: Size = 8192
    attn_scale: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.1


def llama4(config: Config) -> ModelSpec:
    """Llama 4 (transformers Llama4TextModel): scaled expert inputs, chunks, layers without RoPE."""
    read = read_config(config, _Llama4)
    layers, step = read.num_hidden_layers, read.interleave_moe_layer_step
    plain = unrotated(read.no_rope_layers or None, read.no_rope_layer_interval, layers)
    moe = range(step - 1, layers, step) if read.moe_layers is None else read.moe_layers
    return read.spec(
        "llama4",
        chunks=_chunks(read, plain),
        unrotated=plain,
        query_growth=QueryGrowth(read.attn_scale, read.floor_scale, 1)
        if read.attn_temperature_tuning and plain
        else None,
        intermediate_size=read.intermediate_size_mlp,
        qk_norm="after" if read.use_qk_norm else "",
        moe=MoeSpec(
            experts=read.num_local_experts,
            active=min(read.num_experts_per_tok, read.num_local_experts),
            inner=read.intermediate_size,
            score="sigmoid",
            scale_inputs=True,
            shared=read.intermediate_size,
            dense_layers=tuple(i for i in range(layers) if i not in moe),
        ),
    )


def _chunks(read: _Llama4, plain: tuple[int, ...]) -> tuple[int, ...]:
    layers, size = range(read.num_hidden_layers), read.attention_chunk_size or 0
    types = read.layer_types
    if types is None:
        return tuple(0 if i in plain else size for i in layers)
    if len(types) != len(layers):
        raise FormatError(f"{WHERE}: layer_types is {shown(types)}; expected {len(layers)} names")
    for kind in types:
        if kind not in _TYPES:
            raise unknown("layer type", kind, _TYPES, WHERE)
    return tuple(size if kind == _TYPES[0] else 0 for kind in types)


def _moved(name: str) -> tuple[From, ...]:
    return (From(name.replace("mlp.", "feed_forward.", 1)),)


LLAMA4 = Family(
    llama4,
    {
        "self_attn.q_proj": (From("self_attn.q_proj", "paired"),),
        "self_attn.k_proj": (From("self_attn.k_proj", "paired"),),
        **{f"mlp.{n}_proj": _moved(f"mlp.{n}_proj") for n in ("gate", "up", "down")},
        **{
            f"mlp.shared_expert.{n}_proj": _moved(f"mlp.shared_expert.{n}_proj")
            for n in ("gate", "up", "down")
        },
        "mlp.router": _moved("mlp.router"),
        "mlp.experts.gate_up_proj": (
            From("feed_forward.experts.gate_up_proj", "first"),
            From("feed_forward.experts.gate_up_proj", "second"),
        ),
        "mlp.experts.down_proj": _moved("mlp.experts.down_proj"),
    },
)
