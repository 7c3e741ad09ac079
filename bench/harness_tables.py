"""What a person reads of result files: the cells of one, and two beside each other."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from bench.harness_cells import source_names
from bench.harness_results import SPEED, ResultCell
from bench.harness_stats import Comparison, compare_apart, compare_paired, summarise
from clocher_runtime.command.settings import HINTS

_UNKNOWN = "-"


def cells_table(cells: Sequence[ResultCell]) -> Table:
    """Return the cells of a file, each beside the first."""
    table = Table(title="median of runs [95 % interval], IQR; ratios are to the first row")
    table.add_column("cell", overflow="fold")
    for title in ("runs", "tokens/s", "IQR", "p50 ms", "ttft ms", "ratio", "verdict"):
        table.add_column(title, justify="left" if title == "verdict" else "right")
    for cell in cells:
        speed = cell.values()
        if not speed:
            table.add_row(
                cell.label, _runs(cell), _disturbed(cell), *[_UNKNOWN] * 4, _nothing(cell)
            )
            continue
        found = summarise(speed)
        shown, verdict = beside(cells[0], cell) if cell is not cells[0] else ("", "")
        if cell.ignored:
            verdict = f"{verdict} (ignored: {', '.join(cell.ignored)})".strip()
        table.add_row(
            cell.label,
            _runs(cell),
            f"{figure(found.median)} {interval(found.low, found.high)}",
            figure(found.q3 - found.q1),
            *(_middle(cell, key) for key in ("latency_p50_ms", "ttft_ms")),
            shown,
            verdict,
        )
    return table


def beside(base: ResultCell, cell: ResultCell) -> tuple[str, str]:
    """Return ratio and verdict of a cell of the same file, paired by number of the run."""
    if same_engine(base, cell):
        return _UNKNOWN, "the engine does the same as in the first row"
    common = {r["run"] for r in base.good} & {r["run"] for r in cell.good}
    if not common:
        return _UNKNOWN, "no run in common"
    found = compare_paired(base.values(runs=common), cell.values(runs=common))
    return ratio_text(found), found.verdict


def same_engine(a: ResultCell, b: ResultCell) -> bool:
    """Whether two cells of a sweep differ only in settings that the engine does not act on."""
    return a.swept != b.swept and _acted_on(a) == _acted_on(b)


def files_table(before: Sequence[ResultCell], after: Sequence[ResultCell]) -> Table:
    """Return cells of two files that have one label."""
    table = Table(title=f"{SPEED}, second file / first file")
    for title in ("cell", "first", "second", "ratio", "verdict"):
        table.add_column(title, justify="right" if title in ("first", "second") else "left")
    for old, new in pairs(before, after):
        texts = []
        for cell in (old, new):
            if values := cell.values():
                found = summarise(values)
                texts.append(f"{figure(found.median)} {interval(found.low, found.high)}")
            else:
                texts.append(_UNKNOWN)
        compared = compare_files(old, new)
        table.add_row(
            old.label,
            *texts,
            ratio_text(compared) if compared else _UNKNOWN,
            compared.verdict if compared else "no run counts",
        )
    return table


def pairs(
    before: Sequence[ResultCell], after: Sequence[ResultCell]
) -> list[tuple[ResultCell, ResultCell]]:
    """Return cells with one label; two files of one cell each are a pair whatever their labels."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    later = {cell.label: cell for cell in after}
    return [(cell, later[cell.label]) for cell in before if cell.label in later]


def compare_files(old: ResultCell, new: ResultCell) -> Comparison | None:
    """Compare the speed of cells of two files; None where one has no run that counts."""
    a, b = old.values(), new.values()
    return compare_apart(a, b) if a and b else None


def figure(value: float) -> str:
    """Return a number with four digits that count."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval in brackets, or nothing."""
    return "" if low is None or high is None else f"[{figure(low)}, {figure(high)}]"


def ratio_text(found: Comparison) -> str:
    """Return a ratio with its interval."""
    if found.low is None or found.high is None:
        return f"{found.ratio:.3f}"
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _acted_on(cell: ResultCell) -> Mapping[str, str]:
    ignored = {text.partition("=")[0] for text in cell.ignored}
    return {
        name: raw
        for name, raw in cell.swept.items()
        if name not in HINTS and not source_names(name) & ignored
    }


def _runs(cell: ResultCell) -> str:
    void = cell.count("void")
    return f"{len(cell.good)} ({void} void)" if void else f"{len(cell.good)}"


def _nothing(cell: ResultCell) -> str:
    if cell.count("error"):
        return "failed"
    return "void: the machine was disturbed"


def _disturbed(cell: ResultCell) -> str:
    """Return the median of runs that do not count, in parentheses, to give an idea."""
    found = [row["line"].get(SPEED) for row in cell.rows if row["status"] == "void"]
    values = [float(value) for value in found if value]
    return f"({figure(summarise(values).median)})" if values else _UNKNOWN


def _middle(cell: ResultCell, key: str) -> str:
    values = cell.values(key)
    return figure(summarise(values).median) if values else _UNKNOWN
