"""Commands in processes of their own, as a user starts them."""

import json
import os
import subprocess
import sys
from typing import Any

from weight_files import ROOT

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


def run_subcommand(name: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `clocher NAME`."""
    return python("-m", "clocher_runtime", name, *args, **options)


def run_script(name: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of scripts/."""
    return python(SCRIPTS / f"{name}.py", *args, **options)


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
