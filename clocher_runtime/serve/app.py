"""The routes of the server."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from clocher_kernels import __version__
from clocher_kernels.errors import UsageError
from clocher_runtime.config.commands import CHAT_TEMPERATURE, ServeConfig, is_local
from clocher_runtime.engine.arguments import check_biases
from clocher_runtime.serve.answers import Answer, ChatChoice, Pipeline, TextChoice
from clocher_runtime.serve.anthropic import CountTokensRequest, MessagesRequest, MessageStream
from clocher_runtime.serve.edge import (
    PUBLIC,
    SMALL_BODY_BYTES,
    Bodies,
    Disconnected,
    EventAnswer,
    EventStream,
    Gate,
    Named,
    error_response,
    json_response,
    page_file,
    read_page,
    unless_gone,
    unrouted,
)
from clocher_runtime.serve.embeddings import EmbeddingsRequest, embed
from clocher_runtime.serve.engine_process import EngineProcess
from clocher_runtime.serve.errors import failure, invalid
from clocher_runtime.serve.messages import Submit
from clocher_runtime.serve.openapi import ROUTES, document
from clocher_runtime.serve.prompts import PromptRoom, denoised, grammar_of, room_for
from clocher_runtime.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from clocher_runtime.serve.responses import ResponsesRequest, ResponseStore, ResponseStream
from clocher_runtime.serve.schemas import Schema
from clocher_runtime.text.answers import StopStrings

_CLOSED = 499  # nginx's: the client disconnected before the response


@dataclass(slots=True)
class Server:
    """The state that the routes share."""

    config: ServeConfig
    engine: EngineProcess
    prompts: PromptRoom
    name: str  # of the model, as clients call it
    created: int  # in seconds since 1970
    chats: bool = False  # whether the model was made for conversations
    sampling: Mapping[str, float] = field(default_factory=dict)  # the model's defaults
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> repository or folder
    stored: ResponseStore = field(default_factory=ResponseStore)
    bodies: Bodies = field(default_factory=Bodies)

    async def parse(self, request: Request, schema: type[Schema]) -> Schema:
        """Return the validated body; raises ApiError if it is too large, not JSON or invalid."""
        async with self.bodies.read(request, self.config.max_body_mb << 20) as data:
            # Any web page may send other content types here without a CORS preflight.
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise failure("unsupported_media_type", got=kind)
            read = partial(schema.parse, data)
            asked = read() if len(data) <= SMALL_BODY_BYTES else await self.prompts.apart(read)
        self.adapter(getattr(asked, "model", None))
        return asked.on_top_of(self.sampling) if isinstance(asked, SamplingFields) else asked

    def adapter(self, model: str | None) -> str:
        """Return the adapter that a request's model names, "" for the base; raises ApiError."""
        if not model or model == self.name:
            return ""
        if model not in self.adapters:
            served = ", ".join((self.name, *self.adapters))
            raise failure("model_not_found", param="model", got=model, served=served)
        return model

    # Routes, as `openapi.ROUTES` describes them.

    async def chat(self, request: Request, asked: ChatRequest) -> ASGIApp:
        return await self._answer(request, asked, "chatcmpl-")

    async def complete(self, request: Request, asked: CompletionRequest) -> ASGIApp:
        return await self._answer(request, asked, "cmpl-")

    async def respond(self, request: Request, asked: ResponsesRequest) -> ASGIApp:
        if before := asked.previous_response_id:
            found = self.stored.read(before, "previous_response_not_found")
            asked = await self.prompts.apart(partial(asked.after, found["items"]))
        chat = await self.prompts.apart(asked.chat)
        writer = partial(ResponseStream, asked, self.stored)
        truncates = asked.truncation == "auto"
        return await self._answer(request, chat, "resp_", writer, truncates=truncates)

    async def stored_response(self, request: Request) -> ASGIApp:
        return json_response(self.stored.read(request.path_params["response"])["response"])

    async def drop_response(self, request: Request) -> ASGIApp:
        self.stored.drop(name := request.path_params["response"])
        return json_response({"id": name, "object": "response", "deleted": True})

    async def message(self, request: Request, asked: MessagesRequest) -> ASGIApp:
        chat = await self.prompts.apart(partial(asked.chat, self.prompts.tokenizer.chat_template))
        return await self._answer(request, chat, "msg_", MessageStream)

    async def count(self, request: Request, asked: CountTokensRequest) -> ASGIApp:
        chat = await self.prompts.apart(partial(asked.chat, self.prompts.tokenizer.chat_template))
        ids, _ = await self.prompts.chat(chat, self.engine.serving().longest)
        return json_response({"input_tokens": len(ids)})

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        kind: str,
        writer: Callable[[Answer], Any] | None = None,
        *,
        truncates: bool = False,
    ) -> ASGIApp:
        """Answer a request, in the events that `writer` makes or as OpenAI's first APIs do.

        `truncates`: the oldest turns of a chat that is too long are left out.
        """
        with self.engine.reserve(asked.sequences):
            asks, tail = await self._asks(asked, truncates)
        job = self.engine.submit(asks)
        job.expire(self.config.timeout)
        prompt_tokens = sum(len(ask.ids) for ask in asks) // asked.choices
        about = Answer(kind, asked.model or self.name, prompt_tokens)
        choices = [self._choice(asked, ask, tail) for ask in asks]
        chat = Pipeline(about, asked, job, choices, self.prompts)
        answer = chat if writer is None else EventAnswer(chat, writer(about))
        if asked.stream:
            return EventStream(answer.events(), answer.failed)
        return json_response(await unless_gone(request.receive, answer.whole()))

    async def _asks(
        self, asked: ChatRequest | CompletionRequest, truncates: bool
    ) -> tuple[list[Submit], str]:
        """Return the sequences of a request, and the end of a chat's text; raises ApiError."""
        tail, prompts = "", list[list[int]]()
        style, param, where = "plain", "prompt", "prompt"
        ready = self.engine.serving()
        blocks = denoised(ready, asked.diffusion)
        longest = blocks.longest(ready.longest) if blocks else ready.longest
        if isinstance(asked, ChatRequest):
            if truncates:
                found = await self.prompts.chat_that_fits(asked, longest, ready.vocab_size)
            else:
                found = await self.prompts.chat(asked, longest)
            ids, tail = found
            prompts.append(ids)
            style, param = self.prompts.style, "messages"
            where = "messages and tools" if asked.functions else param
        else:
            prompts += [await self.prompts.ids(p, True, longest) for p in asked.prompt]
            if asked.scores and asked.top >= 0 and blocks and blocks.blocks.context == "block":
                raise invalid(
                    "echo with logprobs: the tokens of this model's blocks attend to each "
                    "other, so a prompt has no likelihood token by token; leave one of them out",
                    "echo",
                )
        sampling = [asked.sampling(choice) for choice in range(asked.choices)]
        try:
            check_biases(sampling[0]["logit_bias"], ready.vocab_size)
        except UsageError as error:
            raise invalid(str(error), "logit_bias") from None
        budgets = [
            room_for(ids, asked.budget, longest, ready.vocab_size, param, where) for ids in prompts
        ]
        if spec := grammar_of(asked, style, tail, blocks):
            await asyncio.wrap_future(self.prompts.grammars.checked(spec))
        one_call = isinstance(asked, ChatRequest) and asked.parallel_tool_calls is False
        asks = [
            Submit(
                ids=ids,
                max_new=budget,
                sampling=drawn,
                stop_ids=() if asked.ignore_eos else self.prompts.stop_ids,
                logprobs=asked.top,
                scores=asked.scores,
                adapter=self.adapter(asked.model),
                salt=asked.cache_salt or "",
                constraint=json.dumps(spec) if spec else "",
                diffusion=asked.diffusion,
                shows=bool(asked.options.include_canvas),
                whole=not (asked.stream or asked.stop or one_call),
            )
            for ids, budget in zip(prompts, budgets, strict=True)
            for drawn in sampling
        ]
        return asks, tail

    def _choice(
        self, asked: ChatRequest | CompletionRequest, ask: Submit, tail: str
    ) -> ChatChoice | TextChoice:
        stops, tokenizer = StopStrings(asked.stop or ()), self.prompts.tokenizer
        names = tokenizer if asked.top >= 0 else None
        if isinstance(asked, ChatRequest):
            reader = self.prompts.reader(asked.functions, tail, ask.stop_ids)
            one_call = asked.parallel_tool_calls is False
            return ChatChoice(stops=stops, names=names, reader=reader, one_call=one_call)
        return TextChoice(
            stops=stops,
            names=names,
            prompt=ask.ids if asked.echo else [],
            decoder=tokenizer.stream(),
            ends=frozenset(ask.stop_ids),
            only_scored=not ask.max_new,
        )

    async def embed(self, request: Request, asked: EmbeddingsRequest) -> ASGIApp:
        body = await unless_gone(request.receive, embed(self, asked))
        return await self.prompts.apart(lambda: json_response(body))

    async def models(self, request: Request) -> ASGIApp:
        data = [self._model(name) for name in ("", *self.adapters)]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> ASGIApp:
        return json_response(self._model(self.adapter(request.path_params["model"])))

    def _model(self, adapter: str) -> dict[str, Any]:
        found: dict[str, Any] = {"object": "model", "created": self.created, "owned_by": "clocher"}
        found |= {"id": adapter or self.name, "root": self.adapters.get(adapter, self.name)}
        found["parent"] = self.name if adapter else None
        ready = self.engine.ready
        if ready is None:
            return found
        shown = ("read_gbps", "precision", "device", "threads", "family")
        meta = {
            "chat_template": self.chats,
            "sampling": {"temperature": CHAT_TEMPERATURE, **self.sampling},
            "context": ready.longest,
            "bytes_per_token": ready.weight_bytes,
            **{name: ready.about.get(name) for name in shown},
        }
        return {**found, "max_model_len": ready.longest, **ready.about, "meta": meta}

    async def tokenize(self, request: Request, asked: TokenizeRequest) -> ASGIApp:
        longest = self.engine.serving().longest
        if asked.messages is not None:
            ids, _ = await self.prompts.chat(asked, longest)
        else:
            special = asked.add_special_tokens is not False
            ids = await self.prompts.ids(asked.prompt or "", special, longest)
        return json_response({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def detokenize(self, request: Request, asked: DetokenizeRequest) -> ASGIApp:
        size, largest = self.engine.serving().vocab_size, max(asked.tokens, default=0)
        if largest >= size:
            message = f"tokens: token id {largest} out of range (vocabulary size {size})"
            raise invalid(message, "tokens")
        text = await self.prompts.apart(lambda: self.prompts.tokenizer.decode(asked.tokens))
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        return json_response(self.prompts.info)

    async def health(self, request: Request) -> ASGIApp:
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
        text = self.engine.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def describe(self, request: Request) -> ASGIApp:
        return json_response(document(__version__))

    async def root(self, request: Request) -> ASGIApp:
        about = {"name": "clocher-serve", "version": __version__, "model": self.name}
        return json_response(about | {"routes": sorted(r.path for r in request.app.routes)})

    def app(self) -> Starlette:
        """Return the ASGI application."""
        page = {} if self.config.no_page else read_page()
        origins = [o.strip(" /") for o in (self.config.cors_origins or "").split(",") if o.strip()]
        gate = Middleware(
            Gate,
            key=self.config.api_key,
            public=PUBLIC | page.keys(),  # the page asks for the key
            origins=origins,
            only_local=is_local(self.config.host) and self.config.api_key is None,
        )
        # Before the key check: a CORS preflight has no key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        shown = {at: partial(page_file, file) for at, file in page.items()}
        routes = [Route(at, self._guarded("/", shown[at], None)) for at in shown if at != "/"]
        for each in ROUTES:
            path = each.path.replace("{model}", "{model:path}")
            handler = shown.get(path) or getattr(self, each.handler)
            endpoint = self._guarded(path, handler, each.asks)
            routes.append(Route(path, endpoint, methods=[each.method.upper()]))
        return Starlette(
            routes=routes,
            middleware=[Middleware(Named), *([cors] if origins else []), gate],
            exception_handlers={HTTPException: unrouted},
        )

    def _guarded(
        self, path: str, handler: Callable[..., Awaitable[ASGIApp]], asks: type[Schema] | None
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def guarded(request: Request) -> ASGIApp:
            try:
                asked = [] if asks is None else [await self.parse(request, asks)]
                response = await handler(request, *asked)
            except (Disconnected, ClientDisconnect):
                response = Response(status_code=_CLOSED)
            except Exception as error:
                response = error_response(error, path)
            status = response.status_code if isinstance(response, Response) else 200
            self.engine.metrics.response(path, status)
            return response

        return guarded
