"""Show where the time of a step goes."""

from clocher_runtime.command.scripts import start

start(__file__)
