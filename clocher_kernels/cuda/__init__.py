"""The CUDA back end: Triton and CuPy kernels, and one CUDA graph per step.

Importing this package needs neither a GPU nor torch nor Triton; its modules need both libraries but
no GPU.
"""
