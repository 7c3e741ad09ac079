"""Tokens of short steps share a message; the first and the last of a request wait for none."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clocher_runtime import load
from clocher_runtime.serve import engine_main
from clocher_runtime.serve.engine_main import EngineLoop
from clocher_runtime.serve.messages import (
    Cancel,
    Made,
    Reader,
    Step,
    Submit,
    ToEngine,
    ToServer,
    encode,
)

ASK = Submit(id=7, ids=[5, 6, 7], max_new=20, sampling={"temperature": 0.0})


@contextmanager
def looping() -> Iterator[tuple[socket.socket, Callable[[], list[Step]]]]:
    """Run a loop in a thread; yield its socket, and a function that waits for messages."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    reader = Reader(ToServer)
    with load(batch=2, speculate="off") as model, ours:
        loop = EngineLoop(model.session, None, theirs, Reader(ToEngine))

        def run() -> None:
            with theirs, pytest.raises(ConnectionResetError):
                loop.run()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield ours, lambda: reader.receive(ours)
        finally:
            ours.shutdown(socket.SHUT_WR)
            thread.join()


def answers(asks: list[Any], ends: int) -> list[Step]:
    """Return what a loop sends until `ends` requests have ended."""
    steps: list[Step] = []
    with looping() as (ours, receive):
        ours.sendall(b"".join(map(encode, asks)))
        while ends > 0:
            found = receive()
            steps += found
            ends -= sum(bool(made.finish) for step in found for made in step.events)
    return steps


def counts(steps: list[Step], request: int) -> list[int]:
    found = [sum(made.request == request for made in step.events) for step in steps]
    return [count for count in found if count]


def test_tokens_of_steps_that_are_soon_over_come_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_main, "GATHER_NS", 1 << 60)
    steps = answers([ASK], 1)
    assert counts(steps, 7) == [1, 19], "the first at once, the rest with the last"
    monkeypatch.setattr(engine_main, "GATHER_NS", 0)
    each = answers([ASK], 1)
    assert counts(each, 7) == [1] * 20
    made = [[m for step in all_of for m in step.events] for all_of in (steps, each)]
    assert made[0] == made[1] and all(isinstance(m, Made) for m in made[0])


def test_what_begins_or_ends_one_request_brings_the_tokens_of_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_main, "GATHER_NS", 1 << 60)
    short = Submit(id=8, ids=[9, 10], max_new=5, sampling={"temperature": 0.0})
    steps = answers([ASK, short], 2)
    assert counts(steps, 8) == [1, 4]
    assert counts(steps, 7) == [1, 4, 15], "with the last of the other"


def test_tokens_that_nothing_waits_for_come_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_main, "GATHER_NS", 0)
    monkeypatch.setattr(engine_main, "GATHER_WHOLE_NS", 1 << 60)
    whole = Submit(id=8, ids=[9, 10], max_new=20, sampling={"temperature": 0.0}, whole=True)
    assert counts(answers([whole], 1), 8) == [1, 19]
    steps = answers([ASK, whole], 2)
    assert counts(steps, 7) == [1] * 20, "a stream beside it does not wait"


def test_a_cancelled_request_leaves_the_gauge_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_main, "GATHER_NS", 1 << 60)
    with looping() as (ours, receive):
        ours.sendall(encode(Submit(id=9, ids=[5, 6], max_new=4000, sampling={})))
        (first,) = receive()
        assert first.state.running == 1
        ours.sendall(encode(Cancel(9)))
        assert receive()[-1].state.running == 0, "no token is sent before it"
