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

from bench.compiled_calls import CompiledCalls
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.topology import default_threads


@click.command(help=__doc__)
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    envvar="MODEL_DIR",
    help="default: MODEL_DIR, else the embedded model",
)
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--limit", type=float, default=0.05, show_default=True, help="largest share")
def main(model_dir: Path | None, steps: int, threads: int | None, limit: float) -> None:
    """Measure and print."""
    model = load_model(open_checkpoint(model_dir or embedded_model()))
    session = Session(model, threads=threads or default_threads(), context=steps + 2)
    session.warm()
    for _ in session.generate([[1]], steps, stop_ids=frozenset()):  # warm the loop too
        pass
    compiled = CompiledCalls(session.executor)
    window = TimedWindow("step overhead")
    stream = session.generate([[1]], steps + 1, stop_ids=frozenset(), window=window)
    next(stream)  # the prefill
    with compiled.watched():
        start = time.perf_counter_ns()
        for _ in stream:
            pass
        total = time.perf_counter_ns() - start
    session.close()
    inside, made = compiled.ns, compiled.calls
    share = 1 - inside / total
    line = {
        "steps": made,
        "threads": threads or default_threads(),
        "total_us_per_step": total / made / 1e3,
        "compiled_us_per_step": inside / made / 1e3,
        "outside_us_per_step": (total - inside) / made / 1e3,
        "outside_share": share,
    }
    click.echo(json.dumps(line))
    raise SystemExit(int(share > limit))


if __name__ == "__main__":
    main()
