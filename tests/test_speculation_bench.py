"""The bench of guesses: answers are told, not shown, and what it prints comes from measurements."""

import json
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from sessions import make_session
from test_session import model_of

from bench import speculation
from bench.workloads import WORKLOADS, Source
from clocher_runtime.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
MODEL = DATA / "clocher-tiny-llama"
NEW = 24


def source_of() -> tuple[Source, Tokenizer]:
    checkpoint = model_of("llama").checkpoint
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    text = (DATA / "valid.txt").read_text(encoding="utf-8")
    return Source(text, tokenizer.encode, 4096, NEW), tokenizer


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand in for llama-server: it makes what the grammar wants at 32 tokens a second."""
    path = tmp_path_factory.mktemp("peer") / "llama-server"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, re, sys\n"
        "from http.server import BaseHTTPRequestHandler, HTTPServer\n"
        "class Handler(BaseHTTPRequestHandler):\n"
        "    def answer(self, found):\n"
        "        data = json.dumps(found).encode()\n"
        "        self.send_response(200)\n"
        "        self.send_header('Content-Length', str(len(data)))\n"
        "        self.end_headers()\n"
        "        self.wfile.write(data)\n"
        "    def do_GET(self):\n"
        "        self.answer({'data': [{'id': 'fake'}]})\n"
        "    def do_POST(self):\n"
        "        asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))\n"
        "        ids = list(map(int, re.findall(r'<\\[(\\d+)\\]>', asked['grammar'])))\n"
        "        n = asked['n_predict']\n"
        "        times = {'predicted_n': n, 'predicted_per_second': 32.0}\n"
        "        if '--spec-type ngram-simple' in ' '.join(sys.argv):\n"
        "            times |= {'draft_n': n, 'draft_n_accepted': n // 2}\n"
        "        self.answer({'tokens': ids, 'timings': times})\n"
        "    def log_message(self, *words):\n"
        "        pass\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def rows_of(*arguments: str) -> list[dict[str, object]]:
    common = ["--model-dir", str(MODEL), "--threads", "2", "--new", str(NEW)]
    result = CliRunner().invoke(speculation.main, [*common, *arguments])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]


def test_a_told_session_makes_the_answer_with_guesses_and_without() -> None:
    source, _ = source_of()
    cases = [WORKLOADS["edit"](source, number) for number in range(3)]
    for speculate in ("off", "suffix"):
        made = make_session(
            model_of("llama"), threads=2, batch=3, context=1024, speculate=speculate
        )
        with closing(made) as session:
            session.warm()
            ours = speculation.Ours(session, NEW)
            assert ours.run(cases).ids == [case.answer for case in cases]
            # What is not told is the model's own again.
            own = WORKLOADS["own"](source, 1)
            (ids,) = ours.run([own]).ids
            stream = session.generate([own.prompt], NEW, stop_ids=frozenset())
            assert [token.id for token in stream] == ids != source.encode(source.piece(1))[:NEW]


def test_workloads_are_what_they_are_called() -> None:
    source, tokenizer = source_of()
    for number in range(3):
        cases = {name: make(source, number) for name, make in WORKLOADS.items()}
        assert all(cases[name] == make(source, number) for name, make in WORKLOADS.items())
        for name in ("continue", "edit", "summarise"):
            assert len(cases[name].answer) == NEW
        edit = tokenizer.decode(cases["edit"].prompt)
        assert 600 < len(cases["edit"].prompt) < 1000
        (change,) = re.findall(r"# The file, with (\w+) for (\w+)", edit)
        assert change[0] == f"new_{change[1]}" and edit.count(change[1]) > 4
        assert not cases["random"].answer and cases["random-sampled"].sampling.temperature == 1
        assert cases["continue"].prompt != WORKLOADS["continue"](source, number + 1).prompt


def test_guesses_and_a_peer_are_measured_in_turns(llama_server: Path, tmp_path: Path) -> None:
    gguf, out = tmp_path / "model.gguf", tmp_path / "rows.json"
    gguf.touch()
    arguments = ["--llama-server", str(llama_server), "--gguf", str(gguf), "--json", str(out)]
    for words in ("--spec-type none", "--spec-type ngram-simple"):
        arguments += ["--llama-args", words]
    rows = rows_of("--workload", "edit", "--rounds", "2", *arguments)
    on, off, none, simple = rows
    assert [row["engine"] for row in rows] == [
        speculation.ON,
        speculation.OFF,
        "llama-server --spec-type none",
        "llama-server --spec-type ngram-simple",
    ]
    assert on["same_ids"] == none["same_ids"] == "2/2" and on["correct"] is True
    assert on["tokens"] == off["tokens"] == 2 * NEW and off["drafted"] == 0
    assert none["samples"] == [32.0, 32.0]
    speeds = on["samples"]
    assert isinstance(speeds, list)
    assert none["over_peer_range"] == [min(speeds) / 32, max(speeds) / 32]
    assert simple["tokens_per_pass"] == 2 and simple["acceptance"] == 0.5
    assert [row["kind"] for row in json.loads(out.read_text())] == ["speculation"] * 4


def test_many_streams_are_measured_without_a_peer(llama_server: Path) -> None:
    on, off = rows_of("--workload", "continue", "--rounds", "1", "--streams", "3")
    assert on["streams"] == 3 and on["tokens"] == off["tokens"] == 3 * NEW
    arguments = ["--streams", "2", "--llama-server", str(llama_server)]
    result = CliRunner().invoke(speculation.main, ["--model-dir", str(MODEL), *arguments])
    assert result.exit_code == 2 and "--streams 1" in result.output


def test_denoised_blocks_are_measured(tmp_path: Path) -> None:
    for file in MODEL.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((MODEL / "config.json").read_text())
    config["block_diffusion"] = {"block_size": 4, "mask_token_id": 3, "context": "causal"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = ["--model-dir", str(tmp_path), "--workload", "own", "--rounds", "1"]
    on, _ = rows_of(*more, "--diffusion", "lossless")
    assert on["correct"] is True and on["same_ids"] == "1/1"
    assert 1 <= on["tokens_per_pass"] <= 4
    on, _ = rows_of(*more, "--diffusion", "static:2")
    assert "correct" not in on and 1.5 < on["tokens_per_pass"] <= 2
    result = CliRunner().invoke(
        speculation.main, [*more, "--diffusion", "static:2", "--workload", "edit"]
    )
    assert result.exit_code == 2 and "leave out edit" in result.output
