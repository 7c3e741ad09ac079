"""The bytes of every format, spelled out by hand: what is stored is a promise to files."""

from dataclasses import dataclass

import numpy as np
import pytest

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import Format, parse_format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.quant_tensor import QuantTensor, encode


@dataclass(frozen=True)
class Golden:
    """Values, the hexadecimal bytes of each plane, and what they decode to (None: the values)."""

    id: str
    fmt: Format
    values: list[object]
    planes: dict[str, str]
    decoded: list[object] | None = None


def mx_row(*blocks: list[float]) -> list[float]:
    return [v for block in blocks for v in [*block, *[0.0] * (32 - len(block))]]


GOLDEN = [
    Golden("f32", parse_format("f32"), [[1, -2.5]], {"data": "0000803f 000020c0"}),
    Golden("f16", parse_format("f16"), [[1, -2.5]], {"data": "003c 00c1"}),
    Golden(
        "bf16-rounds-up",
        parse_format("bf16"),
        [[1, -2.5, 0.1]],
        {"data": "803f 20c0 cd3d"},
        [[1, -2.5, 0.10009765625]],
    ),
    Golden(
        "int8_tensor_f32",
        parse_format("int8_tensor_f32"),
        [[254, -1], [1, 3]],  # scale 2; -0.5 and 0.5 round to 0, 1.5 to 2
        {"codes": "7f 00 00 02", "scales": "00000040"},
        [[254, 0], [0, 4]],
    ),
    Golden(
        "int8_tensor_bf16-experts",
        parse_format("int8_tensor_bf16"),
        [[[127, -127]], [[0, 0]]],  # one scale per matrix; a zero matrix gets 1
        {"codes": "7f 81 00 00", "scales": "803f 803f"},
    ),
    Golden(
        "int8_row_f16",
        parse_format("int8_row_f16"),
        [[127, -64], [-254, 2]],
        {"codes": "7f c0 81 01", "scales": "003c 0040"},
    ),
    Golden(
        "int8_g2_f32-tail",
        parse_format("int8_g2_f32"),
        [[127, 1, -254]],  # groups (127, 1) and (-254)
        {"codes": "7f 01 81", "scales": "0000803f 00000040"},
    ),
    Golden(
        "int4_sym_g4_f16-odd-K",
        parse_format("int4_sym_g4_f16"),
        [[8, -4, 1, 0, 3]],  # scales -1 and -3/8; codes 0 12 7 8 | 0, then the code of zero
        {"codes": "c0 87 80", "scales": "00bc 00b6"},
    ),
    Golden(
        "int4_sym_row_f32-clips",
        parse_format("int4_sym_row_f32"),
        [[-8, 8, 7.9, -7]],  # a tie: the positive 8 is -8 steps of -1, so -8 is 7 steps
        {"codes": "0f f0", "scales": "000080bf"},
        [[-7, 8, 8, -7]],
    ),
    Golden(
        "int4_asym_g4_f16",
        parse_format("int4_asym_g4_f16"),
        [[-3, 0, 6, 12, 15]],  # second group: 0..15, zero point 0, and so is the padding
        {"codes": "30 f9 0f", "scales": "003c 003c", "zeros": "03 00"},
    ),
    Golden(
        "int4_asym_row_bf16-odd-K",
        parse_format("int4_asym_row_bf16"),
        [[-15, -5, 0]],  # zero point 15; the padding nibble is the zero point
        {"codes": "a0 ff", "scales": "803f", "zeros": "0f"},
    ),
    Golden(
        "fp8_e4m3_row_f32",
        parse_format("fp8_e4m3_row_f32"),
        [[448, -1, 2**-9, 0.5], [-896, 2, 0, 34]],  # 34 = 17 steps of 2 becomes 16
        {"codes": "7e b8 01 30 fe 38 00 58", "scales": "0000803f 00000040"},
        [[448, -1, 2**-9, 0.5], [-896, 2, 0, 32]],
    ),
    Golden(
        "fp8_e5m2_tensor_f16",
        parse_format("fp8_e5m2_tensor_f16"),
        [[57344, -1], [2**-16, 9]],  # 9 lies between 8 and 10
        {"codes": "7b bc 01 48", "scales": "003c"},
        [[57344, -1], [2**-16, 8]],
    ),
    Golden(
        "fp8_e4m3_b128_bf16",
        parse_format("fp8_e4m3_b128_bf16"),
        [[448] + [0] * 127 + [-896, 2]],
        {"codes": "7e" + "00" * 127 + "fe 38", "scales": "803f 0040"},
    ),
    Golden(
        "ternary",
        parse_format("ternary"),
        [[1], [-1], [0], [1], [-1], [-1], [0], [1]],  # rows 0 2 4 6, then rows 1 3 5 7; mean 3/4
        {"codes": "46 88", "scale": "403f"},
        [[0.75], [-0.75], [0], [0.75], [-0.75], [-0.75], [0], [0.75]],
    ),
    Golden(
        "ternary_inverse",
        parse_format("ternary_inverse"),
        [[0.5, 0.5], [-0.5, 0.5], [0, 1], [0.5, -0.5]],  # mean 1/2, stored as 2
        {"codes": "92 2a", "scale": "0040"},
        [[0.5, 0.5], [-0.5, 0.5], [0, 0.5], [0.5, -0.5]],
    ),
    Golden(
        "mxfp4",
        parse_format("mxfp4"),
        # 6.5 saturates at 6, -0.1 keeps its sign; 7.9 is nearer to 8 at twice the scale.
        [mx_row([6, -0.5], [], [1, 0.25], [6.5, -0.1], [7.9, -0.1])],
        {
            "blocks": "97"
            + "00" * 15
            + "00" * 16
            + "26"
            + "00" * 15
            + "87"
            + "00" * 15
            + "86"
            + "00" * 15,
            "scales": "7f 7f 7d 7f 80",
        },
        [mx_row([6, -0.5], [], [1, 0.25], [6, -0.0], [8, -0.0])],
    ),
    Golden(
        "bsr_2x2_bf16",
        Bsr((2, 2), "bf16", nnzb=2),
        [[0, 0, 1, 2, 0], [0, 0, 3, -4, 0], [0, 0, 0, 0, 5]],  # the last block is clipped
        {
            "row_ptr": "00000000 01000000 02000000",
            "col_idx": "01000000 02000000",
            "values": "803f 0040 4040 80c0 a040 0000 0000 0000",
        },
    ),
]
params = pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g.id)


@params
def test_encoding_gives_the_golden_bytes(golden: Golden) -> None:
    tensor = encode(np.array(golden.values, np.float32), golden.fmt)
    got = {name: plane.tobytes().hex() for name, plane in tensor.planes.items()}
    assert got == {name: text.replace(" ", "") for name, text in golden.planes.items()}


@params
def test_golden_bytes_decode_to_the_values(golden: Golden) -> None:
    expected = np.array(golden.values if golden.decoded is None else golden.decoded, np.float32)
    planes = {
        name: np.frombuffer(bytes.fromhex(golden.planes[name]), STORAGE[plane.dtype]).reshape(
            plane.shape
        )
        for name, plane in golden.fmt.planes(expected.shape).items()
    }
    tensor = QuantTensor(expected.shape, golden.fmt, planes)
    tensor.check()
    got = tensor.decode()
    assert got.dtype == np.float32 and got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)
