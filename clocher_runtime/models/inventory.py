"""A model's tensors: Hugging Face name, kind and logical shape."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from clocher_runtime.models.spec import MlaSpec, ModelSpec

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
    hidden, offset = spec.hidden_size, spec.norm_offset
    needs: dict[str, Need] = {}
    if spec.pre_norms:
        needs["input_layernorm.weight"] = Need("vector", (hidden,), offset)
        needs[mlp_norm_name(spec)] = Need("vector", (hidden,), offset)
    if spec.post_norms:
        for place in ("attention", "feedforward"):
            needs[f"post_{place}_layernorm.weight"] = Need("vector", (hidden,), offset)
    _attention(needs, spec)
    if spec.has_experts(layer):
        _experts(needs, spec)
    else:
        _mlp(needs, spec, "mlp.", spec.intermediate_size)
        if spec.sub_norms:
            needs["mlp.ffn_sub_norm.weight"] = Need("vector", (spec.intermediate_size,))
    return needs


def _attention(needs: dict[str, Need], spec: ModelSpec) -> None:
    hidden, dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    if spec.mla is not None:
        _latent(needs, spec, spec.mla)
        return
    _linear(needs, spec, "self_attn.q_proj", (q, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.k_proj", (kv, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.v_proj", (kv, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.o_proj", (hidden, q), spec.o_bias)
    if spec.qk_norm in ("heads", "rows"):
        for name, size in (("q", q), ("k", kv)):
            size = dim if spec.qk_norm == "heads" else size
            needs[f"self_attn.{name}_norm.weight"] = Need("vector", (size,), spec.norm_offset)
    if spec.sinks:
        needs["self_attn.sinks"] = Need("vector", (spec.num_heads,))
    if spec.sub_norms:
        needs["self_attn.attn_sub_norm.weight"] = Need("vector", (q,))


def _latent(needs: dict[str, Need], spec: ModelSpec, mla: MlaSpec) -> None:
    hidden, heads, source = spec.hidden_size, spec.num_heads, spec.hidden_size
    name = "self_attn.q_proj"
    if mla.query_rank:
        _linear(needs, spec, "self_attn.q_a_proj", (mla.query_rank, hidden), spec.qkv_bias)
        needs["self_attn.q_a_layernorm.weight"] = Need("vector", (mla.query_rank,))
        name, source = "self_attn.q_b_proj", mla.query_rank
    _linear(needs, spec, name, (heads * (mla.plain + mla.rotated), source), False)
    _linear(needs, spec, "self_attn.kv_a_proj", (mla.rank, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.k_rope_proj", (mla.rotated, hidden), spec.qkv_bias)
    needs["self_attn.kv_a_layernorm.weight"] = Need("vector", (mla.rank,))
    _linear(needs, spec, "self_attn.k_b_proj", (heads * mla.plain, mla.rank), False)
    _linear(needs, spec, "self_attn.v_b_proj", (heads * mla.value, mla.rank), False)
    _linear(needs, spec, "self_attn.o_proj", (hidden, heads * mla.value), spec.o_bias)


def _mlp(needs: dict[str, Need], spec: ModelSpec, prefix: str, inner: int) -> None:
    hidden = spec.hidden_size
    _linear(needs, spec, f"{prefix}gate_proj", (inner, hidden), spec.mlp_bias)
    _linear(needs, spec, f"{prefix}up_proj", (inner, hidden), spec.mlp_bias)
    _linear(needs, spec, f"{prefix}down_proj", (hidden, inner), spec.mlp_bias)


def _experts(needs: dict[str, Need], spec: ModelSpec) -> None:
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    experts, inner = moe.experts, moe.inner
    needs["mlp.router.weight"] = Need("router", (experts, hidden))
    if moe.router_bias:
        needs["mlp.router.bias"] = Need("vector", (experts,))
    if moe.choice_bias:
        needs["mlp.router.choice_bias"] = Need("vector", (experts,))
    for name, shape in (
        ("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        ("mlp.experts.down_proj", (experts, hidden, inner)),
    ):
        needs[name] = Need("linear", shape)
        if moe.expert_bias:
            needs[f"{name}_bias"] = Need("vector", shape[:2])
    if moe.shared:
        _mlp(needs, spec, "mlp.shared_expert.", moe.shared)
    if moe.shared_gate:
        needs["mlp.shared_expert_gate.weight"] = Need("router", (1, hidden))


def _linear(
    needs: dict[str, Need], spec: ModelSpec, name: str, shape: tuple[int, int], bias: bool
) -> None:
    needs[f"{name}.weight"] = Need("linear", shape)
    if bias:
        needs[f"{name}.bias"] = Need("vector", shape[:1])
    if spec.input_norm_eps:
        needs[f"{name}.rms_norm.weight"] = Need("vector", shape[1:])
