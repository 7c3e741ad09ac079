"""All parts as one JSON object, and as tables for people; and several runs as one."""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bench.gpu.record import JSON, SCHEMA, TEXT, Record, Row, write_json, write_whole
from bench.gpu.targets import ASSUMED_GBS, verdicts
from bench.ops.experiment import table

_WIDTH = 150
_MOST_PROBLEMS = 40
_BAD = ("failed", "crashed", "timeout")
_ABOUT = ("item", "dry", "status", "kind", "command")
_STEP = ("model", "batch", "context")
# What races, in which parts, and what their rows differ in.
_RACES = (
    ("matrix products", ("linear", "slow_peers"), ("model", "n", "k", "m")),
    ("mixture of experts, one layer", ("moe",), ("model", "m")),
    ("attention", ("attention",), ("model", "context", "batch", "window")),
    ("block-sparse", ("sparse",), ("n", "k", "m", "block", "density")),
    ("variants of a launch", ("variants",), ("weight", "n", "k", "m")),
)


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


def merge(results: Sequence[Row], parts: Iterable[str]) -> Row:
    """Return several runs' results as one.

    Every row of every run stays: running a part again does not hide what it gave before. What a
    run did not finish stays unfinished, unless another run finished all of that part.

    Args:
        results: as read from the JSON.
        parts: names of all parts; one that no run has is missing.

    Raises:
        ValueError: the runs are of different GPUs, or some are dry runs.
    """
    if len({r["dry"] for r in results}) > 1:
        raise ValueError("a dry run and a run on a GPU; merge runs of one kind")
    names = sorted({name for r in results for name in gpus(r)})
    if len(names) > 1:
        raise ValueError(f"runs on {' and '.join(names)}; merge runs of one GPU")
    merged: dict[str, Row] = {}
    for r in results:
        for name, run in r["parts"].items():
            part = merged.setdefault(name, {"finished": False, "items": 0, "rows": []})
            part["finished"] |= run["finished"] and not r.get("some_items")
            part["items"] += run["items"]
            part["rows"] += run["rows"]
    ended = {name: "in none of the merged runs" for name in parts if name not in merged}
    for r in results:
        for process, why in r["ended_early"].items():
            if not merged.get(process.split(".")[0], {"finished": False})["finished"]:
                ended[process] = why
    seconds = sum(r["seconds"] for r in results)
    return result(merged, ended, bool(results[0]["dry"]), seconds)


def write(out: Path, result: Row) -> str:
    """Write the JSON and the text of a result; return the text."""
    text = io.StringIO()
    show(result, Console(file=text, width=_WIDTH))
    write_json(out / JSON, result)
    write_whole(out / TEXT, text.getvalue().encode())
    return text.getvalue()


def show(result: Row, console: Console) -> None:
    """Print the tables, the most important last."""
    parts = {name: part["rows"] for name, part in result["parts"].items()}

    def rows_of(*names: str) -> list[Row]:
        return [row for name in names for row in parts.get(name, ())]

    for name in ("environment", "ceilings"):
        for row in rows_of(name):
            facts = {k: v for k, v in row.items() if k not in _ABOUT}
            line = ", ".join(f"{key} {_short(value)}" for key, value in facts.items())
            _say(console, f"{name} {row['item']}: {line}")
    for title, names, facts in _RACES:
        # What is not here is listed once, below, not in every race.
        raced = [r for r in rows_of(*names) if "who" in r and r["status"] != "not measured"]
        shown = "{said} | {us_low:.1f}-{us_high:.1f} | {gbs:.0f} | {percent:.0f}"
        heads = "who | us | spread | GB/s | % of copy"
        _table(console, title, facts, heads, "{who} | " + shown, _with(raced, "{us:.1f}"))
    for row in rows_of("counters"):
        if "metrics" in row:
            line = ", ".join(f"{name} {_short(value)}" for name, value in row["metrics"].items())
            _say(console, f"{row['item']} {row['kernel']}: {line}")
    steps = [r for r in rows_of("decode", "batches", "variants") if "context" in r and "model" in r]
    good = [row for row in steps if row["status"] == "ok"]
    heads = "tok/s | limit | % of limit | us/step | outside us"
    shown = "{said} | {limit_tokens_per_s:.0f} | {percent:.0f} | {us:.0f} | {outside_us:.0f}"
    _table(console, "decode", _STEP, heads, shown, _with(good, "{tokens_per_s:.0f}"))
    for row in steps:
        top = row.get("top_kernels", ()) if not row["dry"] else ()
        line = "; ".join(f"{k['name']} x{k['count']} {k['us']:.0f} us" for k in top)
        if line:
            _say(console, f"{row['model']} b{row['batch']} c{row['context']}: {line}")
    served = [row for row in rows_of("generate") if row["status"] == "ok" and "what" in row]
    title = "a session: time to the first token, and tokens after it"
    shown = "{said} | {tokens_per_s:.0f}"
    facts = ("model", "what", "prompt", "chunk")
    _table(console, title, facts, "ms | tok/s", shown, _with(served, "{ms:.2f}"))
    _guesses(console, rows_of("passes"), rows_of("speculation"))
    _parity(console, rows_of("parity"))
    _problems(console, parts)
    _targets(console, result["targets"])
    for name, part in result["parts"].items():
        counts = ", ".join(f"{n} {status}" for status, n in sorted(part["statuses"].items()))
        _say(
            console, f"{name}: {counts or 'nothing'}" + "; did not finish" * (not part["finished"])
        )
    for name, why in result["ended_early"].items():
        _say(console, f"{name}: {why}")
    if "kernels" in result:
        _say(console, result["kernels"])
    kind = "dry run, nothing here is a speed" if result["dry"] else "measured"
    _say(console, f"{kind}; {result['seconds']} s")


def _with(rows: Iterable[Row], figure: str) -> list[Row]:
    """Return rows with what is `said` first of each: its figure, or why it has none."""
    found = []
    for row in rows:
        more = {"percent": 100 * row["share"]} if "share" in row else {}
        more |= {"ms": row["us"] / 1e3} if "us" in row else {}
        said = row["status"] if row["status"] != "ok" else "dry" if row["dry"] else ""
        found.append({**row, **more, "said": said or figure.format_map({**row, **more})})
    return found


def _guesses(console: Console, passes: Sequence[Row], texts: Sequence[Row]) -> None:
    good = [row for row in passes if row["status"] == "ok" and "m" in row]
    title = "passes of one sequence's tokens"
    _table(
        console,
        title,
        ("model", "m"),
        "us | of one",
        "{said} | {ratio:.2f}",
        _with(good, "{us:.0f}"),
    )
    good = [row for row in texts if row["status"] == "ok" and "what" in row]
    facts, heads = ("model", "what", "sampling"), "tok/s | gain | tokens a pass"
    shown = "{said} | {gain:.2f} | {per_pass:.2f}"
    title = "texts with guesses, beside none"
    _table(console, title, facts, heads, shown, _with(good, "{tokens_per_s:.0f}"))


def _parity(console: Console, rows: Sequence[Row]) -> None:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "op" in row and "act" in row:
            groups.setdefault((row["op"], row["act"]), []).append(row)
    shown = []
    for (op, act), found in sorted(groups.items()):
        counts = Counter(row["status"] for row in found)
        worst = max((row.get("rms", 0.0) for row in found), default=0.0)
        shown.append({"op": op, "act": act, "failed": counts["failed"], "worst": worst})
        shown[-1] |= {"checked": counts["ok"] + counts["failed"], "refused": counts["refused"]}
    heads, cells = "checked | failed | refused | worst rms", "{checked} | {failed} | {refused}"
    _table(console, "parity", ("op", "act"), heads, cells + " | {worst:.1e}", shown)


def _problems(console: Console, parts: Mapping[str, Sequence[Row]]) -> None:
    """List what went wrong, and what was not measured and why, once for each reason."""
    seen: dict[str, bool] = {}
    for name, rows in parts.items():
        for row in rows:
            if row["status"] == "ok":
                continue
            where = row.get("who") or row.get("case") or row.get("peer") or row["item"]
            why = str(row.get("reason", ""))[:240]
            bad = row["status"] in _BAD
            seen[f"{name}: {row['status']}: {row['item'] if bad else where}: {why}"] = bad
    # What is wrong comes before what is not there, and the end of a long list is in the JSON.
    lines = sorted(seen, key=lambda line: not seen[line])
    for line in lines[:_MOST_PROBLEMS]:
        _say(console, line)
    if len(lines) > _MOST_PROBLEMS:
        _say(console, f"... and {len(lines) - _MOST_PROBLEMS} more")


def _targets(console: Console, rows: Sequence[Row]) -> None:
    scaled = next((row["scaled_by"] for row in rows if row["scaled_by"] != 1), 1.0)
    title = f"targets; tok/s and us are for {ASSUMED_GBS / 1e3:g} TB/s"
    title += f", here times the copy's share of that, {scaled:.2f}" if scaled != 1 else ""
    shown = [
        row | {"said": "not measured"}
        if row["measured"] is None
        else row | {"said": f"{row['measured']:.3g} {row['unit']}"}
        for row in rows
    ]
    cells = "{said} | {must:.4g} | {stretch:.4g} | {met}"
    _table(console, title, ("target",), "measured | must | stretch | met", cells, shown)


def _table(
    console: Console, title: str, facts: Sequence[str], heads: str, cells: str, rows: Sequence[Row]
) -> None:
    """Print a table, if it has rows: first a column for each fact."""
    heads = " | ".join([*facts, heads])
    cells = " | ".join([*(f"{{{fact}}}" for fact in facts), cells])
    made = table(heads, cells, rows, title, title_justify="left", box=None, pad_edge=False)
    for column in made.columns:
        column.no_wrap = True
    if rows:
        console.print(made)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
