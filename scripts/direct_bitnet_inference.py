"""Measure the matmuls of BitNet's weights, without a server.

The work, and --help, are those of `python -m bench linear --formats ternary`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench", "linear", "--formats", "ternary")
