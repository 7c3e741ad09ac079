"""Measure decode steps with small activations dropped, beside dense ones."""

from clocher_runtime.command import start

start(__file__)
