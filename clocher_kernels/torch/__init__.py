"""The kernels as torch ops, `torch.ops.clocher.*` on CPUs and GPUs, and `QuantLinear`.

Importing registers the ops, with fake kernels for `torch.compile(fullgraph=True)` and CUDA graphs;
they have no gradients.
"""

from clocher_kernels.torch.custom_ops import OPS
from clocher_kernels.torch.quant_linear import QuantLinear, quantize_linears
from clocher_kernels.torch.threads import awake

__all__ = ["OPS", "QuantLinear", "awake", "quantize_linears"]
