"""Kernels for NEON, compiled on any host and not run.

    CLOCHER_ISA=neon_dotprod python tests/neon_code.py FORMAT ...

prints a line for each format: its name, and the instructions of the inner loop of its product for
one unit of 16 rows and 32 columns with 1 to 4 tokens. `tests/test_isa.py` compares them with
the table of docs/measured-facts.md.

As a plugin of pytest it fills a kernel cache for an emulated process, in which compiling takes ten
times as long (docs/verification.md): tests then fail, since no kernel is run, but all that they
would run is compiled.

    CLOCHER_ISA=neon_dotprod NEON_CACHE=FINGERPRINT python -m pytest -p neon_code FILE
"""

import ctypes
import os
import re
import sys

import llvmlite.binding as llvm

_TRIPLE = "aarch64-unknown-linux-gnu"
_FEATURES = dict.fromkeys(("lse", "dotprod"), True)
_PRODUCT = re.compile(r"^\tsdot\t", re.M)
_INSTRUCTION = re.compile(r"^\t[a-z]", re.M)

_own, llvm.get_host_cpu_features = llvm.get_host_cpu_features, lambda: _FEATURES
from cpu_fallback.lanes import isa  # noqa: E402

llvm.get_host_cpu_features = _own

from cpu_fallback.lanes import jit, objects  # noqa: E402


def _machine() -> llvm.TargetMachine:
    """Return the code generator for the ISA of this process."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(_TRIPLE).create_target_machine(
        cpu=isa.CURRENT.cpu, features=isa.CURRENT.features, opt=3, reloc="pic", codemodel="small"
    )


def loops(text: str) -> list[int]:
    """Return the instructions of each loop of an assembly that multiplies a unit or more."""
    counts = []
    for block in re.split(r"\n(?=\.LBB)", text):
        back = re.search(rf"\tb\.\w+\t{re.escape(block.partition(':')[0])}$", block, re.M)
        loop = block[: back.end() if back else None]
        if len(_PRODUCT.findall(loop)) >= 16:
            counts.append(len(_INSTRUCTION.findall(loop)))
    return sorted(counts)


def _module(kernel: jit.Kernel) -> llvm.ModuleRef:
    module = _module_for_host(kernel)
    module.triple, module.data_layout = _TRIPLE, str(_machine().target_data)
    return module


_module_for_host, jit._module, jit._machine = jit._module, _module, _machine


class _Nothing:
    """A signature of a function that is not called."""

    def __init__(self, result: object, *_: object) -> None:
        self._result = result

    def __call__(self, address: int) -> object:
        return lambda *_: None if self._result is None else 0


def _load(kernel: jit.Kernel, code: bytes) -> None:
    kernel._address = 1


if "NEON_CACHE" in os.environ:
    objects.fingerprint = lambda: os.environ["NEON_CACHE"]
    jit.Kernel.load = _load
    ctypes.CFUNCTYPE = ctypes.PYFUNCTYPE = _Nothing

if __name__ == "__main__":
    from clocher_kernels.formats import parse_format
    from cpu_fallback.tiles import tile_product
    from cpu_fallback.tiles.layout import layout_of

    for name in sys.argv[1:]:
        kernel = tile_product.product_of(layout_of("table", parse_format(name)), 128)
        print(name, *loops(jit.assembly(kernel)))
