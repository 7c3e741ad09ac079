"""Calls from a tape to Python: what no kernel can do, such as speaking with other processes.

A record holds the address of a C function that ctypes made of a Python one, which takes the GIL for
as long as it runs. Only the calling thread of a team calls it; the others wait at the next barrier.
"""

import ctypes
from collections.abc import Callable

_ENTRY = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
"""As a kernel: record, control block, rank, size, and the count in place of scratch memory."""


class Calls:
    """The functions that a tape calls, alive as long as this is.

    Attributes:
        failed: what the first one that failed raised. No other is called after that.
    """

    def __init__(self) -> None:
        self.failed: BaseException | None = None
        self._entries: list[object] = []

    def address(self, function: Callable[[int], None]) -> int:
        """Return the address by which a function is called with a count of tokens or rows."""

        def called(rec: int, ctl: int, rank: int, size: int, count: int) -> None:
            if self.failed is None:
                try:
                    function(count)
                except BaseException as error:  # it would be printed, and lost
                    self.failed = error

        entry = _ENTRY(called)
        self._entries.append(entry)
        return int(ctypes.cast(entry, ctypes.c_void_p).value or 0)

    def check(self) -> None:
        """Raise what a call raised since the last time."""
        if self.failed is not None:
            error, self.failed = self.failed, None
            raise error
