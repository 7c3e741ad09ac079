"""The CUDA back end: Triton and CuPy kernels, one CUDA graph per step.

The package imports without GPU, torch or Triton; its modules need both libraries but no GPU.
"""
