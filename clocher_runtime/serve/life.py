"""The life of a server: listen, load, serve, drain, end; the timeouts of its connections.

Sources: RFC 9110, 10.1.1 and 15.2.1; RFC 9112, 9.6.
"""

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from clocher_kernels.errors import DeviceError, UsageError, counted
from clocher_runtime.checkpoints.hf.hub import repository_of
from clocher_runtime.command.loading import adapters_of, choose_model, converses, defaults_of
from clocher_runtime.config.commands import ServeConfig, is_local
from clocher_runtime.config.engine import NUMERICS
from clocher_runtime.engine.arguments import sampling_note
from clocher_runtime.exit_codes import end_at_once
from clocher_runtime.serve.answers import now_s
from clocher_runtime.serve.app import Server
from clocher_runtime.serve.engine_process import EngineProcess
from clocher_runtime.serve.errors import invalid, to_json
from clocher_runtime.serve.messages import Ready
from clocher_runtime.serve.prompts import PromptRoom

HEADER_S = 20.0
"""Seconds for request headers, from the connection on; for later requests from the first byte."""

BODY_S = 60.0

OUTPUT_S = 20.0
"""Seconds in which a client has to read some of the pending output."""

MAX_HEADER_BYTES = 32 << 10
KEEP_ALIVE_S = 75
FLUSH_S = 2
"""Seconds to flush the last events of streams that are cut off at shutdown."""
MAX_DESCRIPTORS, _OWN_DESCRIPTORS = 8192, 40
_BACKLOG = 128
_MIB = 1 << 20
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Note = Callable[[str], None]


def _descriptors() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class Connection(H11Protocol):
    """An HTTP connection with timeouts, of a limited number."""

    most = 1024
    """Open connections, kept below the descriptor limit so that the engine can still start."""
    _stage: tuple[object, ...] = ()
    _since = inf
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timeout; above `most`, close an idle connection."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            ours = (each for each in self.connections if isinstance(each, Connection))
            gone = next((each for each in ours if each._has_idled), self)
            self.connections.discard(gone)  # before the loop has closed it
            gone.transport.abort()

    def look(self, now: float) -> None:
        """Close the connection if it has timed out."""
        stage, limit = self._waits_for()
        if stage != self._stage:
            self._stage, self._since = stage, now
        if now - self._since >= limit or (self._half_closed and self._is_reset()):
            self.transport.abort()

    def _waits_for(self) -> tuple[tuple[object, ...], float]:
        """Return the state that has to change, and within how many seconds."""
        if unsent := self.transport.get_write_buffer_size():
            return ("output", unsent), OUTPUT_S
        if self.conn.their_state is h11.SEND_BODY:
            return ("body", self.cycle), BODY_S
        if self._answers:
            return ("answer",), inf
        begun = self.cycle is None or self.conn.trailing_data[0]
        # uvicorn times out connections without a request.
        return ("headers" if begun else "idle", self.cycle), HEADER_S if begun else inf

    @property
    def _has_idled(self) -> bool:
        """Whether nothing has arrived since the last check and no answer is pending."""
        stage, _ = self._waits_for()
        return stage == self._stage and stage[0] != "output" and not self._answers

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep answering a half-closed client; return whether to keep the connection.

        A closed socket looks the same until something is sent: a 100 before an answer, which
        clients skip, or a comment of `EventStream`.
        """
        if not self._answers or self.cycle.more_body:
            return False
        self._half_closed = True
        if self.cycle.response_started:
            self.cycle.message_event.set()
        elif self.scope["http_version"] != "1.0":
            reply = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(reply))
        return not self._is_reset()

    def _is_reset(self) -> bool:
        found: socket.socket = self.transport.get_extra_info("socket")
        return found.fileno() < 0 or found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the shape of other errors."""
        message = "The request is not valid HTTP; expected HTTP/1.1, without TLS"
        body = to_json(invalid(message).body)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        about = h11.Response(status_code=400, headers=[*headers.items(), ("connection", "close")])
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun
            for event in (about, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Start the next request, if there is one."""
        super().on_response_complete()
        if self._half_closed and not self._answers:
            self.transport.close()


class _HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers; checks connection timeouts."""

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.look(now)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Life:
    """A server from start to end; `announce` gets the facts of one that is ready."""

    def __init__(
        self, config: ServeConfig, note: Note, announce: Callable[[dict[str, Any]], None]
    ) -> None:
        self._config, self._note, self._announce = config, note, announce
        self._is_ending = False
        self._noted: set[str] = set()

    async def run(self) -> int:
        """Serve until a signal or permanent failure; return the exit code. Raises ClocherError."""
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its warnings quote requests
        # The interpreter restores the default at exit: a late Ctrl-C would change the exit code.
        atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS])
        server = await assemble(self._config, self._note)
        try:
            return await self._serve(server, _listen(self._config.host, self._config.port))
        finally:
            server.prompts.close()

    async def _serve(self, server: Server, sock: socket.socket) -> int:
        room = _descriptors() - _OWN_DESCRIPTORS
        # asyncio accepts up to this many at once, before any can be refused.
        backlog = max(4, min(_BACKLOG, room // 2))
        Connection.most = max(4, room - backlog)
        http = _HttpServer(
            uvicorn.Config(
                server.app(),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FLUSH_S,
                backlog=backlog,
            )
        )
        engine, loop = server.engine, asyncio.get_running_loop()
        loop.set_exception_handler(self._unexpected)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, engine.changed)
        keeping = asyncio.create_task(engine.run())
        keeping.add_done_callback(lambda _: engine.changed.set())
        telling = asyncio.create_task(self._tell(engine, sock, server.name))
        draining = asyncio.create_task(self._drain(engine, http, keeping))
        try:
            await http.serve([sock])
            if keeping.done():
                keeping.result()  # a bug here, not a failure of the engine
        finally:
            _end_at_next_signal(loop)
            for task in (telling, draining, keeping):
                task.cancel()
            await asyncio.gather(telling, draining, keeping, return_exceptions=True)
        return engine.exit_code

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = f"{context['message']} ({type(context.get('exception')).__name__})"
        if message not in self._noted:
            self._noted.add(message)
            self._note(f"outside of any request: {message}")

    def _signalled(self, changed: asyncio.Event) -> None:
        _end_at_next_signal(asyncio.get_running_loop())
        self._note("finishing what runs, taking no more; a second signal ends at once")
        self._is_ending = True
        changed.set()

    async def _drain(
        self, engine: EngineProcess, http: uvicorn.Server, keeping: asyncio.Task[None]
    ) -> None:
        loop = asyncio.get_running_loop()
        while not (self._is_ending or engine.status == "failed" or keeping.done()):
            await engine.changed.wait()
            engine.changed.clear()
        if engine.status != "failed":
            engine.drain()
            end = loop.time() + self._config.drain
            while engine.sequences and loop.time() < end:
                await asyncio.sleep(0.02)
            if engine.sequences:
                left = counted(engine.sequences, "sequence")
                self._note(f"{left} did not end in {self._config.drain:g} s")
            engine.end_all("draining")
        http.should_exit = True

    async def _tell(self, engine: EngineProcess, sock: socket.socket, name: str) -> None:
        while engine.ready is None:
            await asyncio.sleep(0.02)
        host, port = sock.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        for line in facts(engine.ready, self._config):
            self._note(line)
        reach = "this machine only" if is_local(host) else "clients that have the key"
        self._note(f"listening on {url} for {reach}")
        about = {"url": url, "model": name, "pid": os.getpid(), "engine_pid": engine.pid}
        self._announce({"event": "ready", **about})


def _end_at_next_signal(loop: asyncio.AbstractEventLoop) -> None:
    """End the process at the next signal, even if the loop no longer runs."""
    for number in _SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, end_at_once)


async def assemble(config: ServeConfig, note: Note) -> Server:
    """Return a server whose engine starts with `engine.run()`; raises ClocherError."""
    choice = choose_model(config)
    checkpoint, _ = choice.open_for(config)
    prompts = await asyncio.to_thread(PromptRoom, checkpoint)
    name = config.served_model_name or _name_of(choice.path)
    adapters = {each: _name_of(path) for each, path in adapters_of(config).items() if each}
    if name in adapters:
        raise UsageError(f"--lora {name}=...: the model has that name; choose another")
    engine = EngineProcess(config, prompts.stop_ids, note, name)
    given = config.chat_template is not None
    chats = given or converses(choice.path, prompts.tokenizer.chat_template)
    sampling = defaults_of(config, checkpoint)
    if text := sampling_note(sampling):
        note(text)
    for line in checkpoint.notes:
        note(line)
    for each, where in adapters.items():
        note(f"LoRA adapter {where}, for requests whose model is {each}")
    note(f"loading {choice.name}; /health says when it is ready")
    return Server(config, engine, prompts, name, now_s(), chats, sampling, adapters)


def facts(ready: Ready, config: ServeConfig) -> list[str]:
    """Return log lines about a ready server."""
    about = ready.about
    precision, kv = (about[name] for name in NUMERICS)
    cache = (
        f"KV cache: {ready.pages} pages of {ready.page_cells} tokens, {ready.kv_bytes / _MIB:.0f} "
        f"MiB {kv}; {counted(about['batch'], 'sequence')} side by side, {ready.longest} "
        f"tokens each at most, {config.queue} may wait"
    )
    engine = (
        f"{about['device']} ({about['isa']}, {counted(about['threads'], 'thread')}), {precision} "
        f"weights, {about['act_prec']} activations, {ready.weight_bytes / _MIB:.0f} MiB per token"
    )
    if about["attn"] != "dense":
        cache += f"; attention reads some of it: {about['attn']}, which is lossy"
    if about["act_sparsity"]:
        engine += f"; small activations are dropped: {about['act_sparsity']}, which is lossy"
    ignored = [*config.hints_ignored, *about["hints_ignored"]]
    return [engine, cache, *([f"not acted on: {', '.join(ignored)}"] if ignored else [])]


def _name_of(path: Path) -> str:
    """Return the model name for clients, never a local path."""
    if repo := repository_of(path):
        return repo
    return path.parent.name if path.is_file() and path.suffix == ".json" else path.stem


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Connections inherit it. asyncio sets it only where a socket was made with TCP's number.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        known = error.errno is not None and error.errno > 0
        reason = os.strerror(error.errno or 0) if known else error.strerror
        advice = "choose another --port (0 takes a free one)"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            advice = "--host has to be an address of this machine (0.0.0.0: all of them)"
        raise DeviceError(
            f"cannot listen on {host} port {port}: {reason or error}; {advice}"
        ) from None
