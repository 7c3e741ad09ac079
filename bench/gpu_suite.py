"""Check and measure the CUDA back end on this machine's GPU, in less than nine minutes.

    python -m bench.gpu_suite --out results

Writes results/suite.json and results/suite.txt and prints the latter. Each part runs in processes
of its own under a time limit; what crashes or hangs is reported and the rest goes on. --part
chooses parts; --dry-run executes every part with tiny shapes in Triton's interpreter, without a
GPU. Exits 1 if a check failed or a part did not finish.
"""

import os
import time
from pathlib import Path

import click
from rich.console import Console

from bench.gpu import report
from bench.gpu.parts import PARTS
from bench.gpu.record import Record, write_json
from bench.gpu.supervise import Job, jobs_of, run_jobs

_WIDTH = 150


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder for results")
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="default: all")
@click.option("--dry-run", is_flag=True, help="no GPU: tiny shapes, no speeds")
@click.option("--only", multiple=True, help="only items whose id contains this")
@click.option(
    "--budget", type=float, default=520.0, show_default=True, help="seconds for all parts"
)
@click.option(
    "--jobs", type=click.IntRange(1), help="processes side by side where nothing is timed"
)
def main(
    out: Path,
    names: tuple[str, ...],
    dry_run: bool,
    only: tuple[str, ...],
    budget: float,
    jobs: int | None,
) -> None:
    """Run the parts, stage by stage, and print the report."""
    at_once = jobs or max(1, min(14, (os.cpu_count() or 1) - 2))
    began = time.monotonic()
    chosen = {name: part for name, part in PARTS.items() if not names or name in names}
    for old in (out / "parts").glob("*"):
        old.unlink()
    finished: list[Job] = []
    for stage in sorted({part.stage for part in chosen.values()}):
        left = budget - (time.monotonic() - began)
        made: list[Job] = []
        for name, part in chosen.items():
            if part.stage == stage:
                made += jobs_of(name, part, out, dry_run, min(part.shards, at_once), only)
        for job in made:
            job.seconds = min(job.seconds, left)
        if left > 0:
            _say(f"{left:4.0f} s left: {', '.join(sorted({job.name for job in made}))}")
            run_jobs(made, at_once, _say)
        finished += made
    result = _combine(finished, dry_run, time.monotonic() - began)
    write_json(out / "suite.json", result)
    with (out / "suite.txt").open("w", encoding="utf-8") as file:
        report.show(result, Console(file=file, width=_WIDTH))
    click.echo((out / "suite.txt").read_text(encoding="utf-8"))
    raise SystemExit(0 if report.is_good(result) else 1)


def _combine(jobs: list[Job], dry: bool, seconds: float) -> report.Row:
    """Collect what the processes wrote; one that wrote nothing counts as unfinished."""
    records, ended = [], {}
    for job in jobs:
        records.append(job.record() or Record(job.name, dry=dry))
        if job.ended != "finished":
            ended[job.path.stem] = job.ended or "not started: no time left"
    return report.combine(records, ended, dry, seconds)


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
