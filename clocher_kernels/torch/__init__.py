"""Inference ops `torch.ops.clocher.*` on CPUs and GPUs, with fake kernels, and `QuantLinear`."""

from clocher_kernels.torch.custom_ops import OPS
from clocher_kernels.torch.quant_linear import QuantLinear, quantize_linears
from clocher_kernels.torch.threads import awake

__all__ = ["OPS", "QuantLinear", "awake", "quantize_linears"]
