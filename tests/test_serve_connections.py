"""Connections of the server: what a client may keep waiting, and for how long."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator

import pytest
from serving import Served, serving, settled
from starlette.requests import Request

from clocher_runtime.serve import life
from clocher_runtime.serve.edge import HELD_BODIES, Bodies
from clocher_runtime.serve.errors import ApiError

HASTY = """
from clocher_runtime.serve import life as connection
from clocher_runtime.serve.command import main
connection.HEADER_S = connection.BODY_S = connection.OUTPUT_S = 2.0
raise SystemExit(main())
"""
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--batch", 4, program=["-c", HASTY]) as running:
        yield running


def connect(server: Served) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    found.settimeout(20)
    return found


def post(path: str, **body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def all_of(sock: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def descriptors(server: Served) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def an_answered_request(server: Served) -> None:
    with connect(server) as sock:
        sock.sendall(HEALTH)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def one_byte_of_a_second(sock: socket.socket) -> None:
    sock.sendall(HEALTH)
    assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    sock.sendall(b"G")


def a_part_of_the_headers(sock: socket.socket) -> None:
    sock.sendall(HEALTH[:-4])


def a_part_of_a_body(sock: socket.socket) -> None:
    sock.sendall(post("/tokenize", prompt="x")[:-1])


def a_body_that_nobody_wants(sock: socket.socket) -> None:
    sock.sendall(HEALTH[:-2] + b"Content-Length: 9999\r\n\r\n")
    assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def answers_that_are_not_read(sock: socket.socket) -> None:
    sock.sendall(HEALTH.replace(b"health", b"openapi.json") * 300)


HASTENED = (
    one_byte_of_a_second,
    a_part_of_the_headers,
    a_part_of_a_body,
    a_body_that_nobody_wants,
    answers_that_are_not_read,
)


def test_who_lets_the_server_wait_loses_the_connection(server: Served):
    server.health()
    before = descriptors(server)
    late = {begin.__name__: [connect(server) for _ in range(20)] for begin in HASTENED}
    for begin in HASTENED:
        for each in late[begin.__name__]:
            begin(each)
    an_answered_request(server)  # those before it are accepted by now
    assert descriptors(server) >= before + 20 * len(HASTENED)
    deadline = time.monotonic() + 10
    while descriptors(server) > before:
        assert server.health()["status"] == "ok"  # on a connection that goes on
        an_answered_request(server)
        assert time.monotonic() < deadline, [n for n, each in late.items() if not all_ended(each)]
        time.sleep(0.05)
    for sockets in late.values():
        for each in sockets:
            each.close()


def all_ended(sockets: list[socket.socket]) -> bool:
    """Return whether the server has closed the connections; what it sent before is read."""
    for each in sockets:
        each.settimeout(0.2)
        try:
            all_of(each)
        except TimeoutError:
            return False
        except OSError:
            continue
    return True


def test_who_has_said_everything_gets_the_answer(server: Served):
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "seed": 1}
    whole = server.ask("/v1/completions", **body).json()["choices"][0]["text"]
    for path, said in (("/v1/completions", body), ("/v1/completions", body | {"stream": True})):
        with connect(server) as sock:
            sock.sendall(post(path, **said))
            sock.shutdown(socket.SHUT_WR)
            answer = all_of(sock)
            assert b"HTTP/1.1 200 OK\r\n" in answer
            assert answer.endswith(b"}" if "stream" not in said else b"0\r\n\r\n")
            assert json.dumps(whole)[1:-1].encode() in answer or b"data: [DONE]" in answer
    with connect(server) as sock:
        sock.sendall(HEALTH * 3)
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock).count(b"HTTP/1.1 200 OK") == 3


def test_small_writes_do_not_wait_for_acknowledgements():
    with (
        life._listen("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_who_has_gone_frees_the_engine_at_once(server: Served):
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    for stream in (False, True):
        with connect(server) as sock:
            sock.sendall(post("/v1/completions", **body, stream=stream))
            while not server.health()["sequences"]:
                time.sleep(0.01)
        deadline = time.monotonic() + 0.5
        while server.health()["sequences"]:
            assert time.monotonic() < deadline, "nobody reads it"
    settled(server)


@pytest.mark.parametrize("path", [b"/health", b"/nowhere"])
def test_two_lengths_of_a_body_are_refused(server: Served, path: bytes):
    with connect(server) as sock:
        both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        sock.sendall(HEALTH[:-2].replace(b"/health", path) + both + HEALTH)
        answer = all_of(sock)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert b"Content-Length and Transfer-Encoding" in answer


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 60,  # a hello of TLS
        HEALTH[:-2] + b"Content-Length: abc\r\n\r\n",
    ],
    ids=["garbage", "TLS", "length"],
)
def test_what_is_not_http_is_refused_as_other_requests(server: Served, data: bytes):
    with connect(server) as sock:
        sock.sendall(data)
        head, _, body = all_of(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert "not valid HTTP" in json.loads(body)["error"]["message"]


def test_all_bodies_together_are_bounded():
    most = 1 << 20

    def request(*pieces: bytes, ends: bool = True) -> Request:
        messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        if ends:
            messages[-1]["more_body"] = False

        async def receive() -> dict:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        return Request({"type": "http", "headers": []}, receive)

    async def hold() -> None:
        bodies = Bodies()

        async def read(asked: Request) -> int:
            async with bodies.read(asked, most) as data:
                return len(data)

        large = [b"x" * (most // 2)] * 2
        held = [asyncio.create_task(read(request(*large, ends=False))) for _ in range(HELD_BODIES)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as raised:
            await read(request(*large))
        assert raised.value.status == 503 and raised.value.headers["retry-after"]
        assert await read(request(b"small")) == 5
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert await read(request(*large)) == most

    asyncio.run(hold())
