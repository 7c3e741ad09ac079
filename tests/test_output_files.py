"""What somebody may have put where a writer works: links, pipes, files that are not its own."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from weight_files import LLAMA

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints.checkpoint import JSON_NAME
from clocher_runtime.checkpoints.hf.checkpoint import open_hf
from clocher_runtime.checkpoints.iebin import open_iebin
from clocher_runtime.convert.gguf import GgufExport
from clocher_runtime.convert.q4_planes import Q4Job
from clocher_runtime.convert.to_iebin import Conversion
from clocher_runtime.disk.output_file import Journal, JsonlWriter, OutputFile, write_file

SECRET = b"somebody else's"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail instead of waiting for the other end of a pipe."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link(path: Path) -> None:
    path.symlink_to(victim_of(path))


def hard_link(path: Path) -> None:
    os.link(victim_of(path), path)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "not-there")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def victim_of(path: Path) -> Path:
    victim = path.parent / "victim"
    victim.write_bytes(SECRET)
    return victim


traps = pytest.mark.parametrize("trap", [link, hard_link, dangling, pipe])
Trap = Callable[[Path], None]


def is_untouched(folder: Path) -> bool:
    victim = folder / "victim"
    return not (folder / "not-there").exists() and (
        not victim.exists() or victim.read_bytes() == SECRET
    )


@traps
def test_write_file(trap: Trap, tmp_path: Path) -> None:
    trap(tmp_path / "a.partial")
    write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and is_untouched(tmp_path)
    assert not (tmp_path / "a").is_symlink()


@traps
def test_an_output_file(trap: Trap, tmp_path: Path) -> None:
    trap(tmp_path / "a.partial")
    with pytest.raises(OSError):
        OutputFile(tmp_path / "a.partial")
    assert is_untouched(tmp_path)


def test_an_error_of_the_hashing_thread_is_no_hash(tmp_path: Path) -> None:
    class Lost:
        def update(self, data: memoryview) -> None:
            raise MemoryError

    file = OutputFile(tmp_path / "a.partial")
    file.digest = Lost()  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        file.write(np.zeros(8, np.uint8))
    file.close()


@traps
def test_a_journal(trap: Trap, tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    trap(path)
    journal = Journal(path, "job")
    assert journal.entries == []
    journal.add({"x": 1})
    journal.close()
    assert Journal(path, "job").entries == [{"x": 1}]
    assert is_untouched(tmp_path)


@traps
def test_lines_and_gguf(trap: Trap, tmp_path: Path) -> None:
    trap(tmp_path / "a.jsonl.partial")
    # Its partial file is a lock as well, so what is in its place is not removed but refused.
    with pytest.raises(UsageError, match="--outputs"):
        JsonlWriter(tmp_path / "a.jsonl", "--outputs")
    assert is_untouched(tmp_path)
    (tmp_path / "victim").unlink(missing_ok=True)
    trap(tmp_path / "a.gguf.partial")
    source = open_hf(LLAMA)
    formats = {name: tensor.format for name, tensor in source.tensors.items()}
    GgufExport(source.config, formats, "a").write(source, tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes()[:4] == b"GGUF" and is_untouched(tmp_path)


@pytest.mark.parametrize("trap", [link, hard_link, pipe])
def test_a_conversion_does_not_read_a_strangers_journal(trap: Trap, tmp_path: Path) -> None:
    trap(tmp_path / "model.ie.bin.partial.journal")
    Conversion(LLAMA, tmp_path).run()
    open_iebin(tmp_path / JSON_NAME, verify=True)
    assert is_untouched(tmp_path)


@pytest.mark.parametrize("name", ["c.bin.partial", "s.bin.partial"])
@traps
def test_the_planes_of_q4(trap: Trap, name: str, tmp_path: Path) -> None:
    trap(tmp_path / name)
    job = Q4Job(LLAMA, tmp_path / "c.bin", tmp_path / "s.bin", tmp_path / "m.json")
    with pytest.raises(OSError):
        job.run()
    assert is_untouched(tmp_path) and not (tmp_path / "m.json").exists()
    (tmp_path / name).unlink()
    trap(tmp_path / "c.bin.partial.journal")
    job.run()
    assert is_untouched(tmp_path) and (tmp_path / "m.json").is_file()
