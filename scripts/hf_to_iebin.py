"""Convert a checkpoint to IEBIN."""

from clocher_runtime.command import start

start(__file__)
