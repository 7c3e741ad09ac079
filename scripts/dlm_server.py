"""Serve a block-diffusion model at port 30000: `clocher serve`."""

from clocher_runtime.command import start

start(__file__)
