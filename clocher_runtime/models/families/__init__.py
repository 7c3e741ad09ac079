"""Model families: how a config.json is read, and how their files name `inventory`'s tensors.

Each is a class and a row in a module of this folder, and a row of `FAMILIES`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import shown
from clocher_runtime.models.config import WHERE, Decoder, read_config
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

    Two origins are for alternating rows. Absent names are unchanged. `prefix` begins the names of
    a layer in the files.
    """

    name: str
    fields: type[Decoder]
    tensors: Mapping[str, tuple[From, ...]] = field(default_factory=dict)
    prefix: str = "model.layers.{}."

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
    prefix = family.prefix.format(layer) if match else ""
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

    `kind`: "all"; "q", "k", "v"; "first", "second" half; "halves", which alternate in the model;
    "paired" heads, whose rotated pairs are neighbours, also "q_paired", "k_paired"; "mla_..." of
    latent attention.
    """
    count = need.shape[-2] if need.kind != "vector" else need.shape[-1]
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if kind in ("first", "second"):
        half = count // 2 if ".experts." in source else count
        return slice(0, half) if kind == "first" else slice(half, 2 * half)
    if kind in "qkv":
        start = {"q": 0, "k": q, "v": q + kv}[kind]
        return slice(start, start + count)
    if kind == "halves":
        return np.arange(count).reshape(2, -1).T.reshape(-1)
    if kind in ("paired", "q_paired", "k_paired"):
        start = q if kind == "k_paired" else 0
        rows = np.arange(start, start + count).reshape(-1, spec.head_dim)
        return np.hstack([rows[:, 0::2], rows[:, 1::2]]).reshape(-1)
    return None if kind == "all" else _latent_rows(spec, kind)


def _latent_rows(spec: ModelSpec, kind: str) -> Rows:
    """Return rows of DeepSeek's projections, whose heads are plain values, then rotated pairs."""
    mla = spec.mla
    assert isinstance(mla, MlaSpec)
    turned = np.arange(mla.rotated)
    if mla.paired:
        turned = np.concatenate([turned[0::2], turned[1::2]])
    if kind == "mla_latent":
        return slice(0, mla.rank)
    if kind == "mla_rope":
        return np.asarray(mla.rank + turned)
    plain, size = np.arange(mla.plain), mla.plain + mla.value
    if kind == "mla_q":
        size, order = mla.plain + mla.rotated, np.concatenate([mla.plain + turned, plain])
    else:
        order = plain if kind == "mla_k" else np.arange(mla.plain, size)
    return np.asarray((np.arange(spec.num_heads)[:, None] * size + order).reshape(-1))


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


_MODULES = {
    "experts": "GptOss DeepseekV2 DeepseekV3",
    "gemma": "Gemma Gemma2 Gemma3",
    "llama": "BitNet Bitnet Llama SmolLM3 Llama4 Mistral Ministral3 Mixtral Phi3 Olmo2 Olmo3 "
    "Granite GraniteMoeHybrid",
    "qwen": "Qwen2 Qwen2Moe Qwen3 SDAR Fast_dLLM_Qwen Qwen3Moe",
}
FAMILIES: Mapping[str, str] = MappingProxyType(
    {f"{name}ForCausalLM": module for module, names in _MODULES.items() for name in names.split()}
    | {"LLaDA2MoeModelLM": "experts"}
)
"""Architecture -> the module of its family, which is imported when it is asked for."""

_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
        "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
        "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    }
)
"""Multimodal architecture -> its text model, described by `text_config`."""
_SHARED = (
    "quantization_config",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "generation_config",
)
"""Fields of the whole model's config that apply to the text, unless its own sets them."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model, maybe in `text_config`. Raises FormatError."""
    inner = config.get("text_config")
    if inner is None and _stated_name(config) in _WRAPPERS:
        raise FormatError(
            f"{WHERE}: text_config is missing, in which {_stated_name(config)} has the text"
        )
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise FormatError(f"{WHERE}: text_config is {shown(inner)}; expected an object")
    stated = _architecture(config)
    known = _by_model_type(str(inner.get("model_type")).removesuffix("_text"))
    name = known if known in FAMILIES else _WRAPPERS.get(stated, stated)
    outer = {key: config[key] for key in _SHARED if config.get(key) is not None}
    # transformers ties multimodal models by the outer setting.
    if "tie_word_embeddings" in config:
        outer["tie_word_embeddings"] = config["tie_word_embeddings"]
        inner = {key: value for key, value in inner.items() if key != "tie_word_embeddings"}
    return {**outer, **inner, "architectures": [name]}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a config.json into a ModelSpec. Raises UnsupportedModel, FormatError."""
    config = text_config(config)
    spec = family_of(config).read(config)
    if spec.num_heads % spec.num_kv_heads:
        raise FormatError(
            f"{WHERE}: {spec.num_heads} attention heads do not divide into "
            f"{spec.num_kv_heads} key/value heads"
        )
    if spec.head_dim % 2:
        raise FormatError(f"{WHERE}: head_dim is {spec.head_dim}; RoPE needs an even one")
    return spec


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that a config.json names. Raises UnsupportedModel, FormatError."""
    name = _architecture(config)
    module = FAMILIES.get(name)
    if module is None:
        listed = ", ".join(sorted(each.removesuffix("ForCausalLM") for each in FAMILIES))
        raise UnsupportedModel(
            f"{WHERE}: architecture {shown(name)} is not known{_nearest(name)}; Clocher reads the "
            f"decoders of text that docs/using.md lists: {listed}"
        )
    families: Mapping[str, Family] = resolve_name(f"{__name__}.{module}:FAMILIES")
    return families[name]


def _stated_name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the one stated; "LlamaForCausalLM" for "LlamaModel", saved without its head."""
    names = config.get("architectures")
    if names is None:
        names = [_by_model_type(str(config.get("model_type")))]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise FormatError(f"{WHERE}: architectures is {shown(names)}; expected a list of one name")
    name = names[0]
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    return whole if name.endswith("Model") and whole in FAMILIES else name


def _by_model_type(name: str) -> str:
    wanted = name.replace("_", "").removesuffix("text") + "forcausallm"
    return next((known for known in FAMILIES if known.lower() == wanted), name)


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, FAMILIES, 1, 0.5)
    return f"; the nearest that is is {found[0]}" if found else ""
