"""Run a program that a model wrote: another process, with limits, and no network where possible.

It may still read what the user may read. It starts in an empty directory with no variables, in a
namespace without a network where the system allows that; its seconds of CPU, memory and files are
limited, and unless the user is root it cannot start processes.
"""

import ctypes
import os
import resource
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
_ENDED = 42
_LAST = f"\nimport os\nos._exit({_ENDED})\n"


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Return whether a program comes to its end in time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "program.py"
        path.write_bytes((program + _LAST).encode(errors="replace"))
        with suppress(subprocess.TimeoutExpired):
            run = subprocess.run(
                [sys.executable, "-I", __file__, str(path), str(seconds)],
                cwd=folder,
                env={"HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2 * seconds,
                start_new_session=True,
            )
            return run.returncode == _ENDED
    return False


def confine(seconds: int) -> None:
    """Take from this process what a program does not need."""
    with suppress(OSError, AttributeError):  # no Linux; its refusal of namespaces is no error
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
    os.execv(sys.executable, [sys.executable, "-I", sys.argv[1]])
