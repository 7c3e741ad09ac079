"""Write model.ie.compat.json."""

from clocher_runtime.command import start

start(__file__)
