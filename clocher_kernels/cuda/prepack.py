"""Rearrange stored planes into the layout that the kernels read, on the device, at load.

Kernels read rows of whole 16-byte vectors, K contiguous, as 32-bit words:

    int4     codes  i32 [..., N, W], W = ceil(K / 32) * 4. Element 2p + h of a word's 8 is the
                    nibble at bit 4p + 16h, so one mask leaves the pair (2p, 2p + 1) in the two
                    halves. Some matrices then lie in `bricks`, as some of bf16 do.
    mxfp4    blocks i32 [..., N, K / 8]. In half h of a word, elements h, 2 + h, 4 + h and 6 + h
                    have their three bits of magnitude from bits 9, 1, 12 and 4 up, and their signs
                    in bits 15, 7, 8 and 0. Bits 11..9 and 15 are where fp16 has the magnitude and
                    the sign; two shifts bring the last two elements to where the first two are.
    ternary  codes  i32 [N, W], W = ceil(K / 64) * 4. Element 4g + b of a word's 16 is the two bits
                    at 8b + 2g, so one mask leaves the bytes of a 4-way integer dot product.
             scale  f32 [1], what a digit is multiplied by, also where the format stores its
                    inverse.
    ggml     codes  i32 [..., N, W]: int4's words of the codes' lower four bits. Of int5 and int6
                    words of the bits above follow: where an int4 word has a nibble, one of these
                    has those bits of four or two words side by side, the first one's lowest.
             scales [..., N, S]: f16 of a run of 32 columns, or i32, the halves its scale and
                    minimum; of a block of 256 columns i8, d in two and a factor for each run, or
                    i16, d, dmin and both factors of each run. A value is scale * code - minimum,
                    without minima scale * (code - 8, 16 or 32).
    tcq      codes  i32 [..., N, W], see `bricks`.
    bsr      codes  i32 [nnzb, R, W] if the blocks are int4, words as those of int4. Up to 16
                    columns are two words; W is a multiple of four beyond.

Rows that are not whole vectors get zeros; all but ggml's stay in place. Others are as stored.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clocher_kernels.cuda.bricks import BRICK_ROWS, BRICK_WORDS, in_bricks, to_bricks, to_rows
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.floats import FP8_BLOCK, MXFP4_BLOCK, Float, Fp8, Mxfp4
from clocher_kernels.formats.ggml import Ggml
from clocher_kernels.formats.ggml_blocks import KINDS, Kind, Numbers
from clocher_kernels.formats.integers import Int4, Int8
from clocher_kernels.formats.tcq import GROUP, Tcq
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.quant_tensor import QuantTensor

if TYPE_CHECKING:  # its Triton is not needed here
    from clocher_kernels.cuda.launch import Device

# fp8 and e8m0 codes travel as bytes: what they mean is the kernel's business, on every
# architecture alike.
TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "e4m3": torch.uint8,
    "e5m2": torch.uint8,
    "e8m0": torch.uint8,
    "i32": torch.int32,
    "u32": torch.int32,
    "u64": torch.int64,
    "i64": torch.int64,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTensor:
    """A QuantTensor on the device; planes that `prepack` rearranges have the kernels' layout."""

    shape: tuple[int, ...]
    format: Format
    planes: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())

    def rows_of(self, plane: str) -> int:
        """Return how many rows of the matrix share the first index of a plane."""
        together = in_bricks(self.format, self.shape) and self.planes[plane].ndim == 3
        return BRICK_ROWS if together else 1


def as_torch(array: np.ndarray, dtype: str) -> Tensor:
    """View a NumPy array as torch type `dtype`, on the CPU, without a copy."""
    array = np.ascontiguousarray(array)
    if dtype in ("bf16", "f16"):
        array = array.view(np.int16)
    elif dtype in ("u32", "u64"):
        array = array.view(f"i{array.itemsize}")
    with warnings.catch_warnings():
        # torch has no read-only tensors; the view of a mapped file is never written.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(TORCH_DTYPES[dtype])


def planes_as_torch(tensor: QuantTensor) -> dict[str, Tensor]:
    """View a tensor's planes as torch tensors on the CPU, without a copy."""
    expected = tensor.format.planes(tensor.shape)
    return {name: as_torch(tensor.planes[name], p.dtype) for name, p in expected.items()}


Planes = dict[str, Tensor]

VECTOR = 16
"""Bytes that a lane loads at once; packed rows are whole vectors."""

# Words changed at a time: at most 8 temporaries of this size, 64 MB.
_PIECE = 1 << 21


def prepack(tensor: QuantTensor, device: "Device") -> DeviceTensor:
    """Copy a stored tensor to the device and rearrange its planes there."""
    planes = {
        name: plane.to(device.torch_device, copy=True)
        for name, plane in planes_as_torch(tensor).items()
    }
    return rearrange(tensor.format, tensor.shape, planes)


def rearrange(fmt: Format, shape: tuple[int, ...], planes: Planes) -> DeviceTensor:
    """Rearrange planes on the device, partly in place; UnsupportedOp if no kernel reads them."""
    change = REARRANGE.get(type(fmt))
    return DeviceTensor(shape, fmt, planes if change is None else change(fmt, planes, shape))


def _int4(fmt: Int4, planes: Planes, shape: tuple[int, ...]) -> Planes:
    words = _whole_vectors(planes["codes"])
    for piece in words.view(-1).split(_PIECE):
        piece.copy_(_pair_nibbles(piece))
    packed = {**planes, "codes": words}
    return to_bricks(packed, shape) if in_bricks(fmt, shape) else packed


def _float(fmt: Float, planes: Planes, shape: tuple[int, ...]) -> Planes:
    return to_bricks(planes, shape) if in_bricks(fmt, shape) else planes


def _mxfp4(fmt: Mxfp4, planes: Planes, shape: tuple[int, ...]) -> Planes:
    words = planes["blocks"].flatten(-2).view(torch.int32)
    for piece in words.view(-1).split(_PIECE):
        piece.copy_(_fp16_bits(_pair_nibbles(piece)))
    return {**planes, "blocks": words}


def _ggml(fmt: Ggml, planes: Planes, shape: tuple[int, ...]) -> Planes:
    kind = KINDS[fmt.kind]
    if kind.above is None:
        raise UnsupportedOp(
            f"no CUDA kernel reads ggml's blocks of {fmt.name}; take the CPU back end, or write "
            "the model in a format of Clocher: clocher quantize MODEL OUT_DIR --requantize"
        )
    rows, k = planes["blocks"].flatten(0, -2), shape[-1]
    out, step = dict[str, Tensor](), max(1, 8 * _PIECE // k)
    for start in range(0, len(rows), step):
        raw = rows[start : start + step].reshape(-1, fmt.block_bytes)
        numbers = _numbers(kind.codes, raw).view(-1, k)
        words = [_words(numbers & 15)]
        if kind.above:
            beside = 4 // kind.above  # words whose upper bits share one
            parts = _words(numbers >> 4).view(len(numbers), -1, beside).unbind(2)
            shifted = [part << kind.above * i for i, part in enumerate(parts)]
            words.append(reduce(torch.bitwise_or, shifted))
        codes = _whole_vectors(torch.cat(words, 1).view(torch.uint8))
        made = {"codes": codes, "scales": _scales(kind, raw).view(len(codes), -1)}
        for name, part in made.items():
            if start == 0:
                out[name] = part.new_empty((len(rows), part.shape[1]))
            out[name][start : start + step] = part
    return {name: plane.unflatten(0, shape[:-1]) for name, plane in out.items()}


def _numbers(numbers: Numbers, raw: Tensor) -> Tensor:
    """Return numbers u8 [blocks, count] of blocks u8 [blocks, bytes], as `read_numbers` does."""
    parts = []
    for planes in numbers:
        found = []
        for p in planes:
            cells = raw[:, p.at : p.at + p.nbytes].unflatten(1, (-1, p.span or p.nbytes))
            bits = torch.stack([cells >> shift & p.mask for shift in p.shifts], 2)
            found.append(bits.flatten(1) << p.to)
        parts.append(reduce(torch.bitwise_or, found))
    return torch.cat(parts, 1)


def _words(nibbles: Tensor) -> Tensor:
    """Pack nibbles u8 [rows, K] as int4's words, i32 [rows, K / 8]."""
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return _pair_nibbles(packed.contiguous().view(torch.int32))


def _scales(kind: Kind, raw: Tensor) -> Tensor:
    """Return the scales of blocks u8 [blocks, bytes]; see the module's docstring."""
    names = ["d", kind.low] if kind.low else ["d"]
    heads = [raw[:, kind.at(name) : kind.at(name) + 2] for name in names]
    if not kind.scales:
        if kind.low:
            heads[1] = heads[1] ^ torch.tensor([0, 0x80], dtype=torch.uint8, device=raw.device)
        return torch.cat(heads, 1).view(torch.int32 if kind.low else torch.float16)
    factors = [_numbers(kind.scales, raw) - kind.scale_bias]
    if kind.low:
        factors.append(_numbers(kind.minima, raw))
    both = torch.cat([*heads, torch.stack(factors, 2).flatten(1)], 1)
    return both.view(torch.int16 if kind.low else torch.int8)


def _ternary(fmt: Ternary, planes: Planes, shape: tuple[int, ...]) -> Planes:
    packed = planes["codes"]
    quarter, k = packed.shape
    width = -(-k // (4 * VECTOR)) * VECTOR
    out = torch.empty((4, quarter, width), dtype=torch.uint8, device=packed.device)
    step = max(1, _PIECE // k)
    for start in range(0, quarter, step):
        rows = packed[start : start + step]
        codes = torch.zeros((len(rows), width * 4), dtype=torch.uint8, device=packed.device)
        for i in range(4):
            codes[:, :k] = rows >> 2 * i & 3
            g0, g1, g2, g3 = codes.view(len(rows), width // 4, 4, 4).unbind(2)
            out[i, start : start + step] = (g0 | g1 << 2 | g2 << 4 | g3 << 6).flatten(1)
    scale = planes["scale"].to(torch.float32)
    return {
        "codes": out.view(4 * quarter, width).view(torch.int32),
        "scale": scale.reciprocal() if fmt.inverse else scale,
    }


def _bsr(fmt: Bsr, planes: Planes, shape: tuple[int, ...]) -> Planes:
    if fmt.inner != "int4":
        return planes
    width = VECTOR // 2 if fmt.block[1] <= VECTOR else VECTOR
    # Padding beside a block meets activations, so it must decode to zero: code 8.
    words = _whole_vectors(planes["codes"], width, 0x88)
    for piece in words.view(-1).split(_PIECE):
        piece.copy_(_pair_nibbles(piece))
    return {**planes, "codes": words}


REARRANGE: dict[type[Format], Callable[[Any, Planes, tuple[int, ...]], Planes]] = {
    Float: _float,
    Int4: _int4,
    Mxfp4: _mxfp4,
    Ternary: _ternary,
    Bsr: _bsr,
    Ggml: _ggml,
    Tcq: to_rows,
}
"""Format class -> rearrangement of its planes; other formats are read as stored."""


def _whole_vectors(rows: Tensor, width: int = VECTOR, fill: int = 0) -> Tensor:
    """View bytes [..., B] as words, with rows padded to whole vectors of `width` bytes."""
    missing = -rows.shape[-1] % width
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=fill)
    return rows.view(torch.int32)


def _pair_nibbles(words: Tensor) -> Tensor:
    """Move nibble 2p + h of each word to bit 4p + 16h."""
    even, odd = words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F
    for nibbles in (even, odd):
        nibbles |= nibbles >> 4
        nibbles &= 0x00FF00FF
        nibbles |= nibbles >> 8
        nibbles &= 0x0000FFFF
    odd <<= 16
    return even.bitwise_or_(odd)


def _fp16_bits(words: Tensor) -> Tensor:
    """Spread the four nibbles of each half to the places that the kernels' masks expect."""
    # (shift left, result bits); negative shifts go right.
    moves = (
        (12, 0x8000),
        (4, 0x7000),
        (9, 0x0E00),
        (-3, 0x010E),
        (0, 0x0080),
        (-8, 0x0070),
        (-15, 0x0001),
    )
    out = torch.zeros_like(words)
    for left, mask in moves:
        moved = words << left if left > 0 else words >> -left
        both = mask | mask << 16
        out |= moved.bitwise_and_(both - (1 << 32) if both >> 31 else both)
    return out


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [N, K] as kernels see it, or experts [E, N, K].

    `code` is "float", "int8", "e4m3", "e5m2", "int4" to "int6", "mxfp4", "ternary" or "tcq2" to
    "tcq5", for `vectors_of` a float's type; `data` [..., N, stride] holds elements of `per`
    weights. Scales (None for floats) and zero points (None: the middle code) are shared by `span`
    columns (0: the row) and `scale_rows` rows (if span is 0: 1 for a scale per row, 0 for a single
    one). Of trellises scales are the rows', and `zeros` are the scales of groups. `bricks`:
    see `in_bricks`.
    """

    code: str
    data: Tensor
    per: int
    scales: Tensor | None
    span: int = 0
    scale_rows: int = 0
    zeros: Tensor | None = None
    bricks: bool = False

    @property
    def vector(self) -> int:
        """Weights that a lane loads at once."""
        return VECTOR // self.data.itemsize * self.per

    def pairs(self, x: Tensor, device: "Device", *, alone: bool = False) -> str:
        """Return how weights meet fp16 activations in pairs, "" if they do not.

        "words": exact word by word. "blocks": a block's activations are scaled (`dots.vector_dot`);
        that pays where many rows share them, so for one token per program (`alone`). The results
        differ in bits.
        """
        packed = self.vector == 32 or self.code.startswith("tcq")
        if not (packed and device.asm) or x.dtype != torch.float16 or self.span % 8:
            return ""
        return "blocks" if alone and self.code == "mxfp4" else "words"

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of kernels that read it."""
        tensors = {"w": self.data, "scales": self.scales, "zeros": self.zeros}
        kind = {"CODE": self.code, "ABOVE": {"int5": 1, "int6": 2}.get(self.code, 0)}
        stride = self.data[0].numel() // BRICK_ROWS if self.bricks else self.data.shape[-1]
        kind["BITS"] = int(self.code[3:]) if self.code.startswith("tcq") else 0
        sizes = {"PER": self.per, "WEIGHTS": self.vector, "STRIDE": stride}
        # A row's elements of a brick, 0 without bricks.
        sizes["BRICK"] = 4 * BRICK_WORDS // self.data.itemsize if self.bricks else 0
        return {**tensors, **kind, **sizes, "SPAN": self.span, "SCALE_ROWS": self.scale_rows}


def stored(w: DeviceTensor) -> Stored:
    """Describe prepacked weights in any dense format."""
    fmt, planes = w.format, w.planes
    if isinstance(fmt, Float):
        return Stored("float", planes["data"], 1, None, bricks=in_bricks(fmt, w.shape))
    if isinstance(fmt, Ternary):
        scale = planes["scale"]  # that of each row where matrices are stacked
        return Stored("ternary", planes["codes"], 16, scale, 0, int(scale.numel() > 1))
    if isinstance(fmt, Mxfp4):
        return Stored("mxfp4", planes["blocks"], 8, planes["scales"], MXFP4_BLOCK, 1)
    codes, scales = planes["codes"], planes["scales"]
    if isinstance(fmt, Tcq):
        return Stored(fmt.name, codes, GROUP // 4, planes["rows"], 0, 1, scales)
    if isinstance(fmt, Ggml):
        kind = KINDS[fmt.kind]
        return Stored(f"int{4 + (kind.above or 0)}", codes, 8, scales, kind.run, 1)
    if isinstance(fmt, Fp8):
        if fmt.scope == "b128":
            return Stored(fmt.code_dtype, codes, 1, scales, FP8_BLOCK, FP8_BLOCK)
        if fmt.scope == "g128" and w.shape[-1] > FP8_BLOCK:
            return Stored(fmt.code_dtype, codes, 1, scales, FP8_BLOCK, 1)
        return Stored(fmt.code_dtype, codes, 1, scales, 0, int(fmt.scope != "tensor"))
    assert isinstance(fmt, Int4 | Int8)
    code, per = ("int8", 1) if isinstance(fmt, Int8) else ("int4", 8)
    # A group as long as the row, or longer, is a row.
    span = fmt.group if isinstance(fmt.group, int) and fmt.group < w.shape[-1] else 0
    zeros, bricks = planes.get("zeros"), in_bricks(fmt, w.shape)
    return Stored(code, codes, per, scales, span, int(fmt.group != "tensor"), zeros, bricks)


def vectors_of(w: DeviceTensor) -> Stored:
    """Describe prepacked weights as words of whole vectors; UnsupportedOp, ShapeError if none."""
    fmt = w.format
    odd = isinstance(fmt, Int8) and isinstance(fmt.group, int) and fmt.group % 2 == 1
    if odd or not isinstance(fmt, Mxfp4 | Ternary | Float | Int4 | Int8 | Ggml | Tcq):
        raise UnsupportedOp(
            f"experts in {fmt.name} have no CUDA kernel; expected mxfp4, a float type, int4, "
            "tcq, ggml's blocks, or int8 with even groups; convert them to one of these"
        )
    held = stored(w)
    if isinstance(fmt, Tcq):
        return held
    size = held.data.itemsize
    nbytes = held.data.shape[-1] * size
    if nbytes % VECTOR:
        raise ShapeError(
            f"experts of shape {list(w.shape)} in {fmt.name}: rows of {nbytes} bytes; expected a "
            f"multiple of {VECTOR} bytes; convert them to int4, which pads rows"
        )
    code = fmt.dtype if isinstance(fmt, Float) else held.code
    return replace(held, code=code, data=held.data.view(torch.int32), per=held.per * 4 // size)
