"""How codes of stored weights become 16 lanes of fp32 in registers, for `stream`.

Values and roundings are those of `decode`, but for the code of NaN in e4m3, which no weight has
that was loaded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from clocher_kernels.dtypes import E2M1_VALUES
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import VecT
from cpu_fallback.lanes.vector import F32, FLOAT, I32, INT8, INT16, INT32, INT64, LANES

_WORDS = VecT(INT64, LANES // 2)
_BY_TWO = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]  # two dwords, nibble by nibble
_E2M1 = v.constant(F32, [float(value) for value in E2M1_VALUES])

Load = Callable[[Any, ir.VectorType, Any], Any]
Decode = Callable[[Any, Load, Any, Any], Any]


def _half(b: Any, bits: Any) -> Any:
    n = bits.type.count
    half = b.bitcast(bits, ir.VectorType(ir.HalfType(), n))
    return b.fpext(half, ir.VectorType(FLOAT, n))


def _e5m2(b: Any, load: Load, address: Any, n: int = LANES) -> Any:
    """An e5m2 code is the upper byte of an fp16."""
    shorts = ir.VectorType(INT16, n)
    codes = b.zext(load(b, ir.VectorType(INT8, n), address), shorts)
    return _half(b, b.shl(codes, v.constant(shorts, 8)))


def _e4m3(b: Any, load: Load, address: Any, n: int = LANES) -> Any:
    """An e4m3 code shifted into an fp16 is 2^-8 of its value, subnormal ones included.

    The scale makes up for it: powers of two move from one factor to the other without rounding.
    """
    shorts = ir.VectorType(INT16, n)
    codes = b.sext(load(b, ir.VectorType(INT8, n), address), shorts)
    return _half(b, b.and_(b.shl(codes, v.constant(shorts, 7)), v.constant(shorts, 0xBFFF)))


def _code(b: Any, load: Load, address: Any) -> Any:
    pair = b.bitcast(load(b, ir.VectorType(INT8, 8), address), ir.VectorType(INT32, 2))
    words = v.pick(b, pair, [lane // 8 for lane in range(LANES)])
    shifted = b.lshr(words, v.constant(I32, [lane % 8 * 4 for lane in range(LANES)]))
    return b.and_(shifted, v.constant(I32, 15))


def _int4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    value = b.fsub(b.sitofp(_code(b, load, address), F32.llvm), own[1])
    return b.fmul(value, own[0])


def _mxfp4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    return b.fmul(v.emit_lookup(b, _E2M1, _code(b, load, address)), own[0])


def _looked_up(b: Any, load: Load, address: Any, table: Any) -> Any:
    """Emit entries of a run's table of 16, in `_BY_TWO`; of an index its low 4 bits count."""
    word = b.bitcast(load(b, ir.VectorType(INT8, 8), address), INT64)
    words = b.bitcast(v.spread(b, _WORDS, word), I32.llvm)
    shifted = b.lshr(words, v.constant(I32, [lane // 2 * 4 for lane in range(LANES)]))
    return v.emit_lookup(b, table, shifted)


def _int4_table(b: Any, scale: Any, zero: Any) -> Any:
    codes = v.constant(F32, [float(i) for i in range(LANES)])
    return b.fmul(b.fsub(codes, zero), scale)


def _plain(name: str) -> Decode:
    widen = v.WIDEN[name]
    return lambda b, load, address, own: widen.convert(b, load(b, widen.element, address))


def _scaled(decode: Load) -> Decode:
    """Return how a code is decoded that a scale of its run multiplies."""
    return lambda b, load, address, own: b.fmul(decode(b, load, address), own[0])


class Kind(NamedTuple):
    """How a kind of code is read."""

    decode: Decode  # emits 16 columns from an address, given what `run` made
    bits: int  # of a code
    factor: float = 0.0  # of the scales; 0 if there are none
    # emits what all columns of a run need of its scale and zero point
    run: Callable[[Any, Any, Any], Any] = lambda b, scale, zero: (scale, zero)
    order: list[int] | None = None  # which of its 16 columns a lane has; None: its own
    # emits 32 columns at a time, where that takes fewer instructions
    twice: Callable[[Any, Load, Any, int], Any] | None = None

    def arranged(self, b: Any, vector: Any) -> Any:
        """Emit a vector in the order that decoded columns have."""
        return vector if self.order is None else v.pick(b, vector, self.order)

    def restored(self, b: Any, vector: Any) -> Any:
        """Emit a vector that was in that order."""
        if self.order is None:
            return vector
        return v.pick(b, vector, [*map(self.order.index, range(LANES))])

    def nbytes(self, b: Any, columns: Any) -> Any:
        """Emit the bytes of so many columns, an even number if they have 4 bits."""
        if self.bits == 4:
            return b.lshr(columns, v.number(1))
        return b.mul(columns, v.number(self.bits // 8))


KINDS = {
    "f32": Kind(_plain("f32"), 32),
    "bf16": Kind(_plain("bf16"), 16),
    "int8": Kind(lambda b, load, at, own: b.fmul(_plain("i8")(b, load, at, own), own[0]), 8, 1.0),
    "int4": Kind(_int4, 4, 1.0),
    "mxfp4": Kind(_mxfp4, 4, 1.0),
}
if CURRENT.f16c:
    KINDS |= {
        "f16": Kind(_plain("f16"), 16),
        "e4m3": Kind(_scaled(_e4m3), 8, 256.0, twice=_e4m3),
        "e5m2": Kind(_scaled(_e5m2), 8, 1.0, twice=_e5m2),
    }
if CURRENT.avx512:
    KINDS |= {
        "int4": Kind(_looked_up, 4, 1.0, _int4_table, _BY_TWO),
        "mxfp4": Kind(_looked_up, 4, 1.0, lambda b, scale, zero: b.fmul(_E2M1, scale), _BY_TWO),
    }
"""Kind of code -> how it is read."""
