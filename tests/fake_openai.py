"""A server that speaks OpenAI's API without a model, with faults on request."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Fake:
    """The server; its fields are what it does.

    Attributes:
        port: where it listens.
        token_s: time of a token.
        fault: "" or what goes wrong: refuse, cut, event, short, no usage.
        room: streams that may run or wait; more are refused.
        slots: streams that run side by side.
        leak: pages that stay in use after a disconnect.
        seen: bodies of requests.
    """

    port: int = 0
    token_s: float = 0.001
    fault: str = ""
    room: int = 1000
    slots: int = 1000
    leak: float = 0.0
    asked: int = 0
    made: int = 0
    running: int = 0
    kv_usage: float = 0.0
    seen: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        count = body.get("max_tokens")
        if not isinstance(count, int) or count < 1 or self._is_bad(body):
            return _refusal(400, "bad field")
        if self.fault == "refuse":
            return _refusal(500, "out of order")
        if self.asked >= self.room:
            return _refusal(429, "full", {"Retry-After": "1"})
        is_chat = request.url.path.endswith("chat/completions")
        stream = self._stream(count, is_chat)
        return StreamingResponse(stream, media_type="text/event-stream")

    @staticmethod
    def _is_bad(body: dict[str, Any]) -> bool:
        prompt = body.get("prompt", [])
        return (
            not isinstance(body.get("temperature"), int)
            or not isinstance(prompt, list)
            or max(prompt, default=0) > 1000
            or body.get("top_p", 1) > 1
            or body.get("n", 1) < 1
            or body.get("stop", "") != ""
        )

    async def _stream(self, count: int, is_chat: bool) -> AsyncIterator[bytes]:
        self.asked += 1
        has_slot = False
        try:
            yield b": keepalive\n\n"
            while self.running >= self.slots:
                await asyncio.sleep(0.001)
            has_slot = True
            self.running += 1
            self.kv_usage = 0.5
            for index in range(count - (self.fault == "short")):
                await asyncio.sleep(self.token_s)
                self.made += index > 0
                if index == 3 and self.fault == "cut":
                    raise RuntimeError("planted")
                if index == 3 and self.fault == "event":
                    yield _event({"error": {"message": "engine died", "code": 500}})
                    return
                said = {"delta": {"content": "w "}} if is_chat else {"text": "w "}
                yield _event({"choices": [{"index": 0, "finish_reason": None, **said}]})
            last = {"delta": {}} if is_chat else {"text": ""}
            yield _event({"choices": [{"index": 0, "finish_reason": "length", **last}]})
            if self.fault != "no usage":
                made = count - (self.fault == "short")
                yield _event({"choices": [], "usage": {"completion_tokens": made}})
            yield b"data: [DONE]\n\n"
        finally:
            self.asked -= 1
            self.running -= has_slot
            if not self.running:
                self.kv_usage = self.leak

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "batch": self.slots}]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# HELP clocher:num_requests_running Streams.\n"
            f'clocher:num_requests_running{{model="fake"}} {float(self.running)}\n'
            f"clocher:decode_steps_total {float(self.made)}\n"
            f"clocher:decode_step_seconds_total {self.made * self.token_s}\n"
            f'clocher:kv_cache_usage_perc{{model="fake"}} {self.kv_usage}\n'
        )


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _refusal(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": why}}, status, headers)


@contextlib.contextmanager
def fake_server() -> Iterator[Fake]:
    """Yield a server that runs in a thread."""
    fake = Fake()
    routes = [
        Route("/v1/completions", fake.complete, methods=["POST"]),
        Route("/v1/chat/completions", fake.complete, methods=["POST"]),
        Route("/v1/models", fake.models),
        Route("/health", fake.health),
        Route("/metrics", fake.metrics),
    ]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        fake.port = listening.getsockname()[1]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield fake
        finally:
            server.should_exit = True
            thread.join()
