"""Shared by the benches: the skeleton of a case, matmuls and ops."""
