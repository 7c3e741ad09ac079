"""A model's tensors: Hugging Face name, kind and logical shape."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from clocher_runtime.models.spec import MlaSpec, ModelSpec, MoeSpec

SCOPES = {
    "none": (),
    "woh": ("head",),
    "wxh": ("linear", "router"),
    "all": ("head", "linear", "router"),
}
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Need:
    """One tensor that a model reads; a "vector" becomes fp32, (stored + offset) * scale."""

    kind: Literal["linear", "embedding", "head", "router", "vector"]
    shape: tuple[int, ...]
    offset: float = 0.0
    scale: float = 1.0

    @property
    def elements(self) -> int:
        """Number of its values."""
        return prod(self.shape)


def head_name(spec: ModelSpec) -> str:
    """Return the name of the head's matrix."""
    return EMBED if spec.tied else HEAD


def in_scope(spec: ModelSpec, scope: str) -> frozenset[str]:
    """Return the matrices of a prepacking scope; an embedding may be the head."""
    needs = inventory(spec)
    needs[head_name(spec)] = Need("head", needs[head_name(spec)].shape)
    return frozenset(name for name, need in needs.items() if need.kind in SCOPES[scope])


def layer_name(layer: int, name: str) -> str:
    """Return the full name of a tensor of a layer."""
    return f"model.layers.{layer}.{name}"


def mlp_norm_name(spec: ModelSpec) -> str:
    """Return the name of the norm before an MLP; Llama names it after the preceding attention."""
    return f"{'pre_feedforward' if spec.post_norms else 'post_attention'}_layernorm.weight"


def inventory(spec: ModelSpec) -> dict[str, Need]:
    """Return every tensor that a model of this spec reads."""
    hidden = spec.hidden_size
    # The factor of the logits is applied before the head.
    norm = Need("vector", (hidden,), spec.norm_offset, spec.logit_scale)
    needs = {EMBED: Need("embedding", (spec.vocab_size, hidden)), NORM: norm}
    if not spec.tied:
        needs[HEAD] = Need("head", (spec.vocab_size, hidden))
    for layer in range(spec.num_layers):
        for name, need in _layer(spec, layer).items():
            needs[layer_name(layer, name)] = need
    return needs


def _layer(spec: ModelSpec, layer: int) -> dict[str, Need]:
    hidden, offset, dim, moe = spec.hidden_size, spec.norm_offset, spec.head_dim, spec.moe
    q, kv, heads = spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_heads
    needs: dict[str, Need] = {}

    def vector(name: str, size: int, offset: float = 0.0) -> None:
        needs[name] = Need("vector", (size,), offset)

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        needs[f"{name}.weight"] = Need("linear", (rows, columns))
        if bias:
            vector(f"{name}.bias", rows)
        if spec.input_norm_eps:
            vector(f"{name}.rms_norm.weight", columns)

    def mlp(prefix: str, inner: int) -> None:
        linear(f"{prefix}gate_proj", inner, hidden, spec.mlp_bias)
        linear(f"{prefix}up_proj", inner, hidden, spec.mlp_bias)
        linear(f"{prefix}down_proj", hidden, inner, spec.mlp_bias)

    def latent(mla: MlaSpec) -> None:
        name, source = "self_attn.q_proj", hidden
        if mla.query_rank:
            linear("self_attn.q_a_proj", mla.query_rank, hidden, spec.qkv_bias)
            vector("self_attn.q_a_layernorm.weight", mla.query_rank)
            name, source = "self_attn.q_b_proj", mla.query_rank
        linear(name, heads * (mla.plain + mla.rotated), source)
        linear("self_attn.kv_a_proj", mla.rank, hidden, spec.qkv_bias)
        linear("self_attn.k_rope_proj", mla.rotated, hidden, spec.qkv_bias)
        vector("self_attn.kv_a_layernorm.weight", mla.rank)
        linear("self_attn.k_b_proj", heads * mla.plain, mla.rank)
        linear("self_attn.v_b_proj", heads * mla.value, mla.rank)
        linear("self_attn.o_proj", hidden, heads * mla.value, spec.o_bias)

    def attention() -> None:
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            linear(f"self_attn.{name}_proj", size, hidden, spec.qkv_bias)
        linear("self_attn.o_proj", hidden, q, spec.o_bias)
        if spec.qk_norm in ("heads", "rows"):
            for name, size in (("q", q), ("k", kv)):
                size = dim if spec.qk_norm == "heads" else size
                vector(f"self_attn.{name}_norm.weight", size, offset)
        if spec.sinks:
            vector("self_attn.sinks", heads)
        if spec.sub_norms:
            vector("self_attn.attn_sub_norm.weight", q)

    def experts(moe: MoeSpec) -> None:
        needs["mlp.router.weight"] = Need("router", (moe.experts, hidden))
        for name, has in (("bias", moe.router_bias), ("choice_bias", moe.choice_bias)):
            if has:
                vector(f"mlp.router.{name}", moe.experts)
        for name, rows, columns in (
            ("mlp.experts.gate_up_proj", 2 * moe.inner, hidden),
            ("mlp.experts.down_proj", hidden, moe.inner),
        ):
            needs[name] = Need("linear", (moe.experts, rows, columns))
            if moe.expert_bias:
                needs[f"{name}_bias"] = Need("vector", (moe.experts, rows))
        if moe.shared:
            mlp("mlp.shared_expert.", moe.shared)
        if moe.shared_gate:
            needs["mlp.shared_expert_gate.weight"] = Need("router", (1, hidden))

    if spec.pre_norms:
        vector("input_layernorm.weight", hidden, offset)
        vector(mlp_norm_name(spec), hidden, offset)
    if spec.post_norms:
        for place in ("attention", "feedforward"):
            vector(f"post_{place}_layernorm.weight", hidden, offset)
    if spec.mla is None:
        attention()
    else:
        latent(spec.mla)
    if moe is not None and spec.has_experts(layer):
        experts(moe)
    else:
        mlp("mlp.", spec.intermediate_size)
        if spec.sub_norms:
            vector("mlp.ffn_sub_norm.weight", spec.intermediate_size)
    return needs
