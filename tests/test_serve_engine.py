"""The process of the engine, from the server's side."""

import asyncio
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from clocher_runtime.config.commands import ServeConfig
from clocher_runtime.serve import engine_process
from clocher_runtime.serve.engine_process import EngineProcess, Job
from clocher_runtime.serve.errors import ApiError
from clocher_runtime.serve.messages import Failed, Made, Step, Submit

ASK = Submit(ids=[5, 6, 7], max_new=2000, sampling={"temperature": 1.0, "seed": 3})


def with_engine(work: Callable[[EngineProcess], Coroutine[Any, Any, None]]) -> list[str]:
    """Do some work with a running engine; return what it noted."""
    notes: list[str] = []

    config = ServeConfig(batch=4, queue=0)

    async def live() -> None:
        engine = EngineProcess(config, (), notes.append, "m")
        running = asyncio.ensure_future(engine.run())
        try:
            await ready(engine)
            await work(engine)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert engine._process.returncode is not None, "nobody hears of its end"

    asyncio.run(live())
    return notes


async def ready(engine: EngineProcess) -> None:
    while engine.ready is None:
        assert engine.status != "failed"
        await asyncio.sleep(0.02)


def test_an_engine_that_says_nothing_is_stuck_and_then_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_process, "QUIET_S", 0.5)
    monkeypatch.setattr(engine_process, "WEDGED_S", 2.5)

    async def stop(engine: EngineProcess) -> None:
        job = engine.submit([ASK])
        await job.read()
        stopped = engine.pid
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(2.5):  # five of its steps, which are long on a busy machine
            while not engine.is_stuck:
                await asyncio.sleep(0.02)
        os.kill(stopped, signal.SIGCONT)  # in time
        while engine.is_stuck:
            await asyncio.sleep(0.02)
        assert engine.pid == stopped
        assert engine.step_s < 0.5, "one pause is not the pace of the engine"
        os.kill(stopped, signal.SIGSTOP)
        waiting = [engine.submit([ASK]), engine.submit([ASK])]
        with pytest.raises(ApiError, match="engine ended"):
            while await job.read():
                pass
            await waiting[0].read()
        errors = await asyncio.gather(*(each.read() for each in waiting), return_exceptions=True)
        assert all(isinstance(error, ApiError) for error in errors)
        assert errors[0] is not errors[1], "it holds the frames of who asked"
        await ready(engine)
        assert engine.pid != stopped and not engine.is_stuck

    (note,) = with_engine(stop)
    assert re.fullmatch(r"the engine did not answer for [3-9] s and was ended; restarting it", note)


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    start, tries = asyncio.create_subprocess_exec, list[int]()

    async def late(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        tries.append(len(os.listdir("/proc/self/fd")))
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", late)
    monkeypatch.setattr(engine_process, "RETRY_S", 0.1)

    async def look(engine: EngineProcess) -> None:
        assert engine.pid and engine.restarts == 0
        assert len(tries) == 3 and tries[0] == tries[2], "descriptors leak"

    notes = with_engine(look)
    assert len(notes) == 2
    assert all("cannot be started: Too many open files" in note for note in notes)


def test_a_pause_of_both_processes_is_no_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_process, "QUIET_S", 1.5)
    monkeypatch.setattr(engine_process, "WEDGED_S", 1.5)

    async def pause(engine: EngineProcess) -> None:
        job = engine.submit([ASK])
        await job.read()
        paused = engine.pid
        os.kill(paused, signal.SIGSTOP)
        time.sleep(4.0)  # nothing of this process runs either
        await asyncio.sleep(0.1)
        os.kill(paused, signal.SIGCONT)
        assert await job.read() and engine.pid == paused

    assert not with_engine(pause)


def test_who_does_not_read_for_a_time_is_cut_off():
    async def read_late() -> None:
        cancelled: list[tuple[int, str]] = []
        job = Job([7], lambda *ended: cancelled.append(ended))
        for token in range(engine_process.MAX_UNREAD + 1):
            job.put(7, Made(7, token), False, 3.0)
        assert not cancelled, "many tokens at once are no fault of the reader"
        job.put(7, Made(7, 0), False, 3.1 + engine_process.UNREAD_S)
        assert cancelled == [(7, "abort")]
        with pytest.raises(ApiError, match="not read"):
            await job.read()

    asyncio.run(read_late())


def test_a_response_that_is_not_streamed_takes_many_tokens_at_once():
    async def take() -> None:
        job = Job([3, 4], lambda number, how: None, at_once=3)
        job.put(3, Made(3, 1), False, 0.0)
        job.put(4, Made(4, 2), False, 0.0)
        reading = asyncio.ensure_future(job.read())
        assert len(await reading) == 2, "what is there is read"
        reading = asyncio.ensure_future(job.read())
        await asyncio.sleep(0)
        for number in (3, 4):
            job.put(number, Made(number, 5), False, 0.0)
            await asyncio.sleep(0)
            assert not reading.done()
        job.put(3, Made(3, 6), False, 0.0)
        assert len(await reading) == 3
        reading = asyncio.ensure_future(job.read())
        await asyncio.sleep(0)
        job.put(4, Made(4, 7, "stop"), True, 0.0)
        assert len(await reading) == 1, "the last token of one is not kept waiting"

    asyncio.run(take())


def test_an_engine_error_is_logged_without_what_a_client_wrote():
    async def fail(engine: EngineProcess) -> None:
        job = engine.submit([ASK])
        number = next(iter(engine._open))
        engine._hear(Step(engine.state, [Failed(number, "NonFinite", "a secret")]))
        with pytest.raises(ApiError, match="its log has the reason"):
            await job.read()

    assert with_engine(fail) == ["error: a request failed: NonFinite"]


def test_a_sequence_that_ended_gets_nothing_more():
    async def end() -> None:
        cancelled: list[tuple[int, str]] = []
        job = Job([3, 4], lambda *ended: cancelled.append(ended))
        job.put(3, Made(3, 1), False, 0.0)
        job.end(0, "stop")
        job.put(3, Made(3, 2), False, 0.0)
        job.put(4, Made(4, 5, "stop"), True, 0.0)
        assert [(news.sequence, news.what.token) for news in await job.read()] == [(0, 1), (1, 5)]
        assert await job.read() == [] and not job._open
        assert cancelled == [(3, "stop")]

    asyncio.run(end())
