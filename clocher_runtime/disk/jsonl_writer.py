"""Writing a JSONL file line by line, without half a file ever carrying its name."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clocher_kernels.errors import UsageError
from clocher_runtime.disk.output_file import open_locked, sync_directory


class JsonlWriter:
    """A JSONL file that grows under the name FILE.partial and becomes FILE when all is done.

    FILE.partial is locked until then: of two runs that name the same file, the second is refused.

    Use it as a context manager. If an exception leaves it, FILE is what it was before, and the
    lines written so far stay in FILE.partial.

    Args:
        path: the file; one of that name is replaced.
        source: flag that named it, for messages.

    Attributes:
        lines: written so far.

    Raises:
        UsageError: it cannot be written, is something else than a file, or another run, or another
            flag of this one, is writing it.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.lines = 0
        self._path, self._source = path, source
        if os.path.islink(path):
            raise UsageError(f"{source}: {path} is a link, which would be replaced; name the file")
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(f"{source}: {path} cannot be written: it is no file")
        self._partial = path.with_name(f"{path.name}.partial")
        try:
            descriptor = open_locked(self._partial)
            os.ftruncate(descriptor, 0)
        except UsageError:
            raise UsageError(
                f"{source}: {path} is being written by another run, or for another flag; "
                "name another file"
            ) from None
        except OSError as error:
            raise self._refused(error) from None
        self._file = os.fdopen(descriptor, "w", encoding="ascii", newline="\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._file:  # the lock goes last: nobody else may have the name before
                self._file.flush()
                os.fsync(self._file.fileno())
                if error is None:
                    os.replace(self._partial, self._path)
                    sync_directory(self._path.parent)
                elif not self.lines:
                    self._partial.unlink()
        except OSError as failure:
            if error is None:
                raise self._refused(failure) from None

    def write(self, document: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            UsageError: the disk is full, or the like.
        """
        try:
            self._file.write(f"{json.dumps(document, allow_nan=False)}\n")
        except OSError as error:
            raise self._refused(error) from None
        self.lines += 1

    def _refused(self, error: OSError) -> UsageError:
        return UsageError(
            f"{self._source}: {self._path} cannot be written: {error.strerror}; name a file in a "
            "directory that exists and is writable"
        )
