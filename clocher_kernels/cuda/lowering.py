"""Op name -> the function that turns a call into launches; all of the back end's ops."""

from collections.abc import Callable

from clocher_kernels.cuda import elementwise
from clocher_kernels.cuda.launch import Launch

LOWER: dict[str, Callable[..., list[Launch]]] = {
    **elementwise.LOWER,
}
