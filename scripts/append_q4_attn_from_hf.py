"""Append attention matrices in Q4_0."""

from clocher_runtime.command import start

start(__file__)
