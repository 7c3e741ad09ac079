"""Let Triton's interpreter count to a scalar tensor, as `range(first, last)` in a kernel does.

It keeps scalars as arrays of one element, and NumPy 2.4 no longer turns those into an int by itself
(Triton 3.6 and before rely on it). Importing this module is enough.
"""

from typing import Any

from triton.runtime import interpreter

_patch = getattr(interpreter, "_patch_lang_tensor", None)


def _index(self: Any) -> int:
    return int(self.handle.data.item())


def _patch_with_index(tensor: Any, *scope: Any) -> None:
    _patch(tensor, *scope)
    if scope:
        scope[0].set_attr(tensor, "__index__", _index)
    else:  # Triton 3.4
        tensor.__index__ = _index


if _patch is not None:
    interpreter._patch_lang_tensor = _patch_with_index
