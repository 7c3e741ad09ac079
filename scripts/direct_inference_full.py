"""Generate text in one process, without a server: `clocher run`.

The work, and --help, are those of `python -m clocher_runtime run`.
"""

from as_module import run

if __name__ == "__main__":
    run("clocher_runtime", "run")
