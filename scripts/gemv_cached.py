"""Measure matmuls with quantised weights: fused, and with weights decoded ahead."""

from clocher_runtime.command.scripts import start

start(__file__)
