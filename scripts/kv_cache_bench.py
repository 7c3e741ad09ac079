"""Measure attention over long contexts, for each dtype of the KV cache.

The work, and --help, are those of `python -m bench attention`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench", "attention")
