"""Run the kernels' inline PTX in NumPy: what they compute is known without a GPU.

Only the instructions that they use exist here. Registers are arrays: uint32, or float16 and float32
where a program declares halves and floats.
"""

import re
from collections.abc import Callable

import numpy as np

Array = np.ndarray

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


def _dp4a(a: Array, b: Array, c: Array) -> Array:
    a, b, c = np.broadcast_arrays(*(np.asarray(v, np.uint32) for v in (a, b, c)))
    bytes_of = [np.ascontiguousarray(v).view(np.int8).reshape(*v.shape, 4) for v in (a, b)]
    products = bytes_of[0].astype(np.int32) * bytes_of[1]
    return products.sum(axis=-1, dtype=np.int32).view(np.uint32) + c


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    assert table == 0xEA
    return (a & b) | c


_INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "sub.f16x2": _packed(lambda a, b: a - b),
    "mul.f16x2": _packed(lambda a, b: a * b),
    "fma.rn.f16x2": _packed(lambda a, b, c: a * b + c),
    "cvt.f32.f16": lambda a: a.astype(np.float32),
    "add.f32": lambda a, b: a + b,
    "dp4a.s32.s32": _dp4a,
}
