"""Show what a decode step costs besides its compiled call.

    python -m bench.step_overhead

Generates with the embedded model (or --model-dir) and reads the clock around each compiled call and
around the whole loop. The difference is Python: the generate loop, the window, the token objects.
Prints one JSON line; exits 1 if the share is over --limit.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click

from bench.decode import Runner
from bench.ops.experiment import MODEL_DIR, TEAM, Row, experiment, opened


@experiment("step_overhead", __doc__, good=lambda row: bool(row["outside_share"] <= row["limit"]))
@MODEL_DIR
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True)
@TEAM
@click.option("--limit", type=float, default=0.05, show_default=True, help="largest share")
def main(model_dir: Path | None, steps: int, threads: int, limit: float) -> Iterator[Row]:
    """Yield the one row; what was generated first has warmed the loop."""
    with closing(Runner(opened(model_dir), threads, steps + 2)) as runner:
        runner.decode(steps)
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
    }


if __name__ == "__main__":
    main()
