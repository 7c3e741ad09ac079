"""Show where the time of a step goes."""

from clocher_runtime.command import start

start(__file__)
