"""The skeleton of a bench: options, rows, the table on the terminal, the JSON file, the exit code.

A bench declares its options and its columns, and yields rows; `experiment` makes the command of it.
Every row then says its `kind`, which is the bench, and the `command` that made it.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from bench.measure import (
    REST_S,
    NotMeasured,
    Rows,
    help_text,
    interleave,
    machine,
    print_table,
    ratio,
    seconds,
    write_json,
)
from clocher_kernels.errors import ClocherError, UsageError
from clocher_kernels.formats import parse_format
from clocher_runtime.engine.topology import default_threads

if TYPE_CHECKING:
    from clocher_runtime.engine.load import Model

Key = TypeVar("Key")
Row = dict[str, Any]
_BAR = " | "

FILE = click.Path(path_type=Path)
_MARKS = {True: "yes", False: "NO"}


class _New(click.Path):
    """A file that can be written, which is known before anything is measured."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a directory", param, ctx)
        return path


NEW = _New(dir_okay=False, path_type=Path)


class Listed(click.ParamType):
    """Values with commas between them.

    Args:
        read: makes a value of a text; raises ValueError.
        expected: what is wanted, for the error.
    """

    name = "list"

    def __init__(self, read: Callable[[str], Any], expected: str) -> None:
        self._read, self._expected = read, expected

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Read a list; a default may be read already."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(dict.fromkeys(map(self._read, value.split(","))))
        except ValueError:
            self.fail(f"{value!r}; expected {self._expected}", param, ctx)

    @classmethod
    def of(cls, known: Iterable[str]) -> "Listed":
        """Return the type of a list of known names."""
        names = {name: name for name in known}

        def read(text: str) -> str:
            if text not in names:
                raise ValueError
            return text

        return cls(read, f"some of {', '.join(names)}")


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ValueError
    return int(text)


def _sides(text: str) -> tuple[int, int]:
    match = re.fullmatch("([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text)
    if match is None:
        raise ValueError
    return int(match[1]), int(match[2])


def _format(text: str) -> str:
    try:
        return parse_format(text).name
    except ClocherError as error:
        raise click.BadParameter(str(error)) from None


COUNTS = Listed(_count, "numbers from 1, such as 1,2")
SHAPES = Listed(_sides, "NxK, such as 4096x14336")
FORMATS = Listed(_format, "formats of weights")


def default_counts() -> str:
    """Return the thread counts 1 and that of a run, as an option's text."""
    return ",".join(str(n) for n in sorted({1, default_threads()}))


TEAMS = click.option("--threads", type=COUNTS, default=default_counts, show_default="1 and all")
"""Some sizes of the team of threads, side by side."""
TEAM = click.option(
    "--threads", type=click.IntRange(1), default=default_threads, show_default="all usable cores"
)
MODEL_DIR = click.option(
    "--model-dir", type=FILE, envvar="MODEL_DIR", help="default: MODEL_DIR, else the embedded model"
)


def opened(model_dir: Path | None, precision: str | None = None) -> "Model":
    """Return the model of a directory, or the embedded one."""
    from clocher_runtime.checkpoints import open_checkpoint  # late: tables need no checkpoint
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.engine.load import load_model

    return load_model(open_checkpoint(model_dir or embedded_model()), precision)


def of_read(speeds: Sequence[float], reads: Sequence[float]) -> Row:
    """Return what a row says of speeds beside the read bandwidth of the same rounds, in GB/s."""
    share = ratio(speeds, reads)
    row = {"gbps": median(speeds), "read_gbps": median(reads), "pct_of_limit": 100 * share.value}
    return row | {"pct_low": 100 * share.low, "pct_high": 100 * share.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is timed: ours on a CPU or a GPU, or a peer's.

    Attributes:
        run: makes `calls` calls and returns when they are done.
        calls: how many.
        awake: a context in which threads wait for the next run without falling asleep.
        close: releases it.
    """

    run: Callable[[], object]
    calls: int = 1
    awake: Callable[[], AbstractContextManager[object]] = nullcontext
    close: Callable[[], object] = lambda: None

    def seconds(self, at_least: float = 0.0) -> float:
        """Return the seconds of a call; runs are repeated until `at_least` seconds have passed."""
        with self.awake():
            return seconds(self.run, at_least) / self.calls


def turns(
    runs: Mapping[Key, Callable[[], float]], rounds: int, rest_s: float = REST_S
) -> dict[Key, list[float]]:
    """Return what each contestant measured in each round; see `interleave`."""
    named = {str(key): run for key, run in runs.items()}
    found = interleave(named, rounds, rest_s=rest_s)
    return dict(zip(runs, found.values(), strict=True))


def experiment(
    kind: str,
    text: str | None,
    heads: str = "",
    cells: str = "",
    *,
    title: str = "",
    rounds: int | None = None,
    good: Callable[[Row], bool] = lambda row: row.get("correct", True),
) -> Callable[[Callable[..., Iterable[Row]]], click.Command]:
    """Return a decorator that makes a command of what yields rows.

    Args:
        kind: the module of the bench, and what its rows are called.
        text: its help.
        heads: of the table's columns, as `table` takes them; without any, rows are printed as lines
            of JSON.
        cells: what the columns show.
        title: of the table, filled in from the first row.
        rounds: how often things are measured, unless --rounds says otherwise; None: no such option.
        good: whether a row is as it should be; the command exits with 1 if one is not.
    """

    def decorate(measure: Callable[..., Iterable[Row]]) -> click.Command:
        @wraps(measure)
        def run(out: Path | None, **options: Any) -> None:
            about = {"kind": kind, "command": _spelled(kind)}
            rows: Rows = []
            terminal = Console(stderr=True)
            try:
                with terminal.status(kind) if terminal.is_terminal else nullcontext() as status:
                    for row in measure(**options):
                        rows.append({**about, **row})
                        if status:
                            status.update(f"{kind}: {len(rows)} rows")
            except UsageError as error:
                raise click.UsageError(str(error)) from None
            except (ClocherError, NotMeasured) as error:
                raise click.ClickException(str(error)) from None
            if heads and rows:
                name = f"{title.format_map(rows[0])}, {machine()}"
                print_table(table(heads, cells, rows, name))
            for row in rows if not heads else ():
                click.echo(json.dumps(row))
            if out and rows:
                write_json(out, rows)
            raise SystemExit(int(not all(map(good, rows))))

        command = click.command(kind, cls=_Command, help=help_text(text))(run)
        if rounds is not None:
            at_least_one = click.IntRange(1)
            command.params.append(
                click.Option(["--rounds"], type=at_least_one, default=rounds, show_default=True)
            )
        command.params.append(click.Option(["--json", "out"], type=NEW, help="Write rows there."))
        return command

    return decorate


def table(heads: str, cells: str, rows: Iterable[Row], title: str = "", **looks: Any) -> Table:
    """Return a table of rows, without the columns that no row fills.

    Args:
        heads: what the columns are called: "format | GB/s".
        cells: what they show of a row, as `str.format` takes it: "{format} | {gbps:.1f}"; a row
            that lacks it leaves a cell empty.
        rows: of the table.
        title: above it.
        looks: more of what `rich.table.Table` takes.
    """
    lines = [[_cell(shown, row) for shown in cells.split(_BAR)] for row in rows]
    names = heads.split(_BAR)
    filled = [index for index in range(len(names)) if any(line[index] for line in lines)]
    made = Table(*(names[index] for index in filled), title=title, **looks)
    for line in lines:
        made.add_row(*(line[index] for index in filled))
    return made


def _cell(shown: str, row: Row) -> str:
    said = {key: _MARKS[value] if isinstance(value, bool) else value for key, value in row.items()}
    try:
        return shown.format_map(said)
    except (KeyError, TypeError):
        return ""


def _spelled(kind: str) -> str:
    """Return the command as it was given; paths lose their folders, for rows are published."""
    words = []
    for word in click.get_current_context().meta[__name__]:
        name, equals, value = word.rpartition("=")
        words.append(f"{name}{equals}{value.rstrip('/').rpartition('/')[2]}")
    return shlex.join(["python", "-m", f"bench.{kind}", *words])


class _Command(click.Command):
    """A command that remembers how it was called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = list(args)
        return super().parse_args(ctx, args)
