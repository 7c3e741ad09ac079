"""Pages that attention may leave out on CUDA: their bounds, the lists, and reading by a list."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sass_ratchet
from cuda_cases import aot_report, run_interpreted
from op_cases import Arrays, OpRun
from test_cuda_attention import close, paged

from clocher_kernels.cuda import attention
from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.attention import bits_of
from clocher_kernels.ops.cases import case_plan
from clocher_kernels.ops.contract import Case
from clocher_kernels.plan import Attr

MODES: dict[str, dict[str, Attr]] = {
    "topk": {"budget": 9},
    "threshold": {"margin": 3.0},
    "dynamic": {"mass": 0.7},
    "window": {"first": 2, "last": 4},
}


def words_of(lists: np.ndarray) -> np.ndarray:
    """Return lists [M, H, B] of booleans as words [M, H, 1]."""
    words = np.zeros((*lists.shape[:2], 8), np.uint8)
    packed = np.packbits(lists, axis=-1, bitorder="little")
    words[..., : packed.shape[-1]] = packed
    return words.view(np.uint64)


def only(op: OpRun, tokens: slice, blocks: int | None = None) -> OpRun:
    """Return a case with some of its tokens only, and a page table cut to some pages."""
    few = copy.copy(op)
    few.values = {
        param.name: op.values[param.name][tokens] if param.letters[:1] == ("M",) else value
        for param in op.spec.params
        if (value := op.values.get(param.name)) is not None
    }
    few.values["pages"] = np.ascontiguousarray(op.values["pages"][:, :blocks])
    sizes = {**op.case.sizes, "M": len(few.values["slots"]), "B": few.values["pages"].shape[1]}
    few.plan = case_plan(op.spec, Case(op.case.id, sizes, op.case.attrs, {}), few.values)
    return few


def attending(
    kv: str, page: int, ends: Sequence[int], lists: np.ndarray | None, **more: Any
) -> OpRun:
    """Make a case of causal tokens of slot 1, of 384 cells; six heads, two of the cache."""
    op = paged("listed", kv, len(ends), page, sinks=True, **more)
    op.values["slots"][...] = 1
    op.values["ends"][...] = ends
    op.values["positions"][...] = op.values["ends"] - 1
    if lists is not None:
        op.values["listed"] = words_of(lists)
        sizes = {**op.case.sizes, "W": 1}
        op.plan = case_plan(op.spec, Case(op.case.id, sizes, op.case.attrs, {}), op.values)
    return op


def hide(op: OpRun, lists: np.ndarray) -> None:
    """Put NaN into the pages that a key/value head lists for no token."""
    for head, listed in enumerate(lists.any(axis=0)):
        for name in ("k_cache", "v_cache"):
            nan = from_f32(np.float32([np.nan]), str(op.case.attrs["cache_dtype"]))[0]
            op.values[name][op.values["pages"][1][~listed], head] = nan


@pytest.mark.parametrize(("kv", "page"), [("f16", 64), ("f32", 32)])
def test_what_is_not_listed_is_not_read_and_no_batch_changes_a_bit(kv: str, page: int) -> None:
    blocks, ends = 384 // page, [384, 250, 1]
    lists = np.random.default_rng(5).random((3, 2, blocks)) < 0.4
    lists[:, :, 0] = True
    lists[0, :, -1] = True
    op = attending(kv, page, ends, lists)
    hide(op, lists)
    together = run_interpreted(op)["y"]
    close(together, op.run(ReferenceExecutor)["y"])
    one = only(op, slice(1, 2), -(-250 // page))
    assert run_interpreted(one)["y"].tobytes() == together[1].tobytes()


@pytest.mark.parametrize(("kv", "page"), [("i8", 128), ("f32", 128)])
def test_a_list_of_every_page_gives_the_bits_of_none(kv: str, page: int) -> None:
    every = np.ones((2, 2, 384 // page), bool)
    op, dense = (attending(kv, page, [330, 90], lists) for lists in (every, None))
    assert run_interpreted(op)["y"].tobytes() == run_interpreted(dense)["y"].tobytes()


def test_a_path_reads_the_pages_of_its_tokens_one_by_one() -> None:
    """A tree of three whose last node's path, cells 126 and 128, takes the places 126 and 127."""
    lists = np.zeros((3, 2, 6), bool)
    lists[:, :, 1] = True
    tree = attending("f16", 64, [126] * 3, lists)
    tree.values["ancestors"][...] = [0b1, 0b11, 0b101]
    tree.values["positions"][...] = [126, 127, 127]
    got = run_interpreted(tree)["y"]
    close(got, tree.run(ReferenceExecutor)["y"])
    chain = attending("f16", 64, [128], lists[:1])
    for name in ("k_cache", "v_cache", "q", "sinks"):
        chain.values[name] = tree.values[name].copy()
    chain.values["q"] = tree.values["q"][2:]
    for name in ("k_cache", "v_cache"):
        pages = chain.values["pages"][1] = tree.values["pages"][1]
        chain.values[name][pages[1], :, 63] = chain.values[name][pages[2], :, 0]
    assert run_interpreted(chain)["y"][0].tobytes() == got[2].tobytes()


def test_many_tokens_have_a_list_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DECODE_TOKENS", 2)
    lists = np.zeros((3, 2, 6), bool)
    lists[[0, 1, 2], :, [0, 1, 0]] = True
    op = only(attending("f16", 64, [128] * 3, lists), slice(3), 2)
    op.values["q"][...] = op.values["q"][0]
    got = run_interpreted(op)["y"]
    close(got, op.run(ReferenceExecutor)["y"])
    assert got[0].tobytes() == got[2].tobytes() != got[1].tobytes()


def test_a_token_that_lists_nothing_it_sees_gets_zeros() -> None:
    lists = np.zeros((2, 2, 6), bool)
    lists[0, :, 3:] = True
    op = attending("f16", 64, [192, 384], lists)
    assert not run_interpreted(op)["y"].any() and not op.run(ReferenceExecutor)["y"].any()


def test_pages_that_are_no_whole_blocks_are_refused() -> None:
    op = attending("f16", 24, [384], np.ones((1, 2, 16), bool))
    with pytest.raises(UnsupportedOp, match="no CUDA kernel reads lists of pages of 24"):
        run_interpreted(op)


def bounding(kv: str, dim: int, cells: int = 64) -> OpRun:
    """Make a case of one token that ends the first page of a slot."""
    sizes = {"M": 1, "H": 2, "D": dim, "S": 1, "B": 2, "T": cells, "P": 2}
    op = OpRun(
        OPS["page_bounds"],
        Case(f"bound-{kv}", sizes, {"cache_dtype": kv}, {}, {"tokens": "decode"}),
    )
    op.values["positions"][...], op.values["ends"][...] = cells - 1, cells
    return op


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16", "e4m3", "e5m2"])
def test_bounds_of_every_kind_of_number(kv: str) -> None:
    op = bounding(kv, 40)
    stored = op.values["k_cache"].view(np.uint8)
    rng = np.random.default_rng(2)
    stored[...] = rng.integers(0, 256, stored.shape)
    keys = op.values["k_cache"]
    odd = ~np.isfinite(to_f32(keys, kv))
    odd[..., ::3] = False  # every third column keeps what is not finite
    keys[odd] = 0
    with np.errstate(all="ignore"):
        got, expected = run_interpreted(op)["bounds"], op.run(ReferenceExecutor)["bounds"]
    np.testing.assert_array_equal(got, expected)
    page = op.values["pages"][0, 0]
    assert np.isfinite(got[page][..., 1]).all() and (got[1 - page] == 7).all()


def test_a_scale_that_is_not_finite_makes_no_bound() -> None:
    op = bounding("i8", 16, 24)
    op.values["k_scale"][op.values["pages"][0, 0], 1, 5] = np.nan
    got = run_interpreted(op)["bounds"]
    np.testing.assert_array_equal(got, op.run(ReferenceExecutor)["bounds"])
    assert np.isnan(got[op.values["pages"][0, 0], 1]).all()


def selecting(mode: str, blocks: int = 70, tokens: int = 3) -> OpRun:
    sizes = {"M": tokens, "F": 4 * 20, "H": 2, "D": 20, "S": 2, "B": blocks, "T": 64, "W": 3}
    sizes["P"] = 2 * blocks
    attrs: dict[str, Attr] = {"cells": 64, "scale": 0.3, **MODES[mode]}
    options = {"bounds": mode != "window"}
    op = OpRun(OPS["select_pages"], Case(f"{mode}-b{blocks}", sizes, attrs, {}, options))
    return op


@pytest.mark.parametrize("mode", MODES)
def test_a_list_is_a_tokens_own_wherever_the_page_table_ends(mode: str) -> None:
    op = selecting(mode)
    op.values["ends"][...] = [64 * 70, 64 * 40 + 1, 64 * 7 - 3]
    op.values["positions"][...] = op.values["ends"] - 1
    together: Arrays = run_interpreted(op)
    for name, expected in op.run(ReferenceExecutor).items():
        np.testing.assert_array_equal(together[name], expected)
    for token, blocks in ((1, 41), (2, 7)):
        alone = run_interpreted(only(op, slice(token, token + 1), blocks))
        for name, got in alone.items():
            np.testing.assert_array_equal(got[0], together[name][token])


def test_of_equal_pages_the_first_are_listed_and_faults_rank_highest() -> None:
    op = selecting("topk", tokens=1)
    op.values["ends"][...] = 64 * 60
    bounds, pages, q = (op.values[name] for name in ("bounds", "pages", "q"))
    bounds[...] = np.where(np.arange(140)[:, None, None, None] % 2, 0.0, -0.0)
    bounds[pages[0, 40], 0, 0, 3], bounds[pages[0, 41], 0, 1, 3] = 5, -5
    bounds[pages[0, 50], 1] = np.nan
    bounds[pages[0, 51], 1, 0] = 3e38
    q[...] = 0
    q[0, [3, 20 + 3, 40 + 1, 60]] = [1, -1, 1, 3]
    got = run_interpreted(op)
    for name, expected in op.run(ReferenceExecutor).items():
        np.testing.assert_array_equal(got[name], expected)
    rows = [np.flatnonzero(row).tolist() for row in bits_of(got["listed"][0])]
    assert rows[0] == [0, 1, 2, 3, 4, 40, 41, 58, 59]
    assert rows[1] == [0, 1, 2, 3, 4, 50, 51, 58, 59]


def test_lists_that_do_not_hold_the_page_table_are_refused() -> None:
    op = selecting("window")
    op.values["pages"] = np.zeros((2, 200), np.int32)
    op.plan = case_plan(op.spec, Case("", {**op.case.sizes, "B": 200}, op.case.attrs), op.values)
    with pytest.raises(ShapeError, match="'listed' has 3 words; 200 pages need 4"):
        run_interpreted(op)


@pytest.mark.slow
def test_machine_code_stays_within_its_budget() -> None:
    sass_ratchet.hold("pages", aot_report("cuda_aot_pages.py")["code"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_spills_on_any_architecture() -> None:
    for name, architectures in aot_report("cuda_aot_pages_all.py")["code"].items():
        for architecture, used in architectures.items():
            assert used["local"] == 0 and used["shared"] <= 99 << 10, (name, architecture, used)
