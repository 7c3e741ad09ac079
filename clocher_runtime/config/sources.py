"""From flags, variables and a file to a configuration: flag, variable, file, default."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import Given, Setting, declared

MAX_BYTES = 1 << 20

# Matmuls accumulate in fp32 in any case, so a setting that asks for it is not ignored.
_HOST_MATH = "fp32"
_FILE = declared(EngineConfig)["config"]
Config = TypeVar("Config", bound=EngineConfig)


def settle(
    kind: type[Config],
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    in_file: Mapping[str, Given] | None = None,
    hints: Mapping[str, Setting] = MappingProxyType({}),
) -> Config:
    """Return a configuration: flag, variable, file, default. Raises UsageError.

    `in_file` None reads the file of `--config`. An overridden value is not checked.
    """
    table = {**declared(kind), **hints}
    in_file = _of_file(flags, environ, table) if in_file is None else in_file
    values: dict[str, Any] = {}
    given: dict[str, Given] = {}
    ignored: list[Given] = []
    for name, setting in table.items():
        found = sources_of(name, setting, flags, environ, in_file)
        if not found:
            continue
        first, *others = found
        value = setting.takes.read(first.source, first.raw)
        if name in hints:
            if first.raw in setting.idle:
                given[name] = first
            else:
                ignored.append(first)
            continue
        given[name], values[name] = first, value
        if name not in flags:
            beaten = [other for other in others if other.is_variable]
            ignored += [other for other in beaten if other.raw not in (first.raw, _HOST_MATH)]
    for names in kind.exclusive:
        _keep_one(names, values, given)
    return kind(**values, given=given, hints_ignored=tuple(map(str, ignored)))


def _of_file(
    flags: Mapping[str, str], environ: Mapping[str, str], known: Collection[str]
) -> dict[str, Given]:
    """Return what the file of `--config` gives. Raises UsageError."""
    named = sources_of("config", _FILE, flags, environ, {})
    if not named or not named[0].raw:
        return {}
    path = Path(named[0].raw)
    texts = setting_texts(read_toml(path), set(known) - {"config"}, str(path))
    return {name: Given(f"{path}: {name}", raw) for name, raw in texts.items()}


def sources_of(
    name: str,
    setting: Setting,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    in_file: Mapping[str, Given],
) -> list[Given]:
    """Return the flag, variables and file key that are set, the strongest first."""
    found = [Given(setting.flag, flags[name])] if name in flags else []
    found += [Given(var, environ[var]) for var in setting.env if environ.get(var)]
    return found + ([in_file[name]] if name in in_file else [])


def _keep_one(names: Sequence[str], values: dict[str, Any], given: dict[str, Given]) -> None:
    """Settle exclusive settings: the stronger source wins, a tie is an error."""
    present = sorted((name for name in names if name in given), key=lambda n: _rank(given[n]))
    if len(present) < 2:
        return
    first, second = (given[name] for name in present[:2])
    if _rank(first) == _rank(second):
        raise UsageError(f"{first.source} and {second.source} exclude each other; give one")
    for name in present[1:]:
        del values[name], given[name]


def _rank(given: Given) -> int:
    return int(given.is_variable) if given.is_variable or given.source[0] == "-" else 2


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file of at most 1 MiB. Raises UsageError."""
    import tomllib  # late: few runs have a file

    try:
        if not path.is_file() and path.exists():
            raise UsageError(f"{path}: not a regular file; give a TOML file with settings")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES} bytes; is it a settings file?")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a TOML file with settings") from None
    except (ValueError, RecursionError) as error:  # invalid TOML and invalid UTF-8
        raise UsageError(f"{path}: not TOML: {error}") from None


def setting_texts(table: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, str]:
    """Return name -> the text its flag would get (lists joined by commas). Raises UsageError."""
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise UsageError(
            f"{where}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    return {name: _text(value, f"{where}: {name}") for name, value in table.items()}


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list):
        return ",".join(_text(item, where) for item in value)
    raise UsageError(f"{where}: got a {type(value).__name__}, expected text, a number or a list")
