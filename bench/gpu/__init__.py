"""The parts of the GPU suite (`python -m bench.gpu_suite`)."""
