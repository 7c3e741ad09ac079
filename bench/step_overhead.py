"""Show what a decode step costs besides its compiled call.

    python -m bench.step_overhead

Generates with the embedded model (or --model-dir) and reads the clock around each compiled call and
around the whole loop. The difference is Python: the generate loop, the window, the token objects.
Prints one JSON line; exits 1 if the share is over --limit.
"""

import json
import time
from pathlib import Path

import click

from clocher_runtime.model_choice import embedded_model
from clocher_runtime.models.load import load_model
from clocher_runtime.session import Session
from clocher_runtime.timing import TimedWindow
from clocher_runtime.topology import default_threads
from clocher_runtime.weights import open_checkpoint


@click.command(help=__doc__)
@click.option("--model-dir", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--limit", type=float, default=0.05, show_default=True, help="largest share")
def main(model_dir: Path | None, steps: int, threads: int | None, limit: float) -> None:
    """Measure and print."""
    model = load_model(open_checkpoint(model_dir or embedded_model()))
    session = Session(model, threads=threads or default_threads(), context=steps + 2)
    inside: list[int] = []
    team = session._executor._team  # type: ignore[attr-defined]  # below everything public
    call = team._lead

    def timed(*args: int) -> None:
        start = time.perf_counter_ns()
        call(*args)
        inside.append(time.perf_counter_ns() - start)

    session.warm()
    for _ in session.generate([[1]], steps, stop_ids=frozenset()):  # warm the loop too
        pass
    team._lead = timed
    window = TimedWindow("step overhead")
    stream = session.generate([[1]], steps + 1, stop_ids=frozenset(), window=window)
    next(stream)  # the prefill
    inside.clear()
    start = time.perf_counter_ns()
    for _ in stream:
        pass
    total = time.perf_counter_ns() - start
    session.close()
    share = 1 - sum(inside) / total
    line = {
        "steps": len(inside),
        "threads": threads or default_threads(),
        "total_us_per_step": total / len(inside) / 1e3,
        "compiled_us_per_step": sum(inside) / len(inside) / 1e3,
        "outside_us_per_step": (total - sum(inside)) / len(inside) / 1e3,
        "outside_share": share,
    }
    click.echo(json.dumps(line))
    raise SystemExit(int(share > limit))


if __name__ == "__main__":
    main()
