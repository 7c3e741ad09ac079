"""What the project promised to reach, against what was measured.

Times and tokens per second are promised for a GPU whose copy reaches `ASSUMED_GBS`, and what limits
them is bandwidth: on another GPU the promise grows with its measured copy. Ratios stay.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.gpu.record import Row

_TINYGEMM, _CUBLAS = "torch tinygemm int4", "cuBLAS bf16"
_INT4 = "clocher int4_sym_g128_f16"
_STREAMED = ("int4", "mxfp4", "int8", "fp8")
_LARGE, _MEDIUM = 30e6, 8e6
ASSUMED_GBS = 3000.0


@dataclass(frozen=True)
class Target:
    """A promise.

    Attributes:
        name: what is compared with what.
        must: the value to reach; `at_most` turns the comparison round.
        stretch: the value hoped for.
        unit: "tok/s" and "us" are scaled to the bandwidth of the GPU.
        measure: rows of all parts -> the value, None if it was not measured.
    """

    name: str
    must: float
    stretch: float
    unit: str
    measure: Callable[[Sequence[Row]], float | None]
    at_most: bool = False

    def verdict(self, rows: Sequence[Row], copy_gbs: float) -> Row:
        """Return the target with its measured value and whether it is met.

        Args:
            rows: what was measured.
            copy_gbs: bandwidth of a copy; 0 if it was not measured.
        """
        value = self.measure(rows)
        faster = copy_gbs / ASSUMED_GBS if copy_gbs else 1.0
        factor = {"tok/s": faster, "us": 1 / faster}.get(self.unit, 1.0)
        must = self.must * factor
        row: Row = {"target": self.name, "must": must, "stretch": self.stretch * factor}
        row |= {"unit": self.unit, "measured": value, "scaled_by": factor}
        if value is not None:
            row["met"] = value <= must if self.at_most else value >= must
        return row


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Return every target against the rows of a run on a GPU."""
    good = [row for row in rows if not row.get("dry") and row.get("status", "ok") == "ok"]
    measured = [row for row in good if row.get("us")]
    copy = max((row.get("copy_gbs", 0.0) for row in measured), default=0.0)
    return [target.verdict(measured, copy) for target in TARGETS]


def _where(rows: Sequence[Row], **facts: object) -> Iterator[Row]:
    return (r for r in rows if all(r.get(name) == value for name, value in facts.items()))


def _time(rows: Sequence[Row], **facts: object) -> float | None:
    return next((float(r["us"]) for r in _where(rows, **facts)), None)


def _best(rows: Sequence[Row], *, prefix: str, **facts: object) -> float | None:
    times = [r["us"] for r in _where(rows, **facts) if str(r.get("who", "")).startswith(prefix)]
    return min(times, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _share(low: float, high: float) -> Callable[[Sequence[Row]], float | None]:
    """Return a measure: the worst share of the copy bandwidth among weights of some sizes."""

    def measure(rows: Sequence[Row]) -> float | None:
        return min(
            (
                float(r["share"])
                for r in _where(rows, kind="linear", m=1)
                if str(r.get("format")).startswith(_STREAMED) and low <= r["nbytes"] < high
            ),
            default=None,
        )

    return measure


def _speedup(
    own: str, peer: str, shapes: Sequence[tuple[int, int]] = (), tokens: Sequence[int] = (1,)
) -> Callable[[Sequence[Row]], float | None]:
    """Return a measure: the geometric mean of peer time / own time over shapes."""

    def measure(rows: Sequence[Row]) -> float | None:
        ratios = []
        for row in _where(rows, kind="linear", who=own):
            shape = row["n"], row["k"]
            if row["m"] not in tokens or (shapes and shape not in shapes):
                continue
            if not shapes and row["model"] != "llama-8b":
                continue
            # Both times are of one race: a peer may also run in another, later one.
            theirs = _time(rows, kind="linear", who=peer, item=row["item"])
            if theirs:
                ratios.append(theirs / row["us"])
        return _mean(ratios)

    return measure


def _moe_us(rows: Sequence[Row]) -> float | None:
    return _time(rows, kind="moe", m=1, who="clocher block")


def _moe_speedup(rows: Sequence[Row]) -> float | None:
    ours = _time(rows, kind="moe", m=1, who="clocher block")
    theirs = _time(rows, kind="moe", m=1, who="torch grouped_mm bf16")
    return theirs / ours if ours and theirs else None


def _attention(kv: str) -> Callable[[Sequence[Row]], float | None]:
    def measure(rows: Sequence[Row]) -> float | None:
        ratios = []
        for row in _where(rows, kind="attention", who=f"clocher {kv}", window=0):
            if row["context"] < 8192:
                continue
            same = {name: row[name] for name in ("model", "context", "batch", "window")}
            theirs = _best(rows, prefix="SDPA", kind="attention", **same)
            if theirs:
                ratios.append(theirs / row["us"])
        return _mean(ratios)

    return measure


def _sparse_speedup(rows: Sequence[Row]) -> float | None:
    ratios = []
    for row in _where(rows, kind="sparse", who="clocher bsr"):
        same = {name: row[name] for name in ("n", "k", "m", "block", "density")}
        theirs = _time(rows, kind="sparse", who="torch bsr_dense_addmm", **same)
        if theirs:
            ratios.append(theirs / row["us"])
    return _mean(ratios)


def _break_even(rows: Sequence[Row]) -> float | None:
    """Return the least measured sparsity at which ours is not slower than dense cuBLAS."""
    won = []
    for row in _where(rows, kind="sparse", who="clocher bsr", m=1, block=64):
        same = {name: row[name] for name in ("n", "k", "m", "block", "density")}
        dense = _time(rows, kind="sparse", who="cuBLAS f16", **same)
        if dense and row["us"] <= dense:
            won.append(1 - float(row["density"]))
    return min(won, default=None)


def _tokens_per_s(model: str) -> Callable[[Sequence[Row]], float | None]:
    def measure(rows: Sequence[Row]) -> float | None:
        found = _where(rows, kind="decode", model=model, batch=1, context=1024)
        return next((float(r["tokens_per_s"]) for r in found), None)

    return measure


def _pass_ratio(model: str) -> Callable[[Sequence[Row]], float | None]:
    """Return a measure: the time of a pass of 8 tokens over that of one."""

    def measure(rows: Sequence[Row]) -> float | None:
        found = _where(rows, kind="pass", model=model, m=8)
        return next((float(r["ratio"]) for r in found), None)

    return measure


def _least_gain(rows: Sequence[Row]) -> float | None:
    return min((float(r["gain"]) for r in _where(rows, kind="speculation")), default=None)


_SQUARE, _BIG = ((4096, 4096),), ((8192, 8192),)
TARGETS = (
    Target("worst share of copy, weights >= 30 MB, M = 1", 0.75, 0.85, "", _share(_LARGE, 1e12)),
    Target("worst share of copy, 8-30 MB, M = 1", 0.55, 0.70, "", _share(_MEDIUM, _LARGE)),
    Target("int4 vs cuBLAS bf16, 4096 x 4096", 2.3, 2.8, "x", _speedup(_INT4, _CUBLAS, _SQUARE)),
    Target("int4 vs cuBLAS bf16, 8192 x 8192", 3.0, 3.4, "x", _speedup(_INT4, _CUBLAS, _BIG)),
    Target("int4 vs tinygemm, llama-8b", 1.2, 1.4, "x", _speedup(_INT4, _TINYGEMM)),
    Target("int4 vs gemlite, M = 1", 1.5, 1.8, "x", _speedup(_INT4, "gemlite int4")),
    Target("int4 vs gemlite, M = 2-4", 1.5, 1.8, "x", _speedup(_INT4, "gemlite int4", (), (2, 4))),
    Target("int4 vs gemlite, M = 8", 1.2, 1.8, "x", _speedup(_INT4, "gemlite int4", (), (8,))),
    Target(
        "int4 g64 vs bitsandbytes nf4, M = 1",
        1.3,
        1.6,
        "x",
        _speedup("clocher int4_asym_g64_f16", "bitsandbytes nf4"),
    ),
    Target(
        "int8 vs torch.compile int8, M = 1",
        1.15,
        1.3,
        "x",
        _speedup("clocher int8_row_f32", "torch.compile int8"),
    ),
    Target(
        "fp8 vs scaled_mm, M = 1-8",
        1.15,
        1.3,
        "x",
        _speedup("clocher fp8_e4m3_row_f32", "torch scaled_mm fp8", (), (1, 2, 4, 8)),
    ),
    Target("gpt-oss-20b MoE block, M = 1", 26, 22, "us", _moe_us, at_most=True),
    Target("MoE block vs torch grouped_mm bf16, M = 1", 2.0, 2.0, "x", _moe_speedup),
    Target("block-sparse vs torch bsr_dense_addmm", 1.5, 2.0, "x", _sparse_speedup),
    Target("block-sparse break-even sparsity", 0.30, 0.15, "", _break_even, at_most=True),
    Target("attention fp8 KV vs SDPA bf16, >= 8k", 1.5, 1.8, "x", _attention("e4m3")),
    Target("gpt-oss-20b, batch 1, 1k", 500, 620, "tok/s", _tokens_per_s("gpt-oss-20b")),
    Target(
        "gpt-oss-20b int8 attn+head, batch 1, 1k",
        700,
        850,
        "tok/s",
        _tokens_per_s("gpt-oss-20b int8 attn+head"),
    ),
    Target("llama-8b int4 g128, batch 1, 1k", 400, 460, "tok/s", _tokens_per_s("llama-8b int4")),
    Target("bitnet-2b, batch 1, 1k", 1000, 1400, "tok/s", _tokens_per_s("bitnet-2b")),
    Target("pass of 8 over 1, llama-8b", 1.1, 1.05, "x", _pass_ratio("llama-8b int4"), True),
    Target("pass of 8 over 1, bitnet-2b", 1.2, 1.05, "x", _pass_ratio("bitnet-2b"), True),
    Target("guesses beside none, worst text", 0.98, 1.0, "x", _least_gain),
)
