"""The read bandwidth of this machine: how much is read, and where nothing is measured."""

import threading

import pytest

from clocher_kernels.errors import DeviceError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.loading import load_engine
from clocher_runtime.config.commands import resolve
from clocher_runtime.engine import backends, probes
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.inventory import EMBED
from clocher_runtime.serve.engine_main import ready_of
from cpu_fallback.team import bandwidth as read_loop

MIB = 1 << 20


def test_a_server_is_told_how_fast_its_weights_can_be_read() -> None:
    engine = load_engine(resolve({}, {}))
    try:
        assert 0.05 < ready_of(engine).about["read_gbps"] < 5000
    finally:
        engine.session.close()


def test_a_working_set_is_read() -> None:
    for threads in (1, 3):
        gbps = probes.read_gbps(3 * MIB, threads, "cpu")
        assert gbps is not None
        assert 0.05 < gbps < 5000


def test_the_buffer_is_as_large_as_the_working_set_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    monkeypatch.setattr(read_loop, "Reader", lambda pages, nbytes: sizes.append(nbytes))
    for nbytes in (9 * MIB, 900 << 30):
        backends.memory_reader(nbytes, "cpu")
    assert sizes == [9 * MIB, 256 * MIB]


def test_the_working_set_has_every_expert_and_no_table_that_is_looked_up() -> None:
    model = load_model(open_checkpoint(embedded_model()))
    assert model.spec.moe is not None
    most = sum(weight.nbytes for weight in model.weights.values())
    looked_up = 0 if model.spec.tied else model.weights[EMBED].nbytes
    assert probes.working_set(model) == most - looked_up > model.bytes_per_token


def test_not_measured_where_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.read_gbps(MIB, 1, "cuda") is None
    monkeypatch.setattr(backends, "available", lambda: 3 * MIB)
    assert probes.read_gbps(2 * MIB, 1, "cpu") is None


def test_a_refused_thread_leaves_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    start, asked = threading.Thread.start, []

    def refuse_the_third(thread: threading.Thread) -> None:
        asked.append(thread)
        if len(asked) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(DeviceError, match="starts no more than 3 of 4 threads"):
        read_loop.Reader("2m", 2 * MIB).gbps(4)
    for thread in asked[:2]:
        thread.join(10)
        assert not thread.is_alive()
    asked.clear()
    assert probes.read_gbps(2 * MIB, 4, "cpu") is None
