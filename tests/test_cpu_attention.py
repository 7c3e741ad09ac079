"""Attention and KV cache kernels of the CPU beyond the op table's cases."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import Values, run
from op_cases import error

from clocher_kernels.dtypes import from_f32
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.ops import OPS
from clocher_kernels.ops.attention import KV_DTYPES, visible_cells
from clocher_kernels.ops.cases import case_plan
from clocher_kernels.ops.contract import Case
from clocher_kernels.plan import Attr
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.ops.attention_block import LONGEST
from cpu_fallback.team import team

DRAWN = settings(max_examples=40)
TALL_TILES = [
    ("f16", 4, 64, 64),
    ("f32", 4, 64, 64),
    ("bf16", 1, 36, 16),
    ("f16", 3, 2 + LONGEST, 64),
    ("i8", 4, 64, 64),
]
"""Shapes of prompts: KV dtype, heads of a group, values of a head, cells of a page."""


def assert_near(kv: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Compare with the reference; queries and weights of int8 cells have 16 bits."""
    rms, largest = error(got, expected)
    times = 20 if kv == "i8" else 1
    assert rms <= 5e-6 * times and largest <= 5e-5 * times


class Cache:
    """A cache whose every cell is NaN, and whose pages are shuffled.

    Args:
        kv: KV dtype.
        slots: sequences.
        blocks: pages of each.
        size: cells of a page.
        heads: key/value heads.
        dim: values of a head.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        kv: str,
        slots: int,
        blocks: int,
        size: int,
        heads: int,
        dim: int,
    ) -> None:
        self.rng, self.kv = rng, kv
        self.pages = rng.permutation(slots * blocks).reshape(slots, blocks).astype(np.int32)
        self.shape = (slots * blocks, heads, size, dim)
        self.sizes = {"S": slots, "B": blocks, "P": slots * blocks, "H": heads, "T": size, "D": dim}
        self.planes: Values = {}
        for name in "kv":
            if kv == "i8":
                self.planes[f"{name}_cache"] = rng.integers(-127, 128, self.shape).astype(np.int8)
                self.planes[f"{name}_scale"] = np.full(self.shape[:3], np.nan, np.float32)
            else:
                nothing = np.full(self.shape, np.nan, np.float32)
                self.planes[f"{name}_cache"] = from_f32(nothing, kv)

    def fill(self, slot: int, cells: list[int]) -> None:
        """Give some cells of a slot values."""
        heads, size, dim = self.shape[1:]
        index = np.array(cells, np.int64)
        page, offset = self.pages[slot][index // size], index % size
        for name in "kv":
            if self.kv == "i8":
                scale = self.rng.random((len(cells), heads), dtype=np.float32) * np.float32(0.03)
                self.planes[f"{name}_scale"][page, :, offset] = scale
            else:
                values = self.rng.standard_normal((len(cells), heads, dim), dtype=np.float32)
                self.planes[f"{name}_cache"][page, :, offset] = from_f32(values, self.kv)


def tokens(*rows: tuple[int, int, int, int]) -> Values:
    """Return the token inputs of (slot, position, end, ancestors)."""
    slots, positions, ends, ancestors = zip(*rows, strict=True)
    return {
        "slots": np.array(slots, np.int32),
        "positions": np.array(positions, np.int32),
        "ends": np.array(ends, np.int32),
        "ancestors": np.array(ancestors, np.uint64),
    }


def attend(
    cache: Cache, group: int, window: int, values: Values, threads: int = 2, **more: Attr
) -> np.ndarray:
    """Attend on the CPU, or in the reference if threads is 0; more attributes may be given."""
    heads, dim = cache.sizes["H"] * group, cache.sizes["D"]
    sizes = {**cache.sizes, "M": len(values["slots"]), "N": heads, "F": heads * dim}
    attrs = {"cache_dtype": cache.kv, "scale": dim**-0.5, "window": window, **more}
    return run(
        "attention", sizes, attrs, {**values, "pages": cache.pages, **cache.planes}, threads
    )["y"]


def queries(rng: np.random.Generator, count: int, cache: Cache, group: int) -> np.ndarray:
    width = cache.sizes["H"] * group * cache.sizes["D"]
    return rng.standard_normal((count, width), dtype=np.float32)


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (128, 0), (0, 700), (128, 2002)])
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_cells_that_are_not_visible_are_not_read(kv: str, window: int, chunk: int) -> None:
    rng = np.random.default_rng(11)
    cache = Cache(rng, kv, 2, 130, 16, 2, 20)
    rows = (
        (0, 1999, 2000, 0),
        (1, 777, 778, 0),
        (1, 2003, 2000, 0b101101),
        (0, 40, 64, 0),
    )
    for slot, *token in rows:
        cache.fill(slot, visible_cells(*token, window, chunk))
    values = {**tokens(*rows), "q": queries(rng, len(rows), cache, 3)}
    got = attend(cache, 3, window, values, chunk=chunk)
    assert np.isfinite(got).all()
    assert_near(kv, got, attend(cache, 3, window, values, threads=0, chunk=chunk))


@pytest.mark.parametrize(
    ("window", "more"),
    [(0, {}), (9, {}), (0, {"chunk": 13}), (9, {"softcap": 2.0}), (7, {"chunk": 55})],
    ids=str,
)
def test_a_chunk_single_steps_and_a_chain_give_the_same_bits(
    window: int, more: dict[str, Attr]
) -> None:
    rng = np.random.default_rng(5)
    cache = Cache(rng, "bf16", 1, 6, 16, 2, 36)
    start, count = 41, 23
    cache.fill(0, list(range(start + count)))
    q = queries(rng, count, cache, 2)
    sinks = rng.standard_normal(4, dtype=np.float32)
    causal = [(0, start + i, start + i + 1, 0) for i in range(count)]
    chain = [(0, start + i, start, (1 << (i + 1)) - 1) for i in range(count)]
    chunk = attend(cache, 2, window, {**tokens(*causal), "q": q, "sinks": sinks}, **more)
    tree = attend(cache, 2, window, {**tokens(*chain), "q": q, "sinks": sinks}, 3, **more)
    assert chunk.tobytes() == tree.tobytes()
    for i in range(count):
        one = {**tokens(causal[i]), "q": q[i : i + 1], "sinks": sinks}
        assert attend(cache, 2, window, one, 1, **more)[0].tobytes() == chunk[i].tobytes()


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_long_context_gives_the_same_bits_however_it_is_divided(
    kv: str, group: int, window: int
) -> None:
    rng = np.random.default_rng(group)
    cache = Cache(rng, kv, 3, 12, 64, 2, 64)
    chunk = [(0, 690 + i, 691 + i, 0) for i in range(13)]
    decode = [(1, 0, 1, 0), (2, 519, 520, 0)]
    tree = [(2, 521, 520, 0b11), (2, 522, 520, 0b1101), (2, 521, 520, 0b100001)]
    rows = [*chunk[:5], decode[0], *chunk[5:], decode[1], *tree]
    for row in rows:
        cache.fill(row[0], visible_cells(*row[1:], window))
    q = queries(rng, len(rows), cache, group)
    together = attend(cache, group, window, {**tokens(*rows), "q": q}, threads=3)
    for count in (1, 6):
        for first in range(0, len(rows), count):
            some = slice(first, first + count)
            part = {**tokens(*rows[some]), "q": q[some]}
            assert attend(cache, group, window, part).tobytes() == together[some].tobytes()
    expected = attend(cache, group, window, {**tokens(*rows), "q": q}, threads=0)
    assert_near(kv, together, expected)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("kv", "group", "dim", "size"), TALL_TILES)
def test_a_prompt_gives_the_bits_of_each_of_its_tokens(
    kv: str, group: int, dim: int, size: int, window: int
) -> None:
    rng = np.random.default_rng(dim)
    cache = Cache(rng, kv, 1, 320 // size, size, 2, dim)
    start, count = 90, 170
    rows = [(0, start + i, start + i + 1, 0) for i in range(count)]
    cache.fill(0, list(range(start + count)))
    q = queries(rng, count, cache, group)
    prompt = attend(cache, group, window, {**tokens(*rows), "q": q}, threads=1)
    assert np.isfinite(prompt).all()
    apart = attend(cache, group, window, {**tokens(*rows), "q": q}, threads=3)
    assert apart.tobytes() == prompt.tobytes()
    for i in (0, 37, 38, 101, 102, count - 1):
        one = {**tokens(rows[i]), "q": q[i : i + 1]}
        assert attend(cache, group, window, one)[0].tobytes() == prompt[i].tobytes()


@pytest.mark.parametrize(("kv", "count"), [("f16", 1), ("i8", 3), ("e4m3", 8)])
def test_a_step_of_a_few_tokens_gives_the_same_bits_however_many_threads_share_it(
    kv: str, count: int
) -> None:
    rng = np.random.default_rng(4)
    cache = Cache(rng, kv, 2, 15, 64, 5, 48)
    rows = [(i % 2, 900 + i, 901 + i, 0) for i in range(count)]
    for row in rows:
        cache.fill(row[0], visible_cells(*row[1:], 0))
    values = {**tokens(*rows), "q": queries(rng, count, cache, 2)}
    one = attend(cache, 2, 0, values, 1)
    for threads in (2, 3, 7):
        assert attend(cache, 2, 0, values, threads).tobytes() == one.tobytes()
    assert_near(kv, one, attend(cache, 2, 0, values, threads=0))


def test_a_path_of_a_tree_gives_the_bits_of_decoding_token_by_token() -> None:
    rng = np.random.default_rng(8)
    cache = Cache(rng, "bf16", 2, 3, 64, 2, 32)
    cache.fill(0, list(range(70)))
    path = [0, 2, 5]
    for name in ("k_cache", "v_cache"):
        plane = cache.planes[name]
        plane[cache.pages[1]] = plane[cache.pages[0]]
        for depth, node in enumerate(path):
            source, target = cache.pages[0][(60 + depth) // 64], cache.pages[1][(60 + node) // 64]
            plane[target, :, (60 + node) % 64] = plane[source, :, (60 + depth) % 64]
    q = queries(rng, 3, cache, 4)
    straight = [(0, 60 + depth, 61 + depth, 0) for depth in range(3)]
    masks = [sum(1 << node for node in path[: depth + 1]) for depth in range(3)]
    tree = [(1, 60 + depth, 60, mask) for depth, mask in enumerate(masks)]
    one, other = (attend(cache, 4, 0, {**tokens(*rows), "q": q}) for rows in (straight, tree))
    assert one.tobytes() == other.tobytes()


@st.composite
def _drawn(draw: st.DrawFn) -> tuple[Cache, int, int, Values, dict[str, Attr]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots, blocks, size = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    heads, group, dim = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(2, 130))
    cache = Cache(rng, draw(st.sampled_from(KV_DTYPES)), slots, blocks, size, heads, dim)
    window, chunk = (draw(st.one_of(st.just(0), st.integers(1, 50))) for _ in range(2))
    softcap = draw(st.sampled_from([0.0, 0.3, 5.0, 50.0]))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        slot, end = draw(st.integers(0, slots - 1)), draw(st.integers(1, blocks * size))
        room = min(64, blocks * size - end)
        ancestors = draw(st.integers(0, (1 << room) - 1))
        position = end - 1 + ancestors.bit_count()
        rows.append((slot, position, end, ancestors))
        cache.fill(slot, visible_cells(position, end, ancestors, window, chunk))
    values = {**tokens(*rows), "q": queries(rng, len(rows), cache, group)}
    if draw(st.booleans()):
        values["sinks"] = rng.standard_normal(heads * group, dtype=np.float32)
    return cache, group, window, values, {"chunk": chunk, "softcap": softcap}


@DRAWN
@given(_drawn())
def test_attention_of_any_shape(drawn: tuple[Cache, int, int, Values, dict[str, Attr]]) -> None:
    cache, group, window, values, more = drawn
    got, expected = (attend(cache, group, window, values, n, **more) for n in (2, 0))
    assert_near(cache.kv, got, expected)


@DRAWN
@given(
    st.sampled_from(KV_DTYPES),
    st.integers(1, 3),
    st.integers(1, 130),
    st.integers(1, 40),
    st.integers(0, 2**32),
)
def test_append_of_any_shape(kv: str, heads: int, dim: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(rng, kv, 3, 2, size, heads, dim)
    rows = tokens(*((slot, position, 0, 0) for slot, position in ((0, 0), (1, 2 * size - 1))))
    k, v = (
        rng.standard_normal((2, heads * dim), dtype=np.float32)
        * np.exp(rng.uniform(-12, 6, (2, heads * dim))).astype(np.float32)
        for _ in "kv"
    )
    values = {"k": k, "v": v, **rows, "pages": cache.pages, **cache.planes}
    sizes = {**cache.sizes, "M": 2, "F": heads * dim}
    got, expected = (run("kv_append", sizes, {"cache_dtype": kv}, values, n) for n in (2, 0))
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.mark.parametrize("threads", [0, 2], ids=["reference", "cpu"])
def test_f16_saturates_and_what_is_not_finite_becomes_nan(threads: int) -> None:
    cache = Cache(np.random.default_rng(0), "f16", 1, 1, 16, 1, 20)
    given = [65503, 65519, 65520, 7e4, -7e4, 3e38, -3e38, np.inf, -np.inf, np.nan, 1, *[0] * 9]
    rows = np.array([given], np.float32)
    values = {"k": rows, "v": rows, **tokens((0, 3, 0, 0)), "pages": cache.pages, **cache.planes}
    sizes = {**cache.sizes, "M": 1, "F": 20}
    got = run("kv_append", sizes, {"cache_dtype": "f16"}, values, threads)
    most, odd = 65504, np.nan
    expected = [most, most, most, most, -most, most, -most, odd, odd, odd, 1, *[0] * 9]
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(got[name][cache.pages[0, 0], 0, 3], np.float16(expected))


@pytest.mark.parametrize(("kv", "least"), [("f16", 0.9999), ("i8", 0.9995), ("e4m3", 0.998)])
def test_narrow_caches_stay_near_bf16_at_8k(kv: str, least: float) -> None:
    rng = np.random.default_rng(0)
    lines = {name: rng.standard_normal((128, 2, 64, 64), dtype=np.float32) for name in "kv"}
    q = rng.standard_normal((1, 2 * 8 * 64), dtype=np.float32)
    results = []
    for kind in ("bf16", kv):
        cache = Cache(rng, kind, 1, 128, 64, 2, 64)
        for name, values in lines.items():
            if kind == "i8":
                step = np.abs(values).max(axis=3) / np.float32(127)
                codes = np.rint(values / step[..., None]).astype(np.int8)
                cache.planes[f"{name}_cache"][cache.pages[0]] = codes
                cache.planes[f"{name}_scale"][cache.pages[0]] = step
            else:
                cache.planes[f"{name}_cache"][cache.pages[0]] = from_f32(values, kind)
        y = attend(cache, 8, 0, {**tokens((0, 8191, 8192, 0)), "q": q}).reshape(16, 64)
        results.append(y / np.linalg.norm(y, axis=1, keepdims=True))
    assert (results[0] * results[1]).sum(axis=1).min() >= least


def test_sums_of_int8_cells_fit_whatever_they_hold() -> None:
    rng = np.random.default_rng(6)
    cache = Cache(rng, "i8", 1, 1, 16, 1, 640)
    cache.fill(0, [0, 1])
    for offset, code in enumerate((127, 1)):
        cache.planes["k_cache"][cache.pages[0, 0], 0, offset] = code
    values = {**tokens((0, 1, 2, 0)), "q": np.ones((1, 640), np.float32)}
    assert_near("i8", attend(cache, 1, 0, values), attend(cache, 1, 0, values, threads=0))


@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_a_query_or_scale_that_is_not_finite_is_seen_in_the_result(odd: float) -> None:
    rng = np.random.default_rng(7)
    cache = Cache(rng, "i8", 1, 2, 64, 1, 64)
    cache.fill(0, list(range(100)))
    q = queries(rng, 2, cache, 4)
    q[1, 70] = odd  # of the second head
    y = attend(cache, 4, 0, {**tokens((0, 98, 99, 0), (0, 99, 100, 0)), "q": q}).reshape(8, 64)
    assert [bool(np.isfinite(row).all()) for row in y] == [True] * 5 + [False] + [True] * 2
    cache.planes["v_scale"][cache.pages[0, 1], 0, 35] = np.nan
    y = attend(
        cache, 4, 0, {**tokens((0, 98, 99, 0), (0, 99, 100, 0)), "q": abs(q[:1].repeat(2, 0))}
    )
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_a_token_that_sees_nothing_gets_zeros(sinks: bool) -> None:
    rng = np.random.default_rng(1)
    cache = Cache(rng, "f32", 1, 1, 16, 2, 32)
    values = {**tokens((0, 0, 0, 0)), "q": queries(rng, 1, cache, 2)}
    if sinks:
        values["sinks"] = np.array([-50, 0, 3, 80], np.float32)
    assert not attend(cache, 2, 0, values).any()


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_logits_of_a_wide_range_are_rescaled(order: str) -> None:
    rng = np.random.default_rng(2)
    cache = Cache(rng, "f32", 1, 10, 16, 1, 16)
    cache.fill(0, list(range(160)))
    line = np.linspace(-300, 300, 160, dtype=np.float32)
    if order == "falling":
        line = line[::-1]
    keys = np.zeros((10, 16, 16), np.float32)
    keys[..., 0] = line.reshape(10, 16)
    cache.planes["k_cache"][cache.pages[0], 0] = keys
    q = np.zeros((1, 16), np.float32)
    q[0, 0] = 4
    values = {**tokens((0, 159, 160, 0)), "q": q}
    rms, _ = error(attend(cache, 1, 0, values), attend(cache, 1, 0, values, threads=0))
    assert rms <= 3e-5  # an fp32 logit of 300 is known to 2e-5


@pytest.mark.parametrize("threads", [0, 2], ids=["reference", "cpu"])
@pytest.mark.parametrize("key", [np.inf, -np.inf, np.nan])
def test_a_cap_makes_no_number_of_what_is_not_finite(key: float, threads: int) -> None:
    rng = np.random.default_rng(4)
    cache = Cache(rng, "f32", 1, 2, 16, 1, 16)
    cache.fill(0, list(range(32)))
    cache.planes["k_cache"][cache.pages[0, 1], 0, 3, 5] = key
    rows = tokens((0, 18, 19, 0), (0, 19, 20, 0))
    y = attend(cache, 1, 0, {**rows, "q": queries(rng, 2, cache, 1)}, threads, softcap=30.0)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


@pytest.mark.parametrize("count", [5, 8, 19])
def test_what_is_scored_beside_the_cells_of_a_block_is_zero(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch memory may hold denormal numbers: eight tokens took eight times as long."""
    scratch, aligned = list[np.ndarray](), team.aligned

    def denormal(nbytes: int) -> np.ndarray:
        scratch.append(aligned(nbytes))
        scratch[-1].view(np.float32)[...] = np.float32(1e-40)
        return scratch[-1]

    monkeypatch.setattr(team, "aligned", denormal)
    rng = np.random.default_rng(5)
    cache = Cache(rng, "f16", 1, 1, 64, 1, 32)
    cache.fill(0, [*range(count)])
    rows = [(0, at, at + 1, 0) for at in range(count)]
    attend(cache, 4, 0, {**tokens(*rows), "q": queries(rng, count, cache, 4)}, threads=1)
    last = cache.planes["v_cache"][0, 0, count - 1].astype(np.float32).tobytes()
    (found,) = [each.tobytes().partition(last)[2] for each in scratch if last in each.tobytes()]
    assert found[: -count % 16 * len(last)] == bytes(-count % 16 * len(last))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"cache_dtype": "f64"}, UnsupportedOp, "cache_dtype='f64'; there are f32, bf16"),
        ({"cache_dtype": "f16"}, ShapeError, "is uint16; cache_dtype='f16' is stored as float16"),
        ({"sinks": np.zeros(3, np.float32)}, ShapeError, "3 sinks; expected one for each of 4"),
        ({"q": np.zeros((1, 96), np.float32)}, ShapeError, "multiple of 2 key/value heads x 32"),
        ({"k_scale": np.zeros((1, 2, 16), np.float32)}, ShapeError, "'k_scale' is there"),
    ],
    ids=["unknown", "other-storage", "sinks", "width", "scale"],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, str | np.ndarray], kind: type[Exception], message: str
) -> None:
    rng = np.random.default_rng(3)
    cache = Cache(rng, "bf16", 1, 1, 16, 2, 32)
    values = {**tokens((0, 0, 1, 0)), "q": queries(rng, 1, cache, 2)}
    values |= {"pages": cache.pages, **cache.planes}
    attrs: dict[str, Attr] = {"cache_dtype": "bf16", "scale": 1.0, "window": 0}
    for name, value in change.items():
        if isinstance(value, str):
            attrs[name] = value
        else:
            values[name] = value
    case = Case("wrong", {"M": 1, "F": values["q"].shape[1]}, {"cache_dtype": "bf16"})
    plan = case_plan(OPS["attention"], case, values)
    plan = replace(plan, calls=(replace(plan.calls[0], attrs=attrs),))
    with pytest.raises(kind, match=message):
        CpuExecutor(plan, {name: values[name] for name in plan.weights}, 1)
