"""Quantise arrays that a Python function gives, or those of an .npz file: write a q4 manifest.

The function takes no arguments and returns a dict of float arrays, or (name, array) pairs. It is
your code and is run as such; an .npz file is only read, and pickled objects in it are refused.
"""

import os
import pkgutil
import sys
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints.arrays import open_arrays, open_npz
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.command.script_run import option
from clocher_runtime.subcommands.quantize import manifest_script

EXAMPLES = (
    (
        "An archive of arrays",
        "python scripts/ptq_from_source.py --source weights.npz --out quant/q4.json --bits 8",
    ),
    (
        "A function of yours",
        "python scripts/ptq_from_source.py --source my_weights:load --out quant/q4.json \\\n"
        "    --bits 4 --group 64 --symmetric --mse",
    ),
)


def _open(source: str) -> Checkpoint:
    if source.endswith(".npz"):
        return open_npz(Path(source))
    module, colon, function = source.partition(":")
    if not (module and colon and function):
        raise UsageError(f"--source {source}: expected FILE.npz or module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(source)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--source {source}: {error}") from None
    if not callable(found):
        raise UsageError(f"--source {source}: {type(found).__name__} is not a function")
    return open_arrays(found(), source)


main = manifest_script(
    "ptq_from_source",
    __doc__,
    EXAMPLES,
    option("--source", str, "FILE.npz, or module:function (from here).", required=True),
    _open,
)

if __name__ == "__main__":
    main()
