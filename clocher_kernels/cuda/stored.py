"""Matrices in device memory: for GEMMs (`Stored`), as rows of vectors (`Vectors`)."""

from dataclasses import dataclass
from typing import Any

import torch

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.prepack import VECTOR
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import BLOCK as FP8_BLOCK
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int4 import Int4
from clocher_kernels.formats.int8 import Int8
from clocher_kernels.formats.mxfp4 import BLOCK, Mxfp4
from clocher_kernels.formats.mxfp4 import BLOCK as MXFP4_BLOCK
from clocher_kernels.formats.ternary import Ternary


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [N, K] as GEMM kernels see it.

    `code` is "float", "int8", "e4m3", "e5m2", "int4", "mxfp4" or "ternary"; `data` [N, stride]
    holds elements of `per` weights. Scales (None for floats) and zero points are shared by `span`
    columns (0: the row) and `scale_rows` rows (if span is 0: 1 for a scale per row, 0 for a single
    one).
    """

    code: str
    data: torch.Tensor
    per: int
    scales: torch.Tensor | None
    span: int = 0
    scale_rows: int = 0
    zeros: torch.Tensor | None = None


def stored(w: DeviceTensor) -> Stored:
    """Describe a prepacked matrix in any dense format."""
    fmt, planes = w.format, w.planes
    if isinstance(fmt, Float):
        return Stored("float", planes["data"], 1, None)
    if isinstance(fmt, Ternary):
        return Stored("ternary", planes["codes"], 16, planes["scale"])
    if isinstance(fmt, Mxfp4):
        return Stored("mxfp4", planes["blocks"], 8, planes["scales"], MXFP4_BLOCK, 1)
    codes, scales = planes["codes"], planes["scales"]
    if isinstance(fmt, Fp8):
        if fmt.scope == "b128":
            return Stored(fmt.code_dtype, codes, 1, scales, FP8_BLOCK, FP8_BLOCK)
        if fmt.scope == "g128" and w.shape[1] > FP8_BLOCK:
            return Stored(fmt.code_dtype, codes, 1, scales, FP8_BLOCK, 1)
        return Stored(fmt.code_dtype, codes, 1, scales, 0, int(fmt.scope != "tensor"))
    assert isinstance(fmt, Int4 | Int8)
    code, per = ("int8", 1) if isinstance(fmt, Int8) else ("int4", 8)
    # A group as long as the row, or longer, is a row.
    span = fmt.group if isinstance(fmt.group, int) and fmt.group < w.shape[1] else 0
    return Stored(code, codes, per, scales, span, int(fmt.group != "tensor"), planes.get("zeros"))


@dataclass(frozen=True, slots=True)
class Vectors:
    """Weights [..., N, K] as the GEMV kernels see them.

    `words` are rows of whole vectors, each of `weights` weights in the format `kind`. `zeros` None:
    all are 8. `group` columns share a scale, 0: the row; `scale_rows` 0: the matrix has one scale.
    """

    kind: str
    weights: int
    words: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0
    scale_rows: int = 1

    def pairs(self, x: torch.Tensor, device: Device, *, alone: bool = False) -> str:
        """Return how weights meet fp16 activations in pairs, "" if they do not.

        "words": exact word by word. "blocks": a block's activations are scaled (`dots.vector_dot`);
        that pays where many rows share them, so for one token per program (`alone`). The results
        differ in bits.
        """
        if not device.asm or self.weights != 32 or x.dtype != torch.float16 or self.group % 8:
            return ""
        return "blocks" if alone and self.kind == "mxfp4" else "words"

    def given(self, x: torch.Tensor, device: Device, *, alone: bool = False) -> dict[str, Any]:
        """Return the arguments of `stream_rows`; see `pairs`."""
        format_ = {"FORMAT": self.kind, "WEIGHTS": self.weights, "GROUP": self.group}
        format_ |= {"SCALE_ROWS": self.scale_rows, "PAIRS": self.pairs(x, device, alone=alone)}
        return {"w": self.words, "scales": self.scales, "zeros": self.zeros, **format_}


def vectors_of(w: DeviceTensor) -> Vectors:
    """Return the vector view of prepacked weights; UnsupportedOp or ShapeError if there is none."""
    fmt, planes, k = w.format, w.planes, w.shape[-1]
    if isinstance(fmt, Mxfp4):
        return Vectors("mxfp4", 32, planes["blocks"], planes["scales"], group=BLOCK)
    if isinstance(fmt, Ternary):
        return Vectors("ternary", 64, planes["codes"], planes["scale"], scale_rows=0)
    if isinstance(fmt, Int4):
        group = _group(fmt.group, k)
        return Vectors("int4", 32, planes["codes"], planes["scales"], planes.get("zeros"), group)
    if isinstance(fmt, Float):
        data = planes["data"]
        whole = _whole_vectors(w, data)
        return Vectors(fmt.dtype, VECTOR // data.itemsize, whole)
    if isinstance(fmt, Int8) and (isinstance(fmt.group, str) or fmt.group % 2 == 0):
        group = _group(fmt.group, k)
        whole = _whole_vectors(w, planes["codes"])
        scale_rows = 0 if fmt.group == "tensor" else 1
        return Vectors("int8", 16, whole, planes["scales"], None, group, scale_rows)
    raise UnsupportedOp(
        f"experts in {fmt.name} have no CUDA kernel; expected mxfp4, a float type, int4, or int8 "
        "with even groups; convert them to one of these"
    )


def _group(group: int | str, k: int) -> int:
    return 0 if isinstance(group, str) or group >= k else group


def _whole_vectors(w: DeviceTensor, rows: torch.Tensor) -> torch.Tensor:
    if rows.shape[-1] * rows.itemsize % VECTOR:
        raise ShapeError(
            f"experts of shape {list(w.shape)} in {w.format.name}: rows of "
            f"{rows.shape[-1] * rows.itemsize} bytes; expected a multiple of {VECTOR} bytes; "
            "convert them to int4, which pads rows"
        )
    return rows.view(torch.int32)
