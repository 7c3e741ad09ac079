"""The engine of a server, from inside: a process that loads a model and steps for all requests.

`engine_process` starts it. It knows token ids, and of text only what a grammar needs to know. What
goes wrong for one request ends that request; anything else ends the process, which is started anew.
"""

import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from clocher_kernels.errors import ClocherError, NonFinite, UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.loading import Engine, load_engine
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.constraint import Constraint
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.probes import read_gbps, working_set
from clocher_runtime.engine.requests import Token
from clocher_runtime.engine.session import Session
from clocher_runtime.exit_codes import exit_code, told
from clocher_runtime.models.build import PAGE_CELLS
from clocher_runtime.serve.constraints import Grammars
from clocher_runtime.serve.messages import (
    Broken,
    Cancel,
    Failed,
    Guesses,
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
    ToServer,
    Unsure,
    encode,
    receive,
)
from clocher_runtime.serve.settings import engine_config
from clocher_runtime.speculation.speculator import Speculator
from clocher_runtime.text.completion import logprob_of

BEAT_S = 1.0
"""A message is sent at least so often, in seconds, unless a step takes longer."""
_COMPILING_S = 0.002
_OWN = (UsageError, NonFinite)
"""Errors of one request."""


@dataclass(slots=True)
class _Work:
    """A request that is worked on.

    Attributes:
        constraint: of its tokens.
        generation: makes its tokens, or scores its text.
        scores: of each token of the text but the first; None once that is done, or not asked for.
        passes: of its denoised text that its tokens have told of.
        shown: of its denoised text when what is not sure was told.
    """

    request: Submit
    constraint: Constraint | None
    generation: Generation
    scores: list[tuple[float, Top]] | None
    passes: int = 0
    shown: int = 0


@dataclass(slots=True)
class EngineLoop:
    """Does steps for the requests of a server.

    Args:
        session: made with `score_rows`.
        grammars: of its model.
        sock: the other end is the server's.
    """

    session: Session
    grammars: Grammars
    sock: socket.socket
    _reader: Reader = field(default_factory=lambda: Reader(ToEngine))
    _work: dict[int, _Work] = field(default_factory=dict)
    _compiling: dict[int, tuple[Submit, Future[Constraint]]] = field(default_factory=dict)
    _failed: list[Failed] = field(default_factory=list)

    def run(self) -> None:
        """Serve until the server is gone.

        Raises:
            ClocherError: what makes this process useless.
        """
        while True:
            patience = 0.0 if self._work else _COMPILING_S if self._compiling else BEAT_S
            ready, _, _ = select.select([self.sock], [], [], patience)
            cancelled = False
            if ready:
                messages = receive(self.sock, self._reader)
                if messages is None:
                    return
                for message in messages:
                    self._take(message)
                cancelled = any(isinstance(message, Cancel) for message in messages)
            self._take_compiled()
            if self._work:
                self.session.step()
            if self._work or self._failed or cancelled or not ready:
                self.send(self._collect())

    def send(self, message: ToServer) -> None:
        """Tell the server something."""
        self.sock.sendall(encode(message))

    def _take(self, message: Submit | Cancel) -> None:
        if isinstance(message, Cancel):
            self._compiling.pop(message.id, None)
            work = self._work.pop(message.id, None)
            if work is not None:
                work.generation.close()
        elif message.constraint is not None:
            self._compiling[message.id] = message, self.grammars.compiled(message.constraint)
        else:
            self._join(message, None)

    def _take_compiled(self) -> None:
        """Let requests join whose constraints are there."""
        for number, (request, made) in list(self._compiling.items()):
            if made.done():
                del self._compiling[number]
                try:
                    self._join(request, made.result())
                except Exception as error:  # of the library, with a text that somebody sent
                    self._failed.append(_failed(number, UsageError(f"{error!s:.200}")))

    def _join(self, request: Submit, constraint: Constraint | None) -> None:
        try:
            self._work[request.id] = self._begin(request, constraint)
        except _OWN as error:
            self._failed.append(_failed(request.id, error))

    def _begin(self, request: Submit, constraint: Constraint | None) -> _Work:
        """Join the steps with a request: to score its text first, if that is asked for."""
        if request.scores:
            scores: list[tuple[float, Top]] = []
            ids, count = request.ids, max(request.logprobs, 0)

            def take(position: int, logits: np.ndarray) -> None:
                if position + 1 < len(ids):
                    found = logprob_of(logits, ids[position + 1], count)
                    scores.append((found.logprob, found.top))

            work = _Work(request, constraint, self.session.scoring(ids, take), scores)
        else:
            work = _Work(request, constraint, self._generate(request, constraint), None)
        work.generation.begin()
        return work

    def _generate(self, request: Submit, constraint: Constraint | None) -> Generation:
        return self.session.generate(
            [request.ids],
            request.max_new,
            Sampling(**request.sampling),
            frozenset(request.stop_ids),
            logits=request.logprobs >= 0,
            salt=request.salt,
            constraints=[constraint],
            diffusion=request.diffusion,
        )

    def _collect(self) -> Step:
        """Return what the last step made."""
        failed, self._failed = self._failed, []
        step = Step(state_of(self.session), failed=failed)
        for work in list(self._work.values()):
            number = work.request.id
            try:
                tokens = work.generation.poll()
                step.made.extend(_made(work, tokens or ()))
                if work.request.shows and tokens is not None:
                    step.unsure.extend(self._unsure(work, tokens))
                if tokens is None and self._go_on(work, step):
                    work.generation.begin()
                elif tokens is None:
                    del self._work[number]
            except _OWN as error:
                del self._work[number]
                failed.append(_failed(number, error))
        return step

    def _unsure(self, work: _Work, tokens: Sequence[Token]) -> Iterator[Unsure]:
        """Yield what stands behind a text that goes on, if a pass has changed it."""
        snapshot, blocks = work.generation.snapshot(), self.session.model.spec.diffusion
        over = bool(tokens) and tokens[-1].last
        if (
            snapshot is not None
            and blocks is not None
            and snapshot.forwards > work.shown
            and not over
        ):
            work.shown = snapshot.forwards
            ids = [None if token == blocks.mask else token for token in snapshot.open]
            yield Unsure(work.request.id, ids)

    def _go_on(self, work: _Work, step: Step) -> bool:
        """Tell the scores of a text; return whether it is to be gone on with now."""
        if work.scores is None:
            return False
        step.scored.append(Scored(work.request.id, work.scores))
        work.scores = None
        if not work.request.max_new:
            return False
        work.generation = self._generate(work.request, work.constraint)
        return True


def _made(work: _Work, tokens: Sequence[Token]) -> Iterator[Made]:
    """Yield what is told of the tokens of a step."""
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
            cached=0 if request.scores else token.cached,  # scoring put it there, for this request
            guessed=snapshot is None and place > 0,
            passes=passes,
        )


def _failed(number: int, error: BaseException) -> Failed:
    return Failed(number, type(error).__name__, str(error))


def state_of(session: Session) -> State:
    """Return how it goes."""
    scheduler = session.scheduler
    running, waiting = scheduler.counts
    sums, denoising = scheduler.sums, scheduler.forwards.denoising
    return State(
        running=running,
        waiting=waiting,
        pages_used=scheduler.pages.used,
        pages_cached=scheduler.pages.named,
        reused=scheduler.reused,
        preempted=scheduler.preempted,
        decode_steps=sums.decode_steps,
        decode_tokens=sums.decode_tokens,
        decode_ns=sums.decode_ns,
        prompt_steps=sums.prompt_steps,
        prompt_tokens=sums.prompt_tokens,
        prompt_ns=sums.prompt_ns,
        denoised_passes=denoising.forwards,
        denoised_tokens=denoising.tokens,
        guesses=_guesses(scheduler.speculator, scheduler.forwards.decoded),
        changed=session.changed,
    )


def _guesses(speculator: Speculator | None, turns: int) -> Guesses:
    """Return what guessing came to; without it there are only passes."""
    if speculator is None:
        return Guesses(turns)
    counts = speculator.counts
    by_source = {source: (of[0], of[1]) for source, of in counts.by_source.items()}
    return Guesses(counts.forwards, counts.sent, counts.without_draft, counts.not_worth, by_source)


def ready_of(engine: Engine) -> Ready:
    """Return what the server has to know of a loaded engine."""
    session = engine.session
    spec = session.model.spec
    return Ready(
        vocab_size=spec.vocab_size,
        longest=session.longest,
        pages=session.scheduler.pages.total,
        page_cells=PAGE_CELLS,
        kv_bytes=session.kv_cache_bytes,
        weight_bytes=engine.bytes_per_token,
        about={
            "family": spec.family,
            "device": engine.device,
            "backend_reason": engine.backend_reason,
            "isa": engine.isa,
            **engine.numerics,
            "threads": engine.threads,
            "batch": session.config.batch,
            "speculate": session.speculate,
            "diffusion": session.diffusion,
            "attn": session.reading.mode,
            "act_sparsity": session.config.act_sparsity,
            "read_gbps": read_gbps(working_set(session.model), engine.threads, engine.device),
            "hints_ignored": list(engine.hints_ignored),
        },
        blocks=None if session.diffusion == "off" else spec.diffusion,
    )


def main(descriptor: int) -> int:
    """Load what the server wants, serve it, and return the exit code.

    Args:
        descriptor: of the socket that leads to the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when it is over
    sock = socket.socket(fileno=descriptor)
    with Console(name="engine") as console:
        try:
            start = _first(sock)
            config = engine_config(start.sources)
            engine = load_engine(config, console.compiling, console.packing)
            if engine.session.reading.proposal:
                console.note(engine.session.reading.proposal)
            engine.session.warm()
            vocab_size = engine.session.model.spec.vocab_size
            grammars = Grammars(engine.checkpoint.tokenizer_source, vocab_size, start.stop_ids)
            loop = EngineLoop(engine.session, grammars, sock)
            loop.send(ready_of(engine))
            loop.run()
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the server is gone
        except Exception as raised:
            error = told(raised)
            code = int(exit_code(error))
            if not isinstance(error, ClocherError):
                import traceback

                console.note("".join(traceback.format_exception(error)).rstrip())
            sock.sendall(encode(Broken(type(error).__name__, str(error), code)))
            return code
    return 0


def _first(sock: socket.socket) -> Start:
    reader = Reader(ToEngine)
    while True:
        messages = receive(sock, reader)
        if messages is None:
            raise BrokenPipeError
        if messages:
            start = messages[0]
            assert isinstance(start, Start)
            return start


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
