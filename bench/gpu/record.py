"""What a part has found so far, in a file that is whole at every moment.

A part is a list of items; each gives rows. The file is rewritten before and after every item, so a
part that crashes or hangs loses no row, and whoever starts it again knows where to go on.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

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
        for row in rows:
            row.setdefault("status", "ok")
            self.rows.append({"item": item, "dry": self.dry, **row})
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
