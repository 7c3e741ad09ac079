"""Make a model's matrices block-sparse: `clocher sparsify` under its older name."""

from clocher_runtime.command import start

start(__file__)
