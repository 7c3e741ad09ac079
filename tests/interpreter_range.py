"""Let Triton's interpreter count to a scalar tensor: `range(first, last)` in a kernel.

It keeps scalars as arrays of one element, and NumPy 2.4 no longer turns those into an int by
itself (Triton 3.6 and before rely on it). Importing this module is enough.
"""

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
