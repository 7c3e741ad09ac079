"""Benchmarks. Nothing of the product imports this."""
