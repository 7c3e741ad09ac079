"""The checks of a strict measurement, as pure functions of its processes' results."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

import numpy as np

from bench.record import Row
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.speed import Case
from clocher_runtime.quality.statistics import Ratio, median_of_runs, paired_ratio
from clocher_runtime.subcommands.bench_measure import READ_LOOP_ERROR, speed

Launch = Mapping[str, Any]
Status = Literal["pass", "fail", "undecided"]
Verdict = tuple[Status, str]
"""A status, "undecided" where noise hides the answer, and the figures."""

LINEAR_WITHIN = 0.02
"""Allowed relative difference between 2N tokens and N tokens plus the N after them."""

_WIDEST, _INDEX = 0.1, 1 << 20


def same_ids(launches: Sequence[Launch]) -> Verdict:
    """All generations, timed or not, in all processes, have the same token ids."""
    wrong = sorted({run for each in launches for run, same in each["same_ids"].items() if not same})
    texts = {each["tokens_sha256"] for each in launches}
    if wrong:
        return "fail", f"other ids in the runs: {', '.join(wrong)}"
    if len(texts) > 1:
        return "fail", f"{len(launches)} processes generated {len(texts)} texts"
    return "pass", f"{len(launches)} processes, SHA-256 {texts.pop()[:12]}"


def one_step_for_each_token(launches: Sequence[Launch]) -> Verdict:
    """Every token was made by one step of the window, and each step made one."""
    tokens, steps = (sum(each[key] for each in launches) for key in ("tokens", "steps"))
    return _of(tokens == steps), f"{steps} steps, {tokens}"


def nested(launches: Sequence[Launch]) -> Verdict:
    """Kernel time <= strict window <= end to end."""
    good = all(
        each[kind]["kernels_ns"] <= each[kind]["strict_ns"] <= each[kind]["end_to_end_ns"]
        for each in launches
        for kind in ("cold", "warm")
    )
    inner = [pair for each in launches for pairs in each["tests"].values() for pair in pairs]
    good &= all(0 < kernels <= strict for strict, kernels in inner)
    worst = max(1 - kernels / strict for strict, kernels in inner)
    return _of(good), f"{len(inner)} windows; at most {worst:.1%} of one outside kernels"


def linear(launches: Sequence[Launch]) -> Verdict:
    """2N tokens take the time of N tokens plus the N after them."""
    tg, after, double = (
        [strict for each in launches for strict, _ in each["tests"][test]]
        for test in ("tg", "after", "double")
    )
    found = paired_ratio(double, [a + b for a, b in zip(tg, after, strict=True)])
    detail = f"time(2N) / (N tokens + the N after them) {found}"
    return _judged(found, detail, 1 + LINEAR_WITHIN, 1 - LINEAR_WITHIN)


def within_bandwidth(launches: Sequence[Launch]) -> Verdict:
    """The implied traffic, less one cache's worth per token, is within the bandwidth."""
    first = launches[0]
    per_token, cache = first["bytes_per_token"] + first["touch_bytes_read"], first["cache_bytes"]
    if per_token <= cache:
        held = f"{per_token / 1e6:.1f} MB a token fit the cache of {cache / 1e6:.1f} MB"
        return "pass", f"{held}, so memory sets no limit"
    found = share_of_limit(launches, per_token - cache)
    detail = (
        f"{100 * found.value:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}] of what was "
        f"read beside it, for the {(per_token - cache) / 1e6:.0f} of {per_token / 1e6:.0f} MB a "
        f"token that the cache of {cache / 1e6:.0f} MB cannot hold"
    )
    return _judged(found, detail, READ_LOOP_ERROR)


def touched(launches: Sequence[Launch]) -> Verdict:
    """The work-touch read every byte that it should: its checksum is the sum by NumPy."""
    for sums in (each["checksum"] for each in launches):
        if sums["got"] != sums["expected"]:
            return "fail", f"got {sums['got']}, expected {sums['expected']}"
    walk = "{tokens} tokens of {bytes_per_token} bytes, stride {stride}"
    return "pass", walk.format_map(launches[0]["checksum"])


def touched_sum(files: Sequence[np.ndarray], tokens: int, per_token: int, stride: int) -> int:
    """Return the checksum of a work-touch by its definition in docs/json-line.md."""
    ends = np.cumsum([file.size for file in files])
    total, reads = 0, -(-per_token // stride)
    for token in range(tokens):
        for first in range(0, reads, _INDEX):
            k = np.arange(first, min(first + _INDEX, reads), dtype=np.int64)
            at = (token * per_token + k * stride) % ends[-1]
            which = np.searchsorted(ends, at, side="right")
            for number in np.unique(which):
                own = at[which == number] - (ends[number] - files[number].size)
                total += int(files[number][own].sum(dtype=np.uint64))
    return total % (1 << 64)


CHECKS: Mapping[str, Callable[[Sequence[Launch]], Verdict]] = {
    "same token ids as an untimed run": same_ids,
    "one step of the window for each token": one_step_for_each_token,
    "synchronised: kernels ≤ strict ≤ end to end": nested,
    "time(2N) - time(N) is the time of N tokens": linear,
    "bytes a second within the measured bandwidth": within_bandwidth,
    "work-touch checksum is the sum by NumPy": touched,
}
_TIMED = (linear, within_bandwidth)


def checks(launches: Sequence[Launch], why_void: Sequence[str] = ()) -> list[Row]:
    """Return name, status and detail of every check; `why_void` lists disturbances."""
    found: dict[str, Verdict] = {}
    for name, judge in CHECKS.items():
        status, detail = judge(launches)
        if why_void and judge in _TIMED and status == "fail":  # disturbed times prove nothing
            status, detail = "undecided", f"{detail}: the machine was disturbed"
        found[name] = status, detail
    quiet: Status = "undecided" if why_void else "pass"
    found["undisturbed machine"] = quiet, "; ".join(why_void) or "nothing seen"
    return [{"name": name, "status": s, "detail": detail} for name, (s, detail) in found.items()]


def verdict(found: Sequence[Row]) -> ExitCode:
    """Return the exit code for some checks."""
    statuses = {check["status"] for check in found}
    if "fail" in statuses:
        return ExitCode.MISMATCH
    return ExitCode.UNDECIDED if "undecided" in statuses else ExitCode.OK


def share_of_limit(launches: Sequence[Launch], nbytes: int) -> Ratio:
    """Return the rate of reading `nbytes` a token over the bandwidth."""
    rates, reads = [], []
    for each in launches:
        per_step = len(each["token_ns"]) / max(len(each["tests"]["tg"]), 1)
        rates += [nbytes * per_step / strict for strict, _ in each["tests"]["tg"]]
        reads += each["read_gbps"]
    return paired_ratio(rates, reads)


def row(launches: Sequence[Launch], test: str, case: Case) -> Row:
    """Return a row of test "pp" or "tg" with llama-bench's keys; its interval is over processes."""
    tokens, runs = case.prompt + case.tokens, [each["tests"][test] for each in launches]
    medians = [[median(ns) for ns in zip(*each, strict=True)] for each in runs]
    found = median_of_runs([tokens * 1e9 / strict for strict, _ in medians])
    return {
        "op": "strict_row",
        "launches": len(launches),
        **speed(case, [strict for each in runs for strict, _ in each]),
        "tok_s": found.value,
        "tok_s_95": found.ends,
        "kernels_tok_s": median(tokens * 1e9 / kernels for _, kernels in medians),
    }


def _judged(found: Ratio, detail: str, most: float, least: float = 0.0) -> Verdict:
    """Return whether an interval lies within bounds, or is too wide to tell."""
    if not found.known:
        return "undecided", "needs two rounds"
    if found.low > most or found.high < least:
        return "fail", detail
    beyond = found.high > most or found.low < least
    if found.high - found.low > 2 * _WIDEST and (beyond or least):
        return "undecided", f"{detail}: too noisy"
    return "pass", detail


def _of(good: bool) -> Status:
    return "pass" if good else "fail"
