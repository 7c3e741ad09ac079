"""How a process ends: SIGINT and SIGTERM as exceptions, and the exit code of each exception.

An interrupted run still reports; the second signal ends the process. Imports nothing slow, as
signals have to be handled first.
"""

import errno
import os
import signal
import sys
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Any

from clocher_kernels import errors

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_BOTH = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.01
_received: list[KeyboardInterrupt] = []
_hooks: list[Any] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


class _Interrupted(KeyboardInterrupt):
    """SIGINT arrived. CPython may note a plain KeyboardInterrupt as unhandled.

    It does if one crosses code compiled from a string, such as dataclass methods, and then exits by
    SIGINT, whatever the exit code was to be.
    """


_Interrupted.__name__ = KeyboardInterrupt.__name__


class ExitCode(IntEnum):
    """What the process says to its caller."""

    OK = 0
    BUG = 1  # unexpected: a defect of Clocher, not of the request
    USAGE = 2  # bad flag, environment variable or number
    MODEL = 3  # model missing, invalid or not supported
    DEVICE = 5  # device or engine not available
    MEMORY = 6  # out of memory
    MISMATCH = 7  # verification found a difference
    REJECTED = 8  # the quality gate failed
    UNDECIDED = 9  # the quality gate needs more text to decide
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.UsageError, ExitCode.USAGE),
    (errors.ModelError, ExitCode.MODEL),
    (errors.DeviceError, ExitCode.DEVICE),
    (errors.UnsupportedOp, ExitCode.DEVICE),
    (errors.OutOfMemory, ExitCode.MEMORY),
    (MemoryError, ExitCode.MEMORY),
    (Terminated, ExitCode.TERMINATED),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def told(error: BaseException) -> BaseException:
    """Map a refused thread to DeviceError, refused memory to OutOfMemory; return others as is."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return errors.DeviceError(
            "the system gives this process no more threads; lower --threads, or raise its limit of "
            "processes (ulimit -u, or pids.max of its control group)"
        )
    cause: BaseException | None = error if isinstance(error, OSError | ImportError) else None
    while cause is not None:
        if isinstance(cause, OSError | ImportError) and _lacks_memory(cause):
            return errors.OutOfMemory(
                f"the system gives this process no more memory ({cause}); free some, or raise its "
                "limit (ulimit -v, or memory.max of its control group)"
            )
        cause = cause.__cause__ or cause.__context__
    return error


def _lacks_memory(error: OSError | ImportError) -> bool:
    # The dynamic loader reports it in its message only.
    return getattr(error, "errno", None) == errno.ENOMEM or any(
        words in str(error) for words in ("failed to map segment", "annot allocate memory")
    )


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code for an exception."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.BUG


def listen() -> list[tuple[int, Any]]:
    """Raise KeyboardInterrupt on SIGINT, `Terminated` on SIGTERM, once; ignored signals stay so."""
    _received.clear()
    before: list[tuple[int, Any]] = []
    for number in _BOTH:
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            try:
                signal.signal(number, _stop)
            except ValueError:
                return []
            before.append((number, handler))
    if sys.unraisablehook is not _unraisable:
        _hooks[:] = [sys.unraisablehook]
        sys.unraisablehook = _unraisable
    return before


def cause_of(error: BaseException) -> BaseException:
    """Return the signal behind an exception, which C code may have replaced; else the exception."""
    return _received[0] if _received else error


def restore(before: list[tuple[int, Any]]) -> None:
    """Undo `listen`."""
    for number, handler in before:
        signal.signal(number, handler)
    if sys.unraisablehook is _unraisable:
        sys.unraisablehook = _hooks[0]


def ignore(before: list[tuple[int, Any]]) -> None:
    """Ignore signals, so that nothing changes the exit code after the last output."""
    for number, _ in before:
        signal.signal(number, signal.SIG_IGN)


def _unraisable(args: "UnraisableHookArgs") -> None:
    """Resend a signal that arrived in a finaliser, where Python drops exceptions."""
    if args.exc_value not in _received:
        _hooks[0](args)
        return
    import threading  # late: rare

    number = signal.SIGTERM if isinstance(_received.pop(), Terminated) else signal.SIGINT
    for each in _BOTH:
        if signal.getsignal(each) == signal.SIG_DFL:
            signal.signal(each, _stop)
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def _stop(number: int, frame: FrameType | None) -> None:
    for each in _BOTH:
        if signal.getsignal(each) is _stop:
            signal.signal(each, signal.SIG_DFL)
    _received.append(Terminated("SIGTERM") if number == signal.SIGTERM else _Interrupted("SIGINT"))
    raise _received[0]
