"""docs/coming-from.md: every command of Clocher that it names does what it is named for."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import clean_environment, here, plain
from weight_files import LLAMA, ROOT

from clocher_runtime.config.commands import ServeConfig, settle
from clocher_runtime.serve.command import clocher_serve
from clocher_runtime.subcommands.table import COMMON

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
LINES = sorted(
    {
        line.replace("\\|", "|")
        for line in re.findall(r"`([^`\n]*)`", PAGE)
        if re.search(r"(^|[ |])clocher [a-z]", line)
    }
)

HELP_ONLY = {
    "clocher pull": "needs the network",
    "clocher bench": "test_bench_command runs it",
}
"""How lines begin whose help alone is asked for, which fails for a flag that is not there."""


def words_of(line: str) -> list[str]:
    """Return the words after `clocher` of a line, without what the shell does with them."""
    command = line[line.rindex("clocher ") :].split(" < ")[0]
    return shlex.split(command)[1:]


def test_the_page_has_every_common_command() -> None:
    assert {words_of(line)[0] for line in LINES} == set(COMMON)
    assert len(LINES) > 20


@pytest.mark.parametrize("line", [line for line in LINES if words_of(line)[0] == "serve"])
def test_every_way_to_serve_is_one(line: str) -> None:
    key = {"CLOCHER_API_KEY": "..."} if line.startswith("CLOCHER_API_KEY=... ") else {}
    flags = clocher_serve.texts(words_of(line)[1:])
    assert str(settle(ServeConfig, flags, key).model_dir) == "MODEL"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what the lines name."""
    (tmp_path / "MODEL").symlink_to(LLAMA)
    (tmp_path / "FILE").write_text("import os\nimport re\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "clocher"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clocher_runtime "$@"\n')
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("line", [line for line in LINES if words_of(line)[0] != "serve"])
@pytest.mark.one_in(2)
def test_every_command_of_the_page_runs(line: str, place: Path) -> None:
    if only_help := line.startswith(tuple(HELP_ONLY)):
        line += " --help"
    more = {"HF_HUB_CACHE": str(place / "hub"), "CLOCHER_MAX_NEW": "8"}
    if (words := plain(line)) is not None:
        code, out, err = here(*words, text="import os\n", cwd=place, env=more)
    else:
        environment = clean_environment(**more)
        environment["PATH"] = f"{place / 'bin'}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=place,
            env=environment,
            input="import os\n",
            capture_output=True,
            text=True,
            timeout=250,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, err
    name = words_of(line)[0]
    if only_help:
        assert out.startswith(f"Usage: clocher {name} ")
    elif name == "chat":
        assert out.strip()
    elif name == "run":
        assert '"status": "ok"' in out
    elif name == "models":
        assert ("MODEL" if "MODEL" in line else "clocher-tiny-gptoss") in out
    else:
        assert (place / "OUT_DIR" / "model.ie.bin").stat().st_size > 0
