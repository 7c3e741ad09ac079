"""Messages between the server and its engine: msgpack behind a length, over a socket pair."""

import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from clocher_runtime.config.commands import ServeConfig
from clocher_runtime.models.spec import BlockDiffusion

HEADER_BYTES = 4

Top = tuple[tuple[int, float], ...]
"""Top tokens with log probabilities, most likely first."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: what to load, and the tokens that end an answer (for grammars)."""

    config: ServeConfig
    stop_ids: tuple[int, ...] = ()


class Submit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Generate from a prompt."""

    id: int = 0  # id of its results
    ids: list[int]  # the prompt
    max_new: int  # tokens to generate; 0 only scores or embeds the prompt
    sampling: Mapping[str, Any]  # arguments of `Sampling`
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1  # number of top tokens to report per token; -1: no log probabilities
    scores: bool = False  # whether to report them for prompt tokens too
    pooling: str = ""  # "mean", "cls" or "last": embed the prompt
    adapter: str = ""  # name of a LoRA adapter; "": the base
    salt: str = ""  # cached prefixes are shared only within the same salt
    constraint: str = ""  # what `GrammarMaker.compile` takes, as JSON: its numbers may be large
    diffusion: str | None = None  # how blocks are denoised; None: the session's way
    shows: bool = False  # whether to report the uncommitted tokens of a block after each forward
    whole: bool = False  # whether nothing waits for a token before the last


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Cancel a sequence."""

    id: int


class Made(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A token of a request."""

    request: int
    token: int
    finish: str = ""  # "stop", "length", or "" if more follow
    logprob: float | None = None  # at temperature 1
    top: Top = ()
    cached: int = 0  # cached tokens of the prompt
    guessed: bool = False  # from the same forward as the previous token
    passes: int = 0  # forwards since the previous token, if blocks are denoised


class Unsure(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The tokens of an uncommitted block after a forward; None is a mask."""

    request: int
    ids: list[int | None]


class Scored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The log probability of each prompt token but the first, and the top tokens there.

    `pooled`: the embedding instead, [D] little-endian fp32, not normalised.
    """

    request: int
    tokens: list[tuple[float, Top]]
    pooled: bytes = b""


class Failed(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A failed request; `kind` is the error class."""

    request: int
    kind: str
    message: str


class State(msgspec.Struct, array_like=True, frozen=True):
    """Engine state: gauges, and counters since the start by their names in /metrics."""

    running: int = 0  # sequences
    pages_used: int = 0  # of the KV cache
    pages_cached: int = 0  # free pages that hold a cached prefix
    counters: Mapping[str, float] = {}
    drafted: Mapping[str, tuple[int, int]] = {}  # drafter -> draft tokens verified, accepted
    decisions: Mapping[str, int] = {}  # decision -> forwards that could verify a draft
    changed: str = ""  # damage to a model file in use


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    vocab_size: int
    longest: int  # prompt and output: the context, or the KV cache if smaller
    pages: int  # of the KV cache
    page_cells: int  # tokens of a page
    kv_bytes: int
    weight_bytes: int  # weight bytes read per token
    about: Mapping[str, Any]  # device
    blocks: BlockDiffusion | None = None  # denoising of the session


class Step(msgspec.Struct, tag=True, frozen=True):
    """The results of one step or several short ones, or a heartbeat: each second without any."""

    state: State
    events: list[Made | Unsure | Scored | Failed]


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The engine ends; `exit_code` becomes the server's."""

    kind: str
    message: str
    exit_code: int


ToEngine = Start | Submit | Cancel
ToServer = Ready | Step | Broken
_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # paths


def encode(message: ToEngine | ToServer) -> bytes:
    """Return a message with its length prefix."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class Reader:
    """Assembles messages from bytes; `kind` is `ToEngine` or `ToServer`."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=lambda made, text: made(text))
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the completed messages; raises ValueError if malformed."""
        self._bytes += data
        found = []
        start = 0
        while len(self._bytes) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            size = int.from_bytes(self._bytes[start:body], "little")
            if len(self._bytes) < body + size:
                break
            found.append(self._decoder.decode(memoryview(self._bytes)[body : body + size]))
            start = body + size
        del self._bytes[:start]
        return found

    def receive(self, sock: socket.socket) -> list[Any]:
        """Return the messages on a readable socket; raises ConnectionResetError at its end."""
        if not (data := sock.recv(1 << 20)):
            raise ConnectionResetError
        return self.feed(data)
