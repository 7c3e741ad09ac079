"""Make a model of a published shape with random weights."""

from clocher_runtime.command import start

start(__file__)
