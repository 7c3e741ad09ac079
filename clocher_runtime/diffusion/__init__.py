"""Block diffusion: which masked tokens of a block a pass commits."""
