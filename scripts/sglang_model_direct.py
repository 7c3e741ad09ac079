"""Time the kernels of a forward pass one by one; there is no SGLang in it."""

from clocher_runtime.command import start

start(__file__)
