"""The table of sizes and qualities, as text and as a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_runtime.quality.statistics import Estimate

_COLOURS = {"pass": "#2a7f3f", "fail": "#b3261e", "undecided": "#8a6d00"}
_LEAST_KLD = 1e-7


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the table; the reference's comparisons are None."""

    label: str
    bpw: float  # bits per parameter
    nbytes: int
    perplexity: float
    ppl_ratio: Estimate | None = None
    kld: Estimate | None = None  # mean KL divergence, nats
    same_top: Estimate | None = None  # share of tokens with the same top-1 token
    rms_dp: Estimate | None = None  # root mean square change of the true token's probability
    tokens_per_s: float | None = None  # of decoding; None if it was not measured
    verdict: str = ""  # of the gate


def table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned Markdown table; `±` is half the 95 % interval."""
    head = (
        *("model", "bpw", "GiB", "perplexity", "PPL ratio", "KLD, nats", "same top, %"),
        *("RMS Δp, %", "tok/s", "gate"),
    )
    cells = [
        (
            row.label.replace("|", "/"),
            f"{row.bpw:.3f}",
            f"{row.nbytes / 2**30:.4g}",
            f"{row.perplexity:.4g}",
            _spell(row.ppl_ratio),
            _spell(row.kld),
            _spell(row.same_top, 100),
            _spell(row.rms_dp, 100),
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:.4g}",
            row.verdict,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]

    def line(values: Sequence[str]) -> str:
        first = values[0].ljust(widths[0])
        rest = [value.rjust(width) for value, width in zip(values[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = [("-" * widths[0]), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), f"| {' | '.join(rule)} |", *map(line, cells)])


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw KL divergence over bits per parameter as a PNG. Raises UsageError, OSError."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        if row.kld is None:
            continue
        value = max(row.kld.value, _LEAST_KLD)
        below = value - max(min(row.kld.low, value), value / 10)
        above = max(min(row.kld.high, value * 10), value) - value
        colour = _COLOURS.get(row.verdict, "black")
        axes.errorbar(row.bpw, value, yerr=[[below], [above]], fmt="o", capsize=3, color=colour)
        axes.annotate(
            f"{row.label} ({row.verdict})",
            (row.bpw, value),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yscale("log")
    axes.margins(x=0.25, y=0.12)
    axes.set_xlabel("bits per parameter")
    axes.set_ylabel("KL divergence from the reference, nats (95 % interval)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, linewidth=0.4, alpha=0.5)
    figure.savefig(path, format="png")


def require_matplotlib() -> None:
    """Raise UsageError early if `draw` cannot work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            "--report draws with matplotlib, which is not installed; pip install '.[bench]' in a "
            "clone of Clocher"
        ) from None


def _spell(estimate: Estimate | None, scale: float = 1) -> str:
    if estimate is None:
        return ""
    value, half = scale * estimate.value, scale * (estimate.high - estimate.low) / 2
    if half == float("inf"):
        return f"{value:.4g} ±?"
    digits = 4 if half <= 0 else min(8, max(1, 1 - int(log10(half) // 1)))
    return f"{value:.{digits}f} ±{half:.{digits}f}"
