"""Emits the product of a tile of `Layout`, or of a strip of it, with some tokens of a panel.

Columns are summed in int32 over the shorter of the weight's block and the activation's group. Such
a sum is converted, and scaled and added with one fma; the sums of a longer block or group likewise.
int32 sums are exact, so neither the number of tokens nor the ISA changes a bit of the result, but
for the generic ISA, whose fma rounds twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from llvmlite import ir

from clocher_kernels.formats.tcq import TCQ
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import cgutils
from cpu_fallback.tiles.byte_dots import NUMBER, NUMBER_F32, Strip, ask, dots_of, is_number
from cpu_fallback.tiles.layout import BIAS, EVENS_FIRST, LINE, OPERANDS, ROWS, UNIT, Layout
from cpu_fallback.tiles.multiply import SUMS_BYTES, TILE_TOKENS

AT_ONCE = 16 if CURRENT.avx512 else 6 if CURRENT.avx2 else 4 if CURRENT.neon else 1
if CURRENT.amx:
    AT_ONCE = 8  # strips are for more
elif CURRENT.in_shorts and not CURRENT.avx512:
    AT_ONCE = 4  # beside int16 sums
"""Tokens whose sums the registers hold; the rest of a panel takes another pass over the tile."""

_HELD = 2 if CURRENT.in_shorts and not CURRENT.avx512 else 16 if CURRENT.amx else AT_ONCE
"""Tokens whose fp32 sums they hold too."""


class _Pointer:
    """An address that advances as the code goes on."""

    def __init__(self, b: Any, address: Any) -> None:
        self._b = b
        (self._slot,) = v.variables(b, [address])

    def take(self, nbytes: Any) -> Any:
        """Return the address, and advance it."""
        at = self._b.load(self._slot)
        step = v.number(nbytes) if isinstance(nbytes, int) else nbytes
        self._b.store(self._b.add(at, step), self._slot)
        return at


class Emitter:
    """Emits the product of one tile, or of a strip of it, with some of the tokens of a panel."""

    def __init__(
        self, b: Any, layout: Layout, group: int, tokens: int, strip: Strip | None = None
    ) -> None:
        self.b, self.layout, self.tokens, self.strip = b, layout, tokens, strip
        self.tiled = CURRENT.amx and strip is not None
        number = is_number(layout, group) and not self.tiled
        self.dots = dots_of(layout.code, tokens or TILE_TOKENS, number)
        self.minima = layout.offset == "minima"
        self.wide, self.narrow = layout.block // UNIT, group // UNIT
        periods = [p for p in (self.wide, self.narrow) if p]
        self.block = min(periods, default=0)
        self.group = max(periods) if len(periods) == 2 else 0
        # Registers hold the sums: what is loaded before them would be put aside meanwhile.
        self.late = tokens > _HELD

    def emit(
        self, tile: Any, panel: Any, out: Any, units: Any, width: Any, first: Any, ahead: Any
    ) -> None:
        """Emit everything; of a strip the sums go on from those of the one before."""
        b = self.b
        self.ahead = ahead
        self.weights = _Pointer(b, tile)
        own = v.number(self.dots.code_bytes)
        self.row, self.line = b.mul(width, v.number(4)), b.mul(width, own)
        place = b.mul(first, v.number(4))
        even = b.and_(b.add(units, v.number(1)), v.number(-2)) if self.tiled else units
        starts = b.add(panel, b.mul(even, self.line))
        scales = b.add(starts, b.mul(self._blocks(units), self.row))
        self.codes = _Pointer(b, b.add(panel, b.mul(first, own)))
        self.starts = _Pointer(b, b.add(starts, place))
        self.scales = _Pointer(b, b.add(scales, place))
        self.head, self.index = v.variables(b, [tile, v.number(0)])
        self.out = b.add(out, b.mul(first, v.number(4 * ROWS)))
        whole = units
        if self.strip:
            self.decoded = _Pointer(b, self.strip.at)
            if self.tiled:
                self.sums = _Pointer(b, self.strip.sums)
            units = self._skip(units, self.strip.start)
        if not self.block:
            sums = self._sums(units)
        elif not self.group:
            begun = self._begin_sums() if self.strip else None
            sums = self._parts(units, self.block, begun=begun)
        else:
            sums = self._groups(units)
        ends = None
        if self.strip:  # what is for all columns is multiplied behind the last strip
            ends = b.icmp_signed("<=", whole, b.add(self.strip.start, v.number(STRIP)))
        one = v.constant(v.F32, 1.0)
        factors = [] if self.narrow else [self._activation_scales()]
        if self.layout.by_row:
            factors.append([v.emit_load(b, v.F32.llvm, self.weights.take(LINE))] * self.tokens)
        for own in factors:
            own = [b.select(ends, x, one) for x in own] if self.strip else own
            sums = [b.fmul(s, x) for s, x in zip(sums, own, strict=True)]
        if self.strip and not self.block:  # until then sums are int32
            integers = [b.bitcast(b.load(slot), v.F32.llvm) for slot in self.integers]
            sums = [b.select(ends, *both) for both in zip(sums, integers, strict=True)]
        for i, value in enumerate(sums):
            if self.layout.code in TCQ:
                value = v.pick(b, value, [EVENS_FIRST.index(row) for row in range(ROWS)])
            v.emit_store(b, value, v.behind(b, self.out, 4 * ROWS * i))

    def _begin_sums(self, kind: Any = v.F32) -> list[Any]:
        lanes = EVENS_FIRST if self.layout.code in TCQ else None
        return begin_sums(self.b, self.out, self.tokens, self.strip, kind, lanes)

    def _skip(self, units: Any, start: Any) -> Any:
        """Emit the step to the unit with which a strip begins; return the units of the strip."""
        b = self.b
        self.codes.take(b.mul(start, self.line))
        for pointer, period in ((self.starts, self.block), (self.scales, self.narrow)):
            if period:
                pointer.take(b.mul(b.udiv(start, v.number(period)), self.row))
        return strip_units(b, units, start)

    def _blocks(self, units: Any) -> Any:
        if not self.block:
            return v.number(1)
        return self.b.udiv(self.b.add(units, v.number(self.block - 1)), v.number(self.block))

    @contextmanager
    def _steps(self, units: Any, step: int) -> Iterator[Any]:
        """Loop over units in steps; yields the units of the step."""
        b = self.b
        left = cgutils.alloca_once_value(b, units)
        head, body, end = (b.append_basic_block(n) for n in ("units", "units.body", "units.end"))
        b.branch(head)
        b.position_at_end(head)
        rest = b.load(left)
        b.cbranch(b.icmp_signed(">", rest, v.number(0)), body, end)
        b.position_at_end(body)
        more = b.icmp_signed(">", rest, v.number(step))
        yield b.select(more, v.number(step), rest) if step > 1 else v.number(1)
        b.store(b.sub(rest, v.number(step)), left)
        b.branch(head)
        b.position_at_end(end)

    def _add(self, slots: list[Any], values: list[Any], scales: list[Any]) -> None:
        for slot, value, scale in zip(slots, values, scales, strict=True):
            self.b.store(v.emit_fma(self.b, value, scale, self.b.load(slot)), slot)

    def _groups(self, units: Any) -> list[Any]:
        """Emit the sum over groups of blocks, or of blocks that have both scales."""
        b = self.b
        totals = self._begin_sums()
        with self._steps(units, self.group) as within:
            if self.block == self.group:
                parts, offset = self._scaled(within)
                if self.minima:
                    added = zip(self.lows, parts, strict=True)
                    parts = [v.emit_fma(b, low, offset, part) for low, part in added]
                self._add(totals, parts, self._activation_scales())
            elif self.wide == self.block:
                self._add(totals, self._parts(within, self.block), self._activation_scales())
            else:
                scale, offset = self._weight_scales()
                parts = self._parts(within, self.block, offset)
                self._add(totals, parts, [scale] * self.tokens)
        return [b.load(slot) for slot in totals]

    def _scaled(self, units: Any) -> tuple[list[Any], Any]:
        """Emit the sums over one block times its scales, and what `_weight_scales` has besides."""
        b = self.b
        if self.late:
            at = self._record()
            ends = self._dots(units, lambda: self._weight_scales(at)[1])
            scale, offset = self._weight_scales(at)
        else:
            scale, offset = self._weight_scales()
            ends = self._dots(units, lambda: offset)
        if not (CURRENT.fma and self.dots.number and self.layout.scale == "f16"):
            return [b.fmul(self.dots.end_f32(b, end), scale) for end in ends], offset
        # The same with one instruction less for each token: `NUMBER` times eleven bits is exact.
        less = b.fmul(scale, v.constant(v.F32, -NUMBER_F32))
        bits = [b.bitcast(self.dots.end(b, end), v.F32.llvm) for end in ends]
        return [v.emit_fma(b, value, scale, less) for value in bits], offset

    def _parts(
        self, units: Any, block: int, offset: Any = None, begun: list[Any] | None = None
    ) -> list[Any]:
        """Emit the sum over blocks, each scaled by the scale that changes with every block."""
        parts = begun or v.variables(self.b, [v.constant(v.F32, 0.0)] * self.tokens)
        with self._steps(units, block) as within:
            if self.wide == block:
                scale, offset = self._weight_scales()
                self._add(parts, self._sums(within, offset), [scale] * self.tokens)
                if self.minima:
                    self._add(parts, self.lows, [offset] * self.tokens)
            else:
                self._add(parts, self._sums(within, offset), self._activation_scales())
        return [self.b.load(slot) for slot in parts]

    def _sums(self, units: Any, offset: Any = None) -> list[Any]:
        """Emit the exact sum over one block, as fp32; `lows` are those of the activations."""
        return [self.dots.end_f32(self.b, total) for total in self._dots(units, lambda: offset)]

    def _begun(self, at: Any, offset: Any) -> list[Any]:
        """Emit what sums begin with."""
        if self.minima:
            self.lows = self._of_tokens(v.F32, at)
            starts, offset = [v.constant(v.I32, NUMBER * self.dots.number)] * self.tokens, None
        else:
            starts = self._of_tokens(v.I32, at)
        return [self.dots.begin(self.b, start, offset) for start in starts]

    def _dots(self, units: Any, offset: Callable[[], Any]) -> list[Any]:
        """Emit the exact sum over one block; if `late` what it begins with is added at the end."""
        b, at = self.b, self.starts.take(self.row)
        if self.strip and not self.strip.decoded and CURRENT.avx512:
            return self._decode(units, offset)
        if self.tiled:
            return self._tiled(at, units)
        if self.late:
            nothing = v.constant(v.I32, 0)
            sums = [self.dots.begin(b, nothing, None) for _ in range(self.tokens)]
        else:
            sums = self._begun(at, offset())
        one = isinstance(units, ir.Constant)
        with nullcontext() if one else self._steps(units, 1):
            step = self.dots.lines * LINE
            lines = self.weights.take(step)
            codes = self.codes.take(self.line)
            strip = self.strip
            if strip:
                strip = strip._replace(at=self.decoded.take(self.dots.decoded_bytes))
            self.dots.unit(b, lines, codes, sums, self.ahead, strip)
        if self.late:
            for own, start in zip(sums, self._begun(at, offset()), strict=True):
                b.store(b.add(b.load(own[0]), b.load(start[0])), own[0])
        return sums

    def _tiled(self, at: Any, units: Any) -> list[Any]:
        """Emit the sums of one block that AMX has stored."""
        b = self.b
        assert self.strip
        self.weights.take(b.mul(units, v.number(self.dots.lines * LINE)))
        if self.minima:
            self.lows = self._of_tokens(v.F32, at)
        sums = self.sums.take(SUMS_BYTES)
        rows = [v.behind(b, sums, 4 * ROWS * i) for i in range(self.tokens)]
        self.integers = [b.inttoptr(row, v.I32.llvm.as_pointer()) for row in rows]
        if not self.block:
            more = self._begin_sums(v.I32)
            for slot, total in zip(self.integers, more, strict=True):
                b.store(b.add(b.load(slot), b.load(total)), slot)
        return [[slot] for slot in self.integers]

    def _decode(self, units: Any, offset: Callable[[], Any]) -> list[Any]:
        """Emit the operands of one block, for AMX less their bias; there are no sums."""
        b = self.b
        self.lows: list[Any] = []
        self.integers: list[Any] = []
        signed = self.tiled and not self.minima
        less = v.constant(v.BYTES, BIAS[self.layout.code] if signed else 0)
        if signed and self.layout.offset:
            less = b.bitcast(b.mul(offset(), v.constant(v.I32, 0x01010101)), v.BYTES.llvm)
        with self._steps(units, 1):
            lines = self.weights.take(self.dots.lines * LINE)
            self.dots.decode(b, lines, self.decoded.take(OPERANDS * LINE), less, self.ahead)
        return []

    def _activation_scales(self) -> list[Any]:
        return self._of_tokens(v.F32, self.scales.take(self.row))

    def _of_tokens(self, kind: Any, at: Any) -> list[Any]:
        """Emit the loads of a number of each token, next to each other, in every lane."""
        places = [v.behind(self.b, at, 4 * i) for i in range(self.tokens)]
        return [v.emit_everywhere(self.b, kind, place) for place in places]

    def _record(self) -> Any:
        """Emit the step to the scales of a block; return their address."""
        b, layout = self.b, self.layout
        if layout.per_head == 1:
            return self._head(layout.head)
        index = b.load(self.index)
        b.store(b.add(index, v.number(1)), self.index)
        fresh = b.icmp_signed("==", b.and_(index, v.number(layout.per_head - 1)), v.number(0))
        here = self._head(b.select(fresh, v.number(layout.head), v.number(0)))
        at = b.select(fresh, here, b.add(b.load(self.head), v.number(layout.record)))
        b.store(at, self.head)
        return at

    def _head(self, nbytes: Any) -> Any:
        """Emit the step over a head, or none; ask for its lines ahead, as for those of codes.

        Between heads a line of codes is asked for twice. Without AVX-512 there is no time for more.
        """
        at = self.weights.take(nbytes)
        if CURRENT.avx512 and not (self.strip and self.strip.decoded):
            for line in range(0, self.layout.head, LINE):
                further = self.b.add(v.behind(self.b, at, line), self.ahead)
                ask(self.b, further, self.tokens or TILE_TOKENS)
        return at

    def _weight_scales(self, at: Any = None) -> tuple[Any, Any]:
        """Emit the scales of a block, fp32, and its zero points, int32, or minima, fp32."""
        b, layout = self.b, self.layout
        at = self._record() if at is None else at
        scale, offset = v.WIDEN[layout.scale], None
        place = b.add(at, v.number(scale.nbytes))
        if self.minima:
            offset = v.WIDEN["f16"].emit(b, place)
        elif layout.offset:
            offset = b.zext(v.emit_load(b, ir.VectorType(v.INT8, ROWS), place), v.I32.llvm)
        return scale.emit(b, at), offset


STRIP = 16  # Units of a strip: whole heads, blocks and groups


def strip_units(b: Any, units: Any, start: Any) -> Any:
    """Emit the units of the strip from a unit on."""
    left, most = b.sub(units, start), v.number(STRIP)
    return b.select(b.icmp_signed("<", left, most), left, most)


def begin_sums(
    b: Any,
    out: Any,
    tokens: int,
    strip: Strip | None,
    kind: Any = v.F32,
    lanes: Sequence[int] | None = None,
) -> list[Any]:
    """Emit the sums of tokens: zero, or those of the strip before, in an order of lanes.

    Registers hold the sums of few tokens. Those of more are added to in memory: the compiler would
    put them aside in the same way, and twice.
    """
    fresh, slots = strip and b.icmp_signed("==", strip.start, v.number(0)), []
    for i in range(tokens):
        at = b.inttoptr(v.behind(b, out, 4 * ROWS * i), kind.llvm.as_pointer())
        value = v.constant(kind, 0)
        if strip:
            last = b.load(at)
            value = b.select(fresh, value, v.pick(b, last, lanes) if lanes else last)
        slots.append(at if tokens > _HELD else cgutils.alloca_once(b, kind.llvm))
        b.store(value, slots[-1])
    return slots
