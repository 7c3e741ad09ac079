"""Serve what runs measured to Prometheus."""

from clocher_runtime.command.scripts import start

start(__file__)
