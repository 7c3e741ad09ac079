"""What has to hold of a strict measurement: pure functions of what its processes measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np

from clocher_runtime.quality.statistics import Ratio, median_of_runs, paired_ratio

Launch = Mapping[str, Any]
Status = Literal["pass", "fail", "undecided"]

LINEAR_WITHIN = 0.02
"""Share by which 2N tokens may differ from N tokens and the N after them."""

READ_LOOP_ERROR = 1.05
"""A product may draw so much more than the read loop, which is not perfect either."""

MEASURING_COSTS = 0.005
"""Share of a step that the window and the watch of the kernels may cost."""

_WIDEST = 0.1


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the contract.

    Attributes:
        name: what must hold.
        status: "undecided" where the noise, or what is not known, lets nobody say.
        detail: the figures behind it.
    """

    name: str
    status: Status
    detail: str

    def document(self) -> dict[str, str]:
        """Return it for a result file."""
        return asdict(self)


def checks(launches: Sequence[Launch], why_void: Sequence[str] = ()) -> list[Check]:
    """Return every check.

    Args:
        launches: what `launch.measure` returned, one for each process.
        why_void: what disturbed the machine meanwhile.
    """
    timed = [linear(launches), within_bandwidth(launches)]
    if why_void:
        timed = [_doubted(check) for check in timed]
    return [
        same_ids(launches),
        one_step_for_each_token(launches),
        nested(launches),
        *timed,
        touched(launches),
        cost_of_measuring(launches),
        undisturbed(why_void),
    ]


def same_ids(launches: Sequence[Launch]) -> Check:
    """Timed, untimed, continued and other processes' generations have the same token ids."""
    name = "same token ids as an untimed run"
    wrong = sorted({run for each in launches for run, same in each["same_ids"].items() if not same})
    texts = {each["tokens_sha256"] for each in launches}
    if wrong:
        return Check(name, "fail", f"other ids in the runs: {', '.join(wrong)}")
    if len(texts) > 1:
        return Check(name, "fail", f"{len(launches)} processes generated {len(texts)} texts")
    (text,) = texts
    return Check(name, "pass", f"{len(launches)} processes, SHA-256 {text[:12]}")


def one_step_for_each_token(launches: Sequence[Launch]) -> Check:
    """No token was made outside a step of the window, and no step made none."""
    tokens, steps = (sum(each[key] for each in launches) for key in ("tokens", "steps"))
    good = tokens == steps
    return Check("one step of the window for each token", _of(good), f"{steps} steps, {tokens}")


def nested(launches: Sequence[Launch]) -> Check:
    """Kernels take no longer than the strict window, which takes no longer than end to end."""
    name = "synchronised: kernels ≤ strict ≤ end to end"
    if not all(each["kernels_known"] for each in launches):
        return Check(name, "undecided", "this executor does not show its compiled call")
    inner, worst = 0, 0.0
    good = True
    for each in launches:
        for window in (each["cold"], each["warm"]):
            good &= window["kernels_ns"] <= window["strict_ns"] <= window["end_to_end_ns"]
        for strict, kernels in (pair for pairs in each["tests"].values() for pair in pairs):
            good &= 0 < kernels <= strict
            inner += 1
            worst = max(worst, 1 - kernels / strict)
    return Check(name, _of(good), f"{inner} windows; at most {worst:.1%} of one outside kernels")


def linear(launches: Sequence[Launch]) -> Check:
    """2N tokens take the time of N tokens and of the N after them."""
    name = "time(2N) - time(N) is the time of N tokens"
    parts = {
        test: [strict for each in launches for strict, _ in each["tests"][test]]
        for test in ("tg", "after", "double")
    }
    both = [a + b for a, b in zip(parts["tg"], parts["after"], strict=True)]
    found = paired_ratio(parts["double"], both)
    if not found.known:
        return Check(name, "undecided", "needs two rounds")
    detail = f"time(2N) / (N tokens + the N after them) {found}"
    if found.low > 1 + LINEAR_WITHIN or found.high < 1 - LINEAR_WITHIN:
        return Check(name, "fail", detail)
    if found.high - found.low > 2 * _WIDEST:
        return Check(name, "undecided", f"{detail}: too noisy")
    return Check(name, "pass", detail)


def within_bandwidth(launches: Sequence[Launch]) -> Check:
    """What memory must have delivered is no more than it can.

    Of what a token reads, at most one cache's worth can still lie there from the token before.
    """
    name = "bytes a second within the measured bandwidth"
    first = launches[0]
    per_token = first["bytes_per_token"] + first["touch_bytes_read"]
    cache = first["cache_bytes"]
    beyond = per_token - cache
    if beyond <= 0:
        held = f"{per_token / 1e6:.1f} MB a token fit the cache of {cache / 1e6:.1f} MB"
        return Check(name, "pass", f"{held}, so memory sets no limit")
    found = share_of_limit(launches, beyond)
    if not found.known:
        return Check(name, "undecided", "needs two rounds")
    detail = (
        f"{_percent(found)} of what was read beside it, for the {beyond / 1e6:.0f} of "
        f"{per_token / 1e6:.0f} MB a token that the cache of {cache / 1e6:.0f} MB cannot hold"
    )
    if found.low > READ_LOOP_ERROR:
        return Check(name, "fail", detail)
    if found.high > READ_LOOP_ERROR and found.high - found.low > 2 * _WIDEST:
        return Check(name, "undecided", f"{detail}: too noisy")
    return Check(name, "pass", detail)


def touched(launches: Sequence[Launch]) -> Check:
    """The work-touch read the bytes that it says: its checksum is the sum by NumPy."""
    name = "work-touch checksum is the sum by NumPy"
    for each in launches:
        sums = each["checksum"]
        if sums["got"] != sums["expected"]:
            detail = f"got {sums['got']}, NumPy sums {sums['expected']}"
            return Check(name, "fail", detail)
    sums = launches[0]["checksum"]
    walk = f"{sums['tokens']} tokens of {sums['bytes_per_token']} bytes, stride {sums['stride']}"
    return Check(name, "pass", walk)


def cost_of_measuring(launches: Sequence[Launch]) -> Check:
    """The window and the watch of the kernels take a negligible part of a step.

    More of it does not make a speed wrong, only lower than it is.
    """
    cost = median(each["measuring_ns"] for each in launches)
    step = median(ns for each in launches for ns in each["token_ns"])
    status: Status = "pass" if cost <= MEASURING_COSTS * step else "undecided"
    detail = f"{cost / 1e3:.2f} of {step / 1e3:.0f} µs a token, {cost / step:.2%}"
    return Check(f"measuring costs at most {MEASURING_COSTS:.1%}", status, detail)


def undisturbed(why_void: Sequence[str]) -> Check:
    """Nothing else took the machine."""
    name = "undisturbed machine"
    return Check(name, "undecided" if why_void else "pass", "; ".join(why_void) or "nothing seen")


def share_of_limit(launches: Sequence[Launch], nbytes: int) -> Ratio:
    """Return the rate of reading so many bytes a token over the bandwidth."""
    rates, reads = [], []
    for each in launches:
        per_step = len(each["token_ns"]) / max(len(each["tests"]["tg"]), 1)
        rates += [nbytes * per_step / strict for strict, _ in each["tests"]["tg"]]
        reads += each["read_gbps"]
    return paired_ratio(rates, reads)


def row(launches: Sequence[Launch], test: str, name: str, tokens: int) -> dict[str, Any]:
    """Return a result row of one test, its keys named as llama-bench names them.

    The unit of the interval is the process: the median of its rounds.

    Args:
        launches: one for each process.
        test: "pp" or "tg".
        name: what llama-bench calls it.
        tokens: that each run of it made or read.
    """
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
        "median_ns": float(median(flat)),
        "avg_ts": float(np.mean(speeds)),
        "stddev_ts": float(np.std(speeds)),
        "tok_s": found.value,
        "tok_s_95": found.ends,
        "kernels_tok_s": median(alone) if alone else None,
    }


def percentiles_us(values: Sequence[int]) -> list[float]:
    """Return the 0th to the 100th percentile of times, ns -> us."""
    return [float(v) / 1e3 for v in np.percentile(np.asarray(values), range(101))]


def _doubted(check: Check) -> Check:
    """Return what a check that compares times says where others took the machine."""
    if check.status != "fail":
        return check
    return replace(check, status="undecided", detail=f"{check.detail}: the machine was disturbed")


def _percent(found: Ratio) -> str:
    return f"{100 * found.value:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def _of(good: bool) -> Status:
    return "pass" if good else "fail"
