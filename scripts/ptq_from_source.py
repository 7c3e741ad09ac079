"""Quantise arrays that a Python function gives, or those of an .npz file: write a q4 manifest."""

from clocher_runtime.command.scripts import start

start(__file__)
