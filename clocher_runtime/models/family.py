"""A model family: how its config.json is read, and how its files name `inventory`'s tensors."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clocher_runtime.models.config import Decoder, read_config
from clocher_runtime.models.inventory import Need
from clocher_runtime.models.spec import MlaSpec, ModelSpec

Rows = slice | np.ndarray | None
"""Rows of a tensor, in the order wanted; None: all as they are."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ENDINGS = (".weight", ".bias")


@dataclass(frozen=True, slots=True)
class From:
    """Where a family's files have a tensor: its name without suffix, "{e}" for the expert.

    `rows`: "all", or a key of `rows_of`.
    """

    name: str
    rows: str = "all"


@dataclass(frozen=True, slots=True)
class Family:
    """A family; `tensors`: name within a layer (in full outside), without suffix -> origins.

    Two origins are for alternating rows. Absent names are unchanged.
    """

    name: str
    fields: type[Decoder]
    tensors: Mapping[str, tuple[From, ...]] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raises FormatError, UnsupportedModel."""
        return read_config(config, self.fields).spec(self.name)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a file's tensor, and where they go: `places` (None: all) of matrix `expert`."""

    name: str
    rows: Rows = None
    expert: int | None = None
    places: slice | None = None


def names_of(family: Family, source: str, need: Need) -> Iterator[tuple[str, bool]]:
    """Yield a model tensor's names in the files of a family."""
    for name, rows, _, _ in _named(family, source, need):
        yield name, rows != "all"


def pieces(family: Family, spec: ModelSpec, source: str, need: Need) -> Iterator[Piece]:
    """Yield the pieces of a model tensor in the files of a family."""
    for name, rows, expert, places in _named(family, source, need):
        yield Piece(name, rows_of(spec, rows, source, need), expert, places)


def _named(
    family: Family, source: str, need: Need
) -> Iterator[tuple[str, str, int | None, slice | None]]:
    match = _LAYER.fullmatch(source)
    layer, rest = match.groups() if match else ("", source)
    prefix = f"model.layers.{layer}." if match else ""
    tail = next((end for end in _ENDINGS if rest.endswith(end)), "")
    origins = family.tensors.get(rest.removesuffix(tail))
    if origins is None:
        yield source, "all", None, None
        return
    for place, origin in enumerate(origins):
        name = prefix + origin.name
        places = None if len(origins) == 1 else slice(place, None, len(origins))
        if "{e}" in name:
            for expert in range(need.shape[0]):
                each = name.format(e=expert) + (tail or ".weight")
                yield each, origin.rows, expert, places
        else:
            yield name + tail, origin.rows, None, places


def rows_of(spec: ModelSpec, kind: str, source: str, need: Need) -> Rows:
    """Return rows of a tensor that a family's files have fused or in another order.

    `kind`: "all"; "q", "k", "v"; "first", "second" half; "paired" heads, whose rotated pairs are
    neighbours; "mla_..." of latent attention.
    """
    count = need.shape[-2] if need.kind != "vector" else need.shape[-1]
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if kind in ("first", "second"):
        half = count // 2 if ".experts." in source else count
        return slice(0, half) if kind == "first" else slice(half, 2 * half)
    if kind in "qkv":
        start = {"q": 0, "k": q, "v": q + kv}[kind]
        return slice(start, start + count)
    if kind == "paired":
        rows = np.arange(count).reshape(-1, spec.head_dim)
        halves: np.ndarray = np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)
        return np.asarray(halves.reshape(-1))
    return None if kind == "all" else _latent_rows(spec, kind)


def _latent_rows(spec: ModelSpec, kind: str) -> Rows:
    """Return rows of DeepSeek's projections, whose heads are plain values, then rotated pairs."""
    mla = spec.mla
    assert isinstance(mla, MlaSpec)
    turned = np.arange(mla.rotated)
    if mla.paired:
        turned = np.concatenate([turned[0::2], turned[1::2]])
    heads = np.arange(spec.num_heads)[:, None]
    size = mla.plain + mla.value
    if kind == "mla_latent":
        return slice(0, mla.rank)
    if kind == "mla_rope":
        return np.asarray(mla.rank + turned)
    if kind == "mla_q":
        order = np.concatenate([mla.plain + turned, np.arange(mla.plain)])
        rows = heads * (mla.plain + mla.rotated) + order
    else:
        rows = heads * size + (
            np.arange(mla.plain) if kind == "mla_k" else np.arange(mla.plain, size)
        )
    return np.asarray(rows.reshape(-1))


def each_expert(
    prefix: str = "mlp.experts.{e}.",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> dict[str, tuple[From, ...]]:
    """Return the origins of experts stored as three tensors each."""
    return {
        "mlp.experts.gate_up_proj": (From(prefix + gate), From(prefix + up)),
        "mlp.experts.down_proj": (From(prefix + down),),
    }


FUSED_QKV = {f"self_attn.{n}_proj": (From("self_attn.qkv_proj", n),) for n in "qkv"}
"""A fused projection for queries, keys and values."""
SHARED_EXPERTS = {
    f"mlp.shared_expert.{n}_proj": (From(f"mlp.shared_experts.{n}_proj"),)
    for n in ("gate", "up", "down")
}


def fused_mlp(name: str) -> dict[str, tuple[From, ...]]:
    """Return the origins of gate and up projections that are halves of one tensor."""
    return {"mlp.gate_proj": (From(name, "first"),), "mlp.up_proj": (From(name, "second"),)}
