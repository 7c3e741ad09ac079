"""Measure steps with the KV cache in each of its dtypes; --prompts names a long text."""

from clocher_runtime.command import start

start(__file__)
