"""Serve a block-diffusion model at port 30000: `clocher serve`."""

from clocher_runtime.command.scripts import start

start(__file__)
