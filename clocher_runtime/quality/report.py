"""The table of sizes and qualities, as text and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_runtime.quality.statistics import Estimate

_COLOURS = {"pass": "#2a7f3f", "fail": "#b3261e", "undecided": "#8a6d00"}
_LEAST_KLD = 1e-7
_WIDTH, _HEIGHT, _DPI = 8.0, 5.0, 150
_FONT = 8.5


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the table."""

    label: str  # what the table calls it
    bpw: float  # bits per parameter
    nbytes: int  # bytes of its tensors
    perplexity: float  # on the text
    # to the reference, as are the next three; None for the reference itself
    ppl_ratio: Estimate | None = None
    kld: Estimate | None = None  # mean KL divergence, nats
    same_top: Estimate | None = None  # share of tokens with the same most likely token
    rms_dp: Estimate | None = None  # root mean square change of the true token's probability
    tokens_per_s: float | None = None  # of decoding; None if it was not measured
    verdict: str = ""  # of the gate; "" for the reference


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, aligned to be read as text too.

    `a ±b` is a value and half the width of its 95 % interval.
    """
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
    """Draw the KL divergence over the bits per parameter, a labelled point for each model.

    Rows without a divergence, such as that of the reference, are left out.

    Raises UsageError: matplotlib is not installed; OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    points = [(row, row.kld) for row in rows if row.kld is not None]
    for verdict, colour in _COLOURS.items():
        own = [(row, kld) for row, kld in points if row.verdict == verdict]
        if not own:
            continue
        values = [max(kld.value, _LEAST_KLD) for _, kld in own]
        below = [v - max(min(kld.low, v), v / 10) for v, (_, kld) in zip(values, own, strict=True)]
        above = [max(min(kld.high, v * 10), v) - v for v, (_, kld) in zip(values, own, strict=True)]
        axes.errorbar(
            [row.bpw for row, _ in own],
            values,
            yerr=[below, above],
            fmt="o",
            markersize=5,
            capsize=3,
            linewidth=1,
            color=colour,
            label=verdict,
        )
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.12)
    axes.set_xlabel("bits per parameter")
    axes.set_ylabel("KL divergence from the reference, nats (95 % interval)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    axes.legend(title="gate", fontsize=_FONT, title_fontsize=_FONT)
    spots = [(row.bpw, log10(max(kld.value, _LEAST_KLD))) for row, kld in points]
    for (row, kld), (dx, dy, side) in zip(
        points, place_labels(spots, [row.label for row, _ in points]), strict=True
    ):
        axes.annotate(
            row.label,
            (row.bpw, max(kld.value, _LEAST_KLD)),
            xytext=(dx, dy),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=_FONT,
        )
    figure.savefig(path, format="png")


def require_matplotlib() -> None:
    """Fail, before anything is measured, where `draw` could not work.

    Raises UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            "--report draws with matplotlib, which is not installed; pip install '.[bench]' in a "
            "clone of Clocher"
        ) from None


def place_labels(
    points: Sequence[tuple[float, float]], labels: Sequence[str]
) -> list[tuple[float, float, str]]:
    """Choose where each label goes, so that labels cover neither points nor each other.

    `points`: positions, in units of the axes; `labels`: texts. Returns for each label the offset
    from its point, in typographic points, and the side of the text that is put there ("left" or
    "right").
    """
    width, height = 0.72 * 72 * _WIDTH, 0.68 * 72 * _HEIGHT
    scaled = []
    for axis, extent in ((0, width), (1, height)):
        values = [point[axis] for point in points]
        low, high = min(values, default=0.0), max(values, default=1.0)
        scaled.append([(value - low) / ((high - low) or 1.0) * extent for value in values])
    spots = list(zip(*scaled, strict=True))
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots]
    chosen = []
    for (x, y), label in zip(spots, labels, strict=True):
        wide = 0.55 * _FONT * len(label)
        options = []
        for dx, dy in ((7, 0), (-7, 0), (7, 10), (7, -10), (-7, 10), (-7, -10), (7, 20), (7, -20)):
            left = x + dx if dx > 0 else x + dx - wide
            box = (left, y + dy - _FONT / 2, left + wide, y + dy + _FONT / 2)
            # A label over the frame is worse than one over another label.
            outside = max(0.0, left + wide - width * 1.15) + max(0.0, -0.15 * width - left)
            options.append((sum(map(_overlaps, [box] * len(taken), taken)) + outside, dx, dy, box))
        _, dx, dy, box = min(options, key=lambda option: option[0])
        taken.append(box)
        chosen.append((float(dx), float(dy), "left" if dx > 0 else "right"))
    return chosen


def _overlaps(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _spell(estimate: Estimate | None, scale: float = 1) -> str:
    """Return `value ±half` with digits to match the interval."""
    if estimate is None:
        return ""
    value, half = scale * estimate.value, scale * (estimate.high - estimate.low) / 2
    if half == float("inf"):
        return f"{value:.4g} ±?"
    digits = 4 if half <= 0 else min(8, max(1, 1 - int(log10(half) // 1)))
    return f"{value:.{digits}f} ±{half:.{digits}f}"
