"""From ggml blocks to the planes of Clocher's formats, without changing a number.

| ggml | format |
|---|---|
| f32, f16, bf16 | the same |
| q8_0 | int8_g32_f16 |
| q4_0 | int4_sym_g32_f16 |
| mxfp4 | mxfp4 |
| tq2_0 | ternary_f16 if all scales of the matrix agree, else int4_sym_g256_f16 |

Floats are used in place where their rows are in order; everything else is repacked when it is asked
for, a few rows at a time, so that only the result is in memory.

llama.cpp has its own names and, in two places, its own rows: query and key rows of a Llama are
paired for its RoPE, and the gate and up rows of gpt-oss experts are two tensors. Reading and
writing share this table.

Source: ggml-common.h (block_q4_0, block_q8_0, block_mxfp4, block_tq2_0); gguf-py's constants.py and
tensor_mapping.py; convert_hf_to_gguf.py (LlamaModel.permute).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float, Format, Int4, Int8, Mxfp4, Ternary
from clocher_runtime.checkpoints.checkpoint import Stored, lazy_tensor, stored_tensor
from clocher_runtime.checkpoints.gguf.blocks import FLOATS, MXFP4, Q4_0, Q8_0, TQ2_0, GgmlType
from clocher_runtime.checkpoints.gguf.file import GgufFile
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


_PIECE_BYTES = 1 << 19
_FORMATS: Mapping[GgmlType, Format] = {
    **{kind: Float(name) for name, kind in FLOATS.items()},
    Q8_0: Int8(32, "f16"),
    Q4_0: Int4(True, 32, "f16"),
    MXFP4: Mxfp4(),
}
_TERNARY, _SCALED_TERNARY = Ternary(scale_dtype="f16"), Int4(True, 256, "f16")
_FOUR, _HALF = np.uint64(4), np.uint64(32)
_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_PACKING = (
    (_FOUR, np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(8), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(16), np.uint64(0x00000000FFFFFFFF)),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows as a file stores them, and which rows of the model's tensor they are.

    Attributes:
        blocks: u8 [rows, bytes of a row].
        places: row of the model's tensor of each.
    """

    blocks: np.ndarray
    places: np.ndarray


def logical_tensor(
    file: GgufFile, parts: tuple[Piece, ...], need: Need, heads: int, where: str
) -> Stored:
    """Return a tensor of the model.

    Args:
        file: the file.
        parts: the tensors of the file that hold it; all of them are there.
        need: its kind and logical shape.
        heads: that its rows belong to, see `row_order`.
        where: what it is, for messages.

    Raises:
        FormatError: a tensor of the file has another shape.
        UnsupportedModel: a vector is not of floats, or the parts are of different types.
    """
    infos = [file.tensors[part.name] for part in parts]
    for part, info in zip(parts, infos, strict=True):
        if info.shape != part.shape:
            raise FormatError(
                f"{where}: {part.name} has shape {list(info.shape)}; the metadata asks for "
                f"{list(part.shape)}"
            )
    kind, shape = infos[0].kind, need.shape
    if any(info.kind != kind for info in infos):
        found = ", ".join(f"{p.name} {i.kind.name}" for p, i in zip(parts, infos, strict=True))
        raise UnsupportedModel(f"{where}: one tensor for Clocher, but of several types: {found}")
    floats, vector = kind.name in FLOATS, need.kind == "vector"
    if vector and not floats:
        raise UnsupportedModel(f"{where}: a vector of {kind.name}; expected {', '.join(FLOATS)}")
    if floats and parts[0].order == "all":
        fmt = _FORMATS[kind]
        data = file.data(parts[0].name).view(fmt.planes(shape)["data"].storage).reshape(shape)
        return stored_tensor(shape, fmt, {"data": data}, where)

    columns = 1 if vector else shape[-1]
    count = math.prod(shape) // columns
    rows = [
        _Rows(
            file.data(part.name).reshape(-1, kind.row_bytes(columns)),
            row_order(part.order, count, heads),
        )
        for part in parts
    ]
    if kind != TQ2_0:
        fmt = _FORMATS[kind]
        return lazy_tensor(shape, fmt, lambda: _repack(rows, kind, fmt, shape), where)
    uniform = len(shape) == 2 and count % 4 == 0 and _scales_agree(rows[0].blocks)
    file.file.release()
    if uniform:
        return lazy_tensor(shape, _TERNARY, lambda: _repack_ternary(rows[0], columns), where)
    return lazy_tensor(
        shape, _SCALED_TERNARY, lambda: _repack(rows, kind, _SCALED_TERNARY, shape), where
    )


def _repack(
    parts: list[_Rows], kind: GgmlType, fmt: Format, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the planes of a tensor in a format that stores row after row."""
    planes = {key: np.empty(p.shape, p.storage) for key, p in fmt.planes(shape).items()}
    count = sum(len(part.blocks) for part in parts)
    rows_of = {key: plane.reshape(count, -1) for key, plane in planes.items()}
    for part in parts:
        for piece in _pieces(part.blocks):
            for key, values in _UNPACK[kind](part.blocks[piece]).items():
                rows_of[key][part.places[piece]] = values.reshape(len(values), -1)
    return planes


def _pieces(rows: np.ndarray) -> Iterator[slice]:
    step = max(1, _PIECE_BYTES // rows.shape[1])
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _float(dtype: str) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    return lambda rows: {"data": rows.view(STORAGE[dtype])}


def _q8_0(rows: np.ndarray) -> dict[str, np.ndarray]:
    blocks = rows.reshape(len(rows), -1, Q8_0.nbytes)
    return {"codes": blocks[..., 2:].view(np.int8), "scales": _f16(blocks[..., :2])}


def _q4_0(rows: np.ndarray) -> dict[str, np.ndarray]:
    blocks = rows.reshape(len(rows), -1, Q4_0.nbytes)
    return {"codes": _neighbours(blocks[..., 2:]), "scales": _f16(blocks[..., :2])}


def _mxfp4(rows: np.ndarray) -> dict[str, np.ndarray]:
    blocks = rows.reshape(len(rows), -1, MXFP4.nbytes)
    return {"blocks": _neighbours(blocks[..., 1:]), "scales": blocks[..., 0]}


def _tq2_0(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return 4-bit codes: a digit of ggml is stored plus one, a symmetric int4 plus eight."""
    codes = _digits(rows) + np.uint8(7)
    scales = _f16(rows.reshape(len(rows), -1, TQ2_0.nbytes)[..., 64:])
    return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": scales}


_UNPACK: Mapping[GgmlType, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    **{kind: _float(name) for name, kind in FLOATS.items()},
    Q8_0: _q8_0,
    Q4_0: _q4_0,
    MXFP4: _mxfp4,
    TQ2_0: _tq2_0,
}


def _f16(pairs: np.ndarray) -> np.ndarray:
    """Return bytes [..., 2] as f16 [...]."""
    return np.ascontiguousarray(pairs.view(np.float16)[..., 0])


def _neighbours(halves: np.ndarray) -> np.ndarray:
    """Turn nibbles of elements i and i + 16 into those of 2i and 2i + 1, u8 [..., 16]."""
    words = np.ascontiguousarray(halves.view("V16")).view(np.uint64)
    low, high = _packed_nibbles(words), _packed_nibbles(words >> _FOUR)
    out = np.empty_like(words)
    for half, nibbles in ((0, low), (1, high)):
        np.bitwise_or(nibbles[..., 0], nibbles[..., 1] << _HALF, out=out[..., half])
    return out.view(np.uint8)


def _packed_nibbles(words: np.ndarray) -> np.ndarray:
    """Return the low nibbles of the eight bytes of each word, packed into four bytes."""
    found = words & _LOW_NIBBLES
    for shift, mask in _PACKING:
        found |= found >> shift
        found &= mask
    return found


def _digits(rows: np.ndarray) -> np.ndarray:
    """Return digits plus one of TQ2_0 rows, u8 [rows, columns]."""
    packed = np.ascontiguousarray(rows.reshape(-1, TQ2_0.nbytes)[:, :64].view("V64")).view(np.uint8)
    out = np.empty((packed.size // 32, 4, 32), np.uint8)
    for quarter in range(4):
        digits = packed >> np.uint8(2 * quarter)
        digits &= 3
        out[:, quarter] = digits.reshape(-1, 32)
    return out.reshape(len(rows), -1)


def _scales_agree(rows: np.ndarray) -> bool:
    """Return whether all blocks but those of scale zero have the same scale."""
    scales = rows.reshape(-1, TQ2_0.nbytes)[:, 64:]
    found: set[int] = set()
    for start in range(0, len(scales), _PIECE_BYTES):
        bits = np.ascontiguousarray(scales[start : start + _PIECE_BYTES]).view(np.uint16)
        found |= set(np.unique(bits[bits & 0x7FFF != 0]).tolist())
        if len(found) > 1:
            return False
    return True


def _repack_ternary(part: _Rows, columns: int) -> dict[str, np.ndarray]:
    """Return the planes of a ternary matrix; a block of scale zero becomes digits of zero."""
    count = len(part.blocks)
    step, source = count // 4, np.argsort(part.places)
    codes = np.zeros((step, columns), np.uint8)
    scale = np.zeros(1, np.float16)
    for piece in _pieces(part.blocks[:step]):
        for quarter in range(4):
            rows = part.blocks[source[quarter * step : (quarter + 1) * step][piece]]
            scales = _f16(rows.reshape(len(rows), -1, TQ2_0.nbytes)[..., 64:])
            digits = _digits(rows).reshape(*scales.shape, -1)
            zero = scales == 0
            if zero.any():
                digits[zero] = 1
            if not zero.all():
                scale[0] = scales[~zero][0]
            codes[piece] |= digits.reshape(len(rows), -1) << np.uint8(2 * quarter)
    return {"codes": codes, "scale": scale}
