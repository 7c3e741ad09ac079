"""From ggml blocks to the planes of Clocher's formats, without changing a number.

| ggml | format |
|---|---|
| f32, f16, bf16 | the same |
| q8_0 | int8_g32_f16 |
| q4_0 | int4_sym_g32_f16 |
| mxfp4 | mxfp4 |
| tq2_0 | ternary_f16 if all scales of the matrix agree, else int4_sym_g256_f16 |
| tq1_0 | ternary_f16 if all scales of the matrix agree, else tq1_0 |
| K-quants, q4_1, q5_0, q5_1, iq4, iq3 | the same |

What has the same format is used in place where its rows are in order; everything else is repacked
when it is asked for, a few rows at a time, so that only the result is in memory.

Source: ggml-common.h (block_q4_0, block_q8_0, block_mxfp4, block_tq2_0).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import Float, Format, Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_runtime.checkpoints.gguf.blocks import (
    BLOCKS,
    FLOATS,
    I2_S,
    MXFP4,
    Q4_0,
    Q8_0,
    TQ2_0,
    GgmlType,
)

_PIECE_BYTES = 1 << 19
_TQ1_0 = BLOCKS["tq1_0"]
_FORMATS: Mapping[GgmlType, Format] = {
    **{kind: Float(name) for name, kind in FLOATS.items()},
    Q8_0: Int8(32, "f16"),
    Q4_0: Int4(True, 32, "f16"),
    MXFP4: Mxfp4(),
    **{kind: Ggml(name) for name, kind in BLOCKS.items()},
}
_SCALED_TERNARY = Int4(True, 256, "f16")
_FOUR, _HALF = np.uint64(4), np.uint64(32)
_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_PACKING = (
    (_FOUR, np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(8), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(16), np.uint64(0x00000000FFFFFFFF)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows as a file stores them, and which rows of the model's tensor they are.

    `blocks`: u8 [rows, bytes of a row]; `places`: row of the model's tensor of each; `tail`: what
    follows the rows, u8; [0] for most types.
    """

    blocks: np.ndarray
    places: np.ndarray
    tail: np.ndarray


def same_format(kind: GgmlType) -> Format | None:
    """Return the format whose planes are the bytes of the file, if there is one."""
    same = kind.name in FLOATS or (kind.name in BLOCKS and kind != _TQ1_0)
    return _FORMATS[kind] if same else None


def repacked(
    parts: list[Rows], kind: GgmlType, shape: tuple[int, ...]
) -> tuple[Format, Callable[[], dict[str, np.ndarray]]]:
    """Return the format of a tensor and what makes its planes.

    `parts`: what the file has of it; `kind`: type of all of them; `shape`: of the tensor; its
    vectors have one column a row.
    """
    count, whole = sum(len(part.blocks) for part in parts), len(shape) == 2
    if kind == I2_S:
        return Ternary(scale_dtype="f32"), lambda: _repack_ternary(parts[0], kind)
    if kind in _DIGITS and whole and count % 4 == 0 and _scales_agree(parts[0].blocks, kind):
        return Ternary(scale_dtype="f16"), lambda: _repack_ternary(parts[0], kind)
    fmt = _SCALED_TERNARY if kind == TQ2_0 else _FORMATS[kind]
    return fmt, lambda: _repack(parts, kind, fmt, shape)


def _repack(
    parts: list[Rows], kind: GgmlType, fmt: Format, shape: tuple[int, ...]
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


def _same(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"blocks": rows}


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
    codes = _tq2_0_digits(rows) + np.uint8(7)
    scales = _last_f16(rows, TQ2_0)
    return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": scales}


_UNPACK: Mapping[GgmlType, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    **{kind: _float(name) for name, kind in FLOATS.items()},
    Q8_0: _q8_0,
    Q4_0: _q4_0,
    MXFP4: _mxfp4,
    TQ2_0: _tq2_0,
    **dict.fromkeys(BLOCKS.values(), _same),
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


def _last_f16(rows: np.ndarray, kind: GgmlType) -> np.ndarray:
    """Return the scales at the end of ternary blocks, f16 [rows, blocks]."""
    return _f16(rows.reshape(len(rows), -1, kind.nbytes)[..., -2:])


def _tq2_0_digits(rows: np.ndarray) -> np.ndarray:
    packed = np.ascontiguousarray(rows.reshape(-1, TQ2_0.nbytes)[:, :64].view("V64")).view(np.uint8)
    out = np.empty((packed.size // 32, 4, 32), np.uint8)
    for quarter in range(4):
        digits = packed >> np.uint8(2 * quarter)
        digits &= 3
        out[:, quarter] = digits.reshape(-1, 32)
    return out.reshape(len(rows), -1)


def _tq1_0_digits(rows: np.ndarray) -> np.ndarray:
    blocks = rows.reshape(-1, _TQ1_0.nbytes).view(KINDS["tq1_0"].fields)[:, 0]
    digits = KINDS["tq1_0"].unpack(blocks).codes + np.int8(1)
    return digits.view(np.uint8).reshape(len(rows), -1)


def _i2_s_digits(rows: np.ndarray) -> np.ndarray:
    """The four codes of a byte are 32 columns apart, the first in the high bits."""
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    digits = rows.reshape(len(rows), -1, 1, I2_S.nbytes) >> shifts & np.uint8(3)
    return np.asarray(digits.reshape(len(rows), -1))


_DIGITS: Mapping[GgmlType, Callable[[np.ndarray], np.ndarray]] = {
    TQ2_0: _tq2_0_digits,
    _TQ1_0: _tq1_0_digits,
    I2_S: _i2_s_digits,
}
"""Ternary type -> digits plus one of its rows, u8 [rows, columns]."""


def _scales_agree(rows: np.ndarray, kind: GgmlType) -> bool:
    """Return whether all blocks but those of scale zero have the same scale."""
    scales = rows.reshape(-1, kind.nbytes)[:, -2:]
    found: set[int] = set()
    for start in range(0, len(scales), _PIECE_BYTES):
        bits = np.ascontiguousarray(scales[start : start + _PIECE_BYTES]).view(np.uint16)
        found |= set(np.unique(bits[bits & 0x7FFF != 0]).tolist())
        if len(found) > 1:
            return False
    return True


def _repack_ternary(part: Rows, kind: GgmlType) -> dict[str, np.ndarray]:
    """Return the planes of a ternary matrix; a block of scale zero becomes digits of zero."""
    step, source = len(part.blocks) // 4, np.argsort(part.places)
    columns = part.blocks.shape[1] // kind.nbytes * kind.block
    codes = np.zeros((step, columns), np.uint8)
    # Blocks without a scale of their own share the one that follows them.
    scale = part.tail[:4].view(np.float32).copy() if kind.tail else np.zeros(1, np.float16)
    for piece in _pieces(part.blocks[:step]):
        for quarter in range(4):
            rows = part.blocks[source[quarter * step : (quarter + 1) * step][piece]]
            digits = _DIGITS[kind](rows)
            if not kind.tail:
                _set_zeros(digits, _last_f16(rows, kind), scale)
            codes[piece] |= digits << np.uint8(2 * quarter)
    return {"codes": codes, "scale": scale}


def _set_zeros(digits: np.ndarray, scales: np.ndarray, scale: np.ndarray) -> None:
    """Make blocks of scale zero zeros, and write the scale of the others."""
    zero = scales == 0
    if zero.any():
        digits.reshape(*scales.shape, -1)[zero] = 1
    if not zero.all():
        scale[0] = scales[~zero][0]
