"""The machine, its bandwidth, the op table at real sizes with a cold cache, linear beside peers.

A peer's maker returns, for a weight [N, K]: the function that multiplies x [M, K] by it, x's type,
the weight's bytes and its decoded values. No peer has to be installed; one that is off by more than
5 % is not measured.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from bench.gpu.parity import Trial
from bench.gpu.setting import Call, Item, Row, Setting
from bench.ops import real_cases
from clocher_kernels.cuda.launch import execute
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec

_PACKAGES = "torch triton numpy numba cupy-cuda12x cupy-cuda13x msgspec tokenizers safetensors"
_PACKAGES += " pytest pytest-xdist gemlite torchao"
_QUERY = "driver_version,pstate,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.total"
_SIZES = tuple(mib << 20 for mib in (16, 64, 256, 1024, 4096))
_DRY = ("rms_norm", "gather_rows")
_SHAPES, _DRY_SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096)), ((64, 128),)
_TOKENS = (1, 4, 8, 16, 32)
_OURS = ("int4_sym_g128_f16", "int4_asym_g64_f16", "mxfp4", "int8_row_f32", "fp8_e4m3_row_f32")
_WRONG, _GROUP = 0.05, 128
_BF16 = torch.bfloat16

Made = tuple[Callable[[Tensor], Tensor], torch.dtype, int, Tensor]


def machine_items(dry: bool) -> list[Item]:
    """Return the item that describes the machine."""
    return [("machine", _machine)]


def ceiling_items(dry: bool) -> list[Item]:
    """Return the items that measure copy and read bandwidth."""
    sizes = (4096,) if dry else _SIZES
    return [(f"bandwidth-{size}", partial(Setting.bandwidth, size=size)) for size in sizes]


def op_items(dry: bool) -> list[Item]:
    """Return one item for each op at each of its real sizes."""
    cases = [(OPS[op], OPS[op].cases[0]) for op in _DRY] if dry else real_cases()
    cases = [(spec, case) for spec, case in cases if "cuda" not in case.missing]
    return [(f"{s.name}-{c.id}", partial(_time, spec=s, case=c)) for s, c in cases]


def peer_items(dry: bool) -> list[Item]:
    """Return one race of all formats and peers for each shape and number of tokens."""
    return [
        (f"{n}x{k}-m{m}", partial(_race, n=n, k=k, m=m))
        for n, k in (_DRY_SHAPES if dry else _SHAPES)
        for m in _TOKENS[: 1 if dry else None]
    ]


def _machine(setting: Setting) -> list[Row]:
    row: Row = {"python": sys.version.split()[0], "system": platform.platform()}
    for package in _PACKAGES.split():
        try:
            row[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            row[package] = "not installed"
    if not setting.dry:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        row |= {"gpu": properties.name, "cuda": torch.version.cuda}
    if tool := shutil.which("nvidia-smi"):
        command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        row["nvidia-smi"] = done.stdout.strip()
    return [row]


def _time(setting: Setting, spec: OpSpec, case: Case) -> list[Row]:
    setting.measure_bandwidth()
    prepare = partial(_contender, setting, spec, case)
    return setting.race({"clocher": prepare}, op=spec.name, case=case.id)


def _race(setting: Setting, n: int, k: int, m: int) -> list[Row]:
    setting.measure_bandwidth()
    racing = {name: partial(_peer, setting, name, n, k, m) for name in PEERS}
    linear, fast = OPS["linear"], replace(setting, device=replace(setting.device, fast_batch=True))
    for name in _OURS[: 2 if setting.dry else None]:
        case = Case(f"{name}-{n}x{k}", {"M": m, "N": n, "K": k}, {}, {"w": name})
        racing[f"clocher {name}"] = partial(_contender, setting, linear, case)
        if m > 1:
            racing[f"clocher {name} --fast-batch"] = partial(_contender, fast, linear, case)
    return setting.race(racing, n=n, k=k, m=m)


def _contender(setting: Setting, spec: OpSpec, case: Case) -> tuple[int, Sequence[Call]]:
    """Return the bytes of an op's call, and calls on copies of its arguments."""
    trial = Trial(setting, spec, case, "f16" if spec.narrow else "f32")
    nbytes, first = trial.cost().bytes, trial.tensors()
    copies = [{n: _clone(v) for n, v in first.items()} for _ in range(setting.copies(nbytes))]
    setting.synchronize()  # kernels that start early prefetch weights
    return nbytes, [partial(execute, trial.launches(tensors)) for tensors in copies]


def _clone(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return replace(value, planes={name: p.clone() for name, p in value.planes.items()})
    return value.clone()


def _peer(setting: Setting, name: str, n: int, k: int, m: int) -> tuple[int, Sequence[Call]]:
    """Return the bytes of a peer's call at M tokens, and calls on copies of its weight."""
    run, dtype, nbytes, dense = PEERS[name](setting, n, k)
    x = setting.randn(m, k).to(dtype)
    want = x.double() @ dense.double().T
    off = float((run(x).double() - want).norm() / want.norm())
    if not off < _WRONG:
        raise RuntimeError(f"its result is off by {off:.3g}: called wrongly here")
    runs = [run, *(PEERS[name](setting, n, k)[0] for _ in range(setting.copies(nbytes) - 1))]
    return nbytes + x.nbytes + 2 * m * n, [lambda run=run: run(x) for run in runs]


def _cublas(setting: Setting, n: int, k: int) -> Made:
    w = setting.randn(n, k, dtype=_BF16) * k**-0.5
    return lambda x: x @ w.T, _BF16, w.nbytes, w


def _int4(setting: Setting, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0..15, scales of groups, and their values with a zero point of 8."""
    codes = setting.integers((n, k), 16, torch.uint8)
    scales = ((setting.randn(n, k // _GROUP).abs() + 0.5) * (k**-0.5 / 5)).to(dtype)
    return codes, scales, (codes.float() - 8) * scales.float().repeat_interleave(_GROUP, 1)


def _tinygemm(setting: Setting, n: int, k: int) -> Made:
    codes, scales, dense = _int4(setting, n, k, _BF16)
    tiles = next(t for t in (8, 4, 2) if k % (16 * t) == 0)
    bytes_ = (codes[:, ::2] << 4) | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(bytes_, tiles)
    affine = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    run = torch.ops.aten._weight_int4pack_mm
    return lambda x: run(x, packed, _GROUP, affine), _BF16, n * k // 2 + affine.nbytes, dense


def _gemlite(setting: Setting, n: int, k: int) -> Made:
    from gemlite.core import DType, GemLiteLinear

    codes, scales, dense = _int4(setting, n, k, torch.float16)
    flat, half = scales.reshape(-1, 1), DType.FP16
    layer = GemLiteLinear(4, _GROUP, k, n, input_dtype=half, output_dtype=half)
    layer.pack(codes, flat, torch.full_like(flat, 8), None)
    return layer, torch.float16, n * k // 2 + 4 * flat.numel(), dense


def _torchao(setting: Setting, n: int, k: int) -> Made:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(k, n, bias=False, device=setting.device.torch_device, dtype=_BF16)
    quantize_(layer, Int8WeightOnlyConfig())
    run = layer if setting.dry else torch.compile(layer, dynamic=False)
    return run, _BF16, n * k + 2 * n, layer.weight.dequantize()


PEERS: dict[str, Callable[[Setting, int, int], Made]] = {
    "cuBLAS bf16": _cublas,
    "torch tinygemm int4": _tinygemm,
    "gemlite int4": _gemlite,
    "torchao int8": _torchao,
}
