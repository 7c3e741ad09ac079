"""Judging one mutant: a typed error or a success, in bounded time and memory; all else is a bug."""

import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

CPU_SECONDS = 2.0
BATCH_CPU_SECONDS = 30
EXTRA_BYTES = 64 << 20
MAX_MESSAGE_CHARS = 4_000

Files = Mapping[str, bytes]
"""Name in the directory -> content."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a mutant.

    Attributes:
        outcome: "accepted", "refused", or a failure: "error", "hang", "memory", "message", "crash".
        detail: class of the error; of a failure also the place in the code, which tells bugs apart.
        trace: traceback of a failure.
    """

    outcome: str
    detail: str = ""
    trace: str = ""

    @property
    def failed(self) -> bool:
        """Whether the reader did what no file may make it do."""
        return self.outcome not in ("accepted", "refused")


class Hang(BaseException):
    """The time of a mutant is over. No reader catches it: it is no Exception."""


class Folder:
    """A directory that holds the files of one mutant after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, bytes] = {}

    def put(self, files: Files) -> None:
        """Make the directory hold exactly these files."""
        for name in set(self._written) - set(files):
            os.unlink(self.path / name)
            del self._written[name]
        for name, data in files.items():
            if self._written.get(name) != data:
                path = self.path / name
                if name not in self._written:
                    path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self._written[name] = data


def judge(
    read: Callable[[Path], None], typed: tuple[type[Exception], ...], path: Path
) -> Judgement:
    """Open what lies in a directory and say how that went.

    Args:
        read: the reader: opens the files and uses all that they hold.
        typed: errors that it may raise.
        path: the directory.
    """
    try:
        with _bounded_time():
            read(path)
    except typed as error:
        if len(str(error)) > MAX_MESSAGE_CHARS:
            return _failure("message", error)
        return Judgement("refused", type(error).__name__)
    except Hang as error:
        return _failure("hang", error)
    except MemoryError as error:
        return _failure("memory", error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is none of the Exceptions
        return _failure("error", error)
    return Judgement("accepted")


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Make allocations fail that would make this process larger by `more` bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def bounded_cpu() -> None:
    """Let the system end this process when it has computed for another `BATCH_CPU_SECONDS`.

    That stops code outside Python, which `Hang` cannot.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + BATCH_CPU_SECONDS, most))


def address_space() -> int:
    """Return the bytes that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@contextmanager
def _bounded_time() -> Iterator[None]:
    """Raise Hang in code that computes too long. Time of other processes does not count."""
    before = signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {CPU_SECONDS} s of CPU time")


def _failure(outcome: str, error: BaseException) -> Judgement:
    place = "?"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("clocher_"):
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    text = "".join(traceback.format_exception(error))
    return Judgement(outcome, f"{type(error).__name__} at {place}", text[-20_000:])
