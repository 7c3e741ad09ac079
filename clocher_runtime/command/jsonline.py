"""The JSON lines of `clocher run`; docs/json-line.md describes their keys."""

import json
from collections.abc import Mapping
from typing import Any

import clocher_kernels
from clocher_runtime.exit_codes import exit_code

SCHEMA = "clocher.run/1"
Line = Mapping[str, Any]
"""Keys in order; non-finite numbers become null."""


def head(status: str) -> dict[str, Any]:
    """Return the first keys of every line."""
    return {"schema": SCHEMA, "status": status, "version": clocher_version()}


def error_line(error: BaseException) -> dict[str, Any]:
    """Return the line of an error."""
    kind = type(error).__name__
    return {
        **head("error"),
        "code": int(exit_code(error)),
        "type": kind,
        "message": str(error) or kind,
    }


def to_json(line: Line) -> str:
    """Return a line as ASCII JSON on one line, NaN and infinities as null."""
    from clocher_runtime.disk.strict_json import finite

    return json.dumps(finite(line), allow_nan=False)


def clocher_version() -> str:
    """Return the installed version."""
    return clocher_kernels.__version__
