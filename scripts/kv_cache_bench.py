"""Measure attention over long contexts, for each dtype of the KV cache."""

from clocher_runtime.command.scripts import start

start(__file__)
