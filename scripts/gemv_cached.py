"""Measure matmuls with quantised weights: fused, and with weights decoded ahead.

The work, and --help, are those of `python -m bench.fused`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench.fused")
