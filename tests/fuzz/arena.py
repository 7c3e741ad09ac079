"""Carry out attacks and judge how the runs end.

A run is a fork of this process, which has imported everything and started nothing, or a process of
its own. It must end with an exit code that is right for the attack, exactly one line of JSON, no
traceback, in bounded time and memory.
"""

import atexit
import json
import os
import resource
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.attacks import Attack
from fuzz.oracle import address_space

ROOT = Path(__file__).parents[2]
CPU_SECONDS, COMPILING_CPU_SECONDS, WALL_SECONDS = 20, 150, 200
MEMORY_FACTOR, EXTRA_MIB, COMPILING_MIB = 1.5, 96, 192
# A large batch has 4 MiB of cache for each prompt of its file (embedded model, fp16): honest.
BATCH_MIB = 1536
NOBODY = 65534

# In no text that a person or a program should see.
_CAUGHT = ("Traceback (most", "panicked at", "Fatal Python", "Exception ignored", "core dumped")


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended.

    Attributes:
        code: exit code, or the signal that ended it, negative.
        mib: its largest resident set.
        cpu: seconds of CPU time.
        hung: it had to be killed.
    """

    code: int
    out: bytes
    err: str
    mib: float
    cpu: float
    hung: bool


class Arena:
    """A directory in which attacks are carried out, one after the other.

    Args:
        path: the directory; runs of another user must be able to search it.
        main: what a fork calls: it takes its arguments from `sys.argv` and returns an exit code.
        cache: the kernel cache that runs share.
    """

    def __init__(self, path: Path, main: Callable[[], int], cache: Path) -> None:
        self._here, self._main, self._cache = path / "run", main, cache
        self.honest_mib = 0.0

    def carry_out(self, attack: Attack) -> End:
        """Do a run in a directory of its own and return how it ended."""
        self._lay_out(attack)
        pipes = [os.pipe() for _ in range(3)]  # standard output and error, and "it begins"
        child = os.fork()
        if not child:
            for reading, _ in pipes:
                os.close(reading)
            self._be(attack, *(writing for _, writing in pipes))
        for _, writing in pipes:
            os.close(writing)
        try:
            return _watch(child, [reading for reading, _ in pipes], attack.signal)
        finally:
            for reading, _ in pipes:
                os.close(reading)

    def judge(self, attack: Attack, end: End) -> str:
        """Return what is wrong with the end of an attack, "" if nothing is."""
        compiling = "compiling kernels" in end.err
        mib = MEMORY_FACTOR * self.honest_mib + EXTRA_MIB + COMPILING_MIB * compiling
        mib += 64 * sum(map(len, attack.files.values())) / (1 << 20) + ("64" in attack.flags) * 64
        mib += ("999" in attack.flags) * BATCH_MIB
        if end.hung:
            return "hang"
        if found := next((text for text in _CAUGHT if text in end.err), None):
            last = [line for line in end.err.splitlines() if line.strip() and line[0] != " "][-1:]
            return f"{found}: {''.join(last)[:100]}"
        if end.code not in attack.codes:
            return f"exit code {end.code}, expected {sorted(attack.codes)}"
        if end.cpu > (COMPILING_CPU_SECONDS if compiling else CPU_SECONDS):
            return "slow"
        if end.mib > mib:
            return "memory"
        return "" if attack.script or "stdout" in attack.streams else _judge_line(attack, end)

    def _lay_out(self, attack: Attack) -> None:
        here = self._here
        with suppress(FileNotFoundError):
            shutil.rmtree(here)
        here.mkdir(parents=True, mode=0o755)
        os.mkfifo(here / "fifo")
        for name, data in attack.files.items():
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for kind, name in attack.plants:
            _plant(kind, here / name)

    def _text(self, text: str) -> str:
        return text.replace("{here}", str(self._here)).replace("{cache}", str(self._cache))

    def _be(self, attack: Attack, out: int, err: int, begins: int) -> None:
        """Become the run; never return."""
        flags = [self._text(flag) for flag in attack.flags]
        env = {name: self._text(value) for name, value in attack.env.items()}
        try:
            _streams(attack, out, err)
            for number in map(int, os.listdir("/proc/self/fd")):
                if number > 2 and number != begins:
                    with suppress(OSError):  # the one that listed them
                        os.close(number)
            self._enter(attack)
            if attack.nobody and os.geteuid() == 0 and _others_can_search(Path(os.__file__).parent):
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            for name, value in attack.limits.items():
                more = address_space() if name == "AS" and not attack.own else 0
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value + more,) * 2)
            if attack.own:
                what = ["-m", "clocher_runtime.cli"]
                if attack.script:
                    file = ROOT / "scripts" / attack.script
                    what = [str(file)] if file.suffix else ["-m", "clocher_runtime", file.name]
                env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
                os.execve(sys.executable, [sys.executable, *what, *flags], env)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = ["clocher-run", *flags]
        except OSError as error:
            os.write(2, f"could not begin: {error}".encode())
            os._exit(0 if attack.own else 99)  # arguments too long for the system, or no descriptor
        os.close(begins)
        code: Any = 1
        try:
            code = self._main()
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        _end(code)

    def _enter(self, attack: Attack) -> None:
        place = self._here / (
            "gone" if attack.cwd == "deleted" else attack.cwd.replace("here", ".")
        )
        if attack.cwd == "deleted":
            place.mkdir()
        os.chdir(self._here)
        with suppress(OSError):  # something else may be in its place
            os.chdir(place)
        if attack.cwd == "deleted":
            place.rmdir()


def _others_can_search(path: Path) -> bool:
    """Return whether another user could import from a directory: a late import must not fail."""
    return all(directory.stat().st_mode & 0o001 for directory in (path, *path.parents))


def _plant(kind: str, path: Path) -> None:
    """Put something in the place of a file, unless a plant before stands in the way."""
    with suppress(FileExistsError, NotADirectoryError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        return
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif kind != "deny":
            path.unlink()
    targets = {"link": "/etc/passwd", "dangling": "nowhere", "loop": path.name}
    targets |= {"zero": "/dev/zero", "full": "/dev/full"}
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "deny" and path.exists():
        path.chmod(0)


def _streams(attack: Attack, out: int, err: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    places = {"null": "/dev/null", "full": "/dev/full", "endless": "/dev/zero"}
    names = ("stdin", "stdout", "stderr")
    for number, name in enumerate(names):
        kind = attack.streams.get(name, "null" if name == "stdin" else "pipe")
        if kind in places:
            source = os.open(places[kind], os.O_RDONLY if name == "stdin" else os.O_WRONLY)
        elif kind == "junk":
            source, writer = os.pipe()
            os.write(writer, bytes(range(256)) * 9)
            os.close(writer)
        else:
            source = {"broken": writing, "pipe": out if name == "stdout" else err}.get(kind, -1)
        if source < 0:
            os.close(number)
            stream = None
        else:
            os.dup2(source, number)
            stream = open(number, "r" if name == "stdin" else "w", closefd=False)  # noqa: SIM115
        if not attack.own:
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _end(code: Any) -> None:
    """End a fork as an interpreter ends, but for what it would do to the process it came from."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except AttributeError:
        pass
    except (OSError, ValueError):
        code = 120
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def _watch(child: int, pipes: list[int], planned: tuple[int, int] | None) -> End:
    """Read what a process writes until it ends; send it a signal when it is time."""
    ended, begun = os.pidfd_open(child), pipes[2]
    poll = select.poll()
    for number in (*pipes, ended):
        poll.register(number, select.POLLIN | select.POLLHUP)
    written: dict[int, bytearray] = {number: bytearray() for number in pipes}
    waited, hung = WALL_SECONDS * 1000, False
    while True:
        ready = [number for number, _ in poll.poll(waited)]
        if not ready and planned and waited == planned[1]:
            signal.pidfd_send_signal(ended, planned[0])
            planned, waited = None, WALL_SECONDS * 1000
        elif not ready:
            hung = True
            os.kill(child, signal.SIGKILL)
        if ended in ready and not set(ready) & set(pipes):
            break
        for number in set(ready) & set(pipes):
            data = os.read(number, 1 << 16)
            if not data:
                poll.unregister(number)
                if number == begun and planned:
                    waited = planned[1]
            written[number] += data[: (1 << 24) - len(written[number])]
    os.close(ended)
    _, status, usage = os.wait4(child, 0)
    return End(
        os.waitstatus_to_exitcode(status),
        bytes(written[pipes[0]]),
        written[pipes[1]].decode(errors="replace"),
        usage.ru_maxrss / 1024,
        usage.ru_utime + usage.ru_stime,
        hung,
    )


def _judge_line(attack: Attack, end: End) -> str:
    """Return what is wrong with the line of a run."""
    if end.code == 0 and {"--help", "--version"} & set(attack.flags):
        return ""
    if end.code == -signal.SIGTERM:
        return "" if not end.out else "a line of a run that was killed"
    try:
        (line,) = end.out.decode("ascii").splitlines()
        document = json.loads(line)
        code = document.get("code", 0)
        assert document["schema"] == "clocher.run/1" and document["status"] and document["version"]
    except (ValueError, LookupError, AssertionError, AttributeError):
        return f"not one JSON line: {end.out[:60]!r}"
    return "" if code == end.code else f"the line says code {code}, the process {end.code}"
