"""Tiles: what the bytes mean, extremes of the integer products, shapes that cross every block."""

import gc
import zlib
from contextlib import closing

import numpy as np
import pytest
from ggml_encode import encode
from one_op import run
from op_cases import error

from clocher_kernels.dtypes import E2M1_VALUES, to_f32
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import Ggml, Int8, Mxfp4, Ternary, known_formats, parse_format
from clocher_kernels.formats.ggml_blocks import IQ4_VALUES, KINDS
from clocher_kernels.ops import ReferenceExecutor
from clocher_kernels.ops.linear import INTEGER_FORMATS
from clocher_kernels.ops.quantize import GROUPED, groups_of, quantize
from clocher_kernels.ops.rewrite import takes_int8
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.ops.decode import blocks_of
from cpu_fallback.team.large_pages import allocate
from cpu_fallback.team.placement import Hints
from cpu_fallback.tiles import tile_pack
from cpu_fallback.tiles.layout import (
    EVENS_FIRST,
    LINE,
    ROWS,
    SIGNED,
    UNIT,
    BlockLayout,
    Layout,
    layout_of,
    nbytes_of,
)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _tensor(name: str, *shape: int) -> QuantTensor:
    values = _rng(f"{name}{shape}").standard_normal(shape, dtype=np.float32)
    return encode(values, parse_format(name))


def _digits(code: str, line: np.ndarray) -> np.ndarray:
    """Return the weights of a line [16 rows, 4 bytes] as [16, columns]."""
    if code == "int8":
        return (line ^ (0 if SIGNED else 0x80)).view(np.int8).astype(np.float32)
    if code == "ternary":
        planes = [line >> 2 * p & 3 for p in range(4)]
        return np.concatenate(planes, axis=1).astype(np.float32) - 1
    if code in ("q4", "q5"):
        return np.concatenate([line & 15, line >> 4], axis=1).astype(np.float32)
    nibbles = np.stack([line & 15, line >> 4], axis=-1).reshape(ROWS, 8)
    if code == "iq4":
        return IQ4_VALUES[np.concatenate([line & 15, line >> 4], axis=1)].astype(np.float32)
    return E2M1_VALUES[nibbles] if code == "fp4" else nibbles.astype(np.float32)


def _unpack(layout: Layout, tile: np.ndarray, k: int) -> np.ndarray:
    """Return the values of a tile [16, K] by the words of `cpu_fallback.tiles.layout`."""
    values = np.zeros((ROWS, -(-k // UNIT) * UNIT), np.float32)
    at, head, scale, zero = 0, 0, np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    if not layout.offset:
        zero += {"int4": 8, "q5": 16}.get(layout.code, 0)
    width, minimum = UNIT // min(layout.lines, 8 if layout.code == "int8" else 4), zero * 0
    for column in range(0, values.shape[1], UNIT):
        if layout.block and column % layout.block == 0:
            index = column // layout.block % layout.per_head
            if index == 0:
                head = at
                at += layout.head
            record = tile[head + index * layout.record :][: layout.record]
            dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "e8m0": np.uint8}
            storage = np.dtype(dtype[layout.scale])
            scale = to_f32(record[: ROWS * storage.itemsize].view(storage), layout.scale)
            if layout.offset == "zeros":
                zero = record[-ROWS:].astype(np.float32)
            elif layout.offset:
                minimum = to_f32(record[-2 * ROWS :].view(np.float16), "f16")
        if layout.code == "q5":
            fifth = tile[at + 4 * LINE : at + 5 * LINE].reshape(ROWS, 4)
        for i in range(layout.lines):
            line = tile[at : at + LINE].reshape(ROWS, 4)
            start = column + i * width
            columns = np.arange(start, start + width)
            if layout.code in ("iq4", "q4", "q5"):
                columns = column + np.r_[4 * i : 4 * i + 4, 4 * i + 16 : 4 * i + 20]
            digits = _digits(layout.code, line)
            if layout.code == "q5" and i < 4:
                digits += 16 * np.concatenate([fifth >> i & 1, fifth >> i + 4 & 1], axis=1)
            elif layout.code == "q5":
                break
            digits -= zero[:, None]
            values[:, columns] = digits * scale[:, None] + minimum[:, None]
            at += LINE
        at += LINE * (layout.code == "q5")
    if layout.scale == "row":
        values *= tile[at : at + LINE].view(np.float32)[:, None]
        at += LINE
    assert at == len(tile)
    return values[:, :k]


BLOCK_FORMATS = [
    n for n in INTEGER_FORMATS if isinstance(layout_of("", parse_format(n)), BlockLayout)
]


TRELLISES = [name for name in known_formats() if name.startswith("tcq")]


@pytest.mark.parametrize(
    "name", [name for name in INTEGER_FORMATS if name not in (*BLOCK_FORMATS, *TRELLISES)]
)
@pytest.mark.parametrize(("n", "k"), [(36, 288), (20, 96), (52, 416)])
def test_what_the_bytes_of_a_tile_mean(name: str, n: int, k: int) -> None:
    tensor = _tensor(name, n, k)
    layout = layout_of("test", tensor.format)
    assert isinstance(layout, Layout)
    tiles = tile_pack.pack(layout, tensor)
    assert tiles.data.nbytes == nbytes_of(layout, tensor.shape) == 64 * (tiles.data.nbytes // 64)
    assert tiles.data.ctypes.data % LINE == 0
    rows = [_unpack(layout, tile, k) for tile in tiles.data.reshape(-1, tiles.tile_bytes)]
    values = np.concatenate(rows)[:n]
    if isinstance(tensor.format, Ternary):
        values *= np.float32(tiles.factor)
    np.testing.assert_array_equal(values, tensor.decode())


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(36, 512), (7, 256)])
def test_tiles_of_blocks_are_the_dwords_of_the_file(name: str, n: int, k: int) -> None:
    tensor = _tensor(name, n, k)
    layout = layout_of("test", tensor.format)
    tiles = tile_pack.pack(layout, tensor)
    assert tiles.data.nbytes == nbytes_of(layout, tensor.shape)
    lines = tiles.data.reshape(-1, k // 256, tiles.tile_bytes // (k // 256) // LINE, ROWS, 4)
    assert isinstance(layout, BlockLayout)
    assert sorted(layout.order) == list(range(lines.shape[2]))
    dwords = lines[:, :, np.argsort(layout.order)].transpose(0, 3, 1, 2, 4)
    blocks = dwords.reshape(-1, k // 256, lines.shape[2] * 4)
    stored = blocks_of(tensor).reshape(n, k // 256, -1)
    np.testing.assert_array_equal(blocks[:n, :, : stored.shape[2]], stored)
    assert not blocks[n:].any() and not blocks[..., stored.shape[2] :].any()
    assert blocks.shape[2] - stored.shape[2] < 4


@pytest.mark.parametrize("name", TRELLISES)
def test_tiles_of_trellises_have_even_rows_first_and_pairs_of_bits_swapped(
    name: str,
) -> None:
    n, k, bits = 36, 576, int(name[-1])
    tensor = _tensor(name, n, k)
    layout = layout_of("test", tensor.format)
    tiles = tile_pack.pack(layout, tensor).data.reshape(3, -1)
    order = [16 * tile + row for tile in range(3) for row in EVENS_FIRST]
    scales, rows = np.zeros((48, 12), np.uint8), np.zeros(48, np.float32)
    scales[:n, :9], rows[:n] = tensor.planes["scales"], to_f32(tensor.planes["rows"], "bf16")
    lines = tensor.planes["codes"].reshape(3, 18, bits, ROWS, 4)[:, :, :, list(EVENS_FIRST)].copy()
    low = lines[:, :, 1:3]  # the two low bits of m, or the only one
    low[:] = (low & 0x33) << 2 | low >> 2 & 0x33
    at = 0
    for block in range(3):
        head = tiles[:, at : at + LINE].reshape(3, 4, ROWS).swapaxes(1, 2)
        own = scales[order, 4 * block : 4 * block + 4]
        np.testing.assert_array_equal(head.reshape(48, 4), own)
        units = lines[:, 8 * block : 8 * block + 8].reshape(3, -1)
        at += LINE
        np.testing.assert_array_equal(tiles[:, at : at + units.shape[1]], units)
        at += units.shape[1]
    np.testing.assert_array_equal(tiles[:, at:].copy().view(np.float32).reshape(-1), rows[order])
    assert at == (3 + 18 * bits) * LINE


@pytest.mark.parametrize(
    ("name", "k"), [("mxfp4", 64), ("iq4_nl", 64), ("q6_k", 256), ("tcq3", 64)]
)
def test_experts_are_packed_one_after_the_other(name: str, k: int) -> None:
    tensor = _tensor(name, 3, 20, k)
    layout = layout_of("test", tensor.format)
    tiles = tile_pack.pack(layout, tensor)
    for expert in range(3):
        planes = {name: plane[expert] for name, plane in tensor.planes.items()}
        alone = tile_pack.pack(layout, QuantTensor((20, k), tensor.format, planes))
        mine = tiles.data.reshape(3, -1)[expert]
        np.testing.assert_array_equal(mine, alone.data)


def test_a_tensor_is_packed_once_and_not_kept_beyond_its_life() -> None:
    tensor = _tensor("int4_sym_g32_f16", 16, 64)
    first = tile_pack.tiles_of("test", tensor)
    assert tile_pack.tiles_of("test", tensor) is first
    gc.collect()  # what other tests left behind
    before = len(tile_pack._packed)
    del tensor
    gc.collect()
    assert len(tile_pack._packed) == before - 1


def test_large_allocations_begin_on_a_large_page() -> None:
    assert allocate((4 << 20) + 1).ctypes.data % (2 << 20) == 0
    assert allocate(100).ctypes.data % LINE == 0


@pytest.mark.parametrize("name", ["int4_sym_g34_f16", "int8_g37_f32", "bf16", "fp8_e4m3_row_f32"])
def test_formats_without_tiles_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedOp, match=rf"linear: .* {name} .*; keep its activations fp32"):
        layout_of("linear", parse_format(name))


@pytest.mark.parametrize("name", known_formats())
def test_what_a_plan_multiplies_with_int8_has_tiles(name: str) -> None:
    fmt = parse_format(name)
    try:
        layout_of("linear", fmt)
        tiles = True
    except UnsupportedOp:
        tiles = False
    assert tiles == (takes_int8(fmt) or isinstance(fmt, Ternary))


def _quantized(x: np.ndarray, group: int) -> dict[str, np.ndarray]:
    q = np.empty(x.shape, np.int8)
    scale = np.empty((len(x), groups_of(x.shape[1], group)), np.float32)
    quantize(x=x, q=q, scale=scale, group=group, **GROUPED)
    return {"x": q, "x_scale": scale}


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "group"),
    [
        ("int4_sym_g32_f16", 150, 37, 2880, 128),
        ("int4_asym_g128_f16", 21, 33, 2880, 32),
        ("int8_row_bf16", 33, 19, 6912, 0),
        ("mxfp4", 9, 50, 2880, 32),
        ("mxfp4", 260, 5, 6912, 128),
        ("ternary", 30, 20, 6912, 0),
        ("ternary", 5, 20, 2880, 0),
        ("tq1_0", 6, 20, 1280, 128),
        ("q2_k", 8, 20, 768, 32),
        ("q4_k", 11, 37, 2048, 128),
        ("q4_k", 150, 37, 2048, 128),
        ("q6_k", 26, 33, 2816, 0),
        ("q6_k", 39, 33, 2816, 128),
        ("q2_k", 27, 20, 768, 32),
        ("q3_k", 40, 19, 1280, 128),
        ("iq4_xs", 34, 19, 1280, 128),
        ("int8_g32_f16", 35, 21, 1184, 32),
        ("iq4_xs", 9, 19, 1024, 32),
        ("q4_1", 21, 37, 576, 128),
        ("q5_0", 33, 19, 896, 128),
        ("q5_1", 9, 50, 1568, 0),
        ("int4_sym_g32_f16", 3, 19, 1184, 32),
        ("q4_1", 5, 19, 1568, 32),
        ("iq4_nl", 6, 19, 1184, 32),
        ("q5_0", 7, 35, 1120, 32),
        ("q5_k", 3, 19, 768, 128),
        ("q3_k", 6, 19, 1280, 128),
        ("q5_k", 42, 19, 1280, 128),
        ("iq3_s", 25, 19, 768, 32),
        ("tcq2", 9, 37, 1216, 128),
        ("tcq3", 35, 19, 2112, 128),
        ("tcq4", 6, 33, 576, 128),
        ("tcq5", 21, 20, 1088, 128),
    ],
)
def test_shapes_that_cross_every_block(name: str, m: int, n: int, k: int, group: int) -> None:
    rng = _rng(f"{name}{m}")
    values = {
        **_quantized(rng.standard_normal((m, k), dtype=np.float32), group),
        "w": _tensor(name, n, k),
        "residual": rng.standard_normal((m, n), dtype=np.float32),
    }
    sizes, attrs = {"M": m, "N": n}, {"group": group}
    got = run("linear", sizes, attrs, values)["y"]
    expected = run("linear", sizes, attrs, values, threads=0)["y"]
    rms, largest = error(got, expected)
    assert rms < 2e-6 and largest < 2e-5, (rms, largest)
    for threads in (1, 3):
        assert np.array_equal(run("linear", sizes, attrs, values, threads)["y"], got)
    last = {name: v[-1:] if isinstance(v, np.ndarray) else v for name, v in values.items()}
    alone = run("linear", {**sizes, "M": 1}, attrs, last)["y"]
    assert np.array_equal(alone[0], got[-1])


@pytest.mark.parametrize("m", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("code", [-128, 127])
@pytest.mark.parametrize("name", ["int8_row_f32", "int8_g32_f32", "int8_g128_f32"])
def test_int8_products_do_not_saturate(name: str, code: int, m: int) -> None:
    k, n = 256, 17
    fmt = parse_format(name)
    assert isinstance(fmt, Int8)
    planes = {
        plane: np.full(spec.shape, code if plane == "codes" else 1, spec.storage)
        for plane, spec in fmt.planes((n, k)).items()
    }
    planes["codes"][::2] = -128 + 255 * (np.arange(k) % 2)
    q = np.full((m, k), -127, np.int8)  # quantize makes no -128
    q[:, ::3] = 127
    values = {"x": q, "x_scale": np.ones((m, 1), np.float32), "w": QuantTensor((n, k), fmt, planes)}
    got = run("linear", {"M": m, "N": n}, {"group": 0}, values)["y"]
    exact = q.astype(np.int64) @ planes["codes"].astype(np.int64).T
    np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("name", ["int4_sym_row_f32", "int4_asym_g128_f32", "mxfp4", "ternary_f32"])
def test_extreme_codes_are_exact(name: str) -> None:
    k, n, m = 1024, 20, 5
    fmt = parse_format(name)
    planes = {}
    for plane, spec in fmt.planes((n, k)).items():
        if plane in ("codes", "blocks"):
            fill = 0xAA if isinstance(fmt, Ternary) else 0x77 if isinstance(fmt, Mxfp4) else 0xFF
        else:
            fill = {"zeros": 0, "scales": 127 if isinstance(fmt, Mxfp4) else 1}.get(plane, 1)
        planes[plane] = np.full(spec.shape, fill, spec.storage)
    w = QuantTensor((n, k), fmt, planes)
    q = np.full((m, k), -128, np.int8)
    q[1], q[2, ::2] = 127, 127
    values = {"x": q, "x_scale": np.ones((m, 1), np.float32), "w": w}
    got = run("linear", {"M": m, "N": n}, {"group": 0}, values)["y"]
    np.testing.assert_array_equal(got, (q.astype(np.float64) @ w.decode().T).astype(np.float32))


@pytest.mark.parametrize("m", [1, 3, 33])
@pytest.mark.parametrize("byte", [0x00, 0x77, 0x7F, 0x80, 0xFF, None])
@pytest.mark.parametrize("name", [*BLOCK_FORMATS, "iq2_xs", "iq1_s"])
def test_extreme_blocks_do_not_overflow(name: str, byte: int | None, m: int) -> None:
    n, k = 18, 512
    fmt = parse_format(name)
    assert isinstance(fmt, Ggml)
    fields = KINDS[fmt.kind].fields
    stored = _rng(f"{name}{byte}").integers(0, 256, (n, k // 256, fields.itemsize), np.uint8)
    if byte is not None:
        stored[...] = byte
    blocks = stored.view(fields)
    blocks["d"], sign = 0.75, np.where(np.arange(n) % 2, 1, -1)
    blocks["d"] *= sign[:, None, None].astype(np.float16)
    if "dmin" in (fields.names or ()):
        blocks["dmin"] = 1.25
    w = QuantTensor((n, k), fmt, {"blocks": stored.reshape(n, -1)})
    q = np.full((m, k), -128, np.int8)
    q[:, ::3], q[-1, k // 2 :] = 127, 127
    values = {"x": q, "x_scale": np.ones((m, 1), np.float32), "w": w}
    got = run("linear", {"M": m, "N": n}, {"group": 0}, values)["y"]
    exact = q.astype(np.float64) @ w.decode().astype(np.float64).T
    terms = np.abs(q.astype(np.float64)) @ np.abs(w.decode().astype(np.float64)).T
    assert (np.abs(got - exact) <= 4e-7 * (terms + np.abs(exact)) + 1e-30).all()


def test_scales_at_the_ends_of_their_types() -> None:
    q = np.ones((2, 64), np.int8)
    for name, plane in (("mxfp4", [0, 1, 60, 200]), ("int8_g32_f16", [6e-8, -65504.0, 1e-5, 0.0])):
        fmt = parse_format(name)
        planes = {p: np.full(s.shape, 1, s.storage) for p, s in fmt.planes((2, 64)).items()}
        planes["scales"][...] = np.array(plane).reshape(2, 2)
        w = QuantTensor((2, 64), fmt, planes)
        values = {"x": q, "x_scale": np.ones((2, 2), np.float32), "w": w}
        got = run("linear", {"M": 2, "N": 2}, {"group": 32}, values)["y"]
        np.testing.assert_allclose(got, q @ w.decode().T, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(("group", "scales"), [(64, 4), (128, 3), (0, 2)])
def test_groups_that_do_not_fit_are_refused(group: int, scales: int) -> None:
    values = {
        "x": np.zeros((1, 256), np.int8),
        "x_scale": np.ones((1, scales), np.float32),
        "w": _tensor("int8_row_f32", 16, 256),
    }
    with pytest.raises(ShapeError, match="expected group 32, 128 or 0"):
        run("linear", {"M": 1, "N": 16}, {"group": group}, values)


@pytest.mark.parametrize(("dtype", "scaled"), [(np.float32, True), (np.int8, False)])
def test_codes_and_scales_come_together(dtype: type, scaled: bool) -> None:
    values = {"x": np.zeros((1, 64), dtype), "w": _tensor("int8_row_f32", 16, 64)}
    if scaled:
        values["x_scale"] = np.ones((1, 1), np.float32)
    with pytest.raises(ShapeError, match="expected int8 with scales, or float32 without"):
        run("linear", {"M": 1, "N": 16}, {"group": 0}, values)


@pytest.mark.parametrize("name", ["int4_sym_g32_f16", "int8_g32_f16", "q5_0", "q4_k"])
def test_the_distance_that_is_set_holds_for_any_number_of_tokens(name: str) -> None:
    m, n, k, distance = 5, 48, 512, 987654321
    buffers = {
        "x": Buffer((m, k), "i8", "M", "input"),
        "scale": Buffer((m, 16), "f32", "M", "input"),
        "y": Buffer((m, n), "f32", "M", "output"),
    }
    calls = (Call("linear", {"x": "x", "x_scale": "scale", "w": "w", "y": "y"}, {"group": 32}),)
    plan, found = Plan(m, 0, buffers, {}, ("w",), calls), {}
    values = _quantized(_rng(name).standard_normal((m, k), dtype=np.float32), 32)
    for ahead in (None, 0, distance):
        hints = Hints(prefetch_distance=ahead)
        with closing(CpuExecutor(plan, {"w": _tensor(name, n, k)}, 2, hints=hints)) as executor:
            executor.array("x")[...], executor.array("scale")[...] = values.values()
            for tokens in (1, 2, 3, m):
                executor.step(tokens, 0)
                y = executor.array("y")[:tokens].copy()
                assert np.array_equal(y, found.setdefault(tokens, y))
            asked = executor._team.work.tapes[0].tolist().count(distance)
            assert asked == (2 if ahead else 0)


def test_products_of_a_plan_share_the_quantised_activations() -> None:
    m, k, sizes = 5, 352, {"a": 48, "b": 20}
    buffers = {
        "x": Buffer((m, k), "f32", "M", "input"),
        "q": Buffer((m, k), "i8", "M"),
        "scale": Buffer((m, 3), "f32", "M"),
        **{f"y{w}": Buffer((m, n), "f32", "M", "output") for w, n in sizes.items()},
    }
    calls = [Call("quantize", {"x": "x", "q": "q", "scale": "scale"}, {"group": 128, **GROUPED})]
    for w in sizes:
        args = {"x": "q", "x_scale": "scale", "w": w, "y": f"y{w}"}
        calls.append(Call("linear", args, {"group": 128}))
    plan = Plan(m, 0, buffers, {}, tuple(sizes), tuple(calls))
    weights = {"a": _tensor("int4_sym_g32_f16", 48, k), "b": _tensor("mxfp4", 20, k)}
    x = _rng("plan").standard_normal((m, k), dtype=np.float32)
    executors = [ReferenceExecutor(plan, weights), CpuExecutor(plan, weights, 2)]
    for tokens in (m, 1, 3):
        for executor in executors:
            executor.array("x")[...] = x + tokens
            executor.step(tokens, 0)
        for w in sizes:
            expected, got = (e.array(f"y{w}")[:tokens] for e in executors)
            assert max(error(got, expected)) < 2e-5
    executors[1].close()
