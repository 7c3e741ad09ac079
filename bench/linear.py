r"""Matrix products with quantised weights: every format, at real shapes, beside plain reads.

\b
    python -m bench linear                                    the roofline of Clocher's kernels
    python -m bench linear --engines clocher,torch            beside torch, with the same weights
    python -m bench linear --engines clocher,cached           beside weights decoded ahead to fp32
    python -m bench linear --formats ggml --tokens 1,16       every type of ggml's

For each shape, number of tokens, thread count and format, the engines and a loop that only reads
take turns. Each walks several matrices, more than a cache holds, and every byte of the weights is
counted once, as stored. Integer formats get int8 activations, float formats fp32; with several
tokens their products stand beside the rate of byte dot products alone. A result is right if it
agrees with fp64 arithmetic on the decoded weights within what the activations allow. An engine that
cannot run is shown with the reason, never with a number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import click
import numpy as np

from bench.experiment import (
    COUNTS,
    FORMATS,
    PAGES,
    SHAPES,
    TEAM,
    TEAMS,
    NotMeasured,
    Row,
    Subject,
    dot_seconds,
    experiment,
    limit_note,
    of_read,
    over,
    turns,
)
from bench.ops import error
from clocher_kernels.formats import Float, Ternary, parse_format
from clocher_kernels.formats.bsr import INNERS, Bsr
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_kernels.ops import OPS
from clocher_kernels.ops.cases import inputs
from clocher_kernels.ops.contract import Case, has_codes
from clocher_kernels.ops.rewrite import quantize_activations, quantize_for_ternary
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, Listed, whole
from clocher_runtime.quality.statistics import ratio
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader
from cpu_fallback.team.placement import Hints

_FORMATS = (
    "int4_sym_g32_f16,int4_sym_g128_f16,int8_row_f32,int8_g32_f16,mxfp4,ternary,"
    "fp8_e4m3_row_f32,fp8_e4m3_b128_f32,bf16,f16,f32"
)
GGML = ("int4_sym_g32_f16", "int8_g32_f16", "mxfp4", "ternary_f16", *KINDS)  # Q4_0, Q8_0, ..
_SHAPES = "14336x4096,4096x14336,4096x2880,2560x6912"
_SECONDS, _MAX_COPIES, _BYTES = 0.1, 64, 128 << 20
_SPARSE_COPIES, _TOLERANCE = 256, 1e-5
_DENSE = {"f32": "f32", "f16": "f16", "bf16": "bf16", "int8": "int8_row_bf16"}
_DENSE["int4"] = "int4_sym_g32_f16"

SPARSE_ABOUT = """Dense against block-sparse: y = x W^T over sparsities and block shapes.

    python -m bench block_sparse [--blocks 32x32,16x16] [--inner f32]

Dense and sparse run in turns, each over copies of its weight that together exceed every cache. The
break-even density is where the times of the sparse product, taken as a line in the density, meet
that of the dense one.
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """Y = X W^T for X [M, K] and `copies` of W [N, K] in a format."""

    format: str
    n: int
    k: int
    m: int
    copies: int

    @classmethod
    def filling(cls, fmt: str, n: int, k: int, m: int, nbytes: int) -> "Problem":
        """Return a problem whose matrices have about this many bytes."""
        one = parse_format(fmt).nbytes((n, k))
        return cls(fmt, n, k, m, max(1, min(_MAX_COPIES, -(-nbytes // one))))

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.copies * parse_format(self.format).nbytes((self.n, self.k))

    def weights(self) -> list[QuantTensor]:
        """Return the matrices, each in memory of its own."""
        case = Case("", {"M": self.m, "N": self.n, "K": self.k}, {}, {"w": self.format})
        made = inputs(OPS["linear"], case, np.random.default_rng(0))["w"]
        assert isinstance(made, QuantTensor)
        return copies_of(made, self.copies)

    def x(self) -> np.ndarray:
        """Return X, fp32."""
        return np.random.default_rng(1).standard_normal((self.m, self.k), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Subject):
    """An engine; `first` is X W^T of the first matrix, fp32, within relative RMS `tolerance`."""

    first: Callable[[], np.ndarray]
    tolerance: float
    nbytes: int  # of a matrix
    note: str = ""

    def correct(self, exact: np.ndarray) -> bool:
        """Multiply once and compare."""
        self.run()
        return error(self.first(), exact)[0] <= self.tolerance


def copies_of(weight: QuantTensor, count: int) -> list[QuantTensor]:
    """Return tensors with the same values, each in memory of its own."""
    return [
        replace(weight, planes={name: plane.copy() for name, plane in weight.planes.items()})
        for _ in range(count)
    ]


def exact_product(problem: Problem, weights: list[QuantTensor]) -> np.ndarray:
    """Return the product with the first matrix, fp64 [M, N]."""
    return np.asarray(problem.x().astype(np.float64) @ weights[0].stored().T.astype(np.float64))


def clocher(
    problem: Problem, weights: list[QuantTensor], threads: int, codes: bool = True
) -> Engine:
    """Return Clocher's CPU back end; activations are fp32 unless integers want `codes`."""
    buffers = {"x": Buffer((problem.m, problem.k), "f32", "M", "input")}
    calls = []
    op = "bsr_linear" if isinstance(weights[0].format, Bsr) else "linear"
    tolerance, note = 1e-3, ""
    if isinstance(weights[0].format, Ternary):
        tolerance, note = 0.03, "int8 activations"
    tensors = {f"w{i}": weight for i, weight in enumerate(weights)}
    for i in range(len(weights)):
        buffers[f"y{i}"] = Buffer((problem.m, problem.n), "f32", "M", "output")
        calls.append(Call(op, {"x": "x", "w": f"w{i}", "y": f"y{i}"}))
    formats = {name: weight.format for name, weight in tensors.items()}
    plan = Plan(problem.m, 1, buffers, {}, tuple(tensors), tuple(calls))
    plan = quantize_for_ternary(plan, formats)
    if codes and not has_codes(plan.calls[-1]):
        plan = quantize_activations(plan, formats)
        if has_codes(call := plan.calls[-1]):
            tolerance, note = 0.03, f"int8 activations, groups of {call.attrs['group']}"
    # A dynamic team could use fewer threads than the result says.
    executor = CpuExecutor(plan, tensors, threads, hints=Hints(adaptive=False))
    executor.array("x")[...] = problem.x()
    return Engine(
        run=partial(executor.step, problem.m, 1),
        awake=executor.running,
        close=executor.close,
        first=partial(executor.array, "y0"),
        tolerance=tolerance,
        calls=len(weights),
        nbytes=weights[0].nbytes,
        note=note,
    )


def cached(problem: Problem, weights: list[QuantTensor], threads: int) -> Engine:
    """Return Clocher's back end with weights decoded ahead to fp32."""
    count = Problem.filling("f32", problem.n, problem.k, problem.m, problem.nbytes).copies
    decoded = [encode(weight.stored(), parse_format("f32")) for weight in weights[:count]]
    return clocher(replace(problem, format="f32", copies=count), decoded, threads)


def torch_cpu(problem: Problem, weights: list[QuantTensor], threads: int) -> Engine:
    """Return torch's CPU matmul, of bf16 and fp32 weights."""
    try:
        import torch
    except ImportError as error:
        raise NotMeasured(f"torch cannot be imported: {error}") from None
    fmt = weights[0].format
    if not isinstance(fmt, Float) or fmt.dtype not in ("bf16", "f32"):
        raise NotMeasured(f"torch multiplies floats here, not {fmt.name}")
    torch.set_num_threads(threads)
    kind = torch.bfloat16 if fmt.dtype == "bf16" else torch.float32
    values = [torch.from_numpy(weight.planes["data"]).view(kind) for weight in weights]
    x = torch.from_numpy(problem.x()).to(kind)

    def run() -> None:
        with torch.inference_mode():
            for value in values:
                torch.nn.functional.linear(x, value)

    return Engine(
        run=run,
        first=lambda: torch.nn.functional.linear(x, values[0]).float().numpy(),
        tolerance=1e-3 if fmt.dtype == "f32" else 0.03,
        calls=len(values),
        nbytes=weights[0].nbytes,
        note="" if fmt.dtype == "f32" else "activations and results bf16",
    )


ENGINES: Mapping[str, Callable[[Problem, list[QuantTensor], int], Engine]] = {
    "clocher": clocher,
    "cached": cached,
    "torch": torch_cpu,
}
"""Engines by name; the first is compared with the others."""


@experiment(
    "linear",
    __doc__,
    option("--formats", FORMATS, default=_FORMATS),
    option("--shapes", SHAPES, "N x K", default=_SHAPES),
    option("--tokens", COUNTS, "M", default="1"),
    option("--engines", Listed.of(ENGINES), default="clocher"),
    TEAMS,
    option("--mib", COUNT, "per format", default=192),
    option("--pages", click.Choice(PAGES), "of what is read", default="2m"),
    title="matrix products, {isa}",
    rounds=11,
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for each shape, number of tokens, thread count, format and engine."""
    reader = Reader(asked.pages, asked.mib << 20)
    formats = GGML if "ggml" in asked.formats else asked.formats
    for (n, k), m, count, name in product(asked.shapes, asked.tokens, asked.threads, formats):
        problem = Problem.filling(name, n, k, m, asked.mib << 20)
        about = {"format": name, "N": n, "K": k, "M": m, "threads": count, "isa": CURRENT.name}
        rows = _compared(problem, asked.engines, count, reader, asked.rounds)
        yield from ({"op": "linear", **about, "engine": e, **row} for e, row in rows.items())


def _compared(
    problem: Problem, names: tuple[str, ...], threads: int, reader: Reader, rounds: int
) -> dict[str, Row]:
    weights = problem.weights()
    exact = exact_product(problem, weights)
    made: dict[str, Engine] = {}
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        for name in names:
            try:
                made[name] = stack.enter_context(closing(ENGINES[name](problem, weights, threads)))
                rows[name] = {"correct": made[name].correct(exact)}
            except NotMeasured as reason:
                rows[name] = {"note": f"not measured: {reason}"}
        runs = {name: partial(engine.seconds, _SECONDS) for name, engine in made.items()}
        if problem.m > 1:
            runs["dots"] = partial(dot_seconds, threads, _SECONDS)
        took = turns({**runs, "read": partial(reader.gbps, threads, _SECONDS)}, rounds)
    for name, engine in made.items():
        rows[name] |= shares(engine, took[name], took["read"])
        if problem.m > 1 and "int8" in engine.note:
            count = problem.m * problem.n * problem.k / 1e9
            share = ratio([count * s for s in took["dots"]], took[name])
            rows[name]["pct_of_dots"] = 100 * share.value
        if name != names[0] and names[0] in made:
            rows[name] |= over(took[name], took[names[0]])
    return rows


def shares(engine: Engine, took: list[float], reads: list[float]) -> Row:
    """Return the fields of an engine beside the read loop."""
    row = of_read([engine.nbytes / s / 1e9 for s in took], reads)
    notes = filter(None, (engine.note, limit_note(row["pct_of_limit"])))
    return {**row, "us": median(took) * 1e6, "samples": took, "note": "; ".join(notes)}


def sparse_weight(
    shape: tuple[int, int], block: tuple[int, int], inner: str, sparsity: float
) -> QuantTensor:
    """Return a random weight with this share of zero blocks."""
    rng = np.random.default_rng(1)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    kept = np.zeros(grid[0] * grid[1], bool)
    kept[: round(len(kept) * (1 - sparsity))] = True
    mask = np.kron(rng.permutation(kept).reshape(grid), np.ones(block, bool))
    values = rng.standard_normal(shape, dtype=np.float32) * mask[: shape[0], : shape[1]]
    return encode(values, Bsr.for_values(values, block, inner))


def break_even(densities: Sequence[float], times: Sequence[float], dense: float) -> float:
    """Return the density at which sparse takes as long as dense, 0 .. 1."""
    slope, start = np.polyfit(np.asarray(densities), np.asarray(times), 1)
    return float(np.clip((dense - start) / slope, 0, 1)) if slope > 0 else 1.0


def _engine(weight: QuantTensor, tokens: int, threads: int) -> Engine:
    copies = min(_SPARSE_COPIES, -(-_BYTES // weight.nbytes))
    problem = Problem(weight.format.name, *weight.shape, tokens, copies)
    made = clocher(problem, copies_of(weight, copies), threads, codes=False)
    return replace(made, tolerance=_TOLERANCE)


@experiment(
    "block_sparse",
    SPARSE_ABOUT,
    option("--shape", SHAPES, "N x K", default="4096x4096"),
    option("--blocks", SHAPES, default="16x16,32x32,64x64,16x64"),
    option("--inner", click.Choice(INNERS), default="f32"),
    option(
        "--sparsity",
        Listed(lambda text: whole(0, 99, text) / 100, "per cents below 100, such as 0,50,90"),
        default="0,50,70,80,90,95",
    ),
    option("--tokens", COUNT, default=1),
    TEAM,
    title="block-sparse, {n}x{k} {inner}, M={m}, {threads} threads, {isa}",
    rounds=9,
)
def sparse(asked: Any) -> Iterator[Row]:
    """Yield rows for each block shape: the dense matmul, then one for each sparsity."""
    size, inner, tokens, threads = asked.shape[0], asked.inner, asked.tokens, asked.threads
    values = np.random.default_rng(2).standard_normal(size, dtype=np.float32)
    dense = encode(values, parse_format(_DENSE[inner]))
    reader, problem = Reader("2m", _BYTES), Problem("f32", *size, tokens, 1)
    for block in asked.blocks:
        weights = {part: sparse_weight(size, block, inner, part) for part in asked.sparsity}
        with ExitStack() as stack:
            made = {
                part: stack.enter_context(closing(_engine(weight, tokens, threads)))
                for part, weight in {None: dense, **weights}.items()
            }
            right = {
                part: made[part].correct(exact_product(problem, [weight]))
                for part, weight in weights.items()
            }
            runs = {part: engine.seconds for part, engine in made.items()}
            took = turns({**runs, "read": partial(reader.gbps, threads)}, asked.rounds)
        times = {part: median(took[part]) for part in made}
        even = break_even([1 - part for part in weights], [times[p] for p in weights], times[None])
        for part, engine in made.items():
            yield {
                "op": "linear" if part is None else "bsr_linear",
                "block": f"{block[0]}x{block[1]}",
                "sparsity": part or 0.0,
                "seconds": times[part],
                **shares(engine, took[part], took["read"]),
                "speedup": ratio(took[None], took[part]).value,
                "correct": right.get(part, True),
                **{"n": size[0], "k": size[1], "inner": inner, "m": tokens, "threads": threads},
                "isa": CURRENT.name,
                "break_even": even,
            }
