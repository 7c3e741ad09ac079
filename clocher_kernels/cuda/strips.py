"""Trellises (`tcq`) as kernels read them: rows of their own, of whole strips.

Codes are i32 [..., N, W], N a multiple of 16 and W = K / 32 bits: of each 64 columns of a row the
two words of line after line. Of rows and scales there are only as many as a matrix has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from clocher_kernels.errors import ShapeError
from clocher_kernels.formats.tcq import STRIP, Tcq


def to_rows(fmt: Tcq, planes: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Rearrange planes; ShapeError for experts with odd strips, whose rows would be elsewhere."""
    if len(shape) > 2 and shape[-2] % STRIP:
        raise ShapeError(
            f"experts of shape {list(shape)} in {fmt.name}: {shape[-2]} rows; expected a multiple "
            f"of {STRIP}; convert them to int4"
        )
    # [..., strips, groups, 2 units, bits, 16 rows]
    lines = planes["codes"].view(torch.int32).unflatten(-3, (-1, 2))
    words = lines.movedim(-1, -4).transpose(-1, -2).flatten(-3).flatten(-3, -2)
    return {**planes, "codes": words.contiguous()}
