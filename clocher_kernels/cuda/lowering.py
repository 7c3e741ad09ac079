"""Op name -> the function that turns a call into launches; all of the back end's ops."""

from collections.abc import Callable

from clocher_kernels.cuda import (
    advance,
    attention,
    bsr,
    elementwise,
    heads,
    kv,
    linear,
    moe,
    route,
    sampling,
    ternary,
)
from clocher_kernels.cuda.launch import Launch

LOWER: dict[str, Callable[..., list[Launch]]] = {
    **elementwise.LOWER,
    **heads.LOWER,
    **linear.LOWER,
    **ternary.LOWER,
    **route.LOWER,
    **moe.LOWER,
    **bsr.LOWER,
    **kv.LOWER,
    **attention.LOWER,
    **sampling.LOWER,
    **advance.LOWER,
}
LOWER_GREEDY = {**LOWER, **sampling.LOWER_GREEDY}
"""The same for steps whose rows all have temperature 0."""
