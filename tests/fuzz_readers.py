"""Open mutants of model files with every reader, and report what is no typed error."""

import json
import sys
from pathlib import Path

import click
from fuzz.campaign import fuzz, load, reproduce, save
from fuzz.oracle import CPU_SECONDS, EXTRA_BYTES
from fuzz.readers import READERS
from rich.console import Console
from rich.progress import Progress

from clocher_kernels.errors import UsageError
from clocher_runtime.exit_codes import ExitCode

SCHEMA = "clocher.fuzz/1"

EPILOG = f"""\b
Readers: {", ".join(READERS)}

A mutant fails if its reader raises anything but a typed error, computes for more than
{CPU_SECONDS:g} s, needs more than twice the files and {EXTRA_BYTES >> 20} MiB, or ends the process.

\b
Examples:
  python tests/fuzz_readers.py --reader all --mutants 20000 --jobs 2
  python tests/fuzz_readers.py --reader gguf --mutants 1000000 --start 1000000
  python tests/fuzz_readers.py --reproduce build/fuzz/gguf-0-1234.json

\b
Exit codes:
  0  every mutant was refused with a typed error or read
  2  a flag cannot be used
  7  a mutant failed"""


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 100})
@click.option("--reader", "names", multiple=True, default=["all"], help="Which; may be repeated.")
@click.option("--mutants", type=click.IntRange(1, 1 << 40), default=20_000, help="For each reader.")
@click.option("--seed", type=click.IntRange(0), default=0, help="The same seed, the same mutants.")
@click.option("--start", type=click.IntRange(0), default=0, help="First mutant, to go on with.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, help="Worker processes.")
@click.option(
    "--failures",
    type=click.Path(path_type=Path),
    default=Path("build/fuzz"),
    help="Folder for the first mutant of every failure.",
)
@click.option("--reproduce", "saved", type=click.Path(path_type=Path), help="Open a saved mutant.")
def main(
    names: tuple[str, ...],
    mutants: int,
    seed: int,
    start: int,
    jobs: int,
    failures: Path,
    saved: Path | None,
) -> None:
    """Open mutants of model files; standard output gets one line of JSON with the counts."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if saved is not None:
        sys.exit(_reproduce(console, saved))
    chosen = list(READERS) if "all" in names else list(dict.fromkeys(names))
    if unknown := [name for name in chosen if name not in READERS]:
        raise click.UsageError(f"unknown reader {unknown[0]!r}; known: all, {', '.join(READERS)}")
    try:
        with Progress(console=console, disable=not console.is_terminal) as bars:
            tasks = {name: bars.add_task(name, total=mutants) for name in chosen}
            tallies = fuzz(
                chosen, seed, start, mutants, jobs, lambda name, n: bars.advance(tasks[name], n)
            )
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    for name, tally in tallies.items():
        refused = sum(tally.refused.values())
        console.print(
            f"{name:<14}{tally.mutants:>9} mutants{refused:>9} refused{tally.accepted:>8} read"
            f"{tally.failed:>7} failed"
        )
        for key, failure in tally.failures.items():
            path = save(failures, name, seed, failure)
            console.print(f"  {failure.count} x {key}: {path}", markup=False)
    document = {
        "schema": SCHEMA,
        "seed": seed,
        "start": start,
        "readers": {name: tally.document() for name, tally in tallies.items()},
    }
    click.echo(json.dumps(document))
    failed = any(tally.failed for tally in tallies.values())
    sys.exit(ExitCode.MISMATCH if failed else ExitCode.OK)


def _reproduce(console: Console, saved: Path) -> ExitCode:
    try:
        reader, files = load(saved)
    except UsageError as error:
        console.print(f"error: {error}", markup=False)
        return ExitCode.USAGE
    judgement = reproduce(files, reader)
    console.print(f"{reader}: {judgement.outcome} {judgement.detail}", markup=False)
    console.print(judgement.trace, markup=False)
    return ExitCode.MISMATCH if judgement.failed else ExitCode.OK


if __name__ == "__main__":
    main()
