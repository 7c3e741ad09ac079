"""Reports: rendered the same each time, from nothing but result files, and whole by themselves."""

import base64
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bench.report import __main__ as commands
from bench.report.charts import Axis, Chart, Ratios, Series, svg
from bench.report.columns import Table
from bench.report.data import FOLDER, ResultFile, read_file, read_folder
from bench.report.document import Section, html, markdown
from bench.report.files import write_report
from bench.report.page import NOTE, add, render, without_directories
from bench.report.plots import block_sparse, intensity, latency, roofline, thread_scaling
from bench.report.sections import missing, reasons, sections
from clocher_kernels.errors import UsageError

ROOT = Path(__file__).parents[1]
MACHINE = {"cpu": "Some CPU", "cpus": 2, "memory_bytes": 8 << 30, "kernel": "6.1"}
MACHINE |= {"host_sha256": "0123456789ab"}
SVG = "{http://www.w3.org/2000/svg}"


def harness_row(label: str, run: int, speed: float, **changes: Any) -> dict[str, Any]:
    swept = dict(word.split("=") for word in label.split() if "=" in word)
    line = {"model": "/data/someone/models/tiny", "precision": "bf16", "device": "cpu"}
    line |= {"isa": "avx2", "threads": int(swept.get("threads", 2)), "tps_true": speed}
    line |= {"latency_p50_ms": 1e3 / speed, "latency_p95_ms": 1.1e3 / speed, "ttft_ms": 2.5}
    line |= {"bytes_per_token": 4_321_000, "bytes_touched": 98_700_000, "coverage": 11.25}
    line |= {"effective_gbps": 0.00432 * speed, "rss_peak_mb": 123.5, "wall_time_s": 1.0}
    row = {
        "schema": "clocher.bench/1",
        "kind": "harness",
        "command": "python -m bench.harness --runs 4 --sweep threads=1,2 -- "
        "--model-dir=/data/someone/models/tiny",
        "key": f"{hash_of(label)}",
        "label": label,
        "swept": swept,
        "ignored": [],
        "settings": {"model_dir": "/data/someone/models/tiny", "max_new": "32", **swept},
        "run": run,
        "attempt": 1,
        "order": run,
        "status": "ok",
        "why": [],
        "started": "2026-11-20T12:00:00Z",
        "elapsed_s": 1.9,
        "machine": MACHINE,
        "state": {"steal_percent": 0.0, "others_percent": 1.0},
        "build": {"version": "0.1.0"},
        "exit_code": 0,
        "line": line,
        "tokens_sha256": "ab" * 32,
        "outputs": [{"token_ids": [5, 6, 7, 8], "text": "a <b> `c` | d"}] if run == 1 else None,
    }
    return {**row, **changes}


def hash_of(label: str) -> str:
    return label.encode().hex().ljust(64, "0")[:64]


HARNESS = [
    *(harness_row("threads=1", run, 100.0 + run) for run in (1, 2, 3)),
    *(harness_row("threads=2", run, 190.0 + run) for run in (1, 2, 3)),
    harness_row("threads=2", 4, 50.0, status="void", why=["steal: 3.1 % of CPU time (limit 1 %)"]),
    harness_row("threads=2", 4, 50.0, status="void", why=["steal: 7.5 % of CPU time (limit 1 %)"]),
]


def strict_rows() -> list[dict[str, Any]]:
    window = {"kernels_s": 0.0211, "strict_s": 0.0233, "end_to_end_s": 1.25}
    contract = {"op": "strict", "model": "tiny", "format": "bf16", "isa": "avx2", "threads": 2}
    contract |= {"act_prec": "int8", "bytes_per_token": 4_321_000, "date": "2026-11-20"}
    contract |= {"windows": {"cold": window, "warm": window}, "machine": MACHINE}
    contract |= {"command": "python -m bench.strict --model-dir /data/someone/tiny"}
    contract |= {"tokens": 17, "prompt_tokens": 32}
    contract["checks"] = [
        {"name": "same ids", "status": "pass", "detail": "2 processes"},
        {"name": "time(2N)", "status": "undecided", "detail": "noisy <b>"},
    ]
    test = {"op": "strict_row", "test": "tg16 @ d32", "launches": 2, "tok_s": 812.25}
    test |= {"tok_s_95": [801.5, 823.75], "kernels_tok_s": 834.5, "gbps": 3.51, "read_gbps": 4.02}
    test |= {"pct_of_limit": 87.31, "pct_of_limit_95": [82.0, 93.0]}
    test["latency_us"] = [1000.0 + i * i for i in range(101)]
    return [contract, test]


def decode_rows() -> list[dict[str, Any]]:
    row = {"op": "decode", "test": "tg32", "model": "tiny", "format": "bf16", "isa": "avx2"}
    row |= {"bytes_per_token": 4_321_000, "gbps": 3.51, "pct_of_limit": 87.31, "correct": True}
    row |= {"samples": [1.0, 2.0], "pct_of_limit_95": [80.0, 90.0], "note": ""}
    return [{**row, "threads": n, "tok_s": 411.5 * n} for n in (1, 2)]


def serving_rows() -> list[dict[str, Any]]:
    common = {"kind": "serving", "server": "clocher", "prompt_tokens": 64, "new_tokens": 32}
    loads = [
        {"op": "load", "load": f"{n} streams", "streams": n, "tok_s": 20.0 * n, "itl_p99_ms": 40.5}
        for n in (1, 8)
    ]
    return [common | row for row in (*loads, {"op": "overhead", "ms_per_token": 41.0})]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of every kind."""
    made = tmp_path / "results"
    made.mkdir()
    shown = (
        "roofline.json",
        "peers-tern",
        "attention",
        "block-sparse",
        "skip",
        "act-sp",
        "speculation",
    )
    for path in FOLDER.glob("*.json"):
        if any(kind in path.name for kind in shown):
            shutil.copy(path, made)
    write(made / "2026-11-20-box-decode.json", decode_rows())
    write(made / "2026-11-20-box-strict.json", strict_rows())
    write(made / "2026-11-20-box-serving.json", serving_rows())
    (made / "run.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in HARNESS))
    return made


def write(path: Path, rows: object) -> Path:
    path.write_text(json.dumps(rows))
    return path


def files_below(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# The page


def test_the_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/update_performance_md.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_rendering_is_deterministic(folder: Path) -> None:
    assert render(folder) == render(folder)


def update(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(commands.update, arguments, catch_exceptions=False)
    return done.exit_code, done.output


def test_check_finds_a_number_that_was_changed(folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    places = ("--results", str(folder), "--docs", str(docs))
    assert update(*places, "--check")[0] == 1
    assert update(*places) == (0, "")
    assert update(*places, "--check") == (0, "")
    page = docs / "PERFORMANCE.md"
    text = page.read_text()
    assert "812.2" in text
    page.write_text(text.replace("812.2", "912.2"))
    code, output = update(*places, "--check")
    assert code == 1 and "PERFORMANCE.md" in output
    assert update(*places)[0] == 0
    assert page.read_text() == text


def test_check_finds_plots_that_are_missing_changed_or_left_over(
    folder: Path, tmp_path: Path
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    places = ("--results", str(folder), "--docs", str(docs))
    update(*places)
    plot = docs / "plots" / "latency.svg"
    picture = plot.read_text()
    for change in ("missing", picture.replace("0", "1", 1)):
        plot.unlink() if change == "missing" else plot.write_text(change)
        assert "latency.svg" in update(*places, "--check")[1]
    (docs / "plots" / "old.svg").write_text(picture)
    assert "old.svg" in update(*places, "--check")[1]
    update(*places)
    assert update(*places, "--check") == (0, "")


def cells(text: str) -> list[str]:
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    return [cell.strip() for line in tables for cell in line.strip("| ").split(" | ")]


_TEXTS = re.compile(r"`[^`]*`|[A-Za-z]\S*\d\S*|\d\.\d+ bpw|void: .*")


def test_every_measured_figure_comes_from_a_result_file(folder: Path, tmp_path: Path) -> None:
    """Scale every measurement of every file: no figure may stay what it was."""
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    for path in folder.iterdir():
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        changed = [json.dumps(scale(json.loads(line))) for line in lines]
        (scaled / path.name).write_text("\n".join([*changed, ""]))
    before, after = cells(render(folder).text), cells(render(scaled).text)
    assert len(before) == len(after) > 200
    same = [
        figure
        for old, new in zip(before, after, strict=True)
        for figure, other in zip(figures(old), figures(new), strict=True)
        if figure == other and "." in figure
    ]
    assert same == []


def figures(cell: str) -> list[str]:
    """Return the figures of a cell; names of formats and models have figures as well."""
    text = _TEXTS.sub("", cell)
    return re.findall(r"\d+(?:\.\d+)?", text)


def scale(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: scale(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [scale(item, key) for item in value]
    measured = isinstance(value, float) or key.startswith("bytes_")
    if not measured or key in ("sparsity", "break_even"):
        return value
    # Not the same for all, or ratios would stay.
    return type(value)(value * (1.3 + zlib.crc32(repr(value).encode()) % 100 / 1000))


def test_the_page_says_where_everything_comes_from(folder: Path) -> None:
    text = render(folder).text
    assert NOTE in text
    for path in folder.iterdir():
        assert f"`{path.name}`" in text
    assert "python -m bench.roofline --formats int4_sym_g32_f16," in text
    assert "--shapes 14336x4096,4096x2880,2560x6912 --tokens 1 --threads 2" in text
    assert "python -m bench.peers --model-dir DIR --llama-bench PATH --threads 2" in text
    assert "python -m bench.harness --runs 4 --sweep threads=1,2 -- --model-dir=tiny" in text
    assert "/data/someone" not in text
    assert "Not measured yet" not in text


def test_what_is_missing_is_said_with_its_command(tmp_path: Path) -> None:
    text = render(tmp_path).text
    assert "- Strict contract: `python -m bench.strict`" in text
    assert "- Thread scaling: `python -m bench.decode --threads 1,2,4 --json FILE`" in text
    assert len(missing([])) == 13


def test_other_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x.json", [{"op": "something"}])
    assert "- `x.json`" in render(tmp_path).text


# Adding a file


def test_an_added_file_has_no_directories_and_replaces_itself(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "mine"
    results.mkdir()
    target = add(folder / "run.jsonl", results)
    assert target.name == "2026-11-20-0123456789ab-harness-tiny-run.jsonl"
    assert "/data" not in target.read_text()
    assert read_file(target).rows[0]["settings"]["model_dir"] == "tiny"
    assert add(folder / "run.jsonl", results) == target
    strict = add(folder / "2026-11-20-box-strict.json", results)
    assert "/data" not in strict.read_text()
    assert read_file(strict).kind == "strict"
    assert len(list(results.iterdir())) == 2


def test_the_script_adds_and_renders(folder: Path, tmp_path: Path) -> None:
    results, docs = tmp_path / "mine", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    places = ("--results", str(results), "--docs", str(docs))
    code, output = update(*places, "--add", str(folder / "run.jsonl"))
    assert code == 0 and "harness-tiny-run.jsonl" in output
    assert update(*places, "--check") == (0, "")
    assert update(*places, "--check", "--add", str(folder / "run.jsonl"))[0] == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [("2026-11-20-box-decode.json", "name it DATE-MACHINE-decode.json"), ("none.jsonl", "no such")],
    ids=["no-machine", "missing"],
)
def test_what_cannot_be_added_is_named(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        add(folder / name, tmp_path)


def test_a_file_in_which_no_run_counts_is_not_added(tmp_path: Path) -> None:
    path = tmp_path / "void.jsonl"
    path.write_text(f"{json.dumps(HARNESS[-1])}\n")
    with pytest.raises(UsageError, match="no run counts"):
        add(path, tmp_path)


def test_paths_lose_their_directories() -> None:
    value = {"a": ["--x=/a/b/c d/e", "https://h/p", "GB/s and N/K"], "b": 1}
    assert without_directories(value) == {"a": ["--x=c d/e", "https://h/p", "GB/s and N/K"], "b": 1}


# Hostile and missing files


def changed(rows: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [{**rows[0], **fields}, *rows[1:]]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "not valid JSON"),
        ("{}", "expected a list of rows"),
        ("[1]", "expected a list of rows"),
        ("[" * 9999, "deeper than"),
        ('[{"op": "linear", "gbps": NaN}]', "not valid JSON"),
        (json.dumps([{"op": "linear"}]), "row 1: format is missing"),
        (json.dumps(changed(decode_rows(), tok_s="9")), "row 1: tok_s is '9', expected a finite"),
        (json.dumps(changed(decode_rows(), tok_s=10**400)), "tok_s is 1000"),
        (json.dumps(changed(decode_rows(), pct_of_limit_95=[1])), "expected two numbers"),
        (json.dumps(changed(decode_rows(), correct=[])), "correct is"),
        (json.dumps(changed(strict_rows(), windows={})), "windows, cold: expected an object"),
        (json.dumps(changed(strict_rows(), checks=[{}])), "check 1: name is missing"),
        (json.dumps([{**strict_rows()[1], "latency_us": "x"}, strict_rows()[0]]), "first row"),
        (json.dumps([strict_rows()[0], {"test": "a", "tok_s": None}]), "tok_s is None"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_bad_result_file_is_named(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert text in str(caught.value) and "bad.json" in str(caught.value)
    assert update("--results", str(tmp_path), "--docs", str(tmp_path))[0] == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"line": {"tps_true": "fast"}}, "line: tps_true is 'fast'"),
        ({"line": [], "status": "void"}, "line is []"),
        ({"why": "x"}, "why is 'x'"),
        ({"why": [1]}, "hold texts"),
        ({"swept": []}, "swept is []"),
        ({"schema": "other/1"}, "expected an object with schema"),
    ],
    ids=["number", "line", "why", "whys", "swept", "schema"],
)
def test_a_bad_row_of_the_harness_is_named(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps({**HARNESS[0], **changes})}\n")
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert text in str(caught.value) and "bad.jsonl, line 1" in str(caught.value)


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    for path in ("none.json", "none.jsonl"):
        with pytest.raises(UsageError, match="no such file"):
            read_file(tmp_path / path)
    with pytest.raises(UsageError, match="no such directory"):
        read_folder(tmp_path / "none")


# The report of a run


def parse(page: Path) -> ElementTree.Element:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def test_the_report_is_one_well_formed_file_that_loads_nothing(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    page = write_report(read_folder(folder), out, "Title <&>", tokens_max=2)
    root = parse(page)
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert not {"script", "link", "iframe", "object", "image", "use"} & set(tags)
    pictures = []
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "src":
                head, _, data = value.partition(",")
                assert (element.tag.rpartition("}")[2], head) == (
                    "img",
                    "data:image/svg+xml;base64",
                )
                pictures.append(base64.b64decode(data).decode())
                continue
            assert not name.endswith("href") and not name.startswith("on"), name
            assert "url(" not in value
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert not re.search(r"<(script|image|a) |@import|href=\"(?!#)|url\((?!#)", picture)
    assert "url(" not in page.read_text() and "@import" not in page.read_text()
    assert sorted(pictures) == sorted(p.read_text() for p in (out / "plots").glob("*.svg"))
    assert len(pictures) == 7
    text = "".join(root.itertext())
    assert "Title <&>" in text
    assert "Some CPU, 2 CPUs, 8 GiB, Linux 6.1" in text
    assert "void: steal: 3.1 to 7.5 % of CPU time (limit 1 %)" in text
    assert "noisy <b>" in text
    assert "5 6" in text and "5 6 7" not in text


def test_the_data_of_the_report(folder: Path, tmp_path: Path) -> None:
    write_report([read_file(folder / "run.jsonl")], tmp_path, "t", tokens_max=3)
    data = json.loads((tmp_path / "report.json").read_text())
    one, two = data["cells"]
    assert (one["label"], one["runs"], one["void"], one["tok_s"]) == ("threads=1", 3, 0, 102.0)
    assert (two["runs"], two["void"]) == (3, 2)
    assert one["tokens_sha256"] == ["ab" * 32]
    assert one["outputs"][0]["token_ids"] == [5, 6, 7]


def test_the_report_is_deterministic(folder: Path, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        out = tmp_path / name
        out.mkdir()
        write_report(read_folder(folder), out, "t")
        found.append(files_below(out))
    assert found[0] == found[1]
    assert {"report.html", "report.md", "report.json"} < set(found[0])


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>`|\x00\x1b[31m](http://x) \ud800".encode(
        "utf-8", "replace"
    ).decode()
    rows = [{**row, "label": evil, "key": "k"} for row in HARNESS[:3]]
    path = tmp_path / "evil.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = write_report([read_file(path)], tmp_path, evil)
    tags = {element.tag.rpartition("}")[2] for element in parse(page).iter()}
    assert "script" not in tags
    text = (tmp_path / "report.md").read_text()
    assert "<script>" not in text and "\\<script\\>" in text
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    heads = [line for line in tables if "cell | runs" in line]
    own = [line for line in tables if "alert(1)" in line and " 3 " in line]
    assert own and own[0].replace("\\|", "").count("|") == heads[0].count("|")


def script(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(commands.run, arguments, catch_exceptions=False)
    return done.exit_code, done.output


def test_the_report_script(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    strict = str(folder / "2026-11-20-box-strict.json")
    results = str(folder / "run.jsonl")
    code, output = script(results, "--out-dir", str(out), "--tokens-max", "1", "--strict", strict)
    assert (code, output) == (0, f"{out / 'report.html'}\n")
    code, output = script(str(folder / "none.jsonl"), "--out-dir", str(out))
    assert code == 2 and "none.jsonl: no such file" in output
    other = write(tmp_path / "other.json", [{"op": "else"}])
    code, output = script(str(other), "--out-dir", str(out))
    assert code == 2 and "nothing in it that a report shows" in output


@pytest.mark.parametrize(
    "name", ["update_performance_md", "make_baseline_md", "run_harness_report"]
)
def test_a_script_runs_from_anywhere(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "No such option" in done.stderr


def test_the_report_script_runs_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    calls = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        calls.append(command[1:])
        shutil.copy(folder / "run.jsonl", command[command.index("--out") + 1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(commands.subprocess, "run", run)
    arguments = ["--out-dir", str(tmp_path), "--", "--runs", "2", "--", "--max-new", "4"]
    assert script(*arguments)[0] == 0
    out = ["--out", str(tmp_path / "bench.jsonl")]
    assert calls == [["-m", "bench.harness", *out, "--runs", "2", "--", "--max-new", "4"]]
    code, output = script(str(folder / "run.jsonl"), *arguments)
    assert code == 2 and "exclude each other" in output


def test_a_baseline(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "BASELINE.md"
    arguments = [str(folder / "run.jsonl"), "--out", str(out)]
    done = CliRunner().invoke(commands.baseline, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    text = out.read_text()
    assert "| threads=1 | 3 | 102 [" in text
    assert "4.321" in text and "11.25" in text and "98.7" in text
    assert "svg" not in text
    other = write(tmp_path / "other.json", [{"op": "else"}])
    done = CliRunner().invoke(commands.baseline, [str(other)])
    assert done.exit_code == 2 and "no report shows" in done.output


# Parts


def test_cells_of_the_harness(folder: Path) -> None:
    text = markdown("t", (), sections([read_file(folder / "run.jsonl")]))
    row = next(line for line in text.splitlines() if line.startswith("| threads=2 | 3 (2 void)"))
    assert "192 [" in row and row.endswith("faster |")


def test_reasons_are_counted_together() -> None:
    assert reasons(HARNESS) == (("2", "void: steal: 3.1 to 7.5 % of CPU time (limit 1 %)"),)


def test_rows_say_what_they_are_and_those_of_before_are_told_apart(tmp_path: Path) -> None:
    row = decode_rows()[0]
    assert read_file(write(tmp_path / "old.json", [row])).kind == "decode"
    assert read_file(write(tmp_path / "old.json", [row])).command == ""
    said = [{**row, "kind": "decode", "command": "python -m bench.decode --model-dir=/data/x/tiny"}]
    assert read_file(write(tmp_path / "new.json", said)).command.endswith("--model-dir=tiny")
    # Peers on single products are shown by no report, as before they said their kind.
    product = {**said[0], "kind": "peers", "op": "linear"}
    assert read_file(write(tmp_path / "new.json", [product])).kind == "other"
    said[0]["kind"] = "scheduling"
    assert read_file(write(tmp_path / "new.json", said)).kind == "other"


def test_commands_leave_places_out() -> None:
    file = ResultFile("x.json", "strict", strict_rows())
    assert file.command == "python -m bench.strict --model-dir tiny"


def test_markdown_escapes_and_html_does_too() -> None:
    table = Table(("a|b", "`x_y`"), (("<i>*_", "✓"), ("12", "[1, 2](u)")))
    section = Section("S_1", ("p `c_d` <q>",), (table,))
    text = markdown("T", (), [section])
    assert "| a\\|b | `x_y` |" in text
    assert "\\<i\\>\\*\\_" in text and "[1, 2\\](u)" in text
    page = html("T", (), [section], {})
    assert '<td class="pass">✓</td>' in page and '<td class="number">12</td>' in page
    assert "<code>c_d</code> &lt;q&gt;" in page


def marks(picture: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(picture)
    found = [element for element in root.iter() if element.tag == f"{SVG}use" and element.get("x")]
    return [
        (float(e.get("x", 0)), float(e.get("y", 0))) for e in found if "#0072b2" in str(e.attrib)
    ]


def test_points_lie_where_the_axes_say() -> None:
    points = tuple((float(x), float(x)) for x in (1, 10, 100))
    series = Series("s", points, joined=False)
    drawn = marks(svg(Chart("t", Axis("x", log=True), Axis("y"), (series,))))
    xs, ys = zip(*drawn[:3], strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.02)
    assert (ys[0] - ys[1]) * 10 == pytest.approx(ys[1] - ys[2], rel=0.01)
    assert ys[0] > ys[1] > ys[2]


@pytest.mark.parametrize("values", [(), ((0.0, 0.0),), ((1.0, 5.0),), ((2.0, float("nan")),)])
@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
def test_a_chart_of_little_is_a_chart(values: tuple[tuple[float, float], ...], log: bool) -> None:
    series = (Series("_a <&> \x00 $x^2$", values), Series("limit", values, dashed=True))
    chart = Chart("t \x1b", Axis("x", log=log), Axis("y", log=log, zero=True), series)
    picture = svg(chart)
    text = "".join(ElementTree.fromstring(picture).itertext())
    assert "nan" not in picture
    assert "_a <&> \N{REPLACEMENT CHARACTER} $x^2$" in text and "limit" in text
    assert svg(chart) == picture


def test_ratios_are_drawn_with_their_names() -> None:
    picture = svg(Ratios("t", "times", (("one", 2.0, 1.5, 3.0), ("_two", 0.5, 0.4, 0.6))))
    text = "".join(ElementTree.fromstring(picture).itertext())
    assert all(word in text for word in ("one", "_two", "2.00x", "0.50x", "times"))


def test_the_axis_shows_round_numbers() -> None:
    points = ((1.0, 0.0), (20.0, 10.0))
    chart = Chart("t", Axis("x", log=True), Axis("y", whole=True), (Series("s", points),))
    text = "".join(ElementTree.fromstring(svg(chart)).itertext()).split()
    assert {"1", "2", "5", "10", "20"} <= set(text) and {"0", "4", "8"} <= set(text)


def test_intensity_counts_the_bytes_of_the_format() -> None:
    row = {"format": "bf16", "N": 64, "K": 256, "M": 1}
    assert intensity(row) == 1.0
    assert intensity({**row, "format": "f32", "M": 4}) == 2.0
    assert intensity({**row, "format": "int9"}) is None


def test_the_four_plots(folder: Path) -> None:
    files = read_folder(folder)
    by_kind = {file.kind: file for file in files}
    sparse = svg(block_sparse(by_kind["block_sparse"]).chart)
    assert "even at" in sparse and "stroke-dasharray" in sparse
    line = svg(roofline(by_kind["roofline"]).chart)
    assert "read bandwidth" in line and "ternary" in line
    scaling = thread_scaling([by_kind["decode"], by_kind["harness"]])
    assert scaling is not None and "tiny bf16 tg32" in svg(scaling.chart)
    assert thread_scaling([by_kind["roofline"]]) is None
    times = latency(files)
    assert times is not None and "tiny bf16, tg16 @ d32, 2 threads" in svg(times.chart)
    assert latency([by_kind["decode"]]) is None


def test_the_page_shows_every_result_file() -> None:
    page = (ROOT / "docs" / "PERFORMANCE.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "bench" / "results").iterdir()]
    assert names and [name for name in names if f"`{name}`" not in page] == []
