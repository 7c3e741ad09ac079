"""Kernels that were compiled before the run: is a carried cache of Triton's of any use here?

Triton looks a kernel up by a hash over its own sources and libtriton.so, so only the very wheel
that compiled a kernel finds it again. A folder of caches has one for each: FOLDER/SHA/ with a
`key.json` that says what it is for, and Triton's entries.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench.gpu.record import Row, write_json

KEY = "key.json"
_SHORT = 16
# What a launch needs of an entry; the rest (PTX, the IRs, the source) is for people.
_NEEDED = (".cubin", ".json")
_GROUP = "__grp__"


@dataclass(frozen=True)
class Cache:
    """A folder that Triton reads and writes in this run.

    Attributes:
        path: the folder.
        said: whether anything in it was made ahead, for the report.
    """

    path: Path
    said: str

    def files(self) -> Iterator[tuple[str, Path]]:
        """Return what a later run needs: name in an archive, and file."""
        for file in sorted(self.path.rglob("*")):
            if file.suffix in _NEEDED and not file.name.startswith("."):
                yield f"cache/{self.path.name}/{file.relative_to(self.path)}", file


def key() -> Row:
    """Return what compiled kernels depend on: version and SHA-256 of Triton's library.

    Raises:
        FileNotFoundError: Triton is not installed.
    """
    try:
        found = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        raise FileNotFoundError("triton is not installed") from None
    library = Path(str(found.locate_file("triton/_C/libtriton.so")))
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"triton": found.version, "libtriton_sha256": digest}


def use(folder: Path) -> Cache:
    """Let this process and its children use the cache of a folder that is for this Triton.

    There is an empty one if there is none.
    """
    here = key()
    path = folder.resolve() / here["libtriton_sha256"][:_SHORT]
    kernels = len(list(path.glob(f"*/{_GROUP}*.json")))
    others = [json.loads(p.read_text()) for p in folder.glob(f"*/{KEY}") if p.parent != path]
    _settle(path)
    write_json(path / KEY, here)
    os.environ["TRITON_CACHE_DIR"] = str(path)
    name = f"Triton {here['triton']} with libtriton.so {path.name}"
    if kernels:
        return Cache(path, f"{kernels} kernels compiled ahead are used: for {name}")
    made_for = ", ".join(f"{o['triton']} with {o['libtriton_sha256'][:_SHORT]}" for o in others)
    why = f"those in {folder.name} are for Triton {made_for}" if others else "none came along"
    return Cache(path, f"no kernel is compiled ahead: {why}; here is {name}")


def _settle(path: Path) -> None:
    """Correct the absolute paths that Triton notes in its entries, after a cache has moved.

    An entry counts as corrupt if a file that it names is missing, so those left behind are not.
    """
    for group in path.glob(f"*/{_GROUP}*.json"):
        noted = json.loads(group.read_text(encoding="utf-8"))
        children = noted["child_paths"]
        files = {name: group.parent / name for name in children}
        moved = {name: str(file) for name, file in files.items() if file.exists()}
        if moved != children:
            write_json(group, {**noted, "child_paths": moved})
