"""Run a module of this repository instead of the script that was called by another name."""

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]


def run(module: str, *words: str, rest: list[str] | None = None) -> NoReturn:
    """Replace this process by `python -m MODULE`, from wherever it was called.

    Args:
        module: its name.
        *words: arguments that come first.
        rest: the others; None: those of this process.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", module, *words, *(sys.argv[1:] if rest is None else rest)]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
