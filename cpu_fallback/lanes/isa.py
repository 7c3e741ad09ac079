"""The instruction set of this process, chosen once, at import.

    amx          avx512vnni and AMX: products of tiles of bytes, 16 x 16 x 64 in an instruction
    avx512vnni   x86-64-v4 with VNNI: 16 fp32 lanes in one register, byte dot products
    avx512       x86-64-v4: the same without byte dot products (Skylake-X)
    avxvnni      x86-64-v3 with AVX-VNNI: byte dot products in registers of 8 lanes (Alder Lake)
    avx2         x86-64-v3: two registers of 8 lanes, FMA, F16C
    neon_dotprod Arm v8.2 with sdot: four registers of 4 lanes
    generic      the platform's baseline (SSE2, NEON): no fused multiply-add, no table permutes

There is none for registers of 8 lanes with the encodings of AVX-512: where both can be had, 16
lanes take half the instructions, and no processor does more of the halves in the same time.

`CLOCHER_ISA` forces one. Kernels have one source: 16-lane vectors that LLVM splits as far as it
must. Only integer dot products, table look-ups and fp16 conversion differ, and those are exact
everywhere. The machine code depends on the ISA and not on the host, so a kernel cache may be
shared by hosts.

"generic" multiplies and adds with two roundings where the others have one, so its fp32 results
differ from theirs in the last bits.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

from clocher_kernels.errors import DeviceError, UsageError

VARIABLE = "CLOCHER_ISA"


@dataclass(frozen=True, slots=True)
class Isa:
    """What the code generator may use."""

    name: str
    cpu: str  # LLVM's name of the processor model
    features: str  # LLVM features on top of the model
    needs: tuple[str, ...]  # host features, in LLVM's names, without which the code would not run

    @property
    def fma(self) -> bool:
        """Whether fused multiply-add and fp16 <-> fp32 conversion are instructions."""
        return bool(self.needs)

    @property
    def avx512(self) -> bool:
        """Whether there is AVX-512 (F, BW, VL, DQ): 32 registers of 16 fp32 lanes, else 16 of 8."""
        return "avx512f" in self.needs

    @property
    def vnni(self) -> bool:
        """Whether the dot product of bytes, added in int32, is an instruction."""
        return "avx512vnni" in self.needs or "avxvnni" in self.needs

    @property
    def amx(self) -> bool:
        """Whether products of tiles of bytes are instructions."""
        return "amx-int8" in self.needs

    @property
    def avx2(self) -> bool:
        """Whether AVX2 instructions may be used."""
        return "avx2" in self.needs

    @property
    def in_shorts(self) -> bool:
        """Whether products of bytes are best added in int16: a wide unit without VNNI."""
        return self.avx2 and not self.vnni

    @property
    def neon(self) -> bool:
        """Whether NEON with sdot may be used."""
        return "dotprod" in self.needs

    @property
    def registers(self) -> int:
        """How many vectors of 16 fp32 lanes the registers hold."""
        return 32 if self.avx512 else 8 if self.avx2 or self.neon else 4


_V3 = ("avx2", "fma", "f16c", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_WIDE = "-prefer-256-bit"
_WHOLE = "+fast-dpwssd"  # else LLVM takes some dot products of int16 apart again
_VNNI = f"+avx512vnni,{_WHOLE},{_WIDE}"

ISAS: Mapping[str, Isa] = {
    name: Isa(name, *about)
    for name, about in {
        "amx": ("x86-64-v4", f"{_VNNI},+amx-tile,+amx-int8", (*_V4, "avx512vnni", "amx-int8")),
        "avx512vnni": ("x86-64-v4", _VNNI, (*_V4, "avx512vnni")),
        "avx512": ("x86-64-v4", _WIDE, _V4),
        "avxvnni": ("x86-64-v3", f"+avxvnni,{_WHOLE}", (*_V3, "avxvnni")),
        "avx2": ("x86-64-v3", "", _V3),
        "neon_dotprod": ("generic", "+v8.2a,+dotprod", ("lse", "dotprod")),
        "generic": ("", "", ()),
    }.items()
}
"""Name -> ISA, best first."""


_AT_HWCAP = 16
_ARCH_PRCTL = 158
_LINUX = {"lse": 8, "dotprod": 20}
_DARWIN = {"lse": "FEAT_LSE", "dotprod": "FEAT_DotProd"}


def arm_features() -> dict[str, bool]:
    """Return LLVM's names of the features that kernels use, and whether this processor has them.

    Source: arch/arm64/include/uapi/asm/hwcap.h of Linux (the bits of the auxiliary vector), and
    Apple's "Determining instruction set characteristics" (the names of sysctl).
    """
    system = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return {name: _darwin_has(system, about) for name, about in _DARWIN.items()}
    words = system.getauxval
    words.restype, words.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return {name: bool(words(_AT_HWCAP) >> bit & 1) for name, bit in _LINUX.items()}


def _darwin_has(system: ctypes.CDLL, feature: str) -> bool:
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    name = f"hw.optional.arm.{feature}".encode()
    failed = system.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and bool(value.value)


def host_features() -> Mapping[str, bool]:
    """Return LLVM's names of the features of this host, and whether it has them."""
    if os.uname().machine in ("aarch64", "arm64"):
        return arm_features()
    host = dict(llvm.get_host_cpu_features())
    return host | {"amx-int8": bool(host.get("amx-int8")) and _may_use_tiles()}


def _may_use_tiles() -> bool:
    """Ask Linux for the registers of AMX; return whether this process may use them.

    Source: Documentation/arch/x86/xstate.rst of Linux (ARCH_REQ_XCOMP_PERM, feature 18).
    """
    system = ctypes.CDLL(None)
    return sys.platform == "linux" and not system.syscall(_ARCH_PRCTL, 0x1023, 18)


def is_zen() -> bool:
    """Return whether this processor is one of AMD's Zen."""
    return llvm.get_host_cpu_name().startswith("znver")


def available() -> tuple[str, ...]:
    """Return the names of the ISAs that this host can run, best first."""
    host = host_features()
    return tuple(isa.name for isa in ISAS.values() if all(host.get(need) for need in isa.needs))


def choose(wanted: str | None) -> Isa:
    """Return the ISA of a name; None or "": the best that the host can run.

    Raises UsageError for an unknown one, DeviceError for one that the host cannot run.
    """
    runnable = available()
    if not wanted:
        return ISAS[runnable[0]]
    if wanted not in ISAS:
        raise UsageError(f"{VARIABLE}={wanted!r}: expected one of {', '.join(ISAS)}")
    if wanted not in runnable:
        host = host_features()
        missing = ", ".join(need for need in ISAS[wanted].needs if not host.get(need))
        raise DeviceError(
            f"{VARIABLE}={wanted}: this processor lacks {missing}; it can run "
            f"{', '.join(runnable)}; unset {VARIABLE} to take the best"
        )
    return ISAS[wanted]


CURRENT: Isa = choose(os.environ.get(VARIABLE))  # The ISA of this process
