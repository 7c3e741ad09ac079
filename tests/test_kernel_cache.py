"""The kernel cache: compiled once, by one process at a time, and again when a source changes."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from commands import python
from kernel_run import kernel_cache

from clocher_kernels import guards
from clocher_kernels.errors import WindowError
from cpu_fallback.lanes import jit, objects
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.memory import read_i64, write_i64
from cpu_fallback.lanes.objects import ObjectCache
from cpu_fallback.team import tape

__all__ = ["kernel_cache"]

_ROOT = Path(__file__).parent.parent
_PROCESS = """
import json, sys
from cpu_fallback.lanes import jit
from cpu_fallback.ops import linear
from cpu_fallback.team import tape
compiled, told, original = [], [], jit._compile
def count(k):
    compiled.append(k.name)
    return original(k)
jit._compile = count
wanted = [tape.lead, tape.serve, linear.embed]
jit.warm(wanted, lambda done, total: told.append([done, total]))
assert all(k.ready for k in wanted)
print(json.dumps({"compiled": compiled, "told": told}))
"""

# Between 3 GiB of a model and all else, a page is free, and no more.
_LINKED = """
import mmap
import numpy as np
from cpu_fallback.lanes.jit import warm
from cpu_fallback.team import tape

def taken(nbytes):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8).ctypes.data, memory

warm([tape.lead])
model, pages = taken(3 << 30), [taken(mmap.PAGESIZE)]
while pages[-1][0] > model[0]:
    pages.append(taken(mmap.PAGESIZE))
print(len(pages), flush=True)
del pages[-2]
warm([tape.serve])
print("linked")
"""


def _start(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "CLOCHER_CACHE_DIR": str(cache), "PYTHONPATH": str(_ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _result(process: subprocess.Popen[str]) -> dict[str, list[object]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return {**json.loads(out), "err": err.splitlines()}


def test_processes_at_once_compile_each_kernel_once(tmp_path: Path) -> None:
    both = [_start(tmp_path) for _ in range(2)]
    first, second = (_result(process) for process in both)
    names = ["linear.embed", "tape._serve", "tape.lead"]
    assert sorted(first["compiled"] + second["compiled"]) == names
    third = _result(_start(tmp_path))
    assert third["compiled"] == [] and third["told"] == []
    assert max(len(first["told"]), len(second["told"])) == 4  # (0, 3) .. (3, 3)


def test_a_current_directory_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert len(_result(_start(tmp_path))["compiled"]) == 3


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    result = _result(_start(blocked))
    assert len(result["compiled"]) == 3
    warnings = [line for line in result["err"] if "CLOCHER_CACHE_DIR" in line]
    assert len(warnings) == 1 and str(blocked) in warnings[0]


def test_machine_code_finds_its_constants_between_gigabytes_of_models() -> None:
    done = python("-c", _LINKED)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["linked"]), done.stderr


@Kernel
def answer(rec, ctl, rank, size, scratch):
    """Store 42."""
    write_i64(rec, 42)


def _fresh(function: Kernel) -> Kernel:
    return Kernel(function.function)


@pytest.mark.usefixtures("kernel_cache")
def test_a_damaged_file_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = jit._compile
    monkeypatch.setattr(jit, "_compile", lambda k: made.append(k.name) or original(k))
    cache = ObjectCache.get()
    jit.warm([_fresh(answer)])
    path = cache.directory / "test_kernel_cache.answer.o"
    stored = path.read_bytes()
    for damaged in (stored[:-1], stored[:100] + b"\xff" + stored[101:], b""):
        path.write_bytes(damaged)
        assert cache.read("test_kernel_cache.answer") is None
    jit.warm([_fresh(answer)])
    assert len(made) == 2
    assert not list(cache.directory.glob(".test*")), "a temporary file was left behind"


@pytest.mark.usefixtures("kernel_cache")
def test_nothing_is_compiled_in_a_timed_window() -> None:
    jit.warm([tape.lead])

    @Kernel
    def late(rec, ctl, rank, size, scratch):
        write_i64(rec, read_i64(ctl))

    guards.open_window("decode")
    try:
        jit.warm([tape.lead])
        with pytest.raises(WindowError, match=r"compile the kernel test_kernel_cache\.late"):
            jit.warm([late])
    finally:
        guards.close_window()
    jit.warm([late])


@pytest.mark.usefixtures("kernel_cache")
def test_a_kernel_that_may_raise_is_refused() -> None:
    @Kernel
    def careless(rec, ctl, rank, size, scratch):
        if read_i64(rec):
            raise ValueError("nobody sees this")

    with pytest.raises(RuntimeError, match=r"test_kernel_cache\.careless may raise"):
        jit.warm([careless])


@pytest.mark.usefixtures("kernel_cache")
def test_the_users_own_numba_settings_stay() -> None:
    names = ("LOOP_VECTORIZE", "SLP_VECTORIZE", "CACHE_DIR", "CPU_NAME", "CPU_FEATURES")
    before = {name: getattr(numba.config, name) for name in names}

    @Kernel
    def other(rec, ctl, rank, size, scratch):
        write_i64(rec, 7)

    jit.warm([other])
    assert {name: getattr(numba.config, name) for name in names} == before


def test_an_edit_gives_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "cpu_fallback"
    shutil.copytree(Path(objects.__file__).parent, package, ignore=shutil.ignore_patterns("__*__"))
    monkeypatch.setattr(objects, "__file__", str(package / "objects.py"))
    before = objects.fingerprint()
    assert objects.fingerprint() == before
    with open(package / "tape.py", "a") as source:
        source.write("\n")
    assert objects.fingerprint() != before


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOCHER_CACHE_DIR", str(tmp_path / "a"))
    assert objects.cache_root() == tmp_path / "a"
    monkeypatch.delenv("CLOCHER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert objects.cache_root() == tmp_path / "b" / "clocher"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert objects.cache_root() == tmp_path / ".cache" / "clocher"


def test_a_full_disk_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ObjectCache(tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(objects.os, "fsync", full)
    with caplog.at_level(logging.WARNING), cache.locked():
        cache.write("some.kernel", b"code")
    assert "No space left" in caplog.text
    assert cache.read("some.kernel") is None
    assert [p.name for p in cache.directory.iterdir()] == [".lock"]
