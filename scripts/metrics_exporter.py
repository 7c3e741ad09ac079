"""Serve what runs measured to Prometheus."""

from clocher_runtime.command import start

start(__file__)
