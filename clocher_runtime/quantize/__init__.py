"""Quantisation: from a float checkpoint to low-bit tensors, with measured error."""
