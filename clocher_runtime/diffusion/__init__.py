"""Block diffusion: which masked tokens of a block a forward commits."""
