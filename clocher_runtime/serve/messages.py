"""What the server and its engine say to each other: msgpack behind a length, over a socket pair."""

import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from clocher_runtime.config.sources import Sources
from clocher_runtime.models.spec import BlockDiffusion

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20
_READ_BYTES = 1 << 20

Top = tuple[tuple[int, float], ...]
"""Likeliest tokens and the logarithms of their probabilities, likeliest first."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: what to load.

    Attributes:
        sources: what `settings.engine_config` takes; messages name who set what.
        stop_ids: tokens that end an answer, as grammars know them.
    """

    sources: Sources
    stop_ids: tuple[int, ...] = ()


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Go on with a text.

    Attributes:
        id: what the answers to it are called.
        ids: the text.
        max_new: tokens to make; 0 only scores.
        sampling: arguments of `Sampling`.
        stop_ids: tokens that end it.
        logprobs: how many of the likeliest tokens to tell with each token; -1: none, and not its
            probability either.
        scores: whether to tell the same of the tokens of the text.
        salt: find only cached texts of the same salt.
        constraint: what the tokens have to follow, as `GrammarMaker.compile` takes it.
        diffusion: how its blocks are denoised; None: as the session does.
        shows: whether to tell of each pass what stands behind the text and is not sure.
    """

    id: int
    ids: list[int]
    max_new: int
    sampling: Mapping[str, Any]
    stop_ids: tuple[int, ...]
    logprobs: int = -1
    scores: bool = False
    salt: str = ""
    constraint: Mapping[str, Any] | None = None
    diffusion: str | None = None
    shows: bool = False


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody wants the rest of a text."""

    id: int


class Made(msgspec.Struct, array_like=True, frozen=True):
    """A token.

    Attributes:
        request: whose.
        finish: "stop", "length", or "" if more follow.
        logprob: of it at temperature 1; None unless asked for.
        cached: see `Token`.
        guessed: whether the pass that made it made the one before it too; not of denoised texts.
        passes: of a text whose blocks are denoised, since the token before; 0 for others.
    """

    request: int
    token: int
    finish: str = ""
    logprob: float | None = None
    top: Top = ()
    cached: int = 0
    guessed: bool = False
    passes: int = 0


class Unsure(msgspec.Struct, array_like=True, frozen=True):
    """What stands behind a text whose blocks are denoised, after a pass.

    Attributes:
        request: whose.
        ids: tokens that may still change, in their order; None for a mask.
    """

    request: int
    ids: list[int | None]


class Scored(msgspec.Struct, array_like=True, frozen=True):
    """How likely the tokens of a text are.

    Attributes:
        request: whose.
        tokens: for each token but the first: its logprob, and the likeliest tokens in its place.
    """

    request: int
    tokens: list[tuple[float, Top]]


class Failed(msgspec.Struct, array_like=True, frozen=True):
    """A request that could not be done.

    Attributes:
        request: which.
        kind: name of the class of the error.
    """

    request: int
    kind: str
    message: str


class Guesses(msgspec.Struct, array_like=True, frozen=True):
    """What guessing came to since the start: see `speculation.speculator.Counts`."""

    passes: int = 0
    sent: int = 0
    unguessed: int = 0
    unworthy: int = 0
    by_source: Mapping[str, tuple[int, int]] = {}


class State(msgspec.Struct, array_like=True, frozen=True):
    """How it goes in the engine.

    Attributes:
        running: sequences that are worked on.
        waiting: sequences that wait for that.
        pages_used: pages of the KV cache that somebody uses.
        pages_cached: those that nobody uses and that still hold a text.
        reused: tokens of prompts that were found in the cache, since the start.
        preempted: how often a sequence had to give its pages back.
        decode_steps: and the following: see `StepSums`.
        denoised_passes, denoised_tokens: of texts whose blocks are denoised.
        guesses: see there.
        changed: what became of a file of the model while it was in use; "": nothing.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    reused: int = 0
    preempted: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_ns: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    prompt_ns: int = 0
    denoised_passes: int = 0
    denoised_tokens: int = 0
    guesses: Guesses = Guesses()
    changed: str = ""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded.

    Attributes:
        longest: sequence, prompt and output: the context, or what the KV cache holds if less.
        pages: of the KV cache.
        page_cells: tokens of a page.
        kv_bytes: of the KV cache.
        weight_bytes: that one token reads.
        about: what it runs on, for those who look.
        blocks: what the session denoises; None: it does not.
    """

    vocab_size: int
    longest: int
    pages: int
    page_cells: int
    kv_bytes: int
    weight_bytes: int
    about: Mapping[str, Any]
    blocks: BlockDiffusion | None = None


class Step(msgspec.Struct, tag=True, frozen=True):
    """What a step made. It is sent after every step, and each second without any: a heartbeat."""

    state: State
    made: list[Made] = []
    unsure: list[Unsure] = []
    scored: list[Scored] = []
    failed: list[Failed] = []


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The engine ends.

    Attributes:
        kind: name of the class of the error.
        exit_code: what the error means to who started the server.
    """

    kind: str
    message: str
    exit_code: int


ToEngine = Start | Submit | Cancel
ToServer = Ready | Step | Broken

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | ToServer) -> bytes:
    """Return a message behind its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class Reader:
    """Puts messages together from what arrives.

    Args:
        kind: `ToEngine` or `ToServer`.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that some bytes complete.

        Raises:
            ValueError: they are none.
        """
        self._bytes += data
        found = []
        start = 0
        while len(self._bytes) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            size = int.from_bytes(self._bytes[start:body], "little")
            if size > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            if len(self._bytes) < body + size:
                break
            found.append(self._decoder.decode(memoryview(self._bytes)[body : body + size]))
            start = body + size
        del self._bytes[:start]
        return found


def receive(sock: socket.socket, reader: Reader) -> list[Any] | None:
    """Return the messages that have arrived on a socket that has something; None at its end.

    Raises:
        OSError: the socket failed.
        ValueError: what arrived are no messages.
    """
    data = sock.recv(_READ_BYTES)
    return reader.feed(data) if data else None
