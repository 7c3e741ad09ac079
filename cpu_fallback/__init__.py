"""The CPU back end: Numba kernels on a persistent thread team, one compiled call per step.

isa        the instruction set of this process
vector     vector types for Numba, and what makes an intrinsic
simd       operations on 16 lanes;  memory  loads and stores;  narrow  bf16, fp16, fp8, fp4
widen      loads of narrow numbers, for intrinsics that emit whole loops
sync       atomics, bounded waiting, the barrier, the control block
jit        @device, @kernel, compiling;  objects  the cache of machine code
private_files   what caches may trust
tape       launches, the compiled interpreter;  team  its threads;  pace  how many take part
hints      what a run may ask of memory access;  placement  CPUs of threads, copies near them
bind       from an op call to launches;  lowering  the table of ops;  executor  the whole
decode     stored weights to fp32;  product  rows times tokens, the one fp32 dot product
linear, integer, bsr, moe, attention, kv, elementwise, sampling   kernels by op
"""
