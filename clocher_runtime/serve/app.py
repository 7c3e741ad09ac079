"""The routes of the server. What is behind them is in the modules that they name."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from clocher_kernels.errors import UsageError
from clocher_runtime.command.jsonline import clocher_version
from clocher_runtime.engine.arguments import check_biases
from clocher_runtime.engine.diffusing import Diffusing, longest_text
from clocher_runtime.engine.sampling_defaults import CHAT_TEMPERATURE
from clocher_runtime.serve.bodies import SMALL_BODY_BYTES, Bodies
from clocher_runtime.serve.chat import ChatAnswer, ChatChoice
from clocher_runtime.serve.completions import CompletionAnswer, TextChoice
from clocher_runtime.serve.constraints import Grammars, Spec, spec_of
from clocher_runtime.serve.denoised import check_order, check_scores, denoised
from clocher_runtime.serve.edge import (
    PUBLIC,
    KeyCheck,
    Named,
    OriginCheck,
    error_response,
    http_error,
    json_response,
)
from clocher_runtime.serve.engine_process import EngineProcess
from clocher_runtime.serve.errors import (
    invalid,
    unknown_model,
    wrong_media_type,
)
from clocher_runtime.serve.jobs import Ask
from clocher_runtime.serve.messages import Ready
from clocher_runtime.serve.metrics import ServerMetrics
from clocher_runtime.serve.openapi import document
from clocher_runtime.serve.page import read_page
from clocher_runtime.serve.prompts import PromptRoom, room_for
from clocher_runtime.serve.response_events import ResponseStream
from clocher_runtime.serve.responses import ResponsesAnswer
from clocher_runtime.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from clocher_runtime.serve.schemas_base import Schema
from clocher_runtime.serve.schemas_responses import ResponsesRequest
from clocher_runtime.serve.schemas_sampling import SamplingFields
from clocher_runtime.serve.settings import ServeConfig, is_local
from clocher_runtime.serve.sse import Disconnected, EventStream, unless_gone
from clocher_runtime.serve.usage import Answer, TokenTexts
from clocher_runtime.text.stops import StopStrings

_CLOSED = 499  # nginx's: the client was gone before the answer; nobody reads it
S = TypeVar("S", bound=Schema)


@dataclass(slots=True)
class Server:
    """What the routes have in common.

    Attributes:
        name: what clients call the model.
        created: when the server was started, in seconds since 1970.
        chats: whether the model was made for conversations.
        sampling: how it wants its tokens drawn, where a request does not say.
    """

    config: ServeConfig
    engine: EngineProcess
    prompts: PromptRoom
    grammars: Grammars
    metrics: ServerMetrics
    name: str
    created: int
    chats: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    _bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self._bodies = Bodies(self.config.max_body_mb << 20)

    def close(self) -> None:
        """Take no more work in the threads for text."""
        self.prompts.close()
        self.grammars.close()

    # What is asked for.

    async def parse(self, request: Request, schema: type[S]) -> S:
        """Return the checked body of a request.

        Raises:
            ApiError: it is too large, now or ever, does not say that it is JSON, or is wrong.
        """
        async with self._bodies.read(request) as data:
            # Any web page may send a body of another type here, without being asked whether it may.
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise wrong_media_type(kind)
            if len(data) <= SMALL_BODY_BYTES:
                asked = schema.parse(data)
            else:
                asked = await self.prompts.apart(lambda: schema.parse(data))
        model = getattr(asked, "model", None)
        if model not in (None, "", self.name):
            raise unknown_model(model, [self.name])
        return asked.on_top_of(self.sampling) if isinstance(asked, SamplingFields) else asked

    # Routes.

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        asked = await self.parse(request, ChatRequest)
        answer = await self.begin_chat(asked, "chatcmpl")
        if asked.stream:
            return EventStream(answer.chunks(asked.include_usage, asked.continuous_usage))
        return json_response(await unless_gone(request.receive, answer.whole()))

    async def begin_chat(self, asked: ChatRequest, kind: str) -> ChatAnswer:
        """Hand a conversation to the engine.

        Raises:
            ApiError: it cannot be answered, or not now.
        """
        with self.engine.reserve(asked.choices):
            ready = self.engine.serving()
            blocks = denoised(ready, asked.diffusion)
            longest = longest_text(blocks, ready.longest)
            ids, tail = await self.prompts.chat(
                asked.dialogue(), asked.functions, asked.template_variables, longest
            )
            budget = room_for(ids, asked.budget, longest, ready.vocab_size, "messages")
            ends = () if asked.ignore_eos else self.prompts.stop_ids
            constraint = await self._constraint(asked, blocks, tail)
            asks = [
                self._ask(asked, choice, ids, budget, ends, constraint, ready)
                for choice in range(asked.choices)
            ]
            job = self.engine.submit(asks)
        job.expire(self.config.timeout)
        names = TokenTexts(self.prompts.tokenizer)
        choices = [
            ChatChoice(
                self.prompts.reader(bool(asked.functions), tail, ends),
                StopStrings(asked.stop or ()),
                asked.parallel_tool_calls is False,
            )
            for _ in asks
        ]
        return ChatAnswer(Answer(kind, self.name, len(ids)), job, choices, asked.likeliest, names)

    async def respond(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        asked = await self.parse(request, ResponsesRequest)
        chat = await self.begin_chat(await self.prompts.apart(asked.chat), "resp")
        answer = ResponsesAnswer(chat, ResponseStream(asked, chat.answer))
        if asked.stream:
            return EventStream(answer.events())
        return json_response(await unless_gone(request.receive, answer.whole()))

    async def complete(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        asked = await self.parse(request, CompletionRequest)
        with self.engine.reserve(len(asked.prompt) * asked.choices):
            ready = self.engine.serving()
            blocks = denoised(ready, asked.diffusion)
            longest = longest_text(blocks, ready.longest)
            prompts = [await self.prompts.ids(p, True, longest) for p in asked.prompt]
            budgets = [
                room_for(ids, asked.budget, longest, ready.vocab_size, "prompt") for ids in prompts
            ]
            ends = () if asked.ignore_eos else self.prompts.stop_ids
            constraint = await self._constraint(asked, blocks)
            scores = bool(asked.echo) and (asked.likeliest >= 0 or not asked.budget)
            if scores and asked.likeliest >= 0:
                check_scores(blocks)
            asks = [
                self._ask(asked, choice, ids, budget, ends, constraint, ready, scores)
                for ids, budget in zip(prompts, budgets, strict=True)
                for choice in range(asked.choices)
            ]
            job = self.engine.submit(asks)
        job.expire(self.config.timeout)
        names = TokenTexts(self.prompts.tokenizer) if asked.likeliest >= 0 else None
        choices = [
            TextChoice(
                ask.ids if asked.echo else [],
                self.prompts.tokenizer.stream(),
                StopStrings(asked.stop or ()),
                frozenset(ends),
                names,
                only_scored=not ask.max_new,
            )
            for ask in asks
        ]
        taken = Answer("cmpl", self.name, sum(map(len, prompts)))
        answer = CompletionAnswer(
            taken, job, choices, asked.choices, scores, self.prompts.tokenizer, self.prompts.apart
        )
        if asked.stream:
            return EventStream(answer.chunks(asked.include_usage, asked.continuous_usage))
        return json_response(await unless_gone(request.receive, answer.whole()))

    async def _constraint(
        self, asked: ChatRequest | CompletionRequest, blocks: Diffusing | None, tail: str = ""
    ) -> Spec | None:
        """Return what an answer has to follow, once it was tried.

        Raises:
            UsageError: it cannot be had.
            ApiError: its blocks are denoised by a rule.
        """
        if isinstance(asked, ChatRequest):
            style, tools, must_call = self.prompts.style, asked.functions, asked.must_call
            spec = spec_of(asked.constraint, style, tools, must_call, tail)
        else:
            spec = spec_of(asked.constraint, "plain")
        if spec is not None:
            check_order(blocks)
            await asyncio.wrap_future(self.grammars.checked(spec))
        return spec

    def _ask(
        self,
        asked: ChatRequest | CompletionRequest,
        choice: int,
        ids: list[int],
        budget: int,
        ends: tuple[int, ...],
        constraint: Spec | None,
        ready: Ready,
        scores: bool = False,
    ) -> Ask:
        sampling = asked.sampling(choice)
        try:
            check_biases(sampling["logit_bias"], ready.vocab_size)
        except UsageError as error:
            raise invalid(str(error), "logit_bias") from None
        return Ask(
            ids=ids,
            max_new=budget,
            sampling=sampling,
            stop_ids=ends,
            logprobs=asked.likeliest,
            scores=scores,
            salt=asked.cache_salt or "",
            constraint=constraint,
            diffusion=asked.diffusion,
            shows=asked.shows,
        )

    async def models(self, request: Request) -> ASGIApp:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> ASGIApp:
        """GET /v1/models/{model}."""
        if request.path_params["model"] != self.name:
            raise unknown_model(request.path_params["model"], [self.name])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        found = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "clocher",
        }
        ready = self.engine.ready
        if ready is None:
            return found
        told = ("read_gbps", "precision", "device", "threads", "family")
        meta = {
            "chat_template": self.chats,
            "sampling": {"temperature": CHAT_TEMPERATURE, **self.sampling},
            "context": ready.longest,
            "bytes_per_token": ready.weight_bytes,
            **{name: ready.about.get(name) for name in told},
        }
        return {**found, "max_model_len": ready.longest, **ready.about, "meta": meta}

    async def tokenize(self, request: Request) -> ASGIApp:
        """POST /tokenize."""
        asked = await self.parse(request, TokenizeRequest)
        ready = self.engine.serving()
        if asked.messages is not None:
            ids, _ = await self.prompts.chat(
                asked.dialogue(), asked.functions, asked.template_variables, ready.longest
            )
        else:
            special = asked.add_special_tokens is not False
            ids = await self.prompts.ids(asked.prompt or "", special, ready.longest)
        return json_response({"count": len(ids), "max_model_len": ready.longest, "tokens": ids})

    async def detokenize(self, request: Request) -> ASGIApp:
        """POST /detokenize."""
        asked = await self.parse(request, DetokenizeRequest)
        size = self.engine.serving().vocab_size
        if asked.tokens and max(asked.tokens) >= size:
            raise invalid(f"tokens has {max(asked.tokens)}; the last one is {size - 1}", "tokens")
        text = await self.prompts.apart(lambda: self.prompts.tokenizer.decode(asked.tokens))
        return json_response({"prompt": text})

    async def health(self, request: Request) -> ASGIApp:
        """GET /health: 200 while requests are served, else 503."""
        engine = self.engine
        status = "stuck" if engine.is_stuck else engine.status
        body = {
            "status": "ok" if status == "ready" else status,
            "model": self.name,
            "pid": os.getpid(),
            "engine_pid": engine.pid,
            "heartbeat_age_s": round(engine.age_s, 3) if engine.ready else None,
            "running": engine.state.running,
            "sequences": engine.sequences,
            "restarts": engine.restarts,
        }
        if engine.state.changed:
            body["model_changed"] = engine.state.changed
        return json_response(body, 200 if status == "ready" else 503)

    async def show_metrics(self, request: Request) -> ASGIApp:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def describe(self, request: Request) -> ASGIApp:
        """GET /openapi.json."""
        return json_response(document(clocher_version()))

    async def root(self, request: Request) -> ASGIApp:
        """GET /: what this is."""
        return json_response(
            {
                "name": "clocher-serve",
                "version": clocher_version(),
                "model": self.name,
                "routes": sorted(route.path for route in request.app.routes),
            }
        )

    def app(self) -> Starlette:
        """Return the ASGI application."""
        page = None if self.config.no_page else read_page()
        # The page holds no secret: it asks for the key.
        public = PUBLIC if page is None else PUBLIC | {"/"}
        table = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/responses", self.respond),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.show_metrics),
            ("GET", "/openapi.json", self.describe),
            ("GET", "/", self.root if page is None else page.show),
        ]
        origins = [each.strip() for each in (self.config.cors_origins or "").split(",")]
        origins = list(filter(None, origins))
        local = is_local(self.config.host) and self.config.api_key is None
        middleware = [
            Middleware(Named),
            Middleware(OriginCheck, origins=origins, only_local=local),
            Middleware(KeyCheck, key=self.config.api_key, public=public),
        ]
        if origins:
            # Before the key: a browser asks whether it may, without one.
            cors = Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
            middleware.insert(1, cors)
        return Starlette(
            routes=[
                Route(path, self._guarded(path, endpoint), methods=[method])
                for method, path, endpoint in table
            ],
            middleware=middleware,
            exception_handlers={HTTPException: http_error},
        )

    def _guarded(
        self, path: str, endpoint: Callable[[Request], Awaitable[ASGIApp]]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return an endpoint whose errors are answers, and that counts them."""

        async def guarded(request: Request) -> ASGIApp:
            try:
                response = await endpoint(request)
            except (Disconnected, ClientDisconnect):
                response = Response(status_code=_CLOSED)
            except Exception as error:
                response = error_response(error)
            status = response.status_code if isinstance(response, Response) else 200
            self.metrics.response(path, status)
            return response

        return guarded
