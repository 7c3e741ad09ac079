"""Compile launches ahead of time, without a GPU or a driver, and read the machine code.

Triton's wheel carries ptxas and cuobjdump, so the number of instructions that a kernel spends on a
weight, its registers and the width of its loads are facts that a test can hold on to.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clocher_kernels.cuda.launch import Arg, Launch, options

ARCHITECTURES = (80, 86, 89, 90)
PTX_ONLY = (100, 120)

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code of one launch.

    Attributes:
        ptx: the PTX text.
        registers: registers of a thread.
        local_bytes: stack and spills of a thread; more than 0 is a defect.
        shared_bytes: shared memory of a program.
        instructions: opcode with modifiers ("LDG.E.EF.128") -> how often it occurs.
        loop: the same for the main loop (the innermost one with the most global loads); empty if
            there is none.
    """

    ptx: str
    registers: int
    local_bytes: int
    shared_bytes: int
    instructions: Counter[str]
    loop: Counter[str]

    def per_weight(self, launch: Launch) -> float:
        """Return the instructions that the main loop spends on each weight."""
        return sum(self.loop.values()) / launch.weights


def compile_ptx(launch: Launch, capability: int) -> str:
    """Compile a launch to PTX for an architecture."""
    return str(_compile(launch, capability).asm["ptx"])


def compile_ir(launch: Launch, capability: int) -> str:
    """Return a launch as Triton has laid it out over registers, threads and warps."""
    return str(_compile(launch, capability).asm["ttgir"])


def compile_code(launch: Launch, capability: int) -> Code:
    """Compile a launch to machine code for an architecture that the bundled ptxas knows."""
    compiled = _compile(launch, capability)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        sass = _cuobjdump("-sass", cubin)
        usage = _cuobjdump("-res-usage", cubin)
    listing = [(int(a, 16), op, rest) for a, op, rest in _INSTRUCTION.findall(sass)]
    used = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    return Code(
        ptx=str(compiled.asm["ptx"]),
        registers=used["REG"],
        local_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        instructions=Counter(op for _, op, _ in listing),
        loop=_main_loop(listing),
    )


def _compile(launch: Launch, capability: int) -> Any:
    constants, signature, attributes = {}, {}, {}
    for index, (name, value) in enumerate(launch.given.items()):
        if value is None or name == "C":
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        if isinstance(value, torch.Tensor):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options(launch))


def _type_of(value: Arg) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _cuobjdump(flag: str, cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True)
    return done.stdout


def _main_loop(listing: list[tuple[int, str, str]]) -> Counter[str]:
    """Return the opcodes of the innermost loop with the most global loads.

    A loop is what a backward branch spans; an inner one has a smaller span than its outer one.
    """
    loops = []
    for address, op, rest in listing:
        target = _TARGET.search(rest) if op.startswith("BRA") else None
        if target and int(target.group(1), 16) < address:
            start = int(target.group(1), 16)
            body = Counter(o for a, o, _ in listing if start <= a <= address)
            loads = sum(n for o, n in body.items() if o.startswith("LDG"))
            loops.append((loads, -sum(body.values()), body))
    return max(loops, key=lambda entry: entry[:2])[2] if loops else Counter()
