"""The step loop: any schedule gives each request what it gets alone, and no page is ever lost."""

import hashlib
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sessions import page_stats, pool_stats

from clocher_kernels.errors import NonFinite
from clocher_kernels.plan import DRAW_INPUTS
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.binding import Bound
from clocher_runtime.engine.pages import KvPages, PagePool, window_pages
from clocher_runtime.engine.requests import OutputQueue, Request
from clocher_runtime.engine.scheduler import Scheduler
from clocher_runtime.engine.timing import StepTimes, TimedWindow
from clocher_runtime.models.build import PAGE_CELLS, Sizes

WINDOW = 100
VOCABULARY = 50


def next_id(seen: bytes, near: bytes, seed: int, draw: int) -> int:
    """What the model below goes on with: a hash of all cells, and of those in the window."""
    digest = hashlib.blake2b(seen + b"|" + near + b"%d %d" % (seed, draw), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def alone(
    ids: list[int],
    count: int,
    seed: int,
    stop: frozenset[int] = frozenset(),
    adapter: int = 0,
) -> list[int]:
    """The tokens that a prompt is followed by."""
    ids, made = list(ids), []
    for draw in range(count):
        seen = np.array(ids, np.int32) + np.int32(VOCABULARY * adapter)
        near = seen[max(0, len(ids) - WINDOW) :]
        made.append(next_id(seen.tobytes(), near.tobytes(), seed, draw))
        ids.append(made[-1])
        if made[-1] in stop:
            break
    return made


class Executor:
    """A model whose keys are the ids, other ones with an adapter.

    It reads them through the page tables, like attention.
    """

    def __init__(self, slots: int, chunk: int, context: int, pages: int, few: int) -> None:
        blocks = -(-context // PAGE_CELLS)
        self.plan = SimpleNamespace(tokens=chunk, rows=slots, buffers={"adapters": None})
        tables = {"pages": (slots, blocks), "window_pages": (slots, blocks)}
        names = ("ids", "slots", "positions", "ends", "ancestors", "adapters")
        tokens = dict.fromkeys(names, (chunk,))
        rows = dict.fromkeys(
            ("rows", *DRAW_INPUTS, "sampled"),
            (slots,),
        )
        self.arrays = {n: np.zeros(s, np.int32) for n, s in {**tables, **tokens, **rows}.items()}
        self.arrays["ancestors"] = np.zeros(chunk, np.uint64)
        self.arrays["seeds"] = np.zeros(slots, np.uint64)
        self.arrays["allowed"] = np.zeros((slots, 1), np.uint32)
        self.arrays["temperature"] = np.zeros(slots, np.float32)
        self.arrays["top_p"] = np.zeros(slots, np.float32)
        self.arrays["min_p"] = np.zeros(slots, np.float32)
        self.arrays["edit_ids"] = np.zeros(0, np.int32)
        self.arrays["edits"] = np.zeros((0, 3), np.float32)
        self.cells = {
            "pages": np.full((pages, PAGE_CELLS), -7, np.int32),
            "window_pages": np.full((few, PAGE_CELLS), -7, np.int32),
        }
        self.steps: list[tuple[int, int]] = []
        self.awake = 0

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def upload(self, masks: int | None = None, edits: int | None = None) -> None:
        assert masks is not None and masks <= len(self.arrays["allowed"])

    def warm(self) -> None:
        pass

    def running(self) -> Any:
        return nullcontext()

    def upload_tables(self) -> None:
        pass

    def fetch(
        self, name: str, count: int, meanwhile: Callable[[], None] | None = None
    ) -> np.ndarray:
        return self.arrays[name][:count]

    def read(self, table: str, slot: int, first: int, end: int) -> bytes:
        cells = np.arange(first, end)
        pages = self.arrays[table][slot][cells // PAGE_CELLS]
        return self.cells[table][pages, cells % PAGE_CELLS].tobytes()

    def step(self, tokens: int, rows: int) -> None:
        a = self.arrays
        self.steps.append((tokens, rows))
        for t in range(tokens):
            slot, position = a["slots"][t], a["positions"][t]
            for table, cells in self.cells.items():
                page = a[table][slot, position // PAGE_CELLS]
                assert page >= 0, f"no page for cell {position}"
                key = a["ids"][t] + VOCABULARY * a["adapters"][t]
                cells[page, position % PAGE_CELLS] = key
        for row in range(rows):
            t = a["rows"][row]
            slot, end = a["slots"][t], a["ends"][t]
            seen = self.read("pages", slot, 0, end)
            near = self.read("window_pages", slot, max(0, end - WINDOW), end)
            token = next_id(seen, near, int(a["seeds"][row]), int(a["draws"][row]))
            a["sampled"][row] = a["ids"][t] = token
            a["positions"][t] += 1
            a["ends"][t] += 1
            a["draws"][row] += 1


class Device(Executor):
    """The same with inputs of its own, as on a GPU, whose next step is launched before a read."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.host, self.ahead = self.arrays, 0
        self.arrays = {name: array.copy() for name, array in self.host.items()}

    def array(self, name: str) -> np.ndarray:
        return self.host[name]

    def upload(self, masks: int | None = None, edits: int | None = None) -> None:
        super().upload(masks, edits)
        for name, array in self.host.items():
            self.arrays[name][...] = array

    def upload_tables(self) -> None:
        for name in self.cells:
            self.arrays[name][...] = self.host[name]

    def fetch(
        self, name: str, count: int, meanwhile: Callable[[], None] | None = None
    ) -> np.ndarray:
        found, before = self.arrays[name][:count].copy(), len(self.steps)
        if meanwhile is not None:
            meanwhile()
        self.ahead += len(self.steps) - before
        return found


def scheduler_of(
    slots: int,
    chunk: int,
    context: int,
    pages: int,
    reuse: bool,
    itl_ms: float = math.inf,
    make: type[Executor] = Executor,
) -> tuple[Scheduler, Executor]:
    few = window_pages(WINDOW, chunk, slots, context, pages)
    executor = make(slots, chunk, context, pages, few)
    held = KvPages(
        executor.array("pages"),
        pages,
        window_table=executor.array("window_pages"),
        window_pages=few,
        window=WINDOW,
        reuse=reuse,
    )
    sizes = Sizes(tokens=chunk, rows=slots, slots=slots, context=context, pages=pages)
    config = EngineConfig(itl_ms=itl_ms)
    bound = Bound(SimpleNamespace(weights={}), config, sizes, executor, held, "fp32", True)
    return Scheduler(bound), executor


def request_of(ids: list[int], budget: int, seed: int, salt: bytes = b"") -> Request:
    sampling = Sampling(seed=seed)
    return Request(ids=list(ids), queue=OutputQueue(1), budget=budget, sampling=sampling, salt=salt)


def assert_conserved(scheduler: Scheduler, pages: int) -> None:
    full, few = page_stats(scheduler.pages)
    assert sum(full) == pages
    assert full.used == few.used == 0, "idle, and somebody holds pages"


def play(seed: int, make: type[Executor] = Executor) -> tuple[int, float]:
    """Play a random schedule; return how many sequences were preempted, how many steps ahead."""
    rng = random.Random(seed)
    slots, context = rng.choice([1, 2, 3, 5]), rng.choice([64, 200, 300])
    chunk = max(slots, rng.choice([1, 7, 64, 100]))
    least = -(-context // PAGE_CELLS)
    pages = least if rng.random() < 0.5 else rng.randint(least, least * slots)
    reuse = rng.random() < 0.8
    scheduler, executor = scheduler_of(slots, chunk, context, pages, reuse, make=make)
    stems = [[rng.randrange(VOCABULARY) for _ in range(context)] for _ in range(2)]
    pending = []
    for _ in range(rng.randint(1, 8)):
        length = context if rng.random() < 0.1 else rng.randint(1, context // 2)
        ids = rng.choice(stems)[:length]
        if rng.random() < 0.3:
            ids = [*ids[: length // 2], *(rng.randrange(VOCABULARY) for _ in ids[length // 2 :])]
        budget = rng.randint(1, max(1, min(90, context - length)))
        stop = frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 3])))
        pending.append((rng.randint(0, 9), ids, budget, rng.randrange(3), stop))
    pending.sort(key=lambda each: each[0], reverse=True)
    live: list[tuple[Request, list[int]]] = []
    now = 0
    while pending or not scheduler.is_idle:
        while pending and pending[-1][0] <= now:
            _, ids, budget, sampling, stop = pending.pop()
            request = request_of(ids, budget, sampling)
            request.stop, request.adapter = stop, len(ids) % 2
            scheduler.submit([request])
            live.append((request, alone(ids, budget, sampling, stop, request.adapter)))
        if live and rng.random() < 0.01:
            rng.choice(live)[0].queue.left = True
        scheduler.step()
        assert len(executor.steps) < 5000, "it does not end"
        now += 1
    scheduler.sweep()
    for request, expected in live:
        made = [token.id for token in request.queue.tokens]
        assert request.queue.error is None
        assert made == expected[: len(made)] if request.queue.left else made == expected
    assert_conserved(scheduler, pages)
    return scheduler.preempted, getattr(executor, "ahead", 0) / max(1, len(executor.steps))


@pytest.mark.parametrize("make", [Executor, Device])
def test_random_schedules_change_nothing_and_lose_no_page(make: type[Executor]) -> None:
    preempted, ahead = zip(*(play(seed, make) for seed in range(300)), strict=True)
    assert sum(preempted) > 25, "the schedules are too easy"
    assert (sum(ahead) > 0.3 * len(ahead)) == (make is Device)


@pytest.mark.slow
def test_ten_thousand_random_schedules() -> None:
    for seed in range(300, 10_000):
        play(seed)
        play(seed, Device)


def finish(scheduler: Scheduler) -> None:
    while not scheduler.is_idle:
        scheduler.step()


def test_a_text_seen_before_is_not_computed_again() -> None:
    scheduler, executor = scheduler_of(2, 64, 640, 20, reuse=True)
    ids = [i % VOCABULARY for i in range(512)]
    first = request_of(ids, 4, 0)
    scheduler.submit([first])
    finish(scheduler)
    assert sum(tokens for tokens, _ in executor.steps) == 512 + 3
    executor.steps.clear()
    again = request_of(ids, 4, 0)
    scheduler.submit([again])
    finish(scheduler)
    # The last page is computed, so that there is something to draw from.
    assert sum(tokens for tokens, _ in executor.steps) == 64 + 3
    assert scheduler.reused == 448
    assert [t.cached for t in again.queue.tokens] == [448, 0, 0, 0]
    assert [t.id for t in again.queue.tokens] == [t.id for t in first.queue.tokens]
    executor.steps.clear()
    turn = [*ids, *(t.id for t in first.queue.tokens), 1, 2, 3]
    more = request_of(turn, 4, 0)
    scheduler.submit([more])
    finish(scheduler)
    assert sum(tokens for tokens, _ in executor.steps) < 4 + 3 + PAGE_CELLS + 3
    assert [t.id for t in more.queue.tokens] == alone(turn, 4, 0)
    assert_conserved(scheduler, 20)


def test_texts_of_another_salt_are_not_shared() -> None:
    scheduler, _ = scheduler_of(1, 64, 640, 20, reuse=True)
    ids = [i % VOCABULARY for i in range(256)]
    for salt in (b"a", b"b"):
        scheduler.submit([request_of(ids, 1, 0, salt)])
        finish(scheduler)
    assert scheduler.reused == 0
    scheduler.submit([request_of(ids, 1, 0, b"a")])
    finish(scheduler)
    assert scheduler.reused == 192


def test_a_long_text_holds_few_window_pages() -> None:
    scheduler, _ = scheduler_of(1, 64, 6400, 100, reuse=False)
    scheduler.submit([request_of([1] * 6000, 2, 0)])
    most = 0
    while not scheduler.is_idle:
        scheduler.step()
        most = max(most, page_stats(scheduler.pages)[1].used)
    assert most <= -(-(WINDOW + 64) // PAGE_CELLS) + 1


def test_where_texts_part_is_found_again_however_long_they_are() -> None:
    scheduler, executor = scheduler_of(1, 64, 6400, 200, reuse=True)
    shared = [i % VOCABULARY for i in range(3200)]
    for turn in range(4):
        executor.steps.clear()
        scheduler.submit([request_of([*shared, *[turn] * 2000], 2, 0)])
        finish(scheduler)
        computed = sum(tokens for tokens, _ in executor.steps)
        # The second text shows where they part, and keeps the window before it.
        assert (computed == 2001) == (turn >= 2)
    assert_conserved(scheduler, 200)


def test_decodes_come_first_and_prompts_fit_the_time() -> None:
    scheduler, executor = scheduler_of(2, 64, 640, 20, reuse=False, itl_ms=10)
    clock = iter(range(0, 10**12, 1))
    scheduler.forwards.times = StepTimes(lambda: next(clock))
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        scheduler.times.add(tokens, tokens * 500_000)  # half a millisecond a token
    scheduler.submit([request_of([1] * 3, 30, 0)])
    scheduler.step()
    scheduler.submit([request_of([2] * 200, 3, 0)])
    scheduler.step()
    assert executor.steps[-1] == (20, 1)  # one that decodes, and 19 of the prompt
    scheduler.itl_ms = math.inf
    scheduler.step()
    assert executor.steps[-1] == (64, 1)


def test_prompts_get_a_share_where_decodes_need_all_the_time() -> None:
    scheduler, executor = scheduler_of(2, 64, 640, 20, reuse=False, itl_ms=10)
    clock = iter(range(0, 10**12, 1))
    scheduler.forwards.times = StepTimes(lambda: next(clock))
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        scheduler.times.add(tokens, 20_000_000 + (tokens - 1) * 500_000)
    scheduler.submit([request_of([1] * 3, 30, 0)])
    scheduler.step()
    scheduler.submit([request_of([2] * 200, 3, 0)])
    scheduler.step()
    # A decode alone takes 20 ms, so a step may take 30: one that decodes, and 20 of the prompt.
    assert executor.steps[-1] == (21, 1)


def test_what_cannot_have_pages_waits_and_nothing_is_lost() -> None:
    scheduler, _ = scheduler_of(3, 64, 192, 3, reuse=True)
    requests = [request_of([i] * 60, 100, i) for i in range(3)]
    scheduler.submit(requests)
    finish(scheduler)
    assert scheduler.preempted
    for i, request in enumerate(requests):
        assert [t.id for t in request.queue.tokens] == alone([i] * 60, 100, i)
        assert not any(t.cached for t in request.queue.tokens), "what it finds again is its own"
    assert_conserved(scheduler, 3)


def test_the_error_of_a_caller_is_the_callers() -> None:
    scheduler, _ = scheduler_of(2, 64, 192, 6, reuse=True)

    def fail(tokens: int) -> None:
        raise ZeroDivisionError

    good, bad = request_of([1, 2], 5, 0), request_of([3, 4], 5, 0)
    bad.queue.after_token = fail
    scheduler.submit([good])
    scheduler.submit([bad])
    finish(scheduler)
    assert isinstance(bad.queue.error, ZeroDivisionError)
    assert [t.id for t in good.queue.tokens] == alone([1, 2], 5, 0)


def test_the_error_of_a_step_is_everyones(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, executor = scheduler_of(2, 64, 192, 6, reuse=True)
    requests = [request_of([1, 2], 5, 0), request_of([3], 5, 0)]
    for request in requests:
        scheduler.submit([request])
    scheduler.step()

    def broken(tokens: int, rows: int) -> None:
        raise NonFinite("the device is gone")

    monkeypatch.setattr(executor, "step", broken)
    scheduler.step()
    assert all(isinstance(r.queue.error, NonFinite) for r in requests)
    assert scheduler.is_idle
    assert_conserved(scheduler, 6)


def test_a_pool_takes_what_was_used_longest_ago() -> None:
    pool = PagePool(3, np.zeros((1, 3), np.int32))
    a, b, c = (pool.take() for _ in range(3))
    for page, key in ((a, b"a"), (b, b"b")):
        pool.name(page, key, b"ids")
    for page in (b, a, c):
        pool.release(page)
    assert pool_stats(pool) == (1, 2, 0)
    assert pool.take() == c  # blank
    assert pool.find(b"b", b"other ids") is None
    assert pool.take() == b
    assert pool.find(b"b", b"ids") is None
    assert pool.find(b"a", b"ids") == a


@pytest.mark.parametrize("limit", [0.1, 1, 5, 1000])
def test_times_grow_with_what_is_known(limit: float) -> None:
    times = StepTimes()
    assert times.most(limit) == 1
    times.add(8, 1_000_000)
    assert times.most(limit) == min(16, int(8 * limit))


def test_expected_times_lie_on_a_line_between_what_is_known() -> None:
    times = StepTimes()
    assert times.expected_ms(1) == 0
    times.add(8, 4_000_000)
    times.add(32, 10_000_000)
    assert [times.expected_ms(tokens) for tokens in (2, 8, 20, 32, 99)] == [1, 4, 7, 10, 10]
    times.add(8, 14_000_000)
    assert times.expected_ms(8) == pytest.approx(0.7 * 4 + 0.3 * 14)


class Timed(Device):
    """A device on which a step takes 100 ns; the host takes 1 ns to look at the clock."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.now = self.free = 0

    def clock(self) -> int:
        self.now += 1
        return self.now

    def step(self, tokens: int, rows: int) -> None:
        super().step(tokens, rows)
        self.free = max(self.now, self.free) + 100

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def fetch(
        self, name: str, count: int, meanwhile: Callable[[], None] | None = None
    ) -> np.ndarray:
        done = self.free
        found = super().fetch(name, count, meanwhile)
        self.now = max(self.now, done)
        return found


@pytest.mark.parametrize("stops", [False, True])
def test_no_time_of_the_device_is_lost_between_steps_that_are_launched_ahead(stops: bool) -> None:
    scheduler, device = scheduler_of(2, 64, 192, 6, reuse=True, make=Timed)
    assert isinstance(device, Timed)
    scheduler.forwards.times.now = device.clock
    window = TimedWindow("test", device.clock, device.synchronize)
    request = request_of([1, 2], 20, 0)
    request.queue.window = window
    expected = alone([1, 2], 20, 0)
    if stops:
        request.stop = frozenset(expected[9:10])
        expected = alone([1, 2], 20, 0, request.stop)
    scheduler.submit([request])
    began = device.now
    while not scheduler.is_idle:
        scheduler.step()
        device.now += 40  # what callers do meanwhile
    assert [token.id for token in request.queue.tokens] == expected
    assert request.queue.tokens[-1].forwards == len(expected)
    assert len(window.spans) == len(expected)
    assert device.ahead == (len(expected) - 1 if stops else 18)
    # The step whose token came after the end counts, too; the prompt's callers do not.
    steps = len(device.steps)
    assert steps == len(expected) + stops
    assert 100 * steps <= window.total_ns <= device.now - began - 80
    assert window.total_ns < 100 * steps + 40 * 3
    assert scheduler.sums.decode_tokens == len(expected) - 1
    assert scheduler.kv_misses == 2 + len(expected) - 1
    assert_conserved(scheduler, 6)


def test_who_joins_waits_for_the_step_that_was_launched_and_no_other() -> None:
    scheduler, _ = scheduler_of(2, 64, 192, 6, reuse=True, make=Device)
    requests = [request_of([1, 2], 20, 0), request_of([3] * 3, 20, 1)]
    scheduler.submit(requests[:1])
    for _ in range(5):
        scheduler.step()
    scheduler.submit(requests[1:])
    scheduler.step()
    assert not requests[1].queue.tokens
    scheduler.step()
    assert len(requests[1].queue.tokens) == 1
    finish(scheduler)
    for request, ids in zip(requests, ([1, 2], [3] * 3), strict=True):
        expected = alone(ids, 20, int(request.sampling.seed))
        assert [token.id for token in request.queue.tokens] == expected
