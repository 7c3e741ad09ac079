"""The benchmarks run on tiny models, and what they print comes from measurements."""

import json
import os
import shutil
import stat
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import click
import pytest
from click.testing import CliRunner, Result

from bench import __main__ as bench
from bench import linear, peers, schemas, speculation, tools
from bench.experiment import experiment, limit_note, seconds, turns
from bench.linear import ENGINES, Problem, clocher, exact_product
from bench.record import KINDS, Kind, Row, write_json
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.flags import option
from clocher_runtime.convert.synthetic import Synthesis
from clocher_runtime.quality.statistics import ratio
from cpu_fallback.team.bandwidth import Reader

FAST = ["--rounds", "2", "--mib", "2"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("tiny-llama")
    Synthesis("tiny-llama", "int4", out_dir, gguf=True).run()
    return out_dir


@pytest.fixture
def llama_bench(tmp_path: Path) -> Path:
    """Stand in for llama-bench: 64 tokens a second, failing for other than its tests."""
    path = tmp_path / "llama-bench"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "line = ' '.join(sys.argv[1:])\n"
        "if '-t 2' not in line or '-r 1 -o json' not in line:\n"
        "    sys.exit('unexpected: ' + line)\n"
        'print("[\\nWARNING: Behavior may be unexpected")\n'
        'print(\'{"avg_ts": 64.0, "build_commit": "abc", "model_type": "llama Q4_0"}]\')\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_rounds_interleave_and_turn() -> None:
    calls = []

    def contestant(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    runs = {name: (lambda name=name: contestant(name)) for name in "abc"}
    found = turns(runs, 3)
    # The first round, in the order of turn -1, is thrown away.
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab"
    assert found == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_ratio_follows_the_rounds() -> None:
    drifting = [10.0, 20.0, 30.0, 40.0, 50.0]
    found = ratio([2 * value for value in drifting], drifting)
    assert (found.value, found.low, found.high) == (2, 2, 2)
    noisy = ratio([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0])
    assert noisy.low < noisy.value == 1 < noisy.high
    assert str(found) == "2.00x [2.00, 2.00]"


def test_short_calls_are_repeated() -> None:
    calls = []
    mean = seconds(lambda: calls.append(None), at_least=0.01)
    assert len(calls) > 10
    assert mean < 0.001


def test_rows_are_json_and_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_json(path, [{"a": 1.5}, {"a": None}])
    assert json.loads(path.read_text()) == [{"a": 1.5}, {"a": None}]
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, [{"a": float("nan")}])
    assert json.loads(path.read_text()) == [{"a": 1.5}, {"a": None}]


def test_a_speed_above_the_limit_is_named() -> None:
    assert limit_note(99) == ""
    assert "above the limit" in limit_note(120)


def test_bandwidth_reads_every_byte() -> None:
    reader = Reader("4k", 2 << 20)
    reader.gbps(3)
    reader._data[:] = 0
    with pytest.raises(RuntimeError, match="did not read"):
        reader.gbps(3)


@pytest.mark.parametrize("text", ["0", "1,", "x", "-1"])
def test_thread_counts_are_checked(text: str) -> None:
    result = CliRunner().invoke(linear.main, [*FAST, "--threads", text])
    assert result.exit_code == 2
    assert "numbers from 1" in result.output


def test_a_case_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    result = CliRunner().invoke(peers.main, ["--model-dir", str(tmp_path), *FAST])
    assert result.exit_code == 3
    assert "no model there" in result.output or "model.gguf" in result.output


@pytest.mark.parametrize("name", ["int4_sym_g32_f16", "int8_row_f32", "bf16", "ternary", "mxfp4"])
def test_clocher_multiplies_correctly(name: str) -> None:
    problem = Problem.filling(name, 64, 256, 2, 40_000)
    weights = problem.weights()
    engine = clocher(problem, weights, 2)
    exact = exact_product(problem, weights)
    try:
        assert engine.correct(exact)
        assert not engine.correct(exact * 1.1)
        assert engine.seconds() > 0 and engine.nbytes * engine.calls == problem.nbytes
    finally:
        engine.close()


def rows_of(command: click.Command, out: Path, *words: str) -> tuple[int, list[Row]]:
    done = CliRunner().invoke(command, [*words, "--json", str(out)], catch_exceptions=False)
    found: list[Row] = json.loads(out.read_text())
    return done.exit_code, found


def test_products(tmp_path: Path) -> None:
    words = [*FAST, "--shapes", "64x256", "--formats", "bf16", "--threads", "2"]
    words += ["--engines", "clocher,cached,torch"]
    code, found = rows_of(linear.main, tmp_path / "rows.json", *words)
    assert code == 0
    rows = {row["engine"]: row for row in found}
    assert list(rows) == list(ENGINES)
    ours, cached, torch = rows.values()
    wanted = {"op", "format", "N", "K", "M", "threads", "isa", "gbps", "read_gbps", "pct_of_limit"}
    assert wanted | {"correct"} <= set(ours)
    assert (ours["N"], ours["K"], ours["M"], ours["correct"]) == (64, 256, 1, True)
    assert cached["correct"] and torch["correct"]
    assert torch["ratio_low"] <= torch["ratio"] <= torch["ratio_high"]
    for row in found:
        assert row["gbps"] > 0.001 and row["us"] > 0


def test_an_engine_that_is_missing_has_a_reason_and_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if not installed: importing a module that is None fails.
    monkeypatch.setitem(sys.modules, "torch", None)
    words = [*FAST, "--shapes", "64x96", "--formats", "bf16", "--threads", "1"]
    code, rows = rows_of(linear.main, tmp_path / "r.json", *words, "--engines", "clocher,torch")
    assert code == 0 and rows[1]["note"].startswith("not measured: torch cannot be imported")
    assert "gbps" in rows[0] and "gbps" not in rows[1]


def test_a_wrong_product_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "exact_product", lambda *args: 2 * exact_product(*args))
    words = [*FAST, "--shapes", "64x96", "--formats", "ternary", "--threads", "1,2"]
    code, rows = rows_of(linear.main, tmp_path / "rows.json", *words)
    assert code == 1 and not any(row["correct"] for row in rows)
    assert [row["threads"] for row in rows] == [1, 2]


def test_models(model_dir: Path, llama_bench: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--model-dir", str(model_dir), "--llama-bench", str(llama_bench), *FAST]
    arguments += ["--test", "pp8", "--test", "tg4", "--threads", "2", "--json", str(out)]
    result = CliRunner().invoke(peers.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [(row["engine"], row["test"]) for row in rows] == [
        ("clocher", "pp8"),
        ("llama.cpp model.gguf", "pp8"),
        ("clocher", "tg4"),
        ("llama.cpp model.gguf", "tg4"),
    ]
    assert rows[1]["tok_s"] == 64
    assert rows[1]["ratio"] == pytest.approx(rows[0]["tok_s"] / 64)
    assert rows[1]["note"] == "abc llama Q4_0"


def test_several_programs_and_depths(
    model_dir: Path, llama_bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "rows.json", tmp_path / "said"
    monkeypatch.setenv("SAID", str(said))
    noting = "import os, sys\nprint(*sys.argv[1:], file=open(os.environ['SAID'], 'a'))\n"
    llama_bench.write_text(llama_bench.read_text().replace("import sys\n", noting))
    arguments = ["--model-dir", str(model_dir), "--test", "tg4@d9", *FAST, "--json", str(out)]
    arguments += ["--llama-bench", f"{llama_bench} -fa 1"]
    arguments += ["--llama-bench", f"ik_llama.cpp={llama_bench} -rtr 1"]
    result = CliRunner().invoke(peers.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    names = ["clocher", "llama.cpp -fa 1 model.gguf", "ik_llama.cpp -rtr 1 model.gguf"]
    assert [(row["engine"], row["test"]) for row in rows] == [(name, "tg4@d9") for name in names]
    assert all(row["tok_s"] > 0 for row in rows)
    assert rows[0]["pct_of_limit"] > 0 and "pct_of_limit" not in rows[1]
    asked = said.read_text()
    assert "-fa 1 -m" in asked and "-rtr 1 -m" in asked and "-p 0 -n 4 -d 9 " in asked


def test_a_peer_that_fails_has_a_reason_and_no_number(
    model_dir: Path, llama_bench: Path, tmp_path: Path
) -> None:
    llama_bench.write_text("#!/bin/sh\necho cannot load >&2\nexit 1\n")
    out = tmp_path / "rows.json"
    arguments = ["--model-dir", str(model_dir), "--llama-bench", str(llama_bench), *FAST]
    arguments += ["--test", "tg2", "--json", str(out)]
    result = CliRunner().invoke(peers.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    ours, peer = json.loads(out.read_text())
    assert "tok_s" in ours
    assert peer["note"] == "not measured: cannot load"
    assert "tok_s" not in peer


def test_speculation_by_kind_of_text(tmp_path: Path) -> None:
    questions, keep, out = (tmp_path / name for name in ("q.jsonl", "keep.jsonl", "rows.json"))
    lines = [{"category": kind, "turns": [f"{kind}: {n}", "?"]} for kind in "ab" for n in range(3)]
    questions.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["--questions", str(questions), "--prompts", "2", "--max-new", "12", "--threads", "2"]
    words += ["--draft-model", str(embedded_model()), "--settings", "auto,both"]
    words += ["--keep", str(keep), "--json", str(out)]
    for _ in range(2):  # the second time, nothing is left to measure
        result = CliRunner().invoke(speculation.main, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        rows = json.loads(out.read_text())
        each_setting = [("a", 2), ("b", 2), ("mean of kinds", 4)]
        assert [(row["text"], row["n"]) for row in rows] == 2 * each_setting
        assert all(row["correct"] and row["tokens_per_pass"] >= 1 for row in rows)
        assert "worst: " in rows[-1]["note"] and rows[0]["over_off"] > 0
        kept = [json.loads(line) for line in keep.read_text().splitlines()]
        assert [[*each["found"]] for each in kept] == [
            ["off", "auto", "both", "seconds"],
            ["auto", "both", "off", "seconds"],
            ["both", "off", "auto", "seconds"],
            ["off", "auto", "both", "seconds"],
        ]
    fewer = [*words[:-6], "--settings", "both", *words[-4:]]
    assert CliRunner().invoke(speculation.main, fewer, catch_exceptions=False).exit_code == 0
    assert len(keep.read_text().splitlines()) == 8  # of other settings nothing is taken over
    kept[0]["found"]["auto"]["ids"][3] += 1
    keep.write_text("".join(f"{json.dumps(each)}\n" for each in kept))
    result = CliRunner().invoke(speculation.main, words, catch_exceptions=False)
    assert result.exit_code == 1 and not json.loads(out.read_text())[0]["correct"]


def test_schemas_of_a_suite(tmp_path: Path) -> None:
    small = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    closed = small | {"additionalProperties": False, "required": ["a"]}
    texts = [({"a": 7}, True), ({"a": 10}, False), ({"a": 1, "b": 2}, False), ({}, False)]
    tests = [{"valid": valid, "data": data} for data, valid in texts]
    for name, schema in (("One_1", closed), ("Two---x", {"not": small})):
        suite = {"schema": schema, "tests": tests}
        (tmp_path / f"{name}.json").write_text(json.dumps(suite))
    out = tmp_path / "rows.jsonl"
    words = ["--data", str(tmp_path), "--texts", "1", "--json", str(out)]
    result = CliRunner().invoke(schemas.main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    everything, one, two = json.loads(out.read_text())
    assert [row["suite"] for row in (everything, one, two)] == ["all", "One", "Two"]
    assert (everything["n"], everything["compiled"], two["compiled"]) == (2, 1, 0)
    assert [one[key] for key in ("accepted", "accepted_of", "rejected", "rejected_of")] == [
        1,
        1,
        3,
        3,
    ]
    assert "not" in next(iter(two["refused"])) and 0 < one["mask_us_p50"] <= one["mask_us_max"]
    assert everything["asked"] == 1 and everything["obeying"] == everything["ended"]


def test_schemas_are_judged_again_if_anything_that_counts_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, keep, model = (tmp_path / name for name in ("data/One.json", "kept.jsonl", "model"))
    one.parent.mkdir()
    one.write_text('{"schema": {"type": "integer"}}')
    shutil.copytree(embedded_model(), model)
    words = ["--model-dir", str(model), "--data", str(one.parent), "--keep", str(keep)]

    def kept() -> int:
        result = CliRunner().invoke(schemas.main, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return len(keep.read_text().splitlines())

    assert (kept(), kept()) == (1, 1)
    one.write_text('{"schema": {"type": "number"}}')
    assert kept() == 2
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert kept() == 3
    monkeypatch.setattr(schemas, "code_sha256", lambda: "with other limits")
    assert kept() == 4


def test_calls_are_judged_as_the_suite_judges_them() -> None:
    answers = {"to": ["New York", "NY"], "miles": [7, 7.5], "stops": [["a", "B"], ""]}
    assert tools.fits({"to": "new-york", "miles": 7.0}, answers)
    assert tools.fits({"to": "ny", "miles": 7.5, "stops": ["A", "b"]}, answers)
    for wrong in ({"miles": 8}, {"stops": ["b", "a"]}, {"via": 1}, {"to": 3}, {"miles": True}):
        assert not tools.fits({"to": "NY", "miles": 7, **wrong}, answers)
    assert not tools.fits({"to": "NY"}, answers)  # it may not be missing
    assert tools.same({"x": 1}, {"x": [1], "y": ["", 2]}) and not tools.same({}, {"x": [1]})
    truth = [{"a.b": {"x": [1]}}, {"a.b": {"x": [2]}}]
    assert tools.is_right([("a_b", {"x": 2}), ("a_b", {"x": 1})], truth)
    assert not tools.is_right([("a_b", {"x": 2}), ("a_b", {"x": 2})], truth)
    assert not tools.is_right([("a_b", {"x": 1})], truth)


class _Calls(BaseHTTPRequestHandler):
    """A server whose first two answers call a tool, the second of them wrongly; it then refuses."""

    asked: ClassVar[list[dict[str, object]]] = []

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.tell({"data": [{"id": "a model"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(json.loads(body))
        if len(self.asked) > 2:
            self.send_error(500)
            return
        call = {"name": "m_add", "arguments": ('{"n": 3}', "{")[len(self.asked) - 1]}
        message = {"tool_calls": [{"function": call}]}
        self.tell({"choices": [{"message": message}]})

    def tell(self, found: object) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_tool_calls_are_asked_of_servers(tmp_path: Path) -> None:
    ask = [[{"role": "user", "content": "1 + 2?"}]]
    kind = {"type": "dict", "properties": {"n": {"type": "float"}}, "required": ["n"]}
    items = [
        {"id": f"q{i}", "question": ask, "function": [{"name": "m.add", "parameters": kind}]}
        for i in range(3)
    ]
    (tmp_path / "possible_answer").mkdir()
    for path, lines in (
        ("BFCL_v4_multiple.json", items),
        (
            "possible_answer/BFCL_v4_multiple.json",
            [{"id": item["id"], "ground_truth": [{"m.add": {"n": [3]}}]} for item in items],
        ),
    ):
        (tmp_path / path).write_text("\n".join(map(json.dumps, lines)))
    out, keep = tmp_path / "rows.json", tmp_path / "keep"
    with ThreadingHTTPServer(("127.0.0.1", 0), _Calls) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["--data", str(tmp_path), "--url", f"one=http://127.0.0.1:{server.server_port}"]
        words += ["--categories", "multiple", "--keep", str(keep), "--json", str(out)]
        for _ in range(2):  # the second time nothing is asked
            result = CliRunner().invoke(tools.main, words, catch_exceptions=False)
            assert result.exit_code == 0, result.output
            (row,) = json.loads(out.read_text())
            assert (row["n"], row["engine"], len(_Calls.asked)) == (3, "one", 3)
            assert [row[n] for n in ("right", "parseable", "refused")] == [
                pytest.approx(100 / 3)
            ] * 3
        server.shutdown()
    tool = _Calls.asked[0]["tools"][0]["function"]
    assert tool["name"] == "m_add" and tool["parameters"]["properties"]["n"]["type"] == "number"
    assert (
        _Calls.asked[0]["model"] == "a model"
        and _Calls.asked[0]["tool_choice"] == "auto"
        and _Calls.asked[0]["temperature"] == 0
    )


def test_openvino_is_a_peer_where_its_wheel_is_installed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = metadata.version

    def installed(name: str) -> str:
        return "1" if name == "openvino-genai" else version(name)

    monkeypatch.setattr(metadata, "version", installed)
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "openvino_genai.py").write_text("raise ImportError('blocked by the test')\n")
    monkeypatch.setenv("PATH", str(blocked))
    paths = [str(blocked), str(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    out = tmp_path / "rows.json"
    arguments = ["--model-dir", str(model_dir), "--test", "tg2", *FAST, "--json", str(out)]
    result = CliRunner().invoke(peers.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    ours, llama_cpp, openvino = json.loads(out.read_text())
    assert llama_cpp["engine"] == "llama.cpp model.gguf"
    assert "No such file" in llama_cpp["note"] and "llama-bench" in llama_cpp["note"]
    assert openvino["engine"] == "openvino model.gguf"
    assert "openvino_genai cannot be imported" in openvino["note"]
    assert "tok_s" in ours and "tok_s" not in openvino


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["linear", "--shapes", "64"], "expected NxK"),
        (["peers", "--model-dir", ".", "--test", "xx1"], "expected pp or tg"),
        (["peers", "--model-dir", ".", "--test", "pp8@d8"], "expected pp or tg"),
        (["linear", "--formats", "int5"], "unknown format"),
        (["linear", "--engines", "clocher,abacus"], "expected some of clocher, cached"),
        (["speculation", "--questions", "q", "--settings", "draft"], "give --draft-model"),
        (["none"], "no case 'none'; cases are harness, strict, peers"),
    ],
    ids=["shape", "test", "depth", "format", "engine", "draft", "case"],
)
def test_wrong_arguments_are_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_every_case_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([])
    listed = capsys.readouterr().out
    assert all(f"  {name}" in listed for name in bench.CASES)
    for name in bench.CASES:
        with pytest.raises(SystemExit) as stop:
            bench.main([name, "--help"])
        assert stop.value.code == 0
        assert "python -m bench" in capsys.readouterr().out


def test_help_keeps_the_lines_of_its_examples() -> None:
    shown = CliRunner().invoke(peers.main, ["--help"]).output
    assert "\\b" not in shown
    assert "\n      python -m bench peers --model-dir" in shown


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "name | GB/s = {gbps:.1f} | right | note"
    monkeypatch.setitem(KINDS, "made_up", Kind("Made up", columns))  # type: ignore[arg-type]


def made_of(rows: list[Row], *arguments: str) -> Result:
    """Run a case that yields these rows and knows one option."""

    @experiment("made_up", "Rows.", option("--dir", str))
    def main(asked: object) -> list[Row]:
        return rows

    return CliRunner().invoke(main, arguments)


def test_rows_say_what_made_them_and_name_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    rows: list[Row] = [{"name": "a", "gbps": 1.25}]
    done = made_of(rows, "--dir", "/somebodys/models/a b/", f"--json={out}")
    assert done.exit_code == 0, done.output
    command = "python -m bench made_up --dir 'a b/' --json=rows.json"
    assert json.loads(out.read_text()) == [{"kind": "made_up", "command": command, **rows[0]}]


def test_a_table_shows_what_rows_have() -> None:
    rows: list[Row] = [{"name": "a", "gbps": 1.25, "right": True}, {"name": "b", "right": False}]
    lines = made_of(rows).output.splitlines()
    assert "note" not in lines[-5] and "right" in lines[-5]
    assert [line.split("│")[1:4] for line in lines[-3:-1]] == [
        [" a    ", "  1.2 ", " yes   "],
        [" b    ", "      ", " NO    "],
    ]


def test_a_wrong_row_is_an_exit_code() -> None:
    assert made_of([{"name": "a", "correct": True}]).exit_code == 0
    assert made_of([{"name": "a", "correct": True}, {"name": "b", "correct": False}]).exit_code == 1


def test_block_sparse(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--shape", "64x64", "--blocks", "16x16,32x16", "--sparsity", "0,50"]
    arguments += ["--rounds", "2", "--threads", "2", "--json", str(out)]
    done = CliRunner().invoke(linear.sparse, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert [(r["op"], r["block"], r["sparsity"]) for r in rows] == [
        (op, block, sparsity)
        for block in ("16x16", "32x16")
        for op, sparsity in (("linear", 0), ("bsr_linear", 0), ("bsr_linear", 0.5))
    ]
    assert all(r["correct"] and r["seconds"] > 0 and 0 <= r["break_even"] <= 1 for r in rows)
