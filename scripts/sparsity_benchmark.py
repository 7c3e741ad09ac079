"""Measure decode steps with small activations dropped, beside dense ones.

The work, and --help, are those of `python -m bench.harness --sweep act_sparsity=...`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench.harness", "--sweep", "act_sparsity=default,topk:0.6,adaptive")
