"""Run every op case with each array placed right before a page that must not be touched.

A kernel that reads or writes past the end of an array ends the process. Prints the number of cases
and a hash of all outputs, so that runs on different ISAs can be compared.
"""

import ctypes
import hashlib
import mmap

import numpy as np
from op_cases import ALL, OpRun

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.ops.contract import Value
from clocher_kernels.plan import Buffer
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback import executor
from cpu_fallback.executor import CpuExecutor

_PROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_PROTECT.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a zeroed array whose last byte is the last byte before an inaccessible page."""
    count = int(np.prod(shape, dtype=np.int64))
    pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    if _PROTECT(start + pages * mmap.PAGESIZE, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = pages * mmap.PAGESIZE - count * dtype.itemsize
    return np.frombuffer(memory, dtype, count, offset).reshape(shape)


def _copy(value: Value) -> Value:
    if isinstance(value, QuantTensor):
        planes = {name: _copy(plane) for name, plane in value.planes.items()}
        return QuantTensor(value.shape, value.format, planes)
    array = guarded(value.shape, value.dtype)
    array[...] = value
    return array


def _allocate(buffer: Buffer) -> np.ndarray:
    return guarded(buffer.shape, STORAGE[buffer.dtype])


def main() -> None:
    """Run all cases."""
    executor._allocate = _allocate
    digest = hashlib.sha256()
    done = 0
    for spec, case in ALL:
        op = OpRun(spec, case)
        op.weights = {name: _copy(value) for name, value in op.weights.items()}
        try:
            outputs = op.run(lambda plan, weights: CpuExecutor(plan, weights, 1))
        except UnsupportedOp:
            continue
        for name in op.written:
            digest.update(outputs[name].tobytes())
        done += 1
    print(done, digest.hexdigest())


if __name__ == "__main__":
    main()
