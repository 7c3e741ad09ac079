"""Quantise arrays that a Python function gives: write a q4 manifest."""

from clocher_runtime.command import start

start(__file__)
