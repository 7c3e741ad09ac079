"""Check a trace of clocher-run against Hugging Face transformers, step by step."""

from clocher_runtime.command import start

start(__file__)
