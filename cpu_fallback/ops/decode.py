"""Stored weights to fp32 panels: one decoder per format, shared by every op that reads a matrix.

A decoder (`product`) gives exactly what the format's own `decode` does. f32 needs no panel
and returns the stored rows, K * 4 bytes apart. Decoders of ggml's blocks are emitted from the
planes of a type: scale * code is rounded, then - minimum; types whose codes are of a grid are
decoded from `recoded` blocks. Those of trellises multiply row * scale, then by the level.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Float, Fp8, Ggml, Int4, Int8, Mxfp4, Tcq, Ternary
from clocher_kernels.formats.ggml import GGML_KINDS
from clocher_kernels.formats.ggml_blocks import PLANES, RECODED, Numbers, places_of, recoded
from clocher_kernels.formats.tcq import GROUP, STRIP, UNIT, levels
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device, i64, void
from cpu_fallback.lanes.language import WIDEN, loads_of
from cpu_fallback.ops.product import PITCH, Weight, weight_at
from cpu_fallback.team.large_pages import Kept

_SCALES = {"one": 0, "f32": 1, "f16": 2, "bf16": 3, "e8m0": 4}
_f16, _bf16, _e8m0 = (loads_of(kind)[1] for kind in ("f16", "bf16", "e8m0"))


@device
def scales_at(weight, index, count):
    """Return the scales from the index-th on, fp32, in the first `count` lanes or more."""
    w = weight_at(weight)
    kind, scales = w.scale_kind, w.scales
    if kind == 0:
        return v.splat(w.factor)
    if kind == 1:
        return v.load_f32_n(scales + 4 * index, count)
    if kind == 2:
        return _f16(scales + 2 * index, count)
    if kind == 3:
        return _bf16(scales + 2 * index, count)
    return _e8m0(scales + index, count)


@device
def first_scale(weight, expert, row):
    """Return the index of the scale of a row's first element."""
    w = weight_at(weight)
    return (expert * w.high + row // w.tall) * w.wide


def _f32(weight, expert, row, count, k0, k1, panel):
    w = weight_at(weight)
    return w.codes + 4 * ((expert * w.n + row) * w.k + k0)


def _numbers(kind: str) -> Callable[..., int]:
    """Return the decoder of a kind of number, by runs that share scale and, of u4, zero point."""
    bits, get, has_zero = WIDEN[kind].bits, v.loads_up_to(*loads_of(kind)), kind == "u4"

    def decoder(weight, expert, row, count, k0, k1, panel):
        w = weight_at(weight)
        group, zero = w.group, v.splat(np.float32(8))
        for r in range(row, row + count):
            line = w.codes + (expert * w.n + r) * w.stride
            out = panel + (r - row) * PITCH - 4 * k0
            index = first_scale(weight, expert, r) + k0 // group
            k, end = k0, k0 - k0 % group
            while k < k1:
                end = min(end + group, k1)
                scale = v.splat(v.lane(scales_at(weight, index, 1), 0))
                if w.zeros:
                    zero = v.splat(np.float32(v.read_u8(w.zeros + index)))
                index += 1
                while k < end:
                    value = get(line + (bits * k >> 3), end - k)
                    if has_zero:
                        value = v.sub(value, zero)
                    v.store_up_to(out + 4 * k, v.mul(value, scale), end - k)
                    k += 16
                k = end
        return panel

    return decoder


def _ternary(weight, expert, row, count, k0, k1, panel):
    w = weight_at(weight)
    packed = w.n >> 2
    scale = scales_at(weight, 0, 1)
    one, three = v.isplat(1), v.isplat(3)
    for r in range(row, row + count):
        line = w.codes + r % packed * w.stride
        shift = 2 * (r // packed)
        out = panel + (r - row) * PITCH - 4 * k0
        for k in range(k0, k1, 16):
            digit = v.isub(v.iand(v.shr(v.load_u8_up_to(line + k, k1 - k), shift), three), one)
            v.store_up_to(out + 4 * k, v.mul(v.to_f32(digit), scale), k1 - k)
    return panel


DECODERS = {
    kind: Kernel(function, i64, f"decode.{kind}")
    for kind, function in {
        "f32": _f32,
        **{kind: _numbers(kind) for kind in ("bf16", "f16", "e4m3", "e5m2")},
        "int8": _numbers("i8"),
        "int4": _numbers("u4"),
        "mxfp4": _numbers("e2m1"),
        "ternary": _ternary,
    }.items()
}
"""Stored kind of code -> decoder. Those of ggml's types and trellises are made when needed."""


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


def _emit_columns(kind: str, columns: range, b: Any, at: Any, out: Any) -> None:
    """Emit some columns of the block at an address, a multiple of 16 of them, to `out`."""
    about = PLANES[kind]
    codes = places_of(about.codes)

    def half(field: str) -> Any:
        code = v.emit_load(b, v.INT16, v.behind(b, at, about.at(field)))
        return v.emit_half(b, v.spread(b, ir.VectorType(v.INT16, v.LANES), code))

    def number(numbers: Numbers, index: int, bias: int) -> Any:
        """Emit a number in every lane, fp32."""
        total = ir.Constant(v.INT32, 0)
        for byte, shift, mask, to in places_of(numbers)[index]:
            value = b.zext(v.emit_load(b, v.INT8, v.behind(b, at, byte)), v.INT32)
            value = b.and_(b.lshr(value, ir.Constant(v.INT32, shift)), ir.Constant(v.INT32, mask))
            total = b.or_(total, b.shl(value, ir.Constant(v.INT32, to)))
        signed = b.sext(b.trunc(b.sub(total, ir.Constant(v.INT32, bias)), v.INT8), v.INT32)
        return b.sitofp(v.spread(b, v.I32, signed), v.F32.llvm)

    def sixteen(column: int) -> Any:
        """Emit the codes of 16 columns as fp32."""
        total = v.constant(v.I32, 0)
        for own in zip(*codes[column : column + v.LANES], strict=True):
            byte, shift, mask, to = own[0]
            place = v.behind(b, at, byte)
            if own[1][0] == byte + 1:
                found = b.zext(v.emit_load(b, ir.VectorType(v.INT8, v.LANES), place), v.I32.llvm)
                found = b.lshr(found, v.constant(v.I32, shift))
            else:  # a bit each, one after the other
                found = v.spread(b, v.I32, b.zext(v.emit_load(b, v.INT16, place), v.INT32))
                found = b.lshr(found, v.constant(v.I32, range(v.LANES)))
            found = b.and_(found, v.constant(v.I32, mask))
            total = b.or_(total, b.shl(found, v.constant(v.I32, to)))
        if about.table is not None:
            table = v.constant(v.F32, [float(value) for value in about.table])
            return v.emit_lookup(b, table, total)
        return b.sitofp(b.sub(total, v.constant(v.I32, about.bias)), v.F32.llvm)

    d = half("d")
    if about.factor != 1:
        d = b.fmul(d, v.constant(v.F32, about.factor))
    low = half(about.low) if about.low else None
    for first in range(columns.start, columns.stop, about.run):
        run, scale, minimum = first // about.run, d, low
        if about.scales:
            scale = b.fmul(d, number(about.scales, run, about.scale_bias))
        if about.minima:
            minimum = b.fmul(low, number(about.minima, run, 0))
        for column in range(first, first + about.run, v.LANES):
            value = b.fmul(sixteen(column), scale)
            if low is not None:
                value = (b.fsub if about.minima else b.fadd)(value, minimum)
            v.emit_store(b, value, v.behind(b, out, 4 * (column - columns.start)))


@cache
def _ggml(kind: str) -> Kernel:
    """Return the decoder of a type of ggml, by halves of blocks of 256 columns, or blocks of 32."""
    about = PLANES[kind]
    block, nbytes = about.block, about.fields.itemsize
    width = min(block, 128)

    first, second = (
        v.op(void, i64, i64)(partial(_emit_columns, kind, range(start, start + width)))
        for start in (0, block - width)
    )

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


_LINE = 4 * STRIP
_MASK = ir.VectorType(v.INT1, v.LANES)


def _levels(bits: int, first: int, b: Any, unit: Any, row: Any) -> Any:
    """Emit the levels of columns first .. first + 15 of a row of a unit at an address, fp32."""
    places = [(column % 4 * 8, (first + column) // 4) for column in range(v.LANES)]

    def numbers(line: int, width: int) -> Any:
        """Emit a number of one or two bits of each column."""
        parts = [_dword(b, unit, row, line + i) for i in range(width)]
        if width == 2:
            odd = v.constant(_MASK, [j % 2 for _, j in places])
            parts = [b.select(odd, parts[1], parts[0])]
        shift = v.constant(v.I32, [at + j // width * width for at, j in places])
        return b.and_(b.lshr(parts[0], shift), v.constant(v.I32, (1 << width) - 1))

    def bit(lag: int) -> Any:
        """Emit the bit of each column's row that is `lag` before."""
        other = b.and_(b.sub(row, v.number(lag)), v.number(STRIP - 1))
        wraps = b.icmp_signed("<", row, v.number(lag))
        word = _dword(b, unit, other, 0)
        word = b.select(wraps, b.shl(word, v.constant(v.I32, 1)), word)
        shift = v.constant(v.I32, [at + j for at, j in places])
        return b.and_(b.lshr(word, shift), v.constant(v.I32, 1))

    z1 = b.xor(bit(0), b.xor(bit(1), bit(3)))
    index = b.or_(bit(2), b.shl(z1, v.constant(v.I32, 1)))
    low = numbers(1, min(bits - 1, 2))
    index = b.or_(index, b.shl(low, v.constant(v.I32, 2)))
    table = [float(level) for level in levels(bits)]
    table += [0.0] * (-len(table) % v.LANES)
    found = [
        v.emit_lookup(b, v.constant(v.F32, table[at : at + v.LANES]), index)
        for at in range(0, len(table), v.LANES)
    ]
    if bits > 3:
        high = numbers(3, bits - 3)
        for i, part in enumerate(found[1:], 1):
            here = b.icmp_unsigned(">=", high, v.constant(v.I32, i))
            found[0] = b.select(here, part, found[0])
    return found[0]


def _dword(b: Any, unit: Any, row: Any, line: int) -> Any:
    """Emit the dword of a row in a line of a unit in every lane."""
    at = v.behind(b, v.emit_at(b, unit, row, 4), _LINE * line)
    return v.emit_everywhere(b, v.I32, at)


@cache
def _trellis(bits: int) -> Kernel:
    """Return the decoder of trellises of so many bits, by units of 32 columns."""
    size = bits * _LINE

    low, high = (v.op(v.F32, i64, i64)(partial(_levels, bits, first)) for first in (0, v.LANES))

    def decoder(weight, expert, row, count, k0, k1, panel):
        w = weight_at(weight)
        strips = (w.n + STRIP - 1) // STRIP
        for r in range(row, row + count):
            strip = w.codes + (expert * strips + r // STRIP) * w.stride
            index = expert * w.n + r
            out = panel + (r - row) * PITCH - 4 * k0
            own = v.from_bf16(v.isplat(v.read_u16(w.zeros + 2 * index)))
            for k in range(k0, k1, UNIT):
                scale = v.read_u8(w.scales + index * w.wide + k // GROUP)
                step = v.mul(own, v.splat(np.float32(scale)))
                unit = strip + k // UNIT * size
                v.store_f32(out + 4 * k, v.mul(step, low(unit, r % STRIP)))
                v.store_f32(out + 4 * k + 64, v.mul(step, high(unit, r % STRIP)))
        return panel

    return Kernel(decoder, i64, f"decode.tcq{bits}")


def weight_record(op_name: str, tensor: QuantTensor) -> Weight:
    """Return the record of a weight, as far as decoders read it. Raises UnsupportedOp."""
    fmt, planes = tensor.format, tensor.planes
    *_, n, k = tensor.shape
    match fmt:
        case Float(name=kind):
            return plain(DECODERS[kind], planes["data"], n, k)
        case Ternary():
            return plain(DECODERS["ternary"], planes["codes"], n, k, fmt.multiplier(planes))
        case Ggml(kind=kind):
            blocks = blocks_of(tensor)
            return plain(_ggml(kind), blocks, n, k)._replace(stride=blocks.shape[-1])
        case Tcq(bits=bits):
            found = plain(_trellis(bits), planes["codes"], n, k)
            size, wide = STRIP * k * bits // 8, k // fmt.turned
            places = {"scales": _address(planes["scales"]), "zeros": _address(planes["rows"])}
            return found._replace(stride=size, wide=wide, **places)
        case Int8(group=scope, scale_dtype=scale):
            kind, codes = "int8", planes["codes"]
        case Int4(group=scope, scale_dtype=scale):
            kind, codes = "int4", planes["codes"]
        case Fp8(code_dtype=kind, scope=scope, scale_dtype=scale):
            codes = planes["codes"]
        case Mxfp4():
            kind, codes, scope, scale = "mxfp4", planes["blocks"], 32, "e8m0"
        case _:
            raise UnsupportedOp(
                f"{op_name}: no CPU kernel reads the format {fmt.name}; there are decoders for "
                f"{', '.join((*DECODERS, *GGML_KINDS))}"
            )
    group, tall = {"tensor": (k, n), "row": (k, 1), "g128": (128, 1), "b128": (128, 128)}.get(
        scope, (scope, 1)
    )
    stride = -(-k // 2) if kind in ("int4", "mxfp4") else k
    zeros = _address(planes["zeros"]) if "zeros" in planes else 0
    return plain(DECODERS[kind], codes, n, k, 0.0)._replace(
        scales=_address(planes["scales"]),
        zeros=zeros,
        stride=stride,
        scale_kind=_SCALES[scale],
        group=group,
        tall=tall,
        wide=-(-k // group),
        high=-(-n // tall),
    )


def plain(decoder: Kernel, codes: np.ndarray, n: int, k: int, multiplier: float = 1.0) -> Weight:
    """Return the record of a weight without scales: codes [n, k] times a multiplier, but f32."""
    pitch = 4 * k if decoder is DECODERS["f32"] else PITCH
    sizes = {"n": n, "k": k, "stride": k * codes.itemsize, "group": k, "tall": n}
    return Weight(decoder, pitch, codes=_address(codes), factor=float(multiplier), **sizes)


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
