"""Where threads run, copies of hot weights per socket, and hints that reach kernels."""

import os
import threading

import numpy as np
import pytest
from kernel_run import kernel_cache

from clocher_kernels.formats import parse_format
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.command.loading import without_effect
from clocher_runtime.config.commands import resolve
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import Given
from clocher_runtime.engine.backends import make_executor
from clocher_runtime.engine.topology import Cpu, pinned_cpus, threads_of, usable_threads
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.team.placement import (
    Asked,
    Hints,
    Placement,
    call_on,
    hot_weights,
    pin,
    replicate,
    unpin,
)

pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no thread affinity here"),
]
__all__ = ["kernel_cache"]

RNG = np.random.default_rng(5)
M, V, N, K = 20, 30, 96, 640


def weight(n, k, fmt="f32"):
    return encode(RNG.standard_normal((n, k), dtype=np.float32), parse_format(fmt))


def model():
    """An embedding, a norm, a linear layer large enough to be shared out, and a second one."""
    buffers = {
        "ids": Buffer((M,), "i32", "M", "input"),
        "x": Buffer((M, K), "f32", "M", "scratch"),
        "h": Buffer((M, K), "f32", "M", "scratch"),
        "z": Buffer((M, K), "f32", "M", "scratch"),
        "y": Buffer((M, N), "f32", "M", "output"),
    }
    calls = (
        Call("embed", {"ids": "ids", "table": "table", "y": "x"}),
        Call("rms_norm", {"x": "x", "weight": "norm", "y": "h"}, {"eps": 1e-5}),
        Call("linear", {"x": "h", "w": "up", "y": "z"}),
        Call("linear", {"x": "z", "w": "down", "y": "y"}),
    )
    plan = Plan(M, M, buffers, {}, ("table", "norm", "up", "down"), calls)
    weights = {
        "table": weight(V, K, "bf16"),
        "norm": np.ones(K, np.float32),
        "up": weight(K, K, "int8_row_f32"),
        "down": weight(N, K, "bf16"),
    }
    return plan, weights


PLAN, WEIGHTS = model()


def outputs(threads, hints=None, tokens=M):
    executor = CpuExecutor(PLAN, WEIGHTS, threads, hints=hints)
    try:
        executor.array("ids")[...] = np.arange(M) % V
        executor.array("y")[...] = np.nan
        executor.step(tokens, 0)
        return executor.array("y")[:tokens].copy(), executor.acted_on
    finally:
        executor.close()


def two_cpus():
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[0], cpus[-1]


TWO_SOCKETS = Placement(two_cpus(), (0, 1))


def test_threads_are_pinned_and_the_caller_gets_its_cpus_back():
    before = os.sched_getaffinity(0)
    executor = CpuExecutor(PLAN, WEIGHTS, 2, hints=Hints(placement=TWO_SOCKETS))
    worker = executor._team._workers[0].thread
    with executor.running(), executor.running():
        executor.step(1, 0)
        assert os.sched_getaffinity(0) == {TWO_SOCKETS.cpus[0]}
        assert os.sched_getaffinity(worker.native_id) == {TWO_SOCKETS.cpus[1]}
    assert os.sched_getaffinity(0) == before
    executor.step(1, 0)
    assert os.sched_getaffinity(0) == before
    with pytest.raises(KeyboardInterrupt), executor.running():
        raise KeyboardInterrupt
    assert os.sched_getaffinity(0) == before
    executor.close()
    assert os.sched_getaffinity(0) == before


def test_the_cpus_go_back_to_the_thread_that_they_were_taken_from():
    before = os.sched_getaffinity(0)
    executor = CpuExecutor(PLAN, WEIGHTS, 1, hints=Hints(placement=TWO_SOCKETS))
    context = executor.running()
    context.__enter__()
    ender = threading.Thread(target=context.__exit__, args=(None, None, None))
    ender.start()
    ender.join()
    assert os.sched_getaffinity(0) == before
    executor.close()


def test_without_a_placement_nothing_is_pinned():
    before = os.sched_getaffinity(0)
    executor = CpuExecutor(PLAN, WEIGHTS, 2)
    worker = executor._team._workers[0].thread
    with executor.running():
        assert os.sched_getaffinity(0) == before == os.sched_getaffinity(worker.native_id)
    executor.close()


def test_a_cpu_that_is_not_there_is_a_warning(caplog):
    before = os.sched_getaffinity(0)
    assert pin(1 << 15) == frozenset()
    assert "could not pin a thread to CPU 32768" in caplog.text
    unpin(frozenset(before), 1 << 30)
    assert os.sched_getaffinity(0) == before


def test_more_threads_than_cpus_wrap_around():
    placement = Placement((4, 6), (0, 1))
    assert [placement.cpu(rank) for rank in range(5)] == [4, 6, 4, 6, 4]
    assert placement.homes(1) == {0: 4}
    assert placement.homes(5) == {0: 4, 1: 6}
    assert Placement().homes(5) == {} and Placement().cpu(3) is None


def test_hot_weights_are_those_that_every_step_reads_whole():
    assert hot_weights(PLAN, WEIGHTS, 0) == ["norm", "up", "down"]
    assert hot_weights(PLAN, WEIGHTS, 4 * K + WEIGHTS["down"].nbytes) == ["norm", "down"]
    assert hot_weights(PLAN, WEIGHTS, 1) == []


def test_copies_are_equal_and_apart():
    names = ["norm", "up"]
    copies = call_on(two_cpus()[1], lambda: replicate(WEIGHTS, names))
    assert list(copies) == names
    up = copies["up"]
    assert isinstance(up, QuantTensor)
    for plane, array in up.planes.items():
        original = WEIGHTS["up"].planes[plane]
        assert not np.shares_memory(array, original)
        np.testing.assert_array_equal(array, original)
    np.testing.assert_array_equal(copies["norm"], WEIGHTS["norm"])


def test_an_error_on_another_cpu_comes_back():
    with pytest.raises(ZeroDivisionError):
        call_on(two_cpus()[0], lambda: 1 // 0)


def test_each_socket_reads_its_own_copies_and_results_are_the_same():
    expected, acted_on = outputs(2)
    assert "hot_replicate" not in acted_on and not np.isnan(expected).any()
    hints = Hints(placement=TWO_SOCKETS, hot_replicate=True)
    for tokens in (1, M):
        got, acted_on = outputs(2, hints, tokens)
        assert {"hot_replicate", "placement"} <= acted_on
        np.testing.assert_array_equal(got, expected[:tokens])
    executor = CpuExecutor(PLAN, WEIGHTS, 3, hints=hints)
    tapes = [id(tape) for tape in executor._team.work.tapes]
    assert tapes[0] == tapes[2] != tapes[1]
    first, second = (set(executor._team.work.tapes[i].tolist()) for i in (0, 1))
    for name, own, other in (("norm", first, second), ("norm", second, first)):
        mine = [c[name].ctypes.data for c in executor._copies if c[name].ctypes.data in own]
        assert len(mine) == 1 and mine[0] not in other
        assert WEIGHTS[name].ctypes.data not in own
    executor.close()


@pytest.mark.parametrize(
    "hints",
    [
        Hints(placement=Placement(two_cpus(), (0, 0)), hot_replicate=True),
        Hints(hot_replicate=True),
        Hints(placement=TWO_SOCKETS, hot_replicate=True, hot_limit=1),
    ],
    ids=["one-socket", "not-pinned", "nothing-fits"],
)
def test_where_there_is_nothing_to_copy_nothing_is_claimed(hints):
    got, acted_on = outputs(2, hints)
    assert "hot_replicate" not in acted_on
    np.testing.assert_array_equal(got, outputs(2)[0])


@pytest.mark.parametrize("block", [0, 1000, 2048, 1 << 20])
def test_blocks_change_no_bit(block):
    expected = outputs(1)[0]
    got, acted_on = outputs(1, Hints(stream_block_bytes=block))
    assert "stream_block_bytes" in acted_on
    np.testing.assert_array_equal(got, expected)


def test_block_columns():
    assert Asked().block_columns(512, 4096, 4096, 8) == 512
    for wanted, columns in ((0, 128), (8 * 256, 256), (8 * 300, 256), (1 << 30, 512)):
        assert Asked(Hints(stream_block_bytes=wanted)).block_columns(512, 4096, 4096, 8) == columns
    assert Asked().prefetch_distance(77) == 77
    assert Asked(Hints(prefetch_distance=0)).prefetch_distance(77) == 0


def machine(monkeypatch, *sockets):
    cpus = tuple(Cpu(i, i, 0, socket, socket, socket, 0) for i, socket in enumerate(sockets))
    monkeypatch.setattr("clocher_runtime.engine.topology.read_cpus", lambda: cpus)


@pytest.mark.parametrize(
    ("environ", "cpus"),
    [
        ({}, ()),
        ({"AFFINITY": "compact"}, ()),
        ({"IE_TP_USE_AFFINITY": "1"}, (0, 1, 2)),
        ({"IE_TP_USE_AFFINITY": "1", "AFFINITY": "scatter"}, (0, 2, 1)),
        ({"NUMA_POLICY": "scatter"}, (0, 2, 1)),
        ({"NUMA_POLICY": "socket:1"}, (2, 3)),
        ({"IE_HOT_REPLICATE": "1"}, (0, 1, 2)),
    ],
    ids=str,
)
def test_what_a_run_asks_for(monkeypatch, environ, cpus):
    machine(monkeypatch, 0, 0, 1, 1)
    found = pinned_cpus(resolve({"threads": "3"}, environ))
    assert tuple((cpu.id, cpu.socket) for cpu in found) == tuple((i, i // 2) for i in cpus)


def test_limits_and_distances_reach_the_team(monkeypatch):
    machine(monkeypatch, 0, 0)
    seen = []

    class Executor:
        def __init__(self, plan, weights, threads, progress, hints, *rest):
            seen.append((threads, hints))

    monkeypatch.setattr("cpu_fallback.executor.CpuExecutor", Executor)
    environ = {"IE_HOT_REPL_LIMIT_MB": "3", "IE_HOT_REPLICATE": "1", "CLOCHER_THREADS": "2"}
    for distance in ("256", "auto"):
        config = resolve({}, environ | {"IE_PREFETCH_DISTANCE": distance})
        make_executor(None, {}, config)
    hints = [each for _, each in seen]
    assert [threads for threads, _ in seen] == [2, 2]
    assert [each.prefetch_distance for each in hints] == [256, None]
    assert (hints[0].placement.cpus, hints[0].hot_limit) == ((), 3 << 20)


def test_threads_of_one_socket(monkeypatch):
    machine(monkeypatch, 0, 0, 1)
    assert threads_of(EngineConfig(numa_policy="socket:1")) == 1
    monkeypatch.setattr("clocher_runtime.engine.topology.usable_cpus", lambda: frozenset(range(3)))
    on_socket = {"numa_policy": "socket:1"}
    assert usable_threads(EngineConfig(threads=2, **on_socket)) == 2
    assert usable_threads(EngineConfig(threads=4, **on_socket)) == 3


def test_what_was_not_acted_on_is_told():
    given = {
        "affinity": Given("AFFINITY", "compact"),
        "use_affinity": Given("IE_TP_USE_AFFINITY", "0"),
        "hot_replicate": Given("IE_HOT_REPLICATE", "1"),
        "hot_repl_limit_mb": Given("IE_HOT_REPL_LIMIT_MB", "9"),
        "prefetch_distance": Given("IE_PREFETCH_DISTANCE", "64"),
        "threads": Given("CLOCHER_THREADS", "3"),
    }
    config = EngineConfig(given=given)
    ignored = ("AFFINITY=compact", "IE_HOT_REPLICATE=1", "IE_HOT_REPL_LIMIT_MB=9")
    assert config.unmet(without_effect({"prefetch_distance"})) == ignored
    acted_on = {"placement", "hot_replicate", "prefetch_distance"}
    assert config.unmet(without_effect(acted_on)) == ()
