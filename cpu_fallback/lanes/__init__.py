"""The language of kernels: instruction sets, vectors, memory, records, compiling."""
