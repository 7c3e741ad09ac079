"""Families with experts in every model: gpt-oss, DeepSeek V2 and V3, LLaDA2."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import given, one_of
from clocher_runtime.models.config import (
    WHERE,
    BlockDiffusionFields,
    BlockSize,
    Count,
    Decoder,
    Experts,
    Fraction,
    Heads,
    Interval,
    LayerNumber,
    MaskId,
    Size,
    Usual,
    magnitude,
    missing,
)
from clocher_runtime.models.families import FUSED_QKV, SHARED_EXPERTS, Family, From, each_expert
from clocher_runtime.models.spec import MlaSpec, MoeSpec, RopeSpec

_Scaling = Annotated[float, Meta(ge=1e-6, le=1e6)]


class _GptOss(Decoder, kw_only=True):
    """gpt-oss: MXFP4 experts, attention sinks, alternating window, YaRN, clamped SwiGLU."""

    USUAL = Usual(201088, 2880, 2880, 36, 64, 8, 64, 131072, 1e-5, 150000.0)
    SCALING: ClassVar[dict[str, Any] | None] = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }

    attention_bias: bool = True
    sliding_window: Size | None = 128
    num_local_experts: Experts | None = None
    num_experts: Experts = 128
    num_experts_per_tok: Experts | None = None
    experts_per_token: Experts = 4
    swiglu_limit: Annotated[float, Meta(ge=1e-3, le=1e6)] = 7.0
    swiglu_alpha: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.702

    def more(self) -> dict[str, Any]:
        experts = self.num_local_experts or self.num_experts
        moe = MoeSpec(
            experts=experts,
            active=min(self.num_experts_per_tok or self.experts_per_token, experts),
            inner=self.intermediate_size,
            act="clamped",
            limit=self.swiglu_limit,
            alpha=self.swiglu_alpha,
            router_bias=True,
            expert_bias=True,
        )
        windows = self.windows(self.sliding_window, lambda layer: layer % 2 == 0)
        return {"windows": windows, "moe": moe, "sinks": True}


class _Grouped(Decoder, kw_only=True):
    """Experts that are chosen from groups of them."""

    n_group: Count | None = None
    topk_group: Count | None = None

    def groups(self, experts: int, active: int, best: int) -> dict[str, Any]:
        """Return the fields of MoeSpec on groups. Raises FormatError."""
        count, top = self.n_group or 1, self.topk_group or 1
        if count <= 1:
            return {}
        if experts % count or top > count or experts // count < best:
            raise FormatError(
                f"{WHERE}: {experts} experts in {count} groups (n_group), of which {top} are "
                f"chosen from (topk_group); expected groups of one size, at least {best} experts "
                "each, and no more chosen groups than there are"
            )
        if active > experts // count * top:
            raise FormatError(f"{WHERE}: more experts per token than {top} groups have")
        return {"groups": count, "group_top": top, "group_best": best}


class _DeepSeek2(_Grouped, kw_only=True):
    """DeepSeek-V2 (arXiv 2405.04434, section 2): latent attention, softmax over all experts."""

    USUAL = Usual(102400)

    first_k_dense_replace: LayerNumber = 0
    moe_layer_freq: Interval = 1
    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = 1536
    qk_nope_head_dim: Heads = 128
    qk_rope_head_dim: Heads = 64
    v_head_dim: Heads = 128
    n_routed_experts: Experts = 64
    n_shared_experts: Count | None = 2
    num_experts_per_tok: Experts | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: _Scaling = 1.0
    moe_intermediate_size: Size = 1407
    topk_method: Any = None

    @property
    def dim(self) -> int:
        return self.qk_rope_head_dim

    def routing(self, active: int) -> dict[str, Any]:
        """Return the fields of MoeSpec on the choice of experts."""
        methods = ("greedy", "group_limited_greedy")
        one_of({"topk_method": self.topk_method}, "topk_method", methods[0], methods, WHERE)
        grouped = self.topk_method == methods[1]
        # transformers ignores norm_topk_prob here; the published models set false.
        groups = self.groups(self.n_routed_experts, active, 1) if grouped else {}
        return {"score": "softmax", **groups}

    def more(self) -> dict[str, Any]:
        size, value = self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim
        if value > size:
            raise UnsupportedModel(
                f"{WHERE}: v_head_dim is {value}, more than the {size} of queries and keys; "
                "Clocher's cache holds values in as much room as keys"
            )
        layers, every = range(self.num_hidden_layers), self.moe_layer_freq
        dense = (i for i in layers if i < self.first_k_dense_replace or i % every)
        experts, active = self.n_routed_experts, self.num_experts_per_tok
        if active is None:
            raise missing("num_experts_per_tok")
        inner, rope = self.moe_intermediate_size, self.rope()
        return {
            "head_dim": size,
            "num_kv_heads": self.num_attention_heads,
            "rope": replace(rope, rotated=self.qk_rope_head_dim),
            "attention_scale": size**-0.5 * self._stretched(rope) ** 2,
            "mla": MlaSpec(
                self.q_lora_rank or 0,
                self.kv_lora_rank,
                self.qk_nope_head_dim,
                self.qk_rope_head_dim,
                value,
                paired=getattr(self, "rope_interleave", True),
            ),
            "moe": MoeSpec(
                experts=experts,
                active=min(active, experts),
                inner=inner,
                factor=self.routed_scaling_factor,
                shared=inner * (self.n_shared_experts or 0),
                dense_layers=tuple(dense),
                **self.routing(active),
            ),
        }

    def _stretched(self, rope: RopeSpec) -> float:
        fields = given(self.scaling or {})
        if fields.get("rope_type", fields.get("type", "default")) == "default":
            return 1.0
        mscale = fields.get("mscale_all_dim", 0.0)
        return magnitude(rope.factor, float(mscale)) if mscale else 1.0


class _DeepSeek3(_DeepSeek2, kw_only=True):
    """DeepSeek-V3, R1 (arXiv 2412.19437, section 2.1): sigmoid scores, choice bias, groups."""

    USUAL = Usual(129280, 7168, 18432, 61, 128, None, None, 4096)

    moe_intermediate_size: Size = 2048
    first_k_dense_replace: LayerNumber = 3
    n_routed_experts: Experts = 256
    n_shared_experts: Count | None = 1
    n_group: Count | None = 8
    topk_group: Count | None = 4
    num_experts_per_tok: Experts | None = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: _Scaling = 2.5
    rope_interleave: bool = True

    def routing(self, active: int) -> dict[str, Any]:
        return {
            "score": "sigmoid",
            "normalise": self.norm_topk_prob,
            "choice_bias": True,
            **self.groups(self.n_routed_experts, active, 2),
        }


class _Llada2(_Grouped, kw_only=True):
    """LLaDA2.0 (2025; forward as in dInfer): DeepSeek-V3's routing, half of each head rotated."""

    USUAL = Usual(30592, 1024, 11008, 24, 16, None, None, 16384, 1e-5)

    num_key_value_heads: Count | None = 0
    partial_rotary_factor: Fraction = 0.5
    use_bias: bool = True
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    norm_head: bool = False
    num_experts: Experts = 16
    num_shared_experts: Count | None = 0
    num_experts_per_tok: Experts = 2
    n_group: Count | None = 8
    topk_group: Count | None = 4
    routed_scaling_factor: _Scaling = 2.5
    moe_intermediate_size: Size | None = None
    first_k_dense_replace: LayerNumber = 0
    block_size: BlockSize = 32
    mask_token_id: MaskId = 156895

    def blocks(self) -> BlockDiffusionFields | None:
        return BlockDiffusionFields(self.block_size, self.mask_token_id, "block")

    def more(self) -> dict[str, Any]:
        if self.norm_head:
            raise UnsupportedModel(
                f"{WHERE}: norm_head is true; Clocher's head has no norm of its own"
            )
        inner, experts = self.moe_intermediate_size, self.num_experts
        if inner is None:
            raise missing("moe_intermediate_size")
        active = min(self.num_experts_per_tok, experts)
        moe = MoeSpec(
            experts=experts,
            active=active,
            inner=inner,
            score="sigmoid",
            normalise=active > 1,
            factor=self.routed_scaling_factor,
            choice_bias=True,
            shared=inner * (self.num_shared_experts or 0),
            dense_layers=tuple(range(min(self.first_k_dense_replace, self.num_hidden_layers))),
            **self.groups(experts, active, 2),
        )
        return {
            "qk_norm": "heads" if self.use_qk_norm else "",
            "qkv_bias": self.use_qkv_bias,
            "o_bias": self.use_bias,
            "moe": moe,
        }


_LATENT = "self_attn.kv_a_proj_with_mqa"
_ROUTED = {"mlp.router": (From("mlp.gate"),), **each_expert(), **SHARED_EXPERTS}
_DEEPSEEK = {
    **_ROUTED,
    "self_attn.q_proj": (From("self_attn.q_proj", "mla_q"),),
    "self_attn.q_b_proj": (From("self_attn.q_b_proj", "mla_q"),),
    "self_attn.kv_a_proj": (From(_LATENT, "mla_latent"),),
    "self_attn.k_rope_proj": (From(_LATENT, "mla_rope"),),
    "self_attn.k_b_proj": (From("self_attn.kv_b_proj", "mla_k"),),
    "self_attn.v_b_proj": (From("self_attn.kv_b_proj", "mla_v"),),
    "mlp.router.choice_bias": (From("mlp.gate.e_score_correction_bias"),),
}
_LLADA2 = {
    **_ROUTED,
    "model.embed_tokens": (From("model.word_embeddings"),),
    **{f"self_attn.{n}_proj": (From("attention.query_key_value", n),) for n in "qkv"},
    "self_attn.q_norm": (From("attention.query_layernorm"),),
    "self_attn.k_norm": (From("attention.key_layernorm"),),
    "self_attn.o_proj": (From("attention.dense"),),
    "mlp.router.choice_bias": (From("mlp.gate.expert_bias"),),
}
FAMILIES = {
    "GptOssForCausalLM": Family("gpt_oss", _GptOss, FUSED_QKV),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", _DeepSeek2, _DEEPSEEK),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", _DeepSeek3, _DEEPSEEK),
    "LLaDA2MoeModelLM": Family("llada2_moe", _Llada2, _LLADA2),
}
