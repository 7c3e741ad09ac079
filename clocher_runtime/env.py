"""From flags and environment variables to a RunConfig: flag, then variable, then default."""

from collections.abc import Mapping, Sequence
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.config import Given, RunConfig
from clocher_runtime.settings import ALL, HINTS, Setting

# Products are accumulated in fp32 whatever the weights are, so asking for it is no ignored hint.
_HOST_MATH = "fp32"


def resolve(flags: Mapping[str, str], environ: Mapping[str, str]) -> RunConfig:
    """Return the configuration of a run.

    A variable that is set to nothing counts as not set. A value that a stronger source overrides
    is not looked at.

    Args:
        flags: name of a setting -> what its flag was given; flags that were not given are absent.
        environ: environment variables.

    Raises:
        UsageError: a value is not what its flag or variable takes, or two flags exclude each other.
    """
    values: dict[str, Any] = {}
    given: dict[str, Given] = {}
    ignored: list[Given] = []
    for name, setting in ALL.items():
        sources = _sources(name, setting, flags, environ)
        if not sources:
            continue
        first, *others = sources
        value = setting.takes.read(*first)
        if name in HINTS:
            ignored += [first] if first.raw not in setting.idle else []
            continue
        values[name], given[name] = value, first
        if name not in flags:
            ignored += [other for other in others if other.raw not in (first.raw, _HOST_MATH)]
    _exclude(values, given)
    return RunConfig(**values, given=given, hints_ignored=tuple(map(str, ignored)))


def _sources(
    name: str, setting: Setting, flags: Mapping[str, str], environ: Mapping[str, str]
) -> list[Given]:
    """Return the flag and the variables that are set, the strongest first."""
    found = [Given(setting.flag, flags[name])] if name in flags else []
    return found + [Given(var, environ[var]) for var in setting.env if environ.get(var)]


def _exclude(values: dict[str, Any], given: dict[str, Given]) -> None:
    """Settle settings that exclude each other: two flags are an error, a flag beats a variable."""
    _keep_one(("prompt", "prompt_ids", "prompts_file"), values, given)
    _keep_one(("stub", "tune"), values, given)
    if "stub" in given:
        if values.get("require_model"):
            raise UsageError("--stub runs without a model, but IE_REQUIRE_MODEL=1; drop one")
        for name in ("model_dir", "model_json", "model_bin"):
            _keep_one(("stub", name), values, given)


def _keep_one(names: Sequence[str], values: dict[str, Any], given: dict[str, Given]) -> None:
    present = [name for name in names if name in given]
    by_flag = [name for name in present if given[name].source.startswith("--")]
    if len(by_flag) > 1:
        first, second, *_ = (given[name].source for name in by_flag)
        raise UsageError(f"{first} and {second} exclude each other; give one")
    for name in present:
        if by_flag and name != by_flag[0]:
            del values[name], given[name]
