"""Who may use a session: one generation at a time, until it is closed.

A session has one set of inputs and one KV cache, so two generations at once would write into each
other. The right to run steps is taken once for each generation; its steps check nothing.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from clocher_kernels.errors import SessionBusy, UsageError

T_co = TypeVar("T_co", covariant=True)

_EXECUTING = "generator already executing"  # what Python says, in a ValueError


class Stream(Iterator[T_co], Generic[T_co]):
    """What a generation yields, made as it is asked for.

    Dropping it, or `close`, ends the generation. Threads may hand it to each other, but only one
    can be waiting for the next item.

    Args:
        make: makes the generator of the items; it is given a reference to this stream.
    """

    def __init__(
        self, make: Callable[["weakref.ref[Stream[T_co]]"], Generator[T_co, None, None]]
    ) -> None:
        self._generator = make(weakref.ref(self))
        self._cut_off = False

    def __next__(self) -> T_co:
        """Return the next item.

        Raises:
            SessionBusy: another thread is waiting for it.
            UsageError: the session was closed before the generation had ended.
        """
        try:
            return next(self._generator)
        except StopIteration:
            if self._cut_off:
                raise _closed("this generation cannot go on") from None
            raise
        except ValueError as error:
            raise _explained(error) from None

    def close(self) -> None:
        """End the generation.

        Raises:
            SessionBusy: a thread is waiting for the next item.
        """
        try:
            self._generator.close()
        except ValueError as error:
            raise _explained(error) from None

    def cut_off(self) -> None:
        """End the generation, and let whoever asks for more know that it is not complete.

        Raises:
            SessionBusy: a thread is waiting for the next item.
        """
        self.close()
        self._cut_off = True


class Turn:
    """The right to run steps of a session."""

    def __init__(self) -> None:
        self._taken = threading.Lock()  # closing takes it for good
        self._stream: weakref.ref[Stream[Any]] | None = None
        self._is_closed = False

    @contextmanager
    def taken(
        self, purpose: str, stream: "weakref.ref[Stream[Any]] | None" = None
    ) -> Iterator[None]:
        """Hold the right while the context is open.

        Args:
            purpose: what it is for, as the errors name it.
            stream: what can be closed to have it back.

        Raises:
            SessionBusy: somebody has it.
            UsageError: the session is closed.
        """
        if not self._taken.acquire(blocking=False):
            self.refuse_closed(purpose)
            raise SessionBusy(
                f"{purpose}: a generation is under way on this session, which does one at a time; "
                "finish or close that one first, or load a second session"
            )
        self._stream = stream
        try:
            yield
        finally:
            self._stream = None
            self._taken.release()

    def refuse_closed(self, purpose: str) -> None:
        """Fail if the session is closed.

        Raises:
            UsageError: it is.
        """
        if self._is_closed:
            raise _closed(purpose)

    def end(self) -> bool:
        """Cut a suspended generation off, and take the right for good.

        Returns:
            Whether this call did it, and no earlier one.

        Raises:
            SessionBusy: somebody is using it.
        """
        if self._is_closed:
            return False
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            stream.cut_off()
        if not self._taken.acquire(blocking=False):
            raise SessionBusy("close: a step of this session is running; wait until it has ended")
        self._is_closed = True
        return True


def _closed(purpose: str) -> UsageError:
    return UsageError(f"{purpose}: the session is closed; load the model again")


def _explained(error: ValueError) -> Exception:
    """Return the error to raise for one that came out of a generator."""
    if str(error) != _EXECUTING:
        return error
    return SessionBusy(
        "another thread is waiting for the next item of this generation; let one thread take its "
        "items"
    )
