"""Measure what a decode step costs besides its compiled call.

The work, and --help, are those of bench.step_overhead.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "bench.step_overhead", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
