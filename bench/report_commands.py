"""The command behind a result file, put together from its rows, with DIR and PATH for places."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from bench.harness_cells import ALIASES, Cell
from bench.report_data import ResultFile, Row, model_name
from clocher_runtime.command.settings import ALL
from clocher_runtime.convert.synthetic import GGUF_NAME


def command(file: ResultFile) -> str:
    """Return a command that makes such a file."""
    makers = {
        "strict": _strict,
        "harness": _harness,
        "decode": _decode,
        "peers": _peers,
        "roofline": _roofline,
        "block_sparse": _block_sparse,
    }
    maker = makers.get(file.kind)
    return maker(file.rows) if maker and file.rows else ""


def _strict(rows: Any) -> str:
    words = shlex.split(rows[0]["command"]) if rows[0]["command"].count("'") % 2 == 0 else []
    return shlex.join(_without_places(words))


def _harness(rows: Any) -> str:
    cells = {row["key"]: row for row in rows}
    first: Row = next(iter(cells.values()))
    settings: Mapping[str, str] = {
        name: str(raw)
        for name, raw in first.get("settings", {}).items()
        if name in ALL and name not in first.get("swept", {})
    }
    runs = max(int(row["run"]) for row in rows)
    cell = Cell("", {}, settings)
    variables = cell.environment({})
    sweep = _sweep(cells.values()) if len(cells) > 1 else ""
    words = [f"{name}={raw}" for name, raw in variables.items()]
    words += ["python", "-m", "bench.harness", "--runs", str(runs)]
    words += ["--sweep", sweep] if sweep else []
    flags = cell.flags()
    return " ".join(map(shlex.quote, _without_places([*words, *(["--", *flags] if flags else [])])))


def _sweep(cells: Iterable[Row]) -> str:
    """Return the sweep as it was typed: the labels of its cells hold it."""
    axes: dict[str, dict[str, None]] = {}
    for row in cells:
        for word in row["label"].split():
            name, equals, value = word.partition("=")
            if equals and (name in ALL or name in ALIASES):
                axes.setdefault(name, {})[value] = None
    return "|".join(f"{name}={','.join(values)}" for name, values in axes.items())


def _decode(rows: Any) -> str:
    return _words(
        "decode",
        {
            "model-dir": "DIR",
            "tokens": rows[0]["test"].removeprefix("tg"),
            "threads": _list(row["threads"] for row in rows),
            "rounds": len(rows[0]["samples"]),
        },
    )


def _peers(rows: Any) -> str:
    words = {"model-dir": "DIR", "llama-bench": "PATH", "threads": rows[0]["threads"]}
    samples = next((len(row["samples"]) for row in rows if "samples" in row), None)
    if samples:
        words["rounds"] = samples
    tests = dict.fromkeys(row["test"] for row in rows)
    others = dict.fromkeys(row["format"] for row in rows if row["format"].endswith(".gguf"))
    more = [f"--test {shlex.quote(test)}" for test in tests]
    more += [f"--gguf {shlex.quote(model_name(name))}" for name in others if name != GGUF_NAME]
    return " ".join([_words("peers", words), *more])


def _roofline(rows: Any) -> str:
    return _words(
        "roofline",
        {
            "formats": _list(row["format"] for row in rows),
            "shapes": _list(f"{row['N']}x{row['K']}" for row in rows),
            "tokens": _list(row["M"] for row in rows),
            "threads": _list(row["threads"] for row in rows),
        },
    )


def _block_sparse(rows: Any) -> str:
    sparse = [row for row in rows if row["op"] == "bsr_linear"]
    return _words(
        "block_sparse",
        {
            "shape": f"{rows[0]['n']}x{rows[0]['k']}",
            "blocks": _list(row["block"] for row in rows),
            "inner": rows[0]["inner"],
            "sparsity": _list(round(100 * row["sparsity"]) for row in sparse),
            "tokens": rows[0]["m"],
            "threads": rows[0]["threads"],
        },
    )


def _words(bench: str, options: Mapping[str, object]) -> str:
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items()]
    return " ".join([f"python -m bench.{bench}", *words])


def _list(values: Iterable[object]) -> str:
    return ",".join(dict.fromkeys(map(str, values)))


def _without_places(words: Iterable[str]) -> list[str]:
    """Return words whose paths have lost their directories."""
    found = []
    for word in words:
        head, equals, tail = word.rpartition("=")
        found.append(f"{head}{equals}{model_name(tail) if tail.startswith('/') else tail}")
    return found
