"""The instruction set of this process: one of three, chosen once, at import.

    avx512vnni   x86-64-v4 with VNNI: 16 fp32 lanes in one register, byte dot products
    avx2         x86-64-v3: two registers of 8 lanes, FMA, F16C
    generic      the platform's baseline (SSE2, NEON): no fused multiply-add, no table permutes

`CLOCHER_ISA` forces one. Kernels have one source: 16-lane vectors that LLVM splits as far as it
must. Only integer dot products, table look-ups and fp16 conversion differ, and those are exact
everywhere. The machine code depends on the ISA and not on the host, so a kernel cache may be
shared by hosts.

"generic" multiplies and adds with two roundings where the others have one, so its fp32 results
differ from theirs in the last bits.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

from clocher_kernels.errors import DeviceError, UsageError

VARIABLE = "CLOCHER_ISA"


@dataclass(frozen=True, slots=True)
class Isa:
    """What the code generator may use.

    Attributes:
        cpu: LLVM's name of the processor model.
        features: LLVM features on top of the model.
        needs: host features, in LLVM's names, without which the code would not run.
        fma: fused multiply-add is an instruction.
        f16c: fp16 <-> fp32 conversion is an instruction.
    """

    name: str
    cpu: str
    features: str
    needs: tuple[str, ...]
    fma: bool
    f16c: bool

    @property
    def avx2(self) -> bool:
        """Whether AVX2 instructions may be used."""
        return self.cpu != ""

    @property
    def avx512(self) -> bool:
        """Whether AVX-512 (F, BW, VL, DQ, VNNI) instructions may be used."""
        return self.name == "avx512vnni"


_V3 = ("avx2", "fma", "f16c", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

ISAS: Mapping[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa(
            "avx512vnni",
            "x86-64-v4",
            # Else LLVM takes some dot products of int16 apart again.
            "+avx512vnni,+fast-dpwssd,-prefer-256-bit",
            (*_V4, "avx512vnni"),
            fma=True,
            f16c=True,
        ),
        Isa("avx2", "x86-64-v3", "", _V3, fma=True, f16c=True),
        Isa("generic", "", "", (), fma=False, f16c=False),
    )
}
"""Name -> ISA, best first."""


def available() -> tuple[str, ...]:
    """Return the names of the ISAs that this host can run, best first."""
    host = llvm.get_host_cpu_features()
    return tuple(isa.name for isa in ISAS.values() if all(host.get(need) for need in isa.needs))


def choose(wanted: str | None) -> Isa:
    """Return the ISA to compile for.

    Args:
        wanted: its name; None or "" for the best that the host can run.

    Raises:
        UsageError: no such ISA.
        DeviceError: the host cannot run it.
    """
    runnable = available()
    if not wanted:
        return ISAS[runnable[0]]
    if wanted not in ISAS:
        raise UsageError(f"{VARIABLE}={wanted!r}: expected one of {', '.join(ISAS)}")
    if wanted not in runnable:
        host = llvm.get_host_cpu_features()
        missing = ", ".join(need for need in ISAS[wanted].needs if not host.get(need))
        raise DeviceError(
            f"{VARIABLE}={wanted}: this processor lacks {missing}; it can run "
            f"{', '.join(runnable)}; unset {VARIABLE} to take the best"
        )
    return ISAS[wanted]


CURRENT: Isa = choose(os.environ.get(VARIABLE))
"""The ISA of this process."""
