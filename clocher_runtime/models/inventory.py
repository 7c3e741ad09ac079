"""Which tensors a model has: names as Hugging Face spells them, kind and logical shape."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from clocher_runtime.models.spec import ModelSpec

SCOPES = {
    "none": (),
    "woh": ("head",),
    "wxh": ("linear", "router"),
    "all": ("head", "linear", "router"),
}
"""Scope of prepacking -> kinds of the matrices in it."""
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Need:
    """One tensor that a model reads.

    Attributes:
        kind: "linear" weights of the blocks (what `--precision int8w` quantises), other matrices
            ("embedding", "head", "router"), or a "vector" that is decoded to fp32.
        shape: logical shape.
    """

    kind: Literal["linear", "embedding", "head", "router", "vector"]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of its values."""
        return prod(self.shape)


def head_name(spec: ModelSpec) -> str:
    """Return the tensor that the head multiplies by."""
    return EMBED if spec.tied else HEAD


def in_scope(spec: ModelSpec, scope: str) -> frozenset[str]:
    """Return the matrices that a scope of prepacking stands for; an embedding may be the head."""
    needs = inventory(spec)
    needs[head_name(spec)] = Need("head", needs[head_name(spec)].shape)
    return frozenset(name for name, need in needs.items() if need.kind in SCOPES[scope])


def layer_name(layer: int, name: str) -> str:
    """Return the full name of a tensor of a layer."""
    return f"model.layers.{layer}.{name}"


def inventory(spec: ModelSpec) -> dict[str, Need]:
    """Return every tensor that a model of this spec reads."""
    hidden = spec.hidden_size
    needs = {EMBED: Need("embedding", (spec.vocab_size, hidden)), NORM: Need("vector", (hidden,))}
    if not spec.tied:
        needs[HEAD] = Need("head", (spec.vocab_size, hidden))
    for layer in range(spec.num_layers):
        for name, need in _layer(spec).items():
            needs[layer_name(layer, name)] = need
    return needs


def _layer(spec: ModelSpec) -> dict[str, Need]:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    needs = {
        "input_layernorm.weight": Need("vector", (hidden,)),
        "post_attention_layernorm.weight": Need("vector", (hidden,)),
    }
    _linear(needs, spec, "self_attn.q_proj", (q, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.k_proj", (kv, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.v_proj", (kv, hidden), spec.qkv_bias)
    _linear(needs, spec, "self_attn.o_proj", (hidden, q), spec.o_bias)
    if spec.qk_norm:
        needs["self_attn.q_norm.weight"] = Need("vector", (dim,))
        needs["self_attn.k_norm.weight"] = Need("vector", (dim,))
    if spec.sinks:
        needs["self_attn.sinks"] = Need("vector", (spec.num_heads,))
    if spec.sub_norms:
        needs["self_attn.attn_sub_norm.weight"] = Need("vector", (q,))
        needs["mlp.ffn_sub_norm.weight"] = Need("vector", (inner,))
    if spec.moe is None:
        _linear(needs, spec, "mlp.gate_proj", (inner, hidden), spec.mlp_bias)
        _linear(needs, spec, "mlp.up_proj", (inner, hidden), spec.mlp_bias)
        _linear(needs, spec, "mlp.down_proj", (hidden, inner), spec.mlp_bias)
        return needs
    experts = spec.moe.experts
    return needs | {
        "mlp.router.weight": Need("router", (experts, hidden)),
        "mlp.router.bias": Need("vector", (experts,)),
        "mlp.experts.gate_up_proj": Need("linear", (experts, 2 * inner, hidden)),
        "mlp.experts.gate_up_proj_bias": Need("vector", (experts, 2 * inner)),
        "mlp.experts.down_proj": Need("linear", (experts, hidden, inner)),
        "mlp.experts.down_proj_bias": Need("vector", (experts, hidden)),
    }


def _linear(
    needs: dict[str, Need], spec: ModelSpec, name: str, shape: tuple[int, int], bias: bool
) -> None:
    needs[f"{name}.weight"] = Need("linear", shape)
    if bias:
        needs[f"{name}.bias"] = Need("vector", shape[:1])
    if spec.input_norm_eps:
        needs[f"{name}.rms_norm.weight"] = Need("vector", shape[1:])
