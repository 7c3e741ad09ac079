"""Let Triton's interpreter count to a scalar tensor, and prepare the language only once.

It keeps scalars as arrays of one element, and NumPy 2.4 no longer turns those into an int by itself
(Triton 3.6 and before rely on it): `range(first, last)` in a kernel would fail.

It looks through all of `triton.language` at each call of a device function, for what to replace by
its own: half of its time. What it replaced for the functions of a module stays replaced here, as it
does anyway where a device function was called.

Importing this module is enough.
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


_patch_lang = interpreter._patch_lang
_prepared: set[str] = set()


def _patch_lang_once(function: Any) -> Any:
    if function.__module__ not in _prepared:
        _prepared.add(function.__module__)
        _patch_lang(function)
    return interpreter._LangPatchScope()


if hasattr(interpreter, "_LangPatchScope"):  # not in Triton 3.4
    interpreter._patch_lang = _patch_lang_once
