"""The OpenAPI document says what the server takes, and whatever comes is answered: 2xx or 4xx."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from starlette.applications import Starlette
from starlette.testclient import TestClient

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.commands import ServeConfig
from clocher_runtime.serve.app import Server
from clocher_runtime.serve.engine_process import EngineProcess, Job
from clocher_runtime.serve.messages import Made, Ready, Scored, Submit
from clocher_runtime.serve.openapi import ROUTES, Described, document
from clocher_runtime.serve.prompts import PromptRoom

CONTEXT = 512


class FakeEngine(EngineProcess):
    """Makes up to four tokens for every sequence at once, and no process."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(ServeConfig(queue=60), (), print, "m")
        self.status = "ready"
        self.ready = Ready(vocab_size, CONTEXT, 8, 64, 1, 1, {})

    @property
    def is_stuck(self) -> bool:
        """Never."""
        return False

    def submit(self, asks: Sequence[Submit]) -> Job:
        """Answer at once."""
        assert self.ready is not None
        job = Job(range(len(asks)), lambda number, how: None)
        for number, ask in enumerate(asks):
            top = tuple((token, -1.0) for token in range(max(ask.logprobs, 0)))
            if ask.pooling:
                job.put(number, Scored(number, [], bytes(4 * 8)), True, 0.0)
                continue
            if ask.scores:
                scored = Scored(number, [(-1.0, top)] * (len(ask.ids) - 1))
                job.put(number, scored, not ask.max_new, 0.0)
            made = min(ask.max_new, 4)
            for at in range(made):
                token = (sum(ask.ids) + ask.sampling["seed"] + 977 * at) % self.ready.vocab_size
                finish = "length" if at == made - 1 else ""
                told = -1.0 if ask.logprobs >= 0 else None
                job.put(number, Made(number, token, finish, told, top), bool(finish), 0.0)
        return job


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    prompts = PromptRoom(open_checkpoint(embedded_model()))
    engine = FakeEngine(prompts.tokenizer.vocab_size)
    yield Server(ServeConfig(host="testserver"), engine, prompts, "m", 0)
    prompts.close()


@pytest.fixture(scope="module")
def app(server: Server) -> Starlette:
    return server.app()


@pytest.fixture(scope="module")
def api(app: Starlette) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_route_is_described(app: Starlette) -> None:
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if not route.path.startswith("/page/")  # files of the chat page
    }
    assert routes == {(route.method, route.path) for route in ROUTES}


def test_the_document_is_served(app: Starlette) -> None:
    served = TestClient(app).get("/openapi.json").json()
    assert served == json.loads(json.dumps(document(served["info"]["version"])))
    assert served["openapi"] == "3.1.0"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "x" * 999])
@pytest.mark.parametrize("route", [route for route in ROUTES if route.asks], ids=lambda r: r.path)
def test_what_any_web_page_may_send_is_refused(app: Starlette, route: Described, kind: str) -> None:
    body = b'{"prompt": "x", "input": "x", "tokens": [1]}'
    answer = TestClient(app).post(route.path, content=body, headers={"content-type": kind})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    assert len(answer.content) < 400
    json_type = {"content-type": "Application/JSON; charset=utf-8"}
    assert TestClient(app).post(route.path, content=body, headers=json_type).status_code != 415


def test_what_came_before_a_drain_is_answered(
    server: Server, app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = server.prompts.ids

    async def drained(*given: Any) -> list[int]:
        server.engine.drain()
        assert server.engine.sequences == 1, "the drain would not wait for it"
        return await encode(*given)

    monkeypatch.setattr(server.engine, "status", "ready")  # and is so again
    monkeypatch.setattr(server.prompts, "ids", drained)
    client, body = TestClient(app), {"prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/v1/completions", json=body).status_code == 503


def test_a_request_counts_once(
    server: Server, app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, counts = server.engine, list[int]()
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda asks: (counts.append(engine.sequences), submit(asks))[1]
    )
    body = {"prompt": "x", "max_tokens": 1}
    assert TestClient(app).post("/v1/completions", json=body).status_code == 200
    assert counts == [0], "it is reserved beside what submit counts"


def test_its_schemas_are_schemas() -> None:
    schemas = document("1")["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    chat = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/ChatRequest", "components": {"schemas": schemas}}
    )
    message = {"role": "user", "content": "x"}
    assert chat.is_valid({"messages": [message], "stop": "x", "temperature": None, "other": 1})
    for wrong in ({}, {"messages": [message], "temperature": 3}, {"messages": [{"role": "x"}]}):
        assert not chat.is_valid(wrong)


def test_a_chat_with_a_model_without_a_template_names_the_other_route(
    server: Server, app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.prompts.tokenizer, "_template", None)
    asked = {"messages": [{"role": "user", "content": "x"}]}
    answer = TestClient(app).post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert "send plain text to /v1/completions" in answer.json()["error"]["message"]


CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
)
ASKING = [route for route in ROUTES if route.asks or "{" in route.path]
WAYS = [
    pytest.param(route, mode, id=f"{route.path}-{mode.value}")
    for route in ASKING
    for mode in GenerationMode
    if route.asks or mode == GenerationMode.POSITIVE  # any text is a path
]


def as_python(value: Any) -> Any:
    """Return JSON with integers that are written as such: to a JSON schema, 3.0 is one as well."""
    if isinstance(value, dict):
        return {key: as_python(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_python(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def fits(route: Described, body: Any) -> bool:
    """Return whether a body is what the document says of a route."""
    if route.asks is None:
        return False
    schemas = {"components": {"schemas": document("1")["components"]["schemas"]}}
    named = {"$ref": f"#/components/schemas/{route.asks.__name__}"}
    return jsonschema.Draft202012Validator(named | schemas).is_valid(body)


def attack(api: Any, route: Described, mode: GenerationMode, examples: int) -> None:
    operation = api[route.path][route.method.upper()]
    answers: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,  # how many of them are answered is checked, too
        suppress_health_check=list(HealthCheck),
    )
    def answered(case: schemathesis.Case) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # hardly ever the one that is served
            case.body = as_python(case.body)
        response = case.call()
        # To schemathesis 413 is no refusal, and what breaks one alternative of a field is wrong
        # even if it fits another one.
        excused = response.status_code == 413 or fits(route, case.body)
        case.validate_response(
            response,
            checks=[c for c in CHECKS if not (excused and c is checks.negative_data_rejection)],
        )
        answers[response.status_code] += 1

    answered()
    if mode == GenerationMode.POSITIVE and route.asks:
        assert answers[200] > examples // 12, answers
    if mode == GenerationMode.NEGATIVE:
        assert answers[400] > examples // 12, answers


@pytest.mark.parametrize(("route", "mode"), WAYS)
def test_whatever_comes_is_answered(api: Any, route: Described, mode: GenerationMode) -> None:
    attack(api, route, mode, examples=8)


@pytest.mark.slow
@pytest.mark.parametrize(("route", "mode"), WAYS)
def test_whatever_comes_is_answered_at_length(
    api: Any, route: Described, mode: GenerationMode
) -> None:
    attack(api, route, mode, examples=500)


@pytest.mark.parametrize("route", [r for r in ROUTES if r not in ASKING], ids=lambda r: r.path)
def test_what_takes_nothing_is_answered(api: Any, route: Described) -> None:
    api[route.path][route.method.upper()].Case().call_and_validate(checks=CHECKS)
