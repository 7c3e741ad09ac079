"""Convert a checkpoint to IEBIN in small pieces."""

from clocher_runtime.command.scripts import start

start(__file__)
