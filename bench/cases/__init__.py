"""The cases of the bench: each yields rows of what it timed."""
