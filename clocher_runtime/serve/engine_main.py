"""The engine process, inside: loads a model and steps for all requests of a server.

An error of one request ends that request; any other error ends the process, which is restarted.
"""

import json
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from clocher_kernels.errors import ClocherError, ConstraintFailed, NonFinite, UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.loading import Engine, load_engine, numerics
from clocher_runtime.engine.arguments import Constraint, Sampling
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.probes import read_gbps, working_set
from clocher_runtime.engine.requests import Token
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import NS_PER_S
from clocher_runtime.engine.topology import threads_of
from clocher_runtime.exit_codes import as_refusal, exit_code
from clocher_runtime.models.build import PAGE_CELLS
from clocher_runtime.serve.messages import (
    Broken,
    Cancel,
    Failed,
    Made,
    Reader,
    Ready,
    Scored,
    Start,
    State,
    Step,
    Submit,
    ToEngine,
    Top,
    Unsure,
    encode,
)
from clocher_runtime.text.completion import logprob_of
from clocher_runtime.text.grammar import Grammars

BEAT_S = 1.0
"""Seconds between heartbeats, unless a step takes longer."""
GATHER_NS, GATHER_WHOLE_NS = NS_PER_S // 60, NS_PER_S // 4
"""Tokens of shorter steps are sent together: a message costs, and no screen shows more. The second
is for whole responses: a process that wakes takes a core from the step."""
_COMPILING_S = 0.002
_OF_REQUEST = (UsageError, NonFinite, ConstraintFailed)
"""Errors that end one request only."""


@dataclass(slots=True)
class _Work:
    """A request, with its generation or the scoring of its prompt."""

    request: Submit
    constraint: Constraint | None
    generation: Generation
    scores: list[tuple[float, Top]] | None  # of the prompt; None once reported, or not wanted
    pooled: np.ndarray | None = None  # the sum of the hidden states of an embedding, [D]
    passes: int = 0  # forwards of its denoised sequence reported with its tokens
    shown: int = 0  # the same, at the last report of uncommitted tokens
    begun: bool = False  # it has a token


@dataclass(slots=True)
class EngineLoop:
    """Steps for the requests of a server, over `_sock`."""

    _session: Session
    _grammars: Grammars
    _sock: socket.socket
    _reader: Reader
    _work: dict[int, _Work] = field(default_factory=dict)
    _compiling: dict[int, tuple[Submit, Future[Constraint]]] = field(default_factory=dict)
    _events: list[Made | Unsure | Scored | Failed] = field(default_factory=list)
    _due: int = 0  # when, in ns, events are sent; 0: now, for a first or last one

    def run(self) -> NoReturn:
        """Serve until an error ends this process, as ConnectionResetError: the server is gone."""
        while True:
            patience = 0.0 if self._work else _COMPILING_S if self._compiling else BEAT_S
            ready, _, _ = select.select([self._sock], [], [], patience)
            messages = self._reader.receive(self._sock) if ready else []
            for message in messages:
                self._take(message)
            self._take_compiled()
            if self._work:
                self._session.step()
            self._collect()
            now = self._session.scheduler.times.now()
            if now >= self._due and (self._work or not self._due or not ready):
                step = Step(state_of(self._session), self._events)
                self._sock.sendall(encode(step))
                streams = not all(work.request.whole for work in self._work.values())
                self._events, self._due = [], now + (GATHER_NS if streams else GATHER_WHOLE_NS)

    def _take(self, message: Submit | Cancel) -> None:
        if isinstance(message, Cancel):
            self._due = 0
            self._compiling.pop(message.id, None)
            if work := self._work.pop(message.id, None):
                work.generation.close()
        elif message.constraint:
            spec = json.loads(message.constraint)
            self._compiling[message.id] = message, self._grammars.compiled(spec)
        else:
            self._join(message, None)

    def _take_compiled(self) -> None:
        for number, (request, made) in list(self._compiling.items()):
            if made.done():
                del self._compiling[number]
                try:
                    self._join(request, made.result())
                except Exception as error:  # llguidance's, about client input
                    self._fail(number, UsageError(f"{error!s:.200}"))

    def _fail(self, number: int, error: BaseException) -> None:
        self._events.append(Failed(number, type(error).__name__, str(error)))
        self._due = 0

    def _join(self, request: Submit, constraint: Constraint | None) -> None:
        scores: list[tuple[float, Top]] | None = [] if request.pooling or request.scores else None
        pooled = np.zeros(self._session.model.spec.hidden_size) if request.pooling else None
        try:
            if pooled is not None:
                generation = self._pooling(request, pooled)
            elif scores is not None:
                generation = self._scoring(request, scores)
            else:
                generation = self._generate(request, constraint)
            generation.begin()
        except _OF_REQUEST as error:
            self._fail(request.id, error)
        else:
            self._work[request.id] = _Work(request, constraint, generation, scores, pooled)

    def _scoring(self, request: Submit, scores: list[tuple[float, Top]]) -> Generation:
        ids, count = request.ids, max(request.logprobs, 0)

        def take(position: int, logits: np.ndarray) -> None:
            if position + 1 < len(ids):
                found = logprob_of(logits, ids[position + 1], count)
                scores.append((found.logprob, found.top))

        return self._session.scoring(ids, take, request.adapter)

    def _pooling(self, request: Submit, pooled: np.ndarray) -> Generation:
        def take(position: int, state: np.ndarray) -> None:
            if request.pooling != "cls" or position == 0:
                np.add(pooled, state, out=pooled)

        last_only, adapter = request.pooling == "last", request.adapter
        return self._session.states(request.ids, take, last_only, adapter)

    def _generate(self, request: Submit, constraint: Constraint | None) -> Generation:
        return self._session.generate(
            [request.ids],
            request.max_new,
            Sampling(**request.sampling),
            frozenset(request.stop_ids),
            logits=request.logprobs >= 0,
            salt=request.salt,
            adapter=request.adapter,
            constraints=[constraint],
            diffusion=request.diffusion,
        )

    def _collect(self) -> None:
        for number, work in list(self._work.items()):
            try:
                tokens = work.generation.poll()
                if tokens and (not work.begun or tokens[-1].last):
                    work.begun, self._due = True, 0
                self._events += _made(work, tokens or ())
                if work.request.shows and tokens is not None:
                    self._events += self._unsure(work, tokens)
                if tokens is None and not self._goes_on(work):
                    del self._work[number]
            except _OF_REQUEST as error:
                del self._work[number]
                self._fail(number, error)

    def _unsure(self, work: _Work, tokens: Sequence[Token]) -> Iterator[Unsure]:
        snapshot, blocks = work.generation.snapshot(), self._session.model.spec.diffusion
        if snapshot is None or blocks is None or (tokens and tokens[-1].last):
            return
        if snapshot.forwards > work.shown:
            work.shown = snapshot.forwards
            ids = [None if token == blocks.mask else token for token in snapshot.open]
            yield Unsure(work.request.id, ids)

    def _goes_on(self, work: _Work) -> bool:
        """Report the scores of a prompt; return whether generation follows."""
        if work.scores is None:
            return False
        pooled = b"" if work.pooled is None else work.pooled.astype("<f4").tobytes()
        self._events.append(Scored(work.request.id, work.scores, pooled))
        work.scores, self._due = None, 0
        if not work.request.max_new:
            return False
        work.generation = self._generate(work.request, work.constraint)
        work.generation.begin()
        return True


def _made(work: _Work, tokens: Sequence[Token]) -> Iterator[Made]:
    request, snapshot = work.request, work.generation.snapshot()
    for place, token in enumerate(tokens):
        found = None
        if token.logits is not None:
            found = logprob_of(token.logits, token.id, request.logprobs)
        passes = 0
        if snapshot is not None:
            passes, work.passes = snapshot.forwards - work.passes, snapshot.forwards
        yield Made(
            request.id,
            token.id,
            token.finish,
            logprob=found and found.logprob,
            top=found.top if found else (),
            cached=0 if request.scores else token.cached,  # this request's scoring cached it
            guessed=snapshot is None and place > 0,
            passes=passes,
        )


def state_of(session: Session) -> State:
    """Return the gauges and counters of a session."""
    scheduler = session.scheduler
    sums, forwards = scheduler.sums, scheduler.forwards
    denoising, counts = forwards.denoising, forwards.counts
    return State(
        running=scheduler.counts[0],
        pages_used=scheduler.pages.used,
        pages_cached=scheduler.pages.named,
        counters={
            "prompt_tokens": sums.prompt_tokens,
            "decode_tokens": sums.decode_tokens,
            "prefix_cache_hits": scheduler.reused,
            "prefix_cache_queries": scheduler.reused + sums.prompt_tokens,
            "num_preemptions": scheduler.preempted,
            "decode_steps": sums.decode_steps,
            "decode_step_seconds": sums.decode_ns / NS_PER_S,
            "prompt_steps": sums.prompt_steps,
            "prompt_step_seconds": sums.prompt_ns / NS_PER_S,
            "diffusion_passes": denoising.forwards,
            "diffusion_tokens": denoising.tokens,
            "spec_passes": counts.forwards,
        },
        drafted={name: (n[0], n[1]) for name, n in counts.by_source.items()},
        decisions=counts.decisions,
        changed=session.changed,
    )


def ready_of(engine: Engine) -> Ready:
    """Return what the server needs to know of a loaded engine."""
    session, config = engine.session, engine.loaded.config
    spec, threads = session.model.spec, threads_of(config)
    about = {
        "family": spec.family,
        "device": config.backend,
        "backend_reason": engine.loaded.reason,
        "isa": session.isa,
        "threads": threads,
        **numerics(session),
        "batch": session.config.batch,
        "speculate": session.speculate,
        "diffusion": session.diffusion,
        "act_sparsity": session.config.act_sparsity,
        "attn": session.config.attn,
        "read_gbps": read_gbps(working_set(session.model), threads, config.backend),
        "hints_ignored": list(engine.hints_ignored),
    }
    return Ready(
        vocab_size=spec.vocab_size,
        longest=session.longest,
        pages=session.scheduler.pages.total,
        page_cells=PAGE_CELLS,
        kv_bytes=session.kv_cache_bytes,
        weight_bytes=session.model.bytes_per_token,
        about=about,
        blocks=None if session.diffusion == "off" else spec.diffusion,
    )


def main(descriptor: int) -> int:
    """Load and serve a model over a socket; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    sock = socket.socket(fileno=descriptor)
    with Console(name="engine") as console:
        try:
            reader = Reader(ToEngine)
            while not (first := reader.receive(sock)):
                pass
            start: Start = first[0]
            engine = load_engine(start.config, console.compiling, console.packing)
            model = engine.loaded.model
            grammars = Grammars(model.checkpoint, model.spec.vocab_size, start.stop_ids)
            sock.sendall(encode(ready_of(engine)))
            EngineLoop(engine.session, grammars, sock, reader).run()
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the server is gone
        except Exception as raised:
            error = as_refusal(raised)
            code = int(exit_code(error))
            if not isinstance(error, ClocherError):
                console.ended(raised)
            sock.sendall(encode(Broken(type(error).__name__, str(error), code)))
            return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
