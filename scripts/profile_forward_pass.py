"""Show where the time of a step goes.

The work, and --help, are those of `python -m bench profile`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench", "profile")
