"""What is left of a team's speed when others want its cores too.

    python -m bench.contention [--shape large|small|prompt] [--rounds 10] [--cgroup DIR]

Teams of one and two threads, each a process of its own, multiply one token by matrices: "large"
ones that no cache holds (bf16, 2048 x 2048, 16 of them), or "small" ones with barriers every few
microseconds (fp32, 256 x 256, 40 of them); or 256 tokens of a "prompt" (int4, 2048 x 2048, 16 of
them). They run alone, beside a process that is always busy,
beside another team of two, on one CPU, and, with --cgroup, within a quota of one CPU: DIR is a
group of the cpu controller below which groups may be made. Ratios are medians of interleaved
rounds.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import numpy as np

from bench.measure import ratio
from bench.ops.experiment import Row, experiment, turns
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.rewrite import quantize_activations
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import encode
from clocher_runtime.engine.footprint import ACT_GROUP
from clocher_runtime.engine.topology import cpu_name
from cpu_fallback.executor import CpuExecutor

SHAPES = {
    "large": (2048, 16, "bf16", 1),
    "small": (256, 40, "f32", 1),
    "prompt": (2048, 16, "int4_sym_g32_f16", 256),
}
"""Rows and columns, matrices, their format, tokens."""
PERIOD_US = 100_000


def work(threads: int, shape: str) -> None:
    """Serve as a team: for each number of seconds on standard input, print steps per second."""
    n, layers, form, tokens = SHAPES[shape]
    rng = np.random.default_rng(1)
    weights = {
        f"w{i}": encode(rng.standard_normal((n, n), dtype=np.float32), parse_format(form))
        for i in range(layers)
    }
    buffers = {name: Buffer((tokens, n), "f32", "M", "scratch") for name in "ab"}
    calls = [
        Call("linear", {"x": "ab"[i % 2], "w": name, "y": "ba"[i % 2]})
        for i, name in enumerate(weights)
    ]
    plan = Plan(tokens, 1, buffers, {}, tuple(weights), tuple(calls))
    plan = quantize_activations(plan, {name: w.format for name, w in weights.items()}, ACT_GROUP)
    executor = CpuExecutor(plan, weights, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        with executor.running():
            start, steps = time.perf_counter(), 0
            while time.perf_counter() - start < float(line):
                executor.step(tokens, 1)
                steps += 1
            print(steps / (time.perf_counter() - start), flush=True)
    executor.close()


class Team:
    """A process that works when it is told to.

    Args:
        threads: size of its team.
        shape: what it multiplies.
        cpus: CPUs that it may run on.
        group: its control group.
    """

    def __init__(
        self, threads: int, shape: str, cpus: set[int] | None = None, group: Path | None = None
    ) -> None:
        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            if cpus:
                os.sched_setaffinity(0, cpus)

        command = [sys.executable, "-m", "bench.contention", "--serve", str(threads)]
        self._process = subprocess.Popen(
            [*command, "--shape", shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def begin(self, seconds: float) -> None:
        """Let it work for a while."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """Return its steps per second."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def quota(root: Path) -> Iterator[Path]:
    """Make a control group with a quota of one CPU."""
    group = root / f"clocher-{os.getpid()}"
    group.mkdir()
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{PERIOD_US} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US))
        yield group
    finally:
        group.rmdir()


@experiment(
    "contention",
    __doc__,
    "over | under | ratio",
    "{over} | {under} | {ratio:.2f} [{low:.2f}, {high:.2f}]",
    title="{shape}",
    rounds=10,
)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="large", show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True, help="of each run"
)
@click.option("--cgroup", "root", type=click.Path(path_type=Path, exists=True), help="see above")
@click.option("--serve", type=click.IntRange(1), hidden=True)
def main(
    shape: str, seconds: float, root: Path | None, serve: int | None, rounds: int
) -> Iterator[Row]:
    """Yield a row for each ratio; or be one of the teams."""
    if serve is not None:
        work(serve, shape)
        return
    one_cpu = {max(os.sched_getaffinity(0))}
    with ExitStack() as stack:

        def team(threads: int, cpus: set[int] | None = None, group: Path | None = None) -> Team:
            made = Team(threads, shape, cpus, group)
            stack.callback(made.close)
            return made

        def alone(one: Team) -> Callable[[], float]:
            def run() -> float:
                one.begin(seconds)
                return one.end()

            return run

        two, other = team(2), team(2)

        def beside_busy() -> float:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                return alone(two)()
            finally:
                busy.kill()
                busy.wait()

        def beside_team() -> float:
            two.begin(seconds)
            other.begin(seconds)
            return (two.end() + other.end()) / 2

        runs = {"two threads": alone(two), "one thread": alone(team(1))}
        runs |= {"two, one foreign busy thread": beside_busy, "two, beside a team": beside_team}
        runs |= {
            "two on one CPU": alone(team(2, one_cpu)),
            "one on one CPU": alone(team(1, one_cpu)),
        }
        pairs = [
            ("two, one foreign busy thread", "two threads"),
            ("two threads", "two, beside a team"),
            ("two on one CPU", "one on one CPU"),
        ]
        if root is not None:
            # Teams leave a group before it is removed: the stack ends them first.
            group = stack.enter_context(quota(root))
            for name, threads in (("two", 2), ("one", 1)):
                runs[f"{name}, quota of one CPU"] = alone(team(threads, group=group))
            pairs.append(("two, quota of one CPU", "one, quota of one CPU"))
        found = turns(runs, rounds)
    for over, under in pairs:
        r = ratio(found[over], found[under])
        yield {"shape": shape, "over": over, "under": under, "cpu": cpu_name()} | {
            "ratio": r.value,
            "low": r.low,
            "high": r.high,
            "rounds": rounds,
        }


if __name__ == "__main__":
    main()
