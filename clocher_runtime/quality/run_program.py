"""Run a program that a model wrote: another process, with limits, and no network where possible.

What it may still do: read what the user may read. Seconds of CPU, memory and the size of files are
limited; it starts in an empty directory, with no variables, and cannot start processes of its own
unless the user is root.
"""

import ctypes
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SECONDS = 10
_MEMORY = 2 << 30
_FILES = 1 << 20
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
"""Flags of unshare(2): namespaces of users and of networks."""


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Return whether a program ends by itself, in time, with code 0."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8")
        command = [sys.executable, "-I", __file__, str(path), str(seconds)]
        with suppress(subprocess.TimeoutExpired):
            run = subprocess.run(
                command,
                cwd=folder,
                env={"HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2 * seconds,
                start_new_session=True,
            )
            return run.returncode == 0
    return False


def confine(seconds: int) -> None:
    """Take from this process what a program does not need."""
    with suppress(OSError, AttributeError):  # no Linux, or namespaces are not allowed
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: _MEMORY,
        resource.RLIMIT_FSIZE: _FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, most in limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    confine(int(sys.argv[2]))
    os.chdir(Path(sys.argv[1]).parent)
    code = 1
    try:
        runpy.run_path(sys.argv[1], run_name="__main__")
        code = 0
    finally:  # a program that calls exit() has not come to its end
        os._exit(code)
