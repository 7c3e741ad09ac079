"""The CUDA mixture of experts in Triton's interpreter (its machine code: test_cuda_bits.py)."""

import zlib
from dataclasses import replace

import numpy as np
import ptx_emulator
import pytest
import sass_ratchet
import torch
from cuda_cases import amid_nan, aot_report, meta, meta_device, meta_weight
from op_cases import error

from clocher_kernels.cuda.launch import INTERPRETER, Device, Launch, execute
from clocher_kernels.cuda.moe import moe_down, moe_gate_up, route
from clocher_kernels.cuda.prepack import DeviceTensor, prepack
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import moe
from clocher_kernels.quant_tensor import QuantTensor, encode


class Experts:
    """Two layers of experts in memory surrounded by NaN, and tokens that chose some of them."""

    def __init__(self, fmt: str, tokens: int, chosen: int, x_type: torch.dtype) -> None:
        rng = np.random.default_rng(zlib.crc32(f"{fmt}-{tokens}-{chosen}".encode()))
        # Vectors of 4-bit weights: a row has one more than a turn takes.
        experts, rows, k = 5, 6, 288

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        self.up = encode(normal(experts, rows, k) * np.float32(k**-0.5), parse_format(fmt))
        self.down = encode(normal(experts, 5, k) * np.float32(k**-0.5), parse_format(fmt))
        self.bias = {"up": normal(experts, rows), "down": normal(experts, 5)}
        self.x = torch.from_numpy(normal(tokens, k)).to(x_type)
        self.hidden = torch.from_numpy(normal(tokens, chosen, k)).to(x_type)
        self.residual = normal(tokens, 5)
        self.ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)])
        self.ids = self.ids.astype(np.int32)
        self.weights = rng.random((tokens, chosen), dtype=np.float32)

    def run(
        self, which: slice = slice(None), device: Device = INTERPRETER
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run both kernels for some of the tokens; return fp32 [M, A, I] and [M, N]."""
        ids = amid_nan(torch.from_numpy(self.ids[which]))
        common = {"ids": ids, "device": device}
        y_up = amid_nan(torch.full((*ids.shape, self.up.shape[1] // 2), float("nan")))
        y_down = amid_nan(torch.from_numpy(self.residual[which]))
        execute(
            moe_gate_up(
                x=amid_nan(self.x[which]),
                w=self._packed("up"),
                bias=self._bias("up"),
                y=y_up,
                limit=7.0,
                alpha=1.702,
                **common,
            )
        )
        execute(
            moe_down(
                x=amid_nan(self.hidden[which]),
                weights=amid_nan(torch.from_numpy(self.weights[which])),
                w=self._packed("down"),
                bias=self._bias("down"),
                residual=y_down,
                y=y_down,
                **common,
            )
        )
        return y_up.numpy(), y_down.numpy()

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what the references write."""
        up = np.empty((*self.ids.shape, self.up.shape[1] // 2), np.float32)
        down = np.empty_like(self.residual)
        moe.moe_gate_up(
            x=self.x.float().numpy(),
            ids=self.ids,
            w=self.up,
            y=up,
            limit=7.0,
            alpha=1.702,
            bias=self.bias["up"],
        )
        moe.moe_down(
            x=self.hidden.float().numpy(),
            ids=self.ids,
            weights=self.weights,
            w=self.down,
            y=down,
            bias=self.bias["down"],
            residual=self.residual,
        )
        return up, down

    def _packed(self, name: str) -> DeviceTensor:
        packed = prepack(getattr(self, name), INTERPRETER)
        planes = {plane: amid_nan(values) for plane, values in packed.planes.items()}
        return DeviceTensor(packed.shape, packed.format, planes)

    def _bias(self, name: str) -> torch.Tensor:
        return amid_nan(torch.from_numpy(self.bias[name]))


@pytest.mark.parametrize("x_type", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    "fmt", ["mxfp4", "int4_asym_g34_f32", "int4_sym_row_f16", "int8_tensor_f32", "int8_g40_f16"]
)
@pytest.mark.one_in(3)
def test_formats_in_the_middle_of_nan(fmt: str, x_type: torch.dtype) -> None:
    experts = Experts(fmt, 2, 3, x_type)
    for got, expected in zip(experts.run(), experts.expected(), strict=True):
        rms, largest = error(got, expected)
        assert rms <= 2e-6 and largest <= 2e-5, (rms, largest)


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16"])
def test_a_token_is_the_same_in_any_batch(fmt: str) -> None:
    experts = Experts(fmt, 8, 2, torch.float16)
    together = experts.run()
    for which in (slice(2, 3), slice(5, 8)):
        for alone, all_of_them in zip(experts.run(which), together, strict=True):
            np.testing.assert_array_equal(alone, all_of_them[which])


MANY = 40
"""Tokens that are multiplied in tiles."""


@pytest.mark.parametrize("x_type", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    "fmt",
    [
        "mxfp4",
        "bf16",
        "int4_sym_g128_f16",
        "int4_asym_g64_f32",
        "int4_asym_g32_f16",
        "int4_asym_row_f16",
        "int8_row_f32",
        "int8_tensor_f32",
        "int8_g48_f16",
        "int4_asym_g34_f32",
    ],
)
@pytest.mark.one_in(3)
def test_tiles_of_formats_in_the_middle_of_nan(fmt: str, x_type: torch.dtype) -> None:
    # Groups of 34 fit no tile: each pair of a token and an expert is a program.
    experts = Experts(fmt, MANY, 1 if "g34" in fmt else 3, x_type)
    for got, expected in zip(experts.run(), experts.expected(), strict=True):
        rms, largest = error(got, expected)
        assert rms <= 2e-6 and largest <= 2e-5, (rms, largest)


@pytest.mark.parametrize("routing", ["one expert", "last experts", "in turn"])
def test_tiles_of_any_routing(routing: str) -> None:
    """Experts without tokens, with more than a tile, and with a part of one."""
    experts = Experts("mxfp4", 70, 1 if routing == "one expert" else 2, torch.float16)
    token = np.arange(70, dtype=np.int32)[:, None]
    if routing == "in turn":
        experts.ids = np.hstack([token % 5, (token + 1 + token // 5 % 3) % 5])
    else:
        experts.ids = experts.ids * 0 + np.array([[4, 3]], np.int32)[:, : experts.ids.shape[1]]
    for got, expected in zip(experts.run(), experts.expected(), strict=True):
        rms, largest = error(got, expected)
        assert rms <= 2e-6 and largest <= 2e-5, (rms, largest)


def test_tiles_keep_nan_within_a_token() -> None:
    experts = Experts("mxfp4", MANY, 2, torch.float16)
    clean = experts.run()
    experts.x[7, 3] = experts.hidden[7, 0, 5] = float("nan")
    for got, before in zip(experts.run(), clean, strict=True):
        assert np.isnan(got[7]).any()
        others = np.arange(MANY) != 7
        np.testing.assert_array_equal(got[others], before[others])


@pytest.mark.parametrize("scales", [(0, 0), (240, 236), (127, 90), (3, 3)], ids=str)
def test_tiles_take_scales_of_any_size(scales: tuple[int, int]) -> None:
    """In a row a block counts down to 2^-24 of the largest one's scale, and nothing overflows."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (1, 4, 2, 16), dtype=np.uint8)
    planes = {"blocks": blocks, "scales": np.zeros((1, 4, 2), np.uint8) + np.uint8(scales)}
    weight = QuantTensor((1, 4, 64), parse_format("mxfp4"), planes)
    x = rng.standard_normal((MANY, 64)).astype(np.float16)
    y = torch.full((MANY, 4), float("nan"))
    given = {"ids": torch.zeros((MANY, 1), dtype=torch.int32), "device": INTERPRETER}
    launches = moe_down(
        x=torch.from_numpy(x)[:, None], w=prepack(weight, INTERPRETER), y=y, **given
    )
    execute(launches)
    expected = x.astype(np.float64) @ weight.decode()[0].astype(np.float64).T
    kept = np.abs(expected) < np.finfo(np.float32).max
    assert kept.any()
    np.testing.assert_allclose(y.numpy()[kept], expected[kept], rtol=2e-5, atol=1e-44)


@pytest.mark.parametrize("fmt", ["mxfp4", "int4_asym_g64_f32"])
def test_tiles_with_the_assembly_of_a_gpu(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx_emulator.emulate_assembly(monkeypatch)
    experts = Experts(fmt, MANY, 3, torch.float16)
    plain = experts.run()
    for got, expected in zip(experts.run(device=Device("cpu", 80, 4)), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def many(fmt: str, count: int, device: Device) -> list[Launch]:
    """Return the launches of gpt-oss-20b's experts for some tokens, without memory."""
    x, ids = meta((count, 2880), torch.float16), meta((count, 4), torch.int32)
    y = meta((count, 4, 2880), torch.float16)
    up = {"limit": 7.0, "alpha": 1.7, "bias": meta((32, 5760), torch.float32)}
    down = {"weights": meta((count, 4), torch.float32), "bias": meta((32, 2880), torch.float32)}
    down |= {"residual": meta((count, 2880), torch.float32)}
    given = {"ids": ids, "device": device}
    return [
        *moe_gate_up(x=x, w=_experts(fmt, 5760), y=y, **given, **up),
        *moe_down(
            x=y,
            w=_experts(fmt, 2880),
            y=meta((count, 2880), torch.float32),
            **given,
            **down,
        ),
    ]


def test_many_tokens_read_the_weights_of_an_expert_once_for_a_tile() -> None:
    launches = many("mxfp4", 512, meta_device(90))
    names = [launch.kernel.fn.__name__ for launch in launches]
    once = ["_group", "_reorder", "_tile_product"]
    assert names == [*once, *once, "_sum_choices"]
    tiles = launches[2]
    rows, pairs = tiles.constants["BN"], tiles.constants["BM"]
    assert tiles.grid == ((2048 + 32 * (pairs - 1)) // pairs, 5760 // rows)
    assert tiles.stages > 1


def test_tiles_begin_earlier_where_sums_may_have_any_order() -> None:
    fast = replace(meta_device(90), fast_batch=True)
    for count, device, wanted in (
        (16, fast, 2),
        (8, fast, 0),
        (32, meta_device(90), 0),
        (33, meta_device(90), 2),
    ):
        tiles = [each for each in many("mxfp4", count, device) if "order" in each.args]
        found = [each.constants["BM"] for each in tiles if "BM" in each.constants]
        assert found == [8] * wanted, (count, found)


@pytest.mark.slow
def test_machine_code_of_tiles() -> None:
    """Loads are under way; decoded weights go to tensor cores from registers."""
    # Triton 3.9 spills in tiles of mxfp4, 3.6 does not; no other version has been compiled.
    spilled = 456 if sass_ratchet.VERSION == "3.9" else 0
    for name, used in aot_report("cuda_aot_moe.py").items():
        assert used["local"] <= (spilled if " mxfp4 _tile" in name else 0), (name, used)
        assert used["shared"] <= 99 << 10, (name, used)
        if "_tile_product" in name:
            assert used["products"] and used["copies"] and used["stores"] <= 4, (name, used)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 32])
def test_a_pass_of_any_size_streams_the_experts_as_a_step_of_one_does(m: int) -> None:
    """Guesses are verified by the decode kernels, a program for each token and expert.

    Programs of the same rows stand side by side, so those that share an expert share what L2 holds.
    """
    made = {}
    for count in (1, m):
        x, ids = meta((count, 2880), torch.float16), meta((count, 4), torch.int32)
        y = meta((count, 4, 2880), torch.float16)
        up = moe_gate_up(
            x=x,
            ids=ids,
            w=_experts("mxfp4", 5760),
            y=y,
            limit=7.0,
            alpha=1.7,
            device=meta_device(90),
        )
        down = moe_down(
            x=y,
            ids=ids,
            w=_experts("mxfp4", 2880),
            y=meta((count, 2880), torch.float32),
            device=meta_device(90),
        )
        made[count] = [*up, *down]
    assert [launch.kernel.fn.__name__ for launch in made[m]] == ["_gate_up", "_down"]
    for one, many in zip(made[1], made[m], strict=True):
        assert many.constants == one.constants and many.num_warps == one.num_warps
        assert many.grid == (m * one.grid[0], one.grid[1])


def _experts(fmt: str, rows: int) -> DeviceTensor:
    return meta_weight(fmt, 32, rows, 2880)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_router_never_names_an_expert_that_does_not_exist() -> None:
    logits = torch.full((1, 6), float("nan"))
    ids = torch.full((1, 4), 99, dtype=torch.int32)
    weights = torch.empty((1, 4))
    execute(route(logits=logits, ids=ids, weights=weights, device=INTERPRETER))
    assert ((ids >= 0) & (ids < 6)).all()


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"score": "softmax", "normalise": True},
        {"score": "sigmoid", "groups": 6, "group_top": 2, "group_best": 2, "factor": 2.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_router_chooses_what_the_reference_chooses(biased: bool, attrs: dict) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((4, 60), dtype=np.float32)
    logits[0, ::7], logits[1, 3], logits[1, 50] = -np.inf, 9, 9
    if not attrs:
        logits[2, 2:] = -np.inf  # fewer than are to be chosen
    bias = rng.standard_normal(60, dtype=np.float32) if biased else None
    ids, weights = np.empty((4, 12), np.int32), np.empty((4, 12), np.float32)
    moe.route(logits=logits, ids=ids, weights=weights, bias=bias, **attrs)
    got_ids, got = torch.full((4, 12), 99, dtype=torch.int32), torch.empty((4, 12))
    execute(
        route(
            logits=torch.from_numpy(logits),
            ids=got_ids,
            weights=got,
            bias=torch.from_numpy(bias) if biased else None,
            **attrs,
            device=INTERPRETER,
        )
    )
    np.testing.assert_array_equal(got_ids.numpy(), ids)
    np.testing.assert_allclose(got.numpy(), weights, rtol=3e-6)
