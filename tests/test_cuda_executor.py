"""The CUDA executor without a GPU: buckets, filled-up steps, inputs that step on, contexts.

Kernels are stood in for by the NumPy references, run launch by launch on CPU tensors, so that what
is tested is the executor's own work. The kernels have their own tests.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sessions import make_session

from clocher_kernels.cuda import executor as executor_module
from clocher_kernels.cuda import prepack, step
from clocher_kernels.cuda.executor import LOWER, CudaExecutor
from clocher_kernels.cuda.launch import INTERPRETER, Device, Launch
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.cuda.step import (
    activation_types,
    bucket,
    check_memory,
    context_buckets,
    row_buckets,
    token_buckets,
)
from clocher_kernels.errors import (
    DeviceError,
    NonFinite,
    OutOfMemory,
    ShapeError,
    WindowError,
)
from clocher_kernels.ops import OPS
from clocher_kernels.plan import Executor, Plan
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine import binding
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import make_executor
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.models.builder import DRAWN
from clocher_runtime.speculation.draft import MAX_DRAFT

PROMPTS = [[5, 9, 300, 41, 7], [88, 1, 2000], list(range(10, 61))]
LENGTH = 12
LONG = [(7 * i * i + 13 * i) % 900 + 3 for i in range(320)]


class ReferenceKernel:
    """Stands in for a Triton kernel: runs the reference of an op when it is launched."""

    def __init__(self, op: str, log: list[tuple[str, int]]) -> None:
        self.op, self.log = op, log

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(**arguments: Any) -> None:
            for option in ("C", "num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"):
                arguments.pop(option, None)
            given = {name: as_numpy(value) for name, value in arguments.items()}
            first = next(v for v in given.values() if isinstance(v, np.ndarray))
            self.log.append((self.op, len(first)))
            OPS[self.op].reference(**given)

        return launched


def as_numpy(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        planes = {n: as_numpy(p) for n, p in value.planes.items()}
        return QuantTensor(value.shape, value.format, planes)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16)
    return value.numpy().view(np.uint64) if value.dtype == torch.int64 else value.numpy()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Put the references in the place of the kernels; return what is launched, with its rows."""
    launched: list[tuple[str, int]] = []

    def lower(op: str) -> Callable[..., list[Launch]]:
        def lowered(*, device: Device, **arguments: Any) -> list[Launch]:
            assert device is INTERPRETER
            return [Launch(ReferenceKernel(op, launched), (1,), arguments, {})]

        return lowered

    def make(plan: Plan, weights: Mapping[str, Any], config: EngineConfig, **more: Any) -> Executor:
        if config.backend != "cuda":
            return make_executor(plan, weights, config, **more)
        return CudaExecutor(plan, weights, activations="f32", device=INTERPRETER)

    for table in ("LOWER", "LOWER_GREEDY"):
        monkeypatch.setattr(executor_module, table, {op: lower(op) for op in OPS})
    monkeypatch.setattr(executor_module, "FUSED", {})
    monkeypatch.setattr(prepack, "REARRANGE", {})
    monkeypatch.setattr(step, "CONTEXT_CELLS", (64,))
    monkeypatch.setattr(binding, "make_executor", make)
    yield launched


@cache
def model() -> Model:
    return load_model(open_checkpoint(embedded_model()))


def generate(backend: str, batch: int, prompts: int) -> list[list[int]]:
    options = {"context": 96, "chunk": 32, "kv_dtype": "bf16", "act_prec": "fp32", "itl_ms": 1e9}
    session = make_session(model(), backend=backend, batch=batch, **options)
    try:
        out: list[list[int]] = [[] for _ in range(prompts)]
        sampling = Sampling(temperature=0.8, top_k=20, seed=3)
        for token in session.generate(PROMPTS[:prompts], LENGTH, sampling, stop_ids=frozenset()):
            out[token.sequence].append(token.id)
        return out
    finally:
        session.close()


def test_lists_and_reads_the_pages_that_the_cpu_does(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels themselves do it for steps of one token, in the interpreter."""
    for op in ("page_bounds", "select_pages", "attention"):
        kernel, reference = LOWER[op], executor_module.LOWER[op]

        def lower(kernel: Any = kernel, reference: Any = reference, **given: Any) -> list[Launch]:
            return list((kernel if len(given["slots"]) == 1 else reference)(**given))

        monkeypatch.setitem(executor_module.LOWER_GREEDY, op, lower)
    options = {"context": 448, "chunk": 128, "kv_dtype": "bf16", "act_prec": "fp32"}
    found = []
    for backend in ("cpu", "cuda"):
        session = make_session(
            model(), backend=backend, attn="topk:256", speculate="off", **options
        )
        try:
            ids = [token.id for token in session.generate([LONG], 2, stop_ids=frozenset())]
            found.append((ids, session.config.attn, session.pages_read))
        finally:
            session.close()
    assert found[0] == found[1]
    assert 0 < found[0][2].listed < found[0][2].seen
    # Chunks that are a bucket: copies that fill a step up would be counted, too.
    assert {count for op, count in log if op == "attention"} == {64, 128}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the CPU back end generates; no kernel of this file takes part."""
    return generate("cpu", 3, 3)


@pytest.mark.parametrize(
    ("batch", "prompts", "tokens", "rows"),
    [
        (1, 1, {1, 16}, {1}),
        # Most decode steps are filled up with a copy of the third sequence; the last one is alone.
        (4, 3, {1, 4, 32}, {1, 4}),
    ],
)
def test_generates_what_the_cpu_generates(
    log: list[tuple[str, int]],
    expected: list[list[int]],
    batch: int,
    prompts: int,
    tokens: set[int],
    rows: set[int],
) -> None:
    assert generate("cuda", batch, prompts) == expected[:prompts]
    assert {count for op, count in log if op == "embed"} == tokens
    assert {count for op, count in log if op == "sample"} == rows


def test_pages_are_cut_to_the_context_bucket(log: list[tuple[str, int]]) -> None:
    seen = []
    session = make_session(model(), backend="cuda", context=128, chunk=32, kv_dtype="bf16")
    executor = session.executor
    assert isinstance(executor, CudaExecutor)
    lower = executor.lower
    executor.lower = lambda key, greedy: (seen.append(key), lower(key, greedy))[1]  # type: ignore[method-assign]
    list(session.generate([list(range(1, 60))], 12, stop_ids=frozenset()))
    assert [key for key in seen if key[0] == 1] == [(1, 1, 64), (1, 1, 128)]
    pages = [
        launch.args["pages"].shape
        for key in ((1, 1, 64), (1, 1, 128))
        for launch in lower(key)
        if isinstance(launch.kernel, ReferenceKernel) and launch.kernel.op == "attention"
    ]
    assert set(pages) == {(1, 1), (1, 2)}
    session.close()


def test_a_warm_session_captures_nothing_in_the_window(log: list[tuple[str, int]]) -> None:
    window = TimedWindow("test")
    cold = make_session(model(), backend="cuda", context=96, chunk=32)
    with pytest.raises(WindowError, match="capture a CUDA graph"):
        list(cold.generate(PROMPTS[:1], 2, window=window))
    cold.close()
    warm = make_session(model(), backend="cuda", context=96, chunk=32)
    warm.warm()
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling()):
        prompts = [list(range(1, 60))]
        tokens = list(warm.generate(prompts, 12, sampling, frozenset(), window=window))
        assert len(tokens) == 12
    warm.close()


def test_greedy_steps_launch_nothing_that_only_draws_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(plan: Plan, weights: Mapping[str, Any], *how: Any, **more: Any) -> CudaExecutor:
        return CudaExecutor(plan, weights, device=INTERPRETER)

    monkeypatch.setattr(binding, "make_executor", make)
    captured: list[list[str]] = []

    def capture(launches: Sequence[Launch], stream: object) -> Callable[[], None]:
        captured.append([launch.kernel.fn.__name__ for launch in launches])
        return lambda: None

    monkeypatch.setattr(executor_module, "capture", capture)
    session = make_session(model(), backend="cuda", context=64, chunk=8)
    session.warm()
    both = [names for names in captured if "_advance" in names]
    captured.clear()
    list(session.generate([[5]], 1, Sampling(temperature=0.7)))
    list(session.generate([[5]], 1))
    assert not captured, "a request in service captures nothing"
    session.close()
    greedy, drawn = both[::2], both[1::2]
    own = ("_largest", "_fill_bins", "_cut", "_draw", "_advance")
    assert {tuple(n for n in names if n in own) for names in greedy} == {("_largest", "_advance")}
    assert {tuple(n for n in names if n in own) for names in drawn} == {own}
    assert len(greedy) == len(drawn)
    assert all(len(b) - len(a) == 3 for a, b in zip(greedy, drawn, strict=True))


def test_other_threads_may_use_the_gpu_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    class Graph:
        def replay(self) -> None:
            pass

    class Stream:
        def synchronize(self) -> None:
            pass

    def capturing(made: Graph, stream: Stream, capture_error_mode: str = "global") -> Any:
        modes.append(capture_error_mode)
        return nullcontext()

    for name, value in {"CUDAGraph": Graph, "graph": capturing, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    step.capture([], Stream())()  # type: ignore[arg-type]
    assert modes == ["thread_local"]


def test_steps_after_running_out_of_memory_say_so(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(launches: Sequence[Launch], stream: object) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    session = make_session(model(), backend="cuda", context=64, chunk=8)
    monkeypatch.setattr(executor_module, "capture", capture)
    executor = session.executor
    for use in (
        lambda: executor.step(1, 1),
        lambda: executor.step(1, 1),
        lambda: executor.upload(),
        lambda: executor.warm(),
        lambda: list(session.generate([[5]], 2)),
    ):
        with pytest.raises(OutOfMemory, match="Tried to allocate 2 GiB; lower --context"):
            use()
    session.close()


def test_a_step_succeeds_after_a_capture_failed(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches ran once by then, and stepped the inputs on."""
    kept = executor_module.capture

    def fails(launches: Sequence[Launch], stream: object) -> Callable[[], None]:
        kept(launches, None)()
        raise RuntimeError("capture failed")

    session = make_session(model(), backend="cuda", context=64, chunk=8)
    executor = session.executor
    assert isinstance(executor, CudaExecutor)
    monkeypatch.setattr(executor_module, "capture", fails)
    executor.array("ends")[:1] = 1
    executor.upload()
    with pytest.raises(RuntimeError, match="capture failed"):
        executor.step(1, 1)
    assert executor._values["positions"][0] == 0
    monkeypatch.setattr(executor_module, "capture", kept)
    executor.step(1, 1)
    assert executor._values["positions"][0] == 1
    session.close()


def test_prefill_without_output_rows_skips_the_head(log: list[tuple[str, int]]) -> None:
    session = make_session(model(), backend="cuda", context=96, chunk=32)
    log.clear()
    next(session.generate([list(range(1, 60))], 1))
    assert [rows for op, rows in log if op == "sample"] == [1]  # of the two chunks, the last
    session.close()


def test_buckets() -> None:
    assert token_buckets(2048, 1) == (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert token_buckets(128, 6) == (1, 2, 4, 6, 16, 32, 64, 128)
    assert token_buckets(300, 1) == (1, 16, 32, 64, 128, 256, 300)
    assert token_buckets(8, 8) == (1, 2, 4, 8)
    assert token_buckets(12, 2) == (1, 2, 12)
    assert row_buckets(8, 8, 512) == (8,)
    assert row_buckets(2, 32, 512) == (2,)
    assert row_buckets(32, 32, 512) == (8, 32)
    assert row_buckets(256, 32, 512) == (8, 32)
    assert row_buckets(512, 1, 512) == (0, 1)
    assert row_buckets(512, 512, 512) == (0, 8, 512)
    assert context_buckets(4096) == (512, 2048, 4096)
    assert context_buckets(300) == (300,)
    assert [bucket(n, (1, 4, 16)) for n in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]


@pytest.mark.parametrize(("batch", "plain", "guessing"), [(1, 10, 13), (4, 12, 21), (32, 21, 21)])
def test_guesses_need_few_more_graphs(
    log: list[tuple[str, int]], batch: int, plain: int, guessing: int
) -> None:
    counts = {}
    for speculate in ("off", "auto"):
        session = make_session(
            model(), backend="cuda", batch=batch, context=64, speculate=speculate
        )
        executor = session.executor
        assert isinstance(executor, CudaExecutor)
        counts[speculate] = len(executor.buckets())  # for each number of cache cells
        rows = executor.plan.rows
        for count in range(1, rows + 1):  # what a pass of guesses has is less than twice that
            tokens, high = bucket(count, executor._token_buckets), count
            (key, _) = executor._key(count, high)
            assert key[0] == key[1] == tokens < max(2 * count, 2)
        session.close()
    assert counts == {"off": plain, "auto": guessing}


def test_scores_need_no_masks(log: list[tuple[str, int]]) -> None:
    for batch, options, masks in (
        (1, {"all_logits": True}, 8),
        (2, {"score_rows": 100}, 16),
        (3, {}, 3),
        (3, {"speculate": "auto"}, 24),
        (9, {"speculate": "auto"}, 32),
    ):
        session = make_session(model(), backend="cuda", batch=batch, context=64, **options)
        assert len(session.executor.array("allowed")) == masks
        session.close()
    assert DRAWN == 1 + MAX_DRAFT


def test_inputs_go_in_one_copy(log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(model(), backend="cuda", batch=4, context=64, chunk=8)
    executor = session.executor
    assert isinstance(executor, CudaExecutor)
    sent: list[tuple[int | None, ...]] = []
    upload = executor._inputs.upload
    monkeypatch.setattr(executor._inputs, "upload", lambda *new: (sent.append(new), upload(*new)))
    made = session.generate([[5], [6, 7], [9]], 6, stop_ids=frozenset())
    list(made)
    session.close()
    assert sent == [(0, 0), (0, 0)]  # the prompts, and three sequences in a bucket of four


def test_the_back_end_chooses_the_chunk(log: list[tuple[str, int]]) -> None:
    for chunk, tokens in ((None, 2048), (40, 40)):
        session = make_session(model(), backend="cuda", context=64, chunk=chunk)
        assert session.executor.plan.tokens == tokens
        session.close()
    session = make_session(model(), backend="cpu", context=64)
    assert session.executor.plan.tokens == 128
    session.close()


def test_activations_are_narrow_and_the_residual_stream_is_not() -> None:
    session = make_session(model(), backend="cpu", context=64, act_prec="fp32")
    types = activation_types(session.executor.plan, "f16")
    session.close()
    assert types["h"] == types["logits"] == types["router"] == "f32"
    assert types["x"] == types["gated"] == types["last.normed"] == "f16"


def test_memory_is_checked_before_it_is_taken() -> None:
    check_memory(10 << 30, 1 << 30, 0, 12 << 30)
    check_memory(10 << 30, 1 << 30, 1 << 17, 12 << 30)
    with pytest.raises(OutOfMemory, match="the runtime 1536 MiB"):
        check_memory(10 << 30, 1 << 30, 1 << 18, 12 << 30)
    with pytest.raises(OutOfMemory, match=r"11776 MiB free; weights need 10240 MiB"):
        check_memory(10 << 30, 2 << 30, 0, 11776 << 20)


def test_a_step_beyond_the_capacity_is_refused(log: list[tuple[str, int]]) -> None:
    session = make_session(model(), backend="cuda", context=64, chunk=8)
    with pytest.raises(ShapeError, match="room for 8 and 1"):
        session.executor.step(9, 1)
    session.close()


def test_the_child_of_a_fork_is_told_to_load_the_model(log: list[tuple[str, int]]) -> None:
    session = make_session(model(), backend="cuda", context=64, chunk=8)
    stream = session.generate([[5, 9]], 4, stop_ids=frozenset())
    next(stream)
    next(stream)
    child = os.fork()
    if not child:
        code = 3
        try:
            refused = 0
            for use in (lambda: next(stream), lambda: list(session.generate([[5]], 4))):
                try:
                    use()
                except DeviceError as error:
                    refused += "load it here" in str(error)
            session.close()
            code = 0 if refused == 2 else 4
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(stream)) == 2
    session.close()


def ahead_session(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, backend: str = "cuda", **more: Any
) -> tuple[Session, list[int]]:
    """Return a session of three slots, and the tokens of the steps that it launches ahead."""
    options = {"context": 160, "chunk": 32, "kv_dtype": "bf16", "act_prec": "fp32", "batch": 3}
    session = make_session(model(), backend=backend, **options, **more)
    forwards, fetch, launched = session.scheduler.forwards, session.executor.fetch, list[int]()

    def fetched(name: str, count: int, meanwhile: Callable[[], None] | None = None) -> np.ndarray:
        speculator = forwards.speculator
        assert meanwhile is None or speculator is None or not speculator.trial.is_on
        found = fetch(name, count, meanwhile if ahead else None)
        launched.extend([len(forwards.launched)] if forwards.launched else [])
        return found

    monkeypatch.setattr(session.executor, "fetch", fetched)
    return session, launched


@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_ids_are_the_same_where_steps_are_launched_ahead(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, speculate: str
) -> None:
    """Three calls with other lengths, stop ids and draws; one joins, one stops, one is left."""
    found = []
    for backend, ahead in (("reference", False), ("cuda", False), ("cuda", True)):
        session, launched = ahead_session(monkeypatch, ahead, backend, speculate=speculate)
        if (speculator := session.scheduler.forwards.speculator) is not None:
            speculator.trial.is_on = False  # it pauses, and then drafts
        drawn = Sampling(temperature=1.0, seed=5)
        alone = [token.id for token in session.generate(PROMPTS[2:], 20, drawn, frozenset())]
        stop = frozenset(alone[14:15])
        first = session.generate(PROMPTS[2:], 20, drawn, stop)
        second = session.generate(PROMPTS[1:2], 17, stop_ids=frozenset())
        third = session.generate(PROMPTS[:1], 20, Sampling(temperature=1.0), frozenset())
        ids = [[next(first).id], [next(second).id], []]
        for _ in range(3):
            session.step()
        ids[2] = [next(third).id, next(third).id]
        session.step()
        third.close()
        ids[0] += [token.id for token in first]
        ids[1] += [token.id for token in second]
        for token in session.generate(PROMPTS[:1], 8, stop_ids=frozenset(), logits=True):
            assert token.logits is not None and token.logits.argmax() == token.id
        host = Sampling(processors=(lambda ids, row: row - np.eye(len(row))[ids[-1]] * 1e9,))
        ids.append([token.id for token in session.generate(PROMPTS[:1], 8, host, frozenset())])
        # How many drafts are sent, and so the forwards, depends on the clock.
        counted = session.scheduler.sums.decode_tokens, session.scheduler.kv_misses
        found.append((alone, ids, counted if speculate == "off" else ()))
        assert ids[0] == alone[: 1 + alone.index(alone[14])]
        assert len(ids[1]) == 17
        assert bool(launched) == ahead
        if ahead and speculate == "off":
            assert launched.count(1) > 15
            assert {1, 2} <= set(launched)
        session.close()
    assert found[0] == found[1] == found[2]


def test_a_fault_drops_the_step_that_was_launched_ahead(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, launched = ahead_session(monkeypatch, True)
    expected = [token.id for token in session.generate(PROMPTS[:1], 30, stop_ids=frozenset())]
    good = session.generate(PROMPTS[:1], 30, stop_ids=frozenset())
    bad = session.generate(PROMPTS[1:2], 30, stop_ids=frozenset())
    ids = [next(good).id]
    next(bad)
    for _ in range(3):
        session.step()
    launched.clear()
    fetch, executor = session.executor.fetch, session.executor

    def odd(name: str, count: int, meanwhile: Callable[[], None] | None = None) -> np.ndarray:
        sampled = fetch(name, count, meanwhile)
        if count == 2:
            sampled[1] = -1
        return sampled

    with monkeypatch.context() as patched:
        patched.setattr(executor, "fetch", odd)
        session.step()
    assert launched == [2]
    with pytest.raises(NonFinite, match="got logits that are NaN"):
        list(bad)
    assert ids + [token.id for token in good] == expected
    session.close()


def test_a_read_gets_the_step_before_the_one_it_launches(log: list[tuple[str, int]]) -> None:
    session = make_session(model(), backend="cuda", context=64, chunk=8)
    made = [token.id for token in session.generate(PROMPTS[:1], 4, stop_ids=frozenset())]
    generation = session.generate(PROMPTS[:1], 9, logits=True, stop_ids=frozenset())
    assert next(generation).id == made[0]
    executor, read = session.executor, []
    session.scheduler.forwards._begin([(session.scheduler._running[0], 1)], True)
    executor.step(1, 1)
    for _ in range(3):
        read.append(int(executor.fetch("sampled", 1, lambda: executor.step(1, 1))[0]))
    assert read == made[1:4]
    session.close()
