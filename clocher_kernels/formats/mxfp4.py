"""MXFP4: 32 FP4 values and one power-of-two scale, in the layout of the Hugging Face gpt-oss files.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2, 5.3.3 and 6.3.
"""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import E2M1_VALUES, encode_e2m1, look_up, to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats import scaling
from clocher_kernels.formats.base import Format, Plane, Planes, Shape

BLOCK = 32

_PIECE = 1 << 15
# Exponents of a scale; 6 * 2^126 is beyond fp32.
_LEAST, _MOST = -127, 125
_BYTES = np.arange(256)
_PAIRS = np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], axis=1)


@dataclass(frozen=True, repr=False)
class Mxfp4(Format):
    """value = e2m1(code) * 2^(scale - 127); e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 the sign.

    Planes:
        blocks: u8 [..., N, K/32, 16]; byte b holds element 2b in its low nibble, 2b+1 in its high.
        scales: e8m0 [..., N, K/32]; 255 (NaN) is forbidden.

    Encoding: the exponent of the scale is e = floor(log2(absmax)) - 2 (OCP section 6.3), or e - 1
    or e + 1 if the squared error of the block is less with it; codes are the nearest, ties to even,
    saturating at 6, and keep the sign of values that round to zero. The error of an element is at
    most 3 scales. A zero block gets scale 1 (code 127).
    """

    @property
    def name(self) -> str:
        """Canonical name: "mxfp4"."""
        return "mxfp4"

    @property
    def unit(self) -> tuple[int, int]:
        return 1, BLOCK

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = scaling.matrix_shape(self.name, shape)
        if k % BLOCK:
            raise ShapeError(
                f"{self.name}: K = {k} of shape {list(shape)}; expected a multiple of {BLOCK}; "
                "keep this tensor in another format"
            )
        return {
            "blocks": Plane("u8", (*lead, n, k // BLOCK, BLOCK // 2)),
            "scales": Plane("e8m0", (*lead, n, k // BLOCK)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        self.planes(values.shape)
        return self.encode_weighted(values, np.ones(values.shape[-1], np.float32))

    def encode_weighted(self, values: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Encode as `encode` does, a squared error counting `weights` [K] times, by its column."""
        planes = {key: np.empty(p.shape, p.storage) for key, p in self.planes(values.shape).items()}
        scaling.require_finite(self.name, values)
        rows, groups = values.reshape(-1, values.shape[-1]), values.shape[-1] // BLOCK
        blocks = planes["blocks"].reshape(len(rows), groups, -1)
        scales = planes["scales"].reshape(len(rows), groups)
        step = max(1, _PIECE // values.shape[-1])
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            cells = scaling.split(rows[piece], BLOCK)
            exponent = _exponents(cells, weights.reshape(groups, BLOCK))
            codes = encode_e2m1(np.ldexp(cells, -exponent[..., None]))
            blocks[piece] = codes[..., 0::2] | codes[..., 1::2] << 4
            scales[piece] = exponent + 127
        return planes

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        cells = look_up(_PAIRS, planes["blocks"]).reshape(*planes["scales"].shape, BLOCK)
        with np.errstate(over="ignore"):
            cells *= to_f32(planes["scales"], "e8m0")[..., None]
        return cells.reshape(shape)

    def check(self, planes: Planes, shape: Shape) -> None:
        if planes["scales"].max() == 255:
            raise FormatError(
                f"{self.name}: a scale code of 255 (NaN); expected 0..254; the file is damaged"
            )


def _exponents(cells: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the exponent of least weighted squared error of each block [..., 32], i32 [...]."""
    largest = scaling.absmax(cells)
    # frexp: absmax = m * 2^e with m in [1/2, 1), so floor(log2(absmax)) = e - 1.
    floor = np.where(largest == 0, 0, np.maximum(np.frexp(largest)[1] - 3, _LEAST))
    scaled = np.abs(np.ldexp(cells, -floor[..., None]))
    chosen, least = floor, np.full(floor.shape, np.inf)
    for offset in (0, -1, 1):
        wrong = _rounded(scaled * np.float32(2.0**-offset)) * np.float32(2.0**offset) - scaled
        wrong *= wrong
        error = np.einsum("...i,...i->...", wrong, np.broadcast_to(weights, wrong.shape))
        allowed = (floor + offset >= _LEAST) & (floor + offset <= _MOST) & (largest > 0)
        better = (error < least) & (allowed | (offset == 0))
        least = np.where(better, error, least)
        chosen = np.where(better, floor + offset, chosen)
    return np.asarray(chosen, np.int32)


def _rounded(magnitudes: np.ndarray) -> np.ndarray:
    """Return the nearest values of e2m1, ties to even, saturating."""
    step = np.where(magnitudes < 2, np.float32(0.5), np.float32(1))
    step[magnitudes >= 4] = 2
    out = np.rint(magnitudes / step)
    out *= step
    return np.minimum(out, np.float32(6), out=out)
