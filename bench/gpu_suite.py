"""Check and measure the CUDA back end on this machine's GPU, in calls of less than nine minutes.

    python -m bench.gpu_suite --out call0 --call 0
    python -m bench.gpu_suite --out all --merge call0 --merge call1 --merge call2 --merge call3

Writes suite.json, suite.txt and suite.tar.xz to the output folder, anew after every part and whole
at every moment, and prints the text. Each part runs in processes of its own under a time limit;
what crashes or hangs is reported and the rest goes on. Without --call all run, one after another.
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
@click.option(
    "--cache",
    "caches",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="archive of kernels compiled ahead; unpacked beside itself",
)
@click.option("--wheels", type=_FOLDER, help="folder of wheels that are not installed")
def main(
    out: Path,
    calls: tuple[str, ...],
    names: tuple[str, ...],
    dry_run: bool,
    only: tuple[str, ...],
    budget: float | None,
    jobs: int | None,
    merge: tuple[Path, ...],
    caches: tuple[Path, ...],
    wheels: Path | None,
) -> None:
    """Run the parts, one after another, and print the report."""
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
        kernels = _use(caches) if caches else None
        run = _Run(out, records, made, dry_run, bool(only), kernels)
        code = run.parts(budget or BUDGET * len(wanted), at_once)
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

    def parts(self, budget: float, at_once: int) -> int:
        """Run the jobs part by part; return the exit code."""
        self.save(archive=True)
        try:
            for name in dict.fromkeys(job.name for job in self.jobs):
                made = [job for job in self.jobs if job.name == name]
                left = budget - (time.monotonic() - self.began)
                for job in made:
                    job.seconds = min(job.seconds, left)
                if left > 0:
                    _say(f"{left:4.0f} s left: {name}")
                    run_jobs(made, at_once, _say, self.save)
                self.save(archive=True)
        finally:
            good = self.save(archive=True, kernels=True)
        click.echo(self.text)
        return 0 if good else 1

    def save(self, archive: bool = False, kernels: bool = False) -> bool:
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
            new = self.kernels.files() if kernels and self.kernels else ()
            record.archive(self.out, self.records, new)
        return report.is_good(result)


def _use(caches: Sequence[Path]) -> precompile.Cache:
    try:
        return precompile.use(caches)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--cache: {error}") from None


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
