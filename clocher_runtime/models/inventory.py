"""A model's tensors: Hugging Face name, kind and logical shape."""

from clocher_runtime.models.builder import Builder, Sizes
from clocher_runtime.models.spec import EMBED, HEAD, NORM, ModelSpec, Need, head_name, layer_name

__all__ = ["EMBED", "HEAD", "NORM", "Need", "head_name", "in_scope", "inventory", "layer_name"]

SCOPES = {
    "none": (),
    "woh": ("head",),
    "wxh": ("linear", "router"),
    "all": ("head", "linear", "router"),
}


def inventory(spec: ModelSpec) -> dict[str, Need]:
    """Return every tensor that a model of this spec reads, in whatever formats."""
    builder = Builder(spec, {}, Sizes(tokens=1, rows=1, slots=1, context=1))
    builder.build()
    return builder.needs


def in_scope(spec: ModelSpec, scope: str) -> frozenset[str]:
    """Return the matrices of a prepacking scope; an embedding may be the head."""
    needs = inventory(spec)
    needs[head_name(spec)] = Need("head", needs[head_name(spec)].shape)
    return frozenset(name for name, need in needs.items() if need.kind in SCOPES[scope])
