"""Choose the formats of a plan so that a target size does least harm.

Units (query, key and value; gate and up; down; experts) are decided one by one. The harm of a
candidate is the KL divergence with this unit alone quantised to the smallest candidate, times its
weighted error relative to that. Upgrades follow the lower convex hulls by harm per byte; the rest
of the budget goes to the best upgrades that fit.

Source: exllamav3's `measure`; llama.cpp's target-bpw proposal (pull request 15550).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format, Int4, Int8
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.quantize.plan import PlannedTensor, QuantPlan
from clocher_runtime.quantize.sensitivity import Unit, candidate_errors, measure_units

Progress = Callable[[int, int, str], None]

CANDIDATES: tuple[Format, ...] = (
    Int4(True, 128, "f16"),
    Int4(False, 128, "f16"),
    Int4(True, 64, "f16"),
    Int4(False, 64, "f16"),
    Int4(True, 32, "f16"),
    Int4(False, 32, "f16"),
    Int8(128, "f16"),
    Int8(32, "f16"),
)
"""Formats that a unit may get, 4.125 to 8.5 bits per weight."""


class Option(NamedTuple):
    """One format of a unit: its bytes and harm."""

    format: Format
    nbytes: int
    harm: float


class Choice(NamedTuple):
    """Each unit's option, and the harm per byte of the last upgrade; 0 if all were taken."""

    taken: tuple[int, ...]
    price: float


def allocate(
    checkpoint: Checkpoint,
    plan: QuantPlan,
    text_ids: Sequence[Sequence[int]],
    *,
    target_bpw: float,
    threads: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> tuple[QuantPlan, dict[str, Any]]:
    """Choose formats for the linears of the blocks to meet a size; other tensors keep theirs.

    `target_bpw`: bits per weight of all tensors of the plan, scales included. Returns the new plan
    and a record: target, size, price, and each unit's harms.
    """
    by_name: dict[str, list[PlannedTensor]] = {}
    pinned = []
    for name, tensor in plan.tensors.items():
        key = unit_of(name)
        if key is None or not isinstance(tensor.format, Int4 | Int8):
            pinned.append(tensor)
        else:
            by_name.setdefault(key, []).append(tensor)
    units = [Unit(key, tuple(tensors)) for key, tensors in by_name.items()]
    if not units:
        raise UsageError(
            "--target-bpw has nothing to choose: the plan quantises no linear of the blocks to "
            "int4 or int8"
        )
    params = sum(tensor.params for tensor in plan.tensors.values())
    fixed = sum(tensor.nbytes for tensor in pinned)
    budget = int(target_bpw * params / 8) - fixed
    sizes = [
        [sum(fmt.nbytes(t.shape) for t in unit.tensors) for fmt in CANDIDATES] for unit in units
    ]
    least, most = (sum(pick(row) for row in sizes) for pick in (min, max))
    if least > budget:
        raise UsageError(
            f"--target-bpw {target_bpw:g} cannot be met: the smallest formats give "
            f"{8 * (least + fixed) / params:.3f} bits per weight; {len(pinned)} tensors keep the "
            "formats of their rules; raise the target or give those a smaller format"
        )
    measured = measure_units(
        checkpoint, units, CANDIDATES[0], text_ids, threads, seed, progress, directory
    )
    options = []
    for unit, row, harm in zip(units, sizes, measured.kld, strict=True):
        error = candidate_errors(checkpoint, unit, CANDIDATES, measured.importance, seed, threads)
        harms = [harm * e / max(error[0], 1e-30) for e in error]
        options.append([Option(*each) for each in zip(CANDIDATES, row, harms, strict=True)])
    choice = choose(options, budget)
    formats = {
        tensor.name: options[u][choice.taken[u]].format
        for u, unit in enumerate(units)
        for tensor in unit.tensors
    }
    result = plan.with_formats(formats)
    record = {
        "target_bpw": target_bpw,
        "bpw": result.quantised_bpw,
        "largest_bpw": 8 * (most + fixed) / params,
        "signal": "kld",
        "tokens": measured.tokens,
        "price": choice.price,
        "units": [
            {
                "unit": unit.name,
                "tensors": [tensor.name for tensor in unit.tensors],
                "params": unit.params,
                "format": row[taken].format.name,
                "kld_alone": row[0].harm,
                "candidates": {o.format.name: {"nbytes": o.nbytes, "harm": o.harm} for o in row},
            }
            for unit, row, taken in zip(units, options, choice.taken, strict=True)
        ],
    }
    return result, record


def choose(options: Sequence[Sequence[Option]], budget: int) -> Choice:
    """Choose an option per unit: at most `budget` bytes, least harm along the convex hulls."""
    hulls = [_hull(row) for row in options]
    taken = [hull[0] for hull in hulls]
    spent = sum(row[i].nbytes for row, i in zip(options, taken, strict=True))
    steps = sorted(
        (
            (-_slope(options[u][a], options[u][b]), u, a, b)
            for u, hull in enumerate(hulls)
            for a, b in pairwise(hull)
        )
    )
    price = 0.0
    for number, (slope, u, a, b) in enumerate(steps):
        more = options[u][b].nbytes - options[u][a].nbytes
        if taken[u] == a and spent + more <= budget:
            taken[u] = b
            spent += more
        elif price == 0.0 and number:
            price = -slope
    while True:  # what is left of the budget goes to the upgrade that saves most
        best, saved = None, 0.0
        for u, row in enumerate(options):
            now = row[taken[u]]
            for i, option in enumerate(row):
                gain = now.harm - option.harm
                if option.nbytes - now.nbytes <= budget - spent and gain > saved:
                    best, saved = (u, i), gain
        if best is None:
            return Choice(tuple(taken), price)
        u, b = best
        spent += options[u][b].nbytes - options[u][taken[u]].nbytes
        taken[u] = b


def allocation_table(record: Mapping[str, Any]) -> list[str]:
    """Return table lines for people: every unit's harm and format."""
    lines = [
        f"target {record['target_bpw']:g} bits per weight, reached {record['bpw']:.4f}; "
        f"harm: {record['signal']} measured on {record['tokens']} tokens",
        f"{'unit':28} {'Mparams':>9} {'KLD alone':>10} {'KLD now':>10}  format",
    ]
    for unit in record["units"]:
        now = unit["candidates"][unit["format"]]["harm"]
        lines.append(
            f"{unit['unit']:28} {unit['params'] / 1e6:9.3f} {unit['kld_alone']:10.2e} "
            f"{now:10.2e}  {unit['format']}"
        )
    return lines


def unit_of(name: str) -> str | None:
    """Return a tensor's unit, "3.qkv", "3.o", "3.gate_up", "3.down", or None."""
    prefix, dot, rest = name.removeprefix("model.layers.").partition(".")
    if not (name.startswith("model.layers.") and dot and prefix.isdigit()):
        return None
    last = rest.removesuffix(".weight").rpartition(".")[2]
    kind = _KINDS.get(last)
    return f"{prefix}.{kind}" if kind else None


_KINDS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    "o_proj": "o",
    "down_proj": "down",
}


def _slope(low: Option, high: Option) -> float:
    return (low.harm - high.harm) / (high.nbytes - low.nbytes)


def _hull(row: Sequence[Option]) -> list[int]:
    """Return the options on the lower convex hull of (bytes, harm), smallest first."""
    order = sorted(range(len(row)), key=lambda i: (row[i].nbytes, row[i].harm))
    hull: list[int] = []
    for i in order:
        if hull and (row[i].harm >= row[hull[-1]].harm or row[i].nbytes == row[hull[-1]].nbytes):
            continue
        while len(hull) > 1 and _slope(row[hull[-2]], row[hull[-1]]) <= _slope(
            row[hull[-1]], row[i]
        ):
            hull.pop()
        hull.append(i)
    return hull
