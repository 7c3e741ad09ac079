"""Serve a model at port 30000: `clocher serve`, one token after the other."""

from clocher_runtime.command import start

start(__file__)
