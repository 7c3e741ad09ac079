"""Convert a checkpoint to IEBIN in small pieces."""

from clocher_runtime.command import start

start(__file__)
