"""Commands in processes of their own, as a user starts them, or in this process."""

import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from weight_files import ROOT

from clocher_runtime.command import SCRIPTS as SCRIPT_TARGETS
from clocher_runtime.config.commands import ALL

SCRIPTS = ROOT / "scripts"
PYTHON_PATH = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

VARIABLES = {variable for setting in ALL.values() for variable in setting.env}
"""What a run reads of the environment."""


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of the tests without the settings of who runs them."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | PYTHON_PATH | more


def only_line(out: str) -> Any:
    """Return the document of the one line that a run writes."""
    assert out.endswith("\n") and out.count("\n") == 1
    return json.loads(out)


def python(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter, with this source and these tests to import.

    Args:
        args: a script or `-c` and a program, and what it gets.
        options: of `subprocess.run`; `env` adds to the environment.
    """
    env = os.environ | PYTHON_PATH | options.pop("env", {})
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env, **options)


def clocher(*words: str, **options: Any) -> tuple[int, str, str]:
    """Run `clocher` without a terminal: its exit code, standard output and standard error.

    Args:
        words: what stands after it.
        options: of `subprocess.run`; `env` adds to a clean environment.
    """
    env = clean_environment(**options.pop("env", {}))
    given = {"stdin": subprocess.DEVNULL, "timeout": 250} | options
    if "input" in given:
        del given["stdin"]
    command = [sys.executable, "-m", "clocher_runtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, **given)
    return done.returncode, done.stdout, done.stderr


def plain(line: str) -> list[str] | None:
    """Return the words behind `clocher` or `python` of a line that needs no shell, else None."""
    needs_shell = re.search(r"[|<>$;&*`\n]", line) or not re.match("(clocher|python) ", line)
    return None if needs_shell else shlex.split(line, comments=True)[1:]


def here(
    *words: object, text: str = "", cwd: Path = Path(), env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run `clocher` as `clocher` above does, but in this process, which is faster.

    Use the other where the process itself is tested. `text`: standard input.
    """
    from clocher_runtime.cli import clocher as program

    with patch.dict(os.environ, clean_environment(**(env or {})), clear=True):
        return _captured(partial(program, [str(word) for word in words]), text, cwd)


def run_subcommand(name: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `clocher NAME` in this process; `options` are of `here`."""
    return subprocess.CompletedProcess((name, *args), *here(name, *args, **options))


def run_script(
    name: str, *args: object, cwd: Path = Path(), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of scripts/, in this process unless it starts another one."""
    if SCRIPT_TARGETS.get(name, "-m ").startswith("-m "):
        return python(SCRIPTS / f"{name}.py", *args, cwd=cwd, env=dict(env or {}))
    where, *first = SCRIPT_TARGETS[name].split()
    words = [f"{name}.py", *first, *map(str, args)]
    with patch.dict(os.environ, env or {}), patch.object(sys, "argv", words):
        call = pkgutil.resolve_name(f"clocher_runtime.{where}")
        return subprocess.CompletedProcess(words, *_captured(call, "", cwd))


def _captured(call: Callable[[], int], text: str, cwd: Path) -> tuple[int, str, str]:
    streams = [io.TextIOWrapper(io.BytesIO(t), "utf-8") for t in (text.encode(), b"", b"")]
    with (
        chdir(cwd),
        patch.object(sys, "stdin", streams[0]),
        redirect_stdout(streams[1]),
        redirect_stderr(streams[2]),
    ):
        try:
            code = int(call() or 0)
        except SystemExit as end:
            code = int(end.code or 0)
    for stream in streams[1:]:
        stream.seek(0)
    return code, streams[1].read(), streams[2].read()
