r"""How many replicas some users need, and what routing and failures do to them: a simulation.

\b
    python -m bench.scale                                  # 16 replicas, 400 users, each policy
    python -m bench.scale --bursts --failure zone --zones 4
    python -m bench.scale --find 0.99 --policy spill       # the fewest replicas that will do
    python -m bench.scale --serve DIR --users 6            # the same questions to a real server
    python -m bench.scale.sizes                            # memory of users, for known models

Each replica steps as the scheduler of Clocher does, with pages and their names as in its cache; how
long a step takes is read from --costs, rows of bench.pass_cost of one model at two contexts, and
how long a replica takes to start from --start, rows of bench.start. Nothing else is assumed of
speed: no network, no time in HTTP. --serve says what that leaves out: it plays what one replica is
asked to a real server, and prints both, and a simulation whose steps take as many times longer as
the server said its decode steps did. --slower does that for others.

A user thinks for --think seconds in the mean between an answer and the next question;
conversations begin at the rate at which --users are in one if answers take no time. A conversation
has --turns questions in the mean; each prompt holds all before it, behind one of --systems system
prompts that others share. A good answer has its first token within --slo's first figure and the
mean time per token within its second, in ms. Counted is what is asked after --warm seconds. The
same --seed gives the same figures.

Where hits in the cache pay and a replica is asked too much, "spill" is what to take; docs/scale.md
says why, and what was found.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.measure import NotMeasured
from bench.ops.experiment import FILE, NEW, Listed, Row, experiment
from bench.scale.costs import StepCosts, start_seconds
from bench.scale.fleet import FAILURES, POLICIES, Fleet, Simulation, Window, fewest
from bench.scale.load import PAGE, Conversation, Load, conversations
from bench.scale.replay import replay
from bench.scale.replica import Limits, mean_steps

_RESULTS = Path(__file__).parents[1] / "results"
_COSTS = _RESULTS / "2026-11-23-xeon-emerald-pass-cost-llama-1b-int4.json"
_START = _RESULTS / "2026-11-23-xeon-emerald-start-llama-1b-int4.json"
_MOST = 4096
_TOLD = ("users", "think", "turns", "question", "answer", "systems", "system_tokens", "bursts")
_TOLD += (
    "forgets",
    "slower",
    "hash_pages",
    "bound",
    "failure",
    "zones",
    "seconds",
    "warm",
    "slo",
    "seed",
)
_COUNT, _POSITIVE = click.IntRange(1), click.FloatRange(0, min_open=True)
_NONE_OR_MORE = click.FloatRange(0)


@experiment(
    "scale",
    __doc__,
    "what | users | replicas | TTFT p50/p99 ms | TPOT p50/p99 ms | good | tok/s | prefix hits | "
    "busy mean/most | asked/cut/refused",
    "{policy} | {users:g} | {replicas} | {ttft_p50_ms:.0f}/{ttft_p99_ms:.0f} | "
    "{tpot_p50_ms:.0f}/{tpot_p99_ms:.0f} | {goodput:.3f} | {tok_s:.0f} | {prefix_hits:.2f} | "
    "{busy:.2f}/{busiest:.2f} | {asked}/{cut}/{refused}",
    title="bench.scale",
    good=lambda row: row["replicas"] is not None,
)
@click.option("--costs", type=FILE, default=_COSTS, help="default: llama-1b int4, two cores")
@click.option("--slower", type=_POSITIVE, default=1.0, show_default=True, help="Times --costs.")
@click.option("--start", "start_file", type=FILE, default=_START, help="default: of the same")
@click.option("--users", type=_POSITIVE, default=400.0, show_default=True)
@click.option("--think", type=_POSITIVE, default=30.0, show_default=True, help="Mean seconds.")
@click.option("--turns", type=click.FloatRange(1), default=4.0, show_default=True, help="Mean.")
@click.option("--question", type=_COUNT, default=48, show_default=True, help="Median tokens.")
@click.option("--answer", type=_COUNT, default=64, show_default=True, help="Median tokens.")
@click.option("--systems", type=_COUNT, default=20, show_default=True, help="System prompts.")
@click.option("--system-tokens", type=click.IntRange(0), default=512, show_default=True)
@click.option("--bursts", is_flag=True, help="The rate changes every 10 s; else Poisson arrivals.")
@click.option("--forgets", is_flag=True, help="Answers come back otherwise than they were made.")
@click.option("--seconds", type=_POSITIVE, default=300.0, show_default=True)
@click.option("--warm", type=_NONE_OR_MORE, default=120.0, show_default=True)
@click.option("--replicas", type=click.IntRange(1, _MOST), default=16, show_default=True)
@click.option(
    "--find",
    type=click.FloatRange(0, 1),
    help="Fewest replicas with this goodput; exit code 1 if one for each user does not do.",
)
@click.option("--policy", "policies", type=Listed.of(POLICIES), default=",".join(POLICIES))
@click.option("--hash-pages", type=_COUNT, default=9, show_default=True)
@click.option("--bound", type=click.FloatRange(1), default=3.0, show_default=True)
@click.option("--batch", type=_COUNT, default=8, show_default=True, help="As of clocher serve.")
@click.option("--chunk", type=_COUNT, default=128, show_default=True, help="Tokens of a step.")
@click.option("--context", type=click.IntRange(PAGE), default=4096, show_default=True)
@click.option("--kv-pages", type=_COUNT, help="default: --batch whole contexts")
@click.option("--itl-ms", type=_POSITIVE, default=100.0, show_default=True)
@click.option("--queue", type=click.IntRange(0), default=64, show_default=True)
@click.option("--slo", type=(_POSITIVE, _POSITIVE), default=(4000.0, 150.0), show_default=True)
@click.option("--failure", type=click.Choice(FAILURES), default="none", show_default=True)
@click.option("--zones", type=_COUNT, default=4, show_default=True)
@click.option("--fails", type=_NONE_OR_MORE, default=180.0, show_default=True, help="When, s.")
@click.option("--down", type=_NONE_OR_MORE, default=60.0, show_default=True, help="Away, s.")
@click.option("--probe", type=_POSITIVE, default=1.0, show_default=True, help="Until noticed, s.")
@click.option("--tries", type=_COUNT, default=3, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--serve", "model_dir", type=FILE, help="Ask a server of this model the same.")
@click.option("--plot", type=NEW, help="Times to the first token there, SVG or PNG.")
def main(model_dir: Path | None, plot: Path | None, **options: Any) -> Iterator[Row]:
    """Yield a row for each policy, or for the simulated and the real replica."""
    if options["warm"] >= options["seconds"]:
        raise click.UsageError("--warm: expected less than --seconds")
    limits, load = _limits(options), _load(options)
    if options["system_tokens"] >= options["context"]:
        raise click.UsageError("--system-tokens: expected less than --context")
    if model_dir and not load.forgets:
        raise click.UsageError("--serve: later prompts have other ids for answers; add --forgets")
    largest = max(limits.chunk, limits.batch) + limits.batch
    costs = StepCosts.read(options["costs"], largest)
    window = Window(options["warm"], options["seconds"], *options["slo"])
    who = conversations(load)
    costs = costs.times(options["slower"])
    about = {name: options[name] for name in _TOLD} | {"source": dict(costs.source)}
    if model_dir:
        alone = options | {"failure": "none"}
        run = _run(alone, "spill", costs, limits, who, 1)
        yield _told(about | {"policy": "simulated"}, _figures(run, window))
        asks, busy, sums = replay(model_dir, limits, load, who)
        found = {"replicas": 1, "busy": busy, "busiest": busy, **mean_steps([sums])}
        mine = mean_steps(replica.sums for replica in run.replicas)["decode_step_ms"]
        yield _told(about | {"policy": "measured"}, window.figures(asks) | found)
        if mine and found["decode_step_ms"]:
            slower = found["decode_step_ms"] / mine
            run = _run(alone, "spill", costs.times(slower), limits, who, 1)
            row = {"policy": "simulated, its speed", "slower": options["slower"] * slower}
            yield _told(about | row, _figures(run, window))
        return
    runs, most = {}, min(_MOST, math.ceil(load.users) + 1)  # with one for each user none waits
    for policy in options["policies"]:
        run_of = partial(_run, options, policy, costs, limits, who)
        count = options["replicas"]
        if options["find"] is not None:
            count = fewest(partial(_goodput, run_of, window), options["find"], most)
            if not count:
                yield _told(about | {"policy": policy, "find": options["find"]}, {"replicas": None})
                continue
        runs[policy] = run_of(count)
        yield _told(about | {"policy": policy}, _figures(runs[policy], window))
    if plot:
        _draw(plot, runs, window)


def _run(
    options: dict[str, Any],
    policy: str,
    costs: StepCosts,
    limits: Limits,
    who: Sequence[Conversation],
    replicas: int,
) -> Simulation:
    fleet = _fleet(options, policy, replicas)
    return Simulation(fleet, costs, limits, who, options["seconds"]).run()


def _goodput(run_of: Callable[[int], Simulation], window: Window, replicas: int) -> float:
    return window.figures(run_of(replicas).asks)["goodput"] or 0.0


def _told(about: Row, figures: Row) -> Row:
    """Return a row, printed as soon as it is there."""
    row = about | figures
    click.echo(json.dumps(row))
    return row


def _limits(options: dict[str, Any]) -> Limits:
    pages = options["kv_pages"] or options["batch"] * -(-options["context"] // PAGE)
    if pages * PAGE < options["context"]:
        raise click.UsageError(f"--kv-pages: {pages} hold no whole --context; expected more")
    return Limits(options["batch"], options["chunk"], pages, options["itl_ms"], options["queue"])


def _load(options: dict[str, Any]) -> Load:
    names = ("users", "turns", "question", "answer", "systems", "system_tokens", "context")
    names += ("bursts", "forgets", "seconds", "seed")
    return Load(think_s=options["think"], **{name: options[name] for name in names})


def _fleet(options: dict[str, Any], policy: str, replicas: int) -> Fleet:
    if options["failure"] == "zone" and replicas < options["zones"]:
        raise click.UsageError("--zones: expected no more than there are replicas")
    fleet = Fleet(
        replicas=replicas,
        policy=policy,
        start_s=start_seconds(options["start_file"]),
        **{name: options[name] for name in ("zones", "hash_pages", "bound", "tries", "seed")},
    )
    times = {f"{name}_s": options[name] for name in ("fails", "down", "probe")}
    return replace(fleet, failure=options["failure"], **times)


def _figures(run: Simulation, window: Window) -> Row:
    shares = np.array(run.busy_s) / window.ends
    return {
        "replicas": len(run.replicas),
        **window.figures(run.asks),
        "busy": float(shares.mean()),
        "busiest": float(shares.max()),
        "preempted": sum(replica.preempted for replica in run.replicas),
        **mean_steps(replica.sums for replica in run.replicas),
        "start_s": run.fleet.start_s,
    }


def _draw(path: Path, runs: dict[str, Simulation], window: Window) -> None:
    """Draw which share of questions had its first token by when."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NotMeasured("--plot needs matplotlib; install 'clocher[bench]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for policy, run in runs.items():
        axes.plot(*_risen(run, window), label=policy)
    axes.set(xscale="log", xlabel="ms to the first token", ylabel="share of questions asked")
    axes.axvline(window.first_ms, color="grey", linestyle=":")
    axes.legend()
    figure.savefig(path)


def _risen(run: Simulation, window: Window) -> tuple[np.ndarray, np.ndarray]:
    asks: Sequence[Any] = [a for a in run.asks if window.begins <= a.arrived < window.ends]
    first = np.sort([1e3 * (a.first - a.arrived) for a in asks if a.fate == "served"])
    return first, np.arange(1, len(first) + 1) / max(1, len(asks))


if __name__ == "__main__":
    main()
