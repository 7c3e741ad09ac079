"""Who may use a session and when: generations, threads, closing, forks. Never a crash or a hang."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from sessions import loss_of, make_session, pages_used

import clocher_runtime
from clocher_kernels.errors import SessionBusy, UsageError
from clocher_runtime.api import LanguageModel
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow

PROMPT = [5, 6, 7]
LENGTH = 12
SECONDS = 60
"""After which a child process, or a thread, counts as hanging."""


@cache
def weights() -> Model:
    return load_model(open_checkpoint(embedded_model()))


def ids_of(session: Session, prompt: list[int] | None = None, length: int = LENGTH) -> list[int]:
    tokens = session.generate([prompt or PROMPT], length, stop_ids=frozenset())
    return [token.id for token in tokens]


@pytest.fixture
def session() -> Iterator[Session]:
    made = make_session(weights(), threads=2, context=256, all_logits=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    lone = make_session(weights(), context=256)
    try:
        return ids_of(lone)
    finally:
        lone.close()


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns or raises in a thread of its own."""
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return results[0]


USES: dict[str, Callable[[Session], Any]] = {
    "generate": lambda s: ids_of(s),
    "logits": lambda s: s.logits(PROMPT),
    "warm": lambda s: s.warm(),
    "work_touch": lambda s: s.work_touch(64, 64),
    "perplexity": lambda s: loss_of(s, PROMPT * 4, 4),
}


@pytest.mark.parametrize("use", USES)
def test_a_suspended_generation_shares_the_session(
    session: Session, expected: list[int], use: str
) -> None:
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    made = [next(stream).id for _ in range(3)]
    for call in (USES[use], lambda s: in_thread(lambda: USES[use](s))):
        result = call(session)
        assert not isinstance(result, Exception)
        assert use != "generate" or result == expected
    assert made + [token.id for token in stream] == expected
    assert_idle(session)


def assert_idle(session: Session) -> None:
    """Fail if a page is lost, or in use though nobody generates."""
    assert pages_used(session) == 0


def test_what_crashed_before() -> None:
    with clocher_runtime.load(threads=1) as model:
        alone = model.generate(PROMPT, max_new=40)
        stream = model.stream_generate(PROMPT, max_new=40)
        pieces = [next(stream) for _ in range(3)]
        assert len("".join(model.stream_generate([5] * 4090, max_new=10))) > 0
        assert "".join([*pieces, *stream]) == alone


def test_generations_interleave_in_one_thread(session: Session, expected: list[int]) -> None:
    streams = [session.generate([PROMPT], LENGTH, stop_ids=frozenset()) for _ in range(5)]
    made: list[list[int]] = [[] for _ in streams]
    for _ in range(LENGTH):
        for stream, ids in zip(streams, made, strict=True):
            ids.append(next(stream).id)
    assert made == [expected] * 5
    assert_idle(session)


@pytest.mark.parametrize("how", ["closed", "dropped", "finished", "in a cycle", "failed"])
def test_a_generation_gives_the_session_back(
    session: Session, expected: list[int], how: str
) -> None:
    stream: Any = session.generate([PROMPT], LENGTH)
    next(stream)
    if how == "closed":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "dropped":
        del stream
    elif how == "finished":
        list(stream)
    elif how == "in a cycle":
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    else:
        stream.close()

        def fail(tokens: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            list(session.generate([PROMPT], LENGTH, after_token=fail))
    assert ids_of(session) == expected


def test_a_generation_that_was_never_begun_takes_nothing(
    session: Session, expected: list[int]
) -> None:
    waiting = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    assert ids_of(session) == expected
    assert [token.id for token in waiting] == expected


def test_while_a_step_runs_everything_else_waits(session: Session, expected: list[int]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(tokens: int) -> None:
        inside.set()
        assert go_on.wait(SECONDS)

    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset(), after_token=hold)
    made: list[int] = []
    thread = threading.Thread(target=lambda: made.extend(token.id for token in stream))
    thread.start()
    assert inside.wait(SECONDS)
    results: dict[str, Any] = {}
    others = [
        threading.Thread(target=lambda use=use: results.update({use: USES[use](session)}))
        for use in USES
    ]
    for other in others:
        other.start()
    others[0].join(0.2)
    assert not results, "a step was disturbed"
    go_on.set()
    for other in (*others, thread):
        other.join(SECONDS)
        assert not other.is_alive()
    assert set(results) == set(USES) and results["generate"] == made == expected


@pytest.mark.parametrize("use", [*USES, "close", "next"])
def test_calls_from_within_a_step_are_refused(
    session: Session, expected: list[int], use: str
) -> None:
    def call(tokens: int) -> None:
        calls = {**USES, "close": Session.close, "next": lambda s: next(made)}
        with pytest.raises(SessionBusy, match="within a step"):
            calls[use](session)

    made = session.generate([PROMPT], LENGTH, stop_ids=frozenset(), after_token=call)
    assert [token.id for token in made] == expected


def test_a_right_that_ctrl_c_kept_from_being_given_back_is_found(
    session: Session, expected: list[int]
) -> None:
    session._lock._leader = threading.get_ident()
    assert ids_of(session) == expected
    session._lock._leader = threading.get_ident()
    session.close()


def test_a_thread_joins_beside_a_running_generation() -> None:
    session = make_session(weights(), threads=2, batch=2, context=256)
    long = session.generate([PROMPT], 200, stop_ids=frozenset())
    left: list[int] = []

    def work() -> None:
        left.extend(token.id for token in long)

    next(long)
    thread = threading.Thread(target=work)
    thread.start()
    list(session.generate([[8, 9]], 1, stop_ids=frozenset()))
    assert len(left) < 150, "it was let in only near the end of the other"
    thread.join(SECONDS)
    assert len(left) == 199
    session.close()


def test_a_generation_closed_before_it_joined_stays_away(session: Session) -> None:
    stream = session.generate([PROMPT], LENGTH)
    stream.close()
    assert list(stream) == [] and session.scheduler.is_idle


def test_ctrl_c_in_a_step_loses_no_page(
    session: Session, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = session.scheduler.pages
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    next(stream)

    def cut(*_: object) -> bool:
        pages._pools[0].take()  # and before it is noted:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pages, "reserve", cut)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert_idle(session)
    assert ids_of(session) == expected


def test_an_interpreter_ends_while_a_daemon_thread_generates() -> None:
    code = (
        "import threading, time, clocher_runtime as c\nm = c.load(threads=1)\n"
        "def work():\n    while True: m.generate([5], 400)\n"
        "threading.Thread(target=work, daemon=True).start(); time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_measured_generation_is_alone(session: Session, expected: list[int]) -> None:
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset(), window=TimedWindow("a"))
    made = [next(stream).id]
    with pytest.raises(SessionBusy, match="measured"):
        ids_of(session)
    assert made + [token.id for token in stream] == expected
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    next(stream)
    with pytest.raises(SessionBusy, match="measured"):
        list(session.generate([PROMPT], LENGTH, window=TimedWindow("b")))


def test_closing_waits_for_the_step_and_ends_what_others_generate() -> None:
    session = make_session(weights(), threads=2, batch=2, context=256)
    began = threading.Event()
    results: list[Any] = []

    def work() -> None:
        try:
            for _ in session.generate([PROMPT], 10**6, stop_ids=frozenset()):
                began.set()
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert began.wait(SECONDS)
    session.close()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert all(isinstance(r, UsageError) and "closed" in str(r) for r in results)


def test_closing_ends_a_suspended_generation() -> None:
    session = make_session(weights(), threads=2, context=64, all_logits=True)
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    next(stream)
    session.close()
    session.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="the session is closed; load the model again"):
            next(stream)
    stream.close()
    for use in USES.values():
        with pytest.raises(UsageError, match="the session is closed"):
            use(session)


def test_a_finished_generation_stays_finished_after_close() -> None:
    session = make_session(weights(), context=64)
    stream = session.generate([PROMPT], 2, stop_ids=frozenset())
    assert len(list(stream)) == 2
    session.close()
    assert list(stream) == []


def test_closing_a_model_ends_its_text() -> None:
    model = clocher_runtime.load(threads=2, context=64)
    stream = model.stream_generate(PROMPT)
    next(stream)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        next(stream)
    for use in (model.generate, model.stream_generate, lambda p: model.generate_batch([p])):
        with pytest.raises(UsageError, match="closed"):
            list(use(PROMPT))


def test_tokens_carry_their_logits(session: Session) -> None:
    tokens = list(session.generate([PROMPT], 4, stop_ids=frozenset(), logits=True))
    alone = session.logits([*PROMPT, *(token.id for token in tokens[:-1])])
    for token, logits in zip(tokens, alone[len(PROMPT) - 1 :], strict=True):
        assert token.logits is not None
        assert np.array_equal(token.logits, logits)
    (plain,) = session.generate([PROMPT], 1)
    assert plain.logits is None


def test_two_threads_take_the_items_of_one_generation(
    session: Session, expected: list[int]
) -> None:
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    made: list[int] = []
    odd: list[BaseException] = []
    lock = threading.Lock()

    def take() -> None:
        while True:
            try:
                token = next(stream)
            except StopIteration:
                return
            except BaseException as error:
                odd.append(error)
                return
            with lock:
                made.append(token.id)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not odd and sorted(made) == sorted(expected)


def test_two_sessions_in_two_threads(expected: list[int]) -> None:
    sessions = [make_session(weights(), threads=2, context=256) for _ in "ab"]
    results: list[list[list[int]]] = [[], []]

    def work(which: int) -> None:
        for _ in range(10):
            results[which].append(ids_of(sessions[which]))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for session in sessions:
        session.close()
    assert results == [[expected] * 10] * 2


def in_child(work: Callable[[], bool]) -> None:
    """Fail unless a function returns True in a fork of this process, in time."""
    child = os.fork()
    if not child:
        code = 3
        try:
            signal.alarm(SECONDS)  # ends a child that hangs
            code = 0 if work() else 4
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"signal {status & 127}, exit code {status >> 8}"


@pytest.mark.parametrize("threads", [1, 3])
def test_the_child_of_a_fork_generates(threads: int, expected: list[int]) -> None:
    session = make_session(weights(), threads=threads, context=256)
    assert ids_of(session) == expected
    stream = session.generate([PROMPT], LENGTH, stop_ids=frozenset())
    begun = [next(stream).id for _ in range(4)]

    def child() -> bool:
        resumed = begun + [token.id for token in stream] == expected
        anew = ids_of(session) == expected
        in_child(lambda: ids_of(session) == expected)
        session.close()
        return resumed and anew

    in_child(child)
    assert begun + [token.id for token in stream] == expected  # the parent is not disturbed
    session.close()
    in_child(lambda: isinstance(in_thread(lambda: ids_of(session)), UsageError))


def test_a_fork_during_a_step_of_another_thread(expected: list[int]) -> None:
    session = make_session(weights(), threads=2, context=256)
    other = make_session(weights(), threads=2, context=256)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            ids_of(session)

    thread = threading.Thread(target=work)
    thread.start()

    def child() -> bool:
        return ids_of(session) == expected and ids_of(other) == expected

    try:
        for _ in range(10):
            in_child(child)
    finally:
        stop.set()
        thread.join(SECONDS)
    assert ids_of(session) == expected
    session.close()
    other.close()


def test_multiprocessing_by_fork(session: Session, expected: list[int]) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=lambda: queue.put(ids_of(session)), daemon=True) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=SECONDS) for _ in workers] == [expected] * 2
    for worker in workers:
        worker.join(SECONDS)
        assert worker.exitcode == 0


class Shared:
    """A model that threads use at the same time, and now and then close and load again."""

    def __init__(self) -> None:
        self.model = self.load()
        self.stream = self.model.stream_generate(PROMPT, LENGTH)
        self.reloading = threading.Lock()
        self.right = self.refused = 0

    @staticmethod
    def load(threads: int = 2) -> LanguageModel:
        return clocher_runtime.load(threads=threads, batch=3, context=128, all_logits=True)

    def reload(self) -> None:
        if self.reloading.acquire(blocking=False):
            try:
                self.model.close()
                self.model = self.load()
                self.stream = self.model.stream_generate(PROMPT, LENGTH)
            finally:
                self.reloading.release()


_BAD: tuple[Callable[[LanguageModel], Any], ...] = (
    lambda m: m.generate(PROMPT, max_new=float("nan")),  # type: ignore[arg-type]
    lambda m: m.generate([1.5]),  # type: ignore[list-item]
    lambda m: m.generate([4096]),
    lambda m: m.generate(PROMPT * 100),
    lambda m: m.generate_batch([]),
    lambda m: m.generate_batch("text"),
    lambda m: m.generate(PROMPT, temperature="hot"),
    lambda m: m.chat("text"),  # type: ignore[arg-type]
    lambda m: m.session.logits([-1]),
)
_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
)
_PROMPTS = (PROMPT, [8], list(range(100, 140)), "def f(x):")


def _requests(model: LanguageModel) -> tuple[dict[Any, str], dict[int, list[str]], np.ndarray]:
    """Return what a lone run gives for every request."""
    texts = {
        (p, s): model.generate(prompt, LENGTH, **settings)
        for p, prompt in enumerate(_PROMPTS)
        for s, settings in enumerate(_SETTINGS)
    }
    batches = {s: [texts[p, s] for p in range(3)] for s in range(len(_SETTINGS))}
    return texts, batches, model.session.logits(PROMPT)


def _call(shared: Shared, rng: np.random.Generator, lone: Any) -> None:
    """Make one random call; fail unless its result is what a lone run gives."""
    texts, batches, logits = lone
    model = shared.model
    p, s = int(rng.integers(len(_PROMPTS))), int(rng.integers(len(_SETTINGS)))
    prompt, settings, text = _PROMPTS[p], _SETTINGS[s], texts[p, s]
    kind = rng.random()
    if kind < 0.3:
        assert model.generate(prompt, LENGTH, **settings) == text
    elif kind < 0.5:
        stream, pieces = model.stream_generate(prompt, LENGTH, **settings), []
        for _ in range(int(rng.integers(1, LENGTH))):
            pieces.append(next(stream, ""))
        assert text.startswith("".join(pieces))
        if kind < 0.4:
            stream.close()
    elif kind < 0.6:
        assert model.generate_batch(_PROMPTS[:3], LENGTH, **settings) == batches[s]
    elif kind < 0.7:
        assert np.array_equal(model.session.logits(PROMPT), logits)
    elif kind < 0.75:
        for token in model.session.generate([PROMPT], 3, logits=True):
            assert token.logits is not None and token.logits.argmax() == token.id
    elif kind < 0.8:
        next(shared.stream, None)
    elif kind < 0.85:
        model.session.warm()
    elif kind < 0.99:
        with pytest.raises(UsageError):
            _BAD[int(rng.integers(len(_BAD)))](model)
    else:
        shared.reload()


def random_calls(threads: int, calls: int) -> Shared:
    """Let threads make random calls on one model; return it."""
    with Shared.load(threads=1) as model:
        lone = _requests(model)
    shared = Shared()
    wrong: list[BaseException] = []
    counts = np.zeros((threads, 2), np.int64)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(calls):
            try:
                _call(shared, rng, lone)
                counts[number, 0] += 1
            except UsageError:  # the model was closed
                counts[number, 1] += 1
            except BaseException as error:
                wrong.append(error)
                return

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    shared.stream.close()
    assert shared.model.generate(PROMPT, LENGTH) == lone[0][0, 0]
    shared.model.close()
    if wrong:
        raise wrong[0]
    shared.right, shared.refused = (int(n) for n in counts.sum(axis=0))
    return shared


def test_random_calls_of_many_threads() -> None:
    shared = random_calls(8, 20)
    assert shared.right + shared.refused == 160 and shared.right > 15


@pytest.mark.slow
def test_random_calls_of_64_threads() -> None:
    shared = random_calls(64, 200)
    print(f"{shared.right} right, {shared.refused} refused")
    assert shared.right + shared.refused == 64 * 200 and shared.right > 500
