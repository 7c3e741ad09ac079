"""LLaDA2: experts and block diffusion."""

from typing import Annotated

from msgspec import Meta

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.models.config import BlockDiffusionFields, Decoder, read_config
from clocher_runtime.models.config_fields import (
    WHERE,
    BlockSize,
    Epsilon,
    Experts,
    Fraction,
    Heads,
    LayerNumber,
    Layers,
    MaskId,
    Size,
)
from clocher_runtime.models.families.deepseek import expert_groups
from clocher_runtime.models.family import Config, Family, From, each_expert
from clocher_runtime.models.spec import BlockDiffusion, ModelSpec, MoeSpec

_Count = Annotated[int, Meta(ge=0, le=65536)]


class _Llada2(Decoder, kw_only=True):
    vocab_size: Size = 30592
    hidden_size: Size = 1024
    num_hidden_layers: Layers = 24
    num_attention_heads: Heads = 16
    num_key_value_heads: _Count | None = 0
    max_position_embeddings: Size = 16384
    rms_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: Fraction = 0.5
    use_bias: bool = True
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    norm_head: bool = False
    num_experts: Experts = 16
    num_shared_experts: _Count | None = 0
    num_experts_per_tok: Experts = 2
    n_group: _Count | None = 8
    topk_group: _Count | None = 4
    routed_scaling_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 2.5
    moe_intermediate_size: Size | None = None
    first_k_dense_replace: LayerNumber = 0
    block_size: BlockSize = 32
    mask_token_id: MaskId = 156895

    def diffusion(self) -> BlockDiffusion | None:
        size, mask = self.block_size, self.mask_token_id
        self.block_diffusion = BlockDiffusionFields(size, mask, "block")
        return super().diffusion()


def llada2_moe(config: Config) -> ModelSpec:
    """LLaDA2.0 (2025; forward as in dInfer): DeepSeek-V3's routing, half of each head rotated."""
    read = read_config(config, _Llada2)
    if read.norm_head:
        raise UnsupportedModel(f"{WHERE}: norm_head is true; Clocher's head has no norm of its own")
    inner = read.moe_intermediate_size
    if inner is None:
        raise FormatError(f"{WHERE}: field 'moe_intermediate_size' is missing")
    experts = read.num_experts
    active = min(read.num_experts_per_tok, experts)
    return read.spec(
        "llada2_moe",
        qk_norm="heads" if read.use_qk_norm else "",
        qkv_bias=read.use_qkv_bias,
        o_bias=read.use_bias,
        moe=MoeSpec(
            experts=experts,
            active=active,
            inner=inner,
            score="sigmoid",
            normalise=active > 1,
            factor=read.routed_scaling_factor,
            choice_bias=True,
            shared=inner * (read.num_shared_experts or 0),
            dense_layers=tuple(range(min(read.first_k_dense_replace, read.num_hidden_layers))),
            **expert_groups(experts, active, read.n_group, read.topk_group, 2),
        ),
    )


LLADA2_MOE = Family(
    llada2_moe,
    {
        "model.embed_tokens": (From("model.word_embeddings"),),
        **{f"self_attn.{n}_proj": (From("attention.query_key_value", n),) for n in "qkv"},
        "self_attn.q_norm": (From("attention.query_layernorm"),),
        "self_attn.k_norm": (From("attention.key_layernorm"),),
        "self_attn.o_proj": (From("attention.dense"),),
        "mlp.router": (From("mlp.gate"),),
        "mlp.router.choice_bias": (From("mlp.gate.expert_bias"),),
        **each_expert(*(f"mlp.experts.{{e}}.{n}_proj" for n in ("gate", "up", "down"))),
        **{
            f"mlp.shared_expert.{n}_proj": (From(f"mlp.shared_experts.{n}_proj"),)
            for n in ("gate", "up", "down")
        },
    },
)
