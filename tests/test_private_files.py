"""Caches trust only what nobody else can have written, and wait for nobody without end."""

import fcntl
import functools
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu_fallback.lanes import objects
from cpu_fallback.lanes.objects import (
    ObjectCache,
    cache_root,
    locked,
    open_private,
    private_directory,
)
from cpu_fallback.tiles import tile_cache
from cpu_fallback.tiles.tile_cache import TileCache

ROOT = Path(__file__).parents[1]
KEY = "5" * 64


def foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file another user's: truly so for root, else by our being somebody else."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(objects.os, "geteuid", lambda: 12345)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Directories


def test_what_is_made_is_for_this_user_only(tmp_path: Path) -> None:
    made = private_directory(tmp_path / "a" / "b", "c", create=True)
    assert made == tmp_path.resolve() / "a" / "b" / "c"
    assert [mode(path) for path in (made, made.parent, made.parent.parent)] == [0o700] * 3
    with pytest.raises(FileNotFoundError):
        private_directory(tmp_path / "other", "c")
    os.close(open_private(made / "file", os.O_WRONLY | os.O_CREAT))
    assert mode(made / "file") == 0o600


@pytest.mark.parametrize("level", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write(tmp_path: Path, level: str, bits: int) -> None:
    private_directory(tmp_path / "a" / "b", "c", create=True)
    (tmp_path / level).chmod(bits)
    with pytest.raises(PermissionError, match="others can write it") as error:
        private_directory(tmp_path / "a" / "b", "c", create=True)
    assert error.value.filename == str(tmp_path.resolve() / level)


def test_the_sticky_bit_is_enough_on_the_way_and_not_at_the_end(tmp_path: Path) -> None:
    last = private_directory(tmp_path / "a" / "b", "c", create=True)
    last.parent.chmod(0o1777)
    assert private_directory(tmp_path / "a" / "b", "c") == last
    last.chmod(0o1777)
    with pytest.raises(PermissionError, match="others can write it"):
        private_directory(tmp_path / "a" / "b", "c")


def test_a_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = private_directory(tmp_path / "a", "c", create=True)
    foreign(last, monkeypatch)
    with pytest.raises(PermissionError, match="it belongs to user"):
        private_directory(tmp_path / "a", "c")


def test_links_lead_to_the_cache_but_are_none_of_its_own(tmp_path: Path) -> None:
    there = private_directory(tmp_path / "there" / "deep", "c", create=True)
    (tmp_path / "link").symlink_to("./there/../there/deep/")
    assert private_directory(tmp_path / "link", "c") == there
    assert private_directory(tmp_path / "link" / ".." / "deep", "c") == there  # as the system does
    (tmp_path / "there").chmod(0o777)
    with pytest.raises(PermissionError):
        private_directory(tmp_path / "link", "c")
    (tmp_path / "there").chmod(0o700)
    (tmp_path / "there" / "deep" / "d").symlink_to("c")
    with pytest.raises(PermissionError, match="a symbolic link inside the cache"):
        private_directory(tmp_path / "link", "d")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PermissionError, match="symbolic link"):
        private_directory(tmp_path / "loop", "c")


# Files and locks


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.symlink_to(__file__)


def a_pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(path)


def a_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()


def for_all_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"x")
    path.chmod(0o666)


def of_somebody_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"x")
    foreign(path, monkeypatch)


Plant = Callable[[Path, pytest.MonkeyPatch], None]
PLANTS = (a_link, a_pipe, a_directory, for_all_to_write, of_somebody_else)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
def test_a_file_that_is_not_ours_alone(
    tmp_path: Path, plant: Plant, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "file", monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        open_private(tmp_path / "file", flags)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A lock that another process holds for as long as the test runs."""
    path = tmp_path / "kernels.lock"
    program = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, 2); print(flush=1)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{program}; time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"\n"
    path.chmod(0o600)
    yield path
    other.kill()
    other.communicate()


def test_a_lock_is_given_up(held: Path) -> None:
    with (
        pytest.raises(TimeoutError, match=r"locked by another process for 0\.1 s"),
        locked(held, 0.1),
    ):
        raise AssertionError("two hold the lock")


def test_a_lock_that_is_never_given_back_stops_nobody(
    tmp_path: Path, held: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (objects, tile_cache):
        monkeypatch.setattr(module, "locked", functools.partial(locked, seconds=0.1))
    kernels, tiles = ObjectCache(tmp_path), TileCache(tmp_path, 1 << 20)
    for directory in (kernels.directory, tiles.directory):
        private_directory(directory, create=True)
        os.link(held, directory / ".lock")
    for _ in range(3):
        with kernels.locked():
            kernels.write("some.kernel", b"code")
        tiles.write(KEY, np.zeros(10, np.uint8))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all("locked by another process" in text for text in texts)


def test_two_threads_of_a_process_keep_each_other_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path), pytest.raises(TimeoutError), locked(path, 0.05):
        pass
    with locked(path), open(path) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# The caches


def hashed(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_kernel_is_not_read(
    tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ObjectCache(tmp_path)
    assert cache.directory is not None
    private_directory(cache.directory, create=True)
    path = cache.directory / "some.kernel.o"
    plant(path, monkeypatch)
    if path.is_file() and not path.is_symlink():
        path.write_bytes(hashed(b"code"))
    assert cache.read("some.kernel") is None
    assert cache.read("another") is None


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_tiles_are_not_read(
    tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TileCache(tmp_path, 1 << 20)
    cache.write(KEY, np.ones(100, np.uint8))
    assert cache.read(KEY, 100) is not None
    path = cache.directory / f"{KEY}.tiles"
    content = path.read_bytes()
    path.unlink()
    plant(path, monkeypatch)
    if path.is_file() and not path.is_symlink():
        path.write_bytes(content)
    assert cache.read(KEY, 100) is None


def test_a_pipe_among_the_tiles_stops_no_writer(tmp_path: Path) -> None:
    cache = TileCache(tmp_path, 1 << 20)
    private_directory(cache.directory, create=True)
    os.mkfifo(cache.directory / ".left.1")
    cache.write(KEY, np.ones(100, np.uint8))
    assert cache.read(KEY, 100) is not None


_PROCESS = """
import sys
from cpu_fallback.lanes import jit, objects
from cpu_fallback.ops import linear
from cpu_fallback.team import tape
jit.warm([tape.lead, tape.serve])
print("compiled", tape.lead.ready and tape.serve.ready)
"""


def started(program: str = _PROCESS, **environment: str) -> tuple[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_junk_that_others_planted_is_never_machine_code(tmp_path: Path) -> None:
    """Each with the hash that it should have: loaded, it would end the process."""
    cache = ObjectCache(tmp_path)
    assert cache.directory is not None
    private_directory(cache.directory, create=True)
    for name in ("tape.lead", "tape._serve"):
        (cache.directory / f"{name}.o").write_bytes(hashed(b"\x7fELF" + bytes(range(256)) * 9))
    cache.directory.chmod(0o777)
    out, err = started(CLOCHER_CACHE_DIR=str(tmp_path))
    assert out == "compiled True\n"
    assert len(err) == 1 and "others can write it: chmod go-w" in err[0]
    assert "CLOCHER_CACHE_DIR" in err[0]


_SCARCE = """
import resource
from cpu_fallback.lanes import jit
from cpu_fallback.ops import linear
wanted = [linear.embed]
code = jit._compile(linear.embed)
jit._linker()
resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, 1 << 20))
try:
    linear.embed.load(code)
except MemoryError as error:
    print(error)
"""


def test_no_memory_for_machine_code_is_an_error() -> None:
    out, _ = started(_SCARCE)
    assert out == "machine code of clocher_linear_embed: Cannot allocate memory; free memory\n"


def test_no_home_costs_one_warning() -> None:
    out, err = started(CLOCHER_CACHE_DIR="~nouser/x")
    assert out == "compiled True\n"
    assert err == [
        "nothing is cached: CLOCHER_CACHE_DIR is '~nouser/x', a home directory that is not known; "
        "set CLOCHER_CACHE_DIR to a directory of your own"
    ]


def test_where_there_is_no_home(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    objects._nowhere.cache_clear()  # it warns once in a process
    for name in ("CLOCHER_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    with monkeypatch.context() as patch:
        patch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        assert cache_root() is None
        assert "no home directory" in caplog.text
        assert TileCache.get() is None
        assert ObjectCache(None).read("some.kernel") is None
        with ObjectCache(None).locked():
            ObjectCache(None).write("some.kernel", b"code")
    monkeypatch.setenv("HOME", "relative")
    assert cache_root() is None


@pytest.mark.parametrize("problem", [PermissionError(13, "Permission denied"), OSError(28, "Full")])
def test_a_directory_that_cannot_be_made(
    tmp_path: Path,
    problem: OSError,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise problem

    monkeypatch.setattr(Path, "mkdir", fail)
    cache = ObjectCache(tmp_path)
    for name in ("one", "two"):
        with cache.locked():
            assert cache.read(name) is None
            cache.write(name, b"code")
    (record,) = caplog.records
    assert problem.strerror in record.getMessage() and str(tmp_path) in record.getMessage()


def test_a_disk_that_fills_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    cache = ObjectCache(tmp_path)
    cache.write("kept", b"code")
    monkeypatch.setattr(objects.os, "fsync", full)
    for name in ("one", "two"):
        with cache.locked():
            cache.write(name, b"code")
    assert len(caplog.records) == 1
    assert cache.read("kept") == b"code" and cache.read("one") is None
