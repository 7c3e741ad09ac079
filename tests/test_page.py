"""The chat page as it is served: its size, its headers, who may have it; what it is told."""

import re
from collections.abc import Iterator
from hashlib import sha256

import pytest
from scripted import scripted_app
from serving import Served, model_with_template, serving
from starlette.testclient import TestClient
from test_serve_answers import TEMPLATE

from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.commands import CHAT_TEMPERATURE
from clocher_runtime.serve.edge import FOLDER, read_page

TEXT = (FOLDER / "index.html").read_text(encoding="utf-8")
OWN = [file for file in FOLDER.glob("*.*") if file.is_file()]
VENDOR = [file for file in FOLDER.glob("vendor/*/*") if file.suffix]
TALK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def client() -> Iterator[TestClient]:
    with scripted_app() as (app, _):
        yield TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as running:
        yield running


def test_it_is_small_and_parses_no_markup() -> None:
    sizes = {file.name: file.stat().st_size for file in OWN}
    assert sum(sizes.values()) <= 80_000, sizes
    assert sum(len(file.read_text("utf-8").splitlines()) for file in OWN) <= 1_900
    assert sum(file.stat().st_size for file in VENDOR) <= 420_000
    for file in OWN:
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser"):
            assert word not in text, file.name
        for word in ("eval(", "Function(", "console.", " import(", "setHTML", "srcdoc"):
            assert word not in text, file.name
    assert not re.search(r" style=| on[a-z]+=|<style|<script>|https?://", TEXT)


def test_third_party_files_are_those_of_their_packages() -> None:
    notice = (FOLDER / "vendor" / "NOTICE").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| (\S+) \|.* ([0-9a-f]{64}) \|$", notice, re.M))
    assert told == {
        file.relative_to(FOLDER / "vendor").as_posix(): sha256(file.read_bytes()).hexdigest()
        for file in VENDOR
    }
    for folder in {file.parent for file in VENDOR}:
        assert "Permission is hereby granted" in (text := (folder / "LICENSE").read_text()) or (
            "Redistribution and use" in text
        )
    found = set(re.findall(r'(?:src|href)="(page/[^"]+)"', TEXT))
    assert found <= {f"page/{file.relative_to(FOLDER).as_posix()}" for file in OWN + VENDOR}


def test_every_file_is_served_with_its_type_and_a_strict_policy(client: TestClient) -> None:
    types = {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".woff2": "font/woff2",
    }
    pages = read_page()
    assert len(pages) == len(OWN) + len(VENDOR)
    for file in OWN + VENDOR:
        name = file.relative_to(FOLDER).as_posix()
        response = client.get("/" if name == "index.html" else f"/page/{name}")
        assert response.status_code == 200 and response.content == file.read_bytes(), name
        assert response.headers["content-type"] == types[file.suffix]
        policy = dict(
            part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
        )
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "font-src": "'self'",
            "img-src": "'self' data:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["x-dns-prefetch-control"] == "off"
        cache = "max-age=31536000, immutable" if "vendor" in name else "no-cache"
        assert response.headers["cache-control"] == cache
    for name in ("vendor/NOTICE", "nothing.js", "../presets.json", "%2e%2e/presets.json", ""):
        assert client.get(f"/page/{name}").status_code == 404, name


def test_another_file_has_another_tag(tmp_path) -> None:
    (tmp_path / "index.html").write_text("<p>", encoding="utf-8")
    assert read_page(tmp_path)["/"].headers["etag"] != read_page()["/"].headers["etag"]


def test_who_has_it_is_told_so(client: TestClient) -> None:
    tag = client.get("/").headers["etag"]
    for given in (tag, f'"other", W/{tag}'):
        again = client.get("/", headers={"if-none-match": given})
        assert again.status_code == 304 and not again.content
        assert again.headers["etag"] == tag
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_it_needs_no_key_but_what_it_asks_for_does() -> None:
    with scripted_app(host="0.0.0.0", api_key="secret") as (app, _):
        client = TestClient(app, base_url="http://box.example:8000")
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 200
        assert client.get("/v1/models").status_code == client.get("/page/x").status_code == 401
        assert client.get("/nowhere").status_code == 401
        right = {"authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=right).status_code == 200


def test_without_the_page_the_server_says_what_it_is_to_those_with_the_key() -> None:
    with scripted_app(no_page=True, api_key="secret") as (app, _):
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 401
        told = client.get("/", headers={"authorization": "Bearer secret"}).json()
        assert told["name"] == "clocher-serve" and "/v1/models" in told["routes"]


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost:8000", "http://localhost:9000", 403),
        ("localhost:8000", "https://localhost:8000", 403),
        ("localhost:8000", "http://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("evil.example", "http://evil.example", 403),
    ],
)
def test_only_its_own_page_may_call_a_server_of_this_machine(
    client: TestClient, host: str, origin: str, status: int
) -> None:
    headers = {"host": host, "origin": origin}
    assert client.post("/v1/chat/completions", json=TALK, headers=headers).status_code == status
    assert client.get("/", headers={"host": host}).status_code == (403 if "evil" in host else 200)


@pytest.mark.parametrize(
    ("origin", "proxy", "status"),
    [
        ("http://box.example:8000", None, 200),
        ("https://box.example:8000", "https", 200),
        ("https://box.example:8000", None, 403),
        ("http://box.example:8000", "https", 403),
        ("http://box.example", None, 403),
        ("http://evil.example:8000", None, 403),
        ("null", None, 403),
    ],
)
def test_only_its_own_page_may_call_a_server_of_others(
    origin: str, proxy: str | None, status: int
) -> None:
    with scripted_app(host="0.0.0.0", api_key="secret") as (app, _):
        client = TestClient(app, base_url="http://box.example:8000")
        headers = {"origin": origin, "authorization": "Bearer secret"}
        if proxy:
            headers["x-forwarded-proto"] = proxy
        assert client.post("/v1/chat/completions", json=TALK, headers=headers).status_code == status
        del headers["authorization"]
        refused = client.post("/v1/chat/completions", json=TALK, headers=headers)
        assert refused.status_code == (401 if status == 200 else 403)


def test_head_is_answered_and_the_page_is_what_a_browser_gets(server: Served) -> None:
    head, page = server.client.head("/"), server.client.get("/")
    assert head.status_code == page.status_code == 200 and not head.content
    assert page.text == TEXT and head.headers["etag"] == page.headers["etag"]


def test_a_model_tells_what_the_page_wants_to_know(server: Served, tmp_path) -> None:
    def meta(one: Served) -> dict:
        return one.client.get("/v1/models").json()["data"][0]["meta"]

    embedded = meta(server)
    assert embedded == {
        "chat_template": False,
        "sampling": {"temperature": CHAT_TEMPERATURE},
        "context": 4096,
        "bytes_per_token": embedded["bytes_per_token"],
        "read_gbps": embedded["read_gbps"],
        "precision": "bf16+mxfp4",
        "device": "cpu",
        "threads": embedded["threads"],
        "family": "gpt_oss",
    }
    assert embedded["bytes_per_token"] > 1_000_000 and embedded["threads"] >= 1
    assert embedded["read_gbps"] is None or embedded["read_gbps"] > 0
    speaker = model_with_template(tmp_path / "speaker", embedded_model(), TEMPLATE)
    with serving("--model-dir", speaker) as other:
        assert meta(other) == embedded | {
            "chat_template": True,
            "read_gbps": meta(other)["read_gbps"],
        }


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", TALK), ("/v1/completions", {"prompt": "hi"})]
)
def test_each_chunk_tells_the_usage_so_far_if_that_is_wanted(
    server: Served, path: str, body: dict
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = server.events(path, max_tokens=12, seed=3, stream_options=options, **body)
    assert done == "[DONE]"
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[0] <= 2 and counts[-1] == 12
    assert len(set(counts)) > 6
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
    only = server.events(
        path, max_tokens=3, seed=3, stream_options={"continuous_usage_stats": True}, **body
    )
    assert all(chunk["choices"] and chunk["usage"] for chunk in only[:-1])
