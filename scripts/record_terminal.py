"""Record a session of `clocher` in a terminal, and draw what was seen as an SVG.

The session is real: each command runs in a terminal of its own, lines are typed when its prompt
is there, and what it wrote is drawn. The picture has no script, no outside font and no link; it
follows the light or dark scheme of whoever looks at it.
"""

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import click

OUT = Path(__file__).parents[1] / "docs" / "pictures" / "terminal.svg"
COLUMNS = 100
PROMPT = ">>> "
TIMEOUT_S = 300.0

SESSION: Sequence[tuple[str, Sequence[str]]] = (
    (
        "clocher chat --temperature 0 --max-new 36",
        ("def read_lines(path):", "class Queue:", "/exit"),
    ),
    ('clocher run --prompt "def __repr__(self):" --max-new 36', ()),
)
"""Each command, and the lines that are typed at its prompt."""

TITLE = "A terminal: clocher chat continues Python with the embedded model, then clocher run"
STYLE = """
  rect { fill: #fbfaf8; stroke: #d9d5cf }
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f;
         white-space: pre }
  .dim { fill: #6b7078 }
  .mark { fill: #8a4b08 }
  @media (prefers-color-scheme: dark) {
    rect { fill: #16181d; stroke: #33373e }
    text { fill: #e4e4e0 }
    .dim { fill: #9299a3 }
    .mark { fill: #e0a860 }
  }
"""
LINE_HEIGHT, ADVANCE, MARGIN = 19, 7.83, 18

# Colours and weight (SGR), other sequences, and what else a terminal would obey.
SGR = re.compile(r"\x1b\[([0-9;]*)m")
OTHER = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\x00-\x08\x0b-\x1a\x1c-\x1f]")
MARK = re.compile(r"^(\$ |>>> |\.\.\. )")


class Span(NamedTuple):
    """A piece of a line: its text, and "dim" or ""."""

    text: str
    style: str


@click.command(help=__doc__)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=OUT)
def main(out: Path) -> None:
    """Record the session and write the picture."""
    shown = ""
    for command, typed in SESSION:
        click.echo(f"$ {command}", err=True)
        shown += f"$ {command}\r\n{record(command, typed)}"
    out.write_text(draw(shown), encoding="utf-8")
    click.echo(f"{out}: {out.stat().st_size} bytes", err=True)


def record(command: str, typed: Sequence[str], columns: int = COLUMNS) -> str:
    """Return what a command writes to a terminal, what is typed echoed in it.

    Args:
        command: `clocher` and its arguments.
        typed: lines; each is typed once the prompt is there.
        columns: width of the terminal.

    Raises:
        RuntimeError: it failed, took too long, or asked for more lines than there are.
    """
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    words = [sys.executable, "-m", "clocher_runtime", *shlex.split(command)[1:]]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CLOCHER_", "IE_"))}
    environment |= {"TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        words, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    left = list(typed)
    try:
        seen = _converse(own, left)
    except RuntimeError as error:
        process.kill()
        raise RuntimeError(f"{command}: {error}") from None
    finally:
        os.close(own)
        code = process.wait()
    if code != 0 or left:
        raise RuntimeError(f"{command}: exit code {code}, not typed: {left}")
    return seen.decode()


def _converse(own: int, left: list[str]) -> bytes:
    """Return what comes until the other end is closed; take what is typed off the list."""
    seen, answered = b"", 0
    limit = time.monotonic() + TIMEOUT_S
    while True:
        if not select.select([own], [], [], max(limit - time.monotonic(), 0))[0]:
            raise RuntimeError(f"it did not end in {TIMEOUT_S:g} s")
        try:
            piece = os.read(own, 1 << 16)
        except OSError:  # EIO: the other end is closed
            return seen
        if not piece:
            return seen
        seen += piece
        if seen[answered:].endswith(PROMPT.encode()):
            if not left:
                raise RuntimeError("it asks for another line")
            answered = len(seen)
            os.write(own, f"{left.pop(0)}\n".encode())


def lines_of(shown: str, columns: int = COLUMNS) -> Iterator[list[Span]]:
    """Yield the lines of a terminal that got a text, cut where it would wrap them."""
    style, line, used = "", list[Span](), 0
    pieces = SGR.split(shown.replace("\r\n", "\n"))
    for text, codes in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        for part in re.split(r"(\n)", OTHER.sub("", text).expandtabs(8)):
            if part == "\n":
                yield line
                line, used = [], 0
                continue
            while part:
                taken, part = part[: columns - used], part[columns - used :]
                line.append(Span(taken, style))
                used += len(taken)
                if part:
                    yield line
                    line, used = [], 0
        for code in codes.split(";"):
            style = {"2": "dim", "22": "", "0": "", "": style}.get(code, style)
    if line:
        yield line


def draw(shown: str, columns: int = COLUMNS) -> str:
    """Return the SVG of a terminal that got a text."""
    rows = list(lines_of(shown, columns))
    width = round(2 * MARGIN + columns * ADVANCE)
    height = 2 * MARGIN + len(rows) * LINE_HEIGHT
    texts = [
        f'<text x="{MARGIN}" y="{MARGIN + 14 + number * LINE_HEIGHT}">{_row(row)}</text>'
        for number, row in enumerate(rows)
        if row
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(TITLE)}</title>",
            "<!-- Written by scripts/record_terminal.py from a real run. -->",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *texts,
            "</svg>\n",
        )
    )


def _row(row: list[Span]) -> str:
    """Return a line as the content of a text element."""
    first, *others = row
    found = MARK.match(first.text)
    begun = (
        [Span(found[0], "mark"), Span(first.text[found.end() :], first.style)] if found else row[:1]
    )
    return "".join(
        f'<tspan class="{span.style}">{_safe(span.text)}</tspan>'
        if span.style
        else _safe(span.text)
        for span in (*begun, *others)
        if span.text
    )


def _safe(text: str) -> str:
    """Return a text for XML, without characters that are not seen."""
    seen = ("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" else c for c in text)
    return escape("".join(seen), quote=False)


if __name__ == "__main__":
    main()
