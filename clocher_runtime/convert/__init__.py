"""A checkpoint in, a file out."""
