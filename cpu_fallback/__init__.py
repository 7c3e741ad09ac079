"""The CPU back end: Numba kernels on a persistent thread team, one compiled call per step.

isa       the instruction set of this process
simd      vector types and operations for Numba;  memory  loads and stores;  sync  atomics, barrier
narrow    fp16, bf16, fp8 lanes <-> fp32
jit       @device, @kernel, compiling;  objects  the cache of machine code
tape      launches, the compiled interpreter;  team  threads
bind      from an op call to launches;  executor  from a Plan to a running team
lowering  op name -> lowering function
linear, moe, ...   kernels and how their ops are lowered to them
"""
