"""DeepSeek V2 and V3: latent attention, fine-grained experts."""

from typing import Annotated, Any

from msgspec import Meta

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import given, one_of
from clocher_runtime.models.config import Decoder, read_config
from clocher_runtime.models.config_fields import (
    WHERE,
    Experts,
    Heads,
    LayerNumber,
    Layers,
    Size,
    magnitude,
)
from clocher_runtime.models.family import Config, Family, From, each_expert
from clocher_runtime.models.spec import MlaSpec, ModelSpec, MoeSpec, RopeSpec

_Count = Annotated[int, Meta(ge=0, le=65536)]


class _DeepSeek(Decoder, kw_only=True):
    first_k_dense_replace: LayerNumber = 0
    moe_layer_freq: Annotated[int, Meta(ge=1, le=1024)] = 1
    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Heads = 128
    qk_rope_head_dim: Heads = 64
    v_head_dim: Heads = 128
    n_routed_experts: Experts = 64
    n_shared_experts: _Count | None = 2
    n_group: _Count | None = None
    topk_group: _Count | None = None
    num_experts_per_tok: Experts | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    moe_intermediate_size: Size = 1407

    @property
    def dim(self) -> int:
        return self.qk_rope_head_dim

    def deepseek(self, family: str, moe: dict[str, Any], paired: bool = True) -> ModelSpec:
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
            raise FormatError(f"{WHERE}: field 'num_experts_per_tok' is missing")
        inner = self.moe_intermediate_size
        rope = self.rope()
        return self.spec(
            family,
            head_dim=size,
            num_kv_heads=self.num_attention_heads,
            rope=RopeSpec(**{**_fields(rope), "rotated": self.qk_rope_head_dim}),
            attention_scale=size**-0.5 * self._stretched() ** 2,
            mla=MlaSpec(
                self.q_lora_rank or 0,
                self.kv_lora_rank,
                self.qk_nope_head_dim,
                self.qk_rope_head_dim,
                value,
                paired=paired,
            ),
            moe=MoeSpec(
                experts=experts,
                active=min(active, experts),
                inner=inner,
                factor=self.routed_scaling_factor,
                shared=inner * (self.n_shared_experts or 0),
                dense_layers=tuple(dense),
                **moe,
            ),
        )

    def groups(self, best: int) -> dict[str, int]:
        experts, active = self.n_routed_experts, self.num_experts_per_tok or 0
        return expert_groups(experts, active, self.n_group, self.topk_group, best)

    def _stretched(self) -> float:
        rope = self.rope_scaling if self.rope_parameters is None else self.rope_parameters
        fields = given(rope or {})
        if fields.get("rope_type", fields.get("type", "default")) == "default":
            return 1.0
        mscale = fields.get("mscale_all_dim", 0.0)
        return magnitude(self.rope().factor, float(mscale)) if mscale else 1.0


def expert_groups(
    experts: int, active: int, count: int | None, top: int | None, best: int
) -> dict[str, Any]:
    """Return the fields of MoeSpec on groups of experts. Raises FormatError."""
    count, top = count or 1, top or 1
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


def _fields(rope: RopeSpec) -> dict[str, Any]:
    return {name: getattr(rope, name) for name in RopeSpec.__slots__}


class _V2(_DeepSeek, kw_only=True):
    vocab_size: Size = 102400
    q_lora_rank: Size | None = 1536
    topk_method: str | None = None


def deepseek_v2(config: Config) -> ModelSpec:
    """DeepSeek-V2 (arXiv 2405.04434, section 2): latent attention, softmax over all experts."""
    methods = ("greedy", "group_limited_greedy")
    method = one_of(config, "topk_method", methods[0], methods, WHERE)
    read = read_config(config, _V2)
    if "q_lora_rank" in config and config["q_lora_rank"] is None:
        read.q_lora_rank = None
    groups = read.groups(1) if method == methods[1] else {}
    # transformers ignores norm_topk_prob here; the published models set false.
    return read.deepseek("deepseek_v2", {"score": "softmax", **groups})


class _V3(_DeepSeek, kw_only=True):
    vocab_size: Size = 129280
    hidden_size: Size = 7168
    intermediate_size: Size = 18432
    moe_intermediate_size: Size = 2048
    num_hidden_layers: Layers = 61
    num_attention_heads: Heads = 128
    max_position_embeddings: Size = 4096
    q_lora_rank: Size | None = 1536
    first_k_dense_replace: LayerNumber = 3
    n_routed_experts: Experts = 256
    n_shared_experts: _Count | None = 1
    n_group: _Count | None = 8
    topk_group: _Count | None = 4
    num_experts_per_tok: Experts | None = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 2.5
    rope_interleave: bool = True


def deepseek_v3(config: Config) -> ModelSpec:
    """DeepSeek-V3, R1 (arXiv 2412.19437, section 2.1): sigmoid scores, choice bias, groups."""
    read = read_config(config, _V3)
    if "q_lora_rank" in config and config["q_lora_rank"] is None:
        read.q_lora_rank = None
    moe = {
        "score": "sigmoid",
        "normalise": read.norm_topk_prob,
        "choice_bias": True,
        **read.groups(2),
    }
    return read.deepseek("deepseek_v3", moe, read.rope_interleave)


_LATENT = "self_attn.kv_a_proj_with_mqa"
_NAMES = {
    "self_attn.q_proj": (From("self_attn.q_proj", "mla_q"),),
    "self_attn.q_b_proj": (From("self_attn.q_b_proj", "mla_q"),),
    "self_attn.kv_a_proj": (From(_LATENT, "mla_latent"),),
    "self_attn.k_rope_proj": (From(_LATENT, "mla_rope"),),
    "self_attn.k_b_proj": (From("self_attn.kv_b_proj", "mla_k"),),
    "self_attn.v_b_proj": (From("self_attn.kv_b_proj", "mla_v"),),
    "mlp.router": (From("mlp.gate"),),
    "mlp.router.choice_bias": (From("mlp.gate.e_score_correction_bias"),),
    **each_expert(*(f"mlp.experts.{{e}}.{n}_proj" for n in ("gate", "up", "down"))),
    **{
        f"mlp.shared_expert.{n}_proj": (From(f"mlp.shared_experts.{n}_proj"),)
        for n in ("gate", "up", "down")
    },
}
DEEPSEEK_V2 = Family(deepseek_v2, _NAMES)
DEEPSEEK_V3 = Family(deepseek_v3, _NAMES)
