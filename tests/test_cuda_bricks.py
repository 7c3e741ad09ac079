"""Matrices in bricks: where weights are kept so, and what reads them, in Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch
from op_cases import error
from test_cuda_linear import TYPES, Product

from clocher_kernels.cuda import bricks
from clocher_kernels.cuda.bricks import in_bricks
from clocher_kernels.cuda.fused import cut, stack
from clocher_kernels.cuda.launch import INTERPRETER
from clocher_kernels.cuda.prepack import DeviceTensor, prepack
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [("sym_g128_f16", 24, 768), ("asym_g256_f16", 16, 768), ("asym_row_f16", 72, 128)],
)
@pytest.mark.parametrize("m", [1, 33])
def test_products(kind: str, m: int, n: int, k: int, x_type: str) -> None:
    """33 tokens are those of tiles."""
    product = Product(f"int4_{kind}", m, n, k, x_type)
    assert in_bricks(product.w.format, product.w.shape)
    rms, largest = error(product.run(), product.expected)
    limit = 1e-3 if x_type == "f16" else 2e-6
    assert rms <= limit and largest <= 10 * limit, (rms, largest)


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("m", [1, 9, 33])
def test_heads(m: int, x_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bricks, "LEAST_FLOAT_ROWS", 40)
    product = Product("bf16", m, 40, 448, x_type)
    assert in_bricks(product.w.format, product.w.shape)
    rms, largest = error(product.run(), product.expected)
    limit = 1e-3 if x_type == "f16" else 2e-6
    assert rms <= limit and largest <= 10 * limit, (rms, largest)


@pytest.mark.parametrize(
    ("fmt", "shape", "kept"),
    [
        ("int4_asym_g128_f16", (24, 256), True),
        ("int4_sym_g128_f16", (20, 256), False),
        ("int4_sym_g128_f16", (24, 320), False),
        ("int4_sym_g64_f16", (24, 256), False),
        ("int4_sym_g192_f16", (24, 384), False),
        ("int4_sym_g128_f16", (2, 24, 256), False),
        ("int8_g128_f16", (24, 256), False),
        ("bf16", (32768, 64), True),
        ("bf16", (32760, 64), False),
        ("bf16", (32768, 96), False),
        ("f16", (32768, 64), False),
    ],
)
def test_what_is_kept_in_bricks(fmt: str, shape: tuple[int, ...], kept: bool) -> None:
    w = _weights(fmt, *shape)
    assert in_bricks(w.format, w.shape) is kept
    assert all(plane.is_contiguous() for plane in w.planes.values())
    held = w.planes["codes" if "codes" in w.planes else "data"]
    assert not kept or held.view(torch.int32).shape[::2] == (shape[0] // 8, 128)


@pytest.mark.parametrize("kind", ["sym_g128_f16", "asym_g128_f16", "asym_row_f16"])
def test_stacked_and_cut(kind: str) -> None:
    parts = [_weights(f"int4_{kind}", n, 256) for n in (24, 8)]
    whole = stack(parts)
    assert whole is not None and in_bricks(whole.format, whole.shape)
    for part, own in zip(cut(whole, [24, 8]), parts, strict=True):
        assert part.shape == own.shape
        assert all(torch.equal(part.planes[name], own.planes[name]) for name in own.planes)
    # Rows beside bricks, and rows that would be taken for bricks.
    for rows in ((20, 24), (20, 20)):
        assert stack([_weights(f"int4_{kind}", n, 256) for n in rows]) is None


def _weights(fmt: str, *shape: int) -> DeviceTensor:
    values: Any = np.random.default_rng(shape[-2]).standard_normal(shape, dtype=np.float32)
    return prepack(encode(values, parse_format(fmt)), INTERPRETER)
