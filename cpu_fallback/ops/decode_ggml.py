"""ggml's blocks to fp32 panels: a decoder of each type, see `product`, emitted from its planes.

The arithmetic is that of `Ggml.decode`: scale * code is rounded, then - minimum. Types whose codes
are of a grid are decoded from `recoded` blocks.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from clocher_kernels.formats import Ggml
from clocher_kernels.formats.ggml_blocks import PLANES, RECODED, Numbers, places_of, recoded
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, i64, void
from cpu_fallback.ops.product import PITCH, weight_at
from cpu_fallback.team.large_pages import Kept

_copies: Kept[np.ndarray] = Kept()


def blocks_of(tensor: QuantTensor) -> np.ndarray:
    """Return the blocks that decoders read, u8 [..., N, bytes], alive as long as the tensor's."""
    assert isinstance(tensor.format, Ggml)
    stored, kind = tensor.planes["blocks"], tensor.format.kind
    if kind not in RECODED:
        return stored
    blocks = stored.reshape(-1, tensor.format.block_bytes)
    shape = *stored.shape[:-1], -1
    return _copies.of(stored, "recode weights", lambda: recoded(kind, blocks).reshape(shape))


class _Columns:
    """Emits some columns of a block."""

    def __init__(self, b: Any, kind: str, at: Any) -> None:
        self.b, self.about, self._at = b, PLANES[kind], at
        self._codes = places_of(self.about.codes)

    def emit(self, out: Any, start: int, stop: int) -> None:
        """Emit columns start .. stop - 1, a multiple of 16 of them, to `out`."""
        b, about = self.b, self.about
        d = self._half("d")
        if about.factor != 1:
            d = b.fmul(d, v.constant(v.F32, about.factor))
        low = self._half(about.low) if about.low else None
        for first in range(start, stop, about.run):
            run, scale, minimum = first // about.run, d, low
            if about.scales:
                scale = b.fmul(d, self._number(about.scales, run, about.scale_bias))
            if about.minima:
                minimum = b.fmul(low, self._number(about.minima, run, 0))
            for column in range(first, first + about.run, v.LANES):
                value = b.fmul(self._sixteen(column), scale)
                if low is not None:
                    value = (b.fsub if about.minima else b.fadd)(value, minimum)
                v.emit_store(b, value, v.behind(b, out, 4 * (column - start)))

    def _half(self, field: str) -> Any:
        code = v.emit_load(self.b, v.INT16, v.behind(self.b, self._at, self.about.at(field)))
        return v.emit_half(self.b, v.spread(self.b, ir.VectorType(v.INT16, v.LANES), code))

    def _number(self, numbers: Numbers, index: int, bias: int) -> Any:
        """Emit a number in every lane, fp32."""
        b, total = self.b, ir.Constant(v.INT32, 0)
        for byte, shift, mask, to in places_of(numbers)[index]:
            value = b.zext(v.emit_load(b, v.INT8, v.behind(b, self._at, byte)), v.INT32)
            value = b.and_(b.lshr(value, ir.Constant(v.INT32, shift)), ir.Constant(v.INT32, mask))
            total = b.or_(total, b.shl(value, ir.Constant(v.INT32, to)))
        total = b.sub(total, ir.Constant(v.INT32, bias))
        signed = b.sext(b.trunc(total, v.INT8), v.INT32)
        return b.sitofp(v.spread(b, v.I32, signed), v.F32.llvm)

    def _sixteen(self, column: int) -> Any:
        """Emit the codes of 16 columns as fp32."""
        b, total = self.b, v.constant(v.I32, 0)
        for own in zip(*self._codes[column : column + v.LANES], strict=True):
            byte, shift, mask, to = own[0]
            at = v.behind(b, self._at, byte)
            if own[1][0] == byte + 1:
                found = b.zext(v.emit_load(b, ir.VectorType(v.INT8, v.LANES), at), v.I32.llvm)
                found = b.lshr(found, v.constant(v.I32, shift))
            else:  # a bit each, one after the other
                found = v.spread(b, v.I32, b.zext(v.emit_load(b, v.INT16, at), v.INT32))
                found = b.lshr(found, v.constant(v.I32, range(v.LANES)))
            found = b.and_(found, v.constant(v.I32, mask))
            total = b.or_(total, b.shl(found, v.constant(v.I32, to)))
        if self.about.table is not None:
            table = v.constant(v.F32, [float(value) for value in self.about.table])
            return v.emit_lookup(b, table, total)
        return b.sitofp(b.sub(total, v.constant(v.I32, self.about.bias)), v.F32.llvm)


@cache
def decoder_of(kind: str) -> Kernel:
    """Return the decoder of a type, by halves of blocks of 256 columns, or by blocks of 32."""
    about = PLANES[kind]
    block, nbytes = about.block, about.fields.itemsize
    width = min(block, 128)

    def part(start: int) -> Any:
        def columns(b, at, out):
            _Columns(b, kind, at).emit(out, start, start + width)

        return v.op(void, i64, i64)(columns)

    first, second = part(0), part(block - width)

    def decoder(weight, expert, row, count, k0, k1, panel):
        w = weight_at(weight)
        for r in range(row, row + count):
            line = w.codes + (expert * w.n + r) * w.stride
            out = panel + (r - row) * PITCH - 4 * k0
            for k in range(k0, k1, width):
                at = line + k // block * nbytes
                if k % block == 0:
                    first(at, out + 4 * k)
                else:
                    second(at, out + 4 * k)
        return panel

    return Kernel(decoder, i64, f"decode.{kind}")
