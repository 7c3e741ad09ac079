"""What a report says of each kind of result file. Every figure in a cell comes from its rows."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench import report_plots
from bench.harness_results import ResultCell, group
from bench.harness_stats import summarise
from bench.harness_tables import beside, figure, interval
from bench.measure import Ratio
from bench.report_commands import command
from bench.report_data import Kind, ResultFile, Row, model_name
from bench.report_document import Plot, Section, Table, code, plain
from bench.strict_checks import MARKS

_NONE = "-"
_ACROSS = (report_plots.beside_peers, report_plots.latency, report_plots.thread_scaling)
_REASON = re.compile(r"([^0-9]*)([0-9]+(?:\.[0-9]+)?)(.*)")
_NARROW = " Intervals are of the bootstrap, not widened for few rounds."
_RIGHT = {True: "yes", False: "NO", None: _NONE}


def sections(files: Sequence[ResultFile]) -> list[Section]:
    """Return the sections of a report: each kind of file, and what compares several files."""
    found = []
    for kind, (title, text, make) in _KINDS.items():
        own = [file for file in files if file.kind == kind and file.rows]
        if own:
            found += [Section(title, (text,)), *(make(file) for file in own)]
    across = [plot(files) for plot in _ACROSS]
    if plots := tuple(plot for plot in across if plot is not None):
        found.append(Section("Across results", plots=plots))
    return found


def missing(files: Sequence[ResultFile]) -> list[str]:
    """Return what no file shows yet, each with the command that measures it."""
    kinds = {file.kind for file in files if file.rows}
    found = [
        f"{title}: {code(f'python -m bench.{kind}')}"
        for kind, (title, _, _) in _KINDS.items()
        if kind not in kinds
    ]
    if report_plots.thread_scaling(files) is None:
        found.append(
            f"Thread scaling: {code('python -m bench.decode --threads 1,2,4 --json FILE')}"
        )
    return found


def strict(file: ResultFile) -> Section:
    """Return the windows, rows and ticks of a strict measurement."""
    contract, *tests = file.rows
    windows = []
    for window in ("kernels", "strict", "end_to_end"):
        cold, warm = (contract["windows"][kind][f"{window}_s"] for kind in ("cold", "warm"))
        speed = contract["tokens"] / warm if warm > 0 else 0.0
        cells = (figure(1e3 * cold), figure(1e3 * warm), figure(speed))
        windows.append((window.replace("_", " "), *cells))
    rows = tuple(
        (
            code(test["test"]),
            _speed(test["tok_s"], test.get("tok_s_95")),
            _maybe(test.get("kernels_tok_s")),
            figure(contract["bytes_per_token"] / 1e6),
            _maybe(test.get("gbps")),
            _maybe(test.get("read_gbps")),
            _percent(test.get("pct_of_limit"), test.get("pct_of_limit_95")),
        )
        for test in tests
    )
    ticks = tuple(
        (MARKS.get(check["status"], "?"), plain(check["name"]), plain(check["detail"]))
        for check in contract["checks"]
    )
    model = f"{plain(model_name(contract['model']))} {plain(contract['format'])}"
    head = ("window", "cold, ms", "warm, ms", "tok/s, warm")
    return _part(
        f"{model}, {contract['threads']} threads",
        (
            _about(file, contract["isa"], f"activations {contract['act_prec']}"),
            f"A generation of {contract['tokens']} tokens after {contract['prompt_tokens']}. "
            "Cold: from the launch of the process; warm: the next one in the same process.",
        ),
        (
            Table(head, tuple(windows)),
            Table(
                (
                    *("test", "tok/s [95 %]", "kernels alone", "MB/token", "GB/s", "read GB/s"),
                    "% of limit [95 %]",
                ),
                rows,
            ),
            Table(("", "check", "figures"), ticks),
        ),
    )


def harness(file: ResultFile) -> Section:
    """Return the cells of a harness file, what they do to memory, and what was void."""
    cells = group([dict(row) for row in file.rows])
    speeds, memory = [], []
    for cell in cells:
        name = plain(cell.label)
        void = cell.count("void")
        runs = f"{len(cell.good)}" + (f" ({void} void)" if void else "")
        tok_s = cell.values()
        if not tok_s:
            speeds.append((name, runs, *[_NONE] * 6, "failed" if cell.count("error") else "void"))
            continue
        found = summarise(tok_s)
        ratio, verdict = beside(cells[0], cell) if cell is not cells[0] else ("", "")
        if cell.ignored:
            verdict = f"{verdict} (ignored: {', '.join(map(plain, cell.ignored))})".strip()
        speeds.append(
            (
                name,
                runs,
                f"{figure(found.median)} {interval(found.low, found.high)}".strip(),
                figure(found.q3 - found.q1),
                *(_middle(cell, key) for key in ("latency_p50_ms", "latency_p95_ms", "ttft_ms")),
                ratio,
                verdict,
            )
        )
        keys = ("bytes_per_token", "bytes_touched", "coverage", "effective_gbps", "rss_peak_mb")
        scales = (1e6, 1e6, 1, 1, 1)
        figures = (_middle(cell, key, scale) for key, scale in zip(keys, scales, strict=True))
        memory.append((name, *figures))
    head = (
        "cell",
        "runs",
        "tok/s [95 %]",
        "IQR",
        "p50 ms",
        "p95 ms",
        "ttft ms",
        "ratio",
        "verdict",
    )
    touched = ("cell", "MB/token", "MB touched", "coverage", "effective GB/s", "peak MiB")
    tables = [Table(head, tuple(speeds))]
    tables += [Table(touched, tuple(memory))] if memory else []
    if why := reasons(file.rows):
        tables.append(Table(("runs", "what did not count, and why"), why))
    return _part(
        plain(file.stem),
        (
            _about(file, *_engines(cells)),
            "Median of runs, each a process; ratios are to the first row. Coverage is bytes "
            "touched over the size of the weight files.",
        ),
        tuple(tables),
    )


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


def decode(file: ResultFile) -> Section:
    """Return decode speeds beside the limit."""
    rows = tuple(
        (
            plain(model_name(row["model"])),
            plain(row["format"]),
            code(row["test"]),
            str(row["threads"]),
            figure(row["tok_s"]),
            figure(row["bytes_per_token"] / 1e6),
            figure(row["gbps"]),
            _percent(row["pct_of_limit"], row.get("pct_of_limit_95")),
            _RIGHT[row.get("correct")],
            plain(str(row.get("note", ""))),
        )
        for row in file.rows
    )
    head = ("model", "format", "test", "threads", "tok/s", "MB/token", "GB/s")
    return _part(
        plain(file.stem),
        (_about(file, file.rows[0].get("isa")),),
        (Table((*head, "% of limit [95 %]", "same ids", "note"), rows),),
    )


def peers(file: ResultFile) -> Section:
    """Return Clocher beside others, with the interval of each ratio."""
    ours: dict[str, Row] = {row["test"]: row for row in file.rows if "ratio" not in row}
    rows = []
    for row in file.rows:
        share = _percent(row.get("pct_of_limit"), None)
        beside = ""
        if all(key in row for key in ("ratio", "ratio_low", "ratio_high")):
            beside = str(Ratio(row["ratio"], row["ratio_low"], row["ratio_high"]))
        first = ours.get(row["test"]) is row
        rows.append(
            (
                plain(model_name(row["model"])) if first else "",
                code(row["test"]) if first else "",
                plain(f"{row['engine']} {row['format']}" if first else row["engine"]),
                _maybe(row.get("tok_s")),
                share if first else "",
                beside,
                plain(row["note"]),
            )
        )
    head = ("model", "test", "engine", "tok/s", "% of limit", "Clocher / peer [95 %]", "note")
    isa = next((row["isa"] for row in file.rows if row.get("isa")), None)
    threads = f"{file.rows[0]['threads']} threads"
    return _part(
        plain(file.stem),
        (_about(file, isa, threads),),
        (Table(head, tuple(rows)),),
    )


def roofline(file: ResultFile) -> Section:
    """Return the share of the read bandwidth of each format and shape."""
    rows = tuple(
        (
            code(row["format"]),
            f"{row['N']} x {row['K']}",
            str(row["M"]),
            str(row["threads"]),
            figure(row["gbps"]),
            figure(row["read_gbps"]),
            _percent(row["pct_of_limit"], [row[k] for k in ("pct_low", "pct_high") if k in row]),
            _RIGHT[row.get("correct")],
            plain(str(row.get("note", ""))),
        )
        for row in file.rows
    )
    head = ("format", "N x K", "M", "threads", "GB/s", "read GB/s", "% of limit [95 %]", "right")
    return _part(
        plain(file.stem),
        (_about(file, file.rows[0]["isa"]),),
        (Table((*head, "note"), rows),),
        (report_plots.roofline(file),),
    )


def block_sparse(file: ResultFile) -> Section:
    """Return the speed-up of block-sparse weights, and where they break even."""
    rows = tuple(
        (
            plain(row["block"]),
            f"{1 - row['sparsity']:.0%}" if row["op"] == "bsr_linear" else "dense",
            figure(row["speedup"]),
            _maybe(row.get("gbps")),
            f"{row['break_even']:.0%}",
            _RIGHT[row.get("correct")],
        )
        for row in file.rows
    )
    head = ("block", "density", "times dense", "GB/s", "breaks even at", "right")
    return _part(
        plain(file.stem),
        (_about(file, file.rows[0].get("isa")),),
        (Table(head, rows),),
        (report_plots.block_sparse(file),),
    )


def _about(file: ResultFile, *more: Any) -> str:
    """Return what is said of every result: date, machine, setting, file, command."""
    parts = [file.date, plain(file.machine), *(plain(str(text)) for text in more if text)]
    told = ", ".join(part for part in parts if part) or "date and machine unknown"
    return f"{told}; from {code(file.name)}. Command: {code(command(file))}"


def _engines(cells: Sequence[ResultCell]) -> list[str]:
    """Return what all rows of a harness file ran, as far as it is the same."""
    lines = [row["line"] for cell in cells for row in cell.rows if row.get("line")]
    found = []
    for key in ("model", "precision", "device", "isa", "threads"):
        values = {str(line[key]) for line in lines if line.get(key) is not None}
        if len(values) == 1:
            (value,) = values
            text = model_name(value) if key == "model" else value
            found.append(f"{text} threads" if key == "threads" else text)
    return found


def _middle(cell: ResultCell, key: str, scale: float = 1) -> str:
    values = cell.values(key)
    return figure(median(values) / scale) if values else _NONE


def _maybe(value: float | None) -> str:
    return _NONE if value is None else figure(value)


def _speed(value: float, ends: Sequence[float] | None) -> str:
    return f"{figure(value)} {interval(*ends) if ends else ''}".strip()


def _percent(value: float | None, ends: Sequence[float] | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" + (f" [{ends[0]:.0f}, {ends[1]:.0f}]" if ends else "")


def _part(
    title: str, text: tuple[str, ...], tables: tuple[Table, ...], plots: tuple[Plot, ...] = ()
) -> Section:
    return Section(title, text, tables, plots, level=3)


_KINDS: Mapping[Kind, tuple[str, str, Callable[[ResultFile], Section]]] = {
    "strict": (
        "Strict contract",
        "Three windows, and the checks that make them believable.",
        strict,
    ),
    "harness": ("Harness", "`clocher-run` in fresh processes, interleaved.", harness),
    "decode": ("Decode", "Beside the limit that reading the weights sets." + _NARROW, decode),
    "peers": (
        "Beside others",
        "Same weights, same threads, in turns; a ratio above 1 is in favour of Clocher." + _NARROW,
        peers,
    ),
    "roofline": (
        "Matrix products",
        "The limit is a loop that only reads, with the same threads, in the same minutes."
        + _NARROW,
        roofline,
    ),
    "block_sparse": (
        "Block-sparse weights",
        "Density is the share of blocks that are kept.",
        block_sparse,
    ),
}
