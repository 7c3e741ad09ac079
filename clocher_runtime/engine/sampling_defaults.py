"""A model's own sampling defaults, from a generation_config.json with `do_sample`.

Explicit settings override single fields; a temperature of 0 overrides all. As in vLLM, absent
fields have no hidden defaults.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from clocher_runtime.disk.strict_json import given, read_as

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.checkpoint import Checkpoint

FILE = "generation_config.json"
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_NOTHING: Mapping[str, float] = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


class _Sampling(Struct):
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] = 0
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


class _Settings(Struct):
    do_sample: bool = False


def sampling_defaults(checkpoint: "Checkpoint") -> dict[str, float]:
    """Return a model's sampling defaults by name; {} for greedy. Raises FormatError."""
    settings = given(checkpoint.generation_config)
    if not read_as(settings, _Settings, FILE).do_sample:
        return {}
    wanted = read_as(settings, _Sampling, FILE)
    if wanted.temperature == 0:
        return {}
    values: dict[str, float] = {name: getattr(wanted, name) for name in NAMES}
    values["top_k"] = max(wanted.top_k, 0)
    return {name: value for name, value in values.items() if value != _NOTHING.get(name)}


def taken(defaults: Mapping[str, float], said: Mapping[str, Any]) -> dict[str, float]:
    """Return the model's defaults that a caller does not override."""
    if said.get("temperature") == 0:
        return {}
    return {name: value for name, value in defaults.items() if said.get(name) is None}


def told(values: Mapping[str, float]) -> str:
    """Return the message about values taken from the file, "" for none."""
    if not values:
        return ""
    listed = ", ".join(f"{name} {value:g}" for name, value in values.items())
    return f"{FILE} of the model: {listed}; --generation-config none does without"
