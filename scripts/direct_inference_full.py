"""Generate text in one process, without a server: `clocher run`."""

from clocher_runtime.command import start

start(__file__)
