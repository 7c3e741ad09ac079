"""Replicas behind a router, simulated: nothing is lost, queues wait as theory says."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from weight_files import LLAMA

from bench.scale import __main__ as command
from bench.scale import sizes
from bench.scale.costs import StepCosts
from bench.scale.fleet import POLICIES, Fleet, Simulation, Window, fewest
from bench.scale.load import PAGE, Conversation, Load, conversations
from bench.scale.replica import Limits
from clocher_kernels.errors import UsageError
from clocher_runtime.models.build import PAGE_CELLS

LIMITS = Limits(batch=4, chunk=128, kv_pages=256, itl_ms=100.0, queue=64)
LOAD = Load(
    users=40,
    think_s=10.0,
    turns=3.0,
    question=48,
    answer=16,
    systems=12,
    system_tokens=512,
    context=2048,
    bursts=False,
    forgets=False,
    seconds=30.0,
    seed=1,
)
WINDOW = Window(0.0, 30.0, 2000.0, 150.0)


def passes(decode: float, prompt: float, key: float = 0.0) -> list[dict[str, Any]]:
    """Return rows of bench.pass_cost: milliseconds of a step, and more for each key and token."""
    about = {"kind": "pass_cost", "model": "m", "format": "f", "threads": 2, "isa": "i"}
    sizes = [1, 8, 128]
    return [
        about
        | {"test": test, "context": context, "tokens": sizes}
        | {"ms": [10 + per * m + key * m * context for m in sizes]}
        for test, per in (("sequences", decode), ("prompt", prompt))
        for context in (64, 1024)
    ]


COSTS = StepCosts.of(passes(1.0, 1.0, 1e-4), 200, "test")


def simulated(load: Load = LOAD, limits: Limits = LIMITS, **fleet: Any) -> Simulation:
    words = {"replicas": 4, "zones": 2} | fleet
    who = conversations(load)
    return Simulation(Fleet(**words), COSTS, limits, who, load.seconds).run()


def asked(run: Simulation) -> list[tuple[Any, ...]]:
    return [(a.who.number, a.turn, a.arrived, a.where, a.first, a.ended, a.fate) for a in run.asks]


def test_pages_are_those_of_the_engine() -> None:
    assert PAGE == PAGE_CELLS


@pytest.mark.parametrize("failure", ["none", "replica", "zone", "rollout"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_question_ends_once(policy: str, failure: str) -> None:
    when = {"fails_s": 15.0, "down_s": 5.0, "start_s": 1.5, "drain_s": 2.0}
    run = simulated(policy=policy, failure=failure, **when)
    assert Counter(a.fate for a in run.asks).keys() <= {"served", "cut", "refused"}
    assert max(Counter((a.who.number, a.turn) for a in run.asks).values()) == 1
    assert all(
        a.made == a.new and a.ended >= a.first > a.arrived for a in run.asks if a.fate == "served"
    )
    assert all(0 < a.made < a.new for a in run.asks if a.fate == "cut")
    for replica in run.replicas:
        assert replica.load == 0 and not replica._users
        assert replica._blank + len(replica._unused) == LIMITS.kv_pages


@pytest.mark.parametrize("failure", ["replica", "zone"])
def test_what_may_be_asked_again_is_not_lost(failure: str) -> None:
    """Lost is only what had begun to be answered; all others are served elsewhere."""
    long = replace(LOAD, users=80, answer=128)
    run = simulated(long, failure=failure, fails_s=15.0, down_s=60.0)
    again = [a for a in run.asks if a.tries > 1]
    assert again and all(a.fate == "served" for a in again)
    cut = [a for a in run.asks if a.fate == "cut"]
    assert cut and all(a.first <= 15.0 for a in cut)
    assert all(a.fate == "served" for a in run.asks if a not in cut)
    lost = {0} if failure == "replica" else {0, 2}
    assert {a.where for a in run.asks if a.arrived > 17.0}.isdisjoint(lost)


def test_a_drained_replica_cuts_nobody_and_comes_back_empty() -> None:
    run = simulated(failure="rollout", fails_s=5.0, start_s=1.0)
    assert all(a.fate == "served" for a in run.asks)
    before = simulated()
    assert sum(a.found for a in run.asks) < sum(a.found for a in before.asks)


def test_the_same_seed_gives_the_same_run() -> None:
    assert asked(simulated(policy="random")) == asked(simulated(policy="random"))
    other = replace(LOAD, seed=2)
    assert asked(simulated(policy="random")) != asked(simulated(other, policy="random"))


def test_one_replica_leaves_nothing_to_choose() -> None:
    light = replace(LOAD, users=8)
    runs = [asked(simulated(light, replicas=1, policy=policy)) for policy in POLICIES]
    assert all(run == runs[0] for run in runs)


def test_a_hash_of_the_beginning_finds_more_of_it() -> None:
    hits = {
        policy: WINDOW.figures(simulated(policy=policy).asks)["prefix_hits"] for policy in POLICIES
    }
    assert hits["prefix"] > hits["random"] + 0.1
    assert hits["prefix"] >= hits["spill"] > hits["random"]


def test_spilling_bounds_what_a_replica_has() -> None:
    """All begin alike, so one replica gets everything unless it may have too much."""
    alike = replace(LOAD, systems=1, users=100)
    most = {}
    for policy in ("prefix", "spill"):
        where = Counter(a.where for a in simulated(alike, policy=policy).asks)
        most[policy] = max(where.values()) / sum(where.values())
    assert most["prefix"] == 1 and most["spill"] < 0.5


def test_a_fixed_service_waits_as_an_m_d_1_queue() -> None:
    """Mean wait = rho / (2 (1 - rho)) services: Pollaczek and Khinchine."""
    rho, count = 0.6, 8_000
    limits = replace(LIMITS, batch=1, kv_pages=10**6, queue=10**6)
    service = COSTS.ms(0, 0, 100, 4950, 1) / 1e3
    starts = np.cumsum(np.random.default_rng(3).exponential(service / rho, count)).tolist()
    who = [Conversation(i, 0, 0, at, ((100, 1, 0.0),)) for i, at in enumerate(starts)]
    run = Simulation(Fleet(replicas=1), COSTS, limits, who).run()
    waits = [a.first - a.arrived - service for a in run.asks]
    assert np.mean(waits) == pytest.approx(rho / (2 * (1 - rho)) * service, rel=0.1)
    assert sum(run.busy_s) / run.ended == pytest.approx(rho, rel=0.03)


def test_a_step_costs_what_was_measured() -> None:
    costs = StepCosts.of(passes(2.0, 1.0, 1e-3), 200, "test")
    at_64 = 10 + 2 + 0.064
    assert costs.ms(1, 64, 0, 0, 0) == pytest.approx(at_64)
    assert costs.ms(1, 1024, 0, 0, 0) == pytest.approx(at_64 + 0.960)
    assert costs.ms(0, 0, 100, 6400, 0) == pytest.approx(10 + 100 + 6.4)
    assert costs.ms(0, 0, 160, 160 * 64, 0) == pytest.approx(10 + 160 * 1.064)  # beyond
    whole = costs.ms(3, 3 * 64, 50, 50 * 64, 1)
    assert whole == pytest.approx(10 + 53 * 1.064 + 4)  # four rows cost 1 ms each


def test_no_pages_left_takes_them_from_the_newest() -> None:
    few = replace(LIMITS, kv_pages=32)
    run = simulated(replace(LOAD, users=10, system_tokens=0, answer=300), few, replicas=1)
    assert sum(replica.preempted for replica in run.replicas) > 0
    assert all(a.fate == "served" for a in run.asks)


def test_a_full_queue_refuses() -> None:
    run = simulated(limits=replace(LIMITS, batch=1, queue=0), replicas=1)
    assert Counter(a.fate for a in run.asks)["refused"] > 0


def test_answers_that_are_forgotten_are_not_found() -> None:
    who = Conversation(0, 0, 128, 0.0, ((10, 200, 1.0), (10, 5, 1.0)))
    kept = [who.key(block, 0) == who.key(block, 1) for block in range(5)]
    forgotten = replace(who, forgets=True)
    assert kept == [True] * 5
    keys = [forgotten.key(block, 0) == forgotten.key(block, 1) for block in range(5)]
    assert keys == [True, True, False, False, False]


def test_bursts_have_the_same_mean_and_more_variance() -> None:
    long = replace(LOAD, users=90, seconds=1500.0)
    counts = []
    for bursts in (False, True):
        starts = [each.starts for each in conversations(replace(long, bursts=bursts))]
        counts.append(np.histogram(starts, 150, (0, 1500))[0])
    steady, bursty = counts
    assert bursty.mean() == pytest.approx(steady.mean(), rel=0.35)
    assert steady.var() / steady.mean() == pytest.approx(1, abs=0.5)
    assert bursty.var() / bursty.mean() > 5


def test_the_fewest_replicas_are_found() -> None:
    for wanted in (1, 2, 7, 8, 40):
        assert fewest(lambda n, wanted=wanted: n / wanted, 1.0, 64) == wanted
    assert fewest(lambda n: 0.0, 1.0, 64) == 0


def test_the_command_prints_a_line_for_each_policy(tmp_path: Path) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "first.svg"
    words = ["--users", "200", "--seconds", "20", "--warm", "5", "--replicas", "9"]
    words += ["--policy", "random,spill", "--json", str(out), "--plot", str(picture)]
    done = CliRunner().invoke(command.main, words, catch_exceptions=False)
    rows = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert done.exit_code == 0 and [row["policy"] for row in rows] == ["random", "spill"]
    assert all(row["asked"] == row["served"] > 0 for row in rows)
    assert [row["kind"] for row in json.loads(out.read_text(encoding="utf-8"))] == ["scale"] * 2
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def test_sizes_are_those_of_the_engine() -> None:
    done = CliRunner().invoke(sizes.main, ["--context", "1024"], catch_exceptions=False)
    assert done.exit_code == 0 and "gpt-oss-20b" in done.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--policy", "best"], 2, "round_robin"),
        (["--replicas", "0"], 2, "--replicas"),
        (["--users", "-1"], 2, "--users"),
        (["--warm", "10", "--seconds", "5"], 2, "--warm"),
        (["--system-tokens", "5000"], 2, "--system-tokens"),
        (["--kv-pages", "3"], 2, "--kv-pages"),
        (["--failure", "zone", "--zones", "9", "--replicas", "2"], 2, "--zones"),
        (["--plot", "no/such/folder.svg"], 2, "not a directory"),
        (["--find", "1", "--slo", "0.001", "1"], 1, '"replicas": null'),
        (["--serve", "DIR", "--users", "1"], 2, "--forgets"),
    ],
)
def test_wrong_input_is_told(words: list[str], code: int, said: str) -> None:
    short = ["--seconds", "5", "--warm", "0", "--users", "5", "--policy", "spill"]
    done = CliRunner().invoke(command.main, [*short, *words])
    assert done.exit_code == code and said in done.output and "Traceback" not in done.output


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"kind": "start"}]', "[1]"])
def test_wrong_costs_are_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(command.main, ["--costs", str(path)])
    assert done.exit_code == 2 and "costs.json" in done.output and "Traceback" not in done.output


def test_costs_of_two_models_or_one_context_are_told() -> None:
    rows = passes(1.0, 1.0)
    for wrong in (rows[:1], [*rows, rows[0] | {"model": "other"}], rows[:2]):
        with pytest.raises(UsageError, match=r"bench\.pass_cost"):
            StepCosts.of(wrong, 100, "costs.json")


def test_a_real_server_is_asked_the_same() -> None:
    words = ["--serve", str(LLAMA), "--forgets", "--users", "3", "--think", "1", "--seconds", "4"]
    words += ["--warm", "1", "--systems", "2", "--system-tokens", "32", "--context", "512"]
    done = CliRunner().invoke(command.main, [*words, "--seed", "5"], catch_exceptions=False)
    rows = {r["policy"]: r for r in map(json.loads, done.output.splitlines()[:3])}
    assert done.exit_code == 0 and list(rows)[:2] == ["simulated", "measured"]
    first, real, again = rows.values()
    assert real["asked"] == real["served"] > 0 and real["ttft_p50_ms"] > 0
    assert again["slower"] < first["slower"] == 1.0
