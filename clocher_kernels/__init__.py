"""Shared by all back ends: errors, formats, op table with NumPy references, Plan, `linear`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clocher_kernels.library import linear, quantize

__all__ = ["__version__", "linear", "quantize"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `quantize` and `linear`, which need Numba, on first use."""
    if name in ("linear", "quantize"):
        from clocher_kernels import library

        return getattr(library, name)
    raise AttributeError(f"module 'clocher_kernels' has no attribute {name!r}")
