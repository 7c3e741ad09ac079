"""A local cache of the Hub in the layout of huggingface_hub, without the network."""

import os
import shutil
from pathlib import Path

COMMIT = "0123456789abcdef" * 2 + "01234567"


def add_model(
    cache: Path, repo: str, source: Path, revision: str = "main", commit: str = COMMIT
) -> Path:
    """Add the files of a directory, or a file, as a revision of a repository; return its snapshot.

    Files lie in `blobs`, and the snapshot has links to them, as the library makes them.
    """
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name in ("blobs", "refs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    snapshot.mkdir(parents=True, exist_ok=True)
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.is_file())
    for number, file in enumerate(files):
        blob = folder / "blobs" / f"{len(os.listdir(folder / 'blobs')) + number:040x}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot
