"""Measure decode steps with small activations dropped, beside dense ones.

The work, and --help, are those of `python -m bench.act_sparsity`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench.act_sparsity")
