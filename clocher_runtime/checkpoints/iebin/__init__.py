"""IEBIN: the container that Clocher writes and maps into memory. docs/iebin-v1.md specifies it."""
