"""A call's tokens, as its caller takes them."""

import threading
from collections.abc import Callable, Iterator

from clocher_runtime.engine.requests import Glance, Mailbox, Token


class Generation(Iterator[Token]):
    """The tokens of a call as they are asked for. Threads may share it.

    Dropping it, or `close`, ends the generation.

    Args:
        begin: checks the call and puts its requests to the others; returns their mailbox.
        serve: does steps, or waits for them, until there is something in a mailbox.
        let_go: takes note that nobody reads a mailbox any more.
        end: called once after the last token; raises if what was made is not to be trusted.
    """

    def __init__(
        self,
        begin: Callable[[], Mailbox],
        serve: Callable[[Mailbox], None],
        let_go: Callable[[Mailbox], None],
        end: Callable[[], None],
    ) -> None:
        self._begin, self._serve, self._let_go, self._end = begin, serve, let_go, end
        self._box: Mailbox | None = None
        self._is_over = False
        self._beginning = threading.Lock()

    def __next__(self) -> Token:
        """Return the next token.

        Raises:
            UsageError: the session was closed before the generation had ended.
            ClocherError: see `Session.generate`.
        """
        if self._is_over:
            raise StopIteration
        box = self.begin()
        if self._is_over:
            raise StopIteration
        while True:
            self._serve(box)
            try:
                return box.tokens.popleft()
            except IndexError:  # it ended, or another thread took the token
                if box.is_over:
                    break
        if box.error is not None and not box.left:
            raise box.error
        self._is_over = True
        if not box.left:
            self._end()
        raise StopIteration

    def poll(self) -> list[Token] | None:
        """Return the tokens that are made and not taken yet; None after the last one.

        It does no step: for who does the steps of a session with `Session.step`.

        Raises:
            ClocherError: what ended the generation early; see `Session.generate`.
        """
        box = self.begin()
        tokens = [box.tokens.popleft() for _ in range(len(box.tokens))]
        if tokens or not box.is_over:
            return tokens
        if self._is_over:
            return None
        self._is_over = True
        if box.error is not None and not box.left:
            raise box.error
        self._end()
        return None

    def glance(self, sequence: int = 0) -> Glance | None:
        """Return where a text stands after its last pass; None: no blocks of it are denoised."""
        return None if self._box is None else self._box.glances.get(sequence)

    def begin(self) -> Mailbox:
        """Join the steps of the session now, and not when the first token is asked for.

        Raises:
            UsageError: see `Session.generate`.
        """
        with self._beginning:
            if self._box is None:
                try:
                    self._box = self._begin()
                except BaseException:
                    self._is_over = True
                    raise
                if self._is_over:  # closed while it waited to join
                    self._let_go(self._box)
            return self._box

    def close(self) -> None:
        """End the generation."""
        self._is_over = True
        if self._box is not None:
            self._box.tokens.clear()
            self._let_go(self._box)

    def __del__(self) -> None:
        """End the generation that nobody holds any more."""
        if getattr(self, "_box", None) is not None:
            self.close()
