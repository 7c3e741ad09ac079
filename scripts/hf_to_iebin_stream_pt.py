"""Convert pytorch_model*.bin weights to IEBIN."""

from clocher_runtime.command import start

start(__file__)
