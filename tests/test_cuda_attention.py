"""KV append and attention on CUDA: the interpreter against the references, and the machine code."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sass_ratchet
import torch
from cuda_cases import aot_report, run_interpreted
from op_cases import Arrays, OpRun, error

from clocher_kernels.cuda.launch import INTERPRETER
from clocher_kernels.dtypes import from_f32
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.attention import KV_DTYPES, visible_cells
from clocher_kernels.ops.cases import case_plan
from clocher_kernels.ops.contract import Case

ATTENTION = OPS["attention"]
PER_TOKEN = ("q", "slots", "positions", "ends", "ancestors")


def close(got: np.ndarray, expected: np.ndarray, rms: float = 5e-6, largest: float = 5e-5) -> None:
    """Hold a result to a tolerance, by default that of the op."""
    errors = error(got, expected)
    assert errors[0] <= rms and errors[1] <= largest, errors


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_append_rounds_every_kind_of_number(kv: str) -> None:
    sizes = {"M": 2, "H": 2, "D": 64, "F": 128, "S": 1, "B": 1, "T": 4, "P": 1, "N": 2}
    op = OpRun(OPS["kv_append"], Case(f"numbers-{kv}", sizes, {"cache_dtype": kv}))
    bits = np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint64).astype(np.uint32)
    hard = bits.view(np.float32)
    steps = np.arange(128, dtype=np.float32) / 8
    # Ties of each narrow type, among normals and subnormals; then limits.
    hard[:128] = np.where(steps < 8, 1 + steps / 32, np.ldexp(steps - 8, -15).astype(np.float32))
    hard[128:140] = [0, -0.0, 448, 464, 480, 57344, 61440, 65504, 1e38, -1e38, 2**-10, 3 * 2.0**-17]
    if kv == "i8":
        hard = np.where(np.abs(hard) < 1e30, hard, np.float32(3))
        hard[np.isnan(hard)] = 1
    else:
        hard[140:143] = [np.inf, -np.inf, np.nan]
    with np.errstate(over="ignore", invalid="ignore"):
        op.values["k"][...] = hard[:256].reshape(2, 128)[:, ::-1]
        op.values["v"][...] = hard[:256].reshape(2, 128)
        got, expected = run_interpreted(op), op.run(ReferenceExecutor)
    for name in op.written:
        assert got[name].tobytes() == expected[name].tobytes(), name


def paged(name: str, kv: str, count: int, page: int, **options: Any) -> OpRun:
    """Make a case of 384 cells."""
    slots, blocks = 2, 384 // page
    sizes = {"M": count, "N": 6, "H": 2, "D": 24, "F": 144, "S": slots, "B": blocks, "T": page}
    sizes["P"] = slots * blocks
    attrs = {"cache_dtype": kv, "scale": 24**-0.5, "window": options.pop("window", 0)}
    attrs |= {name: options.pop(name) for name in ("chunk", "softcap") if name in options}
    return OpRun(ATTENTION, Case(f"{name}-{kv}-m{count}-t{page}", sizes, attrs, {}, options))


def poison(op: OpRun) -> None:
    """Put NaN, or the largest number, wherever no token of the step may look."""
    values, attrs = op.values, op.case.attrs
    cache, page = values["k_cache"], values["k_cache"].shape[2]
    hidden = np.ones((cache.shape[0], page), bool)
    tokens = zip(*(values[n] for n in ("slots", "positions", "ends", "ancestors")), strict=True)
    limits = int(attrs["window"]), int(attrs.get("chunk", 0))
    for slot, position, end, tree in tokens:
        cells = visible_cells(int(position), int(end), int(tree), *limits)
        for cell in cells:
            hidden[values["pages"][slot][cell // page], cell % page] = False
    kv = str(attrs["cache_dtype"])
    bad = np.int8(127) if kv == "i8" else from_f32(np.float32([np.nan]), kv)[0]
    for name in ("k_cache", "v_cache"):
        values[name].transpose(0, 2, 1, 3)[hidden] = bad
    for name in ("k_scale", "v_scale"):
        if name in values:
            values[name].transpose(0, 2, 1)[hidden] = np.nan


def alone(op: OpRun, token: int, cells: int) -> OpRun:
    """Return the case with one of its tokens only, and a page table cut to some cells."""
    one = copy.copy(op)
    page = op.values["k_cache"].shape[2]
    one.values = dict(op.values)
    for name in PER_TOKEN:
        one.values[name] = op.values[name][token : token + 1]
    one.values["pages"] = np.ascontiguousarray(op.values["pages"][:, : -(-cells // page)])
    case = Case(op.case.id, {**op.case.sizes, "M": 1}, op.case.attrs, {}, op.case.options)
    one.plan = case_plan(op.spec, case, one.values)
    return one


@pytest.mark.parametrize(
    ("kv", "page", "more"),
    [
        ("bf16", 64, {}),
        ("i8", 64, {"window": 100}),
        ("e4m3", 16, {}),
        ("f32", 64, {"window": 40}),
        ("f16", 128, {}),
        ("i8", 64, {"chunk": 150, "softcap": 3.0}),
        ("e5m2", 64, {"window": 70, "chunk": 96, "softcap": 50.0}),
    ],
    ids=lambda v: str(v),
)
def test_a_token_has_the_same_bits_in_every_batch(kv: str, page: int, more: dict[str, Any]) -> None:
    op = paged("batch", kv, 4, page, sinks=True, **more)
    op.values["positions"][...] = [383, 0, 200, 63]
    op.values["ends"][...] = op.values["positions"] + 1
    poison(op)
    together = run_interpreted(op)["y"]
    close(together, op.run(ReferenceExecutor)["y"])
    for token in (0, 2):
        single = run_interpreted(alone(op, token, int(op.values["ends"][token])))["y"]
        assert single[0].tobytes() == together[token].tobytes()
    arrivals = [t for key, t in INTERPRETER._scratch.items() if key[0] == "attention_arrivals"]
    assert arrivals and not any(t.any() for t in arrivals)


def moved(op: OpRun, slot: int, cells: list[int], end: int) -> None:
    """Copy what is in some cells of a slot to those from `end` on."""
    page = op.values["k_cache"].shape[2]
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if name not in op.values:
            continue
        before, after = op.values[name], op.values[name].copy()
        for to, cell in enumerate(cells, end):
            pages = op.values["pages"][slot]
            after[pages[to // page], :, to % page] = before[pages[cell // page], :, cell % page]
        op.values[name] = after


@pytest.mark.parametrize(
    ("kv", "page", "end", "more"),
    [
        pytest.param("bf16", 64, 252, {}, marks=pytest.mark.slow),
        pytest.param("i8", 16, 317, {"window": 60}, marks=pytest.mark.slow),
        ("e4m3", 64, 60, {"window": 3}),
        pytest.param("f32", 64, 191, {"chunk": 100}, marks=pytest.mark.slow),
        ("f16", 16, 30, {"window": 20, "chunk": 33, "softcap": 5.0}),
    ],
    ids=lambda v: str(v),
)
@pytest.mark.parametrize("parents", [range(-1, 7), (-1, -1, 0, 0, 1, 2, -1, 5)], ids=str)
def test_a_path_has_the_bits_of_its_tokens_one_by_one(
    kv: str, page: int, end: int, more: dict[str, Any], parents: Sequence[int]
) -> None:
    """A chain and a tree of eight, whose paths are not side by side in the cache."""
    op = paged("path", kv, 8, page, sinks=True, **more)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    op.values["slots"][...] = 1
    op.values["ends"][...] = end
    op.values["positions"][...] = [end - 1 + len(path) for path in paths]
    op.values["ancestors"][...] = [sum(1 << node for node in path) for path in paths]
    poison(op)
    together = run_interpreted(op)["y"]
    close(together, op.run(ReferenceExecutor)["y"])
    for node, path in enumerate(paths):
        one = copy.copy(op)
        one.values = dict(op.values)
        moved(one, 1, [end + other for other in path], end)
        one.values["ends"] = op.values["positions"] + 1
        one.values["ancestors"] = np.zeros_like(op.values["ancestors"])
        single = run_interpreted(alone(one, node, end + len(path)))["y"]
        assert single[0].tobytes() == together[node].tobytes(), (node, path)


def test_each_number_of_tokens_gives_the_same_bits() -> None:
    op = paged("chain", "bf16", 8, 64, sinks=True)
    op.values["slots"][...] = 0
    op.values["positions"][...] = np.arange(250, 258)
    op.values["ends"][...] = op.values["positions"] + 1
    whole = run_interpreted(op)["y"]
    for count in (1, 3, 7):
        few = copy.copy(op)
        few.values = {n: v[:count] if n in PER_TOKEN else v for n, v in op.values.items()}
        case = Case(op.case.id, {**op.case.sizes, "M": count}, op.case.attrs, {}, op.case.options)
        few.plan = case_plan(op.spec, case, few.values)
        assert run_interpreted(few)["y"].tobytes() == whole[:count].tobytes()


@pytest.mark.parametrize(
    ("kv", "kind", "page", "more"),
    [
        ("bf16", "decode", 64, {}),
        ("i8", "decode", 16, {"window": 30}),
        ("f16", "tree", 64, {}),
        ("i8", "decode", 16, {"chunk": 48, "softcap": 0.5}),
        ("f16", "tree", 64, {"window": 2, "chunk": 352}),
    ],
    ids=lambda v: str(v),
)
def test_chunks_of_mixed_slots(kv: str, kind: str, page: int, more: dict[str, Any]) -> None:
    op = paged("mixed", kv, 34, page, tokens=kind, sinks=True, **more)
    if kind == "tree":  # a causal token beside them
        op.values["ancestors"][7] = 0
        op.values["slots"][20:] = 1
    poison(op)
    close(run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"])


def test_a_block_may_see_far_beyond_its_window() -> None:
    op = paged("beyond", "f16", 2, 64, window=8, tokens="block")
    op.values["positions"][...] = [10, 40]
    poison(op)
    close(run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"])


def test_chunks_of_an_fp32_cache() -> None:
    op = paged("chunk", "f32", 34, 64, tokens="prefill", window=50)
    poison(op)
    close(run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"])


def test_a_token_that_sees_nothing_gets_zeros() -> None:
    for tokens in (2, 34):
        op = paged("nothing", "bf16", tokens, 64)
        op.values["ends"][1] = 0
        poison(op)
        assert not run_interpreted(op)["y"][1].any()


@pytest.mark.parametrize("key", [np.inf, -np.inf, np.nan])
def test_a_cap_makes_no_number_of_what_is_not_finite(key: float) -> None:
    for tokens in (2, 34):
        op = paged("capped", "f16", tokens, 64, tokens="prefill", softcap=30.0)
        page = op.values["pages"][0, -1]
        op.values["k_cache"][page, :, 63, 5] = key  # only the last token sees it
        with np.errstate(all="ignore"):
            y = run_interpreted(op)["y"]
        assert np.isfinite(y[:-1]).all() and np.isnan(y[-1]).all()


@pytest.mark.parametrize("count", [2, 34])
def test_heads_of_256_values(count: int) -> None:
    sizes = {"M": count, "N": 4, "H": 2, "D": 256, "F": 1024, "S": 2, "B": 2, "T": 64, "P": 4}
    attrs = {"cache_dtype": "bf16", "scale": 1 / 16, "window": 40, "softcap": 50.0}
    op = OpRun(ATTENTION, Case(f"wide-m{count}", sizes, attrs, {}, {"tokens": "prefill"}))
    poison(op)
    close(run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"])


def test_narrow_activations() -> None:
    op = paged("narrow", "bf16", 3, 64, sinks=True)
    op.values["q"][...] = op.values["q"].astype(np.float16)
    expected: Arrays = op.run(ReferenceExecutor)
    got = run_interpreted(op, {"q": torch.float16, "y": torch.float16})
    close(got["y"], expected["y"], 1e-3, 5e-3)


@pytest.mark.slow
def test_machine_code_stays_within_its_budget() -> None:
    report = aot_report("cuda_aot_attention.py")["code"]
    sass_ratchet.hold("attention", report)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kv_dtype_spills_on_any_architecture() -> None:
    for name, architectures in aot_report("cuda_aot_attention_all.py")["code"].items():
        for architecture, used in architectures.items():
            most = sass_ratchet.SHARED.get(architecture, sass_ratchet.MOST_SHARED)
            spilled = sass_ratchet.LOCAL.get((sass_ratchet.VERSION, name), 0)
            if name.endswith("_prefill"):  # tiles of prompts take every register
                spilled = {"3.6": 16, "3.9": 48}.get(sass_ratchet.VERSION, 0)
            assert used["local"] <= spilled, (name, architecture, used)
            assert used["shared"] <= most, (name, architecture, used)
