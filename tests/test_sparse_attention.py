"""Attention that reads some pages: bounds are bounds, lists are a token's own, ids stay."""

from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import Values, run
from passkey_model import CONTEXT, make, text_with_keys
from sessions import make_session
from test_cpu_attention import Cache, queries, tokens
from test_session import MODELS, ids_of, model_of
from test_speculation import Free, Oracle

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import UsageError
from clocher_kernels.ops.attention import KV_DTYPES, bits_of
from clocher_kernels.ops.selection import LAST_PAGES, page_scores
from clocher_kernels.plan import Attr
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.binding import PagesRead
from clocher_runtime.engine.footprint import KVCacheConfig
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.models import spec
from clocher_runtime.models.spec import parse_selection
from clocher_runtime.speculation.speculator import Speculator

SELECTORS = ("topk:256", "threshold:6", "window:64+100", "dynamic:0.7")
NEW = 76
"""Enough for a page to become full, and old."""
PROMPTS = tuple(ids_of(seed, length) for seed, length in enumerate((633, 314, 505)))
NOTHING = PagesRead(0, 0)


def bound(cache: Cache, rows: Values, threads: int = 2) -> np.ndarray:
    """Return the bounds after a step; 7 where none were written."""
    shape = (cache.shape[0], cache.shape[1], 2, cache.shape[3])
    planes = {n: p for n, p in cache.planes.items() if n.startswith("k")}
    values = {**rows, "pages": cache.pages, **planes, "bounds": np.full(shape, 7, np.float32)}
    sizes = {**cache.sizes, "M": len(rows["slots"])}
    return run("page_bounds", sizes, {"cache_dtype": cache.kv}, values, threads)["bounds"]


def keys_of(cache: Cache, page: int) -> np.ndarray:
    """Return the keys of a page as they are stored, fp32 [H, T, D]."""
    keys = to_f32(cache.planes["k_cache"][page], cache.kv)
    return keys * cache.planes["k_scale"][page][..., None] if cache.kv == "i8" else keys


@settings(max_examples=60)
@given(
    st.sampled_from(KV_DTYPES),
    st.integers(1, 3),
    st.integers(1, 100),
    st.integers(1, 70),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_no_logit_of_a_page_is_above_its_score(
    kv: str, heads: int, dim: int, size: int, group: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(rng, kv, 1, 3, size, heads, dim)
    cache.fill(0, list(range(3 * size)))
    ends = [size * (block + 1) for block in range(3)]
    found = bound(cache, tokens(*((0, end - 1, end, 0) for end in ends)))
    for block in range(3):
        page = cache.pages[0, block]
        for head in range(heads):
            q = rng.standard_normal((group, dim)).astype(np.float32)
            keys = keys_of(cache, page)[head]
            logits = q.astype(np.float64) @ keys.astype(np.float64).T
            (score,) = page_scores(q, found[page, head][None])
            assert logits.max() <= score + 1e-6 * abs(score)
            for place in range(2):  # each bound is a key's own value: none can be tighter
                assert np.isin(found[page, head, place], keys).all()


def test_a_page_that_is_written_again_has_new_bounds() -> None:
    rng = np.random.default_rng(0)
    cache = Cache(rng, "f16", 1, 2, 64, 2, 32)
    cache.fill(0, list(range(128)))
    guess = tokens((0, 63, 60, 0b1111))  # a node of a tree, in the last cell of the first page
    before = bound(cache, guess)
    assert (before[cache.pages[0, 0]] != 7).all() and (before[cache.pages[0, 1]] == 7).all()
    cache.fill(0, [61, 62, 63])
    after = bound(cache, tokens((0, 63, 64, 0)))
    keys = keys_of(cache, cache.pages[0, 0])
    np.testing.assert_array_equal(after[cache.pages[0, 0], :, 0], keys.max(axis=1))
    np.testing.assert_array_equal(after[cache.pages[0, 0], :, 1], keys.min(axis=1))


def chosen(
    cache: Cache, bounds: np.ndarray, q: np.ndarray, end: int, threads: int, **attrs: Attr
) -> np.ndarray:
    """Return which pages a token of slot 0 lists, [H, pages that it sees]."""
    words = -(-cache.sizes["B"] // 64)
    values = {**tokens((0, end - 1, end, 0)), "pages": cache.pages, "bounds": bounds, "q": q}
    values["counts"] = np.zeros((1, cache.sizes["H"], 2), np.int64)
    sizes = {**cache.sizes, "M": 1, "W": words, "F": q.shape[1]}
    size = cache.sizes["T"]
    made = run("select_pages", sizes, {"cells": size, "scale": 1.0, **attrs}, values, threads)
    listed = bits_of(made["listed"][0])
    seen = -(-end // size)
    assert not listed[:, seen:].any()
    assert made["counts"][0].tolist() == [[int(row.sum()), seen] for row in listed]
    return listed[:, :seen]


@pytest.mark.parametrize("threads", [0, 2], ids=["reference", "cpu"])
def test_first_and_last_pages_are_always_listed_and_the_best_between(threads: int) -> None:
    rng = np.random.default_rng(3)
    cache = Cache(rng, "f32", 1, 90, 64, 2, 16)
    bounds = np.zeros((90, 2, 2, 16), np.float32)
    best = [7, 70, 33]
    bounds[cache.pages[0, best], 0, 0, 4] = 5
    bounds[cache.pages[0, 20], 1, 0, 9] = np.nan
    q = np.zeros((1, 64), np.float32)
    q[0, [4, 20, 32 + 9]] = 1  # of the heads of a group, one each
    for end, always in ((64 * 88 + 1, [0, 87, 88]), (64 * 88, [0, 86, 87])):
        rows = chosen(cache, bounds, q, end, threads, budget=6)
        assert np.flatnonzero(rows[0]).tolist() == sorted([*always, *best])
        # What is not finite is looked at, and of equal pages the first are.
        assert np.flatnonzero(rows[1]).tolist() == sorted([*always, 20, 1, 2])
        for more in ({"margin": 4.0}, {"mass": 0.5}):
            rows = chosen(cache, bounds, q, end, threads, **more)
            assert np.flatnonzero(rows[0]).tolist() == sorted([*always, *best])
        rows = chosen(cache, bounds, q, end, threads, first=3, last=4)
        assert np.flatnonzero(rows[0]).tolist() == [0, 1, 2, *(always[2] - i for i in (3, 2, 1, 0))]


def test_what_is_not_listed_is_not_read() -> None:
    rng = np.random.default_rng(2)
    cache = Cache(rng, "f16", 2, 10, 64, 2, 36)
    rows = [(0, 599, 600, 0), (1, 130, 131, 0), (0, 420, 421, 0), (1, 638, 636, 0b111)]
    lists = np.zeros((4, 2, 10), bool)
    for index, (slot, _, end, tree) in enumerate(rows):
        pages = -(-(end + tree.bit_count()) // 64)
        lists[index, :, [0, pages - 1]] = True
        lists[index, :, pages // 2] = True
        own = [c for c in range(end + tree.bit_count()) if lists[index, 0, c // 64]]
        cache.fill(slot, own)
    words = np.zeros((4, 2, 8), np.uint8)
    words[..., :2] = np.packbits(lists, axis=-1, bitorder="little")
    sizes = {**cache.sizes, "N": 6, "F": 216, "W": 1}
    q, sinks = queries(rng, 4, cache, 3), rng.standard_normal(6, dtype=np.float32)
    results = []
    for threads in (2, 0):
        values = {**tokens(*rows), "q": q, "pages": cache.pages, **cache.planes, "sinks": sinks}
        values["listed"] = words.view(np.uint64)
        attrs: dict[str, Attr] = {"cache_dtype": "f16", "scale": 0.2, "window": 0}
        results.append(run("attention", {**sizes, "M": 4}, attrs, values, threads)["y"])
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[0], results[1], atol=2e-5)


def session_of(name: str, attn: str, **more: object) -> Session:
    options: dict[str, object] = {"threads": 2, "context": 768, "chunk": 128, **more}
    return make_session(model_of(name), attn=attn, **options)


def texts_of(session: Session, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    for token in session.generate(prompts, NEW, stop_ids=frozenset()):
        texts[token.sequence].append(token.id)
    return texts


@cache
def alone(name: str, attn: str) -> list[list[int]]:
    with closing(session_of(name, attn)) as session:
        return [texts_of(session, (prompt,))[0] for prompt in PROMPTS]


def logits_of(attn: str, name: str = "llama", **more: object) -> tuple[np.ndarray, float]:
    with closing(session_of(name, attn, all_logits=True, **more)) as session:
        return session.logits(PROMPTS[0]), session.pages_read.share(NOTHING)


@pytest.mark.parametrize("attn", SELECTORS)
@pytest.mark.one_in(2)
def test_batches_threads_and_chunks_change_nothing(attn: str) -> None:
    expected, share = logits_of(attn)
    assert 0.2 < share < 0.9
    for more in ({"threads": 1, "chunk": 37}, {"chunk": 1, "kv_dtype": "f16"}):
        assert logits_of(attn, **more)[0].tobytes() == expected.tobytes()
    with closing(session_of("llama", attn, batch=3)) as session:
        assert texts_of(session) == alone("llama", attn)


@pytest.mark.parametrize("attn", SELECTORS)
def test_drafts_change_nothing(attn: str) -> None:
    expected = alone("llama", attn)
    with closing(session_of("llama", attn, batch=3, speculate="suffix")) as session:
        rows = session.executor.plan.rows
        speculator = Speculator(lambda _: Oracle(expected, 1), rows)
        speculator.costs = Free(rows)
        session.scheduler.forwards.speculator = speculator
        assert texts_of(session) == expected
        assert speculator.counts.drafted > speculator.counts.accepted > 30


@pytest.mark.parametrize("attn", SELECTORS)
def test_who_is_preempted_and_computed_again_selects_the_same(attn: str) -> None:
    # Where a busy machine made pieces of prompts short, a text might end before pages are scarce.
    with closing(session_of("llama", attn, batch=3, kv_pages=24, itl_ms=1e9)) as session:
        assert texts_of(session) == alone("llama", attn)
        assert session.scheduler.preempted


@pytest.mark.parametrize("attn", SELECTORS)
def test_a_shared_beginning_has_its_bounds(attn: str) -> None:
    with closing(session_of("llama", attn, prefix_cache=True)) as session:
        for _ in range(2):
            assert texts_of(session, PROMPTS[:1]) == alone("llama", attn)[:1]
        assert session.scheduler.reused


def test_a_budget_for_all_pages_gives_the_bits_of_dense() -> None:
    dense, _ = logits_of("dense")
    every, share = logits_of("topk:768")
    assert share == 1.0 and every.tobytes() == dense.tobytes()
    some, _ = logits_of("topk:256")
    assert some[:192].tobytes() == dense[:192].tobytes()  # three pages are always read
    assert some[-1].tobytes() != dense[-1].tobytes()


@pytest.mark.parametrize("attn", ["topk:256", "window:1+64"])
def test_the_reference_selects_the_same(attn: str) -> None:
    got, share = logits_of(attn)
    with closing(
        make_session(
            model_of("llama"), backend="reference", context=768, attn=attn, all_logits=True
        )
    ) as session:
        expected = session.logits(PROMPTS[0])
        assert session.pages_read.share(NOTHING) == share
    close = np.abs(got - expected).max(axis=1) < 0.05 * expected.std()
    assert close.mean() > 0.97


def test_layers_with_a_window_stay_as_they_are() -> None:
    with closing(session_of("gptoss", "topk:256")) as session:
        calls = session.executor.plan.calls
    windows = model_of("gptoss").spec.windows
    attends = [call for call in calls if call.op == "attention"]
    assert ["listed" in call.args for call in attends] == [not window for window in windows]
    assert sum(call.op == "page_bounds" for call in calls) == windows.count(0)


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_the_promise_counts_bounds_which_are_an_eighth_of_the_keys_at_most(kv: str) -> None:
    config = KVCacheConfig(dtype=kv, context=768)
    promised = config.memory_usage_mb(MODELS["llama"], "cpu", attn="topk:256")
    with closing(session_of("llama", "topk:256", kv_dtype=kv)) as session:
        assert promised == session.kv_cache_bytes / (1 << 20)
        buffers = session.executor.plan.buffers
        assert buffers["kv.0.bounds"].nbytes <= buffers["kv.0.k"].nbytes / 8
    assert LAST_PAGES == spec.LAST_PAGES
    window = config.memory_usage_mb(MODELS["llama"], "cpu", attn="window:64+64")
    assert config.memory_usage_mb(MODELS["llama"], "cpu") < window < promised


@pytest.mark.parametrize(
    "attn",
    ["", "sparse", "topk", "topk:", "topk:255", "topk:-1", "topk:1e9", "topk:99999999"]
    + ["threshold:0", "threshold:nan", "window:4", "window:4+0", "window:+4", "window:1+2+3"]
    + ["dynamic:0", "dynamic:1", "dynamic:1.5", "dense:1", "auto", "topk:²56"],
)
def test_what_is_no_way_to_read_is_refused(attn: str) -> None:
    with pytest.raises(UsageError, match="expected dense, topk:N"):
        session_of("llama", attn)


def test_what_cannot_read_less_is_refused() -> None:
    with pytest.raises(UsageError, match="the stub back end reads all pages"):
        session_of("llama", "topk:256", backend="stub")
    with pytest.raises(UsageError, match="attn: got 256, expected dense, topk"):
        session_of("llama", 256)  # type: ignore[arg-type]


def test_what_a_selection_reads() -> None:
    assert parse_selection("dense") is None
    topk, window = parse_selection("topk:300"), parse_selection("window:65+128")
    assert topk is not None and (topk.budget, topk.is_scored) == (5, True)
    assert window is not None and (window.first, window.last, window.is_scored) == (2, 3, False)


DEPTHS = (0.02, 0.25, 0.5, 0.75, 0.95)


def answers(folder: Path, attn: str, length: int) -> tuple[list[bool], float]:
    """Return which keys at some depths of a text are answered, and the share of pages read."""
    ids, keys = text_with_keys(length - 2, DEPTHS)
    model = load_model(open_checkpoint(make(folder)), None)
    options: dict[str, object] = {"context": length, "chunk": 512, "prefix_cache": True}
    with closing(make_session(model, threads=2, attn=attn, **options)) as session:
        made = [
            next(iter(session.generate([[*ids, key]], 1, stop_ids=frozenset()))).id for key in keys
        ]
        share = session.pages_read.share(NOTHING)
    return [token == value for token, value in zip(made, keys.values(), strict=True)], share


@pytest.mark.parametrize("attn", ["dense", "topk:512", "threshold:20", "dynamic:0.9"])
def test_keys_at_every_depth_are_found(attn: str, tmp_path: Path) -> None:
    found, share = answers(tmp_path, attn, 4096)
    assert all(found)
    assert attn == "dense" or share < 0.6


def test_a_window_forgets_the_middle(tmp_path: Path) -> None:
    found, _ = answers(tmp_path, "window:64+512", 4096)
    assert found == [False, False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("attn", ["topk:2048", "threshold:20", "dynamic:0.9"])
def test_keys_at_every_depth_of_32k_are_found(attn: str, tmp_path: Path) -> None:
    found, share = answers(tmp_path, attn, CONTEXT)
    assert all(found) and share < 0.6
