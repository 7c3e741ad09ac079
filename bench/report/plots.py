"""The plots of a report, from the rows of result files."""

import re
from collections.abc import Sequence
from statistics import median

from bench.report.charts import Axis, Chart, Ratios, Series
from bench.report.columns import Row, model_name
from bench.report.data import ResultFile
from bench.report.document import Plot
from bench.sweep.results import group
from clocher_kernels.errors import ClocherError
from clocher_kernels.formats import parse_format


def roofline(file: ResultFile) -> Plot:
    """Draw work done over work for each byte; memory sets the slanted line.

    A point of a format is the median over its shapes.
    """
    rows = [row for row in file.rows if row["threads"] == _most_threads(file.rows)]
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        work = intensity(row)
        if work is not None:
            name = f"{row['format']}, M={row['M']}" if _several(rows, "M") else row["format"]
            points.setdefault(name, []).append((work, row["gbps"] * work))
    series = [
        Series(
            name,
            ((median(x for x, _ in found), median(y for _, y in found)),),
            ((min(y for _, y in found), max(y for _, y in found)),),
            joined=False,
        )
        for name, found in points.items()
    ]
    reach = [x for found in points.values() for x, _ in found]
    if reach:
        read = median(row["read_gbps"] for row in rows)
        line = tuple((x, x * read) for x in (min(reach) / 1.3, max(reach) * 1.3))
        series.append(Series("read bandwidth", line, marked=False, dashed=True))
    return Plot(
        f"roofline-{file.stem}",
        Chart(
            "Roofline of matrix products" + _setting(file, rows),
            Axis("operations for each byte of weights", log=True),
            Axis("10⁹ operations a second", log=True),
            tuple(series),
        ),
        "Roofline: a point is a format (median over shapes, the bar spans them); the line is "
        "what reading its weights allows.",
    )


def intensity(row: Row) -> float | None:
    """Return the operations of a product for each byte of its weights; None if unknown."""
    try:
        nbytes = parse_format(row["format"]).nbytes((row["N"], row["K"]))
    except (ClocherError, ValueError):
        return None
    return 2 * row["M"] * row["N"] * row["K"] / nbytes if nbytes else None


def thread_scaling(files: Sequence[ResultFile]) -> Plot | None:
    """Draw speed over threads, one thread being 1; None without two thread counts of anything."""
    found = _speeds(files)
    several = {name: speeds for name, speeds in found.items() if len(speeds) > 1 and min(speeds)}
    if not several:
        return None
    series = []
    for name, speeds in several.items():
        least = min(speeds)
        points = tuple((float(n), speeds[n] / speeds[least] * least) for n in sorted(speeds))
        series.append(Series(name, points))
    most = float(max(max(speeds) for speeds in several.values()))
    ideal = Series("as many times as threads", ((1.0, 1.0), (most, most)), (), True, False, True)
    picture = Chart(
        "Thread scaling",
        Axis("threads", whole=True),
        Axis("speed, times that of one thread", zero=True),
        (*series, ideal),
    )
    return Plot("thread-scaling", picture, "Speed over the number of threads.")


def beside_peers(files: Sequence[ResultFile]) -> Plot | None:
    """Draw how many times as fast as each peer Clocher is; None where no peer ran."""
    found = []
    for file in files:
        if file.kind == "peers":
            isa = next((row["isa"] for row in file.rows if row["isa"]), "")
            for row in file.rows:
                if row.get("ratio"):
                    name = f"{model_name(row['model'])} {row['test']}, {_peer(row)}, {isa}"
                    found.append((name, row["ratio"], row["ratio_low"], row["ratio_high"]))
    if not found:
        return None
    picture = Ratios("Clocher beside its peers", "times as fast, 95 % interval", tuple(found))
    return Plot("beside-peers", picture, "Speed over that of a peer, both run in turns.")


def _peer(row: Row) -> str:
    """Return the peer of a row and what its weights are stored as."""
    engine, *_ = str(row["engine"]).split()
    stored = re.search(r"\b(I?Q\d\w*|TQ\d\w*|BF16|F16)", str(row["note"]))
    return f"{engine} {stored[0]}" if stored else engine


def latency(files: Sequence[ResultFile]) -> Plot | None:
    """Draw which share of the tokens took at most how long; None without strict results."""
    series = []
    for file in files:
        if file.kind != "strict":
            continue
        contract = file.rows[0]
        for row in file.rows[1:]:
            values = row.get("latency_us")
            if values:
                name = f"{contract['model']} {contract['format']}, {row['test']}"
                name += f", {contract['threads']} threads"
                points = tuple(
                    (us / 1e3, 100 * i / (len(values) - 1)) for i, us in enumerate(values)
                )
                series.append(Series(name, points, marked=False))
    if not series:
        return None
    picture = Chart(
        "Latency of a token",
        Axis("latency, ms", log=True),
        Axis("tokens that took at most that long, %", zero=True),
        tuple(series),
    )
    return Plot("latency", picture, "Distribution of the latency of decoded tokens.")


def block_sparse(file: ResultFile) -> Plot:
    """Draw the speed-up of block-sparse weights over their density; they break even at 1."""
    series = []
    blocks = dict.fromkeys(row["block"] for row in file.rows)
    for block in blocks:
        own = [row for row in file.rows if row["block"] == block and row["op"] == "bsr_linear"]
        points = sorted((100 * (1 - row["sparsity"]), row["speedup"]) for row in own)
        even = next(row["break_even"] for row in file.rows if row["block"] == block)
        series.append(Series(f"{block} (even at {even:.0%})", tuple(points)))
    series.append(Series("dense", ((0.0, 1.0), (100.0, 1.0)), marked=False, dashed=True))
    row = file.rows[0]
    title = f"Block-sparse {row['n']} x {row['k']}, {row['inner']}, M={row['m']}"
    picture = Chart(
        f"{title}, {row['threads']} threads",
        Axis("density: blocks that are kept, %", zero=True),
        Axis("speed-up over dense", log=True),
        tuple(series),
    )
    caption = "Block-sparse against dense: above the dashed line leaving blocks out pays."
    return Plot(f"block-sparse-{file.stem}", picture, caption)


def serving(file: ResultFile) -> tuple[Plot, ...]:
    """Draw speed and times between tokens over streams; nothing without two numbers of streams."""
    rows = [row for row in file.rows if row["op"] == "load" and row.get("streams")]
    if not _several(rows, "streams"):
        return ()
    found = []
    for key, label, caption in (
        ("tok_s", "tokens a second, all streams", "Output of a server over its streams."),
        ("itl_p99_ms", "time between tokens, p99, ms", "Waiting for the next token."),
    ):
        series = []
        for name in dict.fromkeys(row["server"] for row in rows):
            own = [row for row in rows if row["server"] == name and row.get(key) is not None]
            points = sorted((float(row["streams"]), float(row[key])) for row in own)
            series.append(Series(name, tuple(points)))
        axes = Axis("streams", log=True), Axis(label, log=key != "tok_s", zero=True)
        title = f"Serving {rows[0]['new_tokens']} tokens after {rows[0]['prompt_tokens']}"
        title = f"{title}, {file.date}".rstrip(", ")
        picture = Chart(title, *axes, tuple(series))
        found.append(Plot(f"serving-{key.replace('_', '-')}-{file.stem}", picture, caption))
    return tuple(found)


def _roofline_speeds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    speeds: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        own = speeds.setdefault(f"{row['format']}, M={row['M']}", {})
        own.setdefault(row["threads"], []).append(row["gbps"])
    return {name: {n: median(v) for n, v in own.items()} for name, own in speeds.items()}


def _most_threads(rows: Sequence[Row]) -> int:
    return max((int(row["threads"]) for row in rows), default=0)


def _several(rows: Sequence[Row], key: str) -> bool:
    return len({row[key] for row in rows}) > 1


def _setting(file: ResultFile, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return f", {rows[0]['threads']} threads, {rows[0]['isa']}, {file.date}".rstrip(", ")


def _speeds(files: Sequence[ResultFile]) -> dict[str, dict[int, float]]:
    """Return name of what was measured -> threads -> speed."""
    found: dict[str, dict[int, float]] = {}
    for file in files:
        if file.kind == "decode":
            for row in file.rows:
                name = f"{model_name(row['model'])} {row['format']} {row['test']}"
                found.setdefault(name, {})[row["threads"]] = row["tok_s"]
        if file.kind == "strict":
            contract = file.rows[0]
            for row in file.rows[1:]:
                name = f"{contract['model']} {contract['format']} {row['test']}"
                found.setdefault(name, {})[contract["threads"]] = row["tok_s"]
        if file.kind == "harness":
            for cell in group([dict(row) for row in file.rows]):
                rest = {k: v for k, v in cell.swept.items() if k != "threads"}
                threads, speeds = cell.values("threads"), cell.values()
                if "threads" in cell.swept and threads and speeds:
                    model = model_name(str(cell.good[0]["line"].get("model", "")))
                    name = " ".join([model, *(f"{k}={v}" for k, v in rest.items())])
                    found.setdefault(name, {})[int(threads[0])] = median(speeds)
        if file.kind == "roofline":
            for key, own in _roofline_speeds(file.rows).items():
                found.setdefault(key, {}).update(own)
    return found
