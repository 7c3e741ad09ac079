"""What the scripts have in common: their declaration, options, messages, progress, exit codes."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from clocher_kernels.errors import ClocherError
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.iebin import JSON_NAME, open_iebin
from clocher_runtime.convert.to_iebin import open_source, plan_conversion
from clocher_runtime.disk.files import ending_on_lost_pages
from clocher_runtime.exit_codes import ExitCode, exit_code, told

EXIT_CODES = """\b
Exit codes:
  0  done
  2  a flag, a variable or a manifest cannot be used
  3  the input is missing, damaged or of an unknown kind
  5  the output cannot be written (disk full, no permission), or the network fails
  6  out of memory
"""
RESUMES = """\
Killed at any moment, it leaves either the model that was there before, or no model, or the
finished new one. Run it again to go on."""

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
COUNT = click.IntRange(1)

_Command = Callable[..., Any]
Wrap = Callable[[Any], Any]


def option(flag: str, kind: Any, help: str | None = None, **more: Any) -> Wrap:
    """Declare an option; `more` is what `click.option` takes. Defaults and variables are shown."""
    names = (flag, more.pop("name")) if "name" in more else (flag,)
    more.setdefault("show_default", more.get("default") is not None)
    more.setdefault("show_envvar", "envvar" in more)
    return click.option(*names, type=kind, help=help, **more)


def needed(flag: str, help: str, **more: Any) -> Wrap:
    """Declare a path that has to be given."""
    return option(flag, PATH, help, required=True, **more)


def switch(flag: str, help: str, *names: str) -> Wrap:
    """Declare an option without a value."""
    return click.option(flag, *names, is_flag=True, help=help)


def script(
    name: str, epilog: str | None = None, *options: Wrap, help: str | None = None
) -> Callable[[_Command], click.Command]:
    """Return a decorator that makes a function a script: `function(report, **options)`.

    What it returns is the exit code, None for 0; an expected error ends it with its own.

    Args:
        name: of the script, for messages.
        epilog: end of the help text.
        options: what `option` and its kind return, in the order of the help text.
        help: None takes the docstring of the function.
    """

    def decorate(function: _Command) -> click.Command:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            with reporting(name) as report:
                code = function(report, **given)
            if code:
                sys.exit(code)

        command: _Command = run
        for each in reversed(options):
            command = each(command)
        settings = {"max_content_width": 100}
        return click.command(help=help, epilog=epilog, context_settings=settings)(command)

    return decorate


class Report:
    """Writes to standard error for one script."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Write a line."""
        self._console.print(text, markup=False)

    def done(self, text: str) -> None:
        """Write a line that begins with the script's name."""
        self.note(f"{self._name}: {text}")

    def lost(self, message: str) -> None:
        """Write the error of a process that ends at once, because a model file is gone."""
        self._console.show_cursor()
        self.done(f"error: {message}")

    def disk(self, source: Path | str, target: Path, nbytes: int, free: int) -> None:
        """Say how much of the disk the work needs."""
        self.note(f"{source} -> {target}: needs {decimal(nbytes)} of disk, {decimal(free)} free")

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show a bar with the time left, on a terminal; yield what takes (bytes done, name)."""
        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with self._bar(*columns, TextColumn("{task.description}", markup=False)) as bar:
            task = bar.add_task("", total=total)
            yield lambda nbytes, name: bar.update(task, completed=nbytes, description=name)
            bar.update(task, completed=total, description="done")

    @contextmanager
    def counting(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show a bar on a terminal; yield what takes (what is counted, done, total)."""
        with self._bar() as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(
                task, completed=done, total=total, description=what
            )

    def _bar(self, *columns: Any) -> Progress:
        hidden = not self._console.is_terminal
        return Progress(*columns, console=self._console, transient=True, disable=hidden)


@contextmanager
def reporting(name: str) -> Iterator[Report]:
    """Yield a `Report`; an expected error becomes a line and ends the process with its code."""
    report = Report(name)
    try:
        with ending_on_lost_pages(report.lost):
            yield report
    except (ClocherError, MemoryError, OSError) as raised:
        error = told(raised)
        report.done(f"error: {error or type(error).__name__}")
        sys.exit(ExitCode.DEVICE if isinstance(error, OSError) else exit_code(error))
    except KeyboardInterrupt:
        report.done("interrupted; run it again to go on")
        sys.exit(ExitCode.INTERRUPTED)


def converter(
    name: str,
    about: str,
    *options: Wrap,
    examples: str = "",
    weights: str = "safetensors weights (or with them in hf/ or hf/original/), or a GGUF file",
    opener: Callable[[Path], Checkpoint] = open_source,
) -> click.Command:
    """Return a script that converts a checkpoint to IEBIN.

    Args:
        name: of the script, for messages.
        about: what its help says.
        options: what it takes besides --hf-dir, --out-dir and --verify.
        examples: in place of the plain one.
        weights: what --hf-dir holds, as its help says it.
        opener: opens --hf-dir.
    """
    example = f"""\b
Example:
  python scripts/{name}.py --hf-dir models/llama/hf --out-dir models/llama
"""

    @script(
        name,
        f"{examples or example}\n{EXIT_CODES}\n{RESUMES}",
        needed("--hf-dir", f"Directory with config.json and {weights}. It is only read."),
        needed(
            "--out-dir",
            "Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
        ),
        switch("--verify", "Read the result back and check every hash."),
        *options,
        help=about,
    )
    def main(
        report: Report, hf_dir: Path, out_dir: Path, verify: bool, q4_map: Path | None = None
    ) -> None:
        conversion = plan_conversion(hf_dir, out_dir, q4_map, opener)
        for note in conversion.notes:
            report.note(f"note: {note}")
        report.disk(conversion.source.path, out_dir, conversion.nbytes, conversion.free_bytes)
        with report.progress(conversion.nbytes) as progress:
            resumed = conversion.run(progress)
        if verify:
            open_iebin(out_dir / JSON_NAME, verify=True)
        counts = [f"{len(conversion.quantised)} quantised"]
        if resumed:
            counts.append(f"{resumed} taken over from a killed run")
        verified = ", verified" if verify else ""
        report.done(
            f"wrote {len(conversion.formats)} tensors ({', '.join(counts)}) to {out_dir}{verified}"
        )

    return main
