"""ggml's quantised types, as GGUF files store them: rows of blocks, scales and codes together."""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import base
from clocher_kernels.formats.base import Format, Plane, Planes, Shape
from clocher_kernels.formats.ggml_blocks import KINDS

GGML_KINDS = tuple(KINDS)
"""Names of the types."""
TRIED_KINDS = tuple(kind for kind in KINDS if not kind.startswith(("iq1", "iq2")))
"""Those that every op is tried with."""

_PIECE = 1 << 14  # elements that are converted at a time


@dataclass(frozen=True, repr=False)
class Ggml(Format):
    """value = scale * code - minimum, the scale and the minimum of a run of 16 or 32 columns.

    Planes:
        blocks: u8 [..., N, K / block * bytes of a block], a row's blocks as ggml stores them, so a
            tensor of a GGUF file is a view of the file. Scales are f16 and must be finite; every
            code is allowed.

    | kind | block | bytes | codes | scale of a run | minimum |
    |---|---|---|---|---|---|
    | q4_k, q5_k | 256 | 144, 176 | 0..15, 0..31 | d * 6 bits, 32 columns | dmin * 6 bits |
    | q6_k | 256 | 210 | -32..31 | d * i8, 16 columns | |
    | q3_k | 256 | 110 | -4..3 | d * (-32..31), 16 columns | |
    | q2_k | 256 | 84 | 0..3 | d * 4 bits, 16 columns | dmin * 4 bits |
    | q4_1, q5_1 | 32 | 20, 24 | 0..15, 0..31 | d | -m |
    | q5_0 | 32 | 22 | -16..15 | d | |
    | iq4_nl | 32 | 18 | 16 of -127..113 | d | |
    | iq4_xs | 256 | 136 | 16 of -127..113 | d * (-32..31), 32 columns | |
    | iq3_s | 256 | 110 | fours of a grid of 512, signs | d * (1, 3 .. 31), 32 columns | |
    | iq3_xxs | 256 | 98 | fours of a grid of 256, signs | d * (1, 3 .. 31) / 4, 32 columns | |
    | iq2_xxs | 256 | 66 | eights of a grid of 256, signs | d * (1, 3 .. 31) / 8, 32 columns | |
    | iq2_xs, iq2_s | 256 | 74, 82 | of 512, of 1024 | d * (1, 3 .. 31) / 8, 16 columns | |
    | iq1_s | 256 | 50 | eights of a grid, plus or minus 1/8 | d * (1, 3 .. 15), 32 columns | |
    | tq1_0 | 256 | 54 | -1, 0, 1 | d | |

    `decode` equals gguf-py's `dequantize` bit for bit.

    They are read, not written: llama-quantize searches for the scales of least error, and rounding
    that does not would lose more than `int4`.

    Attributes:
        kind: lower case, as llama.cpp spells it: "q4_k".

    Source: ggml-common.h, ggml-quants.c.
    """

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FormatError(f"{self.kind!r} is no type of ggml; expected {', '.join(GGML_KINDS)}")

    @property
    def name(self) -> str:
        """Canonical name: the kind."""
        return self.kind

    @property
    def block(self) -> int:
        """Elements of a block."""
        return KINDS[self.kind].block

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return KINDS[self.kind].fields.itemsize

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = base.blocked_shape(self.name, shape, self.block)
        return {"blocks": Plane("u8", (*lead, n, k // self.block * self.block_bytes))}

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        raise FormatError(
            f"{self.name} is only read, not written; choose int4, int8, fp8 or mxfp4, or make a "
            "GGUF file of this type with llama-quantize"
        )

    def drawn(self, shape: Shape, rng: "np.random.Generator", std: float) -> dict[str, np.ndarray]:
        """Return random planes, whose values have mean 0 and about this standard deviation."""
        stored = rng.integers(0, 256, self.planes(shape)["blocks"].shape, np.uint8)
        blocks = self._blocks({"blocks": stored})
        for name in self._scales:
            blocks[name] = rng.standard_normal(len(blocks))
        sample = np.ascontiguousarray(blocks[:1024]).view(np.uint8)
        spread = self.decode(
            {"blocks": sample}, (len(sample) // self.block_bytes, self.block)
        ).std()
        for name in self._scales:
            blocks[name] *= np.float16(std / spread)
        return {"blocks": stored}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        blocks = self._blocks(planes)
        values = np.empty((len(blocks), self.block), np.float32)
        step = _PIECE // self.block
        for start in range(0, len(blocks), step):
            piece = slice(start, start + step)
            scales, codes, minima = KINDS[self.kind].unpack(blocks[piece])
            runs = values[piece].reshape(codes.shape)
            np.multiply(scales[..., None], codes, out=runs)
            if minima is not None:
                runs -= minima[..., None]
        return values.reshape(shape)

    def check(self, planes: Planes, shape: Shape) -> None:
        blocks = self._blocks(planes)
        for name in self._scales:
            base.check_scales(f"{self.name} {name}", blocks[name], "f16")

    @property
    def _scales(self) -> list[str]:
        fields = KINDS[self.kind].fields
        return [name for name in fields.names or () if fields[name] == np.float16]

    def _blocks(self, planes: Planes) -> np.ndarray:
        blocks = np.ascontiguousarray(planes["blocks"]).reshape(-1, self.block_bytes)
        return blocks.view(KINDS[self.kind].fields)[:, 0]
