"""What a run leaves: the record of each part, and three files; all whole at every moment.

A part is a list of items; each gives rows. The file is rewritten before and after every item, so a
part that crashes or hangs loses no row, and whoever starts it again knows where to go on.
"""

import io
import json
import os
import shlex
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SCHEMA = 2
JSON, TEXT, ARCHIVE = "suite.json", "suite.txt", "suite.tar.xz"
MOST_ARCHIVE_BYTES = 15 << 20
"""An archive with the compiled kernels in it may be this large; else they are left out."""

STATUSES = ("ok", "failed", "refused", "crashed", "timeout", "not measured")
"""What a row may say about itself.

ok: measured, or checked and right. failed: wrong, or an unexpected exception. refused: there is no
kernel, or it says by itself that it does not do this. crashed and timeout: the process died or was
stopped in this item. not measured: something that the row needs is not here, with the reason.
"""


@dataclass
class Record:
    """The file of a part.

    Attributes:
        part: name of the part.
        shard: which of the processes that share the part.
        dry: made without a GPU: nothing in it is a speed.
        finished: every item has been run.
        running: the item being run, None between items.
        done: items that have been run, crashed ones included.
        rows: what they gave.
    """

    part: str
    shard: int = 0
    dry: bool = False
    finished: bool = False
    running: str | None = None
    done: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, item: str, rows: list[Row]) -> None:
        """Note the rows of an item and that it is done."""
        command = ["python", "-m", "bench.gpu_suite", "--part", self.part, "--only", item]
        about = {"item": item, "dry": self.dry, "kind": self.part, "command": shlex.join(command)}
        for row in rows:
            row.setdefault("status", "ok")
            self.rows.append({**about, **row})
        self.done.append(item)
        self.running = None

    def save(self, path: Path) -> None:
        """Write the file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a file that `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def write_json(path: Path, value: object) -> None:
    """Write a JSON file that no reader sees half of."""
    write_whole(path, json.dumps(value, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it: it is whole at every moment.

    A process that is killed leaves one temporary file at most, which the next one writes over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
    content = tar([*logs, *kernels])
    if len(content) > MOST_ARCHIVE_BYTES:
        content, kernels = tar(logs), []
    write_whole(out / ARCHIVE, content)
    return len(kernels)


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
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this suite reads {SCHEMA}")
    return dict(found)


def tar(files: Iterable[tuple[str, Path]], preset: int = 1) -> bytes:
    """Return a compressed archive of files, given by their names in it; presets are those of xz."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=preset) as packed:
        for name, path in files:
            data = path.read_bytes()  # a record may be replaced while it is read
            info = tarfile.TarInfo(name)
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))
    return content.getvalue()
