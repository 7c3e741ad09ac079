"""Quantise pickled weights of a Hugging Face checkpoint: write a q4 manifest."""

from clocher_runtime.command import start

start(__file__)
