"""Numba, loaded when the first kernel has to be compiled: its import takes 0.1 s of a start.

A process whose kernels all come from the cache needs no more than LLVM's linker. So types are
names here, and what kernels call is wrapped: Numba asks a value that it does not know for its
`_numba_type_`, and only then the dispatcher or the intrinsic is made.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


@dataclass(frozen=True)
class Scalar:
    """A type of Numba, by its name there."""

    name: str


class VecT:
    """A vector of n elements of an LLVM type."""

    def __init__(self, element: ir.Type, n: int) -> None:
        self.llvm = ir.VectorType(element, n)
        self.name = f"{element}x{n}"


Kind = Scalar | VecT
f32, f64, i32, i64, void = map(Scalar, ("float32", "float64", "int32", "int64", "void"))


@functools.cache
def numba_type(kind: Kind) -> Any:
    """Return Numba's type of a kind. It has none for vectors: their data model is LLVM's vector."""
    from numba import types

    return getattr(types, kind.name) if isinstance(kind, Scalar) else _vector_type()(kind)


@functools.cache
def _vector_type() -> Any:
    from numba import types
    from numba.core.datamodel import models
    from numba.extending import register_model

    class Vector(types.Type):  # type: ignore[misc]
        def __init__(self, vector: VecT) -> None:
            self.llvm = vector.llvm
            super().__init__(name=vector.name)

    @register_model(Vector)
    class _Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, vector: Vector) -> None:
            super().__init__(manager, vector, vector.llvm)

    return Vector


class Device:
    """A function inlined into the kernels that call it. Not callable from Python."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    @functools.cached_property
    def _numba_type_(self) -> Any:
        import numba

        wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        self._made = numba.njit(**_OPTIONS, **wrappers, forceinline=True)(self.function)
        return self._made._numba_type_  # which does not keep it alive


class Intrinsic:
    """What `numba.extending.intrinsic` makes of a typing function."""

    def __init__(self, typing: Callable[..., Any]) -> None:
        functools.update_wrapper(self, typing)
        self.typing = typing

    @functools.cached_property
    def _numba_type_(self) -> Any:
        from numba.core.registry import cpu_target
        from numba.extending import intrinsic

        self._made = intrinsic(self.typing)
        cpu_target.typing_context.refresh()
        return cpu_target.typing_context.resolve_value_type(self._made)


class _Cgutils:
    """Numba's `cgutils`, imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        from numba.core import cgutils

        return getattr(cgutils, name)


cgutils: Any = _Cgutils()


@functools.cache
def _linked() -> Any:
    from numba.core.codegen import JITCodeLibrary

    class Linked(JITCodeLibrary):  # type: ignore[misc]
        """What Numba made of a function, linked with what it calls, not optimised as a whole."""

        def _optimize_final_module(self) -> None:
            """Leave it to `jit`, which optimises a kernel once, not its devices too."""

    return Linked


def lower(function: Callable[..., Any], params: int, result: Kind) -> tuple[str, str]:
    """Return the LLVM of a function of int64 with its devices, and its function's name there."""
    from numba.core.ccallback import CFunc
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    signature = ((numba_type(i64),) * params, numba_type(result))
    callback = CFunc(function, signature, {}, dict(_OPTIONS))
    codegen = cpu_target.target_context.codegen()
    with global_compiler_lock:
        codegen._library_class = _linked()
        # Numba would make machine code for what it takes the host for, for each device as well.
        # That takes time, and ends the process where LLVM does not see all features of the host.
        codegen._add_module = codegen.set_env = lambda *_: None
        try:
            compiled = callback._compile_uncached()
            compiled.library.finalize()
        finally:
            del codegen._library_class, codegen._add_module, codegen.set_env
    return compiled.library.get_llvm_str(), compiled.fndesc.llvm_func_name
