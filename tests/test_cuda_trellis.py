"""Trellises on CUDA: the assembly that looks levels up, and the kernels with and without it."""

import numpy as np
import ptx_emulator
import pytest
import torch
from cuda_cases import amid_nan

from clocher_kernels.cuda import trellis
from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import INTERPRETER, Device, execute
from clocher_kernels.cuda.prepack import DeviceTensor, prepack
from clocher_kernels.errors import ShapeError
from clocher_kernels.formats import Tcq
from clocher_kernels.formats.tcq import levels
from clocher_kernels.quant_tensor import QuantTensor

ASSEMBLY = Device("cpu", 80, 4)
"""The interpreter, with inline assembly that `ptx_emulator` runs."""
BITS = pytest.mark.parametrize("bits", [2, 3, 4, 5])


def _weights(bits: int, *shape: int) -> QuantTensor:
    fmt = Tcq(bits)
    planes = fmt.drawn(shape, np.random.default_rng(bits), shape[-1] ** -0.5)
    return QuantTensor(shape, fmt, planes)


def _multiply(w: QuantTensor, x: torch.Tensor, device: Device) -> np.ndarray:
    """Run `linear` with every array in the middle of NaN; return fp32 [M, N]."""
    held = prepack(w, device)
    planes = {name: amid_nan(plane) for name, plane in held.planes.items()}
    y = torch.full((len(x), w.shape[0]), float("nan"))
    whole = DeviceTensor(held.shape, held.format, planes)
    execute(LOWER["linear"](x=amid_nan(x), w=whole, y=y, device=device))
    return y.numpy()


@BITS
def test_assembly_looks_up_every_level(bits: int) -> None:
    code = trellis._lookup(bits).value
    ptx_emulator.require_early_clobbers(code, "=&r,=&r,=&r,=&r,r,r")
    number = np.random.default_rng(0).permutation(np.arange(512) % (2 << bits)).astype(np.uint32)
    columns = number.reshape(-1, 8)
    places = 4 * np.array([0, 2, 4, 6, 1, 3, 5, 7], np.uint32)  # 0 .. 3 and 16 .. 19, by turns
    words = [((columns >> part & 15) << places).sum(1, dtype=np.uint32) for part in (0, 4)]
    pairs = ptx_emulator.run(code, 4, *words)
    got = np.stack([half for pair in pairs for half in ptx_emulator._halves(pair)], -1)
    np.testing.assert_array_equal(got.astype(np.float32) * 64, levels(bits)[columns])


@BITS
def test_prepacking_keeps_every_weight(bits: int) -> None:
    table = _weights(bits, 37, 192)
    held = prepack(table, INTERPRETER)
    assert held.planes["codes"].nbytes == 48 * 192 * bits // 8
    y, ids = torch.full((37, 192), float("nan")), torch.arange(37, dtype=torch.int32)
    execute(LOWER["embed"](ids=ids, table=held, y=y, device=INTERPRETER))
    np.testing.assert_array_equal(y.numpy(), table.stored())


@pytest.mark.parametrize(("bits", "size"), [(3, 1.0), (2, 200.0), (4, 1e-3), (5, 200.0)])
@pytest.mark.one_in(2)
def test_packed_products_are_the_same_in_any_batch(
    bits: int, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the inline assembly that a GPU runs: slices of four tokens."""
    ptx_emulator.emulate_assembly(monkeypatch)
    weight, rng = _weights(bits, 16, 192), np.random.default_rng(7)
    x = torch.from_numpy((rng.standard_normal((11, 192)) * size).astype(np.float16))
    together = _multiply(weight, x, ASSEMBLY)
    expected = x.double().numpy() @ weight.stored().astype(np.float64).T
    off = (together - expected) / np.sqrt(np.square(expected).mean())
    assert np.sqrt(np.square(off).mean()) <= 1e-3 and np.abs(off).max() <= 4e-3
    for first, count in ((10, 1), (7, 2), (3, 5)):
        got = _multiply(weight, x[first : first + count], ASSEMBLY)
        np.testing.assert_array_equal(got, together[first : first + count])


@pytest.mark.parametrize(
    ("device", "m", "dtype", "limit"),
    [
        (ASSEMBLY, 40, torch.float16, 5e-4),
        (ASSEMBLY, 2, torch.float32, 2e-6),
        (ASSEMBLY, 40, torch.float32, 2e-6),
        (INTERPRETER, 40, torch.float16, 5e-4),
        (INTERPRETER, 3, torch.bfloat16, 2e-6),
    ],
)
@BITS
@pytest.mark.one_in(3)
def test_products_of_every_type(
    bits: int,
    device: Device,
    m: int,
    dtype: torch.dtype,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ptx_emulator.emulate_assembly(monkeypatch)
    weight, rng = _weights(bits, 70, 192), np.random.default_rng(8)
    x = torch.from_numpy(rng.standard_normal((m, 192), dtype=np.float32)).to(dtype)
    expected = x.double().numpy() @ weight.stored().astype(np.float64).T
    off = (_multiply(weight, x, device) - expected) / np.sqrt(np.square(expected).mean())
    assert np.sqrt(np.square(off).mean()) <= limit and np.abs(off).max() <= 10 * limit


def test_experts_have_whole_strips() -> None:
    with pytest.raises(ShapeError, match="37 rows; expected a multiple of 16"):
        prepack(_weights(3, 2, 37, 64), INTERPRETER)


def test_other_blocks_are_not_rotated() -> None:
    x = torch.zeros(1, 96)
    for size in (32, 64):
        with pytest.raises(ShapeError, match=f"blocks of {size} in 96 columns"):
            LOWER["hadamard"](x=x, y=x, size=size, device=INTERPRETER)


def test_rotated_in_place_and_in_a_wider_buffer() -> None:
    wide = torch.from_numpy(np.random.default_rng(9).standard_normal((3, 200), dtype=np.float32))
    kept, x = wide.clone(), wide[:, 40:168]
    for _ in range(2):  # twice gives the values again, but for rounding
        execute(LOWER["hadamard"](x=x, y=x, size=64, device=INTERPRETER))
    torch.testing.assert_close(wide, kept)
    assert torch.equal(wide[:, :40], kept[:, :40]) and torch.equal(wide[:, 168:], kept[:, 168:])
