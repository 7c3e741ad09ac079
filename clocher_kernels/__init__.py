"""Shared by all back ends: errors, formats, the op table with its NumPy references, the Plan.

`quantize` and `linear` take NumPy arrays; `clocher_kernels.torch` has the same for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clocher_kernels.library.arrays import linear, quantize

__all__ = ["__version__", "linear", "quantize"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `quantize` and `linear`, which need Numba, on first use."""
    if name in ("linear", "quantize"):
        from clocher_kernels.library import arrays

        return getattr(arrays, name)
    raise AttributeError(f"module 'clocher_kernels' has no attribute {name!r}")
