"""All parts as one JSON object, and as tables for people."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.gpu.record import Record, Row
from bench.gpu.targets import ASSUMED_GBS, verdicts

SCHEMA = 2
_MOST_PROBLEMS = 40
_BAD = ("failed", "crashed", "timeout")

Column = tuple[str, Callable[[Row], str]]


def combine(records: Sequence[Record], ended: dict[str, str], dry: bool, seconds: float) -> Row:
    """Return the suite's result.

    Args:
        records: what the processes of all parts wrote.
        ended: process -> how it ended, other than by finishing.
        dry: whether there was no GPU.
        seconds: time that the suite took.
    """
    parts: dict[str, Row] = {}
    for record in records:
        part = parts.setdefault(record.part, {"finished": True, "items": 0, "rows": []})
        part["finished"] &= record.finished
        part["items"] += len(record.done)
        part["rows"] += record.rows
    return result(parts, ended, dry, seconds)


def result(parts: dict[str, Row], ended: Mapping[str, str], dry: bool, seconds: float) -> Row:
    """Return the suite's result from the rows of each part; see `combine`."""
    for part in parts.values():
        part["statuses"] = dict(Counter(row["status"] for row in part["rows"]))
    rows = [row for part in parts.values() for row in part["rows"]]
    return {
        "schema": SCHEMA,
        "dry": dry,
        "seconds": round(seconds, 1),
        "ended_early": dict(ended),
        "parts": parts,
        "targets": verdicts(rows),
    }


def is_good(result: Row) -> bool:
    """Return whether nothing failed and every part came to its end."""
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    finished = all(part["finished"] for part in result["parts"].values())
    bad = any(row["status"] in _BAD for row in rows)
    return finished and not bad and not result["ended_early"]


def gpus(result: Row) -> set[str]:
    """Return the names of the GPUs that a result was measured on."""
    rows = result["parts"].get("environment", {"rows": ()})["rows"]
    return {row["gpu"] for row in rows if "gpu" in row}


def show(result: Row, console: Console) -> None:
    """Print the tables, the most important last."""
    parts = {name: part["rows"] for name, part in result["parts"].items()}
    for name in ("environment", "ceilings"):
        for row in parts.get(name, ()):
            facts = {k: v for k, v in row.items() if k not in ("item", "dry", "status")}
            line = ", ".join(f"{key} {_short(value)}" for key, value in facts.items())
            console.print(f"{name} {row['item']}: {line}", markup=False)
    products = [row for name in ("linear", "slow_peers") for row in parts.get(name, ())]
    _races(console, "matrix products", products, ("model", "n", "k", "m"))
    _races(console, "mixture of experts, one layer", parts.get("moe", ()), ("model", "m"))
    columns = ("model", "context", "batch", "window")
    _races(console, "attention", parts.get("attention", ()), columns)
    columns = ("n", "k", "m", "block", "density")
    _races(console, "block-sparse", parts.get("sparse", ()), columns)
    columns = ("weight", "n", "k", "m")
    _races(console, "variants of a launch", parts.get("variants", ()), columns)
    _counters(console, parts.get("counters", ()))
    steps = [r for name in ("decode", "batches", "variants") for r in parts.get(name, ())]
    _decode(console, [row for row in steps if "context" in row])
    _served(console, parts.get("generate", ()))
    _parity(console, parts.get("parity", ()))
    _problems(console, parts)
    _targets(console, result["targets"])
    for name, part in result["parts"].items():
        counts = ", ".join(f"{n} {status}" for status, n in sorted(part["statuses"].items()))
        end = "" if part["finished"] else "; did not finish"
        console.print(f"{name}: {counts or 'nothing'}{end}", markup=False)
    for name, why in result["ended_early"].items():
        console.print(f"{name}: {why}", markup=False)
    if "kernels" in result:
        console.print(result["kernels"], markup=False)
    kind = "dry run, nothing here is a speed" if result["dry"] else "measured"
    console.print(f"{kind}; {result['seconds']} s")


def _races(console: Console, title: str, rows: Sequence[Row], facts: Sequence[str]) -> None:
    table = _table(title, [*facts, "who", "us", "spread", "GB/s", "% of copy"])
    for row in rows:
        # What is not here is listed once, below, not in every race.
        if "who" not in row or row["status"] == "not measured":
            continue
        cells = [str(row.get(name, "")) for name in facts] + [str(row["who"])]
        if row["status"] != "ok":
            table.add_row(*cells, row["status"], "", "", "")
        elif row["dry"]:
            table.add_row(*cells, "dry", "", "", "")
        else:
            spread = f"{row['us_low']:.1f}-{row['us_high']:.1f}"
            share = f"{100 * row['share']:.0f}" if "share" in row else ""
            table.add_row(*cells, f"{row['us']:.1f}", spread, f"{row['gbs']:.0f}", share)
    _print(console, table)


def _decode(console: Console, rows: Sequence[Row]) -> None:
    names = ["model", "batch", "context", "tok/s", "limit", "% of limit", "us/step", "outside us"]
    table = _table("decode", names)
    for row in rows:
        if row["status"] != "ok" or "model" not in row:
            continue
        cells = [str(row[name]) for name in ("model", "batch", "context")]
        if row["dry"]:
            table.add_row(*cells, "dry", "", "", "", "")
            continue
        outside = f"{row['outside_us']:.0f}" if "outside_us" in row else ""
        table.add_row(
            *cells,
            f"{row['tokens_per_s']:.0f}",
            f"{row['limit_tokens_per_s']:.0f}",
            f"{100 * row['share']:.0f}",
            f"{row['us']:.0f}",
            outside,
        )
    _print(console, table)
    for row in rows:
        top = row.get("top_kernels", ()) if not row["dry"] else ()
        line = "; ".join(f"{k['name']} x{k['count']} {k['us']:.0f} us" for k in top)
        if line:
            where = f"{row['model']} b{row['batch']} c{row['context']}"
            console.print(f"{where}: {line}", markup=False)


def _served(console: Console, rows: Sequence[Row]) -> None:
    names = ["model", "what", "prompt", "chunk", "ms", "tok/s"]
    table = _table("a session: time to the first token, and tokens after it", names)
    for row in rows:
        if row["status"] == "ok" and "what" in row:
            cells = [str(row.get(name, "")) for name in names[:4]]
            speeds = ["dry", ""]
            if not row["dry"]:
                speeds = [f"{row['us'] / 1e3:.2f}", f"{row['tokens_per_s']:.0f}"]
            table.add_row(*cells, *speeds)
    _print(console, table)


def _counters(console: Console, rows: Sequence[Row]) -> None:
    for row in rows:
        if "metrics" in row:
            line = ", ".join(f"{name} {_short(value)}" for name, value in row["metrics"].items())
            console.print(f"{row['item']} {row['kernel']}: {line}", markup=False)


def _parity(console: Console, rows: Sequence[Row]) -> None:
    table = _table("parity", ["op", "act", "checked", "failed", "refused", "worst rms"])
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "op" in row and "act" in row:
            groups.setdefault((row["op"], row["act"]), []).append(row)
    for (op, act), found in sorted(groups.items()):
        counts = Counter(row["status"] for row in found)
        worst = max((row.get("rms", 0.0) for row in found), default=0.0)
        checked = counts["ok"] + counts["failed"]
        numbers = [checked, counts["failed"], counts["refused"]]
        table.add_row(op, act, *map(str, numbers), f"{worst:.1e}")
    _print(console, table)


def _problems(console: Console, parts: dict[str, list[Row]]) -> None:
    """List what went wrong, and what was not measured and why, once for each reason."""
    seen: dict[str, None] = {}
    for name, rows in parts.items():
        for row in rows:
            if row["status"] == "ok":
                continue
            where = row.get("who") or row.get("case") or row.get("peer") or row["item"]
            why = str(row.get("reason", ""))[:240]
            bad = row["status"] in _BAD
            line = f"{name}: {row['status']}: {row['item'] if bad else where}: {why}"
            seen[line] = None
    # What is wrong comes before what is not there, and the end of a long list is in the JSON.
    lines = sorted(seen, key=lambda line: not any(f": {s}: " in line for s in _BAD))
    for line in lines[:_MOST_PROBLEMS]:
        console.print(line, markup=False)
    if len(lines) > _MOST_PROBLEMS:
        console.print(f"... and {len(lines) - _MOST_PROBLEMS} more")


def _targets(console: Console, rows: Sequence[Row]) -> None:
    scaled = next((row["scaled_by"] for row in rows if row["scaled_by"] != 1), 1.0)
    title = f"targets; tok/s and us are for {ASSUMED_GBS / 1e3:g} TB/s"
    title += f", here times the copy's share of that, {scaled:.2f}" if scaled != 1 else ""
    table = _table(title, ["target", "measured", "must", "stretch", "met"])
    for row in rows:
        value = row["measured"]
        text = "not measured" if value is None else f"{value:.3g} {row['unit']}"
        met = "" if value is None else ("yes" if row["met"] else "NO")
        limits = f"{row['must']:.4g}", f"{row['stretch']:.4g}"
        table.add_row(row["target"], text, *limits, met)
    _print(console, table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    if table.row_count:
        console.print(table)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
