"""The three files that a run leaves, written anew after every stage and whole at every moment."""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from bench.gpu import report
from bench.gpu.record import Row, write_json, write_whole

JSON, TEXT, ARCHIVE = "suite.json", "suite.txt", "suite.tgz"
MOST_ARCHIVE_BYTES = 15 << 20
"""An archive with the compiled kernels in it may be this large; else they are left out."""
_WIDTH = 150


def write(out: Path, result: Row) -> str:
    """Write the JSON and the text of a result; return the text."""
    text = io.StringIO()
    report.show(result, Console(file=text, width=_WIDTH))
    write_json(out / JSON, result)
    write_whole(out / TEXT, text.getvalue().encode())
    return text.getvalue()


def archive(out: Path, records: Path, kernels: Iterable[tuple[str, Path]] = ()) -> int:
    """Write the archive: records and logs of all processes, and compiled kernels if they fit.

    Args:
        out: the output folder.
        records: folder of the records.
        kernels: name in the archive and file of each kernel.

    Returns:
        The number of kernels' files in it.
    """
    logs = [(f"parts/{p.name}", p) for p in sorted(records.glob("[!.]*"))]
    kernels = list(kernels)
    content = _tar([*logs, *kernels])
    if len(content) > MOST_ARCHIVE_BYTES:
        content, kernels = _tar(logs), []
    write_whole(out / ARCHIVE, content)
    return len(kernels)


def merge(results: Sequence[Row], parts: Iterable[str]) -> Row:
    """Return several runs' results as one.

    Every row of every run stays: running a part again does not hide what it gave before. What a
    run did not finish stays unfinished, unless another run finished all of that part.

    Args:
        results: as read from the JSON.
        parts: names of all parts; one that no run has is missing.

    Raises:
        ValueError: the runs are of different GPUs, or some are dry runs.
    """
    if len({r["dry"] for r in results}) > 1:
        raise ValueError("a dry run and a run on a GPU; merge runs of one kind")
    gpus = sorted({name for r in results for name in report.gpus(r)})
    if len(gpus) > 1:
        raise ValueError(f"runs on {' and '.join(gpus)}; merge runs of one GPU")
    merged: dict[str, Row] = {}
    for r in results:
        for name, run in r["parts"].items():
            part = merged.setdefault(name, {"finished": False, "items": 0, "rows": []})
            part["finished"] |= run["finished"] and not r.get("some_items")
            part["items"] += run["items"]
            part["rows"] += run["rows"]
    ended = {name: "in none of the merged runs" for name in parts if name not in merged}
    for r in results:
        for process, why in r["ended_early"].items():
            if not merged.get(process.split(".")[0], {"finished": False})["finished"]:
                ended[process] = why
    seconds = sum(r["seconds"] for r in results)
    return report.result(merged, ended, bool(results[0]["dry"]), seconds)


def read(path: Path) -> Row:
    """Read the JSON of a run.

    Args:
        path: the file, or the folder it lies in.

    Raises:
        ValueError: it is no result of this suite.
    """
    path = path / JSON if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a result: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != report.SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this suite reads {report.SCHEMA}")
    return dict(found)


def _tar(files: Iterable[tuple[str, Path]]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=6) as tar:
        for name, path in files:
            data = path.read_bytes()  # a record may be replaced while it is read
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()
