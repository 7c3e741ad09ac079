"""What a newcomer sees first is true: the README, the picture of a terminal, the commands."""

import importlib.util
import re
import shlex
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest
from weight_files import ROOT

from clocher_runtime.command.flags import Command
from clocher_runtime.subcommands.table import SUBCOMMANDS

README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    path = ROOT / "scripts" / "record_terminal.py"
    spec = importlib.util.spec_from_file_location("record_terminal", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_terminal"] = module
    spec.loader.exec_module(module)
    return module


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
    assert rows == [(name, each.about) for name, each in SUBCOMMANDS.items()]


# The picture of a terminal


def test_the_picture_shows_commands_that_there_are(recorder: ModuleType) -> None:
    typed = [line.removeprefix("$ ") for line in shown_lines() if line.startswith("$ ")]
    assert typed == [command for command, _ in recorder.SESSION]
    for line in typed:
        program, name, *flags = shlex.split(line)
        command = SUBCOMMANDS[name].load().COMMAND
        assert program == "clocher"
        assert isinstance(command, Command)
        assert command.parse(flags) is not None
    said = [line.removeprefix(">>> ") for line in shown_lines() if line.startswith(">>> ")]
    assert said == [line for _, lines in recorder.SESSION for line in lines]


def test_the_picture_is_small_and_asks_nobody_for_anything() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert re.findall(r"\w+://[^\"'<\s]*", text) == ["http://www.w3.org/2000/svg"]
    assert re.search(r"@import|@font-face|url\(|href|<script|<image", text) is None
    assert "prefers-color-scheme: dark" in text


def test_a_session_is_recorded_as_a_person_would_see_it(recorder: ModuleType) -> None:
    shown = recorder.record("clocher chat --temperature 0 --max-new 2", ["import os", "/exit"])
    lines = ["".join(span.text for span in line) for line in recorder.lines_of(shown)]
    assert ">>> import os" in lines
    assert lines[lines.index(">>> import os") + 1].startswith("import os")
    assert lines[-1] == ">>> /exit"
    assert any(span.style == "dim" for line in recorder.lines_of(shown) for span in line)


def test_a_session_that_fails_is_no_picture(recorder: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        recorder.record("clocher run --max-new none", [])
    with pytest.raises(RuntimeError, match="asks for another line"):
        recorder.record("clocher chat --max-new 2", ["import os"])


def test_the_picture_obeys_nothing_and_wraps_as_a_terminal_does(recorder: ModuleType) -> None:
    text = "<b>&\x1b[?2004hone\x1b[2mdim\x1b[22m\x07\r\n" + 7 * "x" + "\r\n"
    lines = list(recorder.lines_of(text, columns=5))
    assert ["".join(span.text for span in line) for line in lines] == [
        "<b>&o",
        "nedim",
        "xxxxx",
        "xx",
    ]
    assert [span.style for span in lines[1]] == ["", "dim"]
    drawn = recorder.draw(text, columns=5)
    root = ElementTree.fromstring(drawn)
    assert ["".join(each.itertext()) for each in root.iter(f"{SVG}text")] == [
        "<b>&o",
        "nedim",
        "xxxxx",
        "xx",
    ]
