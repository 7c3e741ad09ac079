"""Reports: rendered the same each time, from nothing but result files, and whole by themselves."""

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

from bench import report as commands
from bench.pages import (
    PAGE,
    PLOT,
    Section,
    add,
    chart,
    filled,
    markdown,
    render,
)
from bench.record import (
    FOLDER,
    ResultFile,
    Table,
    read_file,
    read_folder,
    without_directories,
)
from bench.report import sections, write_report
from clocher_kernels.errors import UsageError

ROOT = Path(__file__).parents[1]
MACHINE = {"cpu": "Some CPU", "cpus": 2, "memory_bytes": 8 << 30, "kernel": "6.1"}
MACHINE |= {"host_sha256": "0123456789ab"}


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of every kind."""
    made = tmp_path / "results"
    made.mkdir()
    shown = (
        "roofline.json",
        "peers-tern",
        "peers-smollm2",
        "attention",
        "block-sparse",
        "skip",
    )
    for path in FOLDER.glob("*.json"):
        if any(kind in path.name for kind in shown):
            shutil.copy(path, made)
    write(made / "2026-11-20-box-decode.json", decode_rows())
    write(made / "2026-11-20-box-strict.json", strict_rows())
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


def test_check_finds_a_plot_that_is_missing_or_changed(folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    places = ("--results", str(folder), "--docs", str(docs))
    update(*places)
    plot = docs / "plots" / "beside-peers.svg"
    picture = plot.read_text()
    for change in ("missing", picture.replace("0", "1", 1)):
        plot.unlink() if change == "missing" else plot.write_text(change)
        assert "beside-peers.svg" in update(*places, "--check")[1]
    update(*places)
    assert update(*places, "--check") == (0, "")


def cells(text: str) -> list[str]:
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    return [cell.strip() for line in tables for cell in line.strip("| ").split(" | ")]


_TEXTS = re.compile(r"`[^`]*`|[A-Za-z]\S*\d\S*|\d\.\d+ bpw")


def test_every_measured_figure_comes_from_a_result_file(folder: Path, tmp_path: Path) -> None:
    """Scale every measurement of every file: no figure may stay what it was."""
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    for path in folder.iterdir():
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        changed = [json.dumps(scale(json.loads(line))) for line in lines]
        (scaled / path.name).write_text("\n".join([*changed, ""]))
    before, after = cells(render(folder)[PAGE]), cells(render(scaled)[PAGE])
    assert len(before) == len(after) > 60
    same = [
        figure
        for old, new in zip(before, after, strict=True)
        for figure, other in zip(figures(old), figures(new), strict=True)
        if figure == other and "." in figure
    ]
    assert same == []


def figures(cell: str) -> list[str]:
    """Return the figures of a cell; names of formats and models have figures as well."""
    return re.findall(r"\d+(?:\.\d+)?", _TEXTS.sub("", cell))


def scale(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: scale(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [scale(item, key) for item in value]
    if not isinstance(value, float) and not key.startswith("bytes_"):
        return value
    # Not the same for all, or ratios would stay.
    return type(value)(value * (1.3 + zlib.crc32(repr(value).encode()) % 100 / 1000))


def test_the_page_says_where_everything_comes_from(folder: Path) -> None:
    text = render(folder)[PAGE]
    assert "Do not edit." in text and "/data/someone" not in text
    for kind in ("peers-tern", "box-decode", "box-strict"):
        assert re.search(rf"\| `[\w-]*{kind}[\w-]*\.json` \|", text), kind
    speed = r"\| threads=2 \| 192 \[[\d., ]+\] \|"
    assert re.search(speed + r"( [\d.]+ \|){5} `run\.jsonl` \|", text)


def test_the_page_is_short_and_has_one_plot_of_six_rows() -> None:
    page = render(FOLDER)
    assert len(page[PAGE].splitlines()) <= 90
    assert page[PLOT].count("<circle") == 6


def test_an_empty_folder_is_a_short_page(tmp_path: Path) -> None:
    page = render(tmp_path)
    assert [*page] == [PAGE] and "##" not in page[PAGE]


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
    assert "harness-tiny-run.jsonl` |" in (docs / PAGE).read_text()
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
        (json.dumps(changed(strict_rows(), checks={})), "not a contract with checks"),
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
        ({"line": [], "status": "void"}, "line is []"),
        ({"line": None}, "a run that is ok has no line"),
        ({"status": "fine"}, "status is 'fine'"),
        ({"schema": "other/1"}, "schema is 'other/1'"),
        ({"run": "1"}, "run is '1'; expected an integer"),
        ({"why": "x"}, "why is 'x'; expected a list"),
        ({"ignored": [1]}, "ignored[0] is 1; expected text"),
        ({"outputs": "x"}, "outputs is 'x'; expected a list"),
    ],
    ids=["line", "no-line", "status", "schema", "run", "why", "ignored", "outputs"],
)
def test_a_bad_row_of_the_harness_is_named(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps({**HARNESS[0], **changes})}\n")
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert text in str(caught.value) and "bad.jsonl, line 1" in str(caught.value)


@pytest.mark.parametrize("value", ["9", None, [1], {}, 10**400, True])
@pytest.mark.parametrize("key", ["tok_s", "pct_of_limit", "bytes_per_token", "tps_true"])
def test_a_strange_value_is_left_out(tmp_path: Path, key: str, value: Any) -> None:
    """It is shown as it is or not at all; nothing fails."""
    line = {**HARNESS[0]["line"], key: value}
    write(tmp_path / "2026-11-20-box-decode.json", changed(decode_rows(), **{key: value}))
    (tmp_path / "r.jsonl").write_text(f"{json.dumps({**HARNESS[0], 'line': line, key: value})}\n")
    render(tmp_path)
    write_report(read_folder(tmp_path), tmp_path, "t")


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
    assert "img" not in tags and "url(" not in page.read_text()
    for element in root.iter():
        assert not {name for name in element.attrib if name.endswith("href") or name[:2] == "on"}
    text = "".join(root.itertext())
    assert "Title <&>" in text
    assert "Some CPU, 2 CPUs, 8 GiB, Linux 6.1" in text
    assert "steal: 3.1 % of CPU time (limit 1 %)" in text and "steal: 7.5 %" in text
    assert "noisy <b>" in text
    assert "5 6" in text and "5 6 7" not in text


def test_the_report_is_deterministic(folder: Path, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        out = tmp_path / name
        out.mkdir()
        write_report(read_folder(folder), out, "t")
        found.append(files_below(out))
    assert found[0] == found[1]
    assert {"report.html", "report.md"} == set(found[0])


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
    empty = write(tmp_path / "empty.json", [])
    code, output = script(str(empty), "--out-dir", str(out))
    assert code == 2 and "no report shows an empty file" in output
    assert script("--out-dir", str(out))[0] == 2


@pytest.mark.parametrize(
    "name", ["update_performance_md", "make_baseline_md", "run_harness_report"]
)
def test_a_script_runs_from_anywhere(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "No such option" in done.stderr


def test_a_baseline(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "BASELINE.md"
    arguments = [str(folder / "run.jsonl"), "--out", str(out)]
    done = CliRunner().invoke(commands.baseline, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    text = out.read_text()
    assert "| threads=1 | 3 | 102 [" in text
    assert "4.321" in text and "11.25" in text and "98.7" in text
    assert "svg" not in text
    empty = write(tmp_path / "empty.json", [])
    done = CliRunner().invoke(commands.baseline, [str(empty)])
    assert done.exit_code == 2 and "no report shows" in done.output


# Parts


def test_cells_of_the_harness(folder: Path) -> None:
    text = markdown("t", (), sections([read_file(folder / "run.jsonl")]))
    row = next(line for line in text.splitlines() if line.startswith("| threads=2 | 3 (2 void)"))
    assert "192 [" in row and row.endswith("faster |")


def test_rows_say_what_they_are_and_those_of_before_are_told_apart(tmp_path: Path) -> None:
    row = decode_rows()[0]
    assert read_file(write(tmp_path / "old.json", [row])).kind == "decode"
    assert read_file(write(tmp_path / "old.json", [row])).command == ""
    said = [{**row, "kind": "decode", "command": "python -m bench.decode --model-dir=/data/x/tiny"}]
    assert read_file(write(tmp_path / "new.json", said)).command.endswith("--model-dir=tiny")
    assert read_file(write(tmp_path / "new.json", [{"op": "linear"}])).kind == "linear"
    assert read_file(write(tmp_path / "new.json", [{"kind": [], "op": {}}])).kind == "other"


def test_rows_of_an_unknown_kind_are_shown_with_what_they_hold(tmp_path: Path) -> None:
    rows = [{"kind": "else", "model": "m|`x`", "speed": 1234.5678, "samples": [1], "ok": True}]
    text = markdown("t", (), sections([read_file(write(tmp_path / "r.json", rows))]))
    assert "| model | speed | ok |" in text and "1235 | yes |" in text and "samples" not in text


def test_commands_leave_places_out() -> None:
    file = ResultFile("x.json", "strict", strict_rows())
    assert file.command == "python -m bench.strict --model-dir tiny"


def test_markdown_escapes_and_html_does_too() -> None:
    table = Table(("a|b", "`x_y`"), (("<i>*_", "✓"), ("12", "[1, 2](u)")))
    section = Section("S_1", ("p `c_d` <q>",), (table,))
    text = markdown("T", (), [section])
    assert "| a\\|b | `x_y` |" in text
    assert "\\<i\\>\\*\\_" in text and "[1, 2\\](u)" in text
    page = filled("report.html", title="T", intro=(), sections=[section])
    assert '<td class="pass">✓</td>' in page and '<td class="number">12</td>' in page
    assert "<code>c_d</code> &lt;q&gt;" in page


def test_ratios_are_drawn_with_their_names() -> None:
    picture = chart("t \x1b", "times", (("one <&>", 2.0, 1.5, 3.0), ("_two", 0.5, 0.4, 0.6)))
    text = "".join(ElementTree.fromstring(picture).itertext())
    assert all(word in text for word in ("one <&>", "_two", "2.00x", "0.50x", "times"))
    assert "\x1b" not in picture


def test_the_links_of_the_page_name_files_that_are_there() -> None:
    page = (ROOT / "docs" / "PERFORMANCE.md").read_text(encoding="utf-8")
    names = re.findall(r"\| `([\w.-]+\.jsonl?)` \|", page)
    assert names and [name for name in names if not (FOLDER / name).is_file()] == []
