"""What `clocher NAME` does: one module for each NAME."""
