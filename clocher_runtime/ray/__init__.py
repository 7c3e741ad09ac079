"""Clocher over many machines with Ray: rows of a file, or a server of many replicas.

What an actor does is in `actors`, which CPUs are its own in `cpus`, a job that resumes in `job` and
`record`. See docs/ray.md. Nothing here imports Ray before it is needed: it takes a second.
"""
