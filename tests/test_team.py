"""The thread team: barriers, parking, oversubscription, shutdown, and when barriers are needed."""

import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from commands import python
from kernel_run import kernel_cache

from clocher_kernels.errors import DeviceError, UsageError
from cpu_fallback.lanes.jit import Kernel, warm
from cpu_fallback.lanes.memory import read_i64, write_i64
from cpu_fallback.team import tape
from cpu_fallback.team.placement import Hints
from cpu_fallback.team.tape import Launch, fetch_add, sleep_ns
from cpu_fallback.team.team import Team

pytestmark = pytest.mark.usefixtures("kernel_cache")
__all__ = ["kernel_cache"]


@Kernel
def mark(rec, ctl, rank, size, scratch):
    """Count up this thread's slot. Fields: slots, errors."""
    slot = read_i64(rec) + 8 * rank
    write_i64(slot, read_i64(slot) + 1)


@Kernel
def compare(rec, ctl, rank, size, scratch):
    """Count the slots that differ from this thread's. Fields: slots, errors."""
    mine = read_i64(read_i64(rec) + 8 * rank)
    for other in range(size):
        if read_i64(read_i64(rec) + 8 * other) != mine:
            fetch_add(read_i64(rec + 8), 1)


@Kernel
def touch(rec, ctl, rank, size, scratch):
    """Write this thread's scratch. Fields: bytes."""
    for i in range(0, read_i64(rec), 8):
        write_i64(scratch + i, rank)


@Kernel
def tally(rec, ctl, rank, size, scratch):
    """Count the calls for each share. Fields: counts [size], last size."""
    fetch_add(read_i64(rec) + 8 * rank, 1)
    write_i64(read_i64(rec + 8), size)


@Kernel
def dawdle(rec, ctl, rank, size, scratch):
    """Count shares by thread; thread 0 takes its time. Fields: counts [threads], its scratch."""
    me = 1
    if scratch == read_i64(rec + 8):
        me = 0
        sleep_ns(2_000_000)
    fetch_add(read_i64(rec) + 8 * me, 1)


@Kernel
def linger(rec, ctl, rank, size, scratch):
    """Let all but the first thread sleep for less time than a waiting thread yields."""
    if rank:
        sleep_ns(100_000)


SLOTS = frozenset({"slots"})
NOTHING: frozenset[str] = frozenset()


def _rounds(slots: np.ndarray, errors: np.ndarray, rounds: int) -> np.ndarray:
    fields = (slots.ctypes.data, errors.ctypes.data)
    launches = [Launch(mark, fields, SLOTS, SLOTS), Launch(compare, fields, SLOTS, NOTHING)]
    assert tape.barriers(launches * 2) == [False, True, True, True]
    warm([mark, compare, tape.lead, tape.serve])
    return tape.encode(launches * rounds)


@pytest.fixture
def state() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    before = set(threading.enumerate())
    yield np.zeros(16, np.int64), np.zeros(1, np.int64)
    gc.collect()
    assert set(threading.enumerate()) <= before, "a test left a thread behind"


@pytest.mark.parametrize(("threads", "steps"), [(1, 500), (2, 2000), (3, 30), (5, 10)])
def test_every_thread_sees_every_write(
    state: tuple[np.ndarray, np.ndarray], threads: int, steps: int
) -> None:
    slots, errors = state
    team = Team(threads, _rounds(slots, errors, 5), 0, Hints(adaptive=False))
    with team.running():
        for _ in range(steps):
            team.step(1, 1)
    for _ in range(5):
        team.step(1, 1)
    team.close()
    assert errors[0] == 0
    assert (slots[:threads] == 5 * (steps + 5)).all() and not slots[threads:].any()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shares", [1, 2, 3, 8])
def test_every_share_is_executed_once(
    state: tuple[np.ndarray, np.ndarray], threads: int, shares: int
) -> None:
    counts, size = np.zeros(32, np.int64), np.zeros(1, np.int64)
    warm([tally, tape.lead, tape.serve])
    fields = (counts.ctypes.data, size.ctypes.data)
    launch = Launch(tally, fields, SLOTS, SLOTS, shares=shares)
    words = tape.encode([launch] * 3)
    team = Team(threads, [words, *[tape.encode([launch] * 3, words)] * (threads - 1)], 0)
    with team.running():
        for active in [*range(1, threads + 1)] * 20:
            team.work.pace.active = active
            counts[:] = 0
            team.step(1, 1)
            parts = active * shares if active > 1 else 1
            assert size[0] == parts
            assert (counts[:parts] == 3).all() and not counts[parts:].any()
    team.close()


def test_others_take_over_the_shares_of_a_slow_thread(
    state: tuple[np.ndarray, np.ndarray],
) -> None:
    slots, _ = state
    warm([dawdle, tape.lead, tape.serve])
    words = tape.encode([Launch(dawdle, (slots.ctypes.data, 0), SLOTS, SLOTS, shares=8)])
    team = Team(2, words, 64, Hints(adaptive=False))
    words[6] = team.work.scratch.ctypes.data
    team.step(1, 1)
    team.close()
    # Each has 6 of its own. Thread 0 sleeps for 12 ms in these; the other 4 are gone by then.
    assert slots[:2].tolist() == [6, 10]


@pytest.mark.skipif("linux" not in sys.platform, reason="counts switches of threads as Linux does")
def test_a_short_wait_puts_no_thread_to_sleep() -> None:
    """A waiting thread that sleeps makes the others wait for it, and sleep in turn."""
    warm([linger, tape.lead, tape.serve])
    launches = 100
    words = tape.encode([Launch(linger, (), SLOTS, SLOTS)] * launches)
    team = Team(2, words, 64, Hints(adaptive=False))
    with team.running():
        team.step(1, 1)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        team.step(1, 1)
        slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    team.close()
    assert slept < launches // 2


def test_a_team_shrinks_while_threads_wait_for_each_other(
    state: tuple[np.ndarray, np.ndarray],
) -> None:
    slots, _ = state
    warm([dawdle, tape.lead, tape.serve])
    words = tape.encode([Launch(dawdle, (slots.ctypes.data, 0), SLOTS, SLOTS)])
    team = Team(2, words, 64)
    words[6] = team.work.scratch.ctypes.data + 64
    start = time.perf_counter()
    with team.running():
        while team.work.pace.active == 2 and time.perf_counter() - start < 10:
            team.step(1, 1)
    assert team.work.pace.active == 1
    team.close()


def test_scratch_is_private_and_as_large_as_asked(state: tuple[np.ndarray, np.ndarray]) -> None:
    warm([touch, tape.lead, tape.serve])
    team = Team(2, tape.encode([Launch(touch, (200,), NOTHING, NOTHING, 200)]), 200)
    team.step(1, 1)
    words = team.work.scratch.view(np.int64)
    assert team.work.scratch.ctypes.data % 64 == 0 and len(words) == 64
    assert not words[:32].any() and (words[32:57] == 1).all() and not words[57:].any()
    team.close()


def test_parked_threads_cost_nothing(state: tuple[np.ndarray, np.ndarray]) -> None:
    team = Team(2, _rounds(*state, 1), 0)
    with team.running():
        team.step(1, 1)
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.01
    team.close()


def test_waiting_for_the_next_step_is_not_a_busy_loop(state: tuple[np.ndarray, np.ndarray]) -> None:
    team = Team(2, _rounds(*state, 1), 0)
    with team.running():
        team.step(1, 1)
        used = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.2
        team.step(1, 1)
    team.close()


def test_more_threads_than_cores_slow_down_but_finish(
    state: tuple[np.ndarray, np.ndarray],
) -> None:
    slots, errors = state
    words = _rounds(slots, errors, 10)
    other_slots = np.zeros(16, np.int64)
    other_words = _rounds(other_slots, errors, 10)
    teams = [Team(2, tape, 0, Hints(adaptive=False)) for tape in (words, other_words)]

    def work(team: Team) -> None:
        with team.running():
            for _ in range(100):
                team.step(1, 1)

    start = time.perf_counter()
    runners = [threading.Thread(target=work, args=(team,)) for team in teams]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    seconds = time.perf_counter() - start
    for team in teams:
        team.close()
    # 4000 barriers. A plain spin barrier loses a time slice of milliseconds at each of them.
    assert seconds < 2
    assert errors[0] == 0 and (slots[:2] == 1000).all() and (other_slots[:2] == 1000).all()


def test_an_exception_leaves_the_team_usable(state: tuple[np.ndarray, np.ndarray]) -> None:
    slots, errors = state
    team = Team(2, _rounds(slots, errors, 1), 0, Hints(adaptive=False))
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt), team.running():
            team.step(1, 1)
            raise KeyboardInterrupt
        with team.running(), team.running():
            team.step(1, 1)
    team.close()
    assert errors[0] == 0 and (slots[:2] == 40).all()


def test_entering_and_leaving_without_a_step(state: tuple[np.ndarray, np.ndarray]) -> None:
    slots, errors = state
    team = Team(3, _rounds(slots, errors, 1), 0, Hints(adaptive=False))
    for turn in range(300):
        with team.running():
            if turn % 7 == 0:
                team.step(1, 1)
    team.close()
    assert errors[0] == 0 and (slots[:3] == 43).all()


def test_a_forgotten_team_ends_its_threads(state: tuple[np.ndarray, np.ndarray]) -> None:
    team = Team(2, _rounds(*state, 1), 0)
    worker = team._workers[0].thread
    del team
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()


def test_a_closed_team_says_so(state: tuple[np.ndarray, np.ndarray]) -> None:
    team = Team(2, _rounds(*state, 1), 0)
    team.close()
    team.close()
    with pytest.raises(UsageError, match="closed"):
        team.step(1, 1)
    with pytest.raises(UsageError, match="at least 1"):
        Team(0, np.zeros(0, np.int64), 0)


def _launch(reads: str, writes: str) -> Launch:
    return Launch(mark, (), frozenset(reads), frozenset(writes))


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        ("a>b c>d", "00"),
        ("a>b b>c", "01"),
        ("a>b a>c", "00"),
        ("a>b c>a", "01"),
        ("a>b c>b", "01"),
        ("a>b c>d b>e d>f", "0010"),
        ("a>b b>c a>d c>e", "0101"),
    ],
)
def test_barriers_stand_where_a_hazard_is(launches: str, expected: str) -> None:
    made = [_launch(*pair.split(">")) for pair in launches.split()]
    assert "".join(str(int(flag)) for flag in tape.barriers(made)) == expected


def test_the_child_of_a_fork_steps_with_workers_of_its_own(
    state: tuple[np.ndarray, np.ndarray],
) -> None:
    slots, errors = state
    team = Team(3, _rounds(slots, errors, 4), 0, Hints(adaptive=False))
    with team.running():
        team.step(1, 1)
        child = os.fork()
        if not child:
            code = 3
            try:
                signal.alarm(60)
                team.step(1, 1)  # of the context that the parent opened
                with team.running():
                    team.step(1, 1)
                team.close()
                code = 0 if not errors[0] and (slots[:3] == 12).all() else 4
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        team.step(1, 1)
    team.close()
    assert errors[0] == 0 and (slots[:3] == 8).all()


def test_a_fork_in_the_middle_of_a_step(state: tuple[np.ndarray, np.ndarray]) -> None:
    """The thread that leads the step is not there in the child; what it left must not matter."""
    slots, _ = state
    warm([dawdle, tape.lead, tape.serve])
    words = tape.encode([Launch(dawdle, (slots.ctypes.data, 0), SLOTS, SLOTS, shares=8)])
    team = Team(2, words, 64, Hints(adaptive=False))
    words[6] = team.work.scratch.ctypes.data
    leader = threading.Thread(target=team.step, args=(1, 1))
    leader.start()
    while not slots[1]:  # until the worker has begun on its shares
        time.sleep(0.0005)
    child = os.fork()
    if not child:
        code = 3
        try:
            signal.alarm(60)
            slots[:] = 0
            team.step(1, 1)
            code = 0 if slots[:2].sum() == 16 else 4
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    leader.join()
    assert slots[:2].sum() == 16
    team.close()


def test_more_threads_than_the_system_starts(
    state: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = _rounds(*state, 1)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "clocher-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DeviceError, match="no more than 3 of 5 threads; lower --threads"):
        Team(5, words, 0)


def test_a_team_takes_on_other_work_with_scratch_of_its_own(
    state: tuple[np.ndarray, np.ndarray],
) -> None:
    slots, errors = state
    others, size = np.zeros(16, np.int64), 1 << 20
    team = Team(3, _rounds(slots, errors, 5), 0, Hints(adaptive=False))
    running = threading.active_count()
    warm([touch])
    fields = (others.ctypes.data, errors.ctypes.data)
    launches = [Launch(mark, fields, SLOTS, SLOTS), Launch(touch, (size,), NOTHING, NOTHING)]
    guest = team.take_on(tape.encode(launches), size)
    assert threading.active_count() == running
    with team.running():
        for _ in range(20):
            team.step(1, 1)
            team.step(1, 1, guest)
            team.execute(tape.encode(launches[:1]), 1, 1, guest)
    team.step(1, 1, guest)
    team.close()
    assert errors[0] == 0
    assert (slots[:3] == 5 * 20).all() and not slots[3:].any()
    assert (others[:3] == 41).all() and not others[3:].any()


def test_an_interrupt_while_workers_are_woken_leaves_a_team_that_ends() -> None:
    """A signal in `threading.Event.set` left its lock taken in a third of the cases."""
    script = """
import signal
import numpy as np
from cpu_fallback.team.team import Team

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
team = Team(2, np.zeros(64, np.int64), 64)
(worker,) = team._workers
for turn in range(200):
    try:
        signal.setitimer(signal.ITIMER_REAL, 20e-6 + turn % 50 * 1e-6)
        while True:
            worker.wake()
    except KeyboardInterrupt:
        pass
team.close()
"""
    done = python("-c", script, timeout=60)
    assert done.returncode == 0, done.stderr
