"""The CPU back end: Numba kernels on a persistent thread team, one compiled call per step.

lanes      the language of kernels: isa, vector, simd, memory, narrow and widen, record, jit, caches
team       the threads: sync, tape, team, pace, placement, large_pages, hints, stamps, bandwidth
tiles      integer weights in tiles of 16 rows: layout, packing, products, prepack
ops        the kernels, op by op; bind  from a call to launches;  lowering  the table of ops
executor   the whole
"""
