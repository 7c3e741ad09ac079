"""Quantisation manifests, and the int4 files that are made by them."""
