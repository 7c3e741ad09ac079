"""Block-sparse products in Triton's interpreter, against the NumPy reference.

Their machine code is checked together with the dense ones', in test_cuda_linear.py.
"""

import zlib
from dataclasses import replace

import numpy as np
import ptx_emulator
import pytest
import torch
from op_cases import error

from clocher_kernels.cuda.bsr import bsr_linear, gemv_tile
from clocher_kernels.cuda.launch import INTERPRETER, Device, execute
from clocher_kernels.cuda.prepack import prepack
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.quant_tensor import QuantTensor, encode


def _sparse(
    block: tuple[int, int], inner: str, shape: tuple[int, int], density: float = 0.5
) -> QuantTensor:
    rng = np.random.default_rng(zlib.crc32(f"{block}{inner}{shape}".encode()))
    n, k = shape
    weight = rng.standard_normal(shape, dtype=np.float32)
    keep = rng.random((-(-n // block[0]), -(-k // block[1]))) < density
    weight *= np.kron(keep, np.ones(block, np.float32))[:n, :k]
    return encode(weight, Bsr.for_values(weight, block, inner))


def _run(w: QuantTensor, x: torch.Tensor, device: Device = INTERPRETER) -> torch.Tensor:
    """Multiply, with NaN behind x and around y."""
    behind = torch.full((x.numel() + 64,), float("nan"), dtype=x.dtype)
    behind[: x.numel()] = x.flatten()
    y = torch.full((len(x) + 2, w.shape[0]), float("nan"))
    tokens = behind[: x.numel()].view(x.shape)
    packed = prepack(w, device)
    execute(bsr_linear(x=tokens, w=packed, y=y[1:-1], device=device))
    assert y[0].isnan().all() and y[-1].isnan().all()
    return y[1:-1]


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("block", "inner", "m", "shape", "x_type"),
    [
        pytest.param(*case, id="{}-{}-m{}-{}-{}".format(*case))
        for case in [
            ((1, 16), "f16", 1, (5, 100), _F16),
            ((64, 64), "f16", 2, (70, 130), _F32),
            ((3, 5), "f32", 3, (10, 23), _BF16),
            ((16, 16), "bf16", 33, (40, 50), _F32),
            ((16, 16), "bf16", 33, (40, 50), _BF16),
            ((8, 128), "f16", 33, (20, 260), _F16),
            ((3, 5), "f32", 33, (10, 23), _F32),
            ((128, 1), "bf16", 1, (130, 7), _F32),
            ((5, 40), "int8", 3, (12, 100), _F32),
            ((5, 48), "int8", 1, (12, 112), _F16),
            ((5, 40), "int8", 33, (12, 100), _BF16),
            ((3, 70), "int4", 3, (7, 150), _BF16),
            ((20, 9), "int4", 1, (25, 50), _F16),
            ((20, 9), "int4", 33, (25, 50), _F32),
        ]
    ],
)
def test_blocks_of_any_size(
    block: tuple[int, int], inner: str, m: int, shape: tuple[int, int], x_type: torch.dtype
) -> None:
    w = _sparse(block, inner, shape)
    rng = np.random.default_rng(m)
    x = torch.from_numpy(rng.standard_normal((m, shape[1]), dtype=np.float32)).to(x_type)
    expected = x.double().numpy() @ w.decode().astype(np.float64).T
    rms, _ = error(_run(w, x).numpy(), expected)
    assert rms <= (1e-3 if x_type == torch.float16 else 2e-6), rms


@pytest.mark.parametrize("x_type", [_F32, _F16, _BF16])
def test_int4_with_the_assembly_of_a_gpu(
    x_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only fp16 activations may be taken in pairs."""
    ptx_emulator.emulate_assembly(monkeypatch)
    w = _sparse((5, 40), "int4", (12, 120))
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((2, 120), dtype=np.float32)).to(x_type)
    expected = x.double().numpy() @ w.decode().astype(np.float64).T
    rms, _ = error(_run(w, x, Device("cpu", 80, 4)).numpy(), expected)
    assert rms <= (1e-3 if x_type == torch.float16 else 2e-6), rms


@pytest.mark.parametrize("inner", ["f16", "int8", "int4"])
def test_a_token_is_the_same_in_any_batch(inner: str) -> None:
    w = _sparse((4, 32), inner, (4, 200), 0.8)
    x = torch.randn((32, 200), generator=torch.Generator().manual_seed(0)).half()
    together = _run(w, x)
    for m in (*range(1, 9), 17):
        assert torch.equal(_run(w, x[32 - m :]), together[32 - m :])


@pytest.mark.parametrize("lane", [1, 8, 32])
def test_gemv_tiles_fill_their_warps(lane: int) -> None:
    for height in (1, 2, 3, 4, 16, 20, 64, 1024):
        for width in (1, 4, 5, 16, 64, 600, 1024):
            tile = gemv_tile((height, width), lane, 1)
            many = gemv_tile((height, width), lane, 8)
            assert replace(many, each=tile.each) == tile and many.each <= tile.each
            threads = tile.blocks * tile.across * tile.cols // tile.lane
            assert threads == 32 * tile.warps and tile.blocks >= 1, tile
            assert tile.cols % tile.lane == 0, tile
