"""Lossless deduplication of IEBIN weights: codec, index, reader and writer."""
