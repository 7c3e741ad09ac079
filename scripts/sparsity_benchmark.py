"""Measure block-sparse weights against dense ones, and find the break-even density.

The work, and --help, are those of bench.block_sparse.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "bench.block_sparse", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
