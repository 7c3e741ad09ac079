"""The server of Clocher in front of a scripted engine.

Routes, checks, headers and events are those of `clocher-serve`; what the model says is made up.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette

from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.commands import ServeConfig
from clocher_runtime.serve.app import Server
from clocher_runtime.serve.engine_process import EngineProcess, Job
from clocher_runtime.serve.errors import ApiError
from clocher_runtime.serve.messages import Made, Ready, Submit, Unsure
from clocher_runtime.serve.prompts import PromptRoom
from clocher_runtime.text.answers import Delta, DeltaKind

ABOUT = {"device": "cpu", "precision": "int4", "threads": 8, "family": "qwen3", "read_gbps": 40.0}


@dataclass
class Script:
    """What the engine does.

    Attributes:
        steps: what each token says.
        token_s: time of a token.
        tokens: made in each step.
        refusal: what every request is answered with.
        dies_after: tokens after which the engine dies with this error.
        unsure: what stands behind the text after so many tokens: ids, None for a mask.
        asked: messages and tools of the requests so far.
        submitted: the first sequence of each request.
        open: sequences that nobody cancelled.
    """

    steps: Sequence[Sequence[Delta]] = ((Delta("content", "ok"),),)
    token_s: float = 0.0
    tokens: int = 1
    refusal: ApiError | None = None
    dies_after: tuple[int, ApiError] | None = None
    unsure: Mapping[int, list[int | None]] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    submitted: list[Submit] = field(default_factory=list)
    open: set[int] = field(default_factory=set)


def words(
    text: str, kind: DeltaKind = "content", index: int = 0, piece: int = 4
) -> list[list[Delta]]:
    """Return a text as tokens of so many characters."""
    starts = range(0, len(text), piece)
    return [[Delta(kind, text[at : at + piece], index)] for at in starts]


class ScriptedPrompts(PromptRoom):
    """Reads answers from the script of an engine."""

    def __init__(self, checkpoint: Checkpoint, engine: "ScriptedEngine") -> None:
        super().__init__(checkpoint)
        self._engine = engine
        self.style = "plain"

    async def chat(self, asked: Any, context: int) -> Any:
        """Note what is asked."""
        said = {"messages": asked.dialogue(), "tools": asked.functions}
        self._engine.script.asked.append(said)
        return list(range(1, 40)), ""

    def reader(self, tools: bool, tail: str, ends: Any) -> Any:
        """Read the script."""
        return _Reader(self._engine.script.steps)


class _Reader:
    def __init__(self, steps: Sequence[Sequence[Delta]]) -> None:
        self._steps = iter(steps)

    def push(self, token: int) -> list[Delta]:
        """Return what the next token says."""
        return list(next(self._steps, ()))

    def finish(self) -> list[Delta]:
        """Return nothing."""
        return []


class ScriptedEngine(EngineProcess):
    """Makes as many tokens as the script has."""

    def __init__(self, name: str) -> None:
        super().__init__(ServeConfig(queue=60), (), print, name)
        self.script, self.status, self._next = Script(), "ready", 0
        self.ready = Ready(4096, 32768, 8, 64, 1, 1_000_000_000, ABOUT)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_stuck(self) -> bool:
        """Never."""
        return False

    def reserve(self, count: int) -> Any:
        """Refuse if the script says so."""
        if self.script.refusal is not None and count:
            raise self.script.refusal
        return super().reserve(count)

    def submit(self, asks: Sequence[Submit]) -> Job:
        """Begin to answer."""
        number = self._next
        self._next += 1
        self.script.open.add(number)
        self.script.submitted.append(asks[0])
        job = Job([number], lambda number, how: self.script.open.discard(number))
        task = asyncio.ensure_future(self._make(number, job, asks[0].max_new))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _make(self, number: int, job: Job, most: int) -> None:
        script, steps = self.script, self.script.steps
        count, now = min(len(steps), most), asyncio.get_running_loop().time()
        for at in range(count):
            if script.dies_after is not None and at == script.dies_after[0]:
                return job.fail(script.dies_after[1])
            if number not in script.open:
                return None
            last = at == count - 1
            finish = ("length" if count < len(steps) else "stop") * last
            job.put(number, Made(number, 65, finish), last, now)
            if (unsure := script.unsure.get(at + 1)) is not None:
                job.put(number, Unsure(number, unsure), False, now)
            if at % script.tokens == 0:
                await asyncio.sleep(script.token_s)
        script.open.discard(number)
        return None


@contextlib.contextmanager
def scripted_app(
    *, sampling: Mapping[str, float] | None = None, **config: Any
) -> Iterator[tuple[Starlette, ScriptedEngine]]:
    """Yield the application of a server, and its engine."""
    name = "scripted-8b"
    checkpoint = open_checkpoint(embedded_model())
    engine = ScriptedEngine(name)
    prompts = ScriptedPrompts(checkpoint, engine)
    about = (engine, prompts, name, 0, True, sampling or {})
    server = Server(ServeConfig(**config), *about)
    try:
        yield server.app(), engine
    finally:
        prompts.close()


@contextlib.contextmanager
def scripted_server(**config: Any) -> Iterator[tuple[str, ScriptedEngine]]:
    """Yield the address of a server that runs in a thread, and its engine."""
    with socket.socket() as listening, scripted_app(**config) as (app, engine):
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        http = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=http.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine
        finally:
            http.should_exit = True
            thread.join()
