"""Measure the products of BitNet's ternary weights one by one, beside the read bandwidth.

The work, and --help, are those of bench.roofline; --formats says otherwise.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "bench.roofline", "--formats", "ternary", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
