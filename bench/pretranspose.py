"""Decode speed of a model by what is prepacked, in turns.

    python -m bench.pretranspose --model-dir DIR [--scopes all,default] [--threads 1,2]

Ratios are to the last scope; "default" is what a run does that is not given one. Where a model has
integer weights, those outside a scope are multiplied with fp32 activations, so other kernels run.
Float weights run the same kernels on large pages ("all") and in place on the pages of the mapped
file ("default").
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import click
from rich.table import Table

from bench.bandwidth import default_counts, parse_counts
from bench.decode import Runner
from bench.measure import Rows, interleave, machine, print_table, ratio, write_json
from clocher_kernels.errors import ClocherError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.models.inventory import SCOPES

_SCOPES = {"default": None, **{name: name for name in SCOPES}}


def measure(
    model: Model, scopes: list[str], threads: tuple[int, ...], tokens: int, rounds: int
) -> Rows:
    """Return a row for each scope and thread count."""
    context = min(model.spec.max_positions, tokens + 2)
    cases = list(product(threads, scopes))
    runners = {case: Runner(model, case[0], context, _SCOPES[case[1]]) for case in cases}
    runs: dict[str, Callable[[], float]] = {
        f"{count} {scope}": (lambda case=(count, scope): runners[case].decode(tokens))
        for count, scope in cases
    }
    try:
        found = interleave(runs, rounds)
    finally:
        for runner in runners.values():
            runner.close()
    rows: Rows = []
    for count, scope in cases:
        speeds = found[f"{count} {scope}"]
        over = ratio(speeds, found[f"{count} {scopes[-1]}"])
        rows.append(
            {
                "op": "decode",
                "test": f"tg{tokens}",
                "model": str(model.checkpoint.path),
                "format": model.precision,
                "pretranspose": scope,
                "threads": count,
                "isa": runners[count, scope].session.isa,
                "act_prec": runners[count, scope].session.act_prec,
                "tok_s": median(speeds),
                "gbps": median(speeds) * model.bytes_per_token / 1e9,
                "samples": speeds,
                "ratio": over.value,
                "ratio_95": [over.low, over.high],
            }
        )
    return rows


def parse_scopes(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    """Read "all,default"."""
    names = value.split(",")
    if not set(names) <= set(_SCOPES):
        raise click.BadParameter(f"{value!r}; expected some of {', '.join(_SCOPES)}")
    return list(dict.fromkeys(names))


@click.command(help=__doc__)
@click.option("--model-dir", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--scopes", default="all,default", callback=parse_scopes, show_default=True)
@click.option("--threads", default=default_counts, callback=parse_counts, show_default="1 and all")
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
def main(
    model_dir: Path | None,
    scopes: list[str],
    threads: tuple[int, ...],
    tokens: int,
    rounds: int,
    out: Path | None,
) -> None:
    """Measure and print."""
    try:
        model = load_model(open_checkpoint(model_dir or embedded_model()))
        rows = measure(model, scopes, threads, tokens, rounds)
    except ClocherError as error:
        raise click.ClickException(str(error)) from None
    title = f"{rows[0]['model']}  {rows[0]['format']}  {machine()}"
    table = Table("prepacked", "threads", "activations", "tok/s", "GB/s", "ratio", title=title)
    for row in rows:
        low, high = row["ratio_95"]
        table.add_row(
            row["pretranspose"],
            str(row["threads"]),
            row["act_prec"],
            f"{row['tok_s']:.2f}",
            f"{row['gbps']:.1f}",
            f"{row['ratio']:.2f}x [{low:.2f}, {high:.2f}]",
        )
    print_table(table)
    if out:
        write_json(out, rows)


if __name__ == "__main__":
    main()
