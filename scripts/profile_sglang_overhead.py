"""Measure what Python costs of a decode step; there is no SGLang in it.

The work, and --help, are those of `python -m bench profile`: the row "outside".
"""

from as_module import run

if __name__ == "__main__":
    run("bench", "profile")
