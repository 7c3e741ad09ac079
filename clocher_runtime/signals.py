"""SIGINT and SIGTERM as exceptions, so that an interrupted run still reports.

The second signal ends the process. Imports nothing slow, as it has to be first.
"""

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

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
