"""What a newcomer sees first is true: the README, the picture of a terminal, the commands."""

import re
import shlex
from xml.etree import ElementTree

from weight_files import ROOT

from clocher_runtime.command.flags import Command
from clocher_runtime.subcommands.table import SUBCOMMANDS, command_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
SVG = "{http://www.w3.org/2000/svg}"


def shown_lines() -> list[str]:
    """Return the lines of text of the picture."""
    root = ElementTree.parse(PICTURE).getroot()
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


# The README


def test_the_first_screen_is_one_command_that_does_the_main_job() -> None:
    first = re.search(r"^```bash\n(.*?)^```$", README, re.M | re.S)
    assert first is not None
    assert first[1].splitlines() == ["make run"]
    assert "```bash\nmake test\n```" in README
    assert README.count("\n", 0, first.end()) < 15
    assert "docs/pictures/terminal.svg" in README[first.end() : first.end() + 600]


def test_every_command_of_the_readme_exists() -> None:
    named = re.findall(r"^(?:\.venv/bin/)?clocher (\w+)|`clocher (\w+)", README, re.M)
    words = {one or other for one, other in named}
    assert words <= set(SUBCOMMANDS)
    assert {"chat", "run", "serve", "models", "pull", "quantize", "bench"} <= words


# docs/cli.md


def test_the_table_of_commands_is_that_of_the_help() -> None:
    rows = re.findall(r"^\| `clocher (\w+)` \| (.*?) \|", CLI, re.M)
    assert rows == [*SUBCOMMANDS.items()]


# The picture of a terminal


def test_the_picture_shows_commands_that_there_are() -> None:
    typed = [line.removeprefix("$ ") for line in shown_lines() if line.startswith("$ ")]
    assert typed
    for line in typed:
        program, name, *flags = shlex.split(line)
        command = command_of(name)
        assert program == "clocher"
        assert isinstance(command, Command)
        command.texts(flags)  # raises where a flag is unknown


def test_the_picture_is_small_and_asks_nobody_for_anything() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert re.findall(r"\w+://[^\"'<\s]*", text) == ["http://www.w3.org/2000/svg"]
    assert re.search(r"@import|@font-face|url\(|href|<script|<image", text) is None
    assert "prefers-color-scheme: dark" in text
