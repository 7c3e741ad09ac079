"""Trellis-coded quantisation: 2 to 5 bits a weight, each from 2^(bits + 1) levels.

Source: Marcellin and Fischer 1990 ("Trellis coded quantization of memoryless and Gauss-Markov
sources") with Ungerboeck's code of 8 states; trellises for weights: QTIP (arXiv 2406.11235).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from clocher_kernels.dtypes import LARGEST, from_f32, to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import base
from clocher_kernels.formats.base import Format, Plane, Planes, Shape

STRIP, UNIT, GROUP = 16, 32, 64
"""Rows of a strip; columns of a unit, which is one sequence; columns that share a scale."""
STATES = 8
LARGEST_CODE = 255
"""Of scales."""
_PIECE = 1 << 17  # elements that are converted at a time

LEVELS = {
    2: (6, 20, 36, 63),
    3: (3, 8, 13, 19, 26, 34, 45, 63),
    4: (1, 4, 6, 9, 11, 14, 17, 20, 23, 26, 30, 34, 39, 45, 52, 63),
    5: (
        *(1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13, 14, 16, 17, 19, 20),
        *(22, 24, 26, 28, 30, 32, 34, 36, 39, 41, 44, 46, 49, 52, 56, 61),
    ),
}
"""Bits of a weight -> the positive half of its levels: the best ones for a normal distribution."""
TCQ = {f"tcq{bits}": bits for bits in LEVELS}
"""Names of the formats -> bits of a weight."""
DEVIATION = {2: 33.75, 3: 25.3, 4: 19.19, 5: 15.57}
"""Bits of a weight -> standard deviation of the weights for which its levels are the best."""
COLUMNS = tuple(4 * (bit % 8) + bit // 8 for bit in range(UNIT))
"""The columns of a unit in the order of the sequence: that of the bits of a row's dword."""


def levels(bits: int) -> np.ndarray:
    """Return the levels of a weight of so many bits, fp32 [2^(bits + 1)]: an index is 4 m + z."""
    half = np.array(LEVELS[bits], np.float32)
    return np.concatenate([-half[::-1], half])


def first_subset() -> np.ndarray:
    """Return z of each state for a next bit of 0, [8]; a 1 flips its upper bit.

    Bit i of a state is the i-th bit before: z0 is the second, z1 the next, first and third, added.
    """
    state = np.arange(STATES)
    return (state >> 1 & 1) | ((state ^ state >> 2) & 1) << 1


@dataclass(frozen=True, repr=False)
class Tcq(Format):
    """value = row * scale * level, where bits of the weights before choose among levels, too.

    Rows come in strips of 16, columns in units of 32, of which each is a sequence of 512 weights:
    the 16 rows of a column, then those of the next in `COLUMNS`. A weight has a bit u; with those
    before it in the sequence, zero before the first,

        z0 = u[-2],  z1 = u ^ u[-1] ^ u[-3],  level = levels[4 m + 2 z1 + z0]

    and its other bits - 1 are m. Inputs are rotated before they are multiplied (`turned`).

    Planes:
        codes: u8 [..., N/16, K/32, bits, 64]; byte 4 r + c of a line is of row r and columns c,
            4 + c .. 28 + c, bit j of the first line u of the j-th. Two low bits of m are bits 2i
            and 2i + 1 of the second line for j = 2i, of the third for j = 2i + 1; one, and what
            is above them, a line like the first, or two like these.
        scales: u8 [..., N, K/64].
        rows: bf16 [..., N].

    Encoding: scales are for the root mean square of their columns, bits of the least squared
    error, 16 rows at a time, the next 16 seen ahead.

    Attributes:
        bits: of a weight, 2 to 5.
    """

    bits: int

    turned: ClassVar = GROUP

    @property
    def name(self) -> str:
        """Canonical name: tcq<bits>."""
        return f"tcq{self.bits}"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = base.blocked_shape(self.name, shape, GROUP)
        return {
            "codes": Plane("u8", (*lead, -(-n // STRIP), k // UNIT, self.bits, 4 * STRIP)),
            "scales": Plane("u8", (*lead, n, k // GROUP)),
            "rows": Plane("bf16", (*lead, n)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        planes = {key: np.empty(p.shape, p.storage) for key, p in self.planes(values.shape).items()}
        base.require_finite(self.name, values)
        for rows, strips in self._pieces(values.shape):
            scales, numbers = self.scales_for(base.split(values[rows], GROUP))
            step = np.repeat(self.steps({"scales": scales, "rows": numbers}), GROUP, axis=-1)
            near = np.divide(values[rows], step, out=np.zeros_like(step), where=step > 0)
            planes["codes"][strips] = self.pack(*self._nearest(near))
            planes["scales"][rows], planes["rows"][rows] = scales, numbers
        return planes

    def _pieces(self, shape: Shape) -> Iterator[tuple[Any, Any]]:
        """Yield places of some rows of a matrix, and of their strips."""
        *lead, n, k = shape
        step = max(1, _PIECE // k // STRIP) * STRIP
        for matrix in np.ndindex(*lead):
            for start in range(0, n, step):
                strips = slice(start // STRIP, -(-min(n, start + step) // STRIP))
                yield (*matrix, slice(start, start + step)), (*matrix, strips)

    def drawn(self, shape: Shape, rng: "np.random.Generator", std: float) -> dict[str, np.ndarray]:
        """Return random planes, whose values have mean 0 and about this standard deviation."""
        planes = self.planes(shape)
        rows = np.full(planes["rows"].shape, std / DEVIATION[self.bits] / 128, np.float32)
        return {
            "codes": rng.integers(0, 256, planes["codes"].shape, np.uint8),
            "scales": rng.integers(96, 161, planes["scales"].shape, np.uint8),
            "rows": from_f32(rows, "bf16"),
        }

    def scales_for(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scales and rows for cells [N, K/64, 64], as they are stored.

        Raises FormatError if they are beyond the largest number.
        """
        power = np.einsum("...i,...i->...", cells, cells, dtype=np.float64) / GROUP
        ideal = np.sqrt(power) / DEVIATION[self.bits]
        most = ideal.max(axis=-1) / LARGEST_CODE
        if not most.max() < LARGEST["bf16"]:
            raise FormatError(f"{self.name}: values are beyond bf16 after the rotation")
        rows = from_f32(most.astype(np.float32), "bf16")
        unit = to_f32(rows, "bf16")[..., None]
        found = np.divide(ideal, unit, out=np.zeros_like(ideal), where=unit > 0)
        return np.clip(np.rint(found), 1, LARGEST_CODE).astype(np.uint8), rows

    def steps(self, planes: Planes) -> np.ndarray:
        """Return what levels are multiplied by, fp32 [..., N, K/64]."""
        return to_f32(planes["rows"], "bf16")[..., None] * planes["scales"].astype(np.float32)

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        values = np.empty(shape, np.float32)
        for rows, strips in self._pieces(shape):
            some = {key: planes[key][rows] for key in ("scales", "rows")}
            step = np.repeat(self.steps(some), GROUP, axis=-1)
            found = levels(self.bits)[self._indices(planes["codes"][strips])]
            # [strips, units, 16 rows, 4 columns, 8 bits] -> columns in order
            found = found.reshape(*found.shape[:2], STRIP, 4, 8).transpose(0, 2, 1, 4, 3)
            np.multiply(found.reshape(-1, shape[-1])[: len(step)], step, out=values[rows])
        return values

    def _indices(self, lines: np.ndarray) -> np.ndarray:
        """Return the places of levels, u8 [strips, units, 64 bytes, 8 bits]."""
        u = np.ascontiguousarray(lines[..., 0, :]).view("<u4")
        first, second, third = (self._before(u, lag) for lag in (1, 2, 3))
        index: np.ndarray = self._bits(second) | self._bits(u ^ first ^ third) << 1
        for place, (line, width) in self._fields().items():
            index |= self._read(lines, line, width) << place
        return index

    def pack(self, u: np.ndarray, m: np.ndarray) -> np.ndarray:
        """Return codes of bits u and numbers m, u8 [N, K] each, N a multiple of 16."""
        u, m = self._by_byte(u), self._by_byte(m)
        lines = [np.packbits(u, axis=-1, bitorder="little")[..., 0]]
        for place, (_, width) in self._fields().items():
            part = m >> place - 2 & (1 << width) - 1
            for first in range(width):
                own = part[..., first::width] << width * np.arange(8 // width, dtype=np.uint8)
                lines.append(np.bitwise_or.reduce(own, axis=-1))
        return np.ascontiguousarray(np.stack(lines, axis=-2))

    def check(self, planes: Planes, shape: Shape) -> None:
        base.check_scales(self.name, planes["rows"], "bf16")
        if np.any(planes["rows"] >> 15):
            raise FormatError(f"{self.name}: a negative number of a row; the file is damaged")

    def _fields(self) -> dict[int, tuple[int, int]]:
        """Return, by their place in an index, the bits of m: first line, how many together."""
        if self.bits == 2:
            return {2: (1, 1)}
        return {2: (1, 2)} | ({4: (3, self.bits - 3)} if self.bits > 3 else {})

    @staticmethod
    def _before(u: np.ndarray, lag: int) -> np.ndarray:
        """Return the bits `lag` before in the sequence, [..., 16] dwords."""
        found = np.roll(u, lag, axis=-1)
        found[..., :lag] <<= 1
        return found

    @staticmethod
    def _bits(dwords: np.ndarray) -> np.ndarray:
        """Return the bits of bytes, u8 [..., 64, 8]."""
        return dwords.view(np.uint8)[..., None] >> np.arange(8, dtype=np.uint8) & 1

    def _read(self, lines: np.ndarray, line: int, width: int) -> np.ndarray:
        """Return the numbers of a field, u8 [..., 64, 8]."""
        found = np.empty((*lines.shape[:-2], lines.shape[-1], 8), np.uint8)
        shifts = width * np.arange(8 // width, dtype=np.uint8)
        for first in range(width):
            own = lines[..., line + first, :, None] >> shifts
            found[..., first::width] = own & (1 << width) - 1
        return found

    @staticmethod
    def _by_byte(values: np.ndarray) -> np.ndarray:
        """Return [N, K] as [strips, units, 64 bytes, 8 bits]."""
        n, k = values.shape
        cut = values.reshape(n // STRIP, STRIP, k // UNIT, 8, 4).transpose(0, 2, 1, 4, 3)
        return cut.reshape(n // STRIP, k // UNIT, 4 * STRIP, 8)

    def _nearest(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return u and m of weights in units of levels [N, K], for N filled up to strips."""
        n, k = values.shape
        whole = np.zeros((-(-n // STRIP) * STRIP, k), np.float32)
        whole[:n] = values
        # [strips, units, 32 columns, 16 rows]: one after the other by step
        cut = whole.reshape(-1, STRIP, k // UNIT, UNIT)[..., COLUMNS].transpose(0, 2, 3, 1)
        steps = cut.reshape(-1, UNIT * STRIP).T
        state = np.zeros(steps.shape[1], np.intp)
        path = np.empty((2, *steps.shape), np.uint8)
        for start in range(0, len(steps), STRIP):
            ahead = steps[start : start + 2 * STRIP]
            path[:, start : start + STRIP], state = _viterbi(ahead, levels(self.bits), state)
        out = np.empty((2, len(cut), STRIP, k // UNIT, UNIT), np.uint8)
        out[..., COLUMNS] = path.swapaxes(1, 2).reshape(2, *cut.shape).transpose(0, 1, 4, 2, 3)
        u, m = out.reshape(2, *whole.shape)
        return u, m


def _viterbi(
    values: np.ndarray, table: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return u, m [2, 16, S] of the first 16 of up to 32 steps [T, S], and the states after."""
    count, (low, high) = values.shape[1], (np.arange(STATES // 2), np.arange(STATES // 2, STATES))
    first = first_subset()
    cost = np.full((count, STATES), np.inf, np.float32)
    cost[np.arange(count), state] = 0
    moves, chosen = [], []
    for x in values:
        each = np.square(x[:, None, None] - table.reshape(-1, 4).T)  # [S, z, m]
        best = each.argmin(axis=-1)
        least = np.take_along_axis(each, best[..., None], axis=-1)[..., 0]
        new, move = np.empty_like(cost), np.empty(cost.shape, bool)
        for bit in (0, 1):
            a, b = (cost[:, of] + least[:, first[of] ^ 2 * bit] for of in (low, high))
            move[:, bit::2], new[:, bit::2] = b < a, np.minimum(a, b)
        cost = new
        moves.append(move)
        chosen.append(best)
    at, rows = cost.argmin(axis=1), np.arange(count)
    path = np.empty((2, len(values), count), np.uint8)
    after = at
    for t in range(len(values) - 1, -1, -1):
        if t == STRIP - 1:
            after = at
        path[0, t] = at & 1
        before = (at >> 1) + STATES // 2 * moves[t][rows, at]
        path[1, t] = chosen[t][rows, first[before] ^ 2 * (at & 1)]
        at = before
    return path[:, :STRIP], after
