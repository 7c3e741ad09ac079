"""What a job has done so far, on disk: so that a driver that died is followed by one that goes on.

    OUT/job.json          what was asked: task, model, settings, input. Another job is refused.
    OUT/parts/part-*      finished rows, a JSON object a line. A part appears whole or not at all:
                          it is written under another name, flushed to the disk, then renamed.
    OUT/results.jsonl     every row once, in the order of the input; then the parts are removed.

The driver alone writes here, and holds a lock. It takes a row for done only if it stands in a part,
so a row that an actor computed and no part holds is computed again, and never told twice.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import PARTIAL, open_locked, replacing, write_file
from clocher_runtime.disk.strict_json import parse_object

RESULTS = "results.jsonl"
_MOST_BYTES = 1 << 34


def read_rows(path: Path) -> list[str]:
    """Return the lines of an input file as JSON objects; a blank line is no row.

    A line that is no object is a row as well, {"error": what is wrong}: its result says so.

    Raises:
        ModelError: the file cannot be read.
        UsageError: it has no rows.
    """
    rows = []
    for number, line in enumerate(read_bytes(path, _MOST_BYTES).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            parse_object(line, f"line {number}")
            rows.append(line.decode())
        except FormatError as error:
            rows.append(json.dumps({"error": str(error)}))
    if not rows:
        raise UsageError(f"{path} has no rows; expected a JSON object a line")
    return rows


class Record:
    """The directory of a job, while a driver works at it: a context that holds its lock.

    Args:
        out: the directory; made if need be.
        asked: all that a result depends on.
        count: rows of the input.

    Attributes:
        done: rows that stand in a part.
        is_whole: whether all of them are in the results.

    Raises:
        UsageError: the directory is another job's, or another driver is at work.
        OSError: it cannot be written.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any], count: int) -> None:
        self.path, self.results, self._parts = out, out / RESULTS, out / "parts"
        self._count = count
        self._places: dict[int, tuple[Path, int, int]] = {}
        out.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = open_locked(out / ".lock")
        except UsageError:
            raise UsageError(f"{out}: another driver is at work there; wait for it") from None
        try:
            self._take_over(dict(asked))
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> set[int]:
        """Rows that stand in a part."""
        return set(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another driver in."""
        os.close(self._lock)

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Store results of rows; those stored before are left out.

        Args:
            answers: by number of the row.

        Raises:
            OSError: they cannot be written.
        """
        fresh = sorted(set(answers) - set(self._places))
        if not fresh:
            return
        path = self._parts / f"part-{fresh[0]:012d}-{len(fresh)}"
        lines = [f"{json.dumps({'row': row, **answers[row]})}\n".encode() for row in fresh]
        write_file(path, b"".join(lines))
        self._place(path, fresh, [len(line) for line in lines])

    def finish(self) -> int:
        """Write the results, remove the parts, and return how many rows are errors.

        Raises:
            FormatError: a row is missing.
            OSError: they cannot be written.
        """
        if len(self._places) != self._count:
            raise FormatError(
                f"{self.path}: {len(self._places)} of {self._count} rows are done; run it again"
            )
        errors = 0
        with replacing(self.results) as file:
            for line in self._lines():
                errors += b'"error": ' in line and "error" in json.loads(line)
                file.write(line)
        shutil.rmtree(self._parts, ignore_errors=True)
        self.is_whole = True
        return errors

    def _lines(self) -> Iterator[bytes]:
        last: tuple[Path, bytes] | None = None
        for row in range(self._count):
            path, start, nbytes = self._places[row]
            if last is None or last[0] != path:
                last = path, path.read_bytes()
            yield last[1][start : start + nbytes]

    def _take_over(self, asked: dict[str, Any]) -> None:
        asked = json.loads(json.dumps({"version": 1, **asked, "rows": self._count}))
        manifest = self.path / "job.json"
        if manifest.exists():
            before = parse_object(read_bytes(manifest, 1 << 24), str(manifest))
            if differ := [key for key in {**before, **asked} if before.get(key) != asked.get(key)]:
                key = differ[0]
                raise UsageError(
                    f"{self.path} holds another job: {key} is {before.get(key)!r:.120} there, "
                    f"{asked.get(key)!r:.120} here; its rows are not mixed with others: name "
                    "another directory"
                )
        elif strange := [each.name for each in self.path.iterdir() if each.name != ".lock"]:
            raise UsageError(
                f"{self.path} holds {strange[0]!r} and no job; name a new directory for this one"
            )
        else:
            write_file(manifest, f"{json.dumps(asked, indent=1)}\n".encode())
        self.is_whole = self.results.exists()
        if self.is_whole:
            shutil.rmtree(self._parts, ignore_errors=True)
            return
        self._parts.mkdir(exist_ok=True)
        for path in sorted(self._parts.iterdir()):
            if path.name.endswith(PARTIAL):
                path.unlink()
                continue
            lines = path.read_bytes().splitlines(keepends=True)
            rows = [parse_object(line, str(path)).get("row") for line in lines]
            if not all(type(row) is int and 0 <= row < self._count for row in rows):
                raise FormatError(f"{path}: it is no part of this job; remove it")
            self._place(path, rows, [len(line) for line in lines])

    def _place(self, path: Path, rows: Sequence[Any], sizes: Sequence[int]) -> None:
        start = 0
        for row, nbytes in zip(rows, sizes, strict=True):
            if row in self._places:
                raise FormatError(f"{path}: row {row} stands in another part, too; remove one")
            self._places[row] = (path, start, nbytes)
            start += nbytes
