"""The generate loop, and the law that a token's logits depend on nothing but its own text."""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sessions import make_session
from weight_files import convert

from clocher_kernels.errors import OutOfMemory, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.stub import stub_id, stub_model
from clocher_runtime.engine.timing import TimedWindow

DATA = Path(__file__).parent / "data"
MODELS = {
    "gptoss": embedded_model(),
    "bitnet": DATA / "clocher-tiny-bitnet",
    "llama": DATA / "clocher-tiny-llama",
}
LENGTH = 150  # longer than the window of 128


@cache
def model_of(name: str, precision: str | None = None) -> Model:
    return load_model(open_checkpoint(MODELS[name]), precision)


@cache
def ids_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, 4096, length).tolist())


def logits_of(
    name: str, chunk: int, threads: int, precision: str | None = None, **more
) -> np.ndarray:
    session = make_session(
        model_of(name, precision),
        threads=threads,
        chunk=chunk,
        context=256,
        all_logits=True,
        **more,
    )
    try:
        return session.logits(ids_of(0, LENGTH))
    finally:
        session.close()


@pytest.fixture
def session() -> Iterator[Session]:
    made = make_session(model_of("gptoss"), threads=2, batch=3, context=300, chunk=32)
    yield made
    made.close()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("chunk", "threads"), [(1, 1), (1, 2), (7, 2), (64, 1), (64, 4), (LENGTH, 2)]
)
def test_chunks_and_threads_change_no_bit(name: str, chunk: int, threads: int) -> None:
    expected = logits_of(name, LENGTH, 1)
    assert np.array_equal(logits_of(name, chunk, threads), expected)


@pytest.mark.parametrize(
    "precision", ["int8w", "int4w", "fp32", "fp16", "fp8w", "fp8_b128w", "fp8_e5m2w", "mxfp4w"]
)
def test_chunks_change_no_bit_of_a_requantised_model(precision: str) -> None:
    expected = logits_of("llama", LENGTH, 1, precision)
    assert np.array_equal(logits_of("llama", 1, 2, precision), expected)


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "e4m3", "e5m2", "i8"])
def test_chunks_change_no_bit_with_a_narrow_cache(kv_dtype: str) -> None:
    options = {"kv_dtype": kv_dtype, "act_prec": "fp32"}
    expected = logits_of("gptoss", LENGTH, 1, **options)
    assert np.array_equal(logits_of("gptoss", 9, 2, **options), expected)
    exact = logits_of("gptoss", LENGTH, 2, act_prec="fp32", kv_dtype="f32")
    error = np.sqrt(np.mean((expected - exact) ** 2) / np.mean(exact**2))
    limits = {"bf16": 5e-3, "f16": 1e-3, "e4m3": 6e-2, "e5m2": 1.2e-1, "i8": 2e-2}
    assert 0 < error < limits[kv_dtype]


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_change_no_token(name: str) -> None:
    prompts = [ids_of(1, 5), ids_of(2, 140), ids_of(3, 33)]
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=7)
    together = make_session(model_of(name), threads=2, batch=3, context=256, chunk=48)
    made: list[list[int]] = [[], [], []]
    for token in together.generate(prompts, 20, sampling, frozenset()):
        made[token.sequence].append(token.id)
    together.close()
    for prompt, expected in zip(prompts, made, strict=True):
        alone = make_session(model_of(name), threads=1, context=256, chunk=200)
        assert [t.id for t in alone.generate([prompt], 20, sampling, frozenset())] == expected
        alone.close()


@pytest.mark.parametrize(
    ("name", "act_prec", "limit"),
    [
        ("gptoss", "fp32", 1e-5),
        ("llama", "fp32", 1e-5),
        # Rounding to int8 turns a last bit into a whole step, here and there.
        ("gptoss", "int8", 1e-2),
        ("bitnet", "int8", 2e-2),
        ("llama", "int8", 2e-2),
        ("llama", "fp8", 5e-2),
        ("llama", "bf16", 1e-2),
        ("llama", "fp16", 2e-3),
    ],
)
def test_cpu_equals_reference_back_end(name: str, act_prec: str, limit: float) -> None:
    # Rounding the cache turns a last bit into a step of that, too.
    options = {"act_prec": act_prec, "kv_dtype": "f32"}
    got = logits_of(name, 50, 2, **options)
    expected = logits_of(name, 50, 1, backend="reference", **options)
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error < limit


def test_lengths_stops_and_last(session: Session) -> None:
    prompts = [ids_of(1, 4), ids_of(2, 290)]
    tokens = list(session.generate(prompts, 30, stop_ids=frozenset()))
    for sequence, expected in ((0, 30), (1, 10)):  # the second meets the end of the context
        mine = [t for t in tokens if t.sequence == sequence]
        assert [t.last for t in mine] == [False] * (expected - 1) + [True]
    first = [t.id for t in tokens if t.sequence == 0]
    stop = first[5]
    stopped = [t.id for t in session.generate(prompts[:1], 30, stop_ids=frozenset({stop}))]
    assert stopped == first[: first.index(stop) + 1]


def test_same_seed_same_text_other_seed_other_text(session: Session) -> None:
    def draw(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.5, seed=seed)
        return [t.id for t in session.generate([ids_of(1, 6)], 40, sampling, frozenset())]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_every_step_is_a_span_and_the_consumer_is_outside(session: Session) -> None:
    window = TimedWindow("generate")
    touched: list[int] = []
    seen = 0
    for _ in session.generate(
        [ids_of(1, 70), ids_of(2, 3)], 5, None, frozenset(), window, touched.append
    ):
        with TimedWindow("consumer").span("decode", 1):  # would be refused inside a span
            seen += 1
    kinds = [s.kind for s in window.spans]
    assert kinds == ["prefill"] * 3 + ["decode"] * 4
    assert [s.tokens for s in window.spans] == [32, 32, 9, 2, 2, 2, 2]
    assert seen == sum(touched) == 10
    assert window.total_ns == sum(s.ns for s in window.spans)


def test_kv_counters(session: Session) -> None:
    list(session.generate([ids_of(1, 4)], 3, stop_ids=frozenset()))
    assert session.scheduler.kv_misses == 4 + 2
    assert session.scheduler.kv_hits == (0 + 1 + 2 + 3) + (4 + 5)


@pytest.mark.parametrize(
    ("prompts", "max_new", "message"),
    [
        ([], 1, "0 prompts"),
        ([[]], 1, "no tokens"),
        ([[4096]], 1, "outside 0..4095"),
        ([[-1]], 1, "outside"),
        ([[1] * 301], 1, "context holds 300"),
        ([[1]], 0, "max_new"),
    ],
)
def test_bad_requests(session: Session, prompts: list, max_new: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(session.generate(prompts, max_new))
    assert len(list(session.generate([[1, 2]], 2, stop_ids=frozenset()))) == 2


def test_more_prompts_than_the_batch_wait_their_turn(session: Session) -> None:
    prompts = [ids_of(seed, 5 + seed) for seed in range(8)]
    made: list[list[int]] = [[] for _ in prompts]
    for token in session.generate(prompts, 6, stop_ids=frozenset()):
        made[token.sequence].append(token.id)
    for prompt, expected in zip(prompts, made, strict=True):
        assert [t.id for t in session.generate([prompt], 6, stop_ids=frozenset())] == expected


def test_bad_sizes() -> None:
    with pytest.raises(UsageError, match="context"):
        make_session(model_of("gptoss"), context=5000)
    with pytest.raises(UsageError, match="kv_dtype"):
        make_session(model_of("gptoss"), kv_dtype="int3")
    with pytest.raises(OutOfMemory, match="lower --context"):
        make_session(model_of("gptoss"), kv_pages=100_000_000)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}]
)
def test_bad_sampling(options: dict) -> None:
    with pytest.raises(UsageError, match="expected"):
        Sampling(**options)


def test_an_abandoned_generation_leaves_the_session_usable(session: Session) -> None:
    prompt = [ids_of(1, 6)]
    expected = [t.id for t in session.generate(prompt, 12, stop_ids=frozenset())]
    stream = session.generate(prompt, 12, stop_ids=frozenset())
    next(stream)
    next(stream)
    stream.close()
    assert [t.id for t in session.generate(prompt, 12, stop_ids=frozenset())] == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("begin", [62, 1 << 30, (1 << 31) - 3, -5])
def test_steps_beyond_the_context_do_no_harm(name: str, begin: int) -> None:
    """The Plan steps positions on by itself, and nothing tells it where the context ends."""
    session = make_session(model_of(name), threads=2, batch=2, context=64)
    prompts = [ids_of(1, 6), ids_of(2, 9)]
    expected = list(session.generate(prompts, 12, stop_ids=frozenset()))
    executor = session.executor
    for name_, values in {
        "ids": [7, 8],
        "slots": [0, 1],
        "positions": [begin, begin],
        "ends": [begin + 1, begin + 1],
        "rows": [0, 1],
    }.items():
        executor.array(name_)[:2] = values
    with executor.running():
        for _ in range(150):
            executor.step(2, 2)
    assert list(session.generate(prompts, 12, stop_ids=frozenset())) == expected
    session.close()


@pytest.mark.parametrize("name", MODELS)
def test_iebin_gives_the_same_logits_and_ids(name: str, tmp_path: Path) -> None:
    convert(MODELS[name], tmp_path / "iebin")
    converted = load_model(open_checkpoint(tmp_path / "iebin"))
    session = make_session(converted, threads=2, context=256, chunk=LENGTH, all_logits=True)
    assert np.array_equal(session.logits(ids_of(0, LENGTH)), logits_of(name, LENGTH, 2))
    made = [t.id for t in session.generate([ids_of(5, 9)], 12, stop_ids=frozenset())]
    session.close()
    original = make_session(model_of(name), threads=1, context=256)
    assert [t.id for t in original.generate([ids_of(5, 9)], 12, stop_ids=frozenset())] == made
    original.close()


def test_a_quantised_iebin_gives_the_logits_of_a_quantised_load(tmp_path: Path) -> None:
    q4_map = tmp_path / "map.json"
    rule = {"pattern": ".*_proj.weight", "dtype": "int8w", "scale": "per-channel"}
    q4_map.write_text(json.dumps({"version": 1, "rules": [rule]}))
    convert(MODELS["llama"], tmp_path / "iebin", q4_map=q4_map)
    model = load_model(open_checkpoint(tmp_path / "iebin"))
    session = make_session(model, threads=2, context=256, chunk=LENGTH, all_logits=True)
    expected = logits_of("llama", LENGTH, 2, "int8w")
    assert np.array_equal(session.logits(ids_of(0, LENGTH)), expected)
    session.close()


def test_the_stub_is_a_back_end_like_the_others():
    prompts = [[5, 6], [7], [1, 2, 3, 4, 5]]
    expected = [[stub_id(prompt, index) for index in range(4)] for prompt in prompts]
    with closing(
        make_session(stub_model(), backend="stub", batch=3, context=64, chunk=3)
    ) as session:
        for _ in range(2):
            made: list[list[int]] = [[], [], []]
            for token in session.generate(prompts, 4):
                made[token.sequence].append(token.id)
            assert made == expected
        session.warm()
        (first, *_) = session.generate([[9]], 2)
        assert first.id == stub_id([9], 0)
        with pytest.raises(UsageError, match="the stub has no logits"):
            next(session.generate([[9]], 2, logits=True))
        assert (session.scheduler.kv_hits, session.scheduler.kv_misses) == (0, 0)
        assert session.isa == "none"


def test_the_stub_stays_within_the_vocabulary_of_a_model():
    model = model_of("llama")
    with closing(make_session(model, backend="stub", context=64)) as session:
        ids = [token.id for token in session.generate([[5]], 20, stop_ids=frozenset())]
    size = model.spec.vocab_size
    assert ids == [stub_id([5], index, size) for index in range(20)]
