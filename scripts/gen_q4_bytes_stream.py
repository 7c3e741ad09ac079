"""Write Q4_0 matrices to files of their own."""

from clocher_runtime.command import start

start(__file__)
