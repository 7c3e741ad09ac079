"""What becomes of a process when a page of a mapped model file is gone.

A file that is truncated while it is mapped, or whose disk fails, has pages that cannot be read any
more. The system says so with SIGBUS to the thread that read one, in the middle of a compiled kernel
as it may be, and no exception can come of that. So the commands install a handler that says what
happened and ends the process. Libraries do not own the signals of a process: the Python API leaves
SIGBUS alone.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clocher_runtime.disk.files import lost_page
from clocher_runtime.exit_codes import ExitCode

_SA_SIGINFO = 4
_ADDRESS_OFFSET = 16
"""Of si_addr in siginfo_t, on the 64-bit Linux ABIs."""

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux, as glibc and musl have it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def ending_on_lost_pages(report: Callable[[str], None]) -> Iterator[None]:
    """End the process with `ExitCode.MODEL` if a page of a model file turns out to be gone.

    Only on Linux. A SIGBUS that has to do with no model file goes its way as before.

    Args:
        report: called with the message, once, in the thread that read the page. Python code can run
            there: such a read comes from compiled code, never from the interpreter's own.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = _Action()
    ended: list[str] = []

    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value
        message = lost_page(address or 0)
        if message is None:
            sigaction(signal.SIGBUS, ctypes.byref(before), None)  # and it happens again
            return
        while ended:  # another thread is about to end the process
            signal.pause()
        ended.append(message)
        try:
            report(message)
        finally:
            os._exit(ExitCode.MODEL)

    handler = _Handler(handle)
    ours = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    sigaction(signal.SIGBUS, ctypes.byref(ours), ctypes.byref(before))
    try:
        yield
    finally:
        sigaction(signal.SIGBUS, ctypes.byref(before), None)
