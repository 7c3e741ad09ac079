"""The stub: stands in for a model, its token ids depend on the prompt only. For tests of tools."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import NoReturn

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.sequences import Token
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.text.tokenizer import TextStream

VOCAB_SIZE = 32768


def stub_id(prompt: Sequence[int], index: int) -> int:
    """Return token `index` of the continuation of a prompt.

    It is the first four bytes, big-endian, of SHA-256 over the ASCII text "<ids>:<index>" with
    the ids in decimal and joined by commas, modulo 32768.
    """
    text = f"{','.join(map(str, prompt))}:{index}"
    return int.from_bytes(sha256(text.encode("ascii")).digest()[:4], "big") % VOCAB_SIZE


class StubTokenizer:
    """Prompts are their UTF-8 bytes; ids are written out as numbers."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, room: int | None = None) -> list[int]:
        """Return the UTF-8 bytes of a text.

        Raises:
            UsageError: the text is not valid Unicode, or has more characters than `room`.
        """
        if room is not None and len(text) > room:
            raise UsageError(f"{len(text)} characters; at most {room} are taken: shorten it")
        try:
            return list(text.encode("utf-8"))
        except UnicodeError:
            raise UsageError("not valid Unicode text; give it in UTF-8") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids in angle brackets."""
        return "".join(f"<{token}>" for token in ids)

    def stream(self) -> TextStream:
        """Return a decoder that takes one id at a time."""
        return TextStream(self.decode)


class StubSession:
    """Generates like a Session, without a model. No token ends a sequence.

    Attributes:
        kv_hits: 0; there is no cache.
        kv_misses: 0.
    """

    context = 0
    kv_hits = 0
    kv_misses = 0

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def work_touch(self, bytes_per_token: int, stride: int) -> None:
        """There are no weights to touch."""

    def warm(self) -> None:
        """There is nothing to warm up."""

    def close(self) -> None:
        """There is nothing to release."""

    def check(self, prompt: Sequence[int]) -> None:
        """Check that a prompt can be generated from.

        Raises:
            UsageError: it is empty.
        """
        if not prompt:
            raise UsageError("no tokens; give it at least one")

    def step_logits(self, token: Token) -> NoReturn:
        """Refuse: there are no logits.

        Raises:
            UsageError: always.
        """
        raise UsageError("the stub has no logits; leave out --trace-topk")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        window: TimedWindow | None = None,
        after_token: Callable[[int], None] | None = None,
    ) -> Iterator[Token]:
        """Yield the tokens of all prompts side by side; see `Session.generate`."""
        window = window if window is not None else TimedWindow("stub")
        for index in range(max_new):
            count = len(prompts) if index else sum(map(len, prompts))
            with window.span("decode" if index else "prefill", count):
                ids = [stub_id(prompt, index) for prompt in prompts]
                if after_token is not None:
                    after_token(len(ids))
            for sequence, token in enumerate(ids):
                yield Token(sequence, token, index == max_new - 1)
