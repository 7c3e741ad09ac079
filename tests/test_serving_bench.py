"""python -m bench.serving before a server that has no model, and may misbehave."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_openai import Fake, fake_server
from sessions import make_session

from bench.measure import NotMeasured
from bench.ops.experiment import opened
from bench.report.charts import svg
from bench.report.data import read_file
from bench.report.sections import sections
from bench.report.serving import figures
from bench.serving import cases, life, servers
from bench.serving.__main__ import main
from bench.serving.client import Chunks, Events, Target, get
from bench.serving.load import Shape, closed, fault, percentiles, poisson, seeds

SHAPE = Shape("completions", 8, 16, 256)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_server() as found:
        yield found


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_events_are_found_wherever_the_stream_is_cut() -> None:
    text = (
        b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
    )
    whole = Events().feed(text)
    assert whole == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]
    for cut in range(len(text)):
        events = Events()
        assert events.feed(text[:cut]) + events.feed(text[cut:]) == whole
    events = Events()
    assert [e for i in range(len(text)) for e in events.feed(text[i : i + 1])] == whole


def test_chunks_are_joined_wherever_they_are_cut() -> None:
    text = b"5\r\nhello\r\n2;x=y\r\n\r\n\r\n0\r\n\r\n"
    for cut in range(len(text)):
        chunks = Chunks()
        assert chunks.feed(text[:cut]) + chunks.feed(text[cut:]) == b"hello\r\n"
        assert chunks.is_over
    with pytest.raises(ValueError, match="invalid literal"):
        Chunks().feed(b"no number\r\n")


def test_addresses() -> None:
    assert Target.of("http://127.0.0.1:80/") == Target("127.0.0.1", 80)
    assert Target.of("http://[::1]:80").host == "::1"
    for bad in ("https://a:1", "http://a", "a:1", "http://:1", "http://a:b"):
        with pytest.raises(NotMeasured, match="expected http"):
            Target.of(bad)


def test_arrivals_are_seeded_and_have_the_rate() -> None:
    times = poisson(20.0, 4000, 7)
    assert times == poisson(20.0, 4000, 7) != poisson(20.0, 4000, 8)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # exponential


def test_prompts_are_seeded_and_differ() -> None:
    assert SHAPE.ids(3) == SHAPE.ids(3) != SHAPE.ids(4)
    assert len({seeds(load, n) for load in ("1 streams", "2 streams") for n in range(4)}) == 8
    assert set(replace(SHAPE, length=5000).ids(1)) == set(range(5, 256))


def test_percentiles() -> None:
    assert percentiles("x", [*range(101)]) == {"x_p50_ms": 50, "x_p95_ms": 95, "x_p99_ms": 99}
    assert percentiles("x", []) == {"x_p50_ms": None, "x_p95_ms": None, "x_p99_ms": None}


def test_metrics_of_all_labels_are_added_up() -> None:
    text = '# TYPE a gauge\na{x="1"} 2\na{x="2"} 3.5\nb_total 1e3\n'
    assert servers.samples(text) == {"a": 5.5, "b_total": 1000}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_load_is_measured(fake: Fake, endpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ("--url", fake.url, "--streams", "1,3", "--rate", "40", "--seconds", "0.2")
    more = ("--new", "8", "--rounds", "2", "--slo", "5000", "5000", "--json", str(out))
    done = run(*words, *more, "--endpoint", endpoint)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert [(row["load"], row["requests"]) for row in rows] == [
        ("1 stream", 2),
        ("3 streams", 6),
        ("40/s", 16),
    ]
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert [line["tok_s"] for line in lines] == [row["tok_s"] for row in rows]
    for row in rows:
        assert (row["kind"], row["op"]) == ("serving", "load")
        assert row["errors"] == {}
        assert row["tokens_per_chunk"] == 1 <= row["tokens_per_read"]
        assert 1 <= row["itl_p50_ms"] <= row["itl_p99_ms"] < row["e2e_p50_ms"]
        assert row["goodput_rps"] > 0
        assert 0 < row["client_cpu"] < 2
        assert row["server_cpu"] is None
    body = fake.seen[0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["ignore_eos"], body["max_tokens"], body["temperature"]) == (True, 8, 0)
    prompts = {json.dumps(body.get("prompt") or body["messages"]) for body in fake.seen}
    assert len(prompts) == len(fake.seen)


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("refuse", "HTTP 500"),
        ("cut", "connection lost: closed"),
        ("event", "error event: engine died"),
        ("short", "15 tokens, asked for 16"),
        ("no usage", "no usage in the stream"),
    ],
)
def test_errors_are_counted(fake: Fake, planted: str, why: str) -> None:
    fake.fault = planted
    done = run("--url", fake.url, "--streams", "2", "--new", "16", "--rounds", "1")
    assert done.exit_code == 1, done.output
    row = json.loads(done.output.splitlines()[0])
    assert row["errors"] == {why: 2}
    assert (row["tok_s"], row["itl_p50_ms"]) == (0, None)


def test_nobody_there() -> None:
    done = run("--url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "names no model (no connection" in done.output
    assert run().exit_code == 2


def test_a_stream_that_stands_still_ends_as_an_error(fake: Fake) -> None:
    async def wait() -> str:
        (answer,) = await closed(server, SHAPE, 1, 1, 0)
        return fault(answer, 16)

    server = servers.Server("fake", Target.of(fake.url), "fake")
    fake.token_s = 0.2
    answer = asyncio.run(_impatient(server))
    assert fault(answer, 16) == "no end within 0.1 s"
    fake.token_s = 0.0
    assert asyncio.run(wait()) == ""


async def _impatient(server: servers.Server) -> object:
    from bench.serving.client import start

    return await (await start(server.target, SHAPE.request(server, 1))).answered(0.1)


def test_disconnects_are_seen_and_so_is_a_leak(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "_IDLE_S", 0.5)
    fake.slots = 4
    server = servers.Server("fake", Target.of(fake.url), "fake", slots=4)
    row = asyncio.run(life.disconnect(server, SHAPE, 20))
    assert (row["disconnects"], row["kv_usage_after"], row["correct"]) == (20, 0, True)
    assert 0 < row["free_ms"] <= row["free_max_ms"] < 500
    fake.leak = 0.25
    row = asyncio.run(life.disconnect(server, SHAPE, 8))
    assert (row["kv_usage_after"], row["correct"]) == (0.25, False)


def test_a_full_queue(fake: Fake) -> None:
    server = servers.Server("fake", Target.of(fake.url), "fake")
    fake.room = 3
    row = asyncio.run(life.queue_full(server, SHAPE, 10, 4))
    assert (row["accepted"], row["refused"], row["retry_after"]) == (3, 4, True)
    assert 0 < row["refusal_ms"] < 500
    fake.room = 1000
    assert not asyncio.run(life.queue_full(server, SHAPE, 5))["correct"]


def test_soak(fake: Fake) -> None:
    server = servers.Server("fake", Target.of(fake.url), "fake", pid=os.getpid())
    row = asyncio.run(life.Soak(server, SHAPE, 4, 1.2 / 60).run())
    assert row["errors"] == {}
    assert row["correct"]
    assert all(row["asked"][kind] > 0 for kind in ("whole", "cancelled", "bad"))
    assert row["rss_last_mb"] > 1
    assert row["health_p99_ms"] > 0
    fake.fault = "event"
    row = asyncio.run(life.Soak(server, SHAPE, 4, 0.5 / 60).run())
    assert row["errors"]["whole: error event: engine died"] > 0
    assert not row["correct"]


def test_one_stream_beside_the_session(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_METRICS_S", 0.0)
    fake.token_s = 0.002
    server = servers.Server("fake", Target.of(fake.url), "fake")
    with closing(make_session(opened(None), batch=2)) as session:
        both = cases.Bench([server], SHAPE, 2, session)
        through, bare = cases.overhead(both)
        eight, *alone = cases.batch(both, 2)
    assert through["step_ms"] == pytest.approx(2)
    assert 1 < through["over_step"] == pytest.approx(through["ms_per_token"] / 2, rel=0.5)
    assert through["ratio"] == pytest.approx(through["ms_per_token"] / bare["ms_per_token"])
    assert figures(through).count(";") == 2
    assert figures(bare) == f"{bare['ms_per_token']:.2f} ms a token"
    assert [row["server"] for row in alone] == [cases.BARE, f"{cases.BARE}, one stream"]
    assert eight["ratio"] == pytest.approx(eight["tok_s"] / alone[0]["tok_s"])


def test_a_running_stream_beside_a_long_prompt(fake: Fake) -> None:
    fake.token_s = 0.005
    server = servers.Server("fake", Target.of(fake.url), "fake")
    (row,) = cases.intrusion(cases.Bench([server], SHAPE, 1), 500)
    assert 5 <= row["gap_p50_ms"] <= row["max_ms"]
    assert len(fake.seen[-1]["prompt"]) == 500


SERVE = """#!{python}
import json, sys
sys.path[:0] = {path!r}
from fake_openai import fake_server
assert sys.argv[1:] == ["--model-dir", {model!r}, "--host", "127.0.0.1", "--port", "0",
    "--speculate", "off", "-x"]
with fake_server() as fake:
    print("loading", flush=True)
    print(json.dumps({{"event": "ready", "url": fake.url, "engine_pid": 1}}), flush=True)
    import signal
    signal.pause()
"""


def test_a_server_is_started_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "clocher-serve"
    here = [str(Path(__file__).parent)]
    program.write_text(SERVE.format(python=sys.executable, path=here, model=str(tmp_path)))
    program.chmod(0o700)
    with servers.clocher(tmp_path, str(program), "-x") as server:
        assert (server.name, server.model, server.about["engine_pid"]) == ("clocher", "fake", 1)
        pid = server.pid
        assert server.rss_bytes() > 1 << 20
        assert server.cpu_seconds() > 0
        assert asyncio.run(get(server.target, "/health")).status == 200
        assert asyncio.run(server.health())["http_status"] == 200
    assert not Path(f"/proc/{pid}").exists()
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    with pytest.raises(NotMeasured, match="exit 1: no such model"):
        servers.clocher(tmp_path, str(program)).__enter__()


def test_the_report_shows_it(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    run("--url", fake.url, "--streams", "1,2", "--rounds", "1", "--json", str(out), "--new", "4")
    file = read_file(out)
    assert file.kind == "serving"
    *_, section = (s for s in sections([file]) if s.plots)
    assert len(section.plots) == 2
    assert len(section.tables[0].rows) == 2
    for plot in section.plots:
        assert "streams" in svg(plot.chart)
