"""Show what a decode step costs besides its compiled call.

    python -m bench.step_overhead [--speculate suffix]

Generates with the embedded model (or --model-dir) and reads the clock around each compiled call and
around the whole loop. The difference is Python: the generate loop, the window, the token objects.
With --speculate it tells besides the median time that drafting, writing the inputs and verifying
take of a step that guesses, whether that pays or not.
Prints one JSON line; exits 1 if the share is over --limit.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.decode import Runner
from bench.ops.experiment import MODEL_DIR, TEAM, Row, experiment, opened
from clocher_runtime.config.engine import SPECULATE

PARTS = {"draft": "_draft", "stage": "_begin", "verify": "_verify"}
"""Part of a step that speculates -> method of `engine.forwards.Forwards` that does it."""


class Parts:
    """Reads the clock around the parts of each step.

    Args:
        passes: of a session.

    Attributes:
        ns: part -> the times of each step.
    """

    def __init__(self, passes: object) -> None:
        self.ns: dict[str, list[int]] = {part: [] for part in PARTS}
        for part, method in PARTS.items():
            setattr(passes, method, self._timed(part, getattr(passes, method)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter_ns()
            result = method(*arguments)
            self.ns[part].append(time.perf_counter_ns() - start)
            return result

        return timed


@experiment("step_overhead", __doc__, good=lambda row: bool(row["outside_share"] <= row["limit"]))
@MODEL_DIR
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True)
@TEAM
@click.option("--limit", type=float, default=0.05, show_default=True, help="largest share")
@click.option("--speculate", type=click.Choice(SPECULATE), default="off", show_default=True)
def main(
    model_dir: Path | None, steps: int, threads: int, limit: float, speculate: str
) -> Iterator[Row]:
    """Yield the one row; what was generated first has warmed the loop."""
    with closing(Runner(opened(model_dir), threads, steps + 2, speculate=speculate)) as runner:
        passes = runner.session.scheduler.forwards
        parts = Parts(passes)
        if passes.speculator is not None:
            costs = passes.speculator.costs
            costs.ns, costs.note = [1.0] * len(costs.ns), lambda tokens, ns: None
        runner.decode(steps)
        parts.ns = {part: [] for part in PARTS}
        runner.decode(steps)
        share = runner.outside_share()
    made, total, inside = runner.spent[-1]
    yield {
        "steps": made,
        "threads": threads,
        "total_us_per_step": total / made / 1e3,
        "compiled_us_per_step": inside / made / 1e3,
        "outside_us_per_step": (total - inside) / made / 1e3,
        "outside_share": share,
        "limit": limit,
        "tokens_per_step": steps / made,
    } | {f"{part}_us": median(ns) / 1e3 for part, ns in parts.ns.items() if ns}


if __name__ == "__main__":
    main()
