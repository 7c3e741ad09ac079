"""The checks of a strict measurement, as pure functions of its processes' results."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from bench.record import MARKS, Row, Table, table
from clocher_runtime.quality.statistics import Ratio, median_of_runs, paired_ratio

Launch = Mapping[str, Any]
Status = Literal["pass", "fail", "undecided"]

LINEAR_WITHIN = 0.02
"""Allowed relative difference between 2N tokens and N tokens plus the N after them."""

READ_LOOP_ERROR = 1.05
"""Allowed ratio of a matmul's bandwidth to the read loop's, which is not perfect either."""

MEASURING_COSTS = 0.005
"""Share of a step that the window and the kernel timers may cost."""

_WIDEST, _INDEX = 0.1, 1 << 20


class Check(NamedTuple):
    """A line of the contract; "undecided" where noise or missing data hides the answer."""

    name: str
    status: Status
    detail: str


def checks(launches: Sequence[Launch], why_void: Sequence[str] = ()) -> list[Check]:
    """Return every check; `why_void` lists disturbances of the machine."""
    timed = [linear(launches), within_bandwidth(launches)]
    if why_void:  # disturbed times prove nothing
        timed = [
            Check(c.name, "undecided", f"{c.detail}: the machine was disturbed")
            if c.status == "fail"
            else c
            for c in timed
        ]
    return [
        same_ids(launches),
        one_step_for_each_token(launches),
        nested(launches),
        *timed,
        touched(launches),
        cost_of_measuring(launches),
        Check(
            "undisturbed machine",
            "undecided" if why_void else "pass",
            "; ".join(why_void) or "nothing seen",
        ),
    ]


def same_ids(launches: Sequence[Launch]) -> Check:
    """All generations, timed or not, in all processes, have the same token ids."""
    name = "same token ids as an untimed run"
    wrong = sorted({run for each in launches for run, same in each["same_ids"].items() if not same})
    texts = {each["tokens_sha256"] for each in launches}
    if wrong:
        return Check(name, "fail", f"other ids in the runs: {', '.join(wrong)}")
    if len(texts) > 1:
        return Check(name, "fail", f"{len(launches)} processes generated {len(texts)} texts")
    return Check(name, "pass", f"{len(launches)} processes, SHA-256 {texts.pop()[:12]}")


def one_step_for_each_token(launches: Sequence[Launch]) -> Check:
    """Every token was made by one step of the window, and each step made one."""
    tokens, steps = (sum(each[key] for each in launches) for key in ("tokens", "steps"))
    return Check(
        "one step of the window for each token", _of(tokens == steps), f"{steps} steps, {tokens}"
    )


def nested(launches: Sequence[Launch]) -> Check:
    """Kernel time <= strict window <= end to end."""
    name = "synchronised: kernels ≤ strict ≤ end to end"
    if not all(each["kernels_known"] for each in launches):
        return Check(name, "undecided", "this executor does not show its compiled call")
    good = all(
        each[kind]["kernels_ns"] <= each[kind]["strict_ns"] <= each[kind]["end_to_end_ns"]
        for each in launches
        for kind in ("cold", "warm")
    )
    inner = [pair for each in launches for pairs in each["tests"].values() for pair in pairs]
    good &= all(0 < kernels <= strict for strict, kernels in inner)
    worst = max(1 - kernels / strict for strict, kernels in inner)
    return Check(
        name, _of(good), f"{len(inner)} windows; at most {worst:.1%} of one outside kernels"
    )


def linear(launches: Sequence[Launch]) -> Check:
    """2N tokens take the time of N tokens plus the N after them."""
    tg, after, double = (
        [strict for each in launches for strict, _ in each["tests"][test]]
        for test in ("tg", "after", "double")
    )
    found = paired_ratio(double, [a + b for a, b in zip(tg, after, strict=True)])
    return _judged(
        "time(2N) - time(N) is the time of N tokens",
        found,
        f"time(2N) / (N tokens + the N after them) {found}",
        1 + LINEAR_WITHIN,
        1 - LINEAR_WITHIN,
    )


def within_bandwidth(launches: Sequence[Launch]) -> Check:
    """The implied traffic, less one cache's worth per token, is within the bandwidth."""
    name, first = "bytes a second within the measured bandwidth", launches[0]
    per_token, cache = first["bytes_per_token"] + first["touch_bytes_read"], first["cache_bytes"]
    if per_token <= cache:
        held = f"{per_token / 1e6:.1f} MB a token fit the cache of {cache / 1e6:.1f} MB"
        return Check(name, "pass", f"{held}, so memory sets no limit")
    found = share_of_limit(launches, per_token - cache)
    detail = (
        f"{100 * found.value:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}] of what was "
        f"read beside it, for the {(per_token - cache) / 1e6:.0f} of {per_token / 1e6:.0f} MB a "
        f"token that the cache of {cache / 1e6:.0f} MB cannot hold"
    )
    return _judged(name, found, detail, READ_LOOP_ERROR)


def touched(launches: Sequence[Launch]) -> Check:
    """The work-touch's checksum equals the sum by NumPy."""
    name = "work-touch checksum is the sum by NumPy"
    for sums in (each["checksum"] for each in launches):
        if sums["got"] != sums["expected"]:
            return Check(name, "fail", f"got {sums['got']}, NumPy sums {sums['expected']}")
    walk = "{tokens} tokens of {bytes_per_token} bytes, stride {stride}"
    return Check(name, "pass", walk.format_map(launches[0]["checksum"]))


def touched_sum(files: Sequence[np.ndarray], tokens: int, per_token: int, stride: int) -> int:
    """Return the checksum of a work-touch by its definition in docs/json-line.md."""
    ring = sum(file.size for file in files)
    ends = np.cumsum([file.size for file in files])
    total, reads = 0, -(-per_token // stride)
    for token in range(tokens):
        for first in range(0, reads, _INDEX):
            k = np.arange(first, min(first + _INDEX, reads), dtype=np.int64)
            at = (token * per_token + k * stride) % ring
            which = np.searchsorted(ends, at, side="right")
            for number in np.unique(which):
                own = at[which == number] - (ends[number] - files[number].size)
                total += int(files[number][own].sum(dtype=np.uint64))
    return total % (1 << 64)


def cost_of_measuring(launches: Sequence[Launch]) -> Check:
    """Measuring takes a negligible part of a step; it can only make a speed too low."""
    cost = median(each["measuring_ns"] for each in launches)
    step = median(ns for each in launches for ns in each["token_ns"])
    status: Status = "pass" if cost <= MEASURING_COSTS * step else "undecided"
    detail = f"{cost / 1e3:.2f} of {step / 1e3:.0f} µs a token, {cost / step:.2%}"
    return Check(f"measuring costs at most {MEASURING_COSTS:.1%}", status, detail)


def share_of_limit(launches: Sequence[Launch], nbytes: int) -> Ratio:
    """Return the rate of reading `nbytes` a token over the bandwidth."""
    rates, reads = [], []
    for each in launches:
        per_step = len(each["token_ns"]) / max(len(each["tests"]["tg"]), 1)
        rates += [nbytes * per_step / strict for strict, _ in each["tests"]["tg"]]
        reads += each["read_gbps"]
    return paired_ratio(rates, reads)


def row(launches: Sequence[Launch], test: str, name: str, tokens: int) -> dict[str, Any]:
    """Return a row of test "pp" or "tg" with llama-bench's keys; its interval is over processes."""
    samples = [[strict for strict, _ in each["tests"][test]] for each in launches]
    kernels = [median(kernel for _, kernel in each["tests"][test]) for each in launches]
    alone = [tokens * 1e9 / ns for ns in kernels if ns]
    flat = [ns for each in samples for ns in each]
    speeds = [tokens * 1e9 / ns for ns in flat]
    found = median_of_runs([tokens * 1e9 / median(each) for each in samples])
    return {
        "op": "strict_row",
        "test": name,
        "launches": len(launches),
        "samples_ns": flat,
        "avg_ns": float(np.mean(flat)),
        "stddev_ns": float(np.std(flat)),
        "avg_ts": float(np.mean(speeds)),
        "stddev_ts": float(np.std(speeds)),
        "tok_s": found.value,
        "tok_s_95": found.ends,
        "kernels_tok_s": median(alone) if alone else None,
    }


def tables(rows: Sequence[Row]) -> tuple[Table, Table, Table]:
    """Return the tables of windows, tests and checks."""
    contract, *tests = rows
    windows = [
        {"name": name.replace("_", " "), "cold": cold, "warm": warm, "tokens": contract["tokens"]}
        for name in ("kernels", "strict", "end_to_end")
        for cold, warm in [[contract["windows"][k][f"{name}_s"] for k in ("cold", "warm")]]
    ]
    marked = [{**c, "mark": MARKS.get(c["status"], "?")} for c in contract["checks"]]
    return (
        table("window | cold, s | warm, s", "{name} | {cold:.3f} | {warm:.3f}", windows),
        table(
            "test | tok/s | 95 % | kernels alone | GB/s | read GB/s | % of limit | 95 %",
            "{test} | {tok_s:.4g} | {tok_s_95[0]:.4g} to {tok_s_95[1]:.4g} | {kernels_tok_s:.4g} | "
            "{gbps:.2f} | {read_gbps:.2f} | {pct_of_limit:.0f} | "
            "{pct_of_limit_95[0]:.0f} to {pct_of_limit_95[1]:.0f}",
            tests,
        ),
        table("contract | check | figures", "{mark} | {name} | {detail}", marked),
    )


def _judged(name: str, found: Ratio, detail: str, most: float, least: float = 0.0) -> Check:
    """Return whether an interval lies within bounds, or is too wide to tell."""
    if not found.known:
        return Check(name, "undecided", "needs two rounds")
    if found.low > most or found.high < least:
        return Check(name, "fail", detail)
    beyond = found.high > most or found.low < least
    if found.high - found.low > 2 * _WIDEST and (beyond or least):
        return Check(name, "undecided", f"{detail}: too noisy")
    return Check(name, "pass", detail)


def _of(good: bool) -> Status:
    return "pass" if good else "fail"
