"""Lines from a stream, a growing file, or the files of a directory."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20
MAX_FILES = 1000
SUFFIXES = (".json", ".jsonl")

_CHUNK = 1 << 20


class LineSplitter:
    """Cuts bytes into lines; drops lines that are too long."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield completed lines, without blank ones; None for one too long."""
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._append(piece)
            yield from self.end()
        self._append(rest)

    def end(self) -> Iterator[bytes | None]:
        """Yield what came since the last line break, as a line."""
        line = None if self._skipping else bytes(self._partial)
        self._partial.clear()
        self._skipping = False
        if line is None or line.strip():
            yield line

    def _append(self, piece: bytes) -> None:
        if self._skipping or len(self._partial) + len(piece) > self._limit:
            self._skipping = True
            self._partial.clear()
        else:
            self._partial += piece


class FollowedFile:
    """A file read as it grows, anew when replaced or truncated. It may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._splitter = LineSplitter()
        self._inode = -1
        self._offset = 0

    def lines(self, last: bool = False) -> Iterator[bytes | None]:
        """Yield the lines that were added. Raises OSError."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return
        # Opening a named pipe would block until there is a writer.
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{self.path}: not a regular file; pipe it to standard input instead")
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._splitter = LineSplitter()
            self._inode, self._offset = found.st_ino, 0
        if found.st_size > self._offset:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                while data := file.read(_CHUNK):
                    self._offset += len(data)
                    yield from self._splitter.feed(data)
        if last:
            yield from self._splitter.end()


class FollowedDirectory:
    """All files directly in a directory with a suffix in `SUFFIXES`; new ones are found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, FollowedFile] = {}

    def lines(self, last: bool = False) -> Iterator[bytes | None]:
        """Yield the lines added to the first `MAX_FILES` files. Raises OSError."""
        for name in sorted(os.listdir(self.path)):
            known = name in self._files or len(self._files) >= MAX_FILES
            if not known and name.endswith(SUFFIXES) and _readable(self.path / name):
                self._files[name] = FollowedFile(self.path / name)
        for file in self._files.values():
            yield from file.lines(last)


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def stream_lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a stream as they come, until it ends."""
    splitter = LineSplitter()
    while data := os.read(stream.fileno(), _CHUNK):
        yield from splitter.feed(data)
    yield from splitter.end()
