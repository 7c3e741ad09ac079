"""The kernels as torch ops: `torch.ops.clocher.*` for tensors of CPUs and GPUs, and `QuantLinear`.

Importing this package registers the ops. They have fake kernels, so `torch.compile(fullgraph=True)`
and CUDA graphs take them; they have no gradients.
"""

from clocher_kernels.torch.custom_ops import OPS
from clocher_kernels.torch.quant_linear import QuantLinear, quantize_linears
from clocher_kernels.torch.threads import awake

__all__ = ["OPS", "QuantLinear", "awake", "quantize_linears"]
