"""Time the kernels of a forward pass one by one; there is no SGLang in it.

The work, and --help, are those of `python -m bench profile`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench", "profile")
