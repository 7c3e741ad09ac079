"""Check and measure the CUDA back end on this machine's GPU, in four calls of nine minutes.

    python -m bench.gpu_suite --out call1 --call 1
    python -m bench.gpu_suite --out all --merge call1 --merge call2 --merge call3 --merge call4

Writes suite.json, suite.txt and suite.tgz to the output folder, anew after every stage and whole at
every moment, and prints the text. Each part runs in processes of its own under a time limit; what
crashes or hangs is reported and the rest goes on. Without --call all four run, one after another.
--part chooses parts; --dry-run executes every part with tiny shapes in Triton's interpreter,
without a GPU. Exits 1 if a check failed or a part did not finish. bench/gpu/README.md has more.
"""

import os
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click

from bench.gpu import precompile, record, report
from bench.gpu.record import Record
from bench.gpu.supervise import BUDGET, CALLS, PARTS, Job, jobs_of, parts_of, run_jobs

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(help=__doc__)
@click.option("--out", type=_FOLDER, required=True, help="folder for the three files")
@click.option(
    "--call",
    "calls",
    multiple=True,
    type=click.Choice([str(c) for c in CALLS]),
    help="default: all",
)
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="default: all")
@click.option("--dry-run", is_flag=True, help="no GPU: tiny shapes, no speeds")
@click.option("--only", multiple=True, help="only items whose id contains this")
@click.option("--budget", type=float, help=f"seconds for all parts  [default: {BUDGET:g} a call]")
@click.option(
    "--jobs", type=click.IntRange(1), help="processes side by side where nothing is timed"
)
@click.option(
    "--merge",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="results to put together instead of running anything",
)
@click.option("--cache", "folder", type=_FOLDER, help="kernels compiled ahead; new ones are added")
@click.option("--wheels", type=_FOLDER, help="folder of wheels of peers that are not installed")
def main(
    out: Path,
    calls: tuple[str, ...],
    names: tuple[str, ...],
    dry_run: bool,
    only: tuple[str, ...],
    budget: float | None,
    jobs: int | None,
    merge: tuple[Path, ...],
    folder: Path | None,
    wheels: Path | None,
) -> None:
    """Run the parts, stage by stage, and print the report."""
    if merge:
        raise SystemExit(_merge(out, merge))
    wanted = [int(call) for call in calls] or list(CALLS)
    at_once = jobs or max(1, min(14, (os.cpu_count() or 1) - 2))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as work:
        if wheels is not None:
            _unpack(wheels, Path(work, "site"))
        records, made = Path(work, "parts"), []
        for name, part in parts_of(wanted).items():
            if not names or name in names:
                made += jobs_of(name, part, records, dry_run, min(part.shards, at_once), only)
        kernels = None if folder is None else precompile.use(folder)
        run = _Run(out, records, made, dry_run, bool(only), kernels)
        code = run.stages(budget or BUDGET * len(wanted), at_once)
    raise SystemExit(code)


class _Run:
    """The jobs of a run, and the files that say how far they are."""

    def __init__(
        self,
        out: Path,
        records: Path,
        jobs: list[Job],
        dry: bool,
        chosen: bool,
        kernels: precompile.Cache | None,
    ) -> None:
        self.out, self.records, self.jobs = out, records, jobs
        self.dry, self.chosen, self.kernels = dry, chosen, kernels
        self.began = time.monotonic()
        self.text = ""
        if kernels is not None:
            _say(kernels.said)

    def stages(self, budget: float, at_once: int) -> int:
        """Run the jobs stage by stage; return the exit code."""
        self.save(archive=True)
        try:
            for stage in sorted({job.stage for job in self.jobs}):
                made = [job for job in self.jobs if job.stage == stage]
                left = budget - (time.monotonic() - self.began)
                for job in made:
                    job.seconds = min(job.seconds, left)
                if left > 0:
                    _say(f"{left:4.0f} s left: {', '.join(sorted({job.name for job in made}))}")
                    run_jobs(made, at_once, _say, self.save)
                self.save(archive=True)
        finally:
            good = self.save(archive=True)
        click.echo(self.text)
        return 0 if good else 1

    def save(self, archive: bool = False) -> bool:
        """Write what the processes have found so far; return whether all is well and done."""
        loaded, ended = [], {}
        for job in self.jobs:
            loaded.append(job.record() or Record(job.name, dry=self.dry))
            if job.ended != "finished":
                ended[job.path.stem] = job.ended or (
                    "not at its end yet" if job.starts else "not started"
                )
        result = report.combine(loaded, ended, self.dry, time.monotonic() - self.began)
        result["some_items"] = self.chosen
        if self.kernels is not None:
            result["kernels"] = self.kernels.said
        self.text = report.write(self.out, result)
        if archive:
            record.archive(self.out, self.records, self.kernels.files() if self.kernels else ())
        return report.is_good(result)


def _merge(out: Path, paths: Sequence[Path]) -> int:
    try:
        result = report.merge([record.read(path) for path in paths], PARTS)
    except ValueError as error:
        raise click.UsageError(f"--merge: {error}") from None
    click.echo(report.write(out, result))
    return 0 if report.is_good(result) else 1


def _unpack(wheels: Path, site: Path) -> None:
    """Make the modules of wheels importable in the processes of the parts."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise click.UsageError(f"--wheels: {wheels} has no *.whl; bench/gpu/README.md says how")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *([path] if path else [])])


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
