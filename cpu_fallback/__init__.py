"""The CPU back end: Numba kernels on a persistent thread team, one compiled call per step.

lanes      the language of kernels: isa, simd, memory, language, record, jit, the cache of objects
team       the threads: tape, team, placement, large_pages, bandwidth, openmp
tiles      integer weights in tiles of 16 rows: layout, packing, products, neurons
ops        the kernels, op by op; bind  from a call to launches
executor   the whole, and the table of ops
"""
