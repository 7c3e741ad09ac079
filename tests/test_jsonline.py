"""The JSON line: its keys, its document, and each number recomputed from a scripted session."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from clocher_kernels import errors, guards
from clocher_runtime.command import completions as completions_module
from clocher_runtime.command import run as run_module
from clocher_runtime.command.completions import Completions, run_line, summary
from clocher_runtime.command.console import Console, error_line, to_json
from clocher_runtime.command.loading import Engine, Loaded
from clocher_runtime.command.run import measure
from clocher_runtime.config.commands import RunConfig
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import Given
from clocher_runtime.engine.binding import PagesRead
from clocher_runtime.engine.requests import Token
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.speculation.speculator import Account, Counts, Speculator
from clocher_runtime.text.prompts import Prompt, PromptPipeline

DOCUMENT = Path(__file__).parent.parent / "docs" / "json-line.md"

RUN_KEYS = [
    "schema",
    "status",
    "version",
    "device",
    "backend_reason",
    "isa",
    "gpu",
    "model",
    "model_source",
    "mode",
    "precision",
    "act_prec",
    "kv_dtype",
    "act_sparsity",
    "threads",
    "numa_nodes",
    "context",
    "batch",
    "prompts",
    "prompts_failed",
    "prefetch",
    "rounds",
    "tokens_generated",
    "wall_time_s",
    "tps_true",
    "latency_p50_ms",
    "latency_p95_ms",
    "latency_p99_ms",
    "prefill_tokens",
    "prefill_s",
    "ttft_ms",
    "rss_peak_mb",
    "kv_cache_mb",
    "kv_hits",
    "kv_misses",
    "bytes_per_token",
    "forward_passes",
    "attention",
    "diffusion",
    "speculation",
    "work_touch",
    "bytes_touched",
    "coverage",
    "effective_gbps",
    "environment",
    "generation_config",
    "hints_ignored",
    "outputs",
]
ATTENTION_KEYS = ["mode", "selected"]
DIFFUSION_KEYS = ["mode", "nfe", "tokens_per_nfe"]
SPECULATION_KEYS = [
    "mode",
    "draft_model",
    "drafted",
    "accepted",
    "acceptance",
    "tokens_per_pass",
    "passes",
    "by_source",
    "gate",
    "cost_of_8",
    "reason",
]
TOUCH_KEYS = ["bytes_per_token", "stride", "bytes_touched", "bytes_read", "checksum"]
OUTPUT_KEYS = ["token_ids", "text", "error"]
ERROR_KEYS = ["schema", "status", "version", "code", "type", "message"]

MS = 1_000_000
STOP = 9


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Letters:
    """Id 1 is "a", 2 is "b", ..."""

    def encode(self, text, *, room=None):
        return [ord(c) - 96 for c in text]

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids)

    def stream(self):
        class Stream:
            push = staticmethod(lambda i: chr(96 + i))
            flush = staticmethod(lambda: "")

        return Stream()


class ScriptedSession:
    """Prefill takes 10 ms a token, the n-th decode step of a call n ms. Makes 1, 2, 3, ..."""

    context, isa, act_prec, kv_cache_bytes = 100, "generic", "fp32", 3 << 19

    def __init__(self, clock):
        self.clock, self.calls, self.salts = clock, [], set()
        self.scheduler = SimpleNamespace(kv_hits=1000, kv_misses=1000)  # left by a warm-up
        self.pages_read = PagesRead(100, 400)
        self.config = SimpleNamespace(act_sparsity=None, attn="topk:256")
        self.model, self.sizes = MODEL, SimpleNamespace(cache_dtype="f32")
        self.diffusion = "off"
        self.speculate, self.counts = "off", Counts(forwards=7, sent=3)
        self.speculator = Speculator(lambda _: None, 9)

    def synchronize(self):
        pass

    def work_touch(self, bytes_per_token, stride):
        return None

    def speculation(self, before=None):
        return self.speculator.account(self.counts.since(before or Counts()))

    def generate(self, prompts, max_new, sampling, stop_ids, window, after_token, *, logits, salt):
        self.salts.add(salt)
        self.calls.append([list(p) for p in prompts])
        for sequence, prompt in enumerate(prompts):
            with window.span("prefill", len(prompt)):
                self.clock.now += 10 * MS * len(prompt)
                self.touch(after_token, 1)
            self.scheduler.kv_misses += len(prompt)
            self.pages_read = PagesRead(*(n + 8 for n in self.pages_read))
            self.clock.now += 500 * MS  # what happens between spans does not count
            yield Token(sequence, 1)
        for step in range(1, max_new):
            with window.span("decode", len(prompts)):
                self.clock.now += step * MS
                self.touch(after_token, len(prompts))
            self.scheduler.kv_hits += 1
            listed, seen = self.pages_read
            self.pages_read = PagesRead(listed + 4, seen + 8)
            for sequence in range(len(prompts)):
                yield Token(sequence, step + 1, "length" if step == max_new - 1 else "")

    def touch(self, after_token, count):
        if after_token is not None:
            with pytest.raises(errors.WindowError):
                guards.refuse_in_window("check that a span is open")
            after_token(count)


WEIGHTS = np.arange(250, dtype=np.uint8)
MODEL = SimpleNamespace(
    checkpoint=SimpleNamespace(
        files=[SimpleNamespace(nbytes=250, bytes=lambda start, count: WEIGHTS)]
    ),
    spec=SimpleNamespace(eos_ids=[STOP], windows=[None]),
    bytes_per_token=1000,
    precision="bf16",
)


@pytest.fixture
def engine():
    return Engine(
        Loaded(
            config=EngineConfig(backend="cpu", threads=2, generation_config="none"),
            reason="scripted",
            name="m",
            source="--model-dir",
            model=MODEL,
            tokenizer=Letters(),
        ),
        session=ScriptedSession(Clock()),
        hints_ignored=("IE_ACT_PREC=fp8",),
    )


def line_from(engine, prompts, batch, config):
    """Return the line of a run with these prompts, ids each."""
    console = Console()
    ready = [Prompt(tuple(ids)) for ids in prompts]
    with Completions(console, config) as completions:
        completions.begin(engine)
        measured = measure(
            lambda: PromptPipeline(ready, lambda prompt: prompt, batch=batch),
            batch,
            completions,
        )
        return run_line(measured, completions, batch)


@pytest.fixture
def line_of(monkeypatch, engine):
    """Return a function that runs prompts through the scripted session."""

    def measured_line(prompts, batch=1, **settings):
        config = RunConfig(hints_ignored=("IE_DEDUP=1",), **settings)
        clock = partial(TimedWindow, clock=engine.session.clock)
        monkeypatch.setattr(run_module, "TimedWindow", clock)
        monkeypatch.setattr(run_module, "rss_peak_mib", lambda: 12.5)
        monkeypatch.setattr(completions_module, "numa_nodes", lambda: 4)
        return line_from(engine, prompts, batch, config)

    return measured_line


def test_one_prompt(line_of, capsys):
    line = line_of([[1, 2, 3]], max_new=5)
    # prefill 30 ms, decode 1 + 2 + 3 + 4 ms
    assert line["wall_time_s"] == pytest.approx(0.040)
    assert line["tokens_generated"] == 5
    assert line["tps_true"] == pytest.approx(5 / 0.040)
    assert (line["prefill_tokens"], line["prefill_s"]) == (3, pytest.approx(0.030))
    assert line["ttft_ms"] == pytest.approx(30)
    assert [line[f"latency_p{p}_ms"] for p in (50, 95, 99)] == [2.0, 4.0, 4.0]
    assert (line["kv_cache_mb"], line["numa_nodes"]) == (1.5, 4)
    assert (line["kv_hits"], line["kv_misses"]) == (4, 3)
    assert line["forward_passes"] == 5
    assert line["bytes_touched"] == 5 * 1000
    assert line["coverage"] == pytest.approx(5 * 1000 / 250)
    assert line["effective_gbps"] == pytest.approx(5 * 1000 / 0.040 / 1e9)
    assert line["rss_peak_mb"] == 12.5
    assert line["mode"] == "default"
    assert line["hints_ignored"] == ["IE_DEDUP=1", "IE_ACT_PREC=fp8"]
    assert line["outputs"] == [{"token_ids": [1, 2, 3, 4, 5], "text": "abcde", "error": None}]
    assert capsys.readouterr().err == "abcde\n"


def test_rounds_and_batches_add_up(line_of, engine, capsys):
    line = line_of([[1], [2, 2], [3]], batch=2, max_new=3, rounds=2, require_model=True)
    assert engine.session.calls == [[[1], [2, 2]], [[3]]] * 2
    assert engine.session.salts == {"repeated"}  # no round drafts from the one before
    # a round: groups of 2 and 1 prompts: prefill 10 + 20 and 10 ms, decode 1 + 2 ms each
    assert line["wall_time_s"] == pytest.approx(2 * 0.046)
    assert (line["prompts"], line["batch"], line["rounds"], line["mode"]) == (3, 2, 2, "strict")
    assert line["tokens_generated"] == 2 * 9
    assert line["forward_passes"] == 2 * (2 + 2 + 1 + 2)
    assert line["prefill_tokens"] == 2 * 4
    assert line["ttft_ms"] == pytest.approx(10)  # of 10, 30 and 10 ms in each round
    assert line["latency_p50_ms"] == 1.0
    assert [o["token_ids"] for o in line["outputs"]] == [[1, 2, 3]] * 3
    texts = [f"clocher-run: prompt {number}:\nabc\n" for number in (1, 2, 3)]
    assert capsys.readouterr().err == "".join(texts)


def test_one_token_has_no_decode_latency(line_of):
    line = line_of([[1]], max_new=1)
    assert math.isnan(line["latency_p50_ms"])
    assert math.isnan(line["latency_p95_ms"]) and math.isnan(line["latency_p99_ms"])
    assert json.loads(to_json(line))["latency_p95_ms"] is None


@pytest.mark.parametrize("verify", [False, True])
def test_work_touch_runs_for_every_token_of_every_round(line_of, verify):
    line = line_of(
        [[1], [2]],
        batch=2,
        max_new=3,
        rounds=2,
        bytes_per_token=100,
        stride_bytes=7,
        verify_touch=verify,
    )
    touch = line["work_touch"]
    assert touch["bytes_touched"] == 12 * 100
    assert line["bytes_touched"] == line["forward_passes"] * 1000 + 12 * 100
    expected = sum(
        int(WEIGHTS[(token * 100 + at) % 250]) for token in range(12) for at in range(0, 100, 7)
    )
    assert touch["checksum"] == (expected if verify else None)


def test_aggregate_leaves_outputs_out(line_of, capsys):
    line = line_of([[1], [2]], max_new=2, aggregate=True)
    assert line["outputs"] == []
    assert line["tokens_generated"] == 4
    assert capsys.readouterr().err == ""


def test_text_leaves_out_the_token_that_ended_it(line_of, engine, capsys):
    line = line_of([[1]], max_new=STOP)
    assert line["outputs"] == [{"token_ids": list(range(1, 10)), "text": "abcdefgh", "error": None}]
    assert capsys.readouterr().err == "abcdefgh\n"


def test_engine_without_weight_files_has_no_coverage(line_of, engine, monkeypatch):
    monkeypatch.setattr(run_module, "rss_peak_mib", lambda: 0.0)
    spec = MODEL.spec
    model = SimpleNamespace(
        checkpoint=SimpleNamespace(files=[]), spec=spec, bytes_per_token=0, precision="bf16"
    )
    bare = replace(engine, loaded=replace(engine.loaded, model=model, tokenizer=None))
    config = RunConfig(max_new=2)
    data = json.loads(to_json(line_from(bare, [[1]], 1, config)))
    assert data["coverage"] is None
    assert data["outputs"] == [{"token_ids": [1, 2], "text": "", "error": None}]


def test_the_share_of_pages_is_that_of_the_window(line_of):
    told = line_of([[1]], max_new=3)["attention"]  # 8 of 8, then 4 of 8 twice
    assert (told["mode"], told["selected"]) == ("topk:256", 16 / 24)


def test_guesses_are_those_of_the_window(line_of, engine):
    session = engine.session
    off = line_of([[1]], max_new=2)["speculation"]
    assert (off["mode"], off["passes"], off["reason"]) == ("off", 0, "switched off")
    session.speculate = "auto"
    session.speculator.costs.ns = [50.0, 100.0, *[110.0] * 6, 120.0, 130.0]
    generate = session.generate

    def guessing(*args, **named):
        yield from generate(*args, **named)
        counts = session.counts
        counts.forwards, counts.tokens, counts.sent = counts.forwards + 10, counts.tokens + 16, 6
        counts.drafted, counts.accepted, counts.without_draft = 12, 6, 4
        counts.by_source["suffix"] = [12, 6]

    session.generate = guessing
    line = line_of([[1]], max_new=2)
    told = line["speculation"]
    assert (told["passes"], told["drafted"], told["accepted"]) == (10, 12, 6)
    assert told["acceptance"] == 0.5
    assert told["tokens_per_pass"] == 1.6
    assert told["by_source"] == {"suffix": {"drafted": 12, "accepted": 6}}
    # Three are of the warm-up.
    assert told["gate"] == {"sent": 3, "no_draft": 4, "not_worth_verifying": 0}
    assert told["cost_of_8"] == 1.2
    assert told["reason"] == "30 % of forwards verified drafts"
    assert "1.60 tokens per forward" in summary(line)
    assert summary({**line, "speculation": off}).count(" | ") == summary(line).count(" | ") - 1


NOT_WORTH = "drafts not worth verifying: acceptance expected too low"


@pytest.mark.parametrize(
    ("counts", "cost", "reason"),
    [
        (Counts(), 1.0, "no forward only decoded"),
        (Counts(forwards=8, without_draft=8), 1.0, "no draft available"),
        (Counts(forwards=1), 1.0, "the text was almost over"),
        (Counts(forwards=8, not_worth=2), 4.2, "a forward of 8 tokens costs 4.2 of one"),
        (
            Counts(forwards=8, not_worth=2),
            1.1,
            NOT_WORTH,
        ),
        (
            Counts(forwards=8, not_worth=2),
            math.nan,
            NOT_WORTH,
        ),
        (Counts(forwards=8, sent=2), 1.1, "25 % of forwards verified drafts"),
    ],
)
def test_the_reason_is_a_phrase(counts, cost, reason):
    assert Account(counts, cost).reason == reason


def test_keys_are_pinned(line_of):
    data = json.loads(to_json(line_of([[1]], max_new=2)))
    assert list(data) == RUN_KEYS
    assert list(data["attention"]) == ATTENTION_KEYS
    assert list(data["diffusion"]) == DIFFUSION_KEYS
    assert list(data["speculation"]) == SPECULATION_KEYS
    assert list(data["speculation"]["gate"]) == ["sent", "no_draft", "not_worth_verifying"]
    assert list(data["work_touch"]) == TOUCH_KEYS
    assert list(data["outputs"][0]) == OUTPUT_KEYS
    assert list(json.loads(to_json(error_line(ValueError("x"))))) == ERROR_KEYS
    assert data["schema"] == "clocher.run/1"


def test_the_document_lists_exactly_the_keys_in_their_order():
    keys = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert keys == [
        *RUN_KEYS,
        *ATTENTION_KEYS,
        *DIFFUSION_KEYS,
        *SPECULATION_KEYS,
        *TOUCH_KEYS,
        *OUTPUT_KEYS,
        *ERROR_KEYS,
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_null(line_of, value):
    line = {**line_of([[1]], max_new=2), "tps_true": value}
    assert json.loads(to_json(line))["tps_true"] is None


def test_a_line_is_one_ascii_line_whatever_the_text(line_of):
    text = "a\nb\r\x0b\x0c\x85\u2028\u2029é😀\0\x1b[31m\udcff"
    outputs = [{"token_ids": [1], "text": text, "error": None}]
    written = to_json({**line_of([[1]], max_new=2), "outputs": outputs})
    assert written.isascii()
    assert len(written.splitlines()) == 1
    assert json.loads(written)["outputs"][0]["text"] == text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.ModelError("x"), 3),
        (errors.ModelNotFound("x"), 3),
        (errors.FormatError("x"), 3),
        (errors.UnsupportedModel("x"), 3),
        (errors.DeviceError("x"), 5),
        (errors.UnsupportedOp("x"), 5),
        (errors.OutOfMemory("x"), 6),
        (MemoryError("x"), 6),
        (KeyboardInterrupt("x"), 130),
        (errors.ShapeError("x"), 1),
        (errors.WindowError("x"), 1),
        (ZeroDivisionError("x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_line_has_the_code_of_its_kind(error, code):
    line = error_line(error)
    assert (line["status"], line["code"], line["type"]) == ("error", code, type(error).__name__)
    assert line["message"] == "x"


def test_every_error_class_has_a_code_on_purpose():
    unmapped = {
        *(errors.ClocherError, errors.ShapeError, errors.WindowError),
        errors.ConstraintFailed,  # a mask let a token pass that its grammar refuses: a defect
    }
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    for kind in kinds:
        assert (error_line(kind("x"))["code"] == ExitCode.BUG) == (kind in unmapped), kind


def test_error_without_a_message_names_its_kind():
    assert error_line(MemoryError())["message"] == "MemoryError"


def test_summary_is_one_line_with_the_headline_numbers(line_of):
    text = summary(line_of([[1, 2, 3]], max_new=5))
    assert "5 tokens in 0.040 s" in text
    assert "125.0 tok/s" in text
    assert "first token 30.0 ms" in text
    assert "\n" not in text


def test_given_reads_like_a_setting():
    assert str(Given("IE_DEDUP", "1")) == "IE_DEDUP=1"
