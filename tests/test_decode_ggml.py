"""The CPU's decoders of ggml's blocks give the bits of `Ggml.decode`, whatever the bytes."""

import numpy as np
import pytest
from one_op import run

from clocher_kernels.cuda.launch import INTERPRETER
from clocher_kernels.cuda.prepack import prepack
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.ggml import GGML_KINDS, Ggml
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_kernels.quant_tensor import QuantTensor


def random_blocks(name: str, shape: tuple[int, ...], seed: int) -> QuantTensor:
    """Return a tensor of random bytes whose f16 scales are normal numbers and zeros."""
    fmt = parse_format(name)
    assert isinstance(fmt, Ggml)
    rng = np.random.default_rng(seed)
    plane = rng.integers(0, 256, fmt.planes(shape)["blocks"].shape, np.uint8)
    blocks = plane.reshape(-1, fmt.block_bytes).view(KINDS[name].fields)[:, 0]
    for field in {"d", "dmin", "m"} & set(blocks.dtype.names or ()):
        blocks[field] = rng.standard_normal(len(blocks)) * (rng.random(len(blocks)) < 0.9)
    return QuantTensor(shape, fmt, {"blocks": plane})


@pytest.mark.parametrize("name", GGML_KINDS)
def test_rows_of_a_table_are_exact(name: str) -> None:
    table = random_blocks(name, (37, 1280), 1)
    ids = np.array([36, 0, 5, 5, 17], np.int32)
    values = {"ids": ids, "table": table}
    got = run("embed", {"M": 5, "V": 37, "K": 1280}, {}, values)["y"]
    np.testing.assert_array_equal(got.view(np.uint32), table.decode()[ids].view(np.uint32))


@pytest.mark.parametrize("name", GGML_KINDS)
def test_products_with_units_are_the_columns(name: str) -> None:
    """K crosses blocks of 512 columns and N those of 8 rows; a sum with zeros is exact."""
    weight = random_blocks(name, (13, 1280), 2)
    columns = np.concatenate([np.arange(0, 1280, 37), [511, 512, 1024, 1279]])
    x = np.zeros((len(columns), 1280), np.float32)
    x[np.arange(len(columns)), columns] = 1
    sizes = {"M": len(columns), "N": 13, "K": 1280}
    got = run("linear", sizes, {}, {"x": x, "w": weight})["y"]
    np.testing.assert_array_equal(got, weight.decode()[:, columns].T)


@pytest.mark.parametrize("name", GGML_KINDS)
def test_experts_are_found(name: str) -> None:
    weight = random_blocks(name, (3, 5, 512), 3)
    ids = np.array([[2, 0], [1, 2]], np.int32)
    x = np.zeros((2, 2, 512), np.float32)
    x[:, :, 300] = 1
    weights = np.array([[1, 0], [0, 1]], np.float32)
    values = {"x": x, "ids": ids, "weights": weights, "w": weight}
    sizes = {"M": 2, "E": 3, "A": 2, "N": 5, "I": 512}
    got = run("moe_down", sizes, {}, values)["y"]
    np.testing.assert_array_equal(got, weight.decode()[2, :, 300] * np.ones((2, 1), np.float32))


def test_cuda_says_what_to_do() -> None:
    weight = random_blocks("q3_k", (4, 256), 4)
    with pytest.raises(UnsupportedOp, match=r"blocks of q3_k; take the CPU .* --requantize"):
        prepack(weight, INTERPRETER)
