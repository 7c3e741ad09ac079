"""Op name -> the function that turns a call into launches; all of the back end's ops."""

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
"""The same for steps whose rows all have temperature 0."""
