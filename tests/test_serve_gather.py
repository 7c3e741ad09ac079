"""Tokens of short steps share a message; the first and the last of a request wait for none."""

import socket
import threading
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


def answers(asks: list[Any], ends: int) -> list[Step]:
    """Return what a loop sends until `ends` requests have ended, and once more."""
    ours, theirs = socket.socketpair()
    steps: list[Step] = []
    with load(batch=2, speculate="off") as model, ours:
        loop = EngineLoop(model.session, None, theirs, Reader(ToEngine))

        def run() -> None:
            with theirs, pytest.raises(ConnectionResetError):
                loop.run()

        thread = threading.Thread(target=run)
        thread.start()
        ours.sendall(b"".join(map(encode, asks)))
        reader = Reader(ToServer)
        while ends > 0 or steps[-1].state.running:
            found = reader.receive(ours)
            steps += found
            ends -= sum(bool(made.finish) for step in found for made in step.events)
        ours.shutdown(socket.SHUT_WR)
        thread.join()
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


def test_a_cancelled_request_leaves_the_gauge_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_main, "GATHER_NS", 1 << 60)
    monkeypatch.setattr(engine_main, "BEAT_S", 600.0)
    steps = answers([Submit(id=9, ids=[5, 6], max_new=2000, sampling={}), ASK, Cancel(9)], 1)
    assert steps[-1].state.running == 0
