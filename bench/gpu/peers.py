"""Other libraries' matmuls beside ours; none has to be installed.

A maker returns, for a weight [N, K]: the function that multiplies x [M, K] by it, x's type, the
weight's bytes and its decoded values. A peer that is off by more than 5 % is not measured.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.gpu.setting import Call, Prepare, Setting

_WRONG, _GROUP = 0.05, 64
_BF16 = torch.bfloat16

Made = tuple[Callable[[Tensor], Tensor], torch.dtype, int, Tensor]


def contender(setting: Setting, name: str, n: int, k: int, m: int) -> Prepare:
    """Return the setup of a peer for a race at M tokens."""

    def prepare() -> tuple[int, Sequence[Call]]:
        run, dtype, nbytes, dense = PEERS[name](setting, n, k)
        x = setting.randn(m, k).to(dtype)
        want = x.double() @ dense.double().T
        off = float((run(x).double() - want).norm() / want.norm())
        if not off < _WRONG:
            raise RuntimeError(f"its result is off by {off:.3g}: called wrongly here")
        runs = [run, *(PEERS[name](setting, n, k)[0] for _ in range(setting.copies(nbytes) - 1))]
        return nbytes + x.nbytes + 2 * m * n, [lambda run=run: run(x) for run in runs]

    return prepare


def _cublas(setting: Setting, n: int, k: int) -> Made:
    w = setting.randn(n, k, dtype=_BF16) * k**-0.5
    return lambda x: x @ w.T, _BF16, w.nbytes, w


def _int4(setting: Setting, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0..15, scales of groups of 64, and their values with a zero point of 8."""
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
