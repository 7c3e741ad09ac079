"""All ops of the back end: name -> function that lowers a call to launches."""

from collections.abc import Callable
from typing import Any, Never

from clocher_kernels.cuda import (
    attention,
    bsr,
    elementwise,
    kv,
    linear,
    moe,
    quantize,
    sampling,
    selection,
)
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.errors import UnsupportedOp


def _drop_small(**arguments: Any) -> Never:
    raise UnsupportedOp("drop_small: no CUDA kernel drops activations; keep them all, in 16-bit")


LOWER: dict[str, Callable[..., list[Launch]]] = {
    **elementwise.LOWER,
    **linear.LOWER,
    **quantize.LOWER,
    **moe.LOWER,
    **bsr.LOWER,
    **kv.LOWER,
    **selection.LOWER,
    **attention.LOWER,
    **sampling.LOWER,
    "drop_small": _drop_small,
}
LOWER_GREEDY = {**LOWER, **sampling.LOWER_GREEDY}
"""The same for steps with only greedy rows."""
