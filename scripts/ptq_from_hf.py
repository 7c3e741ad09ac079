"""Quantise a Hugging Face checkpoint (safetensors) after training: write a q4 manifest."""

from clocher_runtime.command import start

start(__file__)
