"""Compile Python functions to machine code, once per machine.

`@device` marks a piece that is inlined into kernels. `@Kernel` marks what the tape calls:

    @Kernel
    def rms_norm(rec, ctl, rank, size, scratch): ...

        rec      address of the launch's int64 fields
        ctl      address of the control block (`tape`): M, R, ...
        rank     this thread's number in the team, 0 .. size-1
        size     threads in the team
        scratch  address of this thread's scratch memory, 64-byte aligned

Nothing is compiled at import. `warm` compiles the kernels it is given, `Kernel.address` the one.
Numba types the function and lowers it to LLVM; machine code for the chosen ISA is emitted from
that, stored as an object file, and later processes load the file without importing Numba.

The cache is a directory per (sources, versions, ISA) below $CLOCHER_CACHE_DIR,
$XDG_CACHE_HOME/clocher or ~/.cache/clocher, and is used only where no other user can write it (see
`objects`). Compiling happens under a file lock, files appear by rename, and each carries a
hash of itself against torn writes. Numba's own cache is not used: processes that fill it at once
crash (numba issue 4807), and it does not see edits in inlined callees.

A process whose kernels all come from the cache needs no more than LLVM's linker, and importing
Numba would take 0.1 s of its start. So types are names here, and what kernels call is wrapped:
Numba asks a value that it does not know for its `_numba_type_`, and only then the dispatcher or the
intrinsic is made.
"""

import ctypes
import functools
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from clocher_kernels.guards import refuse_in_window
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.objects import ObjectCache

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


_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

device = Device
"""Decorator: a function inlined into the kernels that call it. Not callable from Python."""

_one_thread = threading.RLock()

_LINK_BYTES = 4 << 20  # Of address space that must be free when a kernel is put into memory

_RAISED = "an_exception"  # What a kernel calls that may raise; there is no such function

_EXTERNAL = frozenset({"memcpy", "memset", "memmove", "sched_yield", "nanosleep", "clock_gettime"})


class Kernel:
    """A function of int64 compiled to machine code when its address is first asked for.

    `function` calls devices and intrinsics only; `result`: void or int64; `name`: of its file in
    the cache, "module.function" by default.
    """

    def __init__(self, function: Callable[..., Any], result: Kind = void, name: str = "") -> None:
        self.function = function
        self.result = result
        self.params = function.__code__.co_argcount
        self.name = name or f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.__doc__ = function.__doc__
        self._address = 0

    @property
    def ready(self) -> bool:
        """Whether the machine code is in memory."""
        return self._address != 0

    @property
    def address(self) -> int:
        """Address of the machine code, compiled or loaded if it is not yet."""
        if not self._address:
            warm([self])
        return self._address

    @functools.cached_property
    def callable(self) -> Any:
        """The machine code as a function of Python, which lets go of its lock."""
        result = None if self.result is void else ctypes.c_int64
        return ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * self.params)(self.address)

    def load(self, code: bytes) -> None:
        """Put machine code into the memory of this process, for its lifetime."""
        symbol = _symbol(self)
        try:
            # Without memory for it LLVM would end the process.
            mmap.mmap(-1, _LINK_BYTES + 4 * len(code), mmap.MAP_PRIVATE).close()
        except OSError as error:
            raise MemoryError(f"machine code of {symbol}: {error.strerror}; free memory") from None
        library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
        tracker = library.export_symbol(symbol).link(_linker(), f"{symbol}.{next(_numbers)}")
        self._address = int(tracker[symbol])
        tracker.detach()  # whose end would free the code, which threads may run until they end

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def warm(kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
    """Load kernels from the cache, and compile those that are not there. Raises WindowError.

    `progress` is called with (done, total) before the first compilation and after each.
    """
    with _one_thread:
        cache, missing = ObjectCache.get(), []
        for k in dict.fromkeys(kernels):
            if not k.ready and (code := cache.read(k.name)) is not None:
                k.load(code)
            if not k.ready:
                missing.append(k)
        if missing:
            refuse_in_window(f"compile the kernel {missing[0].name}")
        for done, k in enumerate(missing):
            if progress:
                progress(done, len(missing))
            with cache.locked():
                # Another process may have compiled it while this one waited for the lock.
                code = cache.read(k.name)
                if code is None:
                    code = _compile(k)
                    cache.write(k.name, code)
            k.load(code)
        if missing and progress:
            progress(len(missing), len(missing))


def assembly(k: Kernel) -> str:
    """Return the kernel's assembly for the ISA of this process, compiled anew."""
    return _machine().emit_assembly(_module(k))


def _compile(k: Kernel) -> bytes:
    _log.debug("compiling %s for %s", k.name, CURRENT.name)
    return _machine().emit_object(_module(k))


def _module(k: Kernel) -> llvm.ModuleRef:
    try:
        os.getcwd()
    except FileNotFoundError:  # Numba asks as well, and ends with it
        _log.warning("the current directory is gone; / is it from now on")
        os.chdir("/")
    text, native = lower(k.function, k.params, k.result)
    args = ", ".join(f"i64 %a{i}" for i in range(k.params))
    # Numba returns a status and passes the result by pointer; callers want a plain C function. What
    # becomes of an error is asked for, so that it is not optimised away before `_check` sees it.
    text += f"""
declare void @{_RAISED}(ptr)

define i64 @{_symbol(k)}({args}) {{
  %result = alloca i64
  %error = alloca ptr
  store i64 0, ptr %result
  store ptr null, ptr %error
  %status = call i32 @{native}(ptr %result, ptr %error{args and ", " + args})
  %raising = load ptr, ptr %error
  %raises = icmp ne ptr %raising, null
  br i1 %raises, label %raised, label %done
raised:
  call void @{_RAISED}(ptr %raising)
  br label %done
done:
  %value = load i64, ptr %result
  ret i64 %value
}}
"""
    module = llvm.parse_assembly(text)
    for thing in (*module.functions, *module.global_variables):
        if not thing.is_declaration and thing.name != _symbol(k):
            thing.linkage = "internal"
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    # Kernels say what is a vector; vectorised scalar loops would only be more code.
    tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(_machine(), tuning)
    builder.getModulePassManager().run(module, builder)
    _check(k, module)
    return module


def _check(k: Kernel, module: llvm.ModuleRef) -> None:
    """Raise if a kernel could raise, allocate or call Python, for nothing would see the error."""
    called = {f.name for f in module.functions if f.is_declaration}
    foreign = {name for name in called if not name.startswith("llvm.")} - _EXTERNAL
    messages = {v.name for v in module.global_variables if v.name.startswith(".const.pickle")}
    if foreign or messages:
        raise RuntimeError(
            f"kernel {k.name} may raise, allocate or call Python: it needs "
            f"{', '.join(sorted(foreign | messages))}; of C it may call "
            f"{', '.join(sorted(_EXTERNAL))}"
        )


def _symbol(k: Kernel) -> str:
    return "clocher_" + k.name.replace(".", "_")


def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=CURRENT.cpu, features=CURRENT.features, opt=3, reloc="pic", codemodel="small"
    )


_numbers = itertools.count()  # of libraries: their names must differ


@functools.cache
def _linker() -> Any:
    """Return LLVM's JITLink, by which the sections of an object lie together in memory.

    So 32-bit distances between them fit. MCJIT maps each section where the system likes; between
    gigabytes of models these places may be farther apart, and then it ends the process.
    """
    return llvm.create_lljit_compiler(_machine(), use_jit_link=True)
