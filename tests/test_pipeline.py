"""Prompts from file to micro-batch: parsing, order, back-pressure, failures, memory, shutdown."""

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import clean_environment
from hypothesis import given
from hypothesis import strategies as st

from clocher_kernels.errors import DeviceError, UsageError, WindowError
from clocher_runtime.command.completions import MAX_LISTED
from clocher_runtime.command.loading import StubTokenizer
from clocher_runtime.disk.output_file import JsonlWriter
from clocher_runtime.engine.stub import stub_id
from clocher_runtime.engine.timing import Reservoir, Span, StepTotals, TimedWindow
from clocher_runtime.quality.verify import read_trace
from clocher_runtime.text.prompts import (
    MAX_LINE_BYTES,
    MAX_WORKERS,
    RING_BYTES,
    Line,
    Preparation,
    Prompt,
    PromptPipeline,
    PromptSource,
    prefetch_depth,
    read_lines,
    worker_count,
)

ROOT = Path(__file__).parents[1]
WAIT_S = 30
SHAPES = [
    pytest.param(ahead, workers, overlap, id=f"ahead{ahead}-workers{workers}-{overlap}")
    for ahead, workers, overlap in [
        (0, 1, False),
        (1, 1, False),
        (1, 1, True),
        (3, 4, False),
        (3, 4, True),
        (64, 8, False),
        (64, 8, True),
    ]
]


def lines(count: int, size: int = 1) -> list[Line]:
    return [Line(number, b"x" * size) for number in range(1, count + 1)]


def ready(line: Line) -> Prompt:
    return Prompt((line.number,))


def numbers(groups: list[list[Prompt]]) -> list[list[int]]:
    return [[prompt.ids[0] for prompt in group] for group in groups]


def until(happens) -> None:
    """Wait for something that other threads do."""
    end = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def pipeline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prompts-")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert pipeline_threads() == []


# The ring


@pytest.mark.parametrize("count", [0, 1, 7, 8, 200])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("ahead", "workers", "overlap"), SHAPES)
def test_micro_batches_are_contiguous_and_in_order(count, batch, ahead, workers, overlap):
    moods = random.Random(count)

    def prepare(line: Line) -> Prompt:
        time.sleep(moods.choice([0, 0, 0, 1e-4]))
        return ready(line)

    shape = {"batch": batch, "ahead": ahead, "workers": workers, "overlap": overlap}
    with PromptPipeline(lines(count), prepare, **shape) as groups:
        found = numbers(list(groups))
    everything = list(range(1, count + 1))
    assert found == [everything[i : i + batch] for i in range(0, count, batch)]


@pytest.mark.parametrize("workers", [1, 5])
def test_threads_wait_when_the_ring_is_full(workers):
    begun = []

    def prepare(line: Line) -> Prompt:
        begun.append(line.number)
        return ready(line)

    read = []
    endless = (read.append(n) or Line(n, b"x") for n in iter(int, 1) for n in range(1, 10**9))
    shape = {"batch": 2, "ahead": 3, "workers": workers, "overlap": True}
    with PromptPipeline(endless, prepare, **shape) as groups:
        for taken in range(1, 20):
            assert numbers([next(iter(groups))]) == [[2 * taken - 1, 2 * taken]]
            until(lambda taken=taken: len(begun) == 6 + 2 * taken)
            time.sleep(0.01)
            assert len(begun) == len(read) == 6 + 2 * taken


def test_without_overlap_nothing_is_prepared_while_the_consumer_is_busy():
    begun, done = [], []

    def prepare(line: Line) -> Prompt:
        begun.append(line.number)
        time.sleep(2e-4)
        done.append(line.number)
        return ready(line)

    window = TimedWindow("test")
    with PromptPipeline(lines(100), prepare, batch=3, ahead=5, workers=4) as groups:
        for _ in groups:
            with window.span("decode", 1):
                before = len(begun), len(done)
                time.sleep(2e-3)
                assert (len(begun), len(done)) == before
                assert before[0] == before[1]
    assert len(done) == 100


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_prompt_that_is_asked_for_inside_a_span_is_refused(ahead):
    pipeline = PromptPipeline(lines(4), ready, ahead=ahead)
    refused = pytest.raises(WindowError, match="refused to tokenise a prompt")
    with pipeline as groups, TimedWindow("test").span("decode", 1), refused:
        next(iter(groups))


def test_with_overlap_the_ring_fills_while_the_consumer_is_busy():
    done = []
    prepare = lambda line: done.append(line.number) or ready(line)  # noqa: E731
    with PromptPipeline(lines(100), prepare, ahead=4, overlap=True) as groups:
        assert numbers([next(iter(groups))]) == [[1]]
        until(lambda: len(done) == 5)
        assert numbers([next(iter(groups))]) == [[2]]
        until(lambda: len(done) == 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_ring_holds_few_long_prompts(overlap):
    done = []
    prepare = lambda line: done.append(line.number) or ready(line)  # noqa: E731
    long = lines(40, size=RING_BYTES // 4)
    shape = {"batch": 2, "ahead": 16, "workers": 3, "overlap": overlap}
    with PromptPipeline(long, prepare, **shape) as groups:
        stream = iter(groups)
        for taken in range(1, 21):
            assert len(next(stream)) == 2
            until(lambda taken=taken: len(done) >= min(40, 2 * taken + 2 * overlap))
            time.sleep(0.002)
            assert len(done) <= 2 * taken + 5
    assert len(done) == 40


def test_a_micro_batch_of_very_long_prompts_is_made_all_the_same():
    with PromptPipeline(lines(6, size=RING_BYTES), ready, batch=3, ahead=2, workers=2) as groups:
        assert numbers(list(groups)) == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("where", ["lines", "prepare"])
@pytest.mark.parametrize(("ahead", "workers", "overlap"), SHAPES)
def test_an_error_reaches_the_consumer(where, ahead, workers, overlap):
    def broken(line: Line) -> Prompt:
        if line.number == 20:
            raise ZeroDivisionError("a defect")
        return ready(line)

    def torn():
        yield from lines(20)
        raise ZeroDivisionError("a defect")

    source, prepare = (torn(), ready) if where == "lines" else (lines(99), broken)
    shape = {"batch": 2, "ahead": ahead, "workers": workers, "overlap": overlap}
    failing = pytest.raises(ZeroDivisionError, match="a defect")
    with failing, PromptPipeline(source, prepare, **shape) as groups:
        for _ in groups:
            pass


def test_leaving_early_ends_the_threads():
    pipeline = PromptPipeline(lines(1000), ready, ahead=2, workers=8, overlap=True)
    with pytest.raises(KeyboardInterrupt), pipeline as groups:
        next(iter(groups))
        assert pipeline_threads()
        raise KeyboardInterrupt
    assert pipeline_threads() == []


@pytest.mark.parametrize(
    ("prefetch", "batch", "expected"),
    [
        ("off", 4, (0, False)),
        (0, 4, (0, False)),
        ("auto", 1, (64, False)),
        ("auto", 5, (13, False)),
        ("auto", 1000, (1, False)),
        ("on", 4, (2, True)),
        (256, 4, (256, True)),
    ],
)
def test_what_prefetch_means(prefetch, batch, expected):
    assert prefetch_depth(prefetch, batch) == expected


def test_threads_beside_the_model_take_the_cores_that_it_leaves():
    assert worker_count(overlap=False, cpus=4, team=4) == 4
    assert worker_count(overlap=True, cpus=4, team=4) == 1
    assert worker_count(overlap=True, cpus=8, team=4) == 4
    assert worker_count(overlap=False, cpus=96, team=1) == MAX_WORKERS


# Lines


@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"a", b"\n")), max_size=12))
def test_a_line_feed_is_the_only_end_of_a_line(chunks):
    whole = b"".join(chunks).split(b"\n")
    expected = whole[:-1] + ([whole[-1]] if whole[-1] else [])
    assert list(read_lines(io.BytesIO(b"".join(chunks)))) == expected


@pytest.mark.parametrize("size", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES])
def test_of_a_line_without_end_only_the_beginning_is_kept(size):
    found = list(read_lines(io.BytesIO(b"first\n" + b"x" * size + b"\nlast")))
    assert len(found[1]) == min(size, MAX_LINE_BYTES + 1)
    assert (found[0], found[2:]) == (b"first", [b"last"])


def test_a_line_without_end_is_an_error() -> None:
    class Endless(io.BytesIO):
        def readline(self, limit=-1):
            return piece[:limit]

    piece = bytes(MAX_LINE_BYTES + 1)
    with pytest.raises(UsageError, match="goes on for more than 1073741824 bytes"):
        list(read_lines(Endless()))


def source_of(tmp_path: Path, name: str, data: bytes, **config) -> PromptSource:
    (tmp_path / name).write_bytes(data)
    return PromptSource(tmp_path / name, **config)


def test_a_source_can_be_looked_at_and_gone_through_again(tmp_path):
    source = source_of(tmp_path, "p.txt", b"\xef\xbb\xbfone\r\n\n  \ntwo\x0c\xc2\x85!\nthree")
    expected = [Line(1, b"one\r"), Line(4, b"two\x0c\xc2\x85!"), Line(5, b"three")]
    assert source.peek(2) == expected[:2]
    assert source.peek(9) == expected
    assert list(source.lines()) == expected
    assert source.peek(1) == expected[:1]
    assert list(source.lines()) == list(source.lines()) == expected
    prepare = Preparation(source, StubTokenizer().encode, check)
    assert [prepare(line).text for line in expected] == ["one", "two\x0c\x85!", "three"]
    source.close()


def check(ids) -> None:
    if not ids:
        raise UsageError("no tokens")
    if len(ids) > 9:
        raise UsageError(f"{len(ids)} tokens, the context holds 9")


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("p.txt", b"ab", [97, 98]),
        ("p.txt", b'{"prompt', [123, 34, 112, 114, 111, 109, 112, 116]),
        ("p.txt", b"a\xff", "not UTF-8: "),
        ("p.txt", b"0123456789", "10 tokens, the context holds 9"),
        ("p.txt", b"x" * (MAX_LINE_BYTES + 1), "longer than 4194304 bytes"),
        ("p.jsonl", b'{"prompt": "ab", "id": 1}', [97, 98]),
        ("p.jsonl", b'{"ids": [5, 0, 7]}\r', [5, 0, 7]),
        ("p.jsonl", b'{"prompt": ""}', "no tokens"),
        ("p.jsonl", b'{"ids": []}', "no tokens"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "not valid Unicode"),
        ("p.jsonl", b'{"ids": [1, true]}', '"ids" is [1, True]; expected an object'),
        ("p.jsonl", b'{"ids": [1.0]}', '"ids" is [1.0]; expected'),
        ("p.jsonl", b'{"ids": "ab"}', "\"ids\" is 'ab'; expected"),
        ("p.jsonl", b'{"prompt": [1]}', '"prompt" is [1]; expected'),
        (
            "p.jsonl",
            b'{"prompt": "a", "ids": [1]}',
            'the object has "prompt" and "ids"; ',
        ),
        (
            "p.jsonl",
            b'{"text": "a"}',
            'the object has neither "prompt" nor "ids"; ',
        ),
        ("p.jsonl", b"[1]", "got [1]; expected an object"),
        ("p.jsonl", b"{", "not JSON: "),
        ("p.jsonl", b"[" * 100_000, "not JSON: "),
        ("p.jsonl", b'{"ids": [' + b"9" * 9999 + b"]}", "not JSON: "),
        ("p.jsonl", b'{"prompt": "a\xff"}', "not UTF-8: "),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_prompt_is_ready_or_says_why_not(name, line, expected, tmp_path):
    source = source_of(tmp_path, name, b"\n" + line)
    (given_line,) = source.lines()
    prompt = Preparation(source, StubTokenizer().encode, check)(given_line)
    source.close()
    if isinstance(expected, list):
        assert (list(prompt.ids), prompt.error) == (expected, None)
    else:
        assert len(prompt.ids) == 0
        assert prompt.error is not None
        assert prompt.error.startswith(f"prompts file {tmp_path / name}, line 2: {expected}")


def test_text_for_a_model_without_a_tokenizer_fails_alone(tmp_path):
    source = source_of(tmp_path, "p.jsonl", b'{"prompt": "a"}\n{"ids": [1]}\n')
    found = list(map(Preparation(source, None, check), source.lines()))
    source.close()
    assert "the model has no tokenizer" in str(found[0].error)
    assert (found[1].ids, found[1].error) == ((1,), None)


# The run


MIXED = b"""{"prompt": "a"}
{"prompt": 5}

{"ids": [7, 8]}
\xff
{"prompt": "\\ud800"}
{"prompt": "b", "more": null}
"""


@pytest.mark.parametrize("batch", ["1", "2", "9"])
def test_a_bad_line_fails_alone_and_in_its_place(inside, tmp_path, batch):
    (tmp_path / "p.jsonl").write_bytes(MIXED)
    flags = ("--stub", "--prompts-file", "p.jsonl", "--max-new", "2", "--batch", batch)
    code, line, err = inside(
        *flags, "--rounds", "2", "--trace-ids", "t.jsonl", "--outputs", "o.jsonl"
    )
    assert (code, line["status"]) == (0, "ok")
    assert (line["prompts"], line["prompts_failed"], line["tokens_generated"]) == (6, 3, 12)
    good = [[97], [7, 8], [98]]
    made = [[stub_id(ids, 0), stub_id(ids, 1)] for ids in good]
    assert [o["token_ids"] for o in line["outputs"]] == [made[0], [], made[1], [], [], made[2]]
    errors = [o["error"] for o in line["outputs"]]
    assert [e is None for e in errors] == [True, False, True, False, False, True]
    for place, number in ((1, 2), (3, 5), (4, 6)):
        assert errors[place].startswith(f"prompts file p.jsonl, line {number}: ")
        assert err.count(errors[place]) == 1
    assert err.index(errors[1]) < err.index(errors[3]) < err.index(errors[4])
    written = [json.loads(text) for text in Path("o.jsonl").read_text().splitlines()]
    assert written == [{"index": i, **output} for i, output in enumerate(line["outputs"])]
    traces = read_trace(tmp_path / "t.jsonl")
    assert [list(t.prompt_ids) for t in traces] == good
    assert [list(t.generated_ids) for t in traces] == made
    assert [t.prompt for t in traces] == ["a", None, "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl", "p.jsonl", "t.jsonl"]


@pytest.mark.parametrize("batch", ["1", "7", "64"])
def test_the_result_does_not_depend_on_prefetch(inside, tmp_path, batch):
    text = "".join(f"prompt {n}\n" if n % 11 else "\n\udcff\n" for n in range(300))
    (tmp_path / "p.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    flags = ("--stub", "--prompts-file", "p.txt", "--max-new", "2", "--rounds", "2")
    found = {}
    for prefetch in ("off", "0", "auto", "on", "1", "256"):
        code, line, err = inside(*flags, "--batch", batch, "--prefetch", prefetch)
        assert (code, line["prefetch"], line["hints_ignored"]) == (0, prefetch, [])
        assert (line["prompts"], line["prompts_failed"]) == (300, 28)
        texts = [text for text in err.splitlines() if "tok/s" not in text]
        found[prefetch] = (line["outputs"], line["prefill_tokens"], line["forward_passes"], texts)
    assert all(result == found["off"] for result in found.values())


def test_the_embedded_model_generates_the_same_with_every_prefetch(inside, tmp_path):
    (tmp_path / "p.txt").write_text("import os\nclass A:\n\nfor i in\ndef f(\nx = [\n")
    flags = ("--prompts-file", "p.txt", "--max-new", "3", "--batch", "2", "--warmup", "1")
    found = [inside(*flags, "--prefetch", prefetch)[1] for prefetch in ("off", "auto", "on")]
    assert found[0]["outputs"] == found[1]["outputs"] == found[2]["outputs"]
    assert found[0]["prompts"] == 5


def test_too_long_for_the_context_fails_alone(inside, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1, 2, 3]}\n{"ids": [99999]}\n')
    flags = ("--prompts-file", "p.jsonl", "--max-new", "1", "--context", "2", "--batch", "3")
    code, line, _ = inside(*flags)
    assert (code, line["prompts_failed"]) == (0, 2)
    assert "3 tokens, the context holds 2" in line["outputs"][1]["error"]
    assert "outside 0..4095" in line["outputs"][2]["error"]


def test_ids_need_no_tokenizer(inside, tmp_path):
    shutil.copytree(ROOT / "tests" / "data" / "clocher-tiny-bitnet", tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    (tmp_path / "p.jsonl").write_text('{"ids": [5]}\n{"prompt": "a"}\n')
    flags = ("--model-dir", "m", "--max-new", "1", "--prompts-file")
    code, line, _ = inside(*flags, "p.jsonl")
    assert (code, line["prompts_failed"], line["outputs"][0]["text"]) == (0, 1, "")
    (tmp_path / "p.txt").write_text("a\n")
    assert inside(*flags, "p.txt")[0] == 3


def test_a_file_without_one_usable_prompt_is_code_2(inside, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\n\xfe\n")
    code, line, err = inside("--stub", "--prompts-file", "p.txt", "--outputs", "o.jsonl")
    assert (code, line["type"]) == (2, "UsageError")
    assert line["message"].startswith("none of 2 prompts is usable: prompts file p.txt, line 1: ")
    assert [err.count(f"line {number}: not UTF-8") for number in (1, 2)] == [1, 1]


def test_the_line_lists_the_first_outputs_only(inside, tmp_path):
    (tmp_path / "p.txt").write_text("".join(f"{n}\n" for n in range(MAX_LISTED + 5)))
    flags = ("--stub", "--prompts-file", "p.txt", "--max-new", "1", "--batch", "50")
    line = inside(*flags, "--outputs", "o.jsonl")[1]
    assert (len(line["outputs"]), line["prompts"]) == (MAX_LISTED, MAX_LISTED + 5)
    written = [json.loads(text) for text in Path("o.jsonl").read_text().splitlines()]
    assert [w["index"] for w in written] == list(range(MAX_LISTED + 5))
    assert [w["token_ids"] for w in written] == [
        [stub_id(list(str(n).encode()), 0)] for n in range(MAX_LISTED + 5)
    ]
    line = inside(*flags, "--aggregate", "--outputs", "a.jsonl")[1]
    assert line["outputs"] == []
    assert Path("a.jsonl").read_bytes() == Path("o.jsonl").read_bytes()


def test_a_full_disk_is_not_blamed_on_the_directory(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused = pytest.raises(DeviceError, match="No space left on device; free some space")
    with refused, JsonlWriter(tmp_path / "o.jsonl", "--outputs") as file:
        file.write({})


@pytest.mark.parametrize("path", [".", "absent/o.jsonl", os.devnull])
def test_outputs_that_cannot_be_written_are_refused_before_the_model_loads(inside, path):
    code, line, _ = inside("--model-dir", "absent", "--outputs", path)
    assert code == 2
    assert line["message"].startswith(f"--outputs: {path} cannot be written")
    assert not Path(f"{path}.partial").exists()


def test_a_file_that_was_not_finished_keeps_its_other_name(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text("old\n")
    with pytest.raises(ZeroDivisionError), JsonlWriter(path, "--outputs") as file:
        file.write({"a": 1})
        raise ZeroDivisionError
    assert path.read_text() == "old\n"
    assert (tmp_path / "o.jsonl.partial").read_text() == '{"a": 1}\n'
    with JsonlWriter(path, "--outputs") as file:
        file.write({"a": "é\u2028"})
    kept = tmp_path / "o.jsonl.partial.old"
    assert kept.read_text() == '{"a": 1}\n'  # another run's answers are not thrown away
    kept.unlink()
    assert path.read_bytes() == b'{"a": "\\u00e9\\u2028"}\n'
    with pytest.raises(ZeroDivisionError), JsonlWriter(path, "--outputs"):
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["o.jsonl"]


# In a process of its own


def start(cwd: Path, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "clocher_runtime.cli", "--stub", *flags],
        cwd=cwd,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def peak_of_a_run(tmp_path: Path, count: int, prefetch: str) -> float:
    """Return the peak resident set size of a run of `count` prompts in MiB."""
    with (tmp_path / "p.txt").open("w", encoding="ascii") as file:
        file.writelines(f"def function_{n}(argument, other):\n" for n in range(count))
    flags = ("--prompts-file", "p.txt", "--max-new", "2", "--batch", "64", "--prefetch", prefetch)
    process = start(tmp_path, *flags, "--outputs", "o.jsonl", "--aggregate")
    out, err = process.communicate(timeout=280)
    line = json.loads(out)
    assert process.returncode == 0, err
    assert (line["prompts"], line["tokens_generated"]) == (count, 2 * count)
    with (tmp_path / "o.jsonl").open() as file:
        assert sum(1 for _ in file) == count
    return line["rss_peak_mb"]


def test_memory_does_not_grow_with_the_file(tmp_path):
    few = peak_of_a_run(tmp_path, 2000, "auto")
    assert peak_of_a_run(tmp_path, 20_000, "auto") < few + 8


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["off", "auto", "on"])
def test_a_million_lines_take_no_more_memory_than_a_thousand(tmp_path, prefetch):
    few = peak_of_a_run(tmp_path, 1000, prefetch)
    assert peak_of_a_run(tmp_path, 1_000_000, prefetch) < few + 24


@pytest.mark.parametrize("prefetch", ["off", "auto", "on"])
def test_an_interrupt_ends_a_run_whose_prompts_do_not_come(tmp_path, prefetch):
    os.mkfifo(tmp_path / "pipe")
    process = start(
        tmp_path, "--prompts-file", "pipe", "--prefetch", prefetch, "--outputs", "o.jsonl"
    )
    with (tmp_path / "pipe").open("w") as pipe:
        pipe.write("first\n" * 3)
        pipe.flush()
        # A prompt is generated from once the ring is full, which with "on" takes two more.
        expected = {"off": 3, "auto": 0, "on": 1}[prefetch]
        for _ in range(expected):
            assert re.fullmatch(r"clocher-run: prompt [1-3]:\n", process.stderr.readline())
            assert process.stderr.readline().startswith("<")
        if not expected:
            time.sleep(1.0)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    line = json.loads(out)
    assert (process.returncode, line["code"], line["type"]) == (130, 130, "KeyboardInterrupt")
    assert "Traceback" not in err
    assert "Fatal" not in err
    kept = tmp_path / "o.jsonl.partial"
    assert not (tmp_path / "o.jsonl").exists()
    assert (len(kept.read_text().splitlines()) if kept.exists() else 0) == expected
    assert (f"finished completions: {expected}, in o.jsonl.partial" in err) == bool(expected)


def test_a_pipe_is_read_once_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    process = start(tmp_path, "--prompts-file", "pipe", "--rounds", "2")
    with (tmp_path / "pipe").open("w"):
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "--rounds needs a file that can be read again" in json.loads(out)["message"]


# What is remembered of a long run


def test_a_reservoir_keeps_everything_while_it_fits_and_then_an_even_sample():
    few = Reservoir[int](100)
    for value in range(100):
        few.add(value)
    assert (few.values, few.count) == (list(range(100)), 100)
    many, again = Reservoir[int](2000), Reservoir[int](2000)
    for value in range(100_000):
        many.add(value)
        again.add(value)
    assert many.values == again.values
    assert (len(many.values), len(set(many.values)), many.count) == (2000, 2000, 100_000)
    for quarter in range(4):
        inside = sum(25_000 * quarter <= v < 25_000 * (quarter + 1) for v in many.values)
        assert 420 < inside < 580  # four standard deviations around 500


def test_totals_count_every_span():
    totals = StepTotals()
    for _ in range(3):
        totals.add([Span("prefill", 5, 70), Span("decode", 2, 9), Span("decode", 1, 8)])
    assert (totals.forwards, totals.prefill_tokens, totals.prefill_ns) == (9, 15, 210)
    assert [span.ns for span in totals.decode.values] == [9, 8] * 3
