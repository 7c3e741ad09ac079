"""Unprefixed variables of make's targets, and their CLOCHER_ names in the program."""

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


def of_program(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with make's variables under the program's names, which win."""
    found = dict(environ)
    for variable, name in OF_MAKE.items():
        raw = found.pop(variable, "")
        if raw and not found.get(own := SETTINGS[name].env[0]):
            SETTINGS[name].takes.read(variable, raw)
            found[own] = raw
    return found
