"""Reports as Markdown and as one HTML file; docs/PERFORMANCE.md and its plot from result files."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench import record
from bench.compared import cells_tables, group
from clocher_kernels.errors import UsageError
from clocher_runtime.disk.output_file import write_file

_CLASSES = {mark: status for status, mark in record.MARKS.items()}
# Characters not allowed in XML; a result file can hold any text.
_CONTROL = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF} - {10},
    "\N{REPLACEMENT CHARACTER}",
)
_TICKS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 10)

PAGE, PLOT = "PERFORMANCE.md", "plots/beside-peers.svg"
_BESIDE = (
    "model | test | ISA = {isa} | tok/s = {ours:.4g} | peer | its tok/s = {tok_s:.4g} | "
    "times as fast = {ratio:.2f} [{ratio_low:.2f}, {ratio_high:.2f}] | file = `{file}`"
)
_DECODED = (
    "model | weights = {format} | threads | tok/s = {tok_s:.4g} | MB per token = {mb:.4g} | "
    "% of read = {pct_of_limit:.0f} | file = `{file}`"
)
_RUNS = (
    "cell | tok/s [95 %] = {speed} | MB/token = {bytes_per_token} | MB touched = {bytes_touched} | "
    "coverage | effective GB/s = {effective_gbps} | peak MiB = {rss_peak_mb} | file = `{file}`"
)
_TITLE, _LABEL = "Clocher beside llama.cpp, same weights", "times as fast, 95 % interval"
SHOWN = {
    "SmolLM2-135M-Instruct.Q4_1": "Q4_1",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M": "Q4_K",
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M": "Q4_K",
}
"""Models of the plot -> their weight type in llama.cpp."""

_STORED = re.compile(r"\b(I?Q\d\w*|TQ\d\w*|BF16|F16|MXFP4)")
_RATIO = ("ratio", "ratio_low", "ratio_high")


class Section(NamedTuple):
    """Heading, paragraphs, tables; in text, `...` is code."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[record.Table, ...] = ()


def markdown(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """Return a report as Markdown; the intro is Markdown already."""
    parts = [f"# {_line(title)}", *intro]
    for section in sections:
        parts += [f"## {_line(section.title)}", *map(_line, section.text)]
        parts += [_markdown_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def chart(title: str, label: str, bars: Sequence[tuple[str, float, float, float]]) -> str:
    """Return bars (name, ratio, its interval) as an SVG picture with a logarithmic axis."""

    def share(ratio: float) -> float:
        place = math.log(ratio / _TICKS[0]) / math.log(_TICKS[-1] / _TICKS[0])
        return min(max(place, 0.0), 1.0)

    return filled("chart.svg", title=title, label=label, bars=bars, ticks=_TICKS, share=share)


def filled(template: str, **values: Any) -> str:
    """Return a template of this folder with values in it, escaped unless it is Markdown."""
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: not str(name).endswith(".md"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    jinja.globals["clean"] = lambda text: text.translate(_CONTROL)
    jinja.globals["kind"] = lambda cell: _CLASSES.get(cell, "number" * record.is_figure(cell))
    return jinja.get_template(template).render(values)


def _markdown_table(table: record.Table) -> str:
    lines = [table.head, ("---",) * len(table.head), *table.rows]
    cells = [[_line(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _line(text: str) -> str:
    """Escape text outside of code; brackets only where a link could begin."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = (re.sub(r"([<>*_\\]|[\[\]](?=\())", r"\\\1", part) for part in parts[::2])
    return "".join(parts)


def render(folder: Path) -> dict[str, str]:
    """Return the page of a folder of result files, and its plot, by their paths in docs."""
    files = record.read_folder(folder)
    peers = _peers(files)
    newest = {file.name[10:]: file for file in files if file.kind == "harness"}.values()
    runs = [t for file in newest for t in cells_tables(group(file.rows), _RUNS, file=file.name)]

    def shown(*tables: record.Table) -> str:
        return "\n\n".join(_markdown_table(each) for each in tables if each.rows)

    texts = {
        "beside": shown(record.table(_BESIDE, peers)),
        "real": shown(record.table(record.KINDS["real"].columns, _newest(files))),
        "decoded": shown(record.table(_DECODED, _decodes(files))),
        "runs": shown(*runs),
    }
    bars = [
        (f"{model} {row['test']}, {row['isa']}", *(row[key] for key in _RATIO))
        for model, stored in SHOWN.items()
        for row in reversed(peers)
        if (row["model"], row["peer"]) == (model, f"llama.cpp {stored}")
    ]
    page = {PAGE: filled("performance.md", plot=PLOT, bars=bars, **texts)}
    return page | ({PLOT: chart(_TITLE, _LABEL, bars)} if bars else {})


def _peers(files: Sequence[record.ResultFile]) -> list[record.Row]:
    """Return the newest row of each model, test and peer; of one day, the wider ISA."""
    found = []
    for file in (file for file in files if file.kind == "peers"):
        ours = {r.get("test"): r for r in file.rows if r.get("isa") and r.get("tok_s")}
        for row in file.rows:
            own = ours.get(row.get("test"), row)
            numbers = all(record.is_number(row.get(key)) for key in (*_RATIO, "tok_s"))
            if row is own or not numbers or " -fa 1 " in row["engine"]:
                continue
            stored = _STORED.search(f"{row['note']}")
            peer = f"{row['engine'].split()[0]}{f' {stored[0]}' if stored else ''}"
            model = str(own["model"]).replace("l1b-", "llama-1b-").removesuffix(".gguf")
            shown = {**row, "model": model, "ours": own["tok_s"], "isa": own["isa"], "peer": peer}
            found.append({**shown, "file": file.name, "date": file.date})
    found.sort(key=lambda row: (row["date"], row["isa"] != "avx2"))
    newest = {(row["model"], row["test"][:2], row["peer"]): row for row in found}
    return [newest[key] for key in sorted(newest)]


def _newest(files: Sequence[record.ResultFile]) -> list[record.Row]:
    """Return the newest row of each published file and engine but the reference."""
    rows = [row for file in files if file.kind == "real" for row in file.rows]
    newest = {(row["model"], row["engine"]): row for row in rows}
    return [row for (_, engine), row in newest.items() if engine != "Clocher fp32"]


def _decodes(files: Sequence[record.ResultFile]) -> list[record.Row]:
    found = []
    for file in (file for file in files if file.kind in ("decode", "strict")):
        for row in file.rows[file.kind == "strict" :]:
            about = {**file.rows[0], **row, "file": file.name}
            if all(map(record.is_number, (row.get("pct_of_limit"), about.get("bytes_per_token")))):
                found.append({**about, "mb": about["bytes_per_token"] / 1e6})
    return found


def add(path: Path, folder: Path) -> Path:
    """Copy a result file, without local directories, under a name from date, machine and model."""
    file = record.read_file(path)
    if not file.rows or not isinstance(file.rows[0].get("machine"), dict):
        raise UsageError(
            f"{path}: a file of kind {file.kind!r} does not say where it was measured; name it "
            f"DATE-MACHINE-{file.kind}.json and put it into {folder} yourself"
        )
    if not any(row.get("status", "ok") == "ok" for row in file.rows):
        raise UsageError(f"{path}: no run counts, so there is nothing to show")
    host = str(file.rows[0]["machine"].get("host_sha256", "unknown"))
    lines = (row.get("line") or row for row in file.rows)
    model = next((Path(each["model"]).name for each in lines if each.get("model")), "")
    words = [file.date, host, file.kind, model, path.stem]
    name = "-".join(re.sub(r"[^\w.-]+", "-", word) for word in words if word)
    rows = [json.dumps(record.without_directories(row)) for row in file.rows]
    text = "\n".join(rows) if path.suffix == ".jsonl" else "[\n" + ",\n".join(rows) + "\n]"
    target = folder / f"{name}{path.suffix}"
    write_file(target, f"{text}\n".encode())
    return target
