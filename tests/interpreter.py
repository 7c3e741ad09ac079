"""Importing this lets Triton's interpreter count to a scalar tensor, and saves most of its time.

It keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int (Triton 3.6
and before rely on it): `range(first, last)` in a kernel would fail.

Its time went where no number is computed. At each call of a device function it goes through all of
`triton.language`; for each value it makes shape and type anew, though few differ; and it works out
in ten operations whether integers overflow, of which without debugging it says nothing.

Matrix products are summed in fp64: BLAS has another order for each number of columns, a GPU not.
"""

from typing import Any

import numpy as np
from triton.language import core, semantic
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

_new_type, _new_tensor = core.block_type.__init__, core.tensor.__init__
_types: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
"""What a type of blocks has, and a tensor of it, by the name of its elements and its shape."""


def _of_shape(made: Any) -> dict[str, Any]:
    """Return the attributes of a tensor that follow from the shape of its type."""
    tensor = object.__new__(core.tensor)
    _new_tensor(tensor, None, made)
    return {k: v for k, v in vars(tensor).items() if k not in ("handle", "type", "dtype")}


def _type_from_memory(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
    if key not in _types:
        _new_type(self, element_ty, shape)
        _types[key] = vars(self).copy(), _of_shape(self)
    vars(self).update(_types[key][0], element_ty=element_ty, of_tensors=_types[key][1])


def _tensor_from_memory(self: Any, handle: Any, type: Any) -> None:
    vars(self).update(type.of_tensors if type.is_block() else _SCALAR)
    self.handle, self.type, self.dtype = handle, type, type.scalar


_SCALAR = _of_shape(core.int32)
core.block_type.__init__, core.tensor.__init__ = _type_from_memory, _tensor_from_memory

_equal = core.dtype.__eq__
core.dtype.__eq__ = lambda self, other: self is other or _equal(self, other)

_broadcast, _np_dtype = semantic.TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}


def _broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
    same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
    return (lhs, rhs) if same else _broadcast(self, lhs, rhs)


def _np_dtype_from_memory(tt_dtype: Any) -> Any:
    name = tt_dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(tt_dtype)
    return _np_dtypes[name]


semantic.TritonSemantic.broadcast_impl_value = _broadcast_what_differs
semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
interpreter._get_np_dtype = _np_dtype_from_memory
