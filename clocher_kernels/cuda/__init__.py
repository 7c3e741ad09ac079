"""The CUDA back end: Triton and CuPy kernels, one CUDA graph per step; no GPU needed to import."""
