"""Does the harness repeat itself? It is run on one configuration again and again.

    python -m bench.harness_trust [--pairs N] [--runs N] [--planted PERCENT] [--out DIR]
                                  [-- FLAGS OF clocher-run]

Each trial is a harness run of three cells: the configuration, the same once more, and the same with
every step really made so many per cent longer (bench/planted.py). Trials that follow each other
must agree: the intervals of the configuration overlap, in 19 of 20 pairs. The slowdown must be
found, in the trial and beside the trial before (as --compare does), and the second cell must not be
called faster or slower. A trial whose file is there already is not run again.

Exit codes: 0 the harness can be trusted here; 7 it cannot; 9 the machine was too disturbed to tell.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import click
from rich.console import Console

from bench import harness
from bench.clock.machine import OTHERS_LIMIT, describe
from bench.measure import machine, print_table
from bench.report.columns import NONE, Table, of_ratio, of_runs
from bench.sweep.cells import Cell, base_settings
from bench.sweep.results import ResultCell, compare_files, group, paired
from bench.sweep.runs import Child, Harness, Plan, launch
from clocher_kernels.errors import ClocherError
from clocher_runtime.command.clocher_run import COMMAND
from clocher_runtime.exit_codes import ExitCode, exit_code
from clocher_runtime.quality.statistics import Ratio, agree, median_of_runs

NEEDED = 0.95
PLAIN, AGAIN, SLOWED = "plain", "again", "slowed"

# A window of about half a second with the embedded model, longer than what its start takes away.
_FLAGS = {"max_new": "64", "rounds": "60", "warmup": "16", "aggregate": "1"}


@dataclass(frozen=True, slots=True)
class Question:
    """Something that the harness is asked over and over.

    Attributes:
        title: what is asked.
        answers: for each time, whether it was right; None where no run counted.
    """

    title: str
    answers: tuple[bool | None, ...]

    @property
    def known(self) -> list[bool]:
        """Answers that were given."""
        return [answer for answer in self.answers if answer is not None]

    @property
    def verdict(self) -> str:
        """Return "right", "wrong", or "undecided" where fewer than needed were answered."""
        if not self.answers or len(self.known) < NEEDED * len(self.answers):
            return "undecided"
        return "right" if sum(self.known) >= NEEDED * len(self.known) else "wrong"


def cells_for(settings: dict[str, str], planted: float) -> list[Cell]:
    """Return the three cells of a trial, each with a key of its own."""
    host = describe()["host_sha256"]
    base = harness.with_key(Cell(PLAIN, {}, settings), host)
    made = []
    for label, percent in ((PLAIN, 0.0), (AGAIN, 0.0), (SLOWED, planted)):
        key = hashlib.sha256(f"{base.key} {label} {percent}".encode()).hexdigest()
        made.append(replace(base, label=label, planted=percent, key=key))
    return made


def trials(
    count: int,
    plan: Plan,
    folder: Path,
    say: Callable[[str], None],
    start: Callable[[Cell], Child] = launch,
    rest_s: float = 1.0,
) -> list[dict[str, ResultCell]]:
    """Run trials, each into a file of its own, and return their cells by label."""
    found = []
    keys = {cell.key for cell in plan.cells}
    for number in range(1, count + 1):
        say(f"trial {number} of {count}")
        path = folder / f"trial-{number:02}.jsonl"
        rows = Harness(path, lambda said: None, start, rest_s).run(plan)
        found.append({c.label: c for c in group([row for row in rows if row["key"] in keys])})
    return found


def questions(found: Sequence[dict[str, ResultCell]], planted: float) -> list[Question]:
    """Return what the trials answer."""
    after = list(pairwise(found))
    return [
        Question(
            "two harness runs of one configuration agree",
            tuple(_agree(a[PLAIN], b[PLAIN]) for a, b in after),
        ),
        Question(
            "in one harness run: nothing planted, nothing found",
            tuple(_is(paired(t[PLAIN], t[AGAIN]), "no difference shown") for t in found),
        ),
        Question(
            f"in one harness run: {planted:g} % planted, a slowdown found",
            tuple(_is(paired(t[PLAIN], t[SLOWED]), "slower") for t in found),
        ),
        Question(
            "--compare: nothing planted, nothing found",
            tuple(_is(compare_files(a[PLAIN], b[AGAIN]), "no difference shown") for a, b in after),
        ),
        Question(
            f"--compare: {planted:g} % planted, a slowdown found",
            tuple(_is(compare_files(a[PLAIN], b[SLOWED]), "slower") for a, b in after),
        ),
    ]


def _agree(a: ResultCell, b: ResultCell) -> bool | None:
    if len(a.values()) < 2 or len(b.values()) < 2:
        return None
    return agree(median_of_runs(a.values()), median_of_runs(b.values()))


def _is(found: Ratio | None, wanted: str) -> bool | None:
    """Whether a comparison says what it should; None where there are too few runs to say."""
    return found.verdict == wanted if found is not None and found.known else None


def trials_table(found: Sequence[dict[str, ResultCell]]) -> Table:
    """Return a row for each trial."""
    head = ("trial", "runs", "void", PLAIN, f"{AGAIN} / {PLAIN}", f"{SLOWED} / {PLAIN}")
    rows = []
    for number, trial in enumerate(found, 1):
        values = trial[PLAIN].values()
        void = sum(cell.count("void") for cell in trial.values())
        shown = of_runs(median_of_runs(values)) if values else NONE
        ratios = (of_ratio(paired(trial[PLAIN], trial[label])) for label in (AGAIN, SLOWED))
        rows.append((str(number), str(len(values)), str(void), shown, *ratios))
    return Table(head, tuple(rows))


@click.command(help=__doc__)
@click.option("--pairs", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option("--runs", type=click.IntRange(2, 1000), default=10, show_default=True)
@click.option("--planted", type=click.FloatRange(0.1, 100), default=5.0, show_default=True)
@click.option("--retries", type=click.IntRange(0, 100), default=3, show_default=True)
@click.option(
    "--others-limit",
    type=click.FloatRange(0, 100),
    default=OTHERS_LIMIT,
    show_default=True,
)
@click.option(
    "--patience", type=float, default=60.0, show_default=True, help="seconds of each trial"
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/trust"), show_default=True
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(
    pairs: int,
    runs: int,
    planted: float,
    retries: int,
    others_limit: float,
    patience: float,
    out: Path,
    flags: tuple[str, ...],
) -> None:
    """Run the trials, print them and what follows."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        given = {**_FLAGS, "ignore_eos": "1", **(COMMAND.parse(flags) or {})}
        plan = Plan(
            cells_for(base_settings(given, os.environ, {}), planted),
            runs,
            retries,
            others_limit,
            patience_s=patience,
        )
        out.mkdir(parents=True, exist_ok=True)
        found = trials(pairs + 1, plan, out, lambda said: console.print(said, markup=False))
    except (ClocherError, OSError, KeyboardInterrupt) as error:
        console.print(f"error: {error or type(error).__name__}", markup=False)
        sys.exit(ExitCode.USAGE if isinstance(error, OSError) else exit_code(error))
    print_table(
        trials_table(found).on_terminal("tokens/s: median [95 % interval] of the runs that count")
    )
    click.echo(machine())
    asked = questions(found, planted)
    for question in asked:
        unknown = len(question.answers) - len(question.known)
        note = f", {unknown} not answered" if unknown else ""
        click.echo(
            f"{question.verdict:>9}: {question.title}: "
            f"{sum(question.known)} of {len(question.known)}{note}"
        )
    verdicts = {question.verdict for question in asked}
    sys.exit(
        ExitCode.MISMATCH
        if "wrong" in verdicts
        else ExitCode.UNDECIDED
        if "undecided" in verdicts
        else ExitCode.OK
    )


if __name__ == "__main__":
    main()
