"""ggml's element types: their blocks, the format that holds them, and both conversions.

| ggml | format |
|---|---|
| f32, f16, bf16, K-quants, q4_1, q5_0, q5_1, iq4 to iq1_s | the same; a view if rows are in order |
| q8_0, q4_0, mxfp4 | int8_g32_f16, int4_sym_g32_f16, mxfp4 |
| tq2_0 | ternary_f16 if all scales of the matrix agree, else int4_sym_g256_f16 |
| tq1_0 | ternary_f16 if all scales of the matrix agree, else tq1_0 |
| i2_s | ternary_f32 |

Reading is exact. ggml's 4-bit blocks hold elements 0..15 in the low nibbles and 16..31 in the high
ones; Clocher's hold neighbours in a byte. Source: ggml-common.h.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from clocher_kernels.dtypes import from_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Float, Format, Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_kernels.formats.ternary import pack
from clocher_kernels.quant_tensor import BlockRows, QuantTensor
from clocher_runtime.checkpoints.checkpoint import lazy_tensor, stored_tensor

_PIECE_BYTES = 1 << 19
_QUARTERS = np.arange(4, dtype=np.uint8)[:, None] * 2


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A ggml element type.

    `code` is its number in GGUF files, `file_type` its `general.file_type`; `block` and `nbytes`
    are elements and bytes of a block; `tail` bytes follow the rows of a tensor.
    """

    name: str
    code: int
    file_type: int
    block: int
    nbytes: int
    format: Format
    tail: int = 0

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row; raises FormatError if it is not whole blocks."""
        if columns % self.block:
            raise FormatError(
                f"{self.name}: rows of {columns} elements; expected a multiple of {self.block}"
            )
        return columns // self.block * self.nbytes


F32 = GgmlType("f32", 0, 0, 1, 4, Float("f32"))
F16 = GgmlType("f16", 1, 1, 1, 2, Float("f16"))
BF16 = GgmlType("bf16", 30, 32, 1, 2, Float("bf16"))
Q4_0 = GgmlType("q4_0", 2, 2, 32, 18, Int4(True, 32, "f16"))
Q8_0 = GgmlType("q8_0", 8, 7, 32, 34, Int8(32, "f16"))
TQ2_0 = GgmlType("tq2_0", 35, 37, 256, 66, Int4(True, 256, "f16"))
MXFP4 = GgmlType("mxfp4", 39, 38, 32, 17, Mxfp4())
I2_S = GgmlType("i2_s", 36, 40, 128, 32, Ternary(scale_dtype="f32"), tail=32)
"""bitnet.cpp's 2-bit codes; the tail begins with the fp32 scale of the matrix."""
_IN_PLACE = (Q4_0, Q8_0, MXFP4)  # whose blocks the CPU back end packs as they are
_SAME = {  # name -> its number, and that of a file that is mostly of it
    **{"q4_1": (3, 3), "q5_0": (6, 8), "q5_1": (7, 9), "q2_k": (10, 10), "q3_k": (11, 12)},
    **{"q4_k": (12, 15), "q5_k": (13, 17), "q6_k": (14, 18), "iq3_xxs": (18, 23)},
    **{"iq4_nl": (20, 25), "iq3_s": (21, 26), "iq4_xs": (23, 30), "tq1_0": (34, 36)},
    **{"iq2_xxs": (16, 19), "iq2_xs": (17, 20), "iq1_s": (19, 24), "iq2_s": (22, 28)},
}
FLOATS = {kind.name: kind for kind in (F32, F16, BF16)}
BLOCKS = {
    name: GgmlType(name, *numbers, Ggml(name).block, Ggml(name).block_bytes, Ggml(name))
    for name, numbers in _SAME.items()
}
_TQ1_0 = BLOCKS["tq1_0"]
TYPES = {
    kind.code: kind for kind in (F32, F16, BF16, Q4_0, Q8_0, TQ2_0, MXFP4, *BLOCKS.values(), I2_S)
}
"""Types that can be read, by number; all but i2_s can be written too."""


def same_type(fmt: Format) -> GgmlType:
    """Return the ggml type that holds a format's values exactly; raises FormatError without one."""
    if isinstance(fmt, Float):
        return FLOATS[fmt.dtype]
    if isinstance(fmt, Ggml):
        return BLOCKS[fmt.kind]
    if isinstance(fmt, Mxfp4):
        return MXFP4
    if isinstance(fmt, Ternary):
        return TQ2_0
    if isinstance(fmt, Int4 | Int8) and fmt.scale_dtype == "f16" and isinstance(fmt.group, int):
        if isinstance(fmt, Int8) and fmt.group % 32 == 0:
            return Q8_0
        if isinstance(fmt, Int4) and fmt.symmetric and fmt.group % 32 == 0:
            return Q4_0
    raise FormatError(
        f"{fmt.name}: no type of ggml holds these values exactly; it has f32, f16, bf16, "
        "symmetric int4 and int8 with f16 scales and groups of a multiple of 32, ternary, mxfp4 "
        f"and its own blocks; ask for one of {', '.join(FLOATS)}"
    )


def row_blocks(tensor: QuantTensor, rows: np.ndarray, kind: GgmlType) -> np.ndarray:
    """Return rows of a matrix [N, K] or stack [E, N, K] in ggml's layout, u8 [rows, row bytes].

    `rows` counts those of a stack through. Raises FormatError if a scale does not fit ggml's type,
    or K is not whole blocks.
    """
    columns = tensor.shape[-1]
    nbytes = kind.row_bytes(columns)
    if isinstance(tensor.format, Ternary):
        blocks = _ternary_blocks(tensor, tensor.format, rows, kind)
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
        group = part.format.group  # type: ignore[attr-defined]
        scales = np.repeat(part.planes["scales"], group // 32, axis=1)[:, : columns // 32]
        codes = part.planes["codes"].reshape(rows, columns // 32, -1)
        codes = _halves(codes) if kind == Q4_0 else codes.view(np.uint8)
        return np.concatenate([scales[..., None].view(np.uint8), codes], axis=-1)
    if kind == MXFP4:
        scales = part.planes["scales"][..., None]
        return np.concatenate([scales, _halves(part.planes["blocks"])], axis=-1)
    return _float_blocks(part.decode(), part.format.name, kind)


def _float_blocks(values: np.ndarray, source: str, kind: GgmlType) -> np.ndarray:
    stored = from_f32(values, kind.name)
    if kind == F16 and np.isinf(stored).any():
        raise FormatError(f"{source}: a value beyond f16; ask for bf16 or f32")
    return stored


def _ternary_blocks(
    tensor: QuantTensor, fmt: Ternary, rows: np.ndarray, kind: GgmlType
) -> np.ndarray:
    codes = tensor.planes["codes"]
    step = len(codes)
    digits = codes[rows % step] >> (2 * (rows // step)).astype(np.uint8)[:, None] & 3
    multiplier = fmt.multiplier(tensor.planes)
    if kind != TQ2_0:
        return _float_blocks((digits.astype(np.float32) - 1) * multiplier, fmt.name, kind)
    scale = fmt.f16_multiplier(tensor.planes)
    quarters = digits.reshape(len(rows), -1, 2, 4, 32) << _QUARTERS
    packed = np.bitwise_or.reduce(quarters, axis=3).reshape(len(rows), -1, 64)
    scales = np.broadcast_to(np.array([scale]).view(np.uint8), (*packed.shape[:2], 2))
    return np.concatenate([packed, scales], axis=-1)


def stored_blocks(
    data: np.ndarray, kind: GgmlType, shape: tuple[int, ...], where: str
) -> QuantTensor:
    """Return a tensor of a file's bytes, u8: a view where the format has them as they are."""
    if isinstance(kind.format, Float | Ggml) and kind != _TQ1_0:
        planes = {
            key: data.view(plane.storage).reshape(plane.shape)
            for key, plane in kind.format.planes(shape).items()
        }
        return stored_tensor(shape, kind.format, planes, where)
    end = len(data) - kind.tail
    rows, tail = data[:end].reshape(-1, kind.row_bytes(shape[-1])), data[end:]
    matrix = kind in _DIGITS and len(shape) == 2 and len(rows) % 4 == 0
    if kind == I2_S or (matrix and _scales_agree(rows, kind)):
        fmt = Ternary(scale_dtype="f32" if kind.tail else "f16")
        return lazy_tensor(shape, fmt, lambda: _ternary_planes(rows, tail, kind), where)
    in_place = partial(BlockRows.of, data, shape[:-1]) if kind in _IN_PLACE else None
    return lazy_tensor(shape, kind.format, lambda: _planes(rows, kind, shape), where, in_place)


def _planes(rows: np.ndarray, kind: GgmlType, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    planes = {key: np.empty(p.shape, p.storage) for key, p in kind.format.planes(shape).items()}
    for piece in _pieces(rows):
        for key, values in _unpacked(kind, rows[piece]).items():
            planes[key].reshape(len(rows), -1)[piece] = values.reshape(len(values), -1)
    return planes


def _pieces(rows: np.ndarray) -> Iterator[slice]:
    step = max(1, _PIECE_BYTES // rows.shape[1])
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _unpacked(kind: GgmlType, rows: np.ndarray) -> dict[str, np.ndarray]:
    if kind == _TQ1_0:
        return {"blocks": rows}
    if kind == TQ2_0:  # a digit of ggml is stored plus one, a symmetric int4 plus eight
        codes = _tq2_0_digits(rows) + np.uint8(7)
        return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": _last_f16(rows, kind)}
    blocks = rows.reshape(len(rows), -1, kind.nbytes)
    if kind == MXFP4:
        return {"blocks": _neighbours(blocks[..., 1:]), "scales": blocks[..., 0]}
    codes = blocks[..., 2:]
    codes = _neighbours(codes) if kind == Q4_0 else codes.view(np.int8)
    return {"codes": codes, "scales": _f16(blocks[..., :2])}


def _f16(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs.view(np.float16)[..., 0])


def _last_f16(rows: np.ndarray, kind: GgmlType) -> np.ndarray:
    return _f16(rows.reshape(len(rows), -1, kind.nbytes)[..., -2:])


def _halves(codes: np.ndarray) -> np.ndarray:
    """Turn neighbour pairs into pairs i, i + 16, u8 [..., 16]."""
    out = np.empty_like(codes)
    for start, nibbles in ((0, codes & 15), (1, codes >> 4)):
        out[..., start::2] = nibbles[..., :8] | nibbles[..., 8:] << 4
    return out


def _neighbours(halves: np.ndarray) -> np.ndarray:
    """Turn nibbles of elements i and i + 16 into those of 2i and 2i + 1, u8 [..., 16]."""
    even, odd = halves[..., 0::2], halves[..., 1::2]
    return np.concatenate([even & 15 | odd << 4, even >> 4 | odd & 0xF0], axis=-1)


def _tq2_0_digits(rows: np.ndarray) -> np.ndarray:
    """The four codes of a byte are 32 columns apart, the first in the low bits."""
    packed = rows.reshape(-1, TQ2_0.nbytes)[:, :64].reshape(-1, 2, 1, 32)
    return np.asarray((packed >> _QUARTERS & np.uint8(3)).reshape(len(rows), -1))


def _tq1_0_digits(rows: np.ndarray) -> np.ndarray:
    blocks = rows.reshape(-1, _TQ1_0.nbytes).view(KINDS["tq1_0"].fields)[:, 0]
    digits = KINDS["tq1_0"].unpack(blocks).codes + np.int8(1)
    return digits.view(np.uint8).reshape(len(rows), -1)


def _i2_s_digits(rows: np.ndarray) -> np.ndarray:
    """The same, the first in the high bits."""
    digits = rows.reshape(len(rows), -1, 1, I2_S.nbytes) >> _QUARTERS[::-1] & np.uint8(3)
    return np.asarray(digits.reshape(len(rows), -1))


_DIGITS: Mapping[GgmlType, Callable[[np.ndarray], np.ndarray]] = {
    TQ2_0: _tq2_0_digits,
    _TQ1_0: _tq1_0_digits,
    I2_S: _i2_s_digits,
}
"""Ternary type -> digits plus one of its rows, u8 [rows, columns]."""


def _scales_agree(rows: np.ndarray, kind: GgmlType) -> bool:
    """Return whether all nonzero block scales are the same."""
    bits = np.ascontiguousarray(rows.reshape(-1, kind.nbytes)[:, -2:]).view(np.uint16)
    bits = bits[bits & 0x7FFF != 0]
    return not bits.size or bool(bits.min() == bits.max())


def _ternary_planes(rows: np.ndarray, tail: np.ndarray, kind: GgmlType) -> dict[str, np.ndarray]:
    """Return a ternary matrix's planes; a block of scale zero gets zero digits."""
    digits = np.empty((len(rows), rows.shape[1] // kind.nbytes * kind.block), np.uint8)
    # Blocks without a scale of their own share the one that follows them.
    scale = tail[:4].view(np.float32).copy() if kind.tail else np.zeros(1, np.float16)
    for piece in _pieces(rows):
        digits[piece] = _DIGITS[kind](rows[piece])
        if not kind.tail:
            scales = _last_f16(rows[piece], kind)
            digits[piece].reshape(*scales.shape, -1)[scales == 0] = 1
            scale = np.append(scale, scales[scales != 0])[-1:]
    return {"codes": pack(digits), "scale": scale}
