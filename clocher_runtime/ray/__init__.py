"""Clocher over many machines with Ray: rows of a file, or a server of replicas (docs/ray.md)."""
