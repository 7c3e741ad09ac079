"""Write a report that a person can open, of result files."""

from clocher_runtime.command import start

start(__file__)
