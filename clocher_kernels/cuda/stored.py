"""How dense matrices lie in device memory: what a matrix kernel needs to know of a format."""

from dataclasses import dataclass

import torch

from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import BLOCK as FP8_BLOCK
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int4 import Int4
from clocher_kernels.formats.int8 import Int8
from clocher_kernels.formats.mxfp4 import BLOCK as MXFP4_BLOCK
from clocher_kernels.formats.mxfp4 import Mxfp4
from clocher_kernels.formats.ternary import Ternary


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [N, K] as kernels see it.

    Attributes:
        code: "float", "int8", "e4m3", "e5m2", "int4", "mxfp4" or "ternary".
        data: [N, stride] elements.
        per: weights of an element: 1, or those of a prepacked word.
        scales: None for floats.
        span: columns that share a scale; 0: all of a row.
        scale_rows: rows that share a scale if span > 0; else 1 for a scale per row, 0 for one.
        zeros: zero points in the places of the scales, or None.
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
