"""Write docs/PERFORMANCE.md and docs/plots from the result files in bench/results."""

from clocher_runtime.command import start

start(__file__)
