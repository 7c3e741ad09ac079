"""Run the kernels' inline PTX in NumPy: what they compute is known without a GPU.

Only the instructions that they use exist here. Registers are arrays: uint32, or float16 and float32
where a program declares halves and floats.
"""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from clocher_kernels.dtypes import from_f32

Array = np.ndarray

_DTYPES = {"fp16": np.float16, "fp32": np.float32, "int16": np.int16, "int32": np.int32}
_MNEMONIC = re.compile(r"[a-z0-9.]+")
_OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


def run(asm: str, outputs: int, *inputs: Array) -> list[Array]:
    """Run a program on arrays; `$0` .. are its outputs, then come the inputs."""
    registers: dict[str, Array] = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def read(operand: str) -> Array:
        if operand.startswith("{"):
            low, high = (registers[name] for name in _OPERAND.findall(operand[1:-1]))
            return _pair(low, high)
        if operand.startswith("0x") or operand.isdigit():
            return np.uint32(int(operand, 0))
        return registers[operand]

    for statement in asm.strip().strip("{}\n").split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name = _MNEMONIC.match(statement).group()
        target, *operands = _OPERAND.findall(statement[len(name) :])
        values = [read(operand) for operand in operands]
        if target.startswith("{"):
            low, high = _OPERAND.findall(target[1:-1])
            registers[low], registers[high] = _halves(values[0])
        else:
            registers[target] = _INSTRUCTIONS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def emulate_assembly(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run inline assembly, so that whole kernels run with it."""
    patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _create_inline_asm)


def _create_inline_asm(
    self: Any, asm: str, constraints: str, values: Sequence[Any], types: Sequence[Any], *_: Any
) -> Any:
    """Stand in for a builder's method; a program has one element, or four bytes."""
    require_early_clobbers(asm, constraints)
    inputs = [_as_registers(value.data) for value in values]
    packed = values[0].data.itemsize == 1
    registers = run(asm, constraints.count("="), *inputs)
    out = []
    for number, kind in enumerate(types):
        register = registers[number]
        if packed:
            register = np.stack(registers, axis=-1).reshape(-1)
        dtype = _DTYPES[kind.element_ty.name]
        shaped = np.ascontiguousarray(register).view(dtype).reshape(values[0].data.shape)
        out.append(interpreter.TensorHandle(shaped, kind.element_ty))
    return SimpleNamespace(get_result=out.__getitem__)


def _as_registers(data: Array) -> Array:
    if data.itemsize == 1:
        return np.ascontiguousarray(data).reshape(-1).view(np.uint32)
    return data.view(np.uint32) if data.dtype == np.int32 else data


def require_early_clobbers(asm: str, constraints: str) -> None:
    """Fail if an output is written while an input is still to be read, without saying so by "&".

    The compiler may give both the same register.
    """
    kinds = constraints.split(",")
    outputs = sum(kind.startswith("=") for kind in kinds)
    statements = [s for s in asm.split(";") if "$" in s]
    reads = [
        i
        for i, statement in enumerate(statements)
        if any(int(n) >= outputs for n in re.findall(r"\$(\d+)", statement))
    ]
    for i, statement in enumerate(statements):
        target = re.search(r"\$(\d+)", statement.partition(",")[0])
        if target and i < max(reads) and "&" not in kinds[int(target.group(1))]:
            raise AssertionError(f"${target.group(1)} is written before the last read: {asm}")


def _halves(word: Array) -> tuple[Array, Array]:
    """Return the two fp16 numbers of each word."""
    both = np.ascontiguousarray(word, np.uint32).view(np.float16).reshape(*word.shape, 2)
    return both[..., 0], both[..., 1]


def _pair(low: Array, high: Array) -> Array:
    both = np.stack(np.broadcast_arrays(low, high), axis=-1).astype(np.float16)
    return both.view(np.uint32)[..., 0]


def _packed(function: Callable[..., Array]) -> Callable[..., Array]:
    """Apply a function to both halves of words, rounding its fp64 result once."""

    def apply(*words: Array) -> Array:
        shaped = np.broadcast_arrays(*(np.asarray(w, np.uint32) for w in words))
        low, high = zip(*(_halves(w) for w in shaped), strict=True)
        return _pair(
            function(*(v.astype(np.float64) for v in low)),
            function(*(v.astype(np.float64) for v in high)),
        )

    return apply


def bf16_halves(word: Array) -> tuple[Array, Array]:
    """Return the two bf16 numbers of each word, fp32."""
    word = np.asarray(word, np.uint32)
    return (word << np.uint32(16)).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)


def _fma_bf16(*words: Array) -> Array:
    low, high = (
        from_f32((a.astype(np.float64) * b + c).astype(np.float32), "bf16").astype(np.uint32)
        for a, b, c in zip(*map(bf16_halves, np.broadcast_arrays(*words)), strict=True)
    )
    return low | high << np.uint32(16)


def _dp4a(a: Array, b: Array, c: Array) -> Array:
    a, b, c = np.broadcast_arrays(*(np.asarray(v, np.uint32) for v in (a, b, c)))
    bytes_of = [np.ascontiguousarray(v).view(np.int8).reshape(*v.shape, 4) for v in (a, b)]
    products = bytes_of[0].astype(np.int32) * bytes_of[1]
    return products.sum(axis=-1, dtype=np.int32).view(np.uint32) + c


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out = np.uint32(0)
    for row in range(8):
        if table >> row & 1:
            out = out | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    a, b, selector = np.broadcast_arrays(*(np.asarray(v, np.uint32) for v in (a, b, selector)))
    out = np.zeros_like(a)
    for place in range(4):
        pick = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = np.where(pick & 4, b, a) >> np.uint32(8) * (pick & 3) & np.uint32(255)
        byte = np.where(pick & 8, (byte >> np.uint32(7)) * np.uint32(255), byte)
        out = out | byte << np.uint32(8 * place)
    return out


_INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "sub.u32": lambda a, b: a - b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "sub.f16x2": _packed(lambda a, b: a - b),
    "add.f16x2": _packed(lambda a, b: a + b),
    "mul.f16x2": _packed(lambda a, b: a * b),
    "fma.rn.f16x2": _packed(lambda a, b, c: a * b + c),
    "fma.rn.bf16x2": _fma_bf16,
    "cvt.f32.f16": lambda a: a.astype(np.float32),
    "add.f32": lambda a, b: a + b,
    "mul.rn.f32": lambda a, b: a * b,
    "dp4a.s32.s32": _dp4a,
}
