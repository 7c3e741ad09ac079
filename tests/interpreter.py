"""Importing this lets Triton's interpreter count to a scalar tensor, and prepare itself once.

It keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int (Triton 3.6
and before rely on it): `range(first, last)` in a kernel would fail. And at each call of a device
function it goes through all of `triton.language`, which takes half of its time.

Matrix products are summed in fp64: BLAS has another order for each number of columns, a GPU not.
"""

from typing import Any

import numpy as np
from triton.runtime import interpreter

_patch = getattr(interpreter, "_patch_lang_tensor", None)


def _patch_with_index(tensor: Any, *scope: Any) -> None:
    def index(self: Any) -> int:
        return int(self.handle.data.item())

    _patch(tensor, *scope)
    if scope:
        scope[0].set_attr(tensor, "__index__", index)
    else:  # Triton 3.4
        tensor.__index__ = index


_patch_lang = interpreter._patch_lang
_prepared: set[str] = set()


def _patch_lang_once(function: Any) -> Any:
    if function.__module__ not in _prepared:
        _prepared.add(function.__module__)
        _patch_lang(function)
    return interpreter._LangPatchScope()


if _patch is not None:
    interpreter._patch_lang_tensor = _patch_with_index
if hasattr(interpreter, "_LangPatchScope"):  # not in Triton 3.4
    interpreter._patch_lang = _patch_lang_once


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot
