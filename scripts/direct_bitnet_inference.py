"""Measure the matmuls of BitNet's weights, without a server."""

from clocher_runtime.command import start

start(__file__)
