"""Quantise pickled weights of a Hugging Face checkpoint: write a q4 manifest."""

from clocher_runtime.command.scripts import start

start(__file__)
