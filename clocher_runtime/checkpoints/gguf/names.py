"""Which tensors of a GGUF file a tensor of a model is, and which of its rows each one holds.

llama.cpp has its own names and, in two places, its own rows: query and key rows of a Llama are
paired for its RoPE, and the gate and up rows of gpt-oss experts are two tensors. Reading and
writing share this table.

Source: gguf-py's constants.py and tensor_mapping.py; convert_hf_to_gguf.py (LlamaModel.permute).
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.errors import UnsupportedModel
from clocher_runtime.models.inventory import EMBED, HEAD, NORM, Need
from clocher_runtime.models.spec import ModelSpec

Order = Literal["all", "paired", "even", "odd"]

ROPE_FACTORS = "rope_freqs.weight"
ACTIVATION = "clocher.hidden_act"
"""Metadata key for the activation, which llama.cpp fixes by the architecture."""

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
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GATE_UP = "mlp.experts.gate_up_proj"
_MODEL_NAMES = {EMBED: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
_PAIRED_FAMILIES = ("llama", "mistral")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the file.

    Attributes:
        name: as llama.cpp spells it.
        shape: logical shape, slowest dimension first.
        order: which rows of the model's tensor it holds, see `row_order`.
    """

    name: str
    shape: tuple[int, ...]
    order: Order


def pieces(spec: ModelSpec, source: str, need: Need) -> tuple[Piece, ...]:
    """Return the tensors of a file that hold one of a model's tensors.

    Args:
        spec: the model.
        source: name in `inventory(spec)`.
        need: its entry there.

    Raises:
        UnsupportedModel: llama.cpp has no such tensor.
    """
    match = _LAYER.fullmatch(source)
    if match is None:
        return (Piece(_MODEL_NAMES[source], need.shape, "all"),)
    layer, rest = match.groups()
    tail = "bias" if rest.endswith("bias") else "weight"
    if rest.startswith(_GATE_UP):
        shape = (need.shape[0], need.shape[1] // 2, *need.shape[2:])
        gate, up = (f"blk.{layer}.ffn_{part}_exps.{tail}" for part in ("gate", "up"))
        return (Piece(gate, shape, "even"), Piece(up, shape, "odd"))
    stem = re.sub(r"\.weight$|[._]bias$", "", rest)
    if stem not in _LAYER_NAMES:
        raise UnsupportedModel(f"{source}: llama.cpp's {spec.family} models have no such tensor")
    name = _LAYER_NAMES[stem]
    if spec.family == "gpt_oss" and name == "ffn_norm":
        name = "post_attention_norm"
    paired = spec.family in _PAIRED_FAMILIES and name in ("attn_q", "attn_k")
    return (Piece(f"blk.{layer}.{name}.{tail}", need.shape, "paired" if paired else "all"),)


def row_order(order: Order, count: int, heads: int) -> np.ndarray:
    """Return which of `count` rows of the model's tensor a tensor of the file has, in its order.

    Args:
        order: "all", every second one ("even", "odd"), or those of a head paired.
        count: rows of the model's tensor, those of a stack counted through.
        heads: of the tensor, for "paired".
    """
    rows = np.arange(count)
    if order == "paired":
        # llama.cpp rotates neighbours, Hugging Face the halves of a head.
        return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return {"all": rows, "even": rows[0::2], "odd": rows[1::2]}[order]


def heads_of(spec: ModelSpec, source: str) -> int:
    """Return the heads that the rows of a query or key projection belong to."""
    return spec.num_heads if ".q_proj." in source else spec.num_kv_heads
