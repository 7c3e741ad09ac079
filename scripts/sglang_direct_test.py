"""Compare generated ids with Hugging Face transformers."""

from clocher_runtime.command import start

start(__file__)
