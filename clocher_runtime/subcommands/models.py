"""`clocher models`: local models, their size, and whether they fit and run."""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import click

from clocher_kernels.errors import ModelNotFound
from clocher_runtime.command.console import Console, columns, size
from clocher_runtime.command.flags import script, switch
from clocher_runtime.exit_codes import ExitCode

ENVIRONMENT = """\b
Environment:
  HF_HUB_CACHE  the Hub's cache; HF_HOME: where it is by default
  LLAMA_CACHE   llama.cpp's; ~/.cache/llama.cpp by default

No weights are read. Memory is what a run on the CPU takes with the default context: weights, KV
cache, buffers and the program; it fits if the machine, and the limits of its control groups, have
so much left."""
_COLUMNS = ("name", "family", "parameters", "format", "disk", "memory", "fits", "chat", "runs")
_HEADS = ("MODEL", *map(str.upper, _COLUMNS[1:]))
_RIGHT = [_COLUMNS.index(name) for name in ("parameters", "disk", "memory")]


@script(
    "clocher models",
    click.Argument(["where"], metavar="[MODEL|DIR...]", nargs=-1),
    switch("--json", "A line of JSON, in place of a table.", "as_json"),
    examples=(
        ("What is on this machine", "clocher models"),
        ("The same, for a program", "clocher models --json"),
        ("What is below a directory", "clocher models /srv/models"),
        ("All about one", "clocher models Qwen/Qwen3-0.6B"),
    ),
    epilog=ENVIRONMENT,
    exit_codes={ExitCode.OK: "done; a model that does not fit is no error"},
)
def models(console: Console, where: tuple[str, ...], as_json: bool) -> None:
    """List the models on this machine, and whether each fits in memory and runs.

    Looked into: the embedded model, the caches of the Hub and of llama.cpp, ./models, and the
    directories that are given, three levels deep.
    """
    from clocher_runtime.checkpoints.locate import listed, locate
    from clocher_runtime.subcommands.models_found import details, find, look

    paths = [locate(name) for name in where]
    found = find(paths, not where)
    if len(paths) == 1 and (not paths[0].is_dir() or [each.path for each in found] == paths):
        _tell(details(where[0], paths[0]), as_json)
        return
    for name, path in zip(where, paths, strict=True):
        if not path.is_dir():
            raise ModelNotFound(f"{name}: expected a directory to look into, or one model alone")
        listed(path)  # raises if it cannot be read
    rows = [look(each) for each in found]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        click.echo(columns([_HEADS, *map(_cells, rows)], right=_RIGHT))
    if not rows:
        console.note("no models; get one: clocher pull OWNER/NAME")


def _tell(found: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    left = found["available"]
    lines = [(key, found[key]) for key in ("name", "path", "family", "format", "layers")]
    lines += [
        ("parameters", _count(found["parameters"])),
        ("longest context", f"{found['longest_context']} tokens"),
        ("chat", "by its template" if found["chat"] else "no: clocher chat continues text"),
    ]
    for name, row in sorted(found["stored"].items(), key=lambda item: -item[1]["bytes"]):
        lines.append((f"stored {name}", f"{size(row['bytes'])}, tensors: {row['tensors']}"))
    lines += [
        ("weights read", f"{size(found['bytes_per_token'])} for a token"),
        ("KV cache", f"{size(found['kv_bytes_per_token'])} for a token"),
    ]
    for context, nbytes in found["memory"].items():
        fits = "" if left is None else ", fits" if nbytes <= left else ", does not fit"
        lines.append(("memory", f"{size(nbytes)} with a context of {context}{fits}"))
    if left is not None:
        lines.append(("available", size(left)))
    click.echo(columns([(name, str(value)) for name, value in lines]))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    spell: dict[str, Callable[[Any], str]] = {
        "name": shlex.quote,
        "parameters": _count,
        **dict.fromkeys(("disk", "memory"), size),
        **dict.fromkeys(("fits", "chat"), lambda value: "yes" if value else "no"),
    }
    return tuple("-" if row[key] is None else spell.get(key, str)(row[key]) for key in _COLUMNS)


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
