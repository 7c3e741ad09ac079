"""Run every op case with each array between pages that must not be touched.

    python tests/guarded_ops.py              the cases, then inputs that select what is not there
    python tests/guarded_ops.py --random N   N cases with sizes drawn at random, likewise
    python tests/guarded_ops.py NAME ...     some cases

A kernel that reads or writes beside an array ends the process; the last line of stderr names the
case. Prints the number of cases and a hash of all outputs, so that runs on different ISAs can be
compared.
"""

import ctypes
import hashlib
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from hostile_inputs import careless, hostile
from op_cases import ALL, OpRun, name_of

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ClocherError
from clocher_kernels.ops.contract import Case, OpSpec, Value
from clocher_kernels.ops.sampling import words_for
from clocher_kernels.plan import Buffer
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback import executor
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.team import team

_PROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_PROTECT.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LARGEST = 100
"""Sizes are drawn from 1 to this, and half of the time a case keeps its own."""

_CELLS = 1 << 20
"""Largest count of values that a drawn cache holds: pages x tokens of a page x features."""


class Guard:
    """Allocates arrays that end where an inaccessible page begins, or begin where one ends."""

    def __init__(self) -> None:
        self.in_front = False

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a zeroed array."""
        count = int(np.prod(shape, dtype=np.int64))
        pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
        memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        start = np.frombuffer(memory, np.uint8).ctypes.data
        for page in (0, pages + 1):
            if _PROTECT(start + page * mmap.PAGESIZE, mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        offset = mmap.PAGESIZE
        if not self.in_front:
            offset += pages * mmap.PAGESIZE - count * dtype.itemsize
        return np.frombuffer(memory, dtype, count, offset).reshape(shape)

    def copy(self, value: Value) -> Value:
        """Return a copy in guarded memory."""
        if isinstance(value, QuantTensor):
            planes = {name: self.copy(plane) for name, plane in value.planes.items()}
            return QuantTensor(value.shape, value.format, planes)
        array = self(value.shape, value.dtype)
        array[...] = value
        return array

    def allocate(self, buffer: Buffer) -> np.ndarray:
        """Stand in for the executor's allocation of buffers."""
        return self(buffer.shape, STORAGE[buffer.dtype])

    def aligned(self, nbytes: int) -> np.ndarray:
        """Stand in for the allocation of scratch memory; its end is on a cache line, too."""
        return self((-(-nbytes // 64) * 64,), np.dtype(np.uint8))


def run(spec: OpSpec, case: Case, guard: Guard, digest: Callable[[bytes], None]) -> None:
    """Run a case as it is, then with hostile inputs, with guards behind and in front."""
    op = OpRun(spec, case)
    own = op.values
    for guard.in_front in (False, True):
        where = f"{name_of(spec, case)}, guard {'in front' if guard.in_front else 'behind'}"
        print(where, file=sys.stderr, flush=True)
        op.values = own
        weights = {name: guard.copy(value) for name, value in op.weights.items()}
        bound = CpuExecutor(op.plan, weights, 1)
        for kind, values in (("", op.values), *hostile(op), *careless(op)):
            if kind:
                print(f"{where}: {kind}", file=sys.stderr, flush=True)
            op.values = values
            op.fill(bound)
            bound.step(op.plan.tokens, op.plan.rows)
            if not kind and not guard.in_front:
                for name, array in op.outputs(bound).items():
                    digest(array.tobytes())
                    assert name in op.written
        bound.close()


def drawn(count: int, seed: int = 0) -> Iterator[tuple[OpSpec, Case]]:
    """Yield cases with sizes drawn at random, those of them that the op and its formats take."""
    rng = np.random.default_rng(seed)
    while count:
        spec, case = ALL[rng.integers(len(ALL))]
        sizes = {
            letter: int(rng.integers(1, _LARGEST)) if rng.random() < 0.5 else size
            for letter, size in case.sizes.items()
        }
        tied = {"I": ("J", 2), "J": ("I", 0.5)}  # a gate and its linear partner
        for letter, (other, factor) in tied.items():
            if (
                other in case.sizes
                and letter in case.sizes
                and case.sizes[other] == factor * (case.sizes[letter])
            ):
                sizes[other] = int(factor * sizes[letter])
        if {"S", "B", "P"} <= sizes.keys():
            sizes["P"] = sizes["S"] * sizes["B"]
        if {"H", "N", "D", "F"} <= sizes.keys():
            sizes["N"] = sizes["H"] * max(1, case.sizes["N"] // case.sizes["H"])
            sizes["F"] = sizes["N"] * sizes["D"]
        if {"V", "W"} <= sizes.keys():
            sizes["W"] = words_for(sizes["V"])
        if np.prod([sizes.get(letter, 1) for letter in "PTF"]) > _CELLS:
            continue
        made = replace(case, id=f"{case.id}-{sizes}", sizes=sizes)
        try:
            op = OpRun(spec, made)
            CpuExecutor(op.plan, op.weights, 1).close()
        except (ClocherError, ValueError, IndexError, OverflowError):
            continue
        count -= 1
        yield spec, made


def main() -> None:
    """Run all cases."""
    guard = Guard()
    executor._allocate = guard.allocate
    executor.aligned = team.aligned = guard.aligned
    np.seterr(all="ignore")
    digest = hashlib.sha256()
    done = 0
    cases: Iterable[tuple[OpSpec, Case]] = ALL
    if sys.argv[1:2] == ["--random"]:
        cases = drawn(int(sys.argv[2]))
    elif names := sys.argv[1:]:
        cases = [own for own in ALL if name_of(*own) in names]
    for spec, case in cases:
        run(spec, case, guard, digest.update)
        done += 1
    print(done, digest.hexdigest())


if __name__ == "__main__":
    main()
