"""How matrices lie in device memory: for GEMMs (`Stored`), as rows of vectors (`Vectors`)."""

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


@dataclass(frozen=True, slots=True)
class Vectors:
    """Weights [..., N, K] as the kernels see them.

    Attributes:
        kind: the format in `dots.vector_dot`.
        weights: weights of a vector.
        words: the rows as 32-bit words, whole vectors each.
        scales: the scales; None if there are none.
        zeros: int4's zero points; None if all are 8.
        group: columns that share a scale; 0 if whole rows do.
        scale_rows: 1 if each row has its own scales, 0 if a matrix has one scale.
    """

    kind: str
    weights: int
    words: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0
    scale_rows: int = 1

    def pairs(self, x: torch.Tensor, device: Device, *, alone: bool = False) -> str:
        """Return how weights are multiplied by fp16 activations in pairs, "" if they are not.

        "words": weights are made exact word by word. "blocks": a block's activations are scaled,
        see `dots.vector_dot`; that pays where many rows share them, so where a program never has
        more than one token (`alone`). The two ways differ in bits.
        """
        if not device.asm or self.weights != 32 or x.dtype != torch.float16 or self.group % 8:
            return ""
        return "blocks" if alone and self.kind == "mxfp4" else "words"

    def given(self, x: torch.Tensor, device: Device, *, alone: bool = False) -> dict[str, Any]:
        """Return what `stream_rows` takes of a launch; see `pairs`."""
        format_ = {"FORMAT": self.kind, "WEIGHTS": self.weights, "GROUP": self.group}
        format_ |= {"SCALE_ROWS": self.scale_rows, "PAIRS": self.pairs(x, device, alone=alone)}
        return {"w": self.words, "scales": self.scales, "zeros": self.zeros, **format_}


def vectors_of(w: DeviceTensor) -> Vectors:
    """Return the kernels' view of prepacked weights.

    Raises:
        UnsupportedOp: the format has no such view.
        ShapeError: rows are no whole vectors.
    """
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
    """Return the columns that share a scale, 0 if a row has just one."""
    return 0 if isinstance(group, str) or group >= k else group


def _whole_vectors(w: DeviceTensor, rows: torch.Tensor) -> torch.Tensor:
    if rows.shape[-1] * rows.itemsize % VECTOR:
        raise ShapeError(
            f"experts of shape {list(w.shape)} in {w.format.name}: rows of "
            f"{rows.shape[-1] * rows.itemsize} bytes; expected a multiple of {VECTOR} bytes; "
            "convert them to int4, which pads rows"
        )
    return rows.view(torch.int32)
