"""Results of long work, kept line by line so that an interrupted run goes on."""

import json
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_lines

_MOST_BYTES = 1 << 30
_BEGIN = b'{"item": "'
"""How a line begins."""


class Kept:
    """Results of items in a file, by what was asked and under which settings."""

    def __init__(self, path: Path | None, settings: Any) -> None:
        """Read the file; a line that was not finished is cut off. Raises FormatError."""
        self._path, self._settings = path, json.dumps(settings, sort_keys=True)
        self._found: dict[str, Any] = {}
        if path is not None:
            path.touch()  # so that a file that cannot be written fails before the work
            *lines, tail = read_bytes(path, _MOST_BYTES).split(b"\n")
            if not _BEGIN.startswith(tail[: len(_BEGIN)]):
                lines.append(tail)
            for line, where in parse_lines(b"\n".join(lines), path):
                check = line.pop("check", None)  # None: an older version wrote it
                if line.keys() != {"item", "found"} or check not in (None, _check(line)):
                    raise FormatError(f"{where}: no kept result, or edited; give another file")
                self._found[str(line["item"])] = line["found"]
            # Not before every line is known to be one of these: it may be a file of the user's.
            if tail:
                os.truncate(path, path.stat().st_size - len(tail))

    def add(self, item: Any, found: Any) -> None:
        """Keep the result of an item."""
        key = self._key(item)
        self._found[key] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                line = {"item": key, "found": found}
                file.write(json.dumps({**line, "check": _check(line)}) + "\n")

    def get(self, item: Any, kind: Any = Any) -> Any:
        """Return the result of an item; None if it is not there, or was edited to another kind."""
        with suppress(msgspec.ValidationError):
            return msgspec.convert(self._found.get(self._key(item)), kind)

    def _key(self, item: Any) -> str:
        return sha256(f"{self._settings} {item!r}".encode()).hexdigest()[:32]


def _check(line: Any) -> str:
    return sha256(json.dumps(line).encode()).hexdigest()[:8]
