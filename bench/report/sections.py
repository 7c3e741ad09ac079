"""What a report says of each kind of result file. Every figure in a cell comes from its rows."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.report import plots
from bench.report.columns import (
    ACT_SPARSITY,
    ATTENTION,
    MARKS,
    NONE,
    SKIP,
    SPARSE_ATTENTION,
    SPECULATION,
    Columns,
    Row,
    Table,
    code,
    code_of,
    estimate,
    figure,
    model,
    model_name,
    number,
    of_ratio,
    of_runs,
    percent,
    plain,
    right,
    share,
    table,
    text,
)
from bench.report.data import Kind, ResultFile
from bench.report.document import Plot, Section
from bench.report.serving import figures
from bench.sweep.results import SPEED, ResultCell, beside, compare_files, group
from clocher_runtime.quality.statistics import Ratio, median_of_runs, spread

_REASON = re.compile(r"([^0-9]*)([0-9]+(?:\.[0-9]+)?)(.*)")
_NARROW = " Intervals are of the bootstrap, not widened for few rounds."

WINDOWS: Columns = {
    "window": text("window"),
    "cold, ms": number("cold_s", 1e-3),
    "warm, ms": number("warm_s", 1e-3),
    "tok/s, warm": number("tok_s"),
}
TESTS: Columns = {
    "test": code_of("test"),
    "tok/s [95 %]": estimate("tok_s", "tok_s_95"),
    "kernels alone": number("kernels_tok_s"),
    "MB/token": number("bytes_per_token", 1e6),
    "GB/s": number("gbps"),
    "read GB/s": number("read_gbps"),
    "% of limit [95 %]": percent("pct_of_limit", "pct_of_limit_95"),
}
CHECKS: Columns = {
    "": lambda row: MARKS.get(row["status"], "?"),
    "check": text("name"),
    "figures": text("detail"),
}
CELLS: Columns = {
    "cell": text("cell"),
    "runs": lambda row: str(row["runs"]) + (f" ({row['void']} void)" if row["void"] else ""),
    "tok/s [95 %]": text("tok_s"),
    "IQR": number("iqr"),
    "p50 ms": number("latency_p50_ms"),
    "p95 ms": number("latency_p95_ms"),
    "p99 ms": number("latency_p99_ms"),
    "ttft ms": number("ttft_ms"),
    "ratio": text("ratio"),
    "verdict": text("verdict"),
}
MEMORY: Columns = {
    "cell": text("cell"),
    "MB/token": number("bytes_per_token", 1e6),
    "MB touched": number("bytes_touched", 1e6),
    "coverage": number("coverage"),
    "effective GB/s": number("effective_gbps"),
    "peak MiB": number("rss_peak_mb"),
    "KV MiB": number("kv_cache_mb"),
}
_MEDIANS = ("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "ttft_ms", "bytes_per_token")
_MEDIANS += ("bytes_touched", "coverage", "effective_gbps", "rss_peak_mb", "kv_cache_mb")
FILES: Columns = {
    "cell": text("cell"),
    "first": text("first"),
    "second": text("second"),
    "ratio": text("ratio"),
    "verdict": text("verdict"),
}
DECODE: Columns = {
    "model": model(),
    "format": text("format"),
    "test": code_of("test"),
    "threads": text("threads"),
    "tok/s": number("tok_s"),
    "MB/token": number("bytes_per_token", 1e6),
    "GB/s": number("gbps"),
    "% of limit [95 %]": percent("pct_of_limit", "pct_of_limit_95"),
    "same ids": right(),
    "note": text("note"),
}
PEERS: Columns = {
    "model": lambda row: plain(model_name(row["model"])) if row["first"] else "",
    "test": lambda row: code(row["test"]) if row["first"] else "",
    "engine": lambda row: plain(
        f"{row['engine']} {row['format']}" if row["first"] else row["engine"]
    ),
    "tok/s": number("tok_s"),
    "% of limit": lambda row: percent("pct_of_limit")(row) if row["first"] else "",
    "Clocher / peer [95 %]": lambda row: (
        str(Ratio(row["ratio"], row["ratio_low"], row["ratio_high"])) if row["compared"] else ""
    ),
    "note": text("note"),
}
ROOFLINE: Columns = {
    "format": code_of("format"),
    "N x K": lambda row: f"{row['N']} x {row['K']}",
    "M": text("M"),
    "threads": text("threads"),
    "GB/s": number("gbps"),
    "read GB/s": number("read_gbps"),
    "% of limit [95 %]": percent("pct_of_limit", "pct_low", "pct_high"),
    "right": right(),
    "note": text("note"),
}
SERVING: Columns = {
    "load": text("load"),
    "server": text("server"),
    "tok/s": number("tok_s"),
    "to first token, p50, ms": number("ttft_p50_ms"),
    "p99": number("ttft_p99_ms"),
    "between tokens, p50, ms": number("itl_p50_ms"),
    "p95": number("itl_p95_ms"),
    "p99 ": number("itl_p99_ms"),
    "errors": lambda row: str(row.get("error_count", NONE)),
    "client CPU": number("client_cpu"),
}
CASES: Columns = {"case": text("op"), "server": text("server"), "figures": figures}
BLOCK_SPARSE: Columns = {
    "block": text("block"),
    "density": lambda row: f"{1 - row['sparsity']:.0%}" if row["op"] == "bsr_linear" else "dense",
    "times dense": number("speedup"),
    "GB/s": number("gbps"),
    "breaks even at": share("break_even"),
    "right": right(),
}


def sections(files: Sequence[ResultFile]) -> list[Section]:
    """Return the sections of a report: each kind of file, and what compares several files."""
    found = []
    for kind, (title, about, make) in _KINDS.items():
        own = [file for file in files if file.kind == kind and file.rows]
        if own:
            found += [Section(title, (about,)), *(make(file) for file in own)]
    across = (plots.beside_peers(files), plots.latency(files), plots.thread_scaling(files))
    if drawn := tuple(plot for plot in across if plot is not None):
        found.append(Section("Across results", plots=drawn))
    return found


def missing(files: Sequence[ResultFile]) -> list[str]:
    """Return what no file shows yet, each with the command that measures it."""
    kinds = {file.kind for file in files if file.rows}
    found = [
        f"{title}: {code(f'python -m bench.{kind}')}"
        for kind, (title, _, _) in _KINDS.items()
        if kind not in kinds
    ]
    if plots.thread_scaling(files) is None:
        found.append(
            f"Thread scaling: {code('python -m bench.decode --threads 1,2,4 --json FILE')}"
        )
    return found


def strict_tables(rows: Sequence[Row]) -> tuple[Table, Table, Table]:
    """Return the windows, the tests and the checks of a strict measurement."""
    contract, *tests = rows
    windows = []
    for window in ("kernels", "strict", "end_to_end"):
        cold, warm = (contract["windows"][kind][f"{window}_s"] for kind in ("cold", "warm"))
        speed = contract["tokens"] / warm if warm > 0 else 0.0
        name = window.replace("_", " ")
        windows.append({"window": name, "cold_s": cold, "warm_s": warm, "tok_s": speed})
    per_token = {"bytes_per_token": contract["bytes_per_token"]}
    return (
        table(WINDOWS, windows),
        table(TESTS, [{**test, **per_token} for test in tests]),
        table(CHECKS, contract["checks"]),
    )


def cells_tables(cells: Sequence[ResultCell]) -> tuple[Table, ...]:
    """Return the cells of a file, each beside the first, and what they do to memory."""
    rows = [_cell_row(cells[0], cell) for cell in cells]
    measured = [row for row in rows if row["runs"]]
    return (table(CELLS, rows), *([table(MEMORY, measured)] if measured else []))


def files_table(found: Sequence[tuple[ResultCell, ResultCell]]) -> Table:
    """Return pairs of cells of two files beside each other."""
    rows = []
    for old, new in found:
        compared = compare_files(old, new)
        first, second = (
            of_runs(median_of_runs(values) if values else None)
            for values in (old.values(), new.values())
        )
        verdict = compared.verdict if compared else "no run counts"
        row = {"cell": old.label, "first": first, "second": second, "ratio": of_ratio(compared)}
        rows.append({**row, "verdict": verdict})
    return table(FILES, rows)


def reasons(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    """Return how often each reason made a run void or failed, as rows of a table.

    Reasons that differ in their first figure only are one, with the least and the most of it.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] in ("void", "error"):
            for why in row.get("why", ()) or ("no reason given",):
                match = _REASON.fullmatch(plain(why)) if row["status"] == "void" else None
                before, number, after = match.groups() if match else (plain(why), "", "")
                found.setdefault((row["status"], before, after), []).append(number)
    lines = []
    for (status, before, after), numbers in found.items():
        ends = sorted(filter(None, numbers), key=float)
        shown = " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else ""
        lines.append((str(len(numbers)), f"{status}: {before}{shown}{after}"))
    return tuple(sorted(lines, key=lambda line: -int(line[0])))


def _cell_row(base: ResultCell, cell: ResultCell) -> Row:
    speeds = cell.values()
    row = {"cell": cell.label, "runs": len(cell.good), "void": cell.count("void")}
    if not speeds:
        failed = cell.count("error")
        disturbed = [r["line"].get(SPEED) for r in cell.rows if r["status"] == "void" and r["line"]]
        values = [float(value) for value in disturbed if value]
        row["tok_s"] = f"({figure(median(values))})" if values else NONE
        verdict = "failed" if failed else "void: the machine was disturbed"
        return {**row, "runs": 0, "ratio": NONE, "verdict": verdict}
    ratio, verdict = beside(base, cell) if cell is not base else (None, "")
    if cell.ignored:
        verdict = f"{verdict} (ignored: {', '.join(cell.ignored)})".strip()
    middles = {key: cell.values(key) for key in _MEDIANS}
    return {
        **row,
        "tok_s": of_runs(median_of_runs(speeds)),
        "iqr": spread(speeds),
        **{key: median(values) for key, values in middles.items() if values},
        "ratio": of_ratio(ratio) if cell is not base else "",
        "verdict": verdict,
    }


def _strict(file: ResultFile) -> Section:
    contract = file.rows[0]
    return _section(
        file,
        strict_tables(file.rows),
        (contract["isa"], f"activations {contract['act_prec']}"),
        f"A generation of {contract['tokens']} tokens after {contract['prompt_tokens']}. "
        "Cold: from the launch of the process; warm: the next one in the same process.",
        title=f"{plain(model_name(contract['model']))} {plain(contract['format'])}, "
        f"{contract['threads']} threads",
    )


def _harness(file: ResultFile) -> Section:
    cells = group([dict(row) for row in file.rows])
    tables = list(cells_tables(cells))
    if why := reasons(file.rows):
        tables.append(Table(("runs", "what did not count, and why"), why))
    return _section(
        file,
        tables,
        _engines(cells),
        "Median of runs, each a process; ratios are to the first row. Coverage is bytes "
        "touched over the size of the weight files.",
    )


def _peers(file: ResultFile) -> Section:
    ours: dict[str, Row] = {row["test"]: row for row in file.rows if "ratio" not in row}
    told = ("ratio", "ratio_low", "ratio_high")
    rows = [
        {
            **row,
            "first": ours.get(row["test"]) is row,
            "compared": all(row.get(key) is not None for key in told),
        }
        for row in file.rows
    ]
    isa = next((row["isa"] for row in file.rows if row.get("isa")), None)
    about = (isa, f"{file.rows[0]['threads']} threads")
    return _section(file, [table(PEERS, rows)], about)


def _serving(file: ResultFile) -> Section:
    loads = [row for row in file.rows if row["op"] == "load"]
    rest = [row for row in file.rows if row["op"] != "load"]
    tables = [table(SERVING, loads)] if loads else []
    tables += [table(CASES, rest)] if rest else []
    sizes = {(row["prompt_tokens"], row["new_tokens"]) for row in file.rows}
    about = [f"{new} tokens after {length}" for length, new in sorted(sizes)]
    return _section(file, tables, about, drawn=plots.serving(file))


def _skip(file: ResultFile) -> Section:
    compared = [row for row in file.rows if row.get("speedup") is not None]
    first = file.rows[0]
    return _section(file, [table(SKIP, compared)], (first["isa"], f"{first['threads']} threads"))


def _plain_rows(
    columns: Columns, draw: Callable[[ResultFile], Plot] | None = None
) -> Callable[[ResultFile], Section]:
    """Return what makes the section of a file that is one table, and perhaps a picture."""

    def make(file: ResultFile) -> Section:
        drawn = (draw(file),) if draw else ()
        return _section(file, [table(columns, file.rows)], (file.rows[0].get("isa"),), drawn=drawn)

    return make


def _section(
    file: ResultFile,
    tables: Sequence[Table],
    about: Sequence[Any],
    *more: str,
    title: str = "",
    drawn: tuple[Plot, ...] = (),
) -> Section:
    """Return a section that begins with date, machine, setting, file and command."""
    parts = [file.date, plain(file.machine), *(plain(str(said)) for said in about if said)]
    told = ", ".join(part for part in parts if part) or "date and machine unknown"
    made = f" Command: {code(file.command)}" if file.command else ""
    first = f"{told}; from {code(file.name)}.{made}"
    return Section(title or plain(file.stem), (first, *more), tuple(tables), drawn, level=3)


def _engines(cells: Sequence[ResultCell]) -> list[str]:
    """Return what all rows of a harness file ran, as far as it is the same."""
    lines = [row["line"] for cell in cells for row in cell.rows if row.get("line")]
    found = []
    for key in ("model", "precision", "device", "isa", "threads"):
        values = {str(line[key]) for line in lines if line.get(key) is not None}
        if len(values) == 1:
            (value,) = values
            name = model_name(value) if key == "model" else value
            found.append(f"{name} threads" if key == "threads" else name)
    return found


_KINDS: Mapping[Kind, tuple[str, str, Callable[[ResultFile], Section]]] = {
    "strict": (
        "Strict contract",
        "Three windows, and the checks that make them believable.",
        _strict,
    ),
    "harness": ("Harness", "`clocher-run` in fresh processes, interleaved.", _harness),
    "decode": (
        "Decode",
        "Beside the limit that reading the weights sets." + _NARROW,
        _plain_rows(DECODE),
    ),
    "peers": (
        "Beside others",
        "Same weights, same threads, in turns; a ratio above 1 is in favour of Clocher." + _NARROW,
        _peers,
    ),
    "serving": (
        "Servers",
        "The client has its share of the same CPUs; only whole answers count. Servers are measured "
        "in turns.",
        _serving,
    ),
    "roofline": (
        "Matrix products",
        "The limit is a loop that only reads, with the same threads, in the same minutes."
        + _NARROW,
        _plain_rows(ROOFLINE, plots.roofline),
    ),
    "attention": (
        "Attention",
        "Over a paged cache, each key and value counted once. The limit is a loop that only reads, "
        "with the same threads, in the same minutes; with several tokens it is arithmetic.",
        _plain_rows(ATTENTION),
    ),
    "block_sparse": (
        "Block-sparse weights",
        "Density is the share of blocks that are kept.",
        _plain_rows(BLOCK_SPARSE, plots.block_sparse),
    ),
    "sparse_attention": (
        "Attention to some pages",
        "Lossy and off by default: what is read is chosen by bounds of the keys.",
        _plain_rows(SPARSE_ATTENTION),
    ),
    "skip": (
        "Dead neurons",
        "Exact: what a squared ReLU made zero is not read.",
        _skip,
    ),
    "act_sparsity": (
        "Activation thresholds",
        "Lossy and off by default: small inputs of products are dropped.",
        _plain_rows(ACT_SPARSITY),
    ),
    "speculation": (
        "Speculation",
        "Lossless: the same tokens with it and without. Ranges are of the rounds.",
        _plain_rows(SPECULATION),
    ),
}
