"""Measure the matmuls of BitNet's ternary weights one by one, beside the read bandwidth."""

from clocher_runtime.command import start

start(__file__)
