"""Write a report that a person can open, of result files or of a run of the harness."""

from clocher_runtime.command import start

start(__file__)
