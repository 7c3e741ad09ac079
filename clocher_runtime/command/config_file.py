"""Settings from a TOML file: the source that is weaker than a variable, stronger than a default."""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from clocher_kernels.errors import UsageError

MAX_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        UsageError: it cannot be read, is larger than 1 MiB, or is not TOML.
    """
    try:
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
    """Return name -> the text that a flag would have been given.

    True and false become 1 and 0, a list its elements with commas between them.

    Args:
        table: what `read_toml` returned, or a table of it.
        known: names that may be in it.
        where: the file, for messages.

    Raises:
        UsageError: a name is not known, or a value is a table, a date or a time.
    """
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
