"""Rows of a tensor as ggml stores them: the same numbers, in other bytes.

Nothing is rounded except by the types that are asked for as floats. ggml's 4-bit blocks hold the
elements 0..15 in the low nibbles and 16..31 in the high ones; Clocher's hold neighbours in a byte.

Source: ggml-common.h (block_q4_0, block_q8_0, block_mxfp4, block_tq2_0).
"""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import from_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Float, Format, Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.quant_tensor import QuantTensor

_QUARTERS = np.arange(4, dtype=np.uint8)[:, None] * 2


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A ggml element type.

    `name`: lower case, as llama.cpp spells it; `code`: its number in GGUF files; `block`: elements
    of a block; `nbytes`: bytes of a block; `file_type`: number of a file that is mostly of this
    type (`general.file_type`); `tail`: bytes that follow the rows of a tensor.
    """

    name: str
    code: int
    block: int
    nbytes: int
    file_type: int
    tail: int = 0

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row; raises FormatError."""
        if columns % self.block:
            raise FormatError(
                f"{self.name}: rows of {columns} elements; expected a multiple of {self.block}"
            )
        return columns // self.block * self.nbytes


F32 = GgmlType("f32", 0, 1, 4, 0)
F16 = GgmlType("f16", 1, 1, 2, 1)
BF16 = GgmlType("bf16", 30, 1, 2, 32)
Q4_0 = GgmlType("q4_0", 2, 32, 18, 2)
Q8_0 = GgmlType("q8_0", 8, 32, 34, 7)
TQ2_0 = GgmlType("tq2_0", 35, 256, 66, 37)
MXFP4 = GgmlType("mxfp4", 39, 32, 17, 38)
I2_S = GgmlType("i2_s", 36, 128, 32, 40, tail=32)
"""Of bitnet.cpp: 2-bit codes; the tail begins with the scale of the matrix, fp32."""

# Type -> its number, and that of a file that is mostly of it.
_CODES = {
    "q4_1": (3, 3),
    "q5_0": (6, 8),
    "q5_1": (7, 9),
    "q2_k": (10, 10),
    "q3_k": (11, 12),
    "q4_k": (12, 15),
    "q5_k": (13, 17),
    "q6_k": (14, 18),
    "iq3_xxs": (18, 23),
    "iq4_nl": (20, 25),
    "iq3_s": (21, 26),
    "iq4_xs": (23, 30),
    "tq1_0": (34, 36),
}

FLOATS = {kind.name: kind for kind in (F32, F16, BF16)}
BLOCKS = {
    name: GgmlType(name, code, Ggml(name).block, Ggml(name).block_bytes, file_type)
    for name, (code, file_type) in _CODES.items()
}
"""The types of `Ggml`, by name."""
TYPES = {
    kind.code: kind for kind in (F32, F16, BF16, Q4_0, Q8_0, TQ2_0, MXFP4, *BLOCKS.values(), I2_S)
}
"""The types that are read, by their number; all but i2_s are written too."""


def same_type(fmt: Format) -> GgmlType:
    """Return the ggml type that holds a format's values exactly; raises FormatError."""
    if isinstance(fmt, Float):
        return FLOATS[fmt.dtype]
    if isinstance(fmt, Ggml):
        return BLOCKS[fmt.kind]
    if isinstance(fmt, Mxfp4):
        return MXFP4
    if isinstance(fmt, Ternary):
        return TQ2_0
    if isinstance(fmt, Int4 | Int8) and fmt.scale_dtype == "f16":
        whole = isinstance(fmt.group, int) and fmt.group % 32 == 0
        if whole and isinstance(fmt, Int8):
            return Q8_0
        if whole and isinstance(fmt, Int4) and fmt.symmetric:
            return Q4_0
    raise FormatError(
        f"{fmt.name}: no type of ggml holds these values exactly; it has f32, f16, bf16, "
        "symmetric int4 and int8 with f16 scales and groups of a multiple of 32, ternary, mxfp4 "
        f"and its own blocks; ask for one of {', '.join(FLOATS)}"
    )


def row_blocks(tensor: QuantTensor, rows: np.ndarray, kind: GgmlType) -> np.ndarray:
    """Return rows of a matrix, or of a stack of them, as ggml stores them.

    `tensor`: [N, K] or [E, N, K]; `rows`: numbers of the rows, those of a stack counted through;
    `kind`: `same_type` of its format, or a float type. Returns u8 [rows, bytes of a row]. Raises
    FormatError.
    """
    columns = tensor.shape[-1]
    nbytes = kind.row_bytes(columns)
    if isinstance(tensor.format, Ternary):
        blocks = _ternary(tensor, tensor.format, rows, kind)
    else:
        picked = {
            key: plane.reshape(-1, *plane.shape[len(tensor.shape) - 1 :])[rows]
            for key, plane in tensor.planes.items()
        }
        blocks = _blocks(QuantTensor((len(rows), columns), tensor.format, picked), kind)
    return np.ascontiguousarray(blocks).reshape(len(rows), -1).view(np.uint8).reshape(-1, nbytes)


def _blocks(part: QuantTensor, kind: GgmlType) -> np.ndarray:
    if kind.name in BLOCKS:
        return part.planes["blocks"]
    if kind in (Q4_0, Q8_0):
        rows, columns = part.shape
        scales = part.planes["scales"]
        group = part.format.group  # type: ignore[attr-defined]
        scales = np.repeat(scales, group // 32, axis=1)[:, : columns // 32]
        codes = part.planes["codes"].reshape(rows, columns // 32, -1)
        codes = _halves(codes) if kind == Q4_0 else codes.view(np.uint8)
        return np.concatenate([scales[..., None].view(np.uint8), codes], axis=-1)
    if kind == MXFP4:
        scales = part.planes["scales"][..., None]
        return np.concatenate([scales, _halves(part.planes["blocks"])], axis=-1)
    return _float(part.decode(), part.format.name, kind)


def _float(values: np.ndarray, source: str, kind: GgmlType) -> np.ndarray:
    stored = from_f32(values, kind.name)
    if kind == F16 and np.isinf(stored).any():
        raise FormatError(f"{source}: a value beyond f16; ask for bf16 or f32")
    return stored


def _halves(codes: np.ndarray) -> np.ndarray:
    """Turn pairs of neighbours into pairs of i and i + 16, u8 [..., 16]."""
    out = np.empty_like(codes)
    for start, nibbles in ((0, codes & 15), (1, codes >> 4)):
        out[..., start::2] = nibbles[..., :8] | nibbles[..., 8:] << 4
    return out


def _ternary(tensor: QuantTensor, fmt: Ternary, rows: np.ndarray, kind: GgmlType) -> np.ndarray:
    codes = tensor.planes["codes"]
    step = len(codes)
    digits = codes[rows % step] >> (2 * (rows // step)).astype(np.uint8)[:, None] & 3
    multiplier = fmt.multiplier(tensor.planes)
    if kind != TQ2_0:
        return _float((digits.astype(np.float32) - 1) * multiplier, fmt.name, kind)
    scale = fmt.f16_multiplier(tensor.planes)
    quarters = digits.reshape(len(rows), -1, 2, 4, 32) << _QUARTERS
    packed = np.bitwise_or.reduce(quarters, axis=3).reshape(len(rows), -1, 64)
    scales = np.broadcast_to(np.array([scale]).view(np.uint8), (*packed.shape[:2], 2))
    return np.concatenate([packed, scales], axis=-1)
