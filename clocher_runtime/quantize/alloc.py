"""Choose the formats of a plan so that a target size does least harm to the model.

Units (query, key and value; gate and up; down; experts) are decided one by one; `harm` says what
each costs in a format. The upgrade that saves most harm per byte comes first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from clocher_kernels.errors import UsageError, counted
from clocher_kernels.formats import Format, Int4, Int8, Tcq
from clocher_kernels.formats.tcq import LEVELS
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4_map import ALREADY
from clocher_runtime.disk.kept import Kept
from clocher_runtime.quality.evaluate import Progress
from clocher_runtime.quantize.calibrate import Counts
from clocher_runtime.quantize.harm import Units, harms_of
from clocher_runtime.quantize.plan import PlannedTensor, QuantPlan

CANDIDATES: tuple[Format, ...] = (
    *(Int4(symmetric, group, "f16") for group in (128, 64, 32) for symmetric in (True, False)),
    Int8(128, "f16"),
    Int8(32, "f16"),
)
"""Formats that a unit of integers may get, 4.125 to 8.5 bits per weight."""
TRELLISES: tuple[Format, ...] = tuple(map(Tcq, LEVELS))
"""Formats that a unit may get if the plan has trellises, 2.1 to 5.2 bits per weight."""

LEAST_FRACTION = 2.25
"""Bits per weight from which trellises may be mixed."""

_KINDS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    "o_proj": "o",
    "down_proj": "down",
}


class Option(NamedTuple):
    """One format of a unit: its bytes and harm."""

    format: Format
    nbytes: int
    harm: float


class Room(NamedTuple):
    """What a target size leaves to choose."""

    units: Units
    candidates: tuple[Format, ...]
    sizes: Sequence[Sequence[int]]  # bytes of each unit in each candidate
    pinned: Sequence[PlannedTensor]  # the other tensors, which keep their formats
    params: int  # of all tensors of the plan
    fixed: int  # bytes of the pinned tensors
    base: int  # the largest candidate that all units could have
    most: int  # bytes of the units in the largest candidate
    budget: int  # bytes that the units may take


def room_of(plan: QuantPlan, target_bpw: float) -> Room:
    """Return what a target leaves to choose, by names and shapes. Raises UsageError."""
    if not 0 <= target_bpw <= 32:
        raise UsageError(f"--target-bpw: got {target_bpw:g}, expected 0 to 32 bits of a weight")
    units: dict[str, list[PlannedTensor]] = {}
    pinned = []
    trellises = any(isinstance(tensor.format, Tcq) for tensor in plan.tensors.values())
    candidates = TRELLISES if trellises else CANDIDATES
    kinds: tuple[type[Format], ...] = (Tcq,) if trellises else (Int4, Int8)
    for name, tensor in plan.tensors.items():
        key = unit_of(name)
        if key is None or not isinstance(tensor.format, kinds):
            pinned.append(tensor)
        else:
            units.setdefault(key, []).append(tensor)
    if not units:
        raise UsageError(
            "--target-bpw has nothing to choose: the plan quantises no linear of the blocks to "
            "int4, int8 or a trellis"
        )
    params = sum(tensor.params for tensor in plan.tensors.values())
    fixed = sum(tensor.nbytes for tensor in pinned)
    budget = int(target_bpw * params / 8) - fixed
    sizes = [
        [sum(fmt.nbytes(tensor.shape) for tensor in unit) for fmt in candidates]
        for unit in units.values()
    ]
    least, most = (sum(pick(row) for row in sizes) for pick in (min, max))
    if least > budget:
        kept, ways = "", "raise --target-bpw or --bits"
        if pinned:
            kept = f"; by their rules {counted(len(pinned), 'tensor')} cannot change"
            ways += ", or give those a smaller format with --rules FILE and --target-bpw"
        if any(reason.startswith(ALREADY) for reason in plan.kept.values()):
            ways += ", or give --requantize for those that are quantised already"
        if not trellises and target_bpw >= LEAST_FRACTION:
            ways += f", or take trellises with --bits {target_bpw:g}"
        raise UsageError(
            f"bits per weight of {target_bpw:g} cannot be met: the smallest formats give "
            f"{8 * (least + fixed) / params:.3f}{kept}; {ways}"
        )
    totals = [sum(column) for column in zip(*sizes, strict=True)]
    base = max((n for n in totals if n <= budget), default=min(totals))
    return Room(units, candidates, sizes, pinned, params, fixed, totals.index(base), most, budget)


def at_most(plan: QuantPlan, target_bpw: float) -> QuantPlan:
    """Return the plan with the largest sizes that a target allows. Raises UsageError."""
    room = room_of(plan, target_bpw)
    most = room.fixed + min(room.budget, room.most)
    nbytes = plan.size["nbytes"] + most - sum(tensor.nbytes for tensor in plan.tensors.values())
    bits = {"bpw": 8 * nbytes / plan.size["params"], "quantised_bpw": 8 * most / room.params}
    rounded = sum(tensor.nbytes for tensor in room.pinned if tensor.method == "rtn")
    planes = most - rounded if plan.calibrated else 0
    size = {**plan.size, "nbytes": nbytes, **bits}
    count = len(plan.tensors) - len(room.pinned)
    later = f"{count} tensors get other formats, chosen for {target_bpw:g} bits per weight together"
    return replace(plan, notes=(*plan.notes, later), size=size, plane_nbytes=planes)


def allocate(
    checkpoint: Checkpoint,
    plan: QuantPlan,
    text_ids: Sequence[Sequence[int]],
    *,
    target_bpw: float,
    kept: Kept,
    counts: Counts = dict,
    threads: int = 1,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> tuple[QuantPlan, dict[str, Any]]:
    """Choose formats for the linears of the blocks to meet a size; other tensors keep theirs.

    `target_bpw`: bits per weight of all tensors of the plan, scales included. `kept` has the
    harms of units that an earlier run found. Returns the new plan and a record: target, size,
    price, and each unit's harms.
    """
    room = room_of(plan, target_bpw)
    units, candidates, sizes = room.units, room.candidates, room.sizes
    harms = harms_of(
        checkpoint, units, candidates, room.base, text_ids, kept, counts, threads, seed, progress
    )
    options = [
        [Option(*each) for each in zip(candidates, row, harms.of[name], strict=True)]
        for name, row in zip(units, sizes, strict=True)
    ]
    taken, price = choose(options, room.budget)
    chosen = [row[place].format for row, place in zip(options, taken, strict=True)]
    result = plan.with_formats(
        checkpoint,
        {
            tensor.name: fmt
            for unit, fmt in zip(units.values(), chosen, strict=True)
            for tensor in unit
        },
    )
    record = {
        "target_bpw": target_bpw,
        "bpw": result.size["quantised_bpw"],
        "largest_bpw": 8 * (room.most + room.fixed) / room.params,
        "signal": harms.signal,
        "tokens": harms.tokens,
        "price": price,
        "units": [
            {
                "unit": name,
                "tensors": [tensor.name for tensor in unit],
                "params": sum(tensor.params for tensor in unit),
                "format": fmt.name,
                "kld_alone": harms.of[name][room.base],
                "candidates": {o.format.name: {"nbytes": o.nbytes, "harm": o.harm} for o in row},
            }
            for (name, unit), row, fmt in zip(units.items(), options, chosen, strict=True)
        ],
    }
    return result, record


def choose(options: Sequence[Sequence[Option]], budget: int) -> tuple[list[int], float]:
    """Choose an option per unit, at most `budget` bytes together, from the smallest upwards.

    The upgrade that saves most harm per byte comes first, so each unit follows its convex hull.
    Returns also the harm per byte of the best upgrade left; 0 if all were taken.
    """
    taken = [min(range(len(row)), key=lambda i: row[i][1:]) for row in options]
    left = budget - sum(row[i].nbytes for row, i in zip(options, taken, strict=True))
    while True:
        best, too_large = (0.0, 0, 0), 0.0
        for u, row in enumerate(options):
            now = row[taken[u]]
            for i, option in enumerate(row):
                more = option.nbytes - now.nbytes
                slope = (now.harm - option.harm) / max(more, 1)
                if more > left:
                    too_large = max(too_large, slope)
                elif slope > best[0]:
                    best = slope, u, i
        if best[0] <= 0:
            return taken, too_large
        _, u, i = best
        left -= options[u][i].nbytes - options[u][taken[u]].nbytes
        taken[u] = i


def allocation_table(record: Mapping[str, Any]) -> list[str]:
    """Return table lines for people: every unit's harm and format, and the sums."""
    lines = [
        f"target {record['target_bpw']:g} bits per weight, reached {record['bpw']:.4f}; "
        f"harm: {record['signal']} of {record['tokens']} tokens",
        f"{'unit':28} {'Mparams':>9} {'KLD alone':>10} {'KLD now':>10}  format",
    ]
    total = 0.0
    for unit in record["units"]:
        now = unit["candidates"][unit["format"]]["harm"]
        total += now
        lines.append(
            f"{unit['unit']:28} {unit['params'] / 1e6:9.3f} {unit['kld_alone']:10.2e} "
            f"{now:10.2e}  {unit['format']}"
        )
    params = sum(unit["params"] for unit in record["units"]) / 1e6
    return [*lines, f"{'together':28} {params:9.3f} {'':10} {total:10.2e}"]


def unit_of(name: str) -> str | None:
    """Return a tensor's unit, "3.qkv", "3.o", "3.gate_up", "3.down", or None."""
    prefix, dot, rest = name.removeprefix("model.layers.").partition(".")
    if not (name.startswith("model.layers.") and dot and prefix.isdigit()):
        return None
    last = rest.removesuffix(".weight").rpartition(".")[2]
    kind = _KINDS.get(last)
    return f"{prefix}.{kind}" if kind else None
