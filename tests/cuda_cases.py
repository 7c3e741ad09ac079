"""Lower op cases of the CUDA back end: run them in Triton's interpreter, or as meta tensors.

`TRITON_INTERPRET=1` is set by conftest.py for the whole test process, so nothing here compiles for
a GPU; ahead-of-time checks run in processes of their own (`aot_report`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from op_cases import Arrays, OpRun

from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import INTERPRETER, Device, execute
from clocher_kernels.cuda.prepack import (
    TORCH_DTYPES,
    DeviceTensor,
    as_torch,
    prepack,
    rearrange,
)
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor

if os.environ.get("TRITON_INTERPRET") == "1":  # scripts that compile do without
    import interpreter  # noqa: F401  importing it is its effect


def run_interpreted(run: OpRun, narrow: Mapping[str, torch.dtype] | None = None) -> Arrays:
    """Run a case in the interpreter and return what it wrote, as the reference would have it.

    Args:
        run: the case.
        narrow: float buffers to give another type than the contract's fp32, by parameter.
    """
    narrow = narrow or {}
    values: dict[str, Any] = {}
    for name, value in run.values.items():
        if isinstance(value, QuantTensor):
            values[name] = prepack(value, INTERPRETER)
        elif name in run.plan.buffers:
            tensor = as_torch(value.copy(), run.plan.buffers[name].dtype)
            values[name] = tensor.to(narrow.get(name, tensor.dtype))
        else:
            values[name] = as_torch(value.copy(), "f32" if value.dtype.kind == "f" else "i32")
    for name in run.written:
        if name not in values:
            buffer = run.plan.buffers[name]
            tensor = as_torch(np.full(buffer.shape, 0, buffer.allocate().dtype), buffer.dtype)
            tensor = tensor.to(narrow.get(name, tensor.dtype))
            tensor.view(torch.uint8).fill_(0xFF if tensor.is_floating_point() else 0x7F)
            values[name] = tensor
    call = run.plan.calls[0]
    execute(LOWER[call.op](**values, **call.attrs, device=INTERPRETER))
    out = {}
    for name in run.written:
        tensor = values[name]
        if tensor.is_floating_point():
            stored = run.plan.buffers[name].dtype
            if stored in ("bf16", "f16"):
                out[name] = tensor.view(torch.int16).numpy().view(STORAGE[stored])
            else:
                out[name] = tensor.to(torch.float32).numpy()
        else:
            out[name] = tensor.numpy().view(STORAGE[run.plan.buffers[name].dtype])
    return out


MARGIN = 64


def amid_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor between two margins of 0xff bytes, which is NaN in every float type."""
    memory = torch.full((tensor.nbytes + 2 * MARGIN,), 0xFF, dtype=torch.uint8)
    inner = memory[MARGIN : MARGIN + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return inner.copy_(tensor)


def require_nan_around(tensor: torch.Tensor) -> None:
    """Fail if a kernel wrote outside a tensor made by `amid_nan`."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert (memory[:MARGIN] == 0xFF).all() and (memory[-MARGIN:] == 0xFF).all()


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory, for launches that are only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_weight(fmt: str, *shape: int) -> DeviceTensor:
    """Return a weight without memory, prepacked."""
    held = parse_format(fmt)
    planes = held.planes(shape).items()
    return rearrange(held, shape, {p: meta(a.shape, TORCH_DTYPES[a.dtype]) for p, a in planes})


def meta_device(capability: int) -> Device:
    """Return the device that launches of meta tensors are made for."""
    return Device("meta", capability, 132)


def aot_report(script: str) -> dict[str, Any]:
    """Run a script of this folder without the interpreter and return the JSON it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # for bench
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / script],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report
