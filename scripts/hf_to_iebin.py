"""Convert a checkpoint to IEBIN."""

from clocher_runtime.command.scripts import start

start(__file__)
