"""llama.cpp's tensor names and row orders, for reading and writing.

Query and key rows of Llama are paired for its RoPE, gate and up of experts are two tensors, and
some projections are rows of a larger one. Source: gguf-py's constants.py and tensor_mapping.py;
convert_hf_to_gguf.py (LlamaModel.permute, DeepseekV2Model.modify_tensors).
"""

import math
import re
from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.arranged import assembled
from clocher_runtime.checkpoints.checkpoint import Stored, lazy_tensor, planes_of
from clocher_runtime.checkpoints.gguf.blocks import FLOATS, stored_blocks
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.models.families import Piece, Rows, rows_of
from clocher_runtime.models.inventory import EMBED, HEAD, NORM, Need
from clocher_runtime.models.spec import ModelSpec

HALVES, TURNED = "halves", "turned"
"""The rows of gate and up projections one after the other; a stack of transposed matrices."""
ASKED = "the metadata asks for"

ACTIVATION = "clocher.hidden_act"
"""Metadata key for the activation; llama.cpp fixes it by architecture."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.sinks": "attn_sinks",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.router": "ffn_gate_inp",
    "mlp.router.choice": "exp_probs_b",
    "mlp.experts.down_proj": "ffn_down_exps",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
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
_FUSED = {
    **{f"self_attn.{part}_proj": ("attn_qkv", part) for part in "qkv"},
    "mlp.gate_proj": ("ffn_up", "first"),
}
"""What may be rows of another tensor, and the key of `rows_of` for them."""
_LATENT = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj"), "mla_q"),
    **{"self_attn.kv_a_proj": "mla_latent", "self_attn.k_rope_proj": "mla_rope"},
    "self_attn.k_b_proj": TURNED,
}


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Where a file has rows of a model's tensor; a key of `rows_of`, `HALVES` or `TURNED` says how.

    `fused` is the key of the rows of a larger tensor that are meant; `places`: every second row of
    the model's tensor.
    """

    name: str
    order: str = "all"
    fused: str = "all"
    places: slice | None = None

    def rows(self, spec: ModelSpec, source: str, need: Need) -> Rows:
        """Return the rows of the file's tensor in the model's order."""
        if self.order == HALVES:
            return np.arange(need.shape[1]).reshape(2, -1).T.reshape(-1)
        rows, part = (rows_of(spec, key, source, need) for key in (self.order, self.fused))
        if rows is None:
            return part
        return rows + part.start if isinstance(part, slice) else rows


def pieces(
    spec: ModelSpec, source: str, need: Need, names: Container[str] = ()
) -> tuple[FilePiece, ...]:
    """Return the file's pieces of a model's tensor; `names` are the tensors that the file has."""
    match = _LAYER.fullmatch(source)
    if match is None:
        return (FilePiece(_MODEL_NAMES[source]),)
    block, rest = f"blk.{match[1]}", match[2]
    tail = "bias" if rest.endswith("bias") else "weight"
    if rest.startswith(_GATE_UP):
        if (joined := f"{block}.ffn_gate_up_exps.{tail}") in names:
            return (FilePiece(joined, HALVES),)
        return tuple(
            FilePiece(f"{block}.ffn_{part}_exps.{tail}", places=slice(first, None, 2))
            for first, part in enumerate(("gate", "up"))
        )
    stem = re.sub(r"\.weight$|[._]bias$", "", rest)
    if stem not in _LAYER_NAMES:
        raise UnsupportedModel(f"{source}: llama.cpp's {spec.family} models have no such tensor")
    name = _LAYER_NAMES[stem]
    if stem == "post_attention_layernorm" and (spec.family == "gpt_oss" or spec.post_norms):
        name = _NEXT_NORM
    paired = spec.family in _PAIRED_FAMILIES and name in ("attn_q", "attn_k")
    order, own = "paired" if paired else "all", f"{block}.{name}.{tail}"
    if spec.mla is not None and ".self_attn." in source:
        return (FilePiece(own, _LATENT.get(stem, "all")),)
    if stem in _FUSED and own not in names:
        joined, fused = f"{block}.{_FUSED[stem][0]}.{tail}", _FUSED[stem][1]
        if joined in names:
            return (FilePiece(joined, order, fused),)
    if stem == "mlp.up_proj" and f"{block}.ffn_gate.weight" not in names and names:
        return (FilePiece(own, order, "second"),)
    return (FilePiece(own, order),)


def logical_tensor(
    file: GgufFile,
    spec: ModelSpec,
    parts: tuple[FilePiece, ...],
    source: str,
    need: Need,
    where: str,
) -> Stored:
    """Return a tensor of the model from its pieces in the file."""
    # Before the order of the rows, which is as long as the metadata say.
    fits = need.elements <= sum(math.prod(file.tensors[part.name].shape) for part in parts)
    if fits and parts[0].order == TURNED:
        return _turned(file, spec, parts[0].name, need, where)
    if fits:
        named = {part.name: _stored(file, part.name, need, where) for part in parts}
        mine = [Piece(p.name, p.rows(spec, source, need), places=p.places) for p in parts]
        found = assembled(named, mine, need, where, ASKED)
        if found.shape == need.shape:
            return found
    raise _misfit(file, parts[0].name, need.shape, where)


def _stored(file: GgufFile, name: str, need: Need, where: str) -> Stored:
    """Return a tensor as the file has it, in as many dimensions as the model's."""
    info, rank = file.tensors[name], len(need.shape)
    if need.kind == "vector" and info.kind.name not in FLOATS:
        raise UnsupportedModel(
            f"{where}: a vector of {info.kind.name}; expected {', '.join(FLOATS)}"
        )
    # A matrix of one row has one dimension in a file, and a stack may be one matrix here.
    shape = (1,) * (rank - len(info.shape)) + info.shape
    shape = (math.prod(shape[: len(shape) - rank + 1]), *shape[len(shape) - rank + 1 :])
    found = stored_blocks(file.data(name), info.kind, shape, where)
    file.release()  # some types are told by their scales
    return found


def _misfit(file: GgufFile, name: str, shape: tuple[int, ...], where: str) -> FormatError:
    got = list(file.tensors[name].shape)
    return FormatError(f"{where}: {name} has shape {got}; {ASKED} {list(shape)}")


def _turned(file: GgufFile, spec: ModelSpec, name: str, need: Need, where: str) -> Stored:
    """Return a stack of matrices, each transposed, as rows."""
    shape, mla = file.tensors[name].shape, spec.mla
    assert mla is not None
    if shape != (expected := (spec.num_heads, mla.rank, mla.plain)):
        raise _misfit(file, name, expected, where)
    stored = _stored(file, name, Need("linear", (math.prod(shape[:-1]), shape[-1])), where)

    def make() -> dict[str, np.ndarray]:
        values = QuantTensor(stored.shape, stored.format, planes_of(stored)).decode()
        turned = values.reshape(shape).swapaxes(1, 2)
        return {"data": np.ascontiguousarray(turned).reshape(need.shape)}

    return lazy_tensor(need.shape, Float("f32"), make, where)
