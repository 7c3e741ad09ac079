"""What the scripts that write files have in common: messages, a progress bar, exit codes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from clocher_kernels.errors import ClocherError
from clocher_runtime.checkpoints.iebin.checkpoint import JSON_NAME, open_iebin
from clocher_runtime.convert.to_iebin import Conversion
from clocher_runtime.disk.lost_pages import ending_on_lost_pages
from clocher_runtime.exit_codes import ExitCode, exit_code

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

_Command = Callable[..., None]


def conversion_options(weights: str) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command --hf-dir, --out-dir and --verify.

    Args:
        weights: what --hf-dir holds, as its help says it.
    """
    directory = click.Path(path_type=Path)
    options = (
        click.option(
            "--hf-dir",
            type=directory,
            required=True,
            help=f"Directory with config.json and {weights}. It is only read.",
        ),
        click.option(
            "--out-dir",
            type=directory,
            required=True,
            help="Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
        ),
        click.option("--verify", is_flag=True, help="Read the result back and check every hash."),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


SAFETENSORS = "safetensors weights (or with them in hf/ or hf/original/), or a GGUF file"
"""What --hf-dir holds where any checkpoint will do."""


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

    def disk(self, source: Path, target: Path, nbytes: int, free: int) -> None:
        """Say how much of the disk the work needs."""
        self.note(f"{source} -> {target}: needs {decimal(nbytes)} of disk, {decimal(free)} free")

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show a bar with the time left, on a terminal; yield what takes (bytes done, name)."""
        with Progress(
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as bar:
            task = bar.add_task("", total=total)
            yield lambda nbytes, name: bar.update(task, completed=nbytes, description=name)
            bar.update(task, completed=total, description="done")


@contextmanager
def reporting(name: str) -> Iterator[Report]:
    """Yield a `Report`; an expected error becomes a line and ends the process with its code."""
    report = Report(name)
    try:
        with ending_on_lost_pages(report.lost):
            yield report
    except (ClocherError, MemoryError, OSError) as error:
        report.done(f"error: {error or type(error).__name__}")
        sys.exit(ExitCode.DEVICE if isinstance(error, OSError) else exit_code(error))
    except KeyboardInterrupt:
        report.done("interrupted; run it again to go on")
        sys.exit(ExitCode.INTERRUPTED)


def write_model(report: Report, conversion: Conversion, verify: bool) -> None:
    """Run a conversion and say what came of it."""
    for note in conversion.notes:
        report.note(f"note: {note}")
    source, out_dir = conversion.source.path, conversion.out_dir
    report.disk(source, out_dir, conversion.nbytes, conversion.free_bytes)
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
