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

_BYTES = np.arange(256)
_PAIRS = np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], axis=1)


@dataclass(frozen=True, repr=False)
class Mxfp4(Format):
    """value = e2m1(code) * 2^(scale - 127); e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 the sign.

    Planes:
        blocks: u8 [..., N, K/32, 16]; byte b holds element 2b in its low nibble, 2b+1 in its high.
        scales: e8m0 [..., N, K/32]; 255 (NaN) is forbidden.

    Encoding (OCP section 6.3): the exponent of the scale is floor(log2(absmax)) - 2; codes are the
    nearest, ties to even, saturating at 6, and keep the sign of values that round to zero. The
    error of an element is at most 2 scales. A zero block gets scale 1 (code 127).
    """

    @property
    def name(self) -> str:
        """Canonical name: "mxfp4"."""
        return "mxfp4"

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
        scaling.require_finite(self.name, values)
        cells = scaling.split(values, BLOCK)
        largest = scaling.absmax(cells)
        # frexp: absmax = m * 2^e with m in [1/2, 1), so floor(log2(absmax)) = e - 1.
        exponent = np.frexp(largest)[1] - 3
        exponent = np.where(largest == 0, 0, np.maximum(exponent, -127))
        codes = encode_e2m1(np.ldexp(cells, -exponent[..., None]))
        return {
            "blocks": codes[..., 0::2] | codes[..., 1::2] << 4,
            "scales": (exponent + 127).astype(np.uint8),
        }

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
