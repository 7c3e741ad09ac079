"""llama.cpp's tensor names and row orders, for reading and writing.

Query and key rows of Llama are paired for its RoPE, gate and up of experts are two tensors, and
some projections are rows of a larger one. Source: gguf-py's constants.py and tensor_mapping.py;
convert_hf_to_gguf.py (LlamaModel.permute, DeepseekV2Model.modify_tensors).
"""

import math
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Stored, lazy_tensor, stored_tensor
from clocher_runtime.checkpoints.gguf.blocks import FLOATS, Rows, repacked
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.models.families import rows_of
from clocher_runtime.models.inventory import EMBED, HEAD, NORM, Need
from clocher_runtime.models.spec import MlaSpec, ModelSpec

Order = Literal["all", "paired", "even", "odd", "halves", "mla_q", "mla_rope", "turned"]

ACTIVATION = "clocher.hidden_act"
"""Metadata key for the activation; llama.cpp fixes it by architecture."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.choice": "exp_probs_b",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_rope_proj": "attn_kv_a_mqa",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
_NEXT_NORM = "post_attention_norm"
"""The norm before the MLP in gpt-oss; elsewhere the one after attention."""
_GATE_UP = "mlp.experts.gate_up_proj"
_MODEL_NAMES = {EMBED: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
_PAIRED_FAMILIES = ("llama", "mistral", "mixtral", "smollm3", "llama4", "granite", "granite_hybrid")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows (None: all) of a file's tensor, which has `shape`, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    order: Order
    rows: slice | None = None


def pieces(
    spec: ModelSpec, source: str, need: Need, names: Container[str] = ()
) -> tuple[Piece, ...]:
    """Return the file's pieces of a model's tensor; `names` are the tensors that the file has."""
    match = _LAYER.fullmatch(source)
    if match is None:
        return (Piece(_MODEL_NAMES[source], need.shape, "all"),)
    block, rest = f"blk.{match[1]}", match[2]
    tail = "bias" if rest.endswith("bias") else "weight"
    if rest.startswith(_GATE_UP):
        if (joined := f"{block}.ffn_gate_up_exps.{tail}") in names:
            return (Piece(joined, need.shape, "halves"),)
        shape = (need.shape[0], need.shape[1] // 2, *need.shape[2:])
        gate, up = (f"{block}.ffn_{part}_exps.{tail}" for part in ("gate", "up"))
        return (Piece(gate, shape, "even"), Piece(up, shape, "odd"))
    stem = re.sub(r"\.weight$|[._]bias$", "", rest)
    if stem not in _LAYER_NAMES:
        raise UnsupportedModel(f"{source}: llama.cpp's {spec.family} models have no such tensor")
    name = _LAYER_NAMES[stem]
    if stem == "post_attention_layernorm" and (spec.family == "gpt_oss" or spec.post_norms):
        name = _NEXT_NORM
    if spec.mla is not None and ".self_attn." in source:
        return (_latent(spec, spec.mla, f"{block}.{name}.{tail}", stem, need),)
    paired = spec.family in _PAIRED_FAMILIES and name in ("attn_q", "attn_k")
    order: Order = "paired" if paired else "all"
    joined, start, total = _joined(spec, stem)
    if joined and f"{block}.{joined}.{tail}" in names and f"{block}.{name}.{tail}" not in names:
        return (_rows(f"{block}.{joined}.{tail}", need, order, start, total),)
    if stem == "mlp.up_proj" and f"{block}.ffn_gate.weight" not in names and names:
        return (_rows(f"{block}.{name}.{tail}", need, order, need.shape[0], 2 * need.shape[0]),)
    return (Piece(f"{block}.{name}.{tail}", need.shape, order),)


def _joined(spec: ModelSpec, stem: str) -> tuple[str, int, int]:
    """Return the tensor that may hold a fused projection, its first row there, and all rows."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inner = spec.intermediate_size
    return {
        "self_attn.q_proj": ("attn_qkv", 0, q + 2 * kv),
        "self_attn.k_proj": ("attn_qkv", q, q + 2 * kv),
        "self_attn.v_proj": ("attn_qkv", q + kv, q + 2 * kv),
        "mlp.gate_proj": ("ffn_up", 0, 2 * inner),
    }.get(stem, ("", 0, 0))


def _rows(name: str, need: Need, order: Order, start: int, total: int) -> Piece:
    count = need.shape[0]
    return Piece(name, (total, *need.shape[1:]), order, slice(start, start + count))


def _latent(spec: ModelSpec, mla: MlaSpec, name: str, stem: str, need: Need) -> Piece:
    whole = mla.rank + mla.rotated
    if stem in ("self_attn.q_proj", "self_attn.q_b_proj"):
        return Piece(name, need.shape, "mla_q")
    if stem == "self_attn.kv_a_proj":
        return _rows(name, need, "all", 0, whole)
    if stem == "self_attn.k_rope_proj":
        return _rows(name, need, "mla_rope", mla.rank, whole)
    if stem == "self_attn.k_b_proj":
        return Piece(name, (spec.num_heads, mla.rank, mla.plain), "turned")
    if stem == "self_attn.v_b_proj":
        return Piece(name, (spec.num_heads, mla.value, mla.rank), "all")
    return Piece(name, need.shape, "all")


def row_order(order: Order, count: int, spec: ModelSpec, source: str) -> np.ndarray:
    """Return which of `count` rows of the model's tensor a tensor of the file has, in its order.

    `order`: "all", every second ("even", "odd"), those of a head paired, the even then the odd ones
    of each expert ("halves"), or those of `family.rows_of`. Rows of a stack are counted through.
    """
    rows = np.arange(count)
    if order == "paired":
        # llama.cpp rotates neighbours, Hugging Face the halves of a head.
        heads = spec.num_heads if ".q_proj." in source else spec.num_kv_heads
        return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    if order == "halves":
        assert spec.moe is not None
        return rows.reshape(spec.moe.experts, -1, 2).swapaxes(1, 2).reshape(-1)
    if order in ("mla_q", "mla_rope"):
        found = rows_of(spec, order, source, Need("linear", (count, 0)))
        assert isinstance(found, np.ndarray)
        return np.argsort(found)
    return {"all": rows, "even": rows[0::2], "odd": rows[1::2]}[order]


def logical_tensor(
    file: GgufFile, spec: ModelSpec, parts: tuple[Piece, ...], source: str, need: Need, where: str
) -> Stored:
    """Return a tensor of the model from its pieces in the file."""
    infos = [file.tensors[part.name] for part in parts]
    for part, info in zip(parts, infos, strict=True):
        # A matrix of one row has one dimension in a file.
        if info.shape != part.shape and (1, *info.shape) != part.shape:
            raise FormatError(
                f"{where}: {part.name} has shape {list(info.shape)}; the metadata asks for "
                f"{list(part.shape)}"
            )
    kind, shape = infos[0].kind, need.shape
    if any(info.kind != kind for info in infos):
        found = ", ".join(f"{p.name} {i.kind.name}" for p, i in zip(parts, infos, strict=True))
        raise UnsupportedModel(
            f"{where}: one tensor for Clocher, but of several types: {found}; llama-quantize "
            "--tensor-type makes them of one"
        )
    floats, vector = kind.name in FLOATS, need.kind == "vector"
    if vector and not floats:
        raise UnsupportedModel(f"{where}: a vector of {kind.name}; expected {', '.join(FLOATS)}")
    if parts[0].order == "turned":
        return _turned(file, parts[0], need, where)
    columns = 1 if vector else shape[-1]
    nbytes = kind.row_bytes(columns)
    data = [file.data(part.name) for part in parts]
    if kind.tail and any(part.rows for part in parts):
        raise UnsupportedModel(f"{where}: rows of {kind.name} have no scale of their own")
    data = [
        stored[part.rows.start * nbytes : part.rows.stop * nbytes] if part.rows else stored
        for part, stored in zip(parts, data, strict=True)
    ]
    if parts[0].order == "all" and kind.is_same:
        planes = {
            key: data[0].view(plane.storage).reshape(plane.shape)
            for key, plane in kind.format.planes(shape).items()
        }
        return stored_tensor(shape, kind.format, planes, where)

    count = math.prod(shape) // columns
    rows = []
    for part, stored in zip(parts, data, strict=True):
        end = len(stored) - kind.tail
        places = row_order(part.order, count, spec, source)
        rows.append(Rows(stored[:end].reshape(-1, nbytes), places, stored[end:]))
    fmt, make = repacked(rows, kind, shape)
    file.release()
    return lazy_tensor(shape, fmt, make, where)


def _turned(file: GgufFile, part: Piece, need: Need, where: str) -> Stored:
    """Return a stack of matrices, each transposed, as rows."""
    kind, width = file.tensors[part.name].kind, part.shape[-1]
    flat = (math.prod(part.shape[:-1]), width)

    def make() -> dict[str, np.ndarray]:
        blocks = file.data(part.name).reshape(flat[0], -1)
        fmt, planes = repacked([Rows(blocks, np.arange(flat[0]), blocks[:0, 0])], kind, flat)
        values = QuantTensor(flat, fmt, planes()).decode().reshape(part.shape)
        return {"data": np.ascontiguousarray(values.swapaxes(1, 2)).reshape(need.shape)}

    return lazy_tensor(need.shape, Float("f32"), make, where)
