"""The rate of dot products of bf16 pairs (`vdpbf16ps`), which no kernel of ours uses.

It is compiled for the host itself: no ISA of `cpu_fallback` has the instruction. Where it does no
more multiply-adds a cycle than fp32, it could not help.
"""

import ctypes
from functools import cache

import llvmlite.binding as llvm

from cpu_fallback.lanes.isa import host_features

DOTS = 24
"""Dot products of a step of the loop."""
MACS = 32
"""Multiply-adds of one."""
_CHAINS = 24
_KIND = "<16 x float>"


def _text() -> str:
    dot = "@llvm.x86.avx512bf16.dpbf16ps.512"
    names = range(_CHAINS)
    starts = "\n".join(
        f"  %s{i} = phi {_KIND} [ zeroinitializer, %entry ], [ %t{i}, %loop ]" for i in names
    )
    steps = "\n".join(
        f"  %t{i} = call {_KIND} {dot}({_KIND} %s{i}, <32 x bfloat> %v, <32 x bfloat> %v)"
        for i in names
    )
    ends = "\n".join(f"  store volatile {_KIND} %t{i}, ptr %out, align 4" for i in names)
    return f"""
declare {_KIND} {dot}({_KIND}, <32 x bfloat>, <32 x bfloat>)
define void @bf16_dots(i64 %count, ptr %source, ptr %out) {{
entry:
  %v = load <32 x bfloat>, ptr %source, align 2
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %loop ]
{starts}
{steps}
  %j = add i64 %i, 1
  %more = icmp ult i64 %j, %count
  br i1 %more, label %loop, label %done
done:
{ends}
  ret void
}}
"""


@cache
def bf16_dots() -> "ctypes._FuncPointer | None":
    """Return a function (count, source, out) that computes count * DOTS dot products.

    `source` has 32 numbers of bf16 and `out` has room for 16 of fp32. None: the processor lacks the
    instruction.
    """
    if not host_features().get("avx512bf16"):
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu="x86-64-v4", features="+avx512bf16,-prefer-256-bit", opt=2
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_text()), machine)
    engine.finalize_object()
    made = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(engine.get_function_address("bf16_dots"))
    made.engine = engine  # type: ignore[attr-defined]  # the code lives as long as it does
    return made
