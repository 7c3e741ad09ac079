"""Variables without a prefix that make's targets take, by the names that the program knows them by.

A name such as BATCH may stand in an environment for anything. So the program reads CLOCHER_BATCH,
and whoever calls make, or a program of this folder, gives it BATCH.
"""

from collections.abc import Mapping

from clocher_runtime.command.settings import SETTINGS

OF_MAKE: Mapping[str, str] = {
    "MODEL_DIR": "model_dir",
    "PROMPTS": "prompts_file",
    "ROUNDS": "rounds",
    "THREADS": "threads",
    "BATCH": "batch",
    "PREFETCH": "prefetch",
    "PRETRANSPOSE": "pretranspose",
    "MAX_NEW": "max_new",
    "WARMUP_TOKENS": "warmup",
}
"""Variable -> setting."""


def of_program(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the program finds what make's variables say.

    A variable of the program's own is stronger. One that is set to nothing counts as not set.

    Raises:
        UsageError: a value is not what its setting takes.
    """
    found = dict(environ)
    for variable, name in OF_MAKE.items():
        raw = found.pop(variable, "")
        if raw and not found.get(own := SETTINGS[name].env[0]):
            SETTINGS[name].takes.read(variable, raw)
            found[own] = raw
    return found
