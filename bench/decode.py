"""Decode speed of a model, beside the limit that reading its weights sets.

    python -m bench.decode --model-dir DIR [--precision P] [--threads 1,2] [--json FILE]

The limit is read bandwidth over bytes per token; the bandwidth is measured in the same rounds with
the same threads. "outside" is the share of a step's time that is not spent in the compiled call:
Python, the window, the token objects. Timed: decode steps with sampling; not load, compilation,
prefill and text. "same ids" says that every round and every thread count gave the same tokens.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np
from rich.table import Table

from bench.bandwidth import DEFAULT_BYTES, PAGES, Reader, default_counts, parse_counts
from bench.compiled_calls import CompiledCalls
from bench.measure import (
    NotMeasured,
    Rows,
    interleave,
    limit_note,
    machine,
    print_table,
    ratio,
    write_json,
)
from clocher_kernels.errors import ClocherError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.engine.load import PRECISIONS, Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow


class Runner:
    """A session with a number of threads, measured step by step.

    Args:
        model: what to run.
        threads: of the team.
        context: tokens that one run needs, prompt and output.
        pretranspose: weights to prepack, as `Session` takes it.

    Attributes:
        ids: hash of the tokens of every generation so far.
        outside: share of time outside compiled calls of every generation so far.
    """

    def __init__(
        self, model: Model, threads: int, context: int, pretranspose: str | None = None
    ) -> None:
        self.session = Session(
            model, threads=threads, context=context, chunk=512, pretranspose=pretranspose
        )
        self.session.warm()
        self.vocab_size = model.spec.vocab_size
        self.ids: list[str] = []
        self.outside: list[float] = []
        self._compiled = CompiledCalls(self.session.executor)

    def decode(self, tokens: int) -> float:
        """Generate tokens after a prompt of one, and return decode steps a second."""
        window = TimedWindow("decode")
        made = []
        stream = self.session.generate([[1]], tokens + 1, stop_ids=frozenset(), window=window)
        made.append(next(stream).id)
        self._compiled.ns = 0
        with self._compiled.watched():
            start = time.perf_counter_ns()
            made += [token.id for token in stream]
            elapsed = time.perf_counter_ns() - start
        self.ids.append(hashlib.sha256(np.array(made, "<i4").tobytes()).hexdigest())
        if self._compiled.known:
            self.outside.append(1 - self._compiled.ns / elapsed)
        steps = [span for span in window.spans if span.kind == "decode"]
        return len(steps) / (sum(span.ns for span in steps) / 1e9)

    def prefill(self, tokens: int) -> float:
        """Read a prompt of this length, and return its tokens a second."""
        ids = np.random.default_rng(0).integers(self.vocab_size, size=tokens).tolist()
        window = TimedWindow("prefill")
        for _ in self.session.generate([ids], 1, stop_ids=frozenset(), window=window):
            pass
        return tokens / (window.total_ns / 1e9)

    def outside_share(self) -> float:
        """Return the median share of time outside compiled calls.

        Raises:
            NotMeasured: the executor does not show its calls.
        """
        if not self.outside:
            raise NotMeasured("this executor does not show its compiled call")
        return median(self.outside[-max(len(self.outside) - 1, 1) :])

    def close(self) -> None:
        """End the session."""
        self.session.close()


def measure(
    model: Model, threads: tuple[int, ...], tokens: int, rounds: int, reader: Reader
) -> Rows:
    """Return a row for each thread count."""
    context = min(model.spec.max_positions, tokens + 2)
    runners = {count: Runner(model, count, context) for count in threads}
    runs: dict[str, Callable[[], float]] = {}
    for count, runner in runners.items():
        runs[f"decode {count}"] = lambda runner=runner: runner.decode(tokens)
        runs[f"read {count}"] = lambda count=count: reader.gbps(count)
    try:
        found = interleave(runs, rounds)
        same = len({ids for runner in runners.values() for ids in runner.ids}) == 1
        first = found[f"decode {threads[0]}"]
        rows: Rows = []
        for count, runner in runners.items():
            speeds, reads = found[f"decode {count}"], found[f"read {count}"]
            gbps = median(speeds) * model.bytes_per_token / 1e9
            limit = ratio([s * model.bytes_per_token / 1e9 for s in speeds], reads)
            note = limit_note(100 * limit.value)
            try:
                outside = runner.outside_share()
            except NotMeasured as reason:
                outside, note = None, f"outside: not measured: {reason}"
            rows.append(
                {
                    "op": "decode",
                    "test": f"tg{tokens}",
                    "model": model.checkpoint.path.name,
                    "format": model.precision,
                    "threads": count,
                    "isa": runner.session.isa,
                    "tok_s": median(speeds),
                    "samples": speeds,
                    "bytes_per_token": model.bytes_per_token,
                    "gbps": gbps,
                    "read_gbps": median(reads),
                    "read_huge_share": reader.huge_share,
                    "pct_of_limit": 100 * limit.value,
                    "pct_of_limit_95": [100 * limit.low, 100 * limit.high],
                    "outside_share": outside,
                    "scaling": ratio(speeds, first).value,
                    "tokens_sha256": runner.ids[-1],
                    "correct": same,
                    "note": note,
                }
            )
        return rows
    finally:
        for runner in runners.values():
            runner.close()


def show(rows: Rows) -> None:
    """Print the rows as a table."""
    table = Table(title=f"{rows[0]['model']}  {rows[0]['format']}  {machine()}")
    for column in ("test", "threads", "tok/s", "GB/s", "read GB/s", "% of limit", "outside"):
        table.add_column(column, justify="right")
    table.add_column("scaling", justify="right")
    table.add_column("same ids")
    table.add_column("note")
    for row in rows:
        low, high = row["pct_of_limit_95"]
        outside = row["outside_share"]
        table.add_row(
            row["test"],
            str(row["threads"]),
            f"{row['tok_s']:.2f}",
            f"{row['gbps']:.1f}",
            f"{row['read_gbps']:.1f}",
            f"{row['pct_of_limit']:.0f} [{low:.0f}, {high:.0f}]",
            "" if outside is None else f"{outside:.2%}",
            f"{row['scaling']:.2f}",
            "yes" if row["correct"] else "NO",
            row["note"],
        )
    print_table(table)


@click.command(help=__doc__)
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    envvar="MODEL_DIR",
    help="default: MODEL_DIR, else the embedded model",
)
@click.option("--precision", type=click.Choice(PRECISIONS), help="default: as stored")
@click.option("--threads", default=default_counts, callback=parse_counts, show_default="1 and all")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--pages", type=click.Choice(PAGES), default="2m", show_default=True)
@click.option("--mib", type=click.IntRange(2), default=DEFAULT_BYTES >> 20, help="Buffer to read.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
def main(
    model_dir: Path | None,
    precision: str | None,
    threads: tuple[int, ...],
    tokens: int,
    rounds: int,
    pages: str,
    mib: int,
    out: Path | None,
) -> None:
    """Measure and print; the exit code is 1 if the tokens differ."""
    try:
        model = load_model(open_checkpoint(model_dir or embedded_model()), precision)
        rows = measure(model, threads, tokens, rounds, Reader(pages, mib << 20))
    except ClocherError as error:
        raise click.ClickException(str(error)) from None
    show(rows)
    if out:
        write_json(out, rows)
    raise SystemExit(int(not all(row["correct"] for row in rows)))


if __name__ == "__main__":
    main()
