"""Write a result file as Markdown tables: a baseline to keep, or to paste."""

from clocher_runtime.command import start

start(__file__)
