"""Allocation of bits: budgets, hulls, units, and what it gains on a trained model."""

from itertools import product

import numpy as np
import pytest
from calibration import make_plan, sequences
from weight_files import LLAMA
from weight_files import rng as rng_of

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.disk.kept import Kept
from clocher_runtime.quantize.alloc import (
    CANDIDATES,
    Option,
    allocate,
    allocation_table,
    at_most,
    choose,
    room_of,
    unit_of,
)

LINEARS = {"pattern": r".*layers\.5\..*_proj.*", "dtype": "int4w", "group": 128, "method": "imx"}


def draw_options(rng: np.random.Generator, units: int) -> list[list[Option]]:
    options = []
    for _ in range(units):
        params, harm = int(rng.integers(1, 30)) * 1024, float(rng.lognormal(0, 1.5))
        error = np.sort(rng.random(len(CANDIDATES)))[::-1]
        options.append(
            [
                Option(fmt, fmt.nbytes((8, params // 8)), harm * float(e))
                for fmt, e in zip(CANDIDATES, error, strict=True)
            ]
        )
    return options


def total(options: list[list[Option]], taken: tuple[int, ...]) -> tuple[int, float]:
    chosen = [row[i] for row, i in zip(options, taken, strict=True)]
    return sum(o.nbytes for o in chosen), sum(o.harm for o in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_is_kept_and_nothing_uniform_is_better(seed):
    options = draw_options(rng_of(f"budget{seed}"), 24)
    previous = np.inf
    for uniform in range(len(CANDIDATES)):
        budget, harm = total(options, (uniform,) * len(options))
        spent, chosen = total(options, choose(options, budget)[0])
        assert spent <= budget
        assert chosen <= harm * 1.0001
        assert chosen <= previous * 1.0001
        previous = chosen


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_is_close_to_the_best_of_all(seed):
    rng = rng_of(f"best{seed}")
    options = [row[:5] for row in draw_options(rng, 5)]
    sizes = [sum(row[i].nbytes for row in options) for i in (0, 4)]
    budget = int(sizes[0] + 0.5 * (sizes[1] - sizes[0]))
    every = (total(options, taken) for taken in product(range(5), repeat=5))
    best = min(harm for nbytes, harm in every if nbytes <= budget)
    assert total(options, choose(options, budget)[0])[1] <= 1.15 * best


def test_a_large_budget_takes_the_best_of_each_unit():
    options = draw_options(rng_of("large"), 8)
    taken, price = choose(options, 1 << 60)
    least = [min(option.harm for option in row) for row in options]
    assert total(options, taken)[1] == pytest.approx(sum(least))
    assert price == 0


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "3.qkv"),
        ("model.layers.3.self_attn.v_proj.weight", "3.qkv"),
        ("model.layers.0.self_attn.o_proj.weight", "0.o"),
        ("model.layers.11.mlp.up_proj.weight", "11.gate_up"),
        ("model.layers.11.mlp.experts.gate_up_proj", "11.gate_up"),
        ("model.layers.11.mlp.experts.down_proj", "11.down"),
        ("model.layers.11.mlp.router.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
    ],
    ids=str,
)
def test_units_are_what_is_decided_together(name, unit):
    assert unit_of(name) == unit


def test_allocating_a_trained_model(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(LLAMA)
    head = {"pattern": "lm_head.weight", "dtype": "int8w", "group": 32}
    plan = make_plan(checkpoint, LINEARS, head)
    text = sequences(checkpoint, 3, 40)
    seen = []
    kept = Kept(tmp_path / "kept.jsonl", {})
    result, record = allocate(
        checkpoint, plan, text, target_bpw=7.5, kept=kept, progress=lambda *a: seen.append(a)
    )
    assert 7.48 < result.size["quantised_bpw"] <= 7.5
    assert record["bpw"] == result.size["quantised_bpw"]
    assert len(record["units"]) == 4 == len(seen)
    assert len({unit["format"] for unit in record["units"]}) > 1
    assert result.tensors["lm_head.weight"].format == parse_format("int8_g32_f16")
    for unit in record["units"]:
        for name in unit["tensors"]:
            assert result.tensors[name].format.name == unit["format"]
            assert result.tensors[name].method == "imx"
        harms = [c["harm"] for c in unit["candidates"].values()]
        assert min(harms) > 0
        assert harms[-1] < 0.1 * harms[0]
        assert unit["candidates"]["int4_asym_g32_f16"]["harm"] == unit["kld_alone"]
    file = tmp_path / "kept.jsonl"
    edited = Kept(file, {})
    key = f"{record['units'][0]['unit']} int4_asym_g32_f16"
    edited.add(key, "much")  # no harm: it is measured again
    again = allocate(checkpoint, plan, text, target_bpw=7.5, kept=Kept(file, {}))
    assert again == (result, record) and len(file.read_text().splitlines()) == 6
    more = allocate(checkpoint, plan, text, target_bpw=8.5, kept=Kept(file, {}))[1]["units"]
    pairs = zip(more, record["units"], strict=True)
    assert all(each["kld_alone"] < own["kld_alone"] for each, own in pairs)
    assert len(file.read_text().splitlines()) == 10  # nothing is taken from another format
    monkeypatch.setattr("clocher_runtime.quantize.harm._quantised", None)  # nothing is measured
    known = Kept(tmp_path / "kept.jsonl", {})
    assert allocate(checkpoint, plan, text, target_bpw=7.5, kept=known) == again
    formats = {
        name: parse_format(unit["format"]) for unit in record["units"] for name in unit["tensors"]
    }
    replayed = plan.with_formats(checkpoint, formats)
    assert replayed == result
    lines = allocation_table(record)
    assert len(lines) == 2 + 4 + 1
    assert "5.down" in lines[2]
    now = [unit["candidates"][unit["format"]]["harm"] for unit in record["units"]]
    assert float(lines[-1].split()[-1]) == pytest.approx(sum(now), rel=0.01)
    with pytest.raises(UsageError, match=r"4\.2 cannot be met: .* 1 tensor cannot change"):
        allocate(checkpoint, plan, text, target_bpw=4.2, kept=known)
    with pytest.raises(UsageError, match="nothing to choose"):
        allocate(checkpoint, make_plan(checkpoint, head), text, target_bpw=9, kept=known)


@pytest.mark.parametrize(("bpw", "base"), [(2.3, 0), (3.5, 1), (4.3, 2), (5, 2), (5.3, 3)])
def test_harm_is_measured_in_the_largest_format_that_all_could_have(bpw, base):
    checkpoint = open_checkpoint(LLAMA)
    rule = {"pattern": LINEARS["pattern"], "dtype": "tcq3", "method": "gptq"}
    assert room_of(make_plan(checkpoint, rule), bpw).base == base


def test_a_target_that_cannot_be_met_names_the_way_out():
    checkpoint = open_checkpoint(LLAMA)
    with pytest.raises(UsageError) as error:
        at_most(make_plan(checkpoint, LINEARS), 3)
    assert str(error.value) == (
        "bits per weight of 3 cannot be met: the smallest formats give 4.125; raise --target-bpw "
        "or --bits, or take trellises with --bits 3"
    )
    rule = {"pattern": LINEARS["pattern"]}
    head = {"pattern": "lm_head.weight", "dtype": "tcq4"}
    with pytest.raises(UsageError) as error:
        at_most(make_plan(checkpoint, {**rule, "dtype": "tcq2", "method": "gptq"}, head), 2.1)
    assert str(error.value).endswith(
        "by their rules 1 tensor cannot change; raise --target-bpw or --bits, or give those a "
        "smaller format with --rules FILE and --target-bpw"
    )


def test_the_size_of_a_target_is_never_too_low():
    checkpoint = open_checkpoint(LLAMA)
    head = {"pattern": "lm_head.weight", "dtype": "int8w", "group": 32}
    plan = make_plan(checkpoint, LINEARS, head)
    linears = [t for t in plan.tensors.values() if t.method == "imx"]
    params = sum(t.params for t in linears)
    limited = at_most(plan, 7)
    assert 6.99 < limited.size["quantised_bpw"] <= 7 and limited.tensors == plan.tensors
    planes = limited.size["quantised_bpw"] * sum(t.params for t in plan.tensors.values()) / 8
    assert limited.plane_nbytes == planes - plan.tensors["lm_head.weight"].nbytes
    difference = limited.plane_nbytes - sum(t.nbytes for t in linears)
    assert limited.size["nbytes"] == plan.size["nbytes"] + difference
    largest = at_most(plan, 16)
    assert largest.plane_nbytes == params * CANDIDATES[-1].nbytes((1, 1024)) / 1024
    rounded = make_plan(checkpoint, LINEARS | {"method": "rtn"})
    assert at_most(rounded, 5).plane_nbytes == 0
