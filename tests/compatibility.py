"""What the parity tests have seen, one row for each family, format, writer and reference.

`pytest --record-compatibility docs/compatibility.json` adds what a run has seen to that file;
scripts/render_docs.py puts them into the page. A row that a run sees again replaces the older
one, so all the models of a row belong in one run.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

KEY = ("family", "reader", "format", "writer", "reference")


@dataclass(frozen=True)
class Row:
    """What was seen.

    Attributes:
        family: architecture, a key of clocher_runtime.models.families.FAMILIES.
        reader: "float", a quant_method, or "gguf TYPE": what read it.
        format: how the weights are stored, in words.
        writer: which program wrote the file, with its version; or that a test did.
        reference: what the model was compared with, with its version.
        models: how many.
        difference: the largest RMS of the differences of logits over the RMS of the logits; None
            if the model was refused.
        same_ids: of how many models every greedy id was that of the reference; None: not compared.
        refused: what was said, if the model was refused.
        date, isa, command: when, with which CPU kernels, and how.
    """

    family: str
    reader: str
    format: str
    writer: str
    reference: str
    models: int = 1
    difference: float | None = None
    same_ids: int | None = None
    refused: str | None = None
    date: str = ""
    isa: str = ""
    command: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in KEY)


class Seen:
    """The rows of a test run."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, ...], Row] = {}

    def add(self, row: Row) -> None:
        """Add a model to its row."""
        if (old := self.rows.get(row.key)) is not None:
            both = (old.difference, row.difference)
            counts = (old.same_ids, row.same_ids)
            assert (None in both) == (both == (None, None)), f"{row.key}: refused, or not?"
            row = replace(
                row,
                models=old.models + row.models,
                difference=None if None in both else max(x for x in both if x is not None),
                same_ids=None if None in counts else sum(x for x in counts if x is not None),
            )
        self.rows[row.key] = row

    def dump(self) -> list[dict[str, Any]]:
        """Return the rows as JSON, sorted."""
        return [asdict(self.rows[key]) for key in sorted(self.rows)]

    def merge(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows of another process of this run."""
        for row in rows:
            self.add(Row(**row))

    def write(self, path: Path) -> None:
        """Write the rows to a file, in place of its rows with the same key."""
        kept = Seen()
        if path.exists():
            kept.merge(json.loads(path.read_text(encoding="utf-8")))
        kept.rows |= self.rows
        text = ",\n".join(json.dumps(row) for row in kept.dump())
        path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def today() -> str:
    """Return the date, UTC."""
    return datetime.now(UTC).date().isoformat()


def command(test: str, markers: str, variable: str) -> str:
    """Return how a row is made again."""
    asked = f' -m "{markers}"' if markers else ""
    given = f"{variable}=DIR " if variable else ""
    return f"{given}python -m pytest {test}{asked} --record-compatibility docs/compatibility.json"


def isa() -> str:
    """Return the instruction set that the CPU kernels of this process are compiled for."""
    from cpu_fallback.lanes.isa import CURRENT

    return CURRENT.name
